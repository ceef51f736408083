"""Is the first step after a resume planned, as the last one before it was?"""

import copy
import os
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace import StateError
from headrace.weights.movement.trace import TraceBook
from tests.support.held import weight_bytes
from tests.support.loops import adamw
from tests.support.models import Layer, Stack, seeded

BATCH = torch.linspace(-1, 1, 64).reshape(4, 16)


def run(device: torch.device, layers: int = 12, **options: Any) -> tuple[Stack, headrace.Offloaded, Any]:
    model = seeded(lambda: Stack(Layer() for _ in range(layers)))
    handle = headrace.offload(model, device=device, device_memory=weight_bytes(model) // 3, **options)
    return model, handle, adamw(model.parameters())


def step(model: Stack, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(BATCH).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach().cpu()


def evaluate(model: Stack) -> None:
    with torch.no_grad():
        model(BATCH)


def demands(handle: headrace.Offloaded, do: Any) -> int:
    handle.reset_stats()
    do()
    return handle.stats().demand_onloads


def test_the_first_step_is_prefetched(compute_device, tmp_path):
    model, handle, optimizer = run(compute_device)
    assert demands(handle, lambda: step(model, optimizer)) > 12
    for _ in range(3):
        step(model, optimizer)
        evaluate(model)
    settled = demands(handle, lambda: step(model, optimizer))
    assert settled <= 1
    headrace.save(tmp_path / "step-5", model, optimizer)
    expected = [step(model, optimizer) for _ in range(3)]
    model, handle, optimizer = run(compute_device)
    headrace.load(tmp_path / "step-5", model, optimizer)
    assert demands(handle, lambda: evaluate(model)) <= 1
    losses = []
    assert demands(handle, lambda: losses.append(step(model, optimizer))) <= 1
    losses += [step(model, optimizer) for _ in range(2)]
    assert all(map(torch.equal, losses, expected))


def test_other_blocks_learn_their_own(compute_device, tmp_path):
    model, handle, optimizer = run(compute_device)
    for _ in range(3):
        step(model, optimizer)
    headrace.save(tmp_path / "step-3", model, optimizer)
    expected = step(model, optimizer)
    model, handle, optimizer = run(compute_device, blocks=["layers.*"], resident=["layers.0"])
    headrace.load(tmp_path / "step-3", model, optimizer)
    losses = []
    assert demands(handle, lambda: losses.append(step(model, optimizer))) > 11
    assert torch.equal(losses[0], expected)


def test_what_was_learned_here_stays(compute_device, tmp_path):
    model, handle, optimizer = run(compute_device)
    evaluate(model)
    headrace.save(tmp_path / "step-0", model, optimizer)
    for _ in range(3):
        step(model, optimizer)
    headrace.load(tmp_path / "step-0", model, optimizer)
    assert demands(handle, lambda: step(model, optimizer)) <= 1


DAMAGE = {
    "nothing": lambda known: known.clear(),
    "a block that is not there": lambda known: known["traces"][0]["visits"][0][0].append(99),
    "a negative block": lambda known: known["traces"][0]["visits"][0][0].append(-1),
    "an unknown phase": lambda known: known["traces"][0]["visits"][0].__setitem__(1, "sideways"),
    "too few times": lambda known: known["traces"][0]["compute_seconds"].pop(),
    "endless times": lambda known: known["traces"][0]["compute_seconds"].__setitem__(0, float("inf")),
    "text for times": lambda known: known["traces"][0]["compute_seconds"].__setitem__(0, "long"),
    "a trace that is not there": lambda known: known["expected"][0].__setitem__(-1, 7),
    "a block twice in a visit": lambda known: known["traces"][0]["visits"][0][0].extend([0, 0]),
    "a visit of endless blocks": lambda known: known["traces"][0]["visits"].extend([[[0] * 99, "forward"]] * 9999),
    "more traces than there can be": lambda known: known["traces"].extend(known["traces"] * 99),
    "times whose sum is endless": lambda known: known["traces"][0]["compute_seconds"].__setitem__(0, 1e308),
    "bytes beyond all measure": lambda known: known["traces"][0].update(other_bytes=[10**400] * 24),
    "a load beyond all measure": lambda known: known["loads"].append([10**400, 1.0]),
    "a tensor for a trace": lambda known: known["traces"].__setitem__(0, torch.ones(2)),
    "a number for a module": lambda known: known["expected"][0].__setitem__(1, 7),
    "no visits": lambda known: known["traces"][0].update(visits=[], compute_seconds=[]),
    "a load of endless bytes": lambda known: known["loads"].append([float("inf"), 1.0]),
    "a load that takes no number": lambda known: known["loads"].append([4096, float("nan")]),
    "a load before its time": lambda known: known["loads"].append([4096, -1.0]),
    "tensors for blocks": lambda known: known["blocks"].__setitem__(0, [torch.ones(2), torch.ones(2)]),
    "tensors for numbers": lambda known: known["expected"].__setitem__(0, [torch.ones(2)] * 5),
    "a list for a name": lambda known: known["expected"][0].__setitem__(1, []),
    "text for all": lambda known: known.update(traces="none"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_cannot_be_is_not_believed(damage):
    model, handle, optimizer = run(torch.device("cpu"))
    for _ in range(3):
        step(model, optimizer)
    known = copy.deepcopy(handle.known())
    damage(known)
    model, handle, optimizer = run(torch.device("cpu"))
    assert not handle.restore(known)
    assert not handle.restore(None)
    plain = seeded(lambda: Stack(Layer() for _ in range(12)))
    assert torch.equal(step(model, optimizer), plain(BATCH).square().mean().detach())


def test_models_with_the_same_blocks_keep_their_own(tmp_path):
    """The second one is only evaluated, and has the same blocks as the first one."""
    found = []
    for _ in range(2):
        both = nn.ModuleList()
        handles = []
        for _ in range(2):
            model, handle, _ = run(torch.device("cpu"))
            both.append(model)
            handles.append(handle)
        found.append((both, handles))
    (both, _), (again, handles) = found
    first, second = both
    optimizer = adamw(first.parameters())
    for _ in range(2):
        step(first, optimizer)
        evaluate(second)
    headrace.save(tmp_path / "step-2", both)
    headrace.load(tmp_path / "step-2", again)
    first, second = again
    assert demands(handles[0], lambda: step(first, adamw(first.parameters()))) <= 1
    assert demands(handles[1], lambda: evaluate(second)) <= 1


def test_a_book_goes_on():
    model, handle, optimizer = run(torch.device("cpu"))
    for _ in range(2):
        step(model, optimizer)
        evaluate(model)
    known = handle.known()
    book = TraceBook()
    book.restore(known, 12)
    assert {key: book.known()[key] for key in ("traces", "expected")} == {
        key: known[key] for key in ("traces", "expected")
    }


@pytest.mark.parametrize("on_disk", [False, True])
def test_the_first_pass_of_another_process_is_prefetched(compute_device, tmp_path, on_disk):
    options = {"disk": tmp_path, "host_memory": 64 << 20} if on_disk else {}
    model, handle, _ = run(compute_device, **options)
    assert not handle.load_order(tmp_path / "order.json")  # there is none yet
    assert demands(handle, lambda: evaluate(model)) == 12
    for _ in range(2):
        evaluate(model)
    for _ in range(2):  # it takes the place of an older one
        handle.save_order(tmp_path / "order.json")
    with torch.no_grad():
        expected = model(BATCH)
    model, handle, _ = run(compute_device, **options)
    assert handle.load_order(str(tmp_path / "order.json"))
    outputs = []
    with torch.no_grad():
        assert demands(handle, lambda: outputs.append(model(BATCH))) <= 1
    assert handle.stats().onloads > 11
    assert torch.equal(outputs[0], expected)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["order.json"]


@pytest.mark.parametrize("text", [b"", b"null", b"[", b"\xff", b"[" * 100_000, b'{"blocks": [], "loads": []}'])
def test_a_damaged_order_changes_nothing(tmp_path, text):
    model, handle, _ = run(torch.device("cpu"))
    (tmp_path / "order.json").write_bytes(text)
    assert not handle.load_order(tmp_path / "order.json")
    assert not handle.load_order(tmp_path)
    assert demands(handle, lambda: evaluate(model)) == 12


def test_an_order_of_other_blocks_is_not_taken(tmp_path):
    model, handle, _ = run(torch.device("cpu"))
    evaluate(model)
    handle.save_order(tmp_path / "order.json")
    _, handle, _ = run(torch.device("cpu"), layers=11)
    assert not handle.load_order(tmp_path / "order.json")


def test_an_order_goes_where_a_link_leads(tmp_path):
    _, handle, _ = run(torch.device("cpu"))
    (tmp_path / "link").symlink_to(tmp_path / "order.json")
    for _ in range(2):
        handle.save_order(tmp_path / "link")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "order.json").is_file()


def test_where_no_order_can_be_written(tmp_path):
    model, handle, _ = run(torch.device("cpu"))
    evaluate(model)
    with pytest.raises(headrace.DiskError, match=r"order\.json cannot be written \(No such file or dir"):
        handle.save_order(tmp_path / "missing" / "order.json")
    (tmp_path / "order.json").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "order.json", tmp_path / "pipe", "/", "."):  # what root could replace, such as /dev/null
        with pytest.raises(headrace.DiskError, match=r"cannot be written \(it is no regular file\)"):
            handle.save_order(path)
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["order.json", "pipe"]
    with model.register_forward_hook(lambda *_: handle.save_order(tmp_path / "order")), pytest.raises(StateError):
        evaluate(model)
    handle.remove()
    for call in (handle.save_order, handle.load_order):
        with pytest.raises(StateError, match="after remove"):
            call(tmp_path / "order")
