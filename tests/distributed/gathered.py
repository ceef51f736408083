"""What the ranks of the tests of `millrace.offload(model, mesh=mesh, onload="gather")` run; see meshed.py."""

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import millrace
from millrace import optim
from millrace.weights.model.slot import Slot
from millrace.weights.movement.device_sums import DeviceSums
from millrace.weights.movement.node_gradients import Round
from tests.distributed.meshed import Model, batch, cpu_mesh, expert_of, offloaded, same_gradients, same_weights


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
        same_weights(model, single)


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


def the_first_rank_chooses(device: str) -> None:
    """By what it measures, whatever others do; the report says which way was taken, and why."""
    rank = distributed.get_rank()
    for own, gathered in ((2.0, 1.0), (1.0, 2.0)):
        model, single = Model(), Model()
        measured = (own, gathered) if rank == 0 else (gathered, own)
        with (
            mock.patch("millrace.runtime.ways._seconds_of_both", return_value=measured),
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
    less = mock.patch("millrace.runtime.ways._TRIED_BYTES", 2**20)  # it is really tried
    with less, offloaded(Model(), device, onload="auto") as handle:
        assert "1 MiB took " in str(handle.report())
    with offloaded(Model(), device) as handle:
        assert "gathered by all devices: as asked" in str(handle.report())
    with pytest.raises(ValueError, match=r"onload='both'; give one of .own., .gather., .auto."):
        millrace.offload(Model(), device=device, mesh=cpu_mesh(), onload="both")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"onload='gather' is what several ranks do; give mesh="):
        millrace.offload(Model(), device=device, onload="gather")


def ranks_that_go_their_own_ways(device: str) -> None:
    """A rank evaluates alone, computes something else, raises: results stay right, and training goes on as gathered."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()

    def raises(*_: Any) -> None:
        raise ZeroDivisionError

    def computes_more(_module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 0 * model.layers[0](args[0], None)  # type: ignore[index,operator]

    def hooked(layer: int, hook: Callable[..., Any]) -> Any:
        return model.layers[layer].register_forward_hook(hook)  # type: ignore[index,union-attr,operator]

    with offloaded(model, device) as handle:
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))
        for number in range(12):
            if number in (4, 5) and rank == number - 4:
                with torch.no_grad():
                    assert torch.equal(model(batch(9, number)).cpu(), single(batch(9, number)))
            if number in (6, 7):  # each rank at another place
                hook = hooked(2 + rank % 3, raises)
                with contextlib.suppress(ZeroDivisionError):
                    model(batch(rank, number))
                hook.remove()
            hook = hooked(3, computes_more) if number == 8 and rank == world - 1 else None
            if number == 10:
                handle.reset_stats()
            model(batch(rank, number)).backward()
            if hook is not None:
                hook.remove()
            for one in range(world):
                (single(batch(one, number)) / world).backward()
            same_gradients(model, single)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        same_weights(model, single)
        assert handle.stats().demand_onloads == 0


def reductions_are_in_flight(device: str) -> None:
    """Two at once: the thread that computes goes on while the others have come to neither, the next reduction while
    the sums of the one before wait. Gradients of no more than two blocks are leaving, and results stay right."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()
    second_given, second_reduced = threading.Event(), threading.Event()
    leaving: list[int] = []
    rounds: Counter[str] = Counter()

    def after(name: str, event: threading.Event) -> None:
        rounds[name] += 1
        if rounds[name] == 2:
            event.set()

    def gives(sums: DeviceSums, given: Round, gradients: dict[Slot, torch.Tensor]) -> int:
        nbytes = give(sums, given, gradients)
        leaving.append(1)
        after("given", second_given)
        return nbytes

    def lets_go(sums: DeviceSums, given: Round) -> None:
        leaving.append(-1)
        let_go(sums, given)

    def exchanges(sums: DeviceSums, given: Round, flags: torch.Tensor) -> None:
        assert second_given.wait(20)
        exchange(sums, given, flags)
        after("reduced", second_reduced)

    def collects(sums: DeviceSums, given: Round) -> None:
        assert second_reduced.wait(20)
        collect(sums, given)

    give, let_go, exchange, collect = DeviceSums.give, DeviceSums.let_go, DeviceSums.exchange, DeviceSums.collect
    with (
        mock.patch.object(DeviceSums, "give", gives),
        mock.patch.object(DeviceSums, "let_go", lets_go),
        mock.patch.object(DeviceSums, "exchange", exchanges),
        mock.patch.object(DeviceSums, "collect", collects),
        offloaded(model, device),
    ):
        for number in range(4):
            for event in (second_given, second_reduced):
                event.clear()
            rounds.clear()
            model.zero_grad()
            single.zero_grad()
            model(batch(rank, number)).backward()
            for one in range(world):
                (single(batch(one, number)) / world).backward()
            same_gradients(model, single)
    under_way = list(itertools.accumulate(leaving))
    assert (max(under_way), under_way[-1]) == (2, 0)
