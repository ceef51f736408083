"""Does a home notice every write that it promises to notice, and are its copies plain parameters?"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import headrace.weights.passes.parameter_access  # noqa: F401  # what uses leaves that are away comes through it
from headrace.errors import LayoutError, StateError
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.autograd import without_overrides
from headrace.runtime.lanes import open_lanes
from headrace.weights.meter import Meter
from headrace.weights.model.home import AwayLeaf, Home
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.model.places import Member, Place
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.leaves import Leaves
from headrace.weights.rest.placement import Placement
from headrace.weights.rest.tiers import Tiers

CPU = torch.device("cpu")


class Waits:
    """An event that counts how often the host waited for it."""

    def __init__(self) -> None:
        self.count = 0

    def synchronize(self) -> None:
        self.count += 1

    def query(self) -> bool:
        return False


def was_written(block: Block) -> bool:
    """Whether a home was written to since the last device copy was made, as far as anybody has looked."""
    return 0 <= block.last_loaded_generation < block.written_generation


def block_of(*parameters: nn.Parameter, ledger: Ledger | None = None, param_dtype: torch.dtype | None = None) -> Block:
    """A block whose places are a list of the parameters."""
    container = list(parameters)
    members = [Member(f"p{index}", one, [Place(container, index)]) for index, one in enumerate(parameters)]
    tiers = Tiers(CPU, ledger or Ledger(), Meter(open_lanes(CPU)), Placement(), None)
    block = Block("block", members, CPU, tiers, param_dtype)
    block.container = container  # type: ignore[attr-defined]
    return block


def loaded(block: Block) -> torch.Tensor:
    """A buffer with what the block's homes hold, made as a load makes it."""
    buffer = torch.zeros(block.nbytes, dtype=torch.uint8)
    block.buffer = buffer
    block.loaded_generation = -1
    block.leaves.point([layout.view(buffer) for layout in block.layouts])
    for destination, source in block.prepare_copies():
        destination.copy_(source.detach())
    return buffer


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0).view(2, 3))


@pytest.fixture
def param(weight: nn.Parameter) -> ManagedParam:
    block = block_of(weight)
    loaded(block)
    assert block.is_current
    block.params[0].block = block  # type: ignore[attr-defined]  # kept alive
    return block.params[0]


def test_the_object_stays_and_moves_into_the_arena(weight: nn.Parameter) -> None:
    ledger, before = Ledger(), id(weight)
    block = block_of(weight, ledger=ledger)
    home = block.params[0].home
    assert id(home) == before
    assert isinstance(weight, Home)
    assert isinstance(weight, nn.Parameter)
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert weight.data_ptr() == block.rest.memory.data_ptr()
    assert ledger.held_bytes(Tier.HOST, "weights") > 0
    block.params[0].release()
    assert type(weight) is nn.Parameter
    assert vars(weight) == {}


@torch.no_grad()
def change_in_place(home: nn.Parameter) -> None:
    home.mul_(2)


def change_through_data(home: nn.Parameter) -> None:
    home.data.mul_(2)


def point_elsewhere(home: nn.Parameter) -> None:
    home.data = torch.zeros(2, 3)


def change_by_copy_to_data(home: nn.Parameter) -> None:
    home.data.copy_(torch.zeros(2, 3))


def change_through_set(home: nn.Parameter) -> None:
    torch.nn.init.zeros_(home)


@pytest.mark.parametrize(
    "change", [change_in_place, change_through_data, point_elsewhere, change_by_copy_to_data, change_through_set]
)
def test_a_write_makes_the_device_copy_stale(param: ManagedParam, change) -> None:
    change(param.home)
    assert not param.block.is_current
    buffer = loaded(param.block)
    assert param.block.is_current
    assert torch.equal(param.layout.view(buffer), param.home.detach())


def test_reading_makes_nothing_stale(param: ManagedParam) -> None:
    home = param.home
    home.detach().sum()
    assert (home.shape, home.dtype, home.device, home.is_leaf) == ((2, 3), torch.float32, CPU, True)
    home.numel(), home.data_ptr(), repr(home), home * 2
    assert param.block.is_current
    assert not was_written(param.block)


def test_the_token_tells_what_autograd_would_notice(param: ManagedParam) -> None:
    """`p.data` writes are stale for the next load, but autograd, too, lets them pass between forward and backward."""
    token = param.token
    change_through_data(param.home)
    assert param.token == token
    change_in_place(param.home)
    assert param.token != token
    assert not param.block.is_current
    assert was_written(param.block)


def test_data_waits_for_copies_that_read_the_home(param: ManagedParam) -> None:
    reads = Waits()
    param.block.last_read = reads
    param.home.detach()
    assert reads.count == 0
    assert param.home.data.shape == (2, 3)
    assert reads.count == 1
    param.home.data = torch.zeros(2, 3)
    assert reads.count == 1  # nothing reads any more


def test_a_home_that_points_elsewhere_is_copied_from_there() -> None:
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    block = block_of(first, second)
    first.data = torch.full((4,), 3.0)
    assert not block.params[0].in_place
    buffer = loaded(block)
    assert block.params[0].layout.view(buffer).tolist() == [3] * 4
    assert block.params[1].layout.view(buffer).tolist() == [0] * 4


def test_only_what_changed_is_copied_into_a_buffer_that_is_there() -> None:
    parameters = [nn.Parameter(torch.zeros(16)) for _ in range(4)]
    block = block_of(*parameters)
    loaded(block)
    change_in_place(parameters[2])
    copies = block.prepare_copies(only_changes=True)
    assert [source.nbytes for _, source in copies] == [64]
    for parameter in parameters[:3]:
        change_in_place(parameter)
    assert [source.nbytes for _, source in block.prepare_copies(only_changes=True)] == [
        block.nbytes
    ]  # one copy for most


def test_a_cast_is_renewed_when_its_home_changes() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 1 / 3]))
    block = block_of(weight, param_dtype=torch.bfloat16)
    param = block.params[0]
    assert param.casts
    assert weight.dtype == torch.float32
    assert torch.equal(param.layout.view(loaded(block)), weight.detach().bfloat16())
    change_in_place(weight)
    assert torch.equal(param.layout.view(loaded(block)), weight.detach().bfloat16())
    assert weight[1] == torch.tensor(1 / 3) * 2  # the home keeps its own precision


def test_a_changed_shape_is_refused(param: ManagedParam) -> None:
    param.home.data = torch.zeros(3, 3)
    with pytest.raises(LayoutError, match=r"'p0' was offloaded with shape \(2, 3\) and now has shape \(3, 3\); call"):
        param.check_shape()


def test_an_absent_leaf_is_nan_of_the_right_shape_and_no_memory(param: ManagedParam) -> None:
    param.block.buffer = None
    param.block.loaded_generation = -1
    param.block.leaves.point(None)
    assert param.leaf.shape == (2, 3)
    with without_overrides():
        assert param.leaf.isnan().all()
        assert param.leaf.untyped_storage().nbytes() == 4
    assert torch.equal(param.leaf, param.home)  # whoever kept it, and uses it
    assert not param.block.is_current


def test_binding_swaps_leaf_and_home(weight: nn.Parameter) -> None:
    block = block_of(weight)
    loaded(block)
    weight.requires_grad_(False)
    block.bind(adopts=True)
    leaf = block.container[0]
    assert leaf is block.params[0].leaf
    assert not leaf.requires_grad  # as its home
    assert torch.equal(leaf, weight)
    block.unbind()
    assert block.container[0] is weight


def test_a_replaced_parameter_is_adopted_and_the_old_one_let_go(weight: nn.Parameter) -> None:
    block = block_of(weight)
    new = nn.Parameter(torch.full((2, 3), 9.0))
    block.container[0] = new
    block.places.adopt_replacements()
    param = block.params[0]
    assert param.home is new
    assert type(weight) is nn.Parameter
    assert new.data_ptr() == param.rest.data_ptr()
    assert param.layout.view(loaded(block)).tolist() == [[9] * 3] * 2
    change_in_place(new)
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]  # whoever still holds the old one keeps its contents


@pytest.mark.parametrize("new", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_a_replacement_of_another_kind_is_refused(weight: nn.Parameter, new: torch.Tensor) -> None:
    block = block_of(weight)
    block.container[0] = nn.Parameter(new)
    with pytest.raises(LayoutError, match=r"parameter 'p0' was offloaded as torch.float32 of shape \(2, 3\).*remove"):
        block.places.adopt_replacements()
    assert block.params[0].home is weight


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_of_a_home_are_plain_parameters(weight: nn.Parameter, how: str) -> None:
    weight.requires_grad_(False)
    weight.tag = "kept by pickle"  # type: ignore[attr-defined]
    plain = nn.Parameter(weight.detach().clone(), requires_grad=False)
    plain.tag = "kept by pickle"  # type: ignore[attr-defined]

    def copied(parameter: nn.Parameter) -> nn.Parameter:
        if how == "deepcopy":
            return copy.deepcopy(parameter)
        if how == "pickle":
            return pickle.loads(pickle.dumps(parameter))
        file = io.BytesIO()
        torch.save(parameter, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    block = block_of(weight, nn.Parameter(torch.zeros(1000)))
    twin, expected = copied(weight), copied(plain)
    assert type(twin) is nn.Parameter
    assert not twin.requires_grad
    assert vars(twin) == vars(expected)
    assert torch.equal(twin, expected)
    assert twin.data_ptr() != weight.data_ptr()
    twin.data.zero_()
    assert weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    del block


def test_it_is_shown_as_a_parameter(weight: nn.Parameter) -> None:
    before = repr(weight)
    block = block_of(weight)
    assert repr(weight) == before
    assert not was_written(block)


def test_two_in_one_deepcopy_are_one_copy(weight: nn.Parameter) -> None:
    block = block_of(weight)
    first, second = copy.deepcopy([weight, weight])
    assert first is second
    assert first is not weight
    del block


def test_parameters_that_shared_a_storage_still_do() -> None:
    storage = torch.zeros(8)
    left, right = nn.Parameter(storage[:5]), nn.Parameter(storage[3:])
    block = block_of(left, right)
    with torch.no_grad():
        left.fill_(4)
    assert right.tolist() == [4, 4, 0, 0, 0]
    assert block.params[1].layout.view(loaded(block)).tolist() == [4, 4, 0, 0, 0]


def test_presence_changes_only_as_its_table_says(weight: nn.Parameter) -> None:
    block = block_of(weight)
    with pytest.raises(StateError, match="block 'block' is ABSENT and cannot become PRESENT"):
        block.becomes(Presence.PRESENT)
    block.becomes(Presence.RESERVED)
    block.becomes(Presence.ARRIVING)
    with pytest.raises(StateError, match="ARRIVING and cannot become ABSENT"):
        block.becomes(Presence.ABSENT)
    with pytest.raises(StateError, match="has no buffer to copy into"):
        block.prepare_copies()


def test_ctrl_c_as_a_block_goes_leaves_none_that_seems_present(monkeypatch: pytest.MonkeyPatch) -> None:
    block = block_of(nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2)))
    for presence in (Presence.RESERVED, Presence.ARRIVING, Presence.PRESENT):
        block.becomes(presence)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Leaves, "set_present", interrupted)
        with pytest.raises(KeyboardInterrupt):
            block.becomes(Presence.ABSENT)
    assert block.presence is Presence.ABSENT
    block.lost()  # as whoever mends it says
    assert all(type(param.leaf) is AwayLeaf for param in block.params)
