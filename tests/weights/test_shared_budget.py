"""Do models that share a budget keep it, give way in turn, and compute what they would alone?"""

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.memory.shared_budget import Share, current_budget
from headrace.weights.rest import budgets
from tests.support.held import Allocations, allocated_bytes, is_counted, weight_bytes
from tests.support.loops import adamw
from tests.support.models import Layer, Stack, seeded

WIDTH = 64


def stack(layers: int, seed: int = 0) -> Stack:
    return seeded(lambda: Stack(Layer(WIDTH) for _ in range(layers)), seed=seed)


class Normed(nn.Module):
    """A model with buffers that its passes write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


LAYER_BYTES = weight_bytes(Layer(WIDTH))
BATCH = torch.linspace(-1, 1, 4 * WIDTH).reshape(4, WIDTH)


def offloaded(shared: headrace.SharedBudget, device: torch.device, *models: nn.Module) -> list[headrace.Offloaded]:
    with shared:
        return [headrace.offload(model, device=device) for model in models]


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(BATCH).cpu()  # type: ignore[no-any-return]


def test_models_in_turn_keep_one_budget(compute_device):
    sizes = (4, 8, 16)
    plain = [run(stack(layers, seed)) for seed, layers in enumerate(sizes)]
    models = [stack(layers, seed) for seed, layers in enumerate(sizes)]
    allocations = Allocations(compute_device)
    shared = headrace.budget(device_memory=8 * LAYER_BYTES)
    handles = offloaded(shared, compute_device, *models)
    for _ in range(6):
        for model, expected in zip(models, plain, strict=True):
            assert torch.equal(run(model), expected)
    assert 7 * LAYER_BYTES < shared.device_peak_bytes <= 8 * LAYER_BYTES
    assert allocations.peak_bytes < 8.5 * LAYER_BYTES  # with activations
    for handle in handles:
        assert handle.stats().device_budget_bytes == 8 * LAYER_BYTES
        handle.remove()


def test_what_fits_is_not_read_again(compute_device):
    models = [stack(4, seed) for seed in range(3)]
    shared = headrace.budget(device_memory=12 * LAYER_BYTES)
    handles = offloaded(shared, compute_device, *models)
    for _ in range(3):
        for model in models:
            run(model)
    assert [handle.stats().onload_bytes for handle in handles] == [4 * LAYER_BYTES] * 3
    assert shared.device_peak_bytes == 12 * LAYER_BYTES


def test_who_was_used_longest_ago_gives_way(compute_device):
    first, second, third = (stack(4, seed) for seed in range(3))
    shared = headrace.budget(device_memory=8 * LAYER_BYTES)
    handles = offloaded(shared, compute_device, first, second, third)
    for _ in range(4):
        run(first)
    for _ in range(4):
        run(second)
    run(first)
    before = [handle.stats().onload_bytes for handle in handles]
    assert before[:2] == [4 * LAYER_BYTES] * 2
    run(third)  # in the place of the second
    run(first)
    assert handles[0].stats().onload_bytes == before[0]
    run(second)
    assert handles[1].stats().onload_bytes > before[1]


def test_training_in_turn(compute_device):
    """Each backward comes after the other model's forward, and each step after both backwards."""

    def train(models: list[Stack], steps: int) -> list[torch.Tensor]:
        optimizers = [adamw(model.parameters()) for model in models]
        for step in range(steps):
            losses = [model(BATCH + step).square().mean() for model in models]
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    expected = train([stack(6, 0), stack(6, 1)], 4)
    models = [stack(6, 0), stack(6, 1)]
    shared = headrace.budget(device_memory=4 * LAYER_BYTES)
    offloaded(shared, compute_device, *models)
    assert all(map(torch.equal, train(models, 4), expected))
    assert 3 * LAYER_BYTES < shared.device_peak_bytes <= 4 * LAYER_BYTES


def test_one_model_calls_another(compute_device):
    """As a hook does: the inner model takes room that the outer one's pass does not use at the moment."""

    def joined(outer: Stack, inner: Stack) -> None:
        hook = lambda _module, _args, output: output + inner(output.detach()).to(output.device)  # noqa: E731
        outer.layers[2].register_forward_hook(hook)

    models = [stack(6, 0), stack(3, 1)]
    joined(*models)
    expected = run(models[0])
    models = [stack(6, 0), stack(3, 1)]
    shared = headrace.budget(device_memory=3 * LAYER_BYTES)
    offloaded(shared, compute_device, *models)
    joined(*models)
    for _ in range(4):
        assert torch.equal(run(models[0]), expected)
    assert shared.device_peak_bytes <= 3 * LAYER_BYTES


def test_a_model_that_fits_gives_way_before_its_backward(compute_device):
    """Alone it would have autograd keep weights that are on the device, from the third step on."""

    def train(shared: headrace.SharedBudget | None) -> list[torch.Tensor]:
        model, reference = stack(6, 0), seeded(lambda: Stack(Layer(2 * WIDTH) for _ in range(2)), seed=1)
        if shared is not None:
            offloaded(shared, compute_device, model, reference)
        found = []
        for step in range(5):
            loss = model(BATCH + step).square().mean()
            with torch.no_grad():
                found.append(reference(torch.ones(4, 2 * WIDTH)).cpu())
            loss.backward()
        return [*found, *(parameter.grad for parameter in model.parameters())]

    shared = headrace.budget(device_memory=8 * LAYER_BYTES)
    assert all(map(torch.equal, train(shared), train(None)))
    assert shared.device_peak_bytes <= 8 * LAYER_BYTES


def test_residents_give_way_last(compute_device):
    models = [stack(4, seed) for seed in range(2)]
    shared = headrace.budget(device_memory=4 * LAYER_BYTES)
    with shared:
        handles = [headrace.offload(model, device=compute_device, resident=["layers.0"]) for model in models]
    expected = [run(stack(4, seed)) for seed in range(2)]
    for _ in range(4):
        for model, outcome in zip(models, expected, strict=True):
            assert torch.equal(run(model), outcome)
    assert shared.device_peak_bytes <= 4 * LAYER_BYTES
    assert all(handle.stats().onload_bytes > 4 * LAYER_BYTES for handle in handles)


def test_sleep_frees_the_device(compute_device):
    torch.manual_seed(0)
    plain, model = Normed(), Normed()
    model.load_state_dict(plain.state_dict())
    handle = headrace.offload(model, device=compute_device, device_memory=2 * weight_bytes(model))
    before = allocated_bytes(compute_device)
    for _ in range(3):
        assert torch.equal(model(BATCH).detach().cpu(), plain(BATCH).detach())
    assert not is_counted(compute_device) or allocated_bytes(compute_device) > before + weight_bytes(model)
    handle.sleep()
    handle.reset_stats()
    assert handle.stats().device_peak_bytes == 0
    assert allocated_bytes(compute_device) == before
    assert torch.equal(model.layers[0][1].running_mean, plain.layers[0][1].running_mean)
    for _ in range(2):
        assert torch.equal(model(BATCH).detach().cpu(), plain(BATCH).detach())
    assert handle.stats().onload_bytes == weight_bytes(model)
    handle.remove()
    with pytest.raises(headrace.StateError, match=r"sleep\(\) came after remove"):
        handle.sleep()


def test_sleep_between_forward_and_backward(compute_device):
    plain, model = stack(4), stack(4)
    handle = headrace.offload(model, device=compute_device, device_memory=8 * LAYER_BYTES)
    for _ in range(4):
        for one in (plain, model):
            loss = one(BATCH).square().mean()
            if one is model:
                handle.sleep()
            loss.backward()
        for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter.grad, other.grad)


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_sleep_takes_back_what_optimizers_have(emu_device, overlap):
    device = torch.device("emu:1")

    def train(*, sleeps: bool) -> tuple[list[torch.Tensor], int]:
        """The weights after some steps, and the most bytes that were on the device between them."""
        model = stack(4)
        handle = headrace.offload(model, device=device, device_memory="4MiB")
        before, held_bytes = allocated_bytes(device), 0
        optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-2, update="device", overlap=overlap)
        for _ in range(4):
            model(BATCH).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if sleeps:
                handle.sleep()
                handle.reset_stats()
                assert handle.stats().device_peak_bytes == 0
            held_bytes = max(held_bytes, allocated_bytes(device) - before)
        handle.remove()
        return [parameter.detach().clone() for parameter in model.parameters()], held_bytes

    expected, kept_bytes = train(sleeps=False)
    found, held_bytes = train(sleeps=True)
    assert all(map(torch.equal, found, expected))
    assert held_bytes == 0
    assert kept_bytes > 4 * LAYER_BYTES


@pytest.mark.parametrize("when", ["amid a pass", "as a pass begins", "as it wakes up"])
def test_two_threads_are_refused(compute_device, monkeypatch, when):
    models = [stack(4, seed) for seed in range(2)]
    handles = offloaded(headrace.budget(device_memory=4 * LAYER_BYTES), compute_device, *models)
    check_turn, errors = Share.check_turn, []

    def call_the_other(*_: object) -> None:
        def call() -> None:
            try:
                run(models[1])
            except headrace.StateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def check_before_the_other(share: Share) -> None:
        """The other thread comes when this one has found nobody, and has not begun."""
        check_turn(share)
        if threading.current_thread() is threading.main_thread():
            call_the_other()

    with monkeypatch.context() as patch:
        if when == "amid a pass":
            hook = models[0].layers[1].register_forward_hook(call_the_other)
        else:
            patch.setattr(Share, "check_turn", check_before_the_other)
        if when == "as it wakes up":
            handles[0].wake()
        else:
            run(models[0])
    if when == "amid a pass":
        hook.remove()
    (error,) = errors
    assert "Stack, with which this model shares a budget, computes on thread" in error
    assert handles[1].stats().onload_bytes == 0
    for seed, model in enumerate(models):
        assert torch.equal(run(model), run(stack(4, seed)))


def test_host_memory_is_what_others_left(compute_device):
    models = [stack(4, seed) for seed in range(2)]
    weights = weight_bytes(models[0])
    page = 4096
    with headrace.budget(host_memory=weights + weights // 2 + 8 * page) as shared:
        handle = headrace.offload(models[0], device=compute_device, device_memory=2 * LAYER_BYTES)
        with pytest.raises(headrace.BudgetError, match=r"weights need .* of host memory in all; host_memory allows"):
            headrace.offload(models[1], device=compute_device, device_memory=2 * LAYER_BYTES)
        assert weights <= shared.host_peak_bytes <= weights + 8 * page
        run(models[0])
        handle.remove()
        headrace.offload(models[1], device=compute_device, device_memory=2 * LAYER_BYTES)
    assert repr(shared).endswith("shared by Stack>")


def test_a_model_on_the_host_gives_way_to_a_later_one(compute_device, tmp_path):
    """Its blocks move to disk, and are read from there; the later one rests on the host."""
    width = 256
    expected = []
    for seed in range(2):
        model = seeded(lambda: Stack(Layer(width) for _ in range(6)), seed=seed)
        expected.append(model(torch.linspace(-1, 1, width).expand(2, -1)).detach())
    first, second = (seeded(lambda: Stack(Layer(width) for _ in range(6)), seed=seed) for seed in range(2))
    weights, layer = weight_bytes(first), weight_bytes(first.layers[0])
    with headrace.budget(device_memory=3 * layer, host_memory=weights * 3 // 2) as shared:
        one = headrace.offload(first, device=compute_device, disk=tmp_path)
        assert one.stats().disk_bytes == 0
        for _ in range(2):
            with torch.no_grad():
                first(torch.ones(2, width))
        other = headrace.offload(second, device=compute_device)
    for _ in range(3):
        for model, outcome in zip((first, second), expected, strict=True):
            with torch.no_grad():
                assert torch.equal(model(torch.linspace(-1, 1, width).expand(2, -1)).cpu(), outcome)
    assert 2 * layer <= one.stats().disk_bytes <= weights + 6 * 4096  # whole pages
    assert other.stats().disk_bytes == other.stats().fetch_bytes == 0
    assert one.stats().fetch_bytes >= 3 * 2 * layer
    assert shared.host_peak_bytes <= weights * 3 // 2
    assert shared.device_peak_bytes <= 3 * layer


def two_on_the_host(device: torch.device, directory: Any, share: float) -> tuple[Any, ...]:
    """Two frozen models in host memory, each with a disk, whose budget is `share` times the bytes of one."""
    models = [seeded(lambda: Stack(Layer(256) for _ in range(6)), seed=seed).requires_grad_(False) for seed in range(2)]
    handles = []
    with headrace.budget(device_memory="2MiB", host_memory=int(weight_bytes(models[0]) * share)) as shared:
        for number, model in enumerate(models):
            (directory / str(number)).mkdir()
            handles.append(headrace.offload(model, device=device, disk=directory / str(number)))
    return shared, models, handles


def test_who_is_asked_for_host_memory_asks_nobody(compute_device, tmp_path):
    """Else the model that wants room would be asked for its own blocks first."""
    _shared, models, (first, second) = two_on_the_host(compute_device, tmp_path, 2.1)
    assert first.stats().disk_bytes == second.stats().disk_bytes == 0
    assert second._ledger.has_room(weight_bytes(models[1]) // 2)
    assert first.stats().disk_bytes > 0
    assert second.stats().disk_bytes == 0


def test_a_model_that_cannot_give_way_on_the_host(compute_device, tmp_path):
    """A user holds its memory, so nothing of it can move to disk. The other one's gradients go to disk then."""
    shared, (first, second), _ = two_on_the_host(compute_device, tmp_path, 2.05)
    kept = [parameter.data for parameter in first.parameters()]
    plain, batch = seeded(lambda: Stack(Layer(256) for _ in range(6)), seed=1), torch.ones(4, 256)
    for model in (plain, second.requires_grad_(True)):
        model(batch).square().mean().backward()
    for own, other in zip(second.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert shared.host_peak_bytes <= weight_bytes(first) * 2.05
    del kept


def test_training_in_turn_with_a_disk(compute_device, tmp_path):
    """The second model's gradients leave the room that the first one's backward, which comes later, needs."""

    def train(models: list[Stack]) -> list[torch.Tensor]:
        for step in range(3):
            losses = [model(torch.ones(4, 256) + step).square().mean() for model in models]
            for loss in losses:
                loss.backward()
        return [parameter.grad for model in models for parameter in model.parameters()]

    shared, models, handles = two_on_the_host(compute_device, tmp_path, 2.5)
    for model in models:
        model.requires_grad_(True)
    plain = [seeded(lambda: Stack(Layer(256) for _ in range(6)), seed=seed) for seed in range(2)]
    assert all(map(torch.equal, train(models), train(plain)))
    assert shared.host_peak_bytes <= weight_bytes(models[0]) * 2.5
    assert sum(handle.stats().disk_bytes for handle in handles) > 0


def test_threads_enter_a_budget_at_once():
    shared, entered, left = headrace.budget(device_memory="1MiB"), threading.Event(), threading.Event()
    errors = []

    def enter() -> None:
        try:
            with shared:
                entered.set()
                left.wait()
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    with shared:
        thread.start()
        entered.wait()
    left.set()
    thread.join()
    assert not errors
    assert current_budget() is None


def test_a_host_budget_leaves_the_device_to_each(emu_device, monkeypatch):
    """What a model has there is not given up for another: it counts as taken."""
    device = torch.device("emu:1")
    with headrace.budget(host_memory="64MiB"):
        first = stack(8)
        headrace.offload(first, device=device, device_memory="1MiB")
        run(first)
        monkeypatch.setattr(budgets, "free_device_bytes", lambda _: 2 * LAYER_BYTES)
        with pytest.raises(headrace.BudgetError, match="more than emu:1 has free"):
            headrace.offload(stack(8), device=device, device_memory=8 * LAYER_BYTES)


def test_generation_between_steps(emu_device):
    """With a budget for one of two models, weights that stay are loaded once for all tokens."""
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    device, prompts = torch.device("emu:1"), torch.arange(16).reshape(2, 8)

    def step(policy: Any, reference: Any, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        with torch.no_grad():
            answers = policy.generate(prompts, max_new_tokens=32, min_new_tokens=32, do_sample=True, pad_token_id=0)
            expected = reference(answers).logits.log_softmax(-1)
        loss = F.kl_div(policy(answers).logits.log_softmax(-1), expected, reduction="batchmean", log_target=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach().cpu()

    def train(shares: float | None) -> tuple[list[torch.Tensor], list[int]]:
        """The losses, and the bytes that each model loaded in the last step."""
        models = [seeded(LlamaForCausalLM, config, seed=seed) for seed in range(2)]
        models[1].requires_grad_(False)
        nbytes = weight_bytes(models[0])
        if shares is None:
            handles = [headrace.offload(one, device=device, device_memory=nbytes // 2) for one in models]
        else:
            handles = offloaded(headrace.budget(device_memory=int(nbytes * shares)), device, *models)
        optimizer = headrace.optim.AdamW(models[0].parameters(), lr=1e-3)
        losses = []
        for seed in range(3):
            for handle in handles:
                handle.reset_stats()
            losses.append(step(*models, optimizer, seed))
        return losses, [handle.stats().onload_bytes / nbytes for handle in handles]

    apart, loaded_apart = train(None)
    shared, loaded = train(1.05)
    assert all(map(torch.equal, apart, shared))
    assert loaded[0] < 2.1
    assert loaded[1] <= 1
    assert loaded_apart[0] > 20


def test_what_is_refused(compute_device):
    with pytest.raises(ValueError, match=r"budget\(\) limits nothing; give"):
        headrace.budget()
    with pytest.raises(TypeError, match=r"device_memory is 1\.5"):
        headrace.budget(device_memory=1.5)
    shared = headrace.budget(device_memory="1MiB")
    with shared, pytest.raises(ValueError, match=r"device_memory is given, and headrace\.budget"):
        headrace.offload(stack(2), device=compute_device, device_memory="1MiB")
    with shared, pytest.raises(ValueError, match="mesh= has budgets of its own"):
        headrace.offload(stack(2), device=compute_device, mesh=object())
    if compute_device.type != "cpu":
        with shared:
            headrace.offload(stack(2), device=compute_device)
            with pytest.raises(ValueError, match="a budget is for one device"):
                headrace.offload(stack(2), device="cpu")
    assert repr(headrace.budget(device_memory="1MiB")) == "<budget(device_memory='1 MiB'), shared by nothing yet>"


def test_activations_on_the_host_count(compute_device, tmp_path):
    """Blocks of a model move to disk for the activations of another one, which is on the device."""
    first, second, plain = stack(16), stack(8, 1).to(compute_device), stack(8, 1).to(compute_device)
    batch = torch.linspace(-1, 1, 200 * WIDTH).reshape(200, WIDTH).to(compute_device)
    budget_bytes = weight_bytes(first) + 24 * LAYER_BYTES
    with headrace.budget(device_memory=3 * LAYER_BYTES, host_memory=budget_bytes) as shared:
        other = headrace.offload(first.requires_grad_(False), device=compute_device, disk=tmp_path)
        handle = headrace.offload_activations(second, min_bytes=1024, all_leave=True)
    for _ in range(3):
        losses = [model(batch).square().mean() for model in (plain, second)]
        assert torch.equal(*losses)
        assert shared.host_held_bytes <= budget_bytes
        for loss in losses:
            loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), second.parameters(), strict=True))
    assert handle.stats().host_peak_bytes > 24 * LAYER_BYTES
    assert other.stats().disk_bytes > 0
    assert shared.host_peak_bytes <= budget_bytes
    assert torch.equal(run(first), run(stack(16)))
    with headrace.budget(host_memory=4 * LAYER_BYTES):
        headrace.offload_activations(plain, min_bytes=1024, all_leave=True)
    with pytest.raises(headrace.BudgetError, match=r"activations need .* host_memory"):
        plain(batch)
