"""What the ranks of the tests of `headrace.offload(model, mesh=mesh, param_dtype=...)` run; see meshed.py."""

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import headrace
from headrace import optim
from tests.distributed.meshed import (
    Model,
    batch,
    cpu_mesh,
    expert_of,
    offloaded,
    same_gradients,
    same_weights_as,
    train_by,
)
from tests.distributed.on_disk import on_disk, whole
from tests.support.compare import assert_same_weights


def steps_are_those_of_one_process(
    directory: str, kind: dict[str, Any], device: str, dtypes: tuple[str, str], settings: dict[str, Any], way: str
) -> None:
    """Losses, gradients, norms and weights of clipped steps, bit for bit; between them users write, and look alone."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    home, travels = (getattr(torch, name) for name in dtypes)
    model, single = Model(**kind).to(home), Model(**kind).to(home)
    given = {"lr": 0.01, "max_grad_norm": 0.05} | settings
    theirs_given = {key: value for key, value in given.items() if key not in ("tier", "overlap")}
    if settings.get("tier") == "disk":
        given["disk"] = f"{directory}/state"
    where: dict[str, Any] = {"param_dtype": travels}
    mine_where = {**where, "onload": "gather" if way == "gather" else "own"}
    host_bytes = 2**16
    if way == "disk":
        mine_where |= on_disk(directory, host_bytes)
    with offloaded(model, device, **mine_where) as handle, offloaded(single, device, mesh=None, **where):
        mine = optim.AdamW([p for p in model.parameters() if p.requires_grad], **given)
        theirs = optim.AdamW([p for p in single.parameters() if p.requires_grad], **theirs_given)
        for number in range(7):
            if number == 2:
                for one in (*model.parameters(), *single.parameters()):
                    one.data.mul_(0.9)
            if number == 3:
                for layer in (model.layers[1], single.layers[1]):
                    layer.linear.weight.data = layer.linear.weight.detach() * 1.5  # type: ignore[union-attr,operator]
                with torch.no_grad():  # before the ranks have met
                    looked = model(batch(9, 0), expert_of(kind, rank))
                    assert torch.equal(looked, single(batch(9, 0), expert_of(kind, rank)))
            if number == 4 and rank == 1:
                with torch.no_grad():
                    assert torch.equal(model(batch(9, 1)), single(batch(9, 1)))
            loss = model(batch(rank, number), expert_of(kind, rank))
            loss.backward()
            losses = []
            for one in range(world):
                losses.append(single(batch(one, number), expert_of(kind, one)))
                (losses[-1] / world).backward()
            assert torch.equal(loss.detach(), losses[rank].detach()), number
            same_gradients(model, single)
            mine.step()
            theirs.step()
            assert mine.last_grad_norm == theirs.last_grad_norm
            mine.zero_grad()
            theirs.zero_grad()
            if number == 0:
                first_bytes = handle.stats().onload_bytes
        assert_same_weights(model, single)
        assert all(parameter.dtype == home for parameter in model.parameters())
        stats = handle.stats()
        if way == "own" and not kind:
            elements = sum(p.numel() for p in model.parameters())
            assert elements * travels.itemsize < first_bytes < 2.3 * elements * travels.itemsize
        if way == "disk":
            assert stats.fetch_bytes > 0
            assert whole(stats.disk_bytes) > 0
            assert whole(stats.host_peak_bytes) <= host_bytes * world


def one_copy_for_a_node() -> None:
    """Weights in float32 and, as they travel, in bfloat16, and gradients: together the ranks have each once."""
    world = distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    elements = 8 * 512 * 513
    with offloaded(model, device_memory="4MiB", param_dtype=torch.bfloat16) as handle:
        model(torch.ones(1, 512, dtype=torch.bfloat16)).sum().backward()
        staging = 2 * world * 4 * 512 * 513
        expected = (4 + 2 + 4) * elements + staging
        held = whole(handle.stats().host_bytes)
        assert expected <= held <= 1.02 * expected, (held, expected)
        assert handle.stats().onload_bytes <= 2 * 2 * elements + 2**20  # bfloat16 both times


def a_budget_is_for_both() -> None:
    """Weights have to have room as homes and as they travel."""
    elements = sum(parameter.numel() for parameter in Model().parameters())
    for dtype, host_bytes in ((None, 6 * elements), (torch.bfloat16, 11 * elements)):
        with offloaded(Model(), host_memory=host_bytes, param_dtype=dtype):
            pass
    with (
        pytest.raises(headrace.BudgetError, match="host_memory allows"),
        offloaded(Model(), host_memory=6 * elements, param_dtype=torch.bfloat16),
    ):
        pass
    host_memory: Any = 6 * elements
    told: list[str] = []
    while len(told) < 3:  # of weights, then of gradients: whoever follows the advice gets on
        try:
            with offloaded(model := Model(), host_memory=host_memory):
                model(batch(distributed.get_rank(), 0)).sum().backward()
            break
        except headrace.BudgetError as error:
            told.append(str(error))
            host_memory = told[-1].split("at least ")[1].split(",")[0]
    assert 0 < len(told) < 3
    assert all("of the node allows each of its 2 ranks" in one for one in told)


def goes_on(directory: str) -> None:
    """Saved by these ranks, loaded by them, with as many bits as one process has."""
    model, single = Model(), Model()
    with (
        offloaded(model, param_dtype=torch.bfloat16),
        offloaded(single, mesh=None, param_dtype=torch.bfloat16),
    ):
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01, max_grad_norm=0.05) for one in (model, single))
        train_by(model, mine, range(3))
        mine.consolidate_state_dict(to=0)
        if distributed.get_rank() == 0:
            headrace.save(f"{directory}/saved", model, mine)
        distributed.barrier()
        train_by(model, mine, range(3, 5))
        after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for again, optimizer in ((model, mine), (single, theirs)):
            headrace.load(f"{directory}/saved", again, optimizer)
        train_by(model, mine, range(3, 5))
        same_weights_as(model, after)
        world = distributed.get_world_size()
        for number in range(3, 5):
            for one in range(world):
                ((world if one == 0 else 0) * single(batch(0, number)) / world).backward()
            theirs.step()
            theirs.zero_grad()
        assert_same_weights(model, single)


def policies_are_those_of_fsdp(directory: str) -> None:
    """Losses and averaged gradients of two steps, with policies on three levels, of FSDP2 with the same ones."""
    for kind, way in (({"recomputes": True}, "own"), ({"adapters": True}, "gather"), ({}, "disk")):
        where: dict[str, Any] = on_disk(directory) if way == "disk" else {}
        _as_fsdp(kind, {**where, "onload": "gather" if way == "gather" else "own"})
    mine: Any = {"layers.*": (torch.bfloat16, torch.float16)[distributed.get_rank()]}
    with pytest.raises(headrace.StateError, match="ranks of the mesh differ in param_dtype"):
        headrace.offload(Model(), device="cpu", mesh=cpu_mesh(), param_dtype=mine)


def _as_fsdp(kind: dict[str, Any], settings: dict[str, Any]) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    whole, in_layers, in_linear = (
        MixedPrecisionPolicy(param, reduce_dtype=wide, output_dtype=out)
        for param, out in ((narrow, wide), (narrow, None), (wide, narrow))
    )
    model, rank = Model(**kind), distributed.get_rank()
    policies: Any = {"": whole, "layers.*": in_layers, "*.linear": in_linear}
    with offloaded(model, param_dtype=policies, **settings) as handle:
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for number in range(2):
            other = Model(**kind)
            other.load_state_dict(model.state_dict())
            for layer in other.layers:
                fully_shard(layer.linear, mesh=cpu_mesh(), mp_policy=in_linear)  # type: ignore[arg-type]
                fully_shard(layer, mesh=cpu_mesh(), mp_policy=in_layers)
            fully_shard(other, mesh=cpu_mesh(), mp_policy=whole)
            mine, theirs = model(batch(rank, number)), other(batch(rank, number))
            assert mine.dtype == wide
            assert torch.equal(mine, theirs), number
            mine.backward()
            theirs.backward()
            same_gradients(model, other)
            optimizer.step()
            optimizer.zero_grad()
        assert handle.stats().fetch_bytes > 0 or "disk" not in settings
