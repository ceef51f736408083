"""Is a model that rests on disk exact, within all three budgets, and whole after whatever happens?"""

import copy
import mmap
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import headrace
from headrace.memory.arena import Arena
from headrace.memory.disk import DirectFile
from headrace.memory.ledger import Ledger, Tier
from headrace.runtime.lanes import open_lanes
from headrace.weights.meter import Meter
from headrace.weights.movement.residency import Residency
from headrace.weights.rest.placement import Placement
from headrace.weights.rest.tiers import DiskGradients, Tiers
from tests.support.compare import Outcome, assert_same, assert_same_gradients, assert_same_models, assert_same_weights
from tests.support.held import weight_bytes
from tests.support.loops import adamw, loss_of, steps
from tests.support.models import Decoder, large_decoder, linears, seeded
from tests.support.nursery import Nursery

pytestmark = pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O

HOST = "256KiB"  # more than half of the weights


def offload(model: nn.Module, device: torch.device, disk: Path, **options: Any) -> headrace.Offloaded:
    options.setdefault("device_memory", weight_bytes(model) // 3)
    return headrace.offload(model, device=device, host_memory=HOST, disk=disk, **options)


def train(
    model: nn.Module, tokens: torch.Tensor, *, count: int = 5, micro_batches: int = 1, clips: bool = False
) -> Outcome:
    """Losses, gradients of the last step, parameters and optimizer state."""
    optimizer = adamw(model.parameters())
    batches = [(tokens + step + batch) % 128 for step in range(count) for batch in range(micro_batches)]
    how: dict[str, Any] = {"micro_batches": micro_batches, "clip": 0.1 if clips else None}
    losses = steps(model, optimizer, batches, loss_of, keep_gradients=True, **how)
    return Outcome(losses).read_gradients(model).read(model, optimizer)


def assert_streamed(handle: headrace.Offloaded, model: nn.Module) -> None:
    """Weights came from disk again and again, and every budget was kept."""
    stats = handle.stats()
    assert stats.fetch_bytes > weight_bytes(model)
    assert stats.disk_bytes > weight_bytes(model) // 2
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.host_peak_bytes <= 256 << 10


@pytest.mark.core(micro_batches=2)
@pytest.mark.parametrize(("micro_batches", "clips"), [(1, False), (2, False), (1, True)])
def test_training_is_exact(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, micro_batches: int, clips: bool
):
    how: dict[str, Any] = {"micro_batches": micro_batches, "clips": clips}
    plain = train(large_decoder().to(compute_device), tokens.to(compute_device), **how)
    model = large_decoder()
    with offload(model, compute_device, tmp_path) as handle:
        assert_same(train(model, tokens, **how), plain)
        assert_streamed(handle, model)
        assert handle.stats().spill_bytes > 5 * weight_bytes(model)  # weights of five steps, and gradients


def test_gradients_beside_those_of_a_hook_go_to_disk_where_the_host_is_full(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path
):
    """A hook sees what this backward computed alone, so what was there before lies beside it."""

    def doubled(gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    def run(model: nn.Module, tokens: torch.Tensor) -> list[torch.Tensor | None]:
        for parameter in model.parameters():
            parameter.register_hook(doubled)
        for batch in range(3):
            loss_of(model, (tokens + batch) % 128).backward()
        return [None if p.grad is None else p.grad.cpu() for p in model.parameters()]

    plain, model = run(large_decoder().to(compute_device), tokens.to(compute_device)), large_decoder()
    with offload(model, compute_device, tmp_path) as handle:
        ours = run(model, tokens)
        assert_same(ours, plain)
        assert handle.stats().host_peak_bytes <= 256 << 10


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_exact(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, reentrant: bool
):
    checkpointing = "reentrant" if reentrant else "non-reentrant"
    plain = large_decoder(checkpointing=checkpointing).to(compute_device)
    expected = train(plain, tokens.to(compute_device))
    model = large_decoder(checkpointing=checkpointing)
    with offload(model, compute_device, tmp_path) as handle:
        assert_same(train(model, tokens), expected)
        assert_streamed(handle, model)


def test_inference_is_exact_and_reads_what_the_plan_says(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path
):
    plain = large_decoder()
    model = copy.deepcopy(plain).requires_grad_(False)
    with offload(model, compute_device, tmp_path) as handle, torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(tokens).cpu(), plain.to(compute_device)(tokens.to(compute_device)).cpu())
        assert_streamed(handle, model)
        handle.reset_stats()
        for _ in range(3):
            model(tokens)
        handle.synchronize()
        stats = handle.stats()
        on_disk = [block for block in handle.settled_blocks("a look at blocks") if block.is_fetched]
        assert on_disk
        assert stats.spill_bytes == 0  # nothing changed
        # Each block from disk once a pass at most; one more of each may be on its way for the next.
        assert stats.fetch_bytes <= 4 * sum(block.nbytes for block in on_disk)


@pytest.mark.core(param_dtype=torch.bfloat16)
@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float64])
def test_weights_that_travel_in_another_dtype(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, param_dtype: torch.dtype
):
    model, other = large_decoder(), large_decoder()
    in_ram = headrace.offload(other, device=compute_device, device_memory=weight_bytes(model), param_dtype=param_dtype)
    expected = train(other, tokens)
    in_ram.remove()
    with offload(model, compute_device, tmp_path, param_dtype=param_dtype, device_memory=weight_bytes(model)) as handle:
        assert_same(train(model, tokens), expected)
        assert handle.stats().fetch_bytes > 0


def _copy_through_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


def _point_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value.clone()


def _copy_in_place(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)


@pytest.mark.parametrize("write", [_copy_through_data, _point_data, _copy_in_place])
def test_writes_are_seen(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    write: Callable[[nn.Parameter, torch.Tensor], None],
):
    plain, model = large_decoder().requires_grad_(False), large_decoder().requires_grad_(False)
    with offload(model, compute_device, tmp_path), torch.no_grad():
        for number in range(4):
            for each in (plain, model):
                for parameter in each.parameters():
                    write(parameter, parameter.detach() * (1.5 - number / 4))
            plain.to(compute_device)
            assert torch.equal(model(tokens).cpu(), plain(tokens.to(compute_device)).cpu())
            plain.to("cpu")
            assert_same(model.parameters(), plain.parameters())


def test_copies_of_the_model_are_whole(compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path):
    plain, model = large_decoder(), large_decoder()
    handle = offload(model, compute_device, tmp_path)
    loss_of(model, tokens).backward()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same(copied.parameters(), plain.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    assert torch.equal(model(tokens).cpu(), plain.to(compute_device)(tokens.to(compute_device)).cpu())
    handle.remove()
    assert list(tmp_path.iterdir()) == []
    assert_same(model.parameters(), plain.to("cpu").parameters())
    assert torch.equal(model(tokens), plain(tokens))  # an ordinary model, over files that have no name any more


def test_a_read_that_fails_reaches_the_caller_and_the_next_pass_is_right(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, model = large_decoder(), large_decoder()
    expected = train(plain.to(compute_device), tokens.to(compute_device), count=3)
    read = DirectFile.read
    for number in (0, 3, 7, 12):
        calls = 0

        def fail_once(
            self: DirectFile, address: int, nbytes: int, offset: int, what: str, number: int = number
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == number + 1:
                raise headrace.DiskError(5, f"{what}: 4096 bytes at offset 0 could not be read")
            read(self, address, nbytes, offset, what)

        model = large_decoder()
        with offload(model, compute_device, tmp_path):
            with monkeypatch.context() as patch:
                patch.setattr(DirectFile, "read", fail_once)
                with pytest.raises(headrace.DiskError, match="could not be read"):
                    train(model, tokens * 0, count=3)
            model.load_state_dict(large_decoder().state_dict())
            model.zero_grad()
            assert_same(train(model, tokens, count=3), expected)


def test_reads_ahead_that_fail_are_told_once(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A pass that is over has begun to load the weights of the next one. Nobody but `synchronize` hears of those."""
    read, drive_fails = DirectFile.read, False

    def may_fail(self: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        if drive_fails:
            raise headrace.DiskError(5, f"{what}: 4096 bytes at offset 0 could not be read")
        read(self, address, nbytes, offset, what)

    def the_drive_fails(*_: Any) -> None:
        nonlocal drive_fails
        drive_fails = True

    monkeypatch.setattr(DirectFile, "read", may_fail)
    plain, model = large_decoder().to(compute_device), large_decoder()
    tokens = tokens.to(compute_device)
    with offload(model, compute_device, tmp_path) as handle, torch.no_grad():
        told = 0
        for _ in range(50):  # whether a pass loads ahead depends on its plan
            assert torch.equal(model(tokens), plain(tokens))
            with model.head.register_forward_pre_hook(the_drive_fails):
                assert torch.equal(model(tokens), plain(tokens))
            try:
                handle.synchronize()
            except headrace.DiskError:
                told += 1
            drive_fails = False
            handle.synchronize()
            model.load_state_dict(plain.state_dict())
            if told == 3:
                break
        assert told == 3
        assert torch.equal(model(tokens), plain(tokens))
        assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_a_model_whose_disk_fails_can_be_let_go_of(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(_file: DirectFile, address: int, nbytes: int, offset: int, what: str) -> None:
        raise headrace.DiskError(5, f"{what}: 4096 bytes at offset 0 could not be read")

    model, plain = large_decoder(), large_decoder()
    handle = offload(model, compute_device, tmp_path)
    with torch.no_grad():
        for _ in range(2):
            model(tokens)
        monkeypatch.setattr(DirectFile, "read", fail)
        for _ in range(2):
            with pytest.raises(headrace.DiskError, match="could not be read"):
                model(tokens)
    handle.remove()
    assert_same(model.parameters(), plain.parameters())
    assert torch.equal(model(tokens), plain(tokens))


ENDING = """
import sys, torch
import emulator.emu
import headrace
from headrace.planning import search
from tests.support.models import Decoder
search.TRIALS = 20
model = Decoder(layers=6, width=64, vocabulary=128)
budgets = {"device_memory": "140KiB", "host_memory": "256KiB", "disk": sys.argv[2]}
handle = headrace.offload(model, device=sys.argv[1], **budgets)
with torch.no_grad():
    for _ in range(3):
        model(torch.zeros(1, 4, dtype=torch.int64))
model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward()
assert handle.stats().fetch_bytes > 0
"""


@pytest.mark.core(device="emu")
@pytest.mark.parametrize("device", ["cpu", "emu"])
def test_a_process_ends_well_with_blocks_on_their_way(nursery: Nursery, tmp_path: Path, device: str):
    process = nursery.start(ENDING, device, tmp_path)
    assert process.wait() == 0, process.errors
    assert "Error" not in process.errors
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_is_not_taken_for_a_weight_of_the_checkpoint(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, checkpoint_file: Path
):
    """Parameters that `load_state_dict(assign=True)` replaced are gone, and their ids are used again."""
    model = on_meta().requires_grad_(False)
    with headrace.offload(model, device=compute_device, host_memory="16MiB", checkpoint=checkpoint_file):
        with torch.no_grad():
            model(tokens)
            for _ in range(3):
                model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
                model(tokens)
            added = [nn.Linear(64, 64, bias=False) for _ in range(20)]
            for layer in added:
                nn.init.constant_(layer.weight, 7.0)
            model.added = nn.ModuleList(added)
            model(tokens)
        assert all(bool((layer.weight == 7).all()) for layer in added)


def test_gradients_that_are_kept_take_a_bounded_part_of_the_disk(tokens: torch.Tensor, tmp_path: Path):
    model = large_decoder()
    with offload(model, torch.device("cpu"), tmp_path) as handle:
        kept: list[Any] = []
        sizes = []
        for _ in range(6):
            model.zero_grad()
            loss_of(model, tokens).backward()
            kept = [parameter.grad for parameter in model.parameters()]
            sizes.append(handle.stats().disk_bytes)
        assert len(kept) == len(list(model.parameters()))
        assert sizes[2:] == sizes[2:3] * 4  # two sets take turns


def test_an_interrupted_pass_leaves_the_model_whole(compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path):
    expected = train(large_decoder().to(compute_device), tokens.to(compute_device), count=3)
    model = large_decoder()
    with offload(model, compute_device, tmp_path):
        for index in (0, 3, 5):
            for _ in range(2):
                hook = model.layers[index].register_forward_pre_hook(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, tokens).backward()
                hook.remove()
                hook = model.layers[index].up.weight.register_hook(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, tokens).backward()
                hook.remove()
        model.zero_grad()
        assert_same(train(model, tokens, count=3), expected)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_removing_while_blocks_are_on_their_way(compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path):
    plain, model = large_decoder(), large_decoder()
    for _ in range(3):
        handle = offload(model, compute_device, tmp_path)
        with torch.no_grad():
            for _ in range(3):
                model(tokens)
        handle.remove()
    assert_same(model.parameters(), plain.parameters())


def test_a_disk_that_is_not_needed_is_not_used(tokens: torch.Tensor, tmp_path: Path):
    model = large_decoder()
    with headrace.offload(model, device="cpu", host_memory="64MiB", disk=tmp_path / "none") as handle:
        model(tokens)
        assert handle.stats().disk_bytes == 0
    assert not (tmp_path / "none").exists()


def test_too_little_host_memory(tmp_path: Path):
    model = large_decoder()
    with pytest.raises(headrace.BudgetError, match=r"host_memory allows 16 KiB.*or pass a directory"):
        headrace.offload(model, device="cpu", host_memory="16KiB")
    with pytest.raises(headrace.BudgetError, match=r"host_memory leaves .* raise it by"):
        headrace.offload(model, device="cpu", host_memory="16KiB", disk=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        headrace.offload(model, device="cpu", host_memory=HOST, disk=tmp_path / "file")
    with offload(model, torch.device("cpu"), tmp_path), pytest.raises(headrace.StateError, match="another disk store"):
        offload(large_decoder(), torch.device("cpu"), tmp_path)


class Empty(nn.Module):
    """A layer with a parameter of no bytes among its trained ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.none = nn.Parameter(torch.empty(0, 64))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) + self.none.sum(0)


def test_parameters_of_no_bytes_are_trained_with_the_others(compute_device: torch.device, tmp_path: Path):
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*[Empty() for _ in range(6)])

    inputs = torch.ones(2, 64)
    plain, model = make().to(compute_device), make()
    with headrace.offload(
        model, device=compute_device, device_memory="40KiB", host_memory="64KiB", disk=tmp_path
    ) as handle:
        for each in (plain, model):
            for _ in range(2):  # set, then added to
                each(inputs.to(compute_device)).sum().backward()
        assert handle.stats().spill_bytes > weight_bytes(model)  # gradients rest on disk
        assert_same_gradients(model, plain)


def test_gradients_with_less_room_than_whole_pages_rest_on_disk(tmp_path: Path):
    device, ledger = torch.device("cpu"), Ledger(frozenset(), 24 << 10)
    meter = Meter(open_lanes(device), ledger)
    tiers = Tiers(device, ledger, meter, Placement(gradient_bytes=8 << 10), tmp_path)
    ledger.add(Tier.HOST, "weights", 5 << 10)
    memory = tiers.gradient_memory("layers.0", 64)  # a page, and 16 KiB that they pass through
    assert isinstance(memory, DiskGradients)
    ledger.add(Tier.HOST, "weights", -1 << 10)
    assert isinstance(tiers.gradient_memory("layers.1", 64), Arena)
    tiers.close()


@pytest.mark.parametrize("kept", [None, "layers.0.", "layers.1."])
def test_what_a_user_keeps_stays_in_host_memory(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, kept: str | None
):
    """Gradients of weights that were frozen want room: other blocks move to disk, and what is kept is written to."""
    plain, model = large_decoder().requires_grad_(False).to(compute_device), large_decoder().requires_grad_(False)
    tokens, nbytes = tokens.to(compute_device), weight_bytes(model)
    handle = headrace.offload(
        model, device=compute_device, device_memory=nbytes // 3, host_memory=nbytes + (64 << 10), disk=tmp_path
    )
    for each in (plain, model):
        loss_of(each, tokens)
    own = {name: parameter.data for name, parameter in model.named_parameters() if kept and name.startswith(kept)}
    assert handle.stats().disk_bytes == 0
    for each in (plain, model):
        each.layers.requires_grad_(True)
        loss_of(each, tokens).backward()
    assert handle.stats().disk_bytes > nbytes // 4
    assert handle.stats().host_peak_bytes <= nbytes + (64 << 10)
    for name, tensor in own.items():
        assert tensor.data_ptr() == model.get_parameter(name).data_ptr()
        tensor.mul_(0.5)
        plain.get_parameter(name).data.mul_(0.5)
    handle.refresh()
    assert_same_models(model, plain, some_missing=True)
    assert torch.equal(loss_of(model, tokens).cpu(), loss_of(plain, tokens).cpu())


def test_ctrl_c_when_blocks_have_moved_and_cannot_be_fetched_yet(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plain, model = large_decoder().requires_grad_(False).to(compute_device), large_decoder().requires_grad_(False)
    tokens, nbytes = tokens.to(compute_device), weight_bytes(model)
    handle = headrace.offload(
        model, device=compute_device, device_memory=nbytes // 3, host_memory=nbytes + (64 << 10), disk=tmp_path
    )
    loss_of(model, tokens)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for each in (plain, model):
        each.layers.requires_grad_(True)
    with monkeypatch.context() as patch:
        patch.setattr(Residency, "fetch_from", interrupt)
        with pytest.raises(KeyboardInterrupt):
            loss_of(model, tokens)
    with torch.no_grad():
        assert torch.equal(loss_of(model, tokens), loss_of(plain, tokens))
    assert handle.stats().fetch_bytes > 0
    for each in (plain, model):
        loss_of(each, tokens).backward()
    assert_same_gradients(model, plain, some_missing=True)
    assert handle.stats().host_peak_bytes <= nbytes + (64 << 10)


# weights straight from a checkpoint -----------------------------------------------------------------------------------
def on_meta() -> Decoder:
    with torch.device("meta"):
        return Decoder(layers=6, width=64, vocabulary=128)


@pytest.fixture
def checkpoint_file(tmp_path: Path) -> Path:
    """The weights of `large_decoder()`, each tensor at an odd multiple of eight bytes."""
    path = tmp_path / "model.safetensors"
    save_file(
        {name: tensor.contiguous() for name, tensor in large_decoder().state_dict().items()}, path, {"padding": "x" * 5}
    )
    return path


@pytest.mark.parametrize("host_memory", ["256KiB", "16MiB"])
def test_inference_reads_a_checkpoint_in_place(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, checkpoint_file: Path, host_memory: str
):
    plain, model, before = large_decoder(), on_meta(), checkpoint_file.read_bytes()
    handle = headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(plain) // 3,
        host_memory=host_memory,
        checkpoint=checkpoint_file,
    )
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(tokens).cpu(), plain.to(compute_device)(tokens.to(compute_device)).cpu())
    stats = handle.stats()
    assert (stats.fetch_bytes > weight_bytes(plain)) == (host_memory == "256KiB")
    assert stats.disk_bytes == stats.spill_bytes == 0
    assert stats.host_peak_bytes <= headrace.config.parse_bytes(host_memory)
    assert 0 < stats.device_peak_bytes <= stats.device_budget_bytes
    assert_same(model.state_dict().values(), plain.to("cpu").state_dict().values())
    handle.remove()
    assert torch.equal(model(tokens), plain(tokens))
    assert checkpoint_file.read_bytes() == before


def test_trained_weights_leave_the_checkpoint(
    compute_device: torch.device, tokens: torch.Tensor, tmp_path: Path, checkpoint_file: Path
):
    plain = train(large_decoder().to(compute_device), tokens.to(compute_device))
    model, before = on_meta(), checkpoint_file.read_bytes()
    with headrace.offload(
        model,
        device=compute_device,
        device_memory=weight_bytes(model) // 3,
        host_memory="256KiB",
        disk=tmp_path / "spill",
        checkpoint=checkpoint_file,
    ) as handle:
        loss_of(model, tokens)
        assert handle.stats().spill_bytes == 0
        assert_same(train(model, tokens), plain)
        assert_streamed(handle, model)
    assert checkpoint_file.read_bytes() == before


@pytest.mark.parametrize("write", [_copy_through_data, _point_data, _copy_in_place])
def test_writes_to_weights_of_a_checkpoint_are_seen(
    compute_device: torch.device,
    tokens: torch.Tensor,
    tmp_path: Path,
    checkpoint_file: Path,
    write: Callable[[nn.Parameter, torch.Tensor], None],
):
    plain, model = large_decoder().requires_grad_(False), on_meta().requires_grad_(False)
    with (
        offload(model, compute_device, tmp_path / "spill", checkpoint=checkpoint_file, device_memory="200KiB"),
        torch.no_grad(),
    ):
        for number in range(3):
            for each in (plain, model):
                for parameter in each.layers[1:3].parameters():
                    write(parameter, parameter.detach() * (1.5 - number / 4))
            assert torch.equal(model(tokens).cpu(), plain.to(compute_device)(tokens.to(compute_device)).cpu())
            assert_same(model.parameters(), plain.to("cpu").parameters())


def test_a_checkpoint_that_changes_without_a_disk(tokens: torch.Tensor, checkpoint_file: Path):
    model = on_meta()
    with headrace.offload(
        model, device="cpu", device_memory="200KiB", host_memory="256KiB", checkpoint=checkpoint_file
    ):
        with pytest.raises(headrace.BudgetError, match=r"gradients need .* of host memory"):
            model(tokens)
        with torch.no_grad():
            model(tokens)
            with pytest.raises(headrace.BudgetError, match=r"change, or lie in no checkpoint .*pass a directory"):
                _double(model)


def _double(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.mul_(2)


def private_bytes(path: Path) -> int:
    """Memory of this process alone in its mappings of a file: what was written there."""
    found, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if not name.endswith(":"):
            counts = line.endswith(str(path))
        elif counts and name == "Anonymous:":
            found += int(line.split()[1]) << 10
    return found


def _add_in_place(weight: nn.Parameter) -> None:
    weight.add_(0.5)


def _add_by_operator(weight: nn.Parameter) -> None:
    weight += 0.5


def _add_through_data(weight: nn.Parameter) -> None:
    weight.data += 0.5


def _add_to_a_view(weight: nn.Parameter) -> None:
    weight.view(-1).add_(0.5)


@pytest.mark.parametrize("write", [_add_in_place, _add_by_operator, _add_through_data, _add_to_a_view])
def test_writes_to_weights_of_a_checkpoint_take_no_host_memory(
    tmp_path: Path, write: Callable[[nn.Parameter], None]
) -> None:
    """None beside host_memory: of one block while its data is handed out, of what views hide until the next pass."""
    plain, inputs, path = seeded(linears, 8, 256, bias=False), torch.randn(2, 256), tmp_path / "model.safetensors"
    save_file(dict(plain.state_dict()), path)
    with torch.device("meta"):
        model = linears(8, 256, bias=False)
    block_bytes = model[0].weight.nbytes
    settings: dict[str, Any] = {"device_memory": 2 * block_bytes, "host_memory": "512KiB", "disk": tmp_path / "spill"}
    with headrace.offload(model, device="cpu", checkpoint=path, **settings) as handle, torch.no_grad():
        model(inputs)
        assert private_bytes(path) == handle.stats().disk_bytes == 0
        kept, before = model[7].weight.data, model[7].weight.detach().clone()
        for each in (plain, model):
            for layer in each:
                write(layer.weight)
        if write is _add_through_data:
            assert private_bytes(path) <= 2 * block_bytes
        elif write is not _add_to_a_view:
            assert private_bytes(path) == 0
        for _ in range(2):
            assert torch.equal(model(inputs), plain(inputs))
        assert private_bytes(path) <= block_bytes + 8 * mmap.PAGESIZE  # kept, and pages that two weights share
        assert_same_weights(model, plain)
        moved_first = write in (_add_in_place, _add_by_operator)
        assert torch.equal(kept, before if moved_first else plain[7].weight), "what somebody has stays as it is"
        assert handle.stats().host_peak_bytes <= 512 << 10


def test_checkpoints_that_do_not_fit_the_model(tmp_path: Path, checkpoint_file: Path):
    full = large_decoder()
    with pytest.raises(ValueError, match="no parameter of the model is on the meta device"):
        headrace.offload(full, device="cpu", checkpoint=checkpoint_file)
    with torch.device("meta"):
        deeper, wider = Decoder(layers=7, width=64, vocabulary=128), Decoder(layers=6, width=32, vocabulary=128)
    for other, message in (
        (deeper, r"no tensor for parameter 'layers.6"),
        (wider, r"has shape .* and .* in the model"),
    ):
        with pytest.raises(headrace.CheckpointError, match=message):
            headrace.offload(other, device="cpu", checkpoint=checkpoint_file)
        assert all(parameter.is_meta for parameter in other.parameters())
    model = on_meta()
    with pytest.raises(headrace.BudgetError):
        headrace.offload(model, device="cpu", device_memory="1KiB", checkpoint=checkpoint_file)
    assert all(parameter.is_meta for parameter in model.parameters())
    with headrace.offload(model, device="cpu", checkpoint=checkpoint_file):
        assert not any(parameter.is_meta for parameter in model.parameters())
