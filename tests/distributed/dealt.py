"""What the ranks run where an optimizer deals its parameters out to them: each function is one program."""

import copy
import io
import weakref
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as checkpoint_again

import headrace
from headrace import BudgetError, RankError, StateError, optim
from headrace.compat.megatron import OptimizerConfig
from headrace.optim.reduced import Reduced
from headrace.runtime.ranks import Ranks
from tests.distributed.programs import LIMIT, _mesh, same, sharded
from tests.distributed.programs import Model as Sharded
from tests.optim.references import ReferenceLion

STEPS = 4

STOCK: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "fused": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01, "foreach": False}),
    "Lion": (ReferenceLion, {"lr": 0.001, "betas": (0.9, 0.99), "weight_decay": 0.1}),
}


class Model(nn.Module):
    """Matrices, vectors, a weight that lies the other way around, frozen ones, and one that nobody uses."""

    def __init__(self, layers: int = 5, *, all_used: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(layers))
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        if not all_used:
            self.unused = nn.Parameter(torch.ones(40, 3))
        self.turned = nn.Parameter(torch.randn(7, 40).t())
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (self.frozen(x) @ self.turned) * self.scale


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (distributed.get_world_size(),))


def parallel(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model, find_unused_parameters=True)


def backward(model: nn.Module, step: int) -> None:
    seed = 1000 * distributed.get_rank() + step
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(seed)).to(dtype)
    model(x).square().mean().backward()


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        model.zero_grad()


def alike(model: nn.Module) -> bool:
    """Whether all ranks have the same weights."""
    own = torch.cat([tensor.detach().reshape(-1) for tensor in model.parameters()])
    every = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(every, own)
    return all(torch.equal(own, other) for other in every)


def held_of_all(optimizer: Any) -> list[int]:
    found: list[int] = [0] * distributed.get_world_size()
    distributed.all_gather_object(found, optimizer.held_bytes())
    return found


def steps_are_those_of_stock(name: str) -> None:
    """Bit for bit those of DistributedDataParallel and the stock optimizer, with clip_grad_norm_; 1/N of the state."""
    ours, theirs, whole = parallel(Model()), parallel(Model()), parallel(Model())
    before = copy.deepcopy(ours.module)
    make, settings = STOCK[name]
    own = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    mine = getattr(optim, name)(ours.parameters(), **own, max_grad_norm=LIMIT, mesh=mesh())
    alone = getattr(optim, name)(whole.parameters(), **own, max_grad_norm=LIMIT)
    trained = [tensor for tensor in theirs.parameters() if tensor.requires_grad and tensor.shape != (40, 3)]
    stock = make(trained, **settings)
    for step in range(STEPS):
        train(ours, mine, range(step, step + 1))
        train(whole, alone, range(step, step + 1))
        backward(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), LIMIT)
        stock.step()
        theirs.zero_grad()
        assert mine.last_grad_norm == float(norm) > LIMIT
    assert same(ours, theirs)
    assert same(ours, whole)
    assert alike(ours)
    assert not same(ours.module, before)
    _shares_are_even(mine, alone)


def _shares_are_even(mine: Any, alone: Any) -> None:
    """All ranks together hold what one would; none more than its part and one parameter's."""
    held, whole = held_of_all(mine), alone.held_bytes()
    of_one = max(sum(value.nbytes for value in entries.values()) for entries in alone.state.values() if entries)
    assert sum(held) == whole
    assert max(held) <= whole / distributed.get_world_size() + of_one, held


def as_in_one_process(name: str, dtype: torch.dtype, settings: dict[str, Any], disk: str | None, layers: int) -> None:
    """As the same optimizer that keeps everything on each rank."""
    ours, whole = (parallel(Model(layers).to(dtype)) for _ in "ab")
    for number, one in enumerate((ours, whole)):
        places = {"tier": "disk", "disk": f"{disk}-{number}"} if disk else {}
        shared = {} if number else {"mesh": mesh()}
        optimizer = getattr(optim, name)(one.named_parameters(), lr=0.01, **settings, **places, **shared)
        train(one, optimizer, range(STEPS))
        if number == 0:
            mine = optimizer
    assert same(ours, whole)
    assert alike(ours)
    assert mine.skipped_steps == 0
    if not disk:
        _shares_are_even(mine, optimizer)


def megatrons_distributed_optimizer() -> None:
    """Of its config, over a mesh: steps are those of ours with that mesh, and each rank has a part of the state."""
    models, optimizers = [Model(), Model(), Model()], []
    for model, settings in zip(models[:2], ({"use_distributed_optimizer": True}, {}), strict=True):
        config = OptimizerConfig(lr=0.01, optimizer_cpu_offload=True, optimizer_offload_fraction=1.0, **settings)
        optimizers.append(config.optimizer_for(model, **({"mesh": mesh()} if settings else {})))
    optimizers.append(optim.AdamW(models[2].parameters(), lr=0.01, mesh=mesh(), max_grad_norm=1.0))
    for model, optimizer in zip(models, optimizers, strict=True):
        wrapped = parallel(model)
        train(wrapped, optimizer, range(STEPS))
    assert same(models[0], models[2])
    assert same(models[0], models[1])
    held = held_of_all(optimizers[0])
    assert max(held) < 0.7 * optimizers[1].held_bytes()
    with pytest.raises(ValueError, match="mesh with use_distributed_optimizer=False"):
        OptimizerConfig().optimizer_for(models[0], mesh=mesh())


def more_ranks_than_parameters() -> None:
    ours, whole = (parallel(nn.Linear(40, 7, bias=False)) for _ in "ab")
    with torch.no_grad():
        for one, other in zip(whole.parameters(), ours.parameters(), strict=True):
            one.copy_(other)
    mine = optim.AdamW(ours.parameters(), mesh=mesh(), max_grad_norm=LIMIT)
    train(ours, mine, range(STEPS))
    train(whole, optim.AdamW(whole.parameters(), max_grad_norm=LIMIT), range(STEPS))
    assert same(ours, whole)
    assert alike(ours)
    assert held_of_all(mine) == [2 * 40 * 7 * 4 + 4, *[0] * (distributed.get_world_size() - 1)]
    get_state_dict(ours, mine)  # which would take a step where some rank had no state


def large_tensors() -> None:
    """Those that travel alone, and more small ones than one bucket takes."""
    shapes = [(1 << 20, 2), (3, 5), *[(1 << 18, 3)] * 12, (0, 4)]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    parameters = [nn.Parameter(value.clone()) for value in values]
    optimizer = optim.SGD(parameters, lr=0.5, mesh=mesh())
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = value.clone()
    optimizer.step()
    assert all(torch.equal(parameter, value / 2) for parameter, value in zip(parameters, values, strict=True))


def skipped_together() -> None:
    """What is not finite on its owner alone counts on all ranks."""
    parameters = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = optim.SGD(parameters, lr=0.1, max_grad_norm=1.0, mesh=mesh())
    for step in range(3):
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        if step == 1 and distributed.get_rank() == 1:
            parameters[1].grad = torch.full((4,), torch.nan)
        optimizer.step()
        assert optimizer.last_step_skipped == (step == 1)
    assert optimizer.skipped_steps == 1


def offloaded() -> None:
    """A model that headrace offloads, and whose gradients are averaged by hand."""
    plain, model = parallel(Model(all_used=True)), Model(all_used=True)
    handle = headrace.offload(model, device="cpu", device_memory=20_000)
    ours = optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=LIMIT, mesh=mesh())
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=True)
    for step in range(STEPS):
        backward(model, step)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= distributed.get_world_size()  # before the sum, as DistributedDataParallel has it
                distributed.all_reduce(parameter.grad)
        ours.step()
        ours.zero_grad()
        backward(plain, step)
        nn.utils.clip_grad_norm_(plain.parameters(), LIMIT)
        theirs.step()
        theirs.zero_grad()
    assert same(model, plain)
    assert handle.stats().onload_bytes > STEPS * sum(tensor.nbytes for tensor in model.parameters())


def writes_are_noticed() -> None:
    """By autograd on every rank, and by masters at their owner."""
    parameters = [nn.Parameter(torch.full((64,), 3.0, dtype=torch.bfloat16)) for _ in range(2)]
    plain = nn.Parameter(parameters[0].detach().clone())
    ours, reference = optim.AdamW(parameters, lr=0.01, mesh=mesh()), optim.AdamW([plain], lr=0.01)
    for step in range(4):
        products = [(parameter * parameter).sum() for parameter in parameters]
        for one in (*parameters, plain):
            one.grad = torch.full((64,), 1.0 + step, dtype=torch.bfloat16)
        ours.step()
        reference.step()
        for product in products:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()
        with torch.no_grad():
            for one in (*parameters, plain):
                one.mul_(1.37)
    assert torch.equal(parameters[0], plain)
    assert torch.equal(parameters[1], plain)


# gradients that only their owners have --------------------------------------------------------------------------------
def gradient_bytes(model: nn.Module) -> int:
    """Of this rank."""
    return sum(one.grad.untyped_storage().nbytes() for one in model.parameters() if one.grad is not None)


def averages(model: nn.Module) -> list[torch.Tensor | None]:
    """All gradients, on all ranks, from those who have them: what others show is NaN."""
    every = []
    for one in model.parameters():
        if one.grad is None:
            every.append(None)
            continue
        shown = torch.zeros(one.shape).copy_(one.grad.nan_to_num(0.0))  # they may lie differently
        distributed.all_reduce(shown)
        every.append(shown)
    return every


def same_averages(model: nn.Module, other: DistributedDataParallel) -> None:
    """Of 2 ranks bit for bit; more are added up in another order."""
    for mine, one in zip(averages(model), other.module.parameters(), strict=True):
        if mine is None or one.grad is None:
            assert mine is None
            assert one.grad is None or not one.grad.any()  # of a parameter that nobody uses
        elif distributed.get_world_size() == 2:
            assert torch.equal(mine, one.grad)
        else:
            torch.testing.assert_close(mine, one.grad, rtol=1e-5, atol=1e-7)


def gradients_are_at_their_owners(name: str) -> None:
    """Steps are those of DistributedDataParallel and the stock optimizer, with clip_grad_norm_; gradients leave while
    backward goes on, and of them each rank has 1/N."""
    world = distributed.get_world_size()
    theirs = parallel(Model(all_used=True))
    torch.manual_seed(distributed.get_rank())
    ours = Model(all_used=True)
    with torch.no_grad():
        for one in ours.parameters():
            one.mul_(1 + distributed.get_rank())  # the first rank's count
    make, settings = STOCK[name]
    own = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    mine = getattr(optim, name)(ours.parameters(), **own, max_grad_norm=LIMIT, mesh=mesh(), zero_stage=2)
    stock = make([one for one in theirs.parameters() if one.requires_grad], **settings)
    trained = [one for one in ours.parameters() if one.requires_grad]
    finish, left = Reduced._finish, []

    def finishes(dealt: Reduced) -> None:
        left.append(len(dealt._buckets) - dealt._next)  # whose averages have not begun when backward ends
        finish(dealt)

    for step in range(STEPS):
        with mock.patch.object(Reduced, "_finish", finishes):
            backward(ours, step)
        assert left == [0] * (step + 1)
        whole = sum(one.nbytes for one in trained)
        held = torch.tensor([gradient_bytes(ours)])
        assert held <= whole / world + max(one.nbytes for one in trained) + 4 * len(trained)
        distributed.all_reduce(held)
        assert whole < int(held) == whole + 4 * len(trained) * (world - 1)
        backward(theirs, step)
        same_averages(ours, theirs)
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), LIMIT)
        mine.step()
        stock.step()
        if world == 2:
            assert mine.last_grad_norm == float(norm) > LIMIT
            assert same(ours, theirs.module)
        gone = [weakref.ref(one.grad) for one in trained if one.grad is not None]
        mine.zero_grad()
        assert not any(one() is not None for one in gone)  # before the next backward needs the memory
        theirs.zero_grad()
    assert alike(ours)
    if world > 2:
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def neighbours_leave_together() -> None:
    """One collective for each owner of so many bytes, in an order that ranks do not choose; bits stay."""
    world, layers = distributed.get_world_size(), 12
    calls: list[tuple[int, int]] = []

    def reduces(ranks: Ranks, tensor: torch.Tensor, to: int) -> Any:
        calls.append((tensor.numel(), to))
        return reduce(ranks, tensor, to)

    reduce = Ranks.reduce
    for together_bytes, chunks in ((25 << 20, 1), (4 * 40 * 40 * 4, 4)):
        calls.clear()
        with (
            mock.patch.object(Ranks, "reduce", reduces),
            mock.patch("headrace.optim.reduced.TOGETHER_BYTES", together_bytes),
        ):
            ours, theirs = Model(layers), parallel(Model(layers))
            mine = optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)
            backward(ours, 0)
        backward(theirs, 0)
        same_averages(ours, theirs)
        assert chunks <= len(calls) <= chunks * world < 2 * layers, calls
        trained = [one for one in ours.parameters() if one.requires_grad]
        assert sum(count for count, _ in calls) == sum(map(torch.numel, trained))  # each once, also what nobody uses
        every: list[Any] = [None] * world
        distributed.all_gather_object(every, calls)
        assert all(one == calls for one in every)
        mine.step()
        assert alike(ours)


def optimizers_end_in_one_order() -> None:
    """Whose gradients a backward comes to first differs between ranks; so do the optimizers' numbers of parameters."""
    torch.manual_seed(0)
    ours, plain = (nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)]) for _ in "ab")
    plain.load_state_dict(ours.state_dict())
    mine = [optim.SGD(one.parameters(), lr=0.1, mesh=mesh(), zero_stage=2) for one in ours]
    distributed.broadcast(flat := torch.cat([one.detach().flatten() for one in ours.parameters()]), 0)
    nn.utils.vector_to_parameters(flat, plain.parameters())
    theirs, rank = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True), distributed.get_rank()
    for step in range(3):
        x = torch.full((2, 8), 1.0 + rank + step)
        for one, two in (ours, plain):  # type: ignore[misc]
            (one(two(x)) if rank else two(one(x))).square().mean().backward()
        for one in plain.parameters():
            one.grad /= 2  # type: ignore[operator]
            distributed.all_reduce(one.grad)  # type: ignore[arg-type]
        for optimizer in (*mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert same(ours, plain)


def another_dtype_comes_later() -> None:
    """Gradients of micro-batches are averaged alone after `model.to(dtype)`, too; not across it."""
    ours, theirs = Model(all_used=True), Model(all_used=True).double()
    optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)  # nobody's
    mine = optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)
    backward(ours, 0)
    ours.double()
    with pytest.raises(StateError, match=r"of shape \(.*\) has another dtype or device than .* call zero_grad"):
        backward(ours, 0)
    ours = Model(all_used=True)
    mine = optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)
    ours.double()
    expected = parallel(theirs)
    total: list[torch.Tensor] = []
    for step in range(2):
        backward(ours, step)
        expected.zero_grad()
        backward(expected, step)
        gradients = [one.grad.clone() for one in theirs.parameters() if one.grad is not None]
        total = [one + two for one, two in zip(total, gradients, strict=True)] if total else gradients
    trained = [one for one in theirs.parameters() if one.requires_grad]
    for one, gradient in zip(trained, total, strict=True):
        one.grad = gradient
    shown = [one for one in ours.parameters() if one.grad is not None]
    for one, other in zip(shown, trained, strict=True):
        own = one.grad is not None and not one.grad.isnan().any()
        assert not own or torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
    stock = torch.optim.SGD(trained, lr=0.1, fused=True)
    mine.step()
    stock.step()
    assert same(ours, theirs)


def a_backward_raises(file: str, rank: int) -> None:
    """On one rank, which goes on: its step says so at once, and nothing meets what the others wait in."""
    store = distributed.FileStore(file, 2)
    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": 2, "timeout": timedelta(seconds=3)}
    distributed.init_process_group("gloo", **settings)
    model = Model()
    optimizer = optim.AdamW(model.parameters(), mesh=mesh(), zero_stage=2)
    before = copy.deepcopy(model)

    def raises(gradient: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ZeroDivisionError
        return gradient

    model.layers[1].weight.register_hook(raises)  # type: ignore[union-attr,operator]
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            backward(model, 0)
        with pytest.raises(StateError, match="a backward has raised"):
            optimizer.step()
        store.wait(["over"], timedelta(seconds=60))
    else:
        with pytest.raises(RankError, match=r"rank 0 waited for all 2 ranks .*, and at least one did not"):
            backward(model, 0)
        with pytest.raises(StateError, match="a backward has raised"):
            optimizer.step()
        store.set("over", "")
    assert same(model, before)
    print("done")


def micro_batches_are_added_up(together_bytes: int = 25 << 20, in_flight_bytes: int = 64 << 20) -> None:
    """Averages of micro-batches, in their order; some use parameters that others do not, on one rank or on all."""
    with (
        mock.patch("headrace.optim.reduced.TOGETHER_BYTES", together_bytes),
        mock.patch("headrace.optim.reduced.IN_FLIGHT_BYTES", in_flight_bytes),
    ):
        _micro_batches_are_added_up()


def ranks_use_different_parameters() -> None:
    """Each has more on its way than may be, and waits for another's; of one optimizer, and of two over every layer."""
    with (
        mock.patch("headrace.optim.reduced.TOGETHER_BYTES", 1 << 10),
        mock.patch("headrace.optim.reduced.IN_FLIGHT_BYTES", 1 << 11),
    ):
        rank = distributed.get_rank()
        for optimizers in (1, 2):
            ours = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
            shares = [[p for layer in ours[one::optimizers] for p in layer.parameters()] for one in range(optimizers)]
            for share in shares:
                optim.SGD(share, lr=0.1, mesh=mesh(), zero_stage=2)  # nobody's, so it does nothing
            mine = [optim.SGD(share, lr=0.1, mesh=mesh(), zero_stage=2) for share in shares]
            plain = copy.deepcopy(ours)
            theirs = torch.optim.SGD(plain.parameters(), lr=0.1, fused=True)
            for step in range(3):
                for model in (ours, plain):
                    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                    for number, layer in enumerate(model):
                        if number % 4 != 2 * rank and number != step:  # the latter nobody uses
                            hidden = layer(hidden).tanh()
                    hidden.square().mean().backward()
                for number, layer in enumerate(plain):
                    for one in layer.parameters() if number != step else ():
                        one.grad = torch.zeros_like(one) if one.grad is None else one.grad / 2
                        distributed.all_reduce(one.grad)
                for optimizer in (*mine, theirs):
                    optimizer.step()
                    optimizer.zero_grad()
            assert same(ours, plain)


def _micro_batches_are_added_up() -> None:
    ours, theirs = Model(), parallel(Model())
    mine = optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)
    rank = distributed.get_rank()
    for step in range(3):
        total: dict[nn.Parameter, torch.Tensor] = {}
        for number in range(3):
            for model in (ours, theirs.module):
                for place, layer in enumerate(model.layers):  # type: ignore[arg-type,union-attr]
                    used = place != number and (place, rank) != (3, step % 2)
                    layer.forward = (lambda x: x) if not used else partial(nn.Linear.forward, layer)
            backward(ours, 3 * step + number)
            theirs.zero_grad()
            backward(theirs, 3 * step + number)
            for one in theirs.module.parameters():
                if one.grad is not None:
                    total[one] = total[one] + one.grad if one in total else one.grad.clone()
        for one in theirs.module.parameters():
            one.grad = total.get(one)
        same_averages(ours, theirs)
        mine.step()
        ours.zero_grad()
        with torch.no_grad():
            for one, other in zip(ours.parameters(), theirs.module.parameters(), strict=True):
                other.copy_(one)
    assert alike(ours)


def parameters_that_are_used_again() -> None:
    """In parts of the graph that are computed again each gives a gradient of its own, also past its turn."""
    torch.manual_seed(0)
    ours, plain = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in "ab")
    plain.load_state_dict(ours.state_dict())
    optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)  # nobody's, so it does nothing
    mine = optim.SGD(ours.parameters(), lr=0.1, mesh=mesh(), zero_stage=2)
    distributed.broadcast(flat := torch.cat([one.detach().flatten() for one in ours.parameters()]), 0)
    nn.utils.vector_to_parameters(flat, plain.parameters())
    for model in (ours, plain):
        x = torch.full((2, 8), 1.0 + distributed.get_rank(), requires_grad=True)
        for _ in range(3):
            x = checkpoint_again(model, x, use_reentrant=True)
        model(x).square().sum().backward()
    for one in plain.parameters():
        one.grad /= 2  # type: ignore[operator]
        distributed.all_reduce(one.grad)  # type: ignore[arg-type]
    for one, other in zip(averages(ours), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other.grad)
    mine.step()
    assert alike(ours)


def grad_scalers() -> None:
    """Steps are those of zero_stage=1, of PyTorch alone, and of ranks that share a model; what overflows at one owner
    alone, all ranks skip."""
    ours, dealt, theirs = Model(all_used=True), parallel(Model(all_used=True)), parallel(Model(all_used=True))
    mine = optim.AdamW(ours.parameters(), lr=0.01, max_grad_norm=LIMIT, mesh=mesh(), zero_stage=2)
    first = optim.AdamW(dealt.parameters(), lr=0.01, max_grad_norm=LIMIT, mesh=mesh())
    stock = torch.optim.AdamW([one for one in theirs.parameters() if one.requires_grad], lr=0.01, fused=True)
    shared = Model(all_used=True)
    handle = headrace.offload(shared, device="cpu", device_memory=20_000, mesh=mesh())
    by_all = optim.AdamW(shared.parameters(), lr=0.01, max_grad_norm=LIMIT)
    runs: list[tuple[nn.Module, Any]] = [(ours, mine), (dealt, first), (theirs, stock), (shared, by_all)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=2) for _ in runs]
    scales = []
    for step in range(6):
        for (model, optimizer), scaler in zip(runs, scalers, strict=True):
            total: list[torch.Tensor] = []
            for number in range(2):
                seed = 100 * distributed.get_rank() + 10 * step + number
                x = torch.randn(4, 40, generator=torch.Generator().manual_seed(seed))
                output = model(x)
                loss = output.square().mean()
                if (step, number, distributed.get_rank()) == (2, 1, 1):
                    loss = loss + 1e37 * (output.sum() if model is shared else getattr(model, "module", model).scale)
                scaler.scale(loss).backward()
                if optimizer is not mine:  # which adds averages up; a DistributedDataParallel averages their sum
                    given = [one.grad for one in model.parameters() if one.grad is not None]
                    total = [one + two for one, two in zip(total, given, strict=True)] if total else given
                    model.zero_grad()
            for one, gradient in zip([one for one in model.parameters() if one.requires_grad], total, strict=False):
                one.grad = gradient
            if step % 2 or optimizer is stock:
                scaler.unscale_(optimizer)
            if optimizer is stock:
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        for (model, _), scaler in zip(runs, scalers, strict=True):
            assert scaler.state_dict() == scalers[0].state_dict()
            assert same(ours, getattr(model, "module", model))
        scales.append(scalers[0].get_scale())
    assert scales == [1000.0, 2000.0, 1000.0, 1000.0, 2000.0, 2000.0]
    assert mine.last_grad_norm == first.last_grad_norm
    assert alike(ours)
    handle.remove()
    mixed = [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float32, torch.float16)]
    narrow = optim.SGD(mixed, lr=0.1, mesh=mesh(), zero_stage=2)
    scalers[0].scale(mixed[0].sum() + mixed[1].float().sum()).backward()
    refused = [(RankError, "rank 1 could not unscale its gradients"), (ValueError, "unscale FP16 gradients")]
    kind, text = refused[distributed.get_rank()]
    with pytest.raises(kind, match=text):
        scalers[0].unscale_(narrow)


def zero_stage_two_is_misused() -> None:
    with pytest.raises(ValueError, match="zero_stage=2 averages gradients over ranks: give their mesh"):
        optim.AdamW(Model().parameters(), zero_stage=2)
    with pytest.raises(ValueError, match="zero_stage=3 is not available; allowed: 1 or 2"):
        optim.AdamW(Model().parameters(), zero_stage=3, mesh=mesh())  # type: ignore[arg-type]
    wrapped = parallel(Model())
    with pytest.raises(StateError, match="are in a DistributedDataParallel, which averages gradients into all ranks'"):
        optim.AdamW(wrapped.parameters(), mesh=mesh(), zero_stage=2)
    del wrapped
    model = Model()
    optimizer = optim.AdamW(model.parameters(), mesh=mesh(), zero_stage=2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(StateError, match=r"gradient of parameter 0, of shape \(40, 3\), was not averaged by backward"):
        optimizer.step()
    model.zero_grad()
    backward(model, 0)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    around = parallel(model := Model())
    with pytest.raises(StateError, match="are in a DistributedDataParallel"):
        optim.AdamW(model.parameters(), mesh=mesh(), zero_stage=2)
    del around
    optimizer = optim.AdamW(model.parameters(), mesh=mesh(), zero_stage=2)
    around = parallel(model)
    with pytest.raises(StateError, match="are in a DistributedDataParallel"):
        backward(around, 0)
    with pytest.raises(StateError, match="was not averaged by backward"):
        optimizer.step()
    del around
    model = Model()
    optimizer = optim.AdamW(model.parameters(), mesh=mesh(), zero_stage=2)

    def raises(_gradient: torch.Tensor) -> None:
        raise ZeroDivisionError

    hook = model.layers[1].register_forward_hook(lambda _module, _args, output: output.register_hook(raises) and None)  # type: ignore[operator,union-attr]
    with pytest.raises(ZeroDivisionError):
        backward(model, 0)
    hook.remove()
    for call in (optimizer.step, lambda: backward(model, 0)):
        with pytest.raises(StateError, match="a backward has raised, in which gradients were being averaged"):
            call()
    offloaded = Model()
    with headrace.offload(offloaded, device="cpu", device_memory=20_000):
        refused = pytest.raises(ValueError, match="is of an offloaded model, whose gradients leave the device")
        with refused:
            optim.AdamW(offloaded.parameters(), mesh=mesh(), zero_stage=2)


# state ----------------------------------------------------------------------------------------------------------------
def consolidated(directory: Path, name: str, dtype: torch.dtype) -> None:
    """Rank 0 gets all of it and saves it; without that, saving says what to do. All ranks load the same file."""
    model = parallel(Model().to(dtype))
    mine = getattr(optim, name)(model.parameters(), lr=0.01, mesh=mesh())
    train(model, mine, range(2))
    with pytest.raises(
        StateError, match=r"state of parameter \d+ is on rank \d; call optimizer.consolidate_state_dict"
    ):
        torch.save(mine.state_dict(), io.BytesIO())
    mine.consolidate_state_dict(to=0)
    if distributed.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": mine.state_dict()}, directory / "saved.pt")
    distributed.barrier()
    train(model, mine, range(2, 4))
    with pytest.raises(StateError, match="consolidate_state_dict"):  # what was put together is old
        torch.save(mine.state_dict(), io.BytesIO())
    continued(directory / "saved.pt", name, dtype, model)


def saved_by_headrace(directory: Path, name: str, disk: bool) -> None:
    """By rank 0, once it has all; every rank loads its part, to any tier, into weights of another dtype as well."""
    model = parallel(Model().to(torch.bfloat16))
    mine = getattr(optim, name)(model.parameters(), lr=0.01, mesh=mesh())
    train(model, mine, range(2))
    with pytest.raises(
        StateError, match=r"state of parameter \d+ is on rank \d; call optimizer.consolidate_state_dict"
    ):
        headrace.save(directory / "run", model.module, mine)
    mine.consolidate_state_dict()
    if distributed.get_rank() == 0:
        headrace.save(directory / "run", model.module, mine)
    distributed.barrier()
    places = {"tier": "disk", "disk": directory / f"disk-{distributed.get_rank()}"} if disk else {}
    again, wide = parallel(Model().to(torch.bfloat16)), parallel(Model())
    other = getattr(optim, name)(again.parameters(), lr=0.01, mesh=mesh(), **places)
    headrace.load(directory / "run", again.module, other)
    of_wide = getattr(optim, name)(wide.parameters(), lr=0.01, mesh=mesh())
    headrace.load(directory / "run", wide.module, of_wide)
    assert alike(wide)
    if not places:
        assert other.held_bytes() == mine.held_bytes()
    train(model, mine, range(2, 4))
    train(again, other, range(2, 4))
    train(wide, of_wide, range(2, 4))
    assert same(model, again)
    assert alike(wide)


def continued(path: Path, name: str, dtype: torch.dtype, expected: nn.Module | None = None) -> None:
    """Goes on from that file on these ranks, and in the stock optimizer; with the averages of two ranks, as before."""
    models = []
    for stock in (False, True):
        saved = torch.load(path)
        model = parallel(Model().to(dtype))
        model.module.load_state_dict(saved["model"])
        if stock and dtype == torch.float32:
            make, settings = STOCK[name]
            optimizer = make(model.parameters(), **{**settings, "lr": 0.01})
        else:
            optimizer = getattr(optim, name)(model.parameters(), lr=0.01, mesh=mesh())
        optimizer.load_state_dict(saved["optimizer"])
        if stock and "fused" in optimizer.param_groups[0]:
            optimizer.param_groups[0].update(fused=True, foreach=None)
        train(model, optimizer, range(2, 4))
        models.append(model)
    assert same(*models)
    if expected is not None:
        assert same(models[0], expected)


def saved_by_dcp(directory: Path, name: str, dtype: torch.dtype, zero_stage: int) -> None:
    whole = Model(all_used=True).to(dtype)
    model = parallel(whole) if zero_stage == 1 else whole
    mine = getattr(optim, name)(model.parameters(), lr=0.01, mesh=mesh(), zero_stage=zero_stage)
    train(model, mine, range(2))
    weights, state = get_state_dict(model, mine)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=directory / "dcp")
    mine.consolidate_state_dict()
    full = get_state_dict(model, mine, options=StateDictOptions(full_state_dict=True, cpu_offload=True))[1]
    if distributed.get_rank() == 0:
        torch.save({"model": whole.state_dict(), "optimizer": mine.state_dict()}, directory / "saved.pt")
        assert all(full["state"].values())
    resumed_by_dcp(directory, name, dtype)


def resumed_by_dcp(directory: Path, name: str, dtype: torch.dtype) -> None:
    """On any number of ranks; weights and state as in the file that holds all of them."""
    distributed.barrier()
    saved = torch.load(directory / "saved.pt")
    settings: list[dict[str, Any]] = [{"mesh": mesh(), "zero_stage": 2}, {"mesh": mesh()}, {}]
    for shared in settings:
        whole = Model(all_used=True).to(dtype)
        model = whole if "zero_stage" in shared else parallel(whole)
        optimizer = getattr(optim, name)(model.parameters(), lr=0.01, **shared)
        weights, state = get_state_dict(model, optimizer)
        checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=directory / "dcp")
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        assert same(whole, _loaded(saved["model"], dtype))
        last = distributed.get_world_size() - 1
        optimizer.consolidate_state_dict(to=last)
        if distributed.get_rank() == last:
            _equal_states(optimizer.state_dict()["state"], saved["optimizer"]["state"])
        train(model, optimizer, range(2, 3))
        assert alike(model)


def _loaded(weights: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    model = Model(all_used=True).to(dtype)
    model.load_state_dict(weights)
    return model


def _equal_states(one: dict[int, Any], other: dict[int, Any]) -> None:
    assert one.keys() >= other.keys()
    compared = 0
    for number, entries in other.items():
        assert one[number].keys() == entries.keys()
        for name, value in entries.items():
            assert torch.equal(one[number][name], value), (number, name)
            compared += value.any().item()
    assert compared


def other_copies() -> None:
    """A copy of the optimizer, and its own part of a state_dict, go on as the first does."""
    model = Model()
    optimizer = optim.AdamW(model.parameters(), lr=0.01, mesh=mesh())
    gradients(model)
    optimizer.step()
    second, other = copy.deepcopy((model, optimizer))
    third = copy.deepcopy(model)
    again = optim.AdamW(third.parameters(), lr=0.01, mesh=mesh())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, steps in ((model, optimizer), (second, other), (third, again)):
        gradients(one)
        steps.step()
    assert same(model, second)
    assert same(model, third)
    assert optimizer.held_bytes() == other.held_bytes() == again.held_bytes()


def gradients(model: nn.Module) -> None:
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1.0 + number)


# matrices of which each rank has a shard ------------------------------------------------------------------------------
def matrices_step_as_whole_ones(
    name: str, shape: tuple[int, ...], offload: bool, dtype: torch.dtype, settings: dict[str, Any], disk: str | None
) -> None:
    """Bit for bit the same optimizer on the model that nobody has cut, given the same gradients."""
    model, whole = sharded(_mesh(shape), offload=offload, dtype=dtype), Sharded().to(dtype)
    ours, alone = (
        getattr(optim, name)(one.named_parameters(), lr=0.01, **settings, **_places(disk, number))
        for number, one in enumerate((model, whole))
    )
    before = _whole(model)
    for step in range(STEPS):
        _sharded_backward(model, step)
        factor = None
        if "max_grad_norm" in settings:
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            norm = nn.utils.get_total_norm(gradients).full_tensor()
            factor = torch.clamp(settings["max_grad_norm"] / (norm + 1e-6), max=1.0)
            assert factor < 1
        _give(model, whole, factor)
        ours.step()
        alone._options = replace(alone._options, max_grad_norm=None)
        alone.step()
        ours.zero_grad()
        assert all(map(torch.equal, _whole(model), whole.parameters())), step
        if factor is not None:
            assert ours.last_grad_norm == float(norm)
    assert not all(map(torch.equal, _whole(model), before))
    if not disk and len(shape) == 1:
        _shares_are_even(ours, alone)


def _places(disk: str | None, number: int) -> dict[str, Any]:
    return {"tier": "disk", "disk": f"{disk}-{number}-{distributed.get_rank()}"} if disk else {}


def _sharded_backward(model: nn.Module, step: int) -> None:
    seed = 1000 * distributed.get_rank() + step
    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model(x).square().mean().backward()


def _give(model: nn.Module, whole: nn.Module, factor: torch.Tensor | None) -> None:
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        if one.grad is not None:
            gradient = one.grad.full_tensor()  # type: ignore[attr-defined]
            other.grad = gradient if factor is None else gradient * factor


@torch.no_grad()
def _whole(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.full_tensor().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def rounded_as_in_one_process() -> None:
    """Weights without masters: dealt out, brought together as matrices, and cut by fully_shard (no moments: these have
    other bits where vectors are cut elsewhere).
    """
    settings, dtype = {"master_form": "none"}, torch.bfloat16
    as_in_one_process("AdamW", dtype, settings, None, 4)
    matrices_step_as_whole_ones("Muon", (2,), False, dtype, settings, None)
    matrices_step_as_whole_ones("SGD", (1, 2), False, dtype, settings, None)


def tensor_parallel_matrices(name: str) -> None:
    """Weights cut in rows and in columns, and vectors that every rank has."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(whole), mesh(), plan)
    ours, alone = (getattr(optim, name)(one.parameters(), lr=0.01) for one in (model, whole))
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        _give(model, whole, None)
        ours.step()
        alone.step()
        ours.zero_grad()
        assert all(map(torch.equal, _whole(model), whole.parameters())), step


def matrices_saved(directory: Path, name: str, dtype: torch.dtype) -> None:
    model = sharded(_mesh((distributed.get_world_size(),)), dtype=dtype)
    ours = getattr(optim, name)(model.named_parameters(), lr=0.01)
    for step in range(2):
        _sharded_backward(model, step)
        ours.step()
        ours.zero_grad()
    weights, state = get_state_dict(model, ours)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=directory / "dcp")
    ours.consolidate_state_dict()
    whole = _whole(model)
    if distributed.get_rank() == 0:
        torch.save({"model": whole, "optimizer": ours.state_dict()}, directory / "saved.pt")
    matrices_resumed(directory, name, dtype)


def matrices_resumed(directory: Path, name: str, dtype: torch.dtype) -> None:
    """On any number of ranks; a step from there is that of the plain model, by the plain state_dict."""
    distributed.barrier()
    saved = torch.load(directory / "saved.pt")
    model, whole = sharded(_mesh((distributed.get_world_size(),)), dtype=dtype), Sharded().to(dtype)
    with torch.no_grad():
        for one, other in zip(whole.parameters(), saved["model"], strict=True):
            one.copy_(other)
    ours, alone = (getattr(optim, name)(one.named_parameters(), lr=0.01) for one in (model, whole))
    weights, state = get_state_dict(model, ours)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=directory / "dcp")
    set_state_dict(model, ours, model_state_dict=weights, optim_state_dict=state)
    assert all(map(torch.equal, _whole(model), whole.parameters()))
    alone.load_state_dict(saved["optimizer"])
    _sharded_backward(model, 3)
    _give(model, whole, None)
    ours.step()
    alone.step()
    assert all(map(torch.equal, _whole(model), whole.parameters()))


def matrices_that_cannot_be() -> None:
    row = init_device_mesh("cpu", (2, 1), mesh_dim_names=("one", "two"))
    matrix = torch.ones(4, 4)
    twice: Any = nn.Parameter(distribute_tensor(matrix, row, [Shard(0), Shard(1)]))
    with pytest.raises(ValueError, match=r"\(Shard\(dim=0\), Shard\(dim=1\)\).* cut along one dimension of a mesh"):
        optim.Muon([twice])
    first: Any = nn.Parameter(distribute_tensor(matrix, mesh(), [Shard(0)]))
    other: Any = nn.Parameter(distribute_tensor(matrix, DeviceMesh("cpu", [1, 0]), [Shard(0)]))
    with pytest.raises(ValueError, match=r"and the first one over dimension 0 of .*make one optimizer for .* each"):
        optim.Muon([first, other])
    optimizer = optim.Muon([("here", first), ("there", nn.Parameter(matrix.clone()))])
    gradient = distribute_tensor(matrix, mesh(), [Shard(0)])
    first.grad = gradient if distributed.get_rank() == 0 else None
    with pytest.raises(StateError, match=r"parameter 0, 'here', .* has a gradient on rank 0 and none on rank 1"):
        optimizer.step()
    first.grad = gradient
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {0: {"momentum_buffer": gradient}}
    if distributed.get_rank() == 0:  # the owner
        with pytest.raises(ValueError, match=r"state 'momentum_buffer' of a DTensor .* load it by torch.distributed"):
            optimizer.load_state_dict(state)


def written_between() -> None:
    """Masters at the owner hear of writes to shards, by way of the DTensor or not."""
    whole = nn.Parameter(torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16())
    cut: Any = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh(), [Shard(0)]))
    ours, alone = optim.Muon([cut], lr=0.01), optim.Muon([whole], lr=0.01)
    for step in range(4):
        gradient = torch.randn(6, 5, generator=torch.Generator().manual_seed(step)).bfloat16()
        cut.grad, whole.grad = distribute_tensor(gradient, mesh(), [Shard(0)]), gradient
        product = (cut * cut).sum()
        ours.step()
        alone.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.no_grad():
            whole.mul_(1.37)
            (cut if step % 2 else cut.to_local()).mul_(1.37)
    assert torch.equal(cut.full_tensor(), whole)


# what cannot be -------------------------------------------------------------------------------------------------------
def meshes_of_the_wrong_kind() -> None:
    rank, model = distributed.get_rank(), Model()
    square = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"mesh has 2 dimensions, of sizes \(2, 1\); .* such as mesh\['replicate'\]"):
        optim.AdamW(model.parameters(), mesh=square)
    assert optim.AdamW(model.parameters(), mesh=square["replicate"]).param_groups
    with pytest.raises(TypeError, match="mesh is a ProcessGroup; give the DeviceMesh"):
        optim.AdamW(model.parameters(), mesh=distributed.group.WORLD)
    with pytest.raises(ValueError, match=r'overlap=.forward. with mesh: .* leave overlap at "none"'):
        optim.AdamW(model.parameters(), mesh=mesh(), overlap="forward")
    alone = DeviceMesh("cpu", [0])
    if rank == 1:
        with pytest.raises(ValueError, match=r"rank 1 is not in the mesh, whose ranks are \[0\]"):
            optim.AdamW(model.parameters(), mesh=alone)
    whole: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh(), [Shard(0)]))
    with pytest.raises(ValueError, match=r"is a DTensor over .* leave mesh out"):
        optim.AdamW([whole], mesh=mesh())


def ranks_disagree() -> None:
    """Every rank says what differs and where; then they go on together."""
    rank, model = distributed.get_rank(), Model()
    named = dict(model.named_parameters())
    fewer = list(named.items())[: -1 if rank else None]
    optimizer = optim.AdamW(fewer, mesh=mesh())
    with pytest.raises(StateError, match=r"rank 1 gave 14 parameters .* rank 0 15: .* parameter 14, 'frozen.bias'"):
        optimizer.step()
    swapped = list(named.items())[:: -1 if rank else 1]
    with pytest.raises(StateError, match=r"rank 1 has parameter 0, 'frozen.bias', of .* where rank 0 has parameter 0"):
        optim.AdamW(swapped, mesh=mesh()).step()
    named["layers.1.weight"].requires_grad_(rank == 0)
    with pytest.raises(StateError, match="dealt out their parameters differently"):
        optim.AdamW(named.items(), mesh=mesh()).step()
    named["layers.1.weight"].requires_grad_(True)
    optimizer = optim.AdamW(named.items(), mesh=mesh())
    optimizer.param_groups[0]["betas"] = (0.9, 0.99 + 0.009 * rank)
    gradients(model)
    with pytest.raises(
        StateError, match=r"differ in param_groups\[0\]\['betas'\]: \(0.9, 0.999\) on rank 1, \(0.9, 0.99\)"
    ):
        optimizer.step()
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    before = copy.deepcopy(model)
    if rank == 1:
        named["layers.2.bias"].grad = None
    with pytest.raises(
        StateError, match=r"parameter \d+, 'layers.2.bias', of shape \(40,\).* gradient on rank 0 and none on rank 1"
    ):
        optimizer.step()
    assert same(model, before)
    gradients(model)
    optimizer.step()
    assert not same(model, before)
    assert alike(model)


def a_rank_stays_away(file: str, rank: int) -> None:
    """The other says so when the process group's timeout is over."""
    store = distributed.FileStore(file, 2)
    settings: dict[str, Any] = {"store": store, "rank": rank, "world_size": 2, "timeout": timedelta(seconds=2)}
    distributed.init_process_group("gloo", **settings)
    model = Model()
    optimizer = optim.AdamW(model.parameters(), mesh=mesh())
    gradients(model)
    before = copy.deepcopy(model)
    if rank == 0:
        with pytest.raises(RankError, match=r"rank 0 waited for all 2 ranks .*, and at least one did not"):
            optimizer.step()
        assert same(model, before)
        store.set("over", "")
    else:
        store.wait(["over"], timedelta(seconds=60))
    print("done")


def a_rank_fails() -> None:
    """Before the update no rank does anything; in it, all ranks say who failed, and weights stay alike."""
    rank, model = distributed.get_rank(), Model()
    optimizer = optim.AdamW(model.named_parameters(), mesh=mesh())
    before = copy.deepcopy(model)
    gradients(model)
    if rank == 1:
        model.layers[0].weight.grad = torch.sparse_coo_tensor(size=(40, 40))  # type: ignore[union-attr]
    expected = (
        (RuntimeError, "sparse") if rank else (StateError, r"rank 1 could not take the step.*RuntimeError.*sparse")
    )
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step()
    assert same(model, before)
    gradients(model)
    reserve, perform = optimizer._reserve_device_memory, optimizer._updates._apply

    def refuse() -> None:
        raise BudgetError("no room for updates")

    if rank == 1:
        optimizer._reserve_device_memory = refuse  # type: ignore[method-assign]
    expected = (BudgetError, "no room") if rank else (StateError, r"rank 1 could not take the step.*no room")
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step()
    assert same(model, before)
    optimizer._reserve_device_memory = reserve  # type: ignore[method-assign]

    def fail(members: Any, scale: float) -> None:
        raise OSError("the drive is gone")

    if rank == 1:
        optimizer._updates._apply = fail  # type: ignore[method-assign]
    expected = (OSError, "gone") if rank else (StateError, r"rank 1 failed to update .*OSError: the drive is gone")
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step()
    assert alike(model)
    assert not same(model, before)
    optimizer._updates._apply = perform  # type: ignore[method-assign]
    optimizer.step()
    assert alike(model)
