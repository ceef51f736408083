"""What the ranks of the tests of `headrace.offload(model, mesh=mesh)` run; see programs.py."""

import contextlib
import copy
import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import headrace
from headrace import Offloaded, RankError, StateError, optim
from headrace.checkpoint.writing import Piece
from headrace.runtime.device_group import DeviceGroup
from headrace.runtime.node import Counters, Node, mapped
from tests.support.compare import assert_same, assert_same_weights

WIDTH, LAYERS = 64, 6
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
BUDGET_BYTES = 3 * LAYER_BYTES + 4096
ONLOAD = "own"  # of every model of a program that is offloaded on several ranks


class Layer(nn.Module):
    """With adapters, experts or recomputation, as asked for."""

    def __init__(self, *, adapters: bool = False, experts: int = 0, recomputes: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 4, bias=False) if adapters else None
        self.up = nn.Linear(4, WIDTH, bias=False) if adapters else None
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.recomputes = recomputes
        if adapters:
            self.linear.requires_grad_(False)

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return checkpoint(partial(self._compute, expert=expert), x, use_reentrant=False)  # type: ignore[no-any-return]
        return self._compute(x, expert)

    def _compute(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        y = self.linear(x)
        if self.down is not None and self.up is not None:
            y = y + self.up(self.down(x))
        if self.experts and expert is not None:
            y = y + self.experts[expert](x)
        return x + y.tanh()


class Model(nn.Module):
    def __init__(self, *, tied: bool = False, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Layer(**settings) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 40, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if settings.get("adapters"):
            self.embedding.requires_grad_(False)
            self.head.requires_grad_(False)

    def forward(self, tokens: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, expert)
        logits = self.head(x)
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(1000 * rank + number))


def expert_of(settings: dict[str, Any], rank: int) -> int | None:
    """Each rank's tokens go to another one; with more experts than ranks nobody uses the last ones."""
    return rank if settings.get("experts") else None


def cpu_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


@contextlib.contextmanager
def offloaded(model: nn.Module, device: str = "cpu", **settings: Any) -> Iterator[Offloaded]:
    if device == "emu":
        from emulator import emu

        emu.reset(allocator="exact", scheduler="random", seed=distributed.get_rank(), one_host_clock=True)
        torch.accelerator.set_device_index(1)  # a rank's own is not the first, where threads make contexts by mistake
    settings = {"device_memory": BUDGET_BYTES, "mesh": cpu_mesh()} | settings
    if settings["mesh"] is not None:
        settings = {"onload": ONLOAD} | settings
    with headrace.offload(model, device=device, **settings) as handle:
        yield handle
    if device == "emu":
        torch.accelerator.synchronize()
        reports = emu.take_reports()
        assert reports == [], reports
        assert set(emu.contexts()) == {1}, emu.contexts()


def gradients_are_those_of_one_process(settings: dict[str, Any], device: str) -> None:
    """One process that takes the ranks' batches one after the other; and DDP, and FSDP2, where the sum is of two."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    activations = settings.pop("activations", False)
    model, single = Model(**settings), Model(**settings)
    with offloaded(model, device, activations=activations) as handle:
        single.to(device)
        for number in range(3):
            model.zero_grad()
            single.zero_grad()
            loss = model(batch(rank, number), expert_of(settings, rank))
            loss.backward()
            losses = [single(batch(one, number).to(device), expert_of(settings, one)) for one in range(world)]
            for one in losses:
                (one / world).backward()
            assert torch.equal(loss.detach(), losses[rank].detach())
            same_gradients(model, single)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= BUDGET_BYTES
        assert stats.onload_bytes > 3 * LAYERS * LAYER_BYTES
        given = sum(parameter.nbytes for parameter in model.parameters() if parameter.grad is not None)
        assert 0 < stats.offload_bytes <= 3 * given  # each gradient leaves once, experts of other ranks do not
    if world == 2 and device == "cpu":
        for other in (ddp, fsdp):
            same_gradients(model, other(settings, number=2))


def steps_are_those_of_one_process(
    kind: dict[str, Any], device: str, name: str, settings: dict[str, Any], dtype: str = "float32"
) -> None:
    """Five steps with clipping: losses, norms and weights, bit for bit; and the ranks hold one state together."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(**kind).to(getattr(torch, dtype)), Model(**kind).to(getattr(torch, dtype))
    given = {"lr": 0.01, "max_grad_norm": 0.05} | settings
    room = {"device_memory": BUDGET_BYTES + (1 << 19)} if settings.get("update") == "device" else {}
    with offloaded(model, device, **room) as handle, offloaded(single, device, mesh=None, **room):
        mine = getattr(optim, name)([p for p in model.parameters() if p.requires_grad], **given)
        theirs = getattr(optim, name)([p for p in single.parameters() if p.requires_grad], **given)
        for number in range(5):
            loss = model(batch(rank, number), expert_of(kind, rank))
            loss.backward()
            losses = []
            for one in range(world):
                losses.append(single(batch(one, number), expert_of(kind, one)))
                (losses[-1] / world).backward()
            assert torch.equal(loss.detach(), losses[rank].detach()), number
            mine.step()
            theirs.step()
            assert mine.last_grad_norm == theirs.last_grad_norm
            mine.zero_grad()
            theirs.zero_grad()
        assert_same_weights(model, single)
        held = torch.tensor([mine.held_bytes()])
        if not kind.get("experts"):  # which have state when they were used
            largest = max(parameter.numel() for parameter in model.parameters())
            assert 0 < int(held) < theirs.held_bytes() / world + 12 * largest
        distributed.all_reduce(held)
        assert int(held) == theirs.held_bytes()
        assert handle.stats().steps == 5
        if name == "AdamW" and dtype == "float32" and not settings:
            assert_same_weights(model, stock(kind))


def what_hooks_and_closures_write_counts() -> None:
    """Weights that a hook of `step()` clamps, on all ranks, are those that the next forward computes with."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()

    def clamping(one: nn.Module) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            for parameter in one.parameters():
                parameter.data.clamp_(-0.05, 0.05)

        return hook

    with offloaded(model):
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))
        mine.register_step_post_hook(clamping(model))
        theirs.register_step_post_hook(clamping(single))
        for number in range(5):
            loss = model(batch(rank, number))
            loss.backward()
            losses = [single(batch(one, number)) for one in range(world)]
            for one in losses:
                (one / world).backward()
            assert torch.equal(loss.detach(), losses[rank].detach()), number
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, single)


def what_layers_write_counts() -> None:
    """An embedding that renormalises its rows writes alike on all ranks; otherwise the next pass is refused."""
    rank = distributed.get_rank()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(40, WIDTH, max_norm=1.0), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))

    model, single = build(), build()
    with offloaded(model):
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))
        for number in range(4):
            for one, optimizer in ((model, mine), (single, theirs)):
                one(batch(0, number)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert_same_weights(model, single)
        model(batch(rank, 5)).square().mean().backward()
        with pytest.raises(StateError, match="block '0' were written"):
            model(batch(rank, 6))


def no_sync_is_forgotten_with_its_gradients() -> None:
    """`zero_grad()` and `p.grad = None` discard what waits to be averaged; so does a backward that raises."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()
    with offloaded(model) as handle:
        for one in range(world):
            (single(batch(one, 1)) / world).backward()
        for discard in (model.zero_grad, optim.AdamW(model.parameters()).zero_grad):
            for to_none in (True, False):
                with handle.no_sync():
                    model(batch(rank, 0)).backward()
                discard(set_to_none=to_none)
                model(batch(rank, 1)).backward()
                same_gradients(model, single)
                model.zero_grad()
        with handle.no_sync():
            model(batch(rank, 0)).backward()
        for parameter in model.parameters():
            parameter.grad = None
        model(batch(rank, 1)).backward()
        same_gradients(model, single)
        model.zero_grad()
        if rank == 0:
            model.layers[3].linear.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
        with pytest.raises(StateError, match="train other parameters than"):
            model(batch(rank, 2))


def what_no_sync_kept_is_averaged_once() -> None:
    """Also where a gradient comes past its block's turn on one rank, and not at all on the other."""
    rank, world = distributed.get_rank(), distributed.get_world_size()

    class Turned(Model):
        """With a layer that comes last among the modules and is used first."""

        def __init__(self) -> None:
            super().__init__()
            self.early = nn.Linear(WIDTH, WIDTH)

        def forward(self, tokens: torch.Tensor, expert: int | None = None) -> torch.Tensor:
            hook = self.embedding.register_forward_hook(lambda _module, _args, x: x if expert else x + self.early(x))
            try:
                return super().forward(tokens)
            finally:
                hook.remove()

    model, single = Turned(), Turned()

    def expected(number: int, by: int, expert: int) -> torch.Tensor:
        single.zero_grad()
        single(batch(by, number), expert).backward()
        gradient = single.early.weight.grad
        return torch.zeros(()) if gradient is None else gradient / world

    with offloaded(model) as handle:
        for number in (0, 2):
            model.zero_grad()
            with handle.no_sync():
                model(batch(rank, number), 0).backward()
            model(batch(rank, number + 1), rank).backward()
            kept = expected(number, 0, 0)
            for other in range(1, world):
                kept = kept + expected(number, other, 0)
            assert torch.equal(model.early.weight.grad, kept + expected(number + 1, 0, 0))  # type: ignore[arg-type]


def stock(kind: dict[str, Any]) -> nn.Module:
    """The same by PyTorch alone, in one process."""
    model = Model(**kind)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    for number in range(5):
        for one in range(distributed.get_world_size()):
            (model(batch(one, number), expert_of(kind, one)) / distributed.get_world_size()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return model


def saved(directory: str, steps: int) -> None:
    """The first rank saves what all ranks have, as one process would."""
    model = Model()
    with offloaded(model):
        optimizer = optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.05)
        train_by(model, optimizer, range(steps))
        optimizer.consolidate_state_dict(to=0)
        if distributed.get_rank() == 0:
            headrace.save(f"{directory}/headrace", model, optimizer, extra={"step": steps})
            torch.save((model.state_dict(), optimizer.state_dict()), f"{directory}/plain.pt")
        distributed.barrier()
        train_by(model, optimizer, range(steps, steps + 2))
        if distributed.get_rank() == 0:
            torch.save(model.state_dict(), f"{directory}/after.pt")


def saved_beside(directory: str, overlap: str) -> None:
    """The first rank saves while all ranks take a step: the checkpoint has what there was when it was begun."""
    model, is_first = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4))), distributed.get_rank() == 0
    with offloaded(model, device_memory="256KiB"):
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, overlap=overlap)
        model(torch.full((2, 128), 1.0 + distributed.get_rank())).square().mean().backward()
        optimizer.step()
        model(torch.full((2, 128), 2.0 + distributed.get_rank())).square().mean().backward()
        optimizer.consolidate_state_dict(to=0)
        fill = Piece.fill
        with mock.patch.object(Piece, "fill", lambda *given: (time.sleep(0.2), fill(*given))):
            if is_first:
                wanted = _copied(model, optimizer)
                saving = headrace.save(f"{directory}/saved", model, optimizer, wait=False)
            distributed.barrier()
            optimizer.step()
            if is_first:
                saving.wait()
    if is_first:
        headrace.load(f"{directory}/saved", model, again := optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        assert_same(_copied(model, again), wanted)


def _copied(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    state = [entry["momentum_buffer"] for _, entry in sorted(optimizer.state_dict()["state"].items())]
    return [value.detach().clone() for value in (*model.parameters(), *state)]


def resumed(directory: str, kind: str, steps: int) -> None:
    """On any number of ranks the run goes on with the same global batches; in plain PyTorch, too."""
    model, expected = Model(), torch.load(f"{directory}/after.pt")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if kind == "stock":
        state, of_optimizer = torch.load(f"{directory}/plain.pt")
        model.load_state_dict(state)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        optimizer.load_state_dict(of_optimizer)
        optimizer.param_groups[0].update(fused=True, foreach=None)  # the file says what the one that saved it did
        train_by(model, optimizer, range(steps, steps + 2), limit=0.05)
        same_weights_as(model, expected)
        return
    with offloaded(model):
        optimizer = optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.05)
        if kind == "headrace":
            assert headrace.load(f"{directory}/headrace", model, optimizer) == {"step": steps}
        else:
            state, of_optimizer = torch.load(f"{directory}/plain.pt")
            model.load_state_dict(state)
            optimizer.load_state_dict(of_optimizer)
        before = torch.load(f"{directory}/plain.pt")
        same_weights_as(model, before[0])
        optimizer.consolidate_state_dict(to=0)
        if distributed.get_rank() == 0:
            found = optimizer.state_dict()["state"]
            for number, entries in before[1]["state"].items():
                assert all(torch.equal(found[number][name], tensor) for name, tensor in entries.items())
        train_by(model, optimizer, range(steps, steps + 2))
        if distributed.get_world_size() != 3:  # three times a gradient, over three, is something else
            same_weights_as(model, expected)


def loaded_state_is_kept(directory: str, name: str, tier: str) -> None:
    """In whichever way and order it was loaded, each rank has its own part alone, and the next checkpoint has all."""
    rank = distributed.get_rank()
    settings: Any = {"tier": "disk", "disk": f"{directory}/state"} if tier == "disk" else {}

    def begun(model: nn.Module, settings: Any) -> Any:
        return getattr(optim, name)(list(model.named_parameters()), lr=0.01, **settings)

    single = Model()
    theirs = begun(single, {})
    train_alone(single, theirs, range(2))
    if rank == 0:
        headrace.save(f"{directory}/saved", single, theirs)
        torch.save((single.state_dict(), theirs.state_dict()), f"{directory}/saved.pt")
    distributed.barrier()
    weights, state = torch.load(f"{directory}/saved.pt")
    train_alone(single, theirs, range(2, 3))
    for how in ("load", "load_state_dict", "load twice", "load after a step", "load before it is offloaded"):
        model = Model()
        early = begun(model, settings) if "before" in how else None
        if early is not None:
            headrace.load(f"{directory}/saved", model, early)
        with offloaded(model):
            mine = early or begun(model, settings)
            if "after" in how:
                train_by(model, mine, range(1))
            for _ in range(0 if early else 2 if "twice" in how else 1):
                if how == "load_state_dict":
                    model.load_state_dict(weights)
                    mine.load_state_dict(copy.deepcopy(state))
                else:
                    headrace.load(f"{directory}/saved", model, mine)
            mine.zero_grad()
            if tier == "host":
                held = torch.tensor([mine.held_bytes()])
                distributed.all_reduce(held)
                assert int(held) == theirs.held_bytes(), how
            with pytest.raises(StateError, match="consolidate_state_dict"):
                headrace.save(f"{directory}/again", model, mine)
            mine.consolidate_state_dict(to=0)
            if rank == 0:
                same_state(mine.state_dict()["state"], state["state"], how)
            train_by(model, mine, range(2, 3))
            assert_same_weights(model, single)
            mine.consolidate_state_dict(to=0)
            if rank == 0:
                same_state(mine.state_dict()["state"], theirs.state_dict()["state"], how)
            del mine, early


def train_alone(model: nn.Module, optimizer: Any, numbers: range) -> None:
    """As `train_by`, in one process."""
    for number in numbers:
        model(batch(0, number)).backward()
        optimizer.step()
        optimizer.zero_grad()


def same_state(found: dict[int, Any], expected: dict[int, Any], how: str) -> None:
    assert found.keys() == expected.keys(), how
    for number, entries in expected.items():
        assert found[number].keys() == entries.keys(), (how, number)
        assert all(torch.equal(found[number][name], value) for name, value in entries.items()), (how, number)


def same_weights_as(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def train_by(model: nn.Module, optimizer: Any, numbers: range, limit: float | None = None) -> None:
    """What the first rank's batch says counts, so that averages over any power of two of ranks are the same."""
    weight = 0 if distributed.get_rank() else distributed.get_world_size()
    for number in numbers:
        (weight * model(batch(0, number))).backward()
        if limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()


def nodes_add_their_averages(nodes: int) -> None:
    """Each node has a copy of its own; what nodes have averaged is added up, and the first rank's weights are all's."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    on_node = world // nodes
    os.environ["GROUP_RANK"] = str(rank // on_node)  # as torchrun says which of its agents started a process
    model, single = Model(experts=world + 1), Model(experts=world + 1)
    with torch.no_grad():
        model.head.weight.add_(rank)
    with offloaded(model):
        assert torch.equal(model.head.weight, single.head.weight)
        for number in range(3):
            model.zero_grad()
            model(batch(rank, number), rank).backward()
            sums: list[list[torch.Tensor | None]] = []
            for node in range(nodes):
                single.zero_grad()
                for one in range(node * on_node, (node + 1) * on_node):
                    (single(batch(one, number), one) / world).backward()
                sums.append([parameter.grad for parameter in single.parameters()])
            for (name, parameter), *parts in zip(model.named_parameters(), *sums, strict=True):
                given = [part for part in parts if part is not None]
                if given:
                    assert torch.equal(parameter.grad, sum(given[1:], given[0])), name  # type: ignore[arg-type]
                else:
                    assert parameter.grad is None, name


def same_gradients(model: nn.Module, other: nn.Module) -> None:
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        expected: Any = two.grad.full_tensor() if hasattr(two.grad, "full_tensor") else two.grad
        expected = None if expected is None else expected.cpu()
        if expected is None or one.grad is None:
            assert one.grad is expected, name
        else:
            assert torch.equal(one.grad, expected), name


def ddp(settings: dict[str, Any], number: int) -> nn.Module:
    model = Model(**settings)
    wrapped = DistributedDataParallel(model, find_unused_parameters=bool(settings.get("experts")))
    rank = distributed.get_rank()
    wrapped(batch(rank, number), expert_of(settings, rank)).backward()
    if settings.get("experts"):  # which nobody uses: DDP leaves None, too
        assert model.layers[0].experts[-1].weight.grad is None  # type: ignore[index,union-attr]
    return model


def fsdp(settings: dict[str, Any], number: int) -> nn.Module:
    model = Model(**settings)
    if settings.get("experts") or settings.get("tied"):
        return ddp(settings, number)
    policy: Any = {
        "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(False),
    }
    for layer in model.layers:
        fully_shard(layer, mesh=cpu_mesh(), **policy)
    fully_shard(model, mesh=cpu_mesh(), **policy)
    rank = distributed.get_rank()
    model(batch(rank, number)).backward()
    return model


def accumulation() -> None:
    """With synchronisation of each micro-batch, as one process takes all ranks' batches (gathered: as FSDP2, which adds
    up the ranks' first); without, as DDP and FSDP2.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()
    with offloaded(model) as handle:
        for number in range(3):
            model(batch(rank, number)).backward()
            before = [parameter.grad for parameter in single.parameters()]
            if ONLOAD == "gather":
                single.zero_grad()
            for one in range(world):
                (single(batch(one, number)) / world).backward()
            for parameter, there in zip(single.parameters(), before, strict=True):
                if ONLOAD == "gather" and there is not None:
                    parameter.grad = there + parameter.grad
            same_gradients(model, single)
        model.zero_grad()
        with handle.no_sync():
            for number in range(2):
                model(batch(rank, number)).backward()
                assert all(parameter.grad is None for parameter in model.parameters())
        offloaded_bytes = handle.stats().offload_bytes
        model(batch(rank, 2)).backward()
        assert handle.stats().offload_bytes > offloaded_bytes
    other = Model()
    wrapped = DistributedDataParallel(other)
    with wrapped.no_sync():
        for number in range(2):
            wrapped(batch(rank, number)).backward()
    wrapped(batch(rank, 2)).backward()
    if world == 2:
        same_gradients(model, other)


def one_copy_for_a_node() -> None:
    """What the ranks hold together is what one process holds, within 2%; so is what the system counts."""
    world = distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    single = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    with headrace.offload(single, device="cpu", device_memory="4MiB") as handle:
        single(torch.ones(1, 512)).sum().backward()
        one = handle.stats().host_bytes
    del single
    with headrace.offload(model, device="cpu", device_memory="4MiB", mesh=cpu_mesh()) as handle:
        model(torch.ones(1, 512)).sum().backward()
        held = torch.tensor([handle.stats().host_bytes])
        distributed.all_reduce(held)
        staging = 2 * world * 4 * 512 * 513  # of a block for each rank, that gradients pass through
        assert one < int(held) < 1.02 * (one + staging), (int(held), one, staging)
        shared = torch.tensor([proportional_bytes()])
        distributed.all_reduce(shared)
        weights = 8 * 4 * 512 * 513
        assert 2 * weights <= int(shared) <= 1.02 * (2 * weights + staging) + world * 2**16, (int(shared), weights)


def what_the_first_rank_hands_out() -> None:
    """What fails there fails on all, and the next one comes as it should; all that is handed out is opened in time."""
    node, rank = Node(cpu_mesh()), distributed.get_rank()

    def fails() -> None:
        raise OSError(errno.ENOSPC, "no room")

    before = len(os.listdir("/proc/self/fd"))
    for number in range(3):
        for _ in range(2):
            with pytest.raises(OSError, match="rank 0 could not get a thing: No space left" if rank else "no room"):
                node.hand_out(1, "a thing", fails)
        memory = mapped(node.share(8), 8)
        memory[rank] = 7 + number
        node.meet("what is written")
        assert memory[: node.size].tolist() == [7 + number] * node.size
        assert node.hand_out(2, "another", lambda: None) == -1
    assert len(os.listdir("/proc/self/fd")) == before


def few_descriptors() -> None:
    """A model of many blocks takes no more than one of few: arenas share descriptors, and mappings keep none."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(300)))
    before = len(os.listdir("/proc/self/fd"))
    with headrace.offload(model, device="cpu", device_memory="64KiB", blocks="4KiB", mesh=cpu_mesh()) as handle:
        model(torch.ones(1, 32)).sum().backward()
        assert len(handle.settled_blocks("a test")) >= 300
        assert len(os.listdir("/proc/self/fd")) < before + 20


def descriptors_are_given_back(settings: dict[str, Any]) -> None:
    """However often a model is offloaded, and though its handles are kept; process groups are used again."""
    rank, mesh, kept, counts = distributed.get_rank(), cpu_mesh(), [], []
    with mock.patch.object(distributed, "new_group", wraps=distributed.new_group) as new_group:
        for number in range(20):
            model = Model()
            with headrace.offload(model, device="cpu", device_memory=BUDGET_BYTES, mesh=mesh, **settings) as handle:
                optimizer = optim.AdamW(model.parameters(), lr=0.01)
                for _ in range(2):
                    model(batch(rank, number)).backward()
                    optimizer.step()
            kept.append((model, handle, optimizer))
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts == counts[:1] * 20, counts
    assert new_group.call_count == {"own": 0, "gather": 2}[settings.get("onload", "own")]


def groups_have_one_user() -> None:
    """Two models at once have process groups of their own, and so has one that comes when a rank alone has let go."""
    rank, mesh = distributed.get_rank(), cpu_mesh()
    models = [Model() for _ in range(4)]
    with mock.patch.object(distributed, "new_group", wraps=distributed.new_group) as new_group:
        handles = [gathered_by(model, mesh) for model in models[:2]]
        assert new_group.call_count == 4
        if rank == 0:
            handles[0].remove()
        handles.append(gathered_by(models[2], mesh))
        assert new_group.call_count == 6  # rank 1 may still be using the first pair
        if rank == 1:
            handles[0].remove()
        handles.append(gathered_by(models[3], mesh))
        assert new_group.call_count == 6
    single = Model()
    for number in range(3):
        single.zero_grad()
        for one in range(distributed.get_world_size()):
            (single(batch(one, number)) / distributed.get_world_size()).backward()
        for model in models[1:]:
            model.zero_grad()
            model(batch(rank, number)).backward()
            same_gradients(model, single)
    for handle in handles[1:]:
        handle.remove()


def gathered_by(model: nn.Module, mesh: DeviceMesh) -> Offloaded:
    return headrace.offload(model, device="cpu", device_memory=BUDGET_BYTES, mesh=mesh, onload="gather")


def proportional_bytes() -> int:
    """This process's part of the memory that it shares, as the kernel counts: pages divided by who has them."""
    total, ours = 0, False
    with open("/proc/self/smaps") as file:
        for line in file:
            if "-" in line.split(" ", 1)[0]:
                ours = "memfd:headrace" in line
            elif ours and line.startswith("Pss:"):
                total += 1024 * int(line.split()[1])
    return total


def writes() -> None:
    """What users write on all ranks counts once, and is seen by all; on one rank it is refused by name."""
    rank = distributed.get_rank()
    model, plain = Model(), Model()
    with offloaded(model):
        for one in (model, plain):
            for parameter in one.parameters():
                parameter.data.mul_(0.5)  # EMA, merges, weight decay by hand
            with torch.no_grad():
                one.layers[1].linear.weight.add_(1)  # type: ignore[union-attr,operator]
                one.layers[2].linear.bias.data = torch.ones(WIDTH)  # type: ignore[union-attr]
        with torch.no_grad():  # before the ranks met: each computes with what it wrote
            assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))
        loss = model(batch(rank, 0))
        assert torch.equal(loss, plain(batch(rank, 0)))
        loss.backward()
        for (name, one), two in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, two), name
        kept = [parameter.grad for parameter in model.parameters()]
        copies = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
        assert not any(torch.equal(a, b) for a, b in zip(clipped, copies, strict=True))
        model.zero_grad()
        model(batch(rank, 1)).backward()  # into other memory than what somebody keeps
        assert all(torch.equal(a, b) for a, b in zip(kept, clipped, strict=True))  # type: ignore[arg-type]
        loaded = {name: tensor * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(loaded)
        plain.load_state_dict(loaded)
        assert torch.equal(model(batch(rank, 1)), plain(batch(rank, 1)))
        if rank == 1:
            model.layers[3].linear.weight.data.mul_(2)  # type: ignore[union-attr,operator]
        with pytest.raises(StateError, match=r"'layers.3' were written on ranks \[1\] alone, of \[0, 1\]"):
            model(batch(rank, 2))


def models_that_differ() -> None:
    """What the first rank has is what all have; another shape is an error on all ranks but the first."""
    model = Model()
    with torch.no_grad():
        model.head.weight.add_(distributed.get_rank())
    with offloaded(model):
        assert torch.equal(model.head.weight, Model().head.weight)
    other = nn.Linear(64, 64 + 64 * distributed.get_rank())
    first = distributed.get_rank() == 0
    error: Any = RankError if first else StateError
    said = "rank 1 has ended" if first else "wants .* bytes of the node's memory where rank 0 wants"
    with pytest.raises(error, match=said), offloaded(other, device_memory="1MiB"):
        pass
    print("done", flush=True)
    os._exit(0)


def buffers_are_the_first_ranks() -> None:
    """As DDP has it: a checkpoint may be loaded on the first rank alone."""
    rank = distributed.get_rank()
    model, first = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
    for one, value in ((model, rank), (first, 0)):
        one.running_mean.fill_(value + 1)  # type: ignore[union-attr]
        one.num_batches_tracked.fill_(value + 2)  # type: ignore[union-attr]
        one.register_buffer("mask", torch.tensor([True, value == 0]))
        one.register_buffer("same", torch.ones(1).expand(4))
    with offloaded(model):
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), first.buffers(), strict=True))
        x = torch.randn(3, WIDTH)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), first.eval()(x))


class Normed(nn.Module):
    """With statistics, a buffer that each forward replaces and the next one uses, and one that each rank has alone."""

    _ddp_params_and_buffers_to_ignore = ("own",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(distributed.get_rank())  # all ranks get what the first draws
        layers = ((nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(3))
        self.layers = nn.Sequential(*(one for layer in layers for one in layer))
        self.register_buffer("drift", torch.randn(WIDTH), persistent=False)
        self.register_buffer("same", torch.randn(1).expand(WIDTH), persistent=False)
        self.register_buffer("own", torch.zeros(1 + distributed.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x + self.drift)
        if self.training:
            self.drift = 0.5 * self.drift + x.mean(0)  # type: ignore[has-type]
            self.own += 1
        return (y * self.same).square().mean()


def buffers_follow_the_first_rank() -> None:
    """Losses, gradients and buffers are DistributedDataParallel's, whichever forwards average, train or evaluate."""
    rank = distributed.get_rank()
    for device in ("emu", "cpu"):
        model, plain = Normed(), Normed()
        del plain.same  # which DistributedDataParallel cannot send
        plain.same = torch.tensor(0.0)
        theirs = DistributedDataParallel(plain)
        with offloaded(model, device) as handle:
            plain.same = model.same[:1].to("cpu", copy=True)
            assert torch.equal(model.same.cpu(), plain.same.expand(WIDTH))
            for number, waits in enumerate((False, False, True, True, False, False)):
                x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1000 * rank + number))
                with handle.no_sync() if waits else contextlib.nullcontext():
                    loss = model(x)
                    loss.backward()
                with theirs.no_sync() if waits else contextlib.nullcontext():
                    expected = theirs(x)
                    expected.backward()
                assert torch.equal(loss.detach().cpu(), expected.detach()), (device, number)
                same_buffers(model, plain)
                if not waits:
                    same_gradients(model, plain)
                    model.zero_grad()
                    plain.zero_grad()
                if rank == 0:  # it evaluates alone
                    with torch.no_grad():
                        assert torch.equal(model.eval()(x), plain.eval()(x))
                    model.train()
                    plain.train()
                if rank == 1 and number == 3:
                    model.layers[1].running_mean.mul_(3)  # type: ignore[operator,union-attr]
                    plain.layers[1].running_mean.mul_(3)  # type: ignore[operator,union-attr]
            assert model.own.shape == (1 + rank,)  # type: ignore[union-attr]
            losses = [one.eval()(x) for one in (model, model, theirs, theirs)]  # whose graphs save the statistics
            for one, two in (losses[:2], losses[2:]):
                (one + two).backward()
            same_gradients(model, plain)
    model = Model()
    with offloaded(model), mock.patch.object(Node, "give_first", side_effect=AssertionError):
        model(batch(rank, 0)).backward()  # has no buffers
        for extra in (torch.zeros(4 + 300 * rank), torch.zeros(4) if rank else None):
            model.register_buffer("extra", extra)
            with pytest.raises(StateError, match=r"ranks \[1\] have other buffers than rank 0 .*register the same"):
                model(batch(rank, 0))
        del model.extra
        model(batch(rank, 0)).backward()


def same_buffers(model: nn.Module, other: nn.Module) -> None:
    theirs = dict(other.named_buffers())
    for name, buffer in model.named_buffers():
        if name != "same":
            assert torch.equal(buffer, theirs[name]), name


def settings_that_differ() -> None:
    """All ranks are told at once."""
    rank = distributed.get_rank()
    with (
        pytest.raises(StateError, match=r"differ in onload: own on ranks \[0\], gather on ranks \[1\]"),
        offloaded(Model(), onload="gather" if rank else "own"),
    ):
        pass
    with (
        pytest.raises(StateError, match=r"differ in param_dtype: None on ranks \[0\], torch.bfloat16 on ranks"),
        offloaded(Model(), param_dtype=torch.bfloat16 if rank else None),
    ):
        pass
    model = Model()
    model.register_buffer("extra", torch.zeros(2 + rank))
    with (
        pytest.raises(StateError, match=r"differ in buffer 'extra': \(2,\) of torch.float32 on ranks \[0\]"),
        offloaded(model),
    ):
        pass


def written(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        model.head.weight.mul_(2)  # type: ignore[union-attr,operator]


def another_lr(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5


def clipped(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clipped_by_nothing(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), float("inf"))


def discarded(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()


def discarded_once(model: nn.Module, optimizer: Any) -> None:
    model.head.weight.grad = None  # type: ignore[union-attr,assignment]


def state_loaded(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(optim.AdamW(model.parameters(), lr=0.01).state_dict())


def frozen(model: nn.Module, optimizer: Any) -> None:
    model.head.requires_grad_(False)  # type: ignore[union-attr]


def stepped(model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def does_alone(change: Callable[[nn.Module, Any], None]) -> None:
    """The first rank alone does that, between a backward and a step, and goes on as the others do."""
    model = Model()
    with offloaded(model):
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for number in range(4):
            model(batch(distributed.get_rank(), number)).backward()
            if number == 1 and distributed.get_rank() == 0:
                change(model, optimizer)
            if number != 1 or change is not stepped:
                optimizer.step()
            if change is not discarded:
                optimizer.zero_grad()


def nodes_that_differ() -> None:
    """Each rank is a node: the same is a copy of its own there. No node goes on to another step."""
    os.environ["GROUP_RANK"] = str(distributed.get_rank())
    of_steps, of_gradients = "nodes differ in optimizers' steps", "'head.weight' has a gradient already on some nodes"
    for change, said in (
        (written, "nodes differ in what was written into weights"),
        (another_lr, of_steps),
        (clipped, of_steps),
        (discarded_once, of_steps),
        (state_loaded, of_steps),
        (stepped, of_steps),
        (discarded, of_gradients),
        (frozen, "nodes differ in which parameters are trained"),
    ):
        with pytest.raises(StateError, match=said):
            does_alone(change)
    does_alone(clipped_by_nothing)


def ranks_that_differ() -> None:
    """Of one node, whose step says at once what differs."""
    for change, said in (
        (another_lr, r"differ in param_groups\[0\]\['lr'\]: 0.01 on rank 1, 0.5 on rank 0; nothing was updated"),
        (clipped, r"the gradient of parameter 1 .* has other values on rank 1 than on rank 0; nothing was updated"),
        (state_loaded, "ranks differ in whether state was loaded: False on rank 1, True on rank 0"),
    ):
        with pytest.raises(StateError, match=said):
            does_alone(change)
    does_alone(clipped_by_nothing)
    model = Model()
    with offloaded(model):
        optimizer = (optim.AdamW, optim.Adam)[distributed.get_rank()](model.parameters())
        model(batch(distributed.get_rank(), 0)).backward()
        with pytest.raises(StateError, match="differ in the class of optimizer: Adam on rank 1, AdamW on"):
            optimizer.step()


def refusals() -> None:
    model = Model()
    with pytest.raises(TypeError, match="mesh is a int; give a DeviceMesh"):
        headrace.offload(model, device="cpu", mesh=2)
    model.layers[2].linear.weight.requires_grad_(False)  # type: ignore[union-attr]
    with offloaded(model) as handle:
        anchor = torch.zeros((), requires_grad=True)
        with pytest.raises(StateError, match="checkpoint its layers"):
            checkpoint(lambda anchor: model(batch(0, 0)) + anchor, anchor, use_reentrant=True).backward()
        model(batch(0, 0)).backward()
        with pytest.raises(StateError, match=r"use an optimizer of headrace\.optim, such as headrace\.optim\.AdamW"):
            torch.optim.AdamW(model.parameters()).step()
        hook = model.head.weight.register_hook(lambda gradient: gradient)
        with pytest.raises(StateError, match=r"'head.weight' has a hook .*register_post_accumulate_grad_hook"):
            model(batch(0, 0))
        hook.remove()
        seen: list[Any] = []
        model.head.weight.register_post_accumulate_grad_hook(seen.append)
        model.zero_grad()
        model(batch(0, 0)).backward()
        assert seen == [model.head.weight]
        model.layers[2].linear.weight.requires_grad_(True)  # type: ignore[union-attr]
        with pytest.raises(StateError, match=r"'layers\.2\.linear\.weight' has a gradient, and no forward"):
            checkpoint(lambda anchor: model(batch(0, 0)) + anchor, anchor, use_reentrant=True).backward()
        del handle
    alone = headrace.offload(Model(), device="cpu", device_memory=BUDGET_BYTES)
    with alone, pytest.raises(StateError, match=r"give headrace\.offload"), alone.no_sync():
        pass


def ranks_that_wait_for_each_other_see_that_another_has_ended() -> None:
    """Each of the first two posts what the other does not wait for, as where only one has met an error yet."""
    node, rank = Node(cpu_mesh()), distributed.get_rank()
    counters = Counters(node, 2)
    if rank < 2:
        counters.post(rank, 1)
        with pytest.raises(RankError, match="rank 2 has ended"):
            counters.wait(rank, 1, "its part")
        print("done", flush=True)
    os._exit(0)


def a_rank_fails(how: str) -> None:
    """Every other rank ends with an error that names the rank, and what it said."""
    rank, last = distributed.get_rank(), distributed.get_world_size() - 1
    model = Model()
    with offloaded(model):
        model(batch(rank, 0)).backward()
        if rank == last:
            fail(how, model)
            return
        with pytest.raises(RankError) as raised:
            train(model, passes=3)
        expected: dict[str, str] = {
            "dies": "has ended",
            "is stopped": "did not come within 3 s",
            "raises in forward": "its last error: ZeroDivisionError: in forward",
            "raises in backward": "its last error: ZeroDivisionError: in backward",
            "cleans up first": "its last error: ZeroDivisionError: in backward",
            "ends early": "has ended",
            "leaves a collective": "its last error: ZeroDivisionError: in a collective",
            "goes on": "has gone on to forward 3",
            "fails after a collective": "has gone on to forward 3",
        }
        text = str(raised.value).lower()
        assert f"rank {last}" in text, text
        assert expected[how].lower() in text, text
    print("done", flush=True)
    os._exit(0)  # the group cannot be left together any more


def train(model: nn.Module, passes: int) -> None:
    for number in range(passes):
        model(batch(distributed.get_rank(), number)).backward()


def a_node_dies() -> None:
    """Ranks of the other nodes end with an error of ours, and say what they waited for."""
    rank = distributed.get_rank()
    os.environ["GROUP_RANK"] = str(rank)
    model = Model()
    with offloaded(model):
        model(batch(rank, 0)).backward()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(
            RankError, match=r"which gradients there are of all nodes .* go on from its last checkpoint"
        ):
            train(model, passes=3)
        print("done", flush=True)
        os._exit(0)


def fail(how: str, model: nn.Module) -> None:
    def raises(where: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            raise ZeroDivisionError(where)

        return hook

    rank = distributed.get_rank()
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "is stopped":
        time.sleep(30)
    if how == "raises in forward":
        model.layers[2].register_forward_hook(raises("in forward"))  # type: ignore[union-attr,operator]
    if how in ("raises in backward", "cleans up first"):
        model.layers[2].register_full_backward_hook(raises("in backward"))  # type: ignore[union-attr,operator]
    if how == "leaves a collective":  # in which the others are by then
        mock.patch.object(DeviceGroup, "reduce", raises("in a collective")).start()
    if how == "fails after a collective":  # when this rank has begun the next round
        reduce, mistakes = DeviceGroup.reduce, iter([raises("after a collective")])

        def fails_once(*given: Any) -> None:
            reduce(*given)
            next(mistakes, lambda: None)()

        mock.patch.object(DeviceGroup, "reduce", fails_once).start()
    if how == "goes on":
        for module in model.layers:
            module.register_full_backward_hook(raises("in backward"))
    if how in ("goes on", "fails after a collective"):  # a loop that swallows errors
        with contextlib.suppress(ZeroDivisionError):
            model(batch(rank, 0)).backward()
        with contextlib.suppress(RankError):
            model(batch(rank, 0))
    elif how == "cleans up first":
        try:
            model(batch(rank, 0)).backward()
        finally:
            time.sleep(1.0)  # others have seen by now that it is broken off, and not why
    elif how != "ends early":
        model(batch(rank, 0)).backward()
    print("done", flush=True)
    os._exit(0)


def trains_until_a_rank_is_gone() -> None:
    """With weights and state in memory."""
    model = Model(recomputes=True)
    with offloaded(model):
        steps_until_a_rank_is_gone(
            model, optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.05, overlap="forward")
        )


def steps_until_a_rank_is_gone(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Says when it has begun; ends with the error that tells of the rank."""
    number = 0
    try:
        while True:
            model(batch(distributed.get_rank(), number)).backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
            if number == 2:
                print("trains", flush=True)
    except (RankError, StateError) as error:
        print(type(error).__name__, error, flush=True)
        os._exit(0)


def a_rank_may_reach_no_trained_parameter() -> None:
    """No mistake if another rank reaches some; if none does, all ranks say so."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer(adapters=True) for _ in range(LAYERS))

        def forward(self, x: torch.Tensor, adapted: bool) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, None) if adapted else layer.linear(x).tanh()
            return x

    for adapted in (True, False):
        model = Routed()
        with offloaded(model):
            loss = model(torch.ones(2, WIDTH, requires_grad=True), adapted and distributed.get_rank() == 1).mean()
            with contextlib.nullcontext() if adapted else pytest.raises(StateError, match="none of its 12 trained"):
                loss.backward()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            assert all((parameter.grad is not None) is adapted for parameter in trained)


def an_order_is_kept_once(directory: str) -> None:
    """The first rank of the node writes it, and all ranks load their first pass ahead."""
    file = os.path.join(directory, "order.json")
    for is_known in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        with offloaded(model) as handle, torch.no_grad():
            assert handle.load_order(file) is is_known
            model(torch.ones(2, WIDTH))
            assert (handle.stats().demand_onloads <= 1) is is_known
            distributed.barrier()
            with mock.patch("os.replace", wraps=os.replace) as replaced:
                handle.save_order(file)
            assert replaced.call_count == (distributed.get_rank() == 0)
            distributed.barrier()
