"""What the ranks of the tests of `headrace.offload(model, mesh=mesh, disk=...)` run; see programs.py."""

import os
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn

import headrace
from headrace import DiskError, Offloaded, StateError, optim
from tests.distributed.meshed import (
    LAYERS,
    WIDTH,
    Model,
    batch,
    cpu_mesh,
    expert_of,
    offloaded,
    same_gradients,
    same_weights_as,
    steps_until_a_rank_is_gone,
    train_by,
)
from tests.support.compare import assert_same_weights

WIDE, LAYER_BYTES = 512, 4 * 512 * 513
STAGING_BYTES = 900 * 2**10  # for each rank: less than a layer beside what fetches pass through


def on_disk(directory: str, host_bytes: int = 2**16) -> dict[str, Any]:
    """`host_bytes` for each rank of a node: less than weights and gradients take in all."""
    return {"disk": f"{directory}/weights", "host_memory": host_bytes * distributed.get_world_size()}


def spill_bytes(handle: Offloaded) -> int:
    """Bytes on the drive of the one file that the ranks have, as the file system counts."""
    store = handle._tiers.store
    assert store is not None
    status = os.fstat(store._file.descriptor)
    files: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(files, (status.st_dev, status.st_ino))
    assert len(set(files)) == 1
    assert status.st_nlink == 0
    return status.st_blocks * 512


def whole(number: int) -> int:
    """Of all ranks."""
    total = torch.tensor([number])
    distributed.all_reduce(total)
    return int(total)


def steps_are_those_of_one_process(
    directory: str, kind: dict[str, Any], device: str, settings: dict[str, Any], dtype: str, host_bytes: int
) -> None:
    """Five clipped steps: losses, norms and weights, bit for bit; within the budgets of the node."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(**kind).to(getattr(torch, dtype)), Model(**kind).to(getattr(torch, dtype))
    given = {"lr": 0.01, "max_grad_norm": 0.05} | settings
    plain = {key: value for key, value in given.items() if key not in ("tier", "overlap")}
    if settings.get("tier") == "disk":
        given["disk"] = f"{directory}/state"
    with offloaded(model, device, **on_disk(directory, host_bytes)) as handle, offloaded(single, device, mesh=None):
        mine = optim.AdamW([p for p in model.parameters() if p.requires_grad], **given)
        theirs = optim.AdamW([p for p in single.parameters() if p.requires_grad], **plain)
        for number in range(5):
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
        assert_same_weights(model, single)
        stats = handle.stats()
        assert stats.fetch_bytes > 0
        assert whole(stats.host_peak_bytes) <= host_bytes * world
        disk_bytes = whole(stats.disk_bytes)
        assert 0 < disk_bytes <= spill_bytes(handle) <= disk_bytes + 4 * 4096  # the file system has its own
        held = whole(mine.held_bytes())
        assert held == theirs.held_bytes() if settings.get("tier") != "disk" else held > 0


def activations_rest_there(directory: str, device: str, onload: str) -> None:
    """Those of each rank, in a file of its own without a name; gradients, steps are those of one process."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    model, single = Model(), Model()
    activations = {"tier": "disk", "min_bytes": 0, "device_memory": 0, "host_memory": world * 2**15}
    where = on_disk(directory, 3 * 2**15) | {"activations": activations, "onload": onload}
    with offloaded(model, device, **where) as handle, offloaded(single, device, mesh=None):
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))
        for number in range(4):
            loss = model(batch(rank, number))
            loss.backward()
            for one in range(world):
                (single(batch(one, number)) / world).backward()
            if world == 2:
                same_gradients(model, single)
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        if world == 2:
            assert_same_weights(model, single)
        assert handle.activations is not None
        stats, own = handle.activations.stats(), handle._tiers.private_store
        assert own is not None
        assert own is not handle._tiers.store
        assert stats.spill_bytes > 4 * LAYERS * 2 * 5 * WIDTH * 4  # an input of each layer, at least
        assert stats.spill_bytes // 2 < stats.fetch_bytes <= stats.spill_bytes
        assert 0 < stats.host_peak_bytes <= 2**15
        assert whole(handle.stats().host_peak_bytes) <= 3 * 2**15 * world
        status = os.fstat(own._file.descriptor)
        taken = status.st_blocks * 512  # with what the file system has itself
        files: list[Any] = [None] * world
        distributed.all_gather_object(
            files, (status.st_ino, status.st_nlink, 0 < own.nbytes <= taken <= own.nbytes + 4 * 4096)
        )
        assert len({inode for inode, _, _ in files}) == world
        assert all((names, fits) == (0, True) for _, names, fits in files), files


def one_copy_for_a_node(directory: str) -> None:
    """On disk the ranks have together what one process has, within 2%; in memory what they were allowed."""
    rank, world = distributed.get_rank(), distributed.get_world_size()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(8)))

    found = []
    halves_bytes = 2 * world * (LAYER_BYTES + 4096)
    for mesh, host_bytes in ((None, STAGING_BYTES), (cpu_mesh(), halves_bytes + STAGING_BYTES)):
        where = f"{directory}/{rank}" if mesh is None else directory
        model = build()
        with headrace.offload(
            model, device="cpu", device_memory="4MiB", host_memory=host_bytes, disk=where, mesh=mesh
        ) as handle:
            model(torch.ones(1, WIDE)).sum().backward()
            store, stats = handle._tiers.store, handle.stats()
            assert store is not None
            found.append(os.fstat(store._file.descriptor).st_blocks * 512)
            peak_bytes = stats.host_peak_bytes if mesh is None else whole(stats.host_peak_bytes)
            assert peak_bytes <= host_bytes
            gradients = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(gradients, [p.grad for p in model.parameters()], strict=True))  # type: ignore[arg-type]
    assert abs(found[1] - found[0]) <= 0.02 * found[0], found
    assert found[1] >= 16 * LAYER_BYTES


def what_users_do(directory: str) -> None:
    """Writes on all ranks count once; one rank evaluates alone; a fork only looks; adapters that come later fit in."""
    rank = distributed.get_rank()
    model, plain = Model(), Model()
    with offloaded(model, device_memory=2**17, **on_disk(directory)) as handle:
        for one in (model, plain):
            for parameter in one.parameters():
                parameter.data.mul_(0.5)
        with torch.no_grad():  # before the ranks met: each computes with what it wrote
            assert torch.equal(model(batch(rank, 0)), plain(batch(rank, 0)))
        for number in range(2):
            loss = model(batch(rank, number))
            assert torch.equal(loss, plain(batch(rank, number)))
            loss.backward()
        assert_same_weights(model, plain)
        clipped = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert clipped > 0
        model.zero_grad()
        loaded = {name: tensor * 2 for name, tensor in model.state_dict().items()}
        model.load_state_dict(loaded)
        plain.load_state_dict(loaded)
        if rank == 0:
            with torch.no_grad():
                for number in range(2):
                    assert torch.equal(model(batch(rank, number)), plain(batch(rank, number)))
        assert torch.equal(model(batch(rank, 1)), plain(batch(rank, 1)))
        assert_same_weights(model, plain)
        child = os.fork()
        if child == 0:
            os._exit(looked_at(model, plain))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        before = whole(handle.stats().disk_bytes)
        for layer in (*model.layers, *plain.layers):
            layer.requires_grad_(False)
            torch.manual_seed(1)
            layer.down, layer.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)  # type: ignore[assignment]
        optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for number in range(2):
            loss = model(batch(rank, number))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert whole(handle.stats().disk_bytes) > before  # more blocks have moved there, or the adapters have
        assert whole(handle.stats().host_peak_bytes) <= 2**16 * distributed.get_world_size()
        if rank == 1:
            model.layers[3].linear.weight.data.mul_(2)  # type: ignore[union-attr,operator]
        with pytest.raises(StateError, match=r"'layers.3' were written on ranks \[1\] alone"):
            model(batch(rank, 2))


def looked_at(model: nn.Module, plain: nn.Module) -> int:
    """In a process that was forked: homes can be read, passes and steps are refused."""
    assert_same_weights(model, plain)
    with pytest.raises(StateError, match="forked"):
        model(batch(0, 0))
    with pytest.raises(StateError, match="forked"):
        optim.AdamW(model.parameters()).step()
    return 0


def saved(directory: str) -> None:
    """The first rank saves what all ranks have; state on disk comes from all of them."""
    model = Model()
    with offloaded(model, **on_disk(directory)):
        optimizer = optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.05, tier="disk", disk=f"{directory}/state")
        train_by(model, optimizer, range(3))
        optimizer.consolidate_state_dict(to=0)
        if distributed.get_rank() == 0:
            headrace.save(f"{directory}/saved", model, optimizer, extra={"step": 3})
        distributed.barrier()
        train_by(model, optimizer, range(3, 5))
        if distributed.get_rank() == 0:
            torch.save(model.state_dict(), f"{directory}/after.pt")


def resumed(directory: str, tier: str) -> None:
    """On any number of ranks the run goes on with the same global batches."""
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    where = on_disk(directory) if tier == "disk" else {}
    with offloaded(model, **where):
        settings: Any = {"tier": "disk", "disk": f"{directory}/state"} if tier == "disk" else {}
        optimizer = optim.AdamW(model.parameters(), lr=0.01, max_grad_norm=0.05, **settings)
        assert headrace.load(f"{directory}/saved", model, optimizer) == {"step": 3}
        train_by(model, optimizer, range(3, 5))
        same_weights_as(model, torch.load(f"{directory}/after.pt"))


def frozen_weights_stay_in_their_checkpoint(directory: str) -> None:
    """Of a model whose weights lie in a file, those that are trained alone move to the disk tier."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if rank == 0:
        save_file(Model().state_dict(), f"{directory}/model.safetensors")
    distributed.barrier()
    with torch.device("meta"):
        model = Model()
    single = Model()
    for one in (model, single):
        for layer in one.layers[1:]:
            layer.requires_grad_(False)
    budget = {"host_memory": 120 * 2**10, "checkpoint": f"{directory}/model.safetensors"}
    with offloaded(model, **(on_disk(directory) | budget)) as handle, offloaded(single, mesh=None):
        mine, theirs = (optim.AdamW(one.parameters(), lr=0.01) for one in (model, single))  # frozen ones, too
        for number in range(3):
            loss = model(batch(rank, number))
            loss.backward()
            for one in range(world):
                (single(batch(one, number)) / world).backward()
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
            model.state_dict()  # a look is no write
        assert_same_weights(model, single)
        stats = handle.stats()
        assert stats.fetch_bytes > 0
        assert 0 < whole(stats.disk_bytes) < 3 * 2**14 + 4 * 2**14  # of what is trained, and its gradients
        assert whole(stats.host_peak_bytes) <= budget["host_memory"]


def trains_until_a_rank_is_gone(directory: str) -> None:
    """With weights, activations and state on disk."""
    model = Model()
    with offloaded(model, **on_disk(directory, 2**17), activations={"tier": "disk", "min_bytes": 0}):
        optimizer = optim.AdamW(
            model.parameters(), max_grad_norm=0.05, overlap="forward", tier="disk", disk=f"{directory}/state"
        )
        steps_until_a_rank_is_gone(model, optimizer)


def refusals(directory: str) -> None:
    """A directory that is in use is an error on all ranks."""
    where = on_disk(directory)
    with offloaded(Model(), **where), pytest.raises((StateError, DiskError), match=r"disk (tier|store)"):
        headrace.offload(Model(), device="cpu", mesh=cpu_mesh(), **where)
