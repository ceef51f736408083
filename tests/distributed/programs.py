"""What the ranks of these tests run: each function is one program, which raises where something is wrong."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import headrace
from headrace import LayoutError, StateError, optim
from headrace.compat import HybridDeviceOptimizer

STEPS, LIMIT = 5, 0.05


class Model(nn.Module):
    """With shards that differ in size between ranks, and empty ones where there are four."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(3))
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.head = nn.Linear(13, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(self.frozen(x))  # type: ignore[no-any-return]


def sharded(mesh: DeviceMesh, *, offload: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = Model().to(dtype)
    settings: dict[str, Any] = {"mesh": mesh}
    if offload:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if dtype == torch.float32:
        settings["mp_policy"] = MixedPrecisionPolicy(cast_forward_inputs=False)
    for layer in [*model.layers, model.frozen]:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: bool, steps: range, accumulate: int = 1) -> None:
    dtype = next(model.parameters()).dtype
    for step in steps:
        for micro in range(accumulate):
            seed = 1000 * distributed.get_rank() + 10 * step + micro
            x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed)).to(dtype)
            if accumulate > 1:
                model.set_requires_gradient_sync(micro == accumulate - 1)  # type: ignore[operator]
            model(x).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()


def same(model: nn.Module, other: nn.Module) -> bool:
    def local(tensor: Any) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    with torch.no_grad():
        return all(
            torch.equal(local(one), local(two)) for one, two in zip(model.parameters(), other.parameters(), strict=True)
        )


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def optimizer_equals_stock(shape: tuple[int, ...], offload: bool, settings: dict[str, Any], accumulate: int) -> None:
    """Five steps with clipping, over all ranks: bit for bit those of the stock optimizer and clip_grad_norm_."""
    ours, stock = sharded(_mesh(shape), offload=offload), sharded(_mesh(shape), offload=offload)
    before = copy.deepcopy([tensor.detach().to_local().clone() for tensor in ours.parameters()])
    mine = optim.AdamW(ours.parameters(), lr=0.01, max_grad_norm=LIMIT, **settings)
    theirs = torch.optim.AdamW(stock.parameters(), lr=0.01, fused=True)
    norms = []
    for step in range(STEPS):
        train(ours, mine, False, range(step, step + 1), accumulate)
        train(stock, theirs, True, range(step, step + 1), accumulate)
        norms.append(mine.last_grad_norm)
    assert same(ours, stock)
    assert min(norm for norm in norms if norm is not None) > LIMIT, norms  # every step was clipped
    pairs = zip(ours.parameters(), before, strict=True)
    assert any(not torch.equal(tensor.to_local(), old) for tensor, old in pairs)


def state_is_sharded() -> None:
    """What torch.optim's state is, in dtype, shape, placements; and a rank holds its share alone."""
    model, stock = sharded(_mesh((distributed.get_world_size(),))), sharded(_mesh((distributed.get_world_size(),)))
    mine, theirs = optim.AdamW(model.parameters()), torch.optim.AdamW(stock.parameters(), fused=True)
    train(model, mine, False, range(2))
    train(stock, theirs, False, range(2))
    ours, wanted = mine.state_dict()["state"], theirs.state_dict()["state"]
    assert ours.keys() == wanted.keys()
    held = 0
    for number, entries in wanted.items():
        assert entries.keys() == ours[number].keys()
        for name, value in entries.items():
            one = ours[number][name]
            assert type(one) is type(value)
            assert (one.shape, one.dtype, one.stride()) == (value.shape, value.dtype, value.stride())
            if isinstance(value, DTensor):
                assert (one.placements, one.device_mesh) == (value.placements, value.device_mesh)
                assert torch.equal(one.to_local(), value.to_local())
                held += one.to_local().nbytes
    assert held + 4 * len(ours) == mine.held_bytes()


def saved_and_resumed(directory: Path, shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Three steps, saved by torch.distributed.checkpoint."""
    model = sharded(_mesh(shape), dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, **settings)
    train(model, optimizer, False, range(3))
    weights, state = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    resumed = sharded(_mesh(shape), dtype=dtype)
    other = optim.AdamW(resumed.parameters(), lr=0.01, **settings)
    _load(directory, resumed, other)
    assert same(model, resumed)
    train(model, optimizer, False, range(3, 5))
    train(resumed, other, False, range(3, 5))
    assert same(model, resumed)
    stock = sharded(_mesh(shape), dtype=dtype)
    if dtype == torch.float32 and not settings:
        theirs = torch.optim.AdamW(stock.parameters(), lr=0.01, fused=True)
        _load(directory, stock, theirs)
        theirs.param_groups[0].update(fused=True)  # ours have none of their ways to compute
        train(stock, theirs, False, range(3, 5))
        assert same(model, stock)


def resumed_elsewhere(directory: Path, dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """On another number of ranks: weights and state are those that were saved."""
    model = sharded(_mesh((distributed.get_world_size(),)), dtype=dtype)
    optimizer = optim.AdamW(model.parameters(), lr=0.01, **settings)
    _load(directory, model, optimizer)
    for entries in optimizer.state_dict()["state"].values():
        assert all(value.full_tensor().any() for value in entries.values() if isinstance(value, DTensor))
    train(model, optimizer, False, range(3, 4))


def _load(directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    weights, state = get_state_dict(model, optimizer)
    checkpoint.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def tensor_parallel() -> None:
    """Weights cut in columns and rows, whose gradients come in other placements."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        models.append(parallelize_module(model, _mesh((distributed.get_world_size(),)), plan))
    ours, stock = models
    mine = optim.AdamW(ours.parameters(), lr=0.01, max_grad_norm=LIMIT)
    theirs = torch.optim.AdamW(stock.parameters(), lr=0.01, fused=True)
    for step in range(STEPS):
        for model, optimizer in ((ours, mine), (stock, theirs)):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            (model(x).square().sum() * 10).backward()
            if optimizer is theirs:
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
    assert same(ours, stock)


def activations(how: str) -> None:
    """What is saved for backward leaves and comes back, weights that are gathered for a layer do not."""
    models, moved = [], []
    for offloads in (True, False):
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4))
        model: nn.Module = nn.Sequential(*layers)
        if how == "fully_shard":
            for layer in model.children():
                fully_shard(layer, mesh=_mesh((2,)))
            fully_shard(model, mesh=_mesh((2,)))
        handle = headrace.offload_activations(model, min_bytes=1) if offloads else None
        wrapped = DistributedDataParallel(model) if how == "ddp" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + distributed.get_rank()))
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
        moved.append(0 if handle is None else handle.stats().offload_bytes)
    assert same(*models)
    saved = 4 * 3 * 16 * 64 * 4  # of four layers two inputs of linear layers and one of GELU, but for what stays
    assert 0 < moved[0] <= 3 * saved


def writes_are_noticed() -> None:
    """Between forward and backward by autograd; between steps by masters, as those of a plain parameter are."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = _mesh((size,))
    torch.manual_seed(0)
    start = torch.randn(2 * size, 4, dtype=torch.bfloat16)
    whole: Any = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    plain = nn.Parameter(start.clone())
    settings: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    ours, reference = optim.AdamW([whole], **settings), optim.AdamW([plain], **settings)
    for step in range(4):
        gradient = torch.randn(start.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        whole.grad, plain.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient
        product = (whole * whole).sum()
        ours.step()
        reference.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()
        with torch.no_grad():
            for one in (whole, plain):
                one.mul_(1.37)
    assert torch.equal(whole.to_local(), plain[2 * rank : 2 * rank + 2])


def agreement() -> None:
    """What one rank alone has that is not finite, all skip; and all clip by one factor."""
    rank, mesh = distributed.get_rank(), _mesh((distributed.get_world_size(),))
    whole: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    plain = nn.Parameter(torch.ones(4))
    optimizer = optim.SGD([whole, plain], lr=0.1, max_grad_norm=1.0)
    for own in (float("inf"), float("nan"), 3.0):
        whole.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
        plain.grad = torch.full((4,), own if rank else 2.0)
        optimizer.step()
        assert optimizer.last_step_skipped == (own != 3.0)
    assert optimizer.last_grad_norm == pytest.approx((16 + 4 * 9) ** 0.5)  # by the largest of the ranks


def states_that_lie_otherwise() -> None:
    size = distributed.get_world_size()
    mesh, reverse = _mesh((size,)), DeviceMesh("cpu", list(reversed(range(size))))
    whole: Any = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    optimizer = optim.AdamW([whole])
    whole.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    optimizer.step()
    moment = optimizer.state_dict()["state"][0]["exp_avg"].to_local().clone()
    for other in (distribute_tensor(torch.ones(4, 4), reverse, [Shard(0)]), moment):
        state = optimizer.state_dict()
        state["state"][0]["exp_avg"] = other
        with pytest.raises(ValueError, match=r"state 'exp_avg' of a DTensor .* load it by torch.distributed"):
            optimizer.load_state_dict(state)
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"].to_local(), moment)
    hybrid = HybridDeviceOptimizer([whole])
    hybrid.step()
    before = hybrid.state_dict()["state"][0]
    moment, steps = before["exp_avg"].to_local().clone(), float(before["step"])
    hybrid.dummy_step()
    after = hybrid.state_dict()["state"][0]
    assert (float(after["step"]), steps) == (1.0, 1.0)
    assert torch.equal(after["exp_avg"].to_local(), moment)


def refusals() -> None:
    """What cannot be says so, on every rank."""
    model = sharded(_mesh((distributed.get_world_size(),)))
    optimizer = optim.AdamW(model.parameters())
    head: Any = model.head
    head.weight._local_tensor = head.weight.to_local().detach().clone()
    with pytest.raises(StateError, match="another local tensor"):
        train(model, optimizer, False, range(1))


def eight_bits() -> None:
    """Trains, and says that no DTensor can show such state before anything is saved."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(128, 128), mesh=_mesh((distributed.get_world_size(),)))
    optimizer = optim.AdamW(model.parameters(), state_dtype="8bit")
    before = model.weight.to_local().detach().clone()  # type: ignore[operator, union-attr]
    model(torch.ones(2, 128)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight.to_local(), before)  # type: ignore[operator, union-attr]
    with pytest.raises(LayoutError, match=r"'exp_avg_8bit' has the shape .* use another state_dtype"):
        optimizer.state_dict()
