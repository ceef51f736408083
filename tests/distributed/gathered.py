"""What the ranks of the tests of `headrace.offload(model, mesh=mesh, onload="gather")` run; see meshed.py."""

import contextlib
import itertools
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import headrace
from headrace import DiskError, Offloaded, RankError, optim
from headrace.memory.disk.checksums import Checksums
from headrace.memory.disk.extent import Extent
from headrace.weights.model.managed_param import ManagedParam
from headrace.weights.movement.averaging import AveragedGradients
from headrace.weights.movement.block import Block, Presence
from headrace.weights.movement.gathering import Gathers
from headrace.weights.movement.sums import DeviceSums, Round
from tests.distributed.meshed import Model, batch, cpu_mesh, expert_of, offloaded, same_gradients
from tests.support.compare import assert_same_weights


def sharded(model: nn.Module) -> nn.Module:
    """By FSDP2, whose gradients are summed by the same collective."""
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=cpu_mesh(), mp_policy=policy)
    return fully_shard(model, mesh=cpu_mesh(), mp_policy=policy)


def same_as_sharded(model: nn.Module, other: nn.Module, single: nn.Module) -> None:
    """FSDP2 sums up other things where ranks use other parameters: of those one process knows what is right."""
    everything = zip(model.named_parameters(), other.parameters(), single.parameters(), strict=True)
    for (name, one), two, three in everything:
        gradient: Any = three.grad if ".experts." in name or two.grad is None else two.grad.full_tensor()  # type: ignore[attr-defined]
        if gradient is None or one.grad is None:
            assert one.grad is gradient, name
        else:
            assert torch.equal(one.grad, gradient), name


def gradients_are_those_of_fsdp(kind: dict[str, Any], device: str) -> None:
    rank, world = distributed.get_rank(), distributed.get_world_size()
    activations = kind.pop("activations", False)
    model, other, single = Model(**kind), sharded(Model(**kind)), Model(**kind)
    with offloaded(model, device, activations=activations) as handle:
        for number in range(4):
            for one in (model, other, single):
                one.zero_grad()
            model(batch(rank, number), expert_of(kind, rank)).backward()
            other(batch(rank, number), expert_of(kind, rank)).backward()
            for one in range(world):
                (single(batch(one, number), expert_of(kind, one)) / world).backward()
            same_as_sharded(model, other, single)
            if world == 2:
                same_gradients(model, single)
        assert handle.stats().offload_bytes > 0


def steps_are_those_of_fsdp(kind: dict[str, Any], device: str, settings: dict[str, Any]) -> None:
    """Five steps with clipping, by gradients of FSDP2 and PyTorch's own optimizer."""
    rank = distributed.get_rank()
    model, single = Model(**kind), Model(**kind)
    theirs = torch.optim.AdamW([p for p in single.parameters() if p.requires_grad], lr=0.01, fused=True)
    with offloaded(model, device):
        mine = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, max_grad_norm=0.05, **settings)
        for number in range(5):
            other = Model(**kind)
            other.load_state_dict(single.state_dict())
            sharded(other)(batch(rank, number)).backward()
            for one, two in zip(single.parameters(), other.parameters(), strict=True):
                one.grad = None if two.grad is None else two.grad.full_tensor()  # type: ignore[attr-defined]
            nn.utils.clip_grad_norm_(single.parameters(), 0.05)
            theirs.step()
            model(batch(rank, number)).backward()
            mine.step()
            mine.zero_grad()
        assert_same_weights(model, single)


def bytes_over_the_link(device: str) -> None:
    """In steps that go as planned a rank's link carries 1/N of what it does otherwise, both ways."""
    moved = []
    for onload in ("own", "gather"):
        model = Model()
        with offloaded(model, device, onload=onload) as handle:
            optimizer = optim.AdamW(model.parameters(), lr=0.01)
            for number in range(8):
                if number == 6:
                    handle.reset_stats()
                model(batch(distributed.get_rank(), number)).backward()
                optimizer.step()
                optimizer.zero_grad()
            stats = handle.stats()
            assert stats.demand_onloads == 0
            moved.append((stats.onload_bytes, stats.offload_bytes))
    world = distributed.get_world_size()
    for own, gathered in zip(*moved, strict=True):
        assert 0 < world * gathered <= 1.01 * own, moved


def ranges_lie_at_the_devices() -> None:
    """Of weights, and of memory that gradients pass through, where there are several NUMA nodes; with "own" in turn."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    asked: list[tuple[int, int, object]] = []

    def binds(address: int, nbytes: int, node: int) -> bool:
        asked.append((address, nbytes, node))
        return True

    def interleaves(address: int, nbytes: int, nodes: tuple[int, ...]) -> bool:
        asked.append((address, nbytes, nodes))
        return True

    for onload in ("gather", "own"):
        asked.clear()
        model = Model()
        with (
            mock.patch("headrace.runtime.numa.bind", binds),
            mock.patch("headrace.runtime.numa.interleave", interleaves),
            mock.patch("headrace.runtime.node.nodes_of_process", return_value=(rank,)),
            mock.patch("headrace.runtime.node.node_of", return_value=rank),
            offloaded(model, onload=onload) as handle,
        ):
            model(batch(rank, 0)).backward()
            weights: Any = next(block.rest for block in handle._made if block.name == "layers.2")
            gradients: Any = handle._gradients
            arenas = [weights._common, *gradients._halves]
            places = [(arena._common.address, arena.nbytes) for arena in arenas]
        whole = tuple(range(world))
        for begin, nbytes in places:
            assert (begin, nbytes, whole) in asked
            mine = [one for one in asked if begin <= one[0] < begin + nbytes and one[2] != whole]
            if onload == "own":
                assert mine == []
                continue
            assert [node for _, _, node in mine] == list(range(world))
            assert sum(count for _, count, _ in mine) == nbytes
            for number, (address, count, _) in enumerate(mine):
                assert address % 4096 == 0
                assert abs(address - begin - nbytes * number / world) <= 2048
                assert abs(count - nbytes / world) <= 4096


DISK_WIDE, DISK_LAYERS = 512, 8


class OnDisk(nn.Module):
    """Layers on disk, of which but the first is trained, or all."""

    def __init__(self, *, trains_all: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(DISK_WIDE, DISK_WIDE) for _ in range(DISK_LAYERS))
        for layer in self.layers[1:]:
            layer.requires_grad_(trains_all)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


@contextlib.contextmanager
def on_disk(model: nn.Module, directory: str, device: str, onload: str) -> Iterator[Offloaded]:
    """Within a budget that leaves weights and gradients no room in host memory."""
    world, layer_bytes = distributed.get_world_size(), 4 * DISK_WIDE * (DISK_WIDE + 1)
    halves = 2 * world * (layer_bytes + 4096)
    where: dict[str, Any] = {"disk": f"{directory}/{onload}", "host_memory": halves + world * 900 * 2**10}
    with offloaded(model, device, device_memory=3 * layer_bytes + 65536, onload=onload, **where) as handle:
        assert world * handle.stats().disk_bytes > DISK_LAYERS // 2 * layer_bytes
        yield handle


def rows(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, DISK_WIDE, generator=torch.Generator().manual_seed(100 * rank + number))


def read_bytes() -> int:
    """From drives, by this process, as the system counts."""
    with open("/proc/self/io") as file:
        return int(dict(line.split(": ") for line in file)["read_bytes"])


def reads_from_disk(directory: str, device: str, trains_all: bool) -> None:
    """Of each block a rank reads and checks 1/N, and whole pages at its borders; gradients, weights are those of one
    process.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    gathered: list[int] = []
    checked: list[float] = []  # of each block that was handed over to reads, the share that they compare
    begins, note_all = Gathers._begins, Checksums.note_all

    def counts(gathers: Gathers, block: Block) -> tuple[int, str]:
        gathered.append(block.nbytes * block.is_fetched)
        return begins(gathers, block)

    def notes(checksums: Checksums, extent: Extent, *more: Any) -> None:
        note_all(checksums, extent, *more)
        known = checksums._known[extent]
        checked.append(sum(one is not None for one in known) / len(known))

    model, single = OnDisk(trains_all=trains_all), OnDisk(trains_all=trains_all)
    with (
        mock.patch.object(Gathers, "_begins", counts),
        mock.patch.object(Checksums, "note_all", notes),
        on_disk(model, directory, device, "gather") as handle,
    ):
        mine, theirs = (optim.SGD(one.parameters(), lr=0.1) for one in (model, single))
        for number in range(12):
            if number == 6:
                handle.synchronize()
                handle.reset_stats()
                gathered.clear()
                checked.clear()
                before = read_bytes()
            model(rows(rank, number)).backward()
            for one in range(world):
                (single(rows(one, number)) / world).backward()
            if world == 2:
                same_gradients(model, single)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        handle.synchronize()
        stats, store = handle.stats(), handle._tiers.store
        read = read_bytes() - before
        if world == 2:
            assert_same_weights(model, single)
        assert store is not None
        assert stats.demand_onloads == 0
        loads, part = sum(map(bool, gathered)), sum(gathered) / world
        assert loads > 6 * DISK_LAYERS
        borders = 4096 * (world + 1) * loads + 3 * max(gathered)  # of guesses that were under way, too
        assert part - 3 * max(gathered) <= stats.fetch_bytes <= 1.01 * part + borders, (part, stats.fetch_bytes, loads)
        assert borders < 0.2 * part
        assert checked or not trains_all
        assert max(checked, default=0) < 1 / world + 0.1
        if store.direct and not trains_all:  # which the system reads as memory, too
            assert abs(read - stats.fetch_bytes) <= 0.01 * part + borders, (read, stats.fetch_bytes)


def what_the_drive_changed_is_noticed(directory: str, trains_all: bool = False) -> None:
    """Between forward and backward: by the rank that reads it. The others hear of it."""
    rank, model = distributed.get_rank(), OnDisk(trains_all=trains_all)
    with on_disk(model, directory, "cpu", "gather") as handle:
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for number in range(5):
            loss = model(rows(rank, number))
            if number < 4:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        block = next(one for one in handle._made if one.name == "layers.2")
        rest: Any = block.rest
        assert block.presence is Presence.ABSENT
        distributed.barrier()
        if rank == 0:
            offset = rest._disk.extent.offset + block.nbytes * 3 // 4
            os.pwrite(handle._tiers.store._file.descriptor, b"something else", offset)  # type: ignore[union-attr]
        distributed.barrier()
        expected: Any = (DiskError, "are not those that were written") if rank else (RankError, "rank 1 has .*its ")
        with pytest.raises(expected[0], match=expected[1]):
            loss.backward()
        print("done")
        sys.stdout.flush()
        os._exit(0)


def the_first_rank_chooses(device: str) -> None:
    """By what it measures, whatever others do; the report says which way was taken, and why."""
    rank = distributed.get_rank()
    for own, gathered in ((2.0, 1.0), (1.0, 2.0)):
        model, single = Model(), Model()
        measured = (own, gathered) if rank == 0 else (gathered, own)
        with (
            mock.patch("headrace.runtime.ways._seconds_of_both", return_value=measured),
            offloaded(model, device, onload="auto") as handle,
        ):
            for number in range(3):
                model.zero_grad()
                model(batch(rank, number)).backward()
            for one in range(2):
                (single(batch(one, 2)) / 2).backward()
            same_gradients(model, single)
            way = "gathered by all devices" if gathered < own else "over each link alone"
            figures = f"64 MiB took {1e3 * gathered:.1f} ms gathered, {1e3 * own:.1f} ms over each link alone"
            assert f"{way}: {figures}" in str(handle.report())
    less = mock.patch("headrace.runtime.ways._TRIED_BYTES", 2**20)  # it is really tried
    with less, offloaded(Model(), device, onload="auto") as handle:
        assert "1 MiB took " in str(handle.report())
    with offloaded(Model(), device) as handle:
        assert "gathered by all devices: as asked" in str(handle.report())
    with pytest.raises(ValueError, match=r"onload='both'; give one of .own., .gather., .auto."):
        headrace.offload(Model(), device=device, mesh=cpu_mesh(), onload="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"onload='gather' is what several ranks do; give mesh="):
        headrace.offload(Model(), device=device, onload="gather")


@contextlib.contextmanager
def hooked(model: nn.Module, layer: int, hook: Callable[..., Any]) -> Iterator[None]:
    handle = model.layers[layer].register_forward_hook(hook)  # type: ignore[index,union-attr,operator]
    try:
        yield
    finally:
        handle.remove()


def computing_with(model: nn.Module, layers: tuple[int, ...]) -> Callable[..., torch.Tensor]:
    """A hook that computes with these layers, too, for nothing."""

    def computes(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            output = output + 0 * model.layers[layer](args[0], None)  # type: ignore[index,operator]
        return output

    return computes


def backward_as_one_process(model: nn.Module, single: nn.Module, number: int) -> None:
    """Gradients of all ranks' batches of that number."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model(batch(rank, number)).backward()
    for one in range(world):
        (single(batch(one, number)) / world).backward()
    same_gradients(model, single)


def ranks_that_go_their_own_ways(device: str) -> None:
    """A rank evaluates alone, computes something else, raises: results stay right, and training goes on as gathered."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()

    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    with offloaded(model, device) as handle:
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))
        for number in range(12):
            if number in (4, 5) and rank == number - 4:
                with torch.no_grad():
                    assert torch.equal(model(batch(9, number)).cpu(), single(batch(9, number)))
            if number in (6, 7):  # each rank at another place
                with contextlib.suppress(ZeroDivisionError), hooked(model, 2 + rank % 3, raises):
                    model(batch(rank, number))
            if number == 10:
                handle.reset_stats()
            astray = hooked(model, 3, computing_with(model, (0,)))
            with astray if number == 8 and rank == world - 1 else contextlib.nullcontext():
                backward_as_one_process(model, single, number)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        assert_same_weights(model, single)
        assert handle.stats().demand_onloads == 0


def a_rank_goes_astray_and_needs_more(at: int, more: tuple[int, ...]) -> None:
    """It computes with other layers, too. What it needs then others may gather once they have its gradients."""
    rank, model, single = distributed.get_rank(), Model(), Model()
    with offloaded(model) as handle:
        for number in range(6):
            model.zero_grad()
            single.zero_grad()
            astray = hooked(model, at, computing_with(model, more))
            with astray if number == 3 + rank else contextlib.nullcontext():
                backward_as_one_process(model, single, number)
        assert handle.stats().demand_onloads > 0


def reductions_are_in_flight(device: str) -> None:
    """Two at once: the thread that computes goes on while the others have come to neither, the next reduction while
    the sums of the one before wait. Gradients of no more than two blocks are leaving, and results stay right."""
    model, single = Model(), Model()
    second_given, second_reduced = threading.Event(), threading.Event()
    leaving: list[int] = []
    rounds: Counter[str] = Counter()

    def after(name: str, event: threading.Event) -> None:
        rounds[name] += 1
        if rounds[name] == 2:
            event.set()

    def gives(sums: DeviceSums, given: Round, gradients: dict[ManagedParam, torch.Tensor]) -> Any:
        found = give(sums, given, gradients)
        leaving.append(1)
        after("given", second_given)
        return found

    def lets_go(averaged: AveragedGradients) -> None:
        leaving.append(-1)
        release_oldest(averaged)

    def exchanges(sums: DeviceSums, given: Round, flags: torch.Tensor) -> Any:
        assert second_given.wait(20)
        found = exchange(sums, given, flags)
        after("reduced", second_reduced)
        return found

    def adds_up(averaged: AveragedGradients, given: Round, met: Any) -> list[ManagedParam]:
        assert second_reduced.wait(20)
        return add_up(averaged, given, met)

    give, exchange = DeviceSums.give, DeviceSums.exchange
    release_oldest, add_up = AveragedGradients._release_oldest, AveragedGradients._sum
    with (
        mock.patch.object(DeviceSums, "give", gives),
        mock.patch.object(DeviceSums, "exchange", exchanges),
        mock.patch.object(AveragedGradients, "_release_oldest", lets_go),
        mock.patch.object(AveragedGradients, "_sum", adds_up),
        offloaded(model, device),
    ):
        for number in range(4):
            for event in (second_given, second_reduced):
                event.clear()
            rounds.clear()
            model.zero_grad()
            single.zero_grad()
            backward_as_one_process(model, single, number)
    under_way = list(itertools.accumulate(leaving))
    assert (max(under_way), under_way[-1]) == (2, 0)
