"""May forwards and backwards come in any number and order, with modules called twice, skipped, or on their own?"""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import headrace
from headrace.weights.movement.residency import Residency
from headrace.weights.passes import parameter_access
from tests.matrix.models import DENSE, WIDTH, Batch, Decoder, DecoderLayer, GatedMLP
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.models import Checkpointed, linears, seeded
from tests.support.offloaded import Script, assert_exact, offload


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return DENSE.loss(model(batch[0]), batch[1])


def repeated(device: torch.device, cycle: Callable[[nn.Module, list[Batch], int], Any], times: int = 4) -> Script:
    """A script that repeats a cycle of forwards and backwards, steps after each and keeps gradients and results."""

    def script(model: nn.Module) -> Outcome:
        batches = DENSE.on(device, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        outcome = Outcome()
        for index in range(times):
            result = cycle(model, batches, index)
            if isinstance(result, Tensor):
                outcome.outputs.append(on_cpu(result))
            outcome.read_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        return outcome.read(model)

    return script


# several forwards and backwards -------------------------------------------------------------------------------------
def sum_of_two(model: nn.Module, batches: list[Batch], _index: int) -> None:
    (loss_of(model, batches[0]) + loss_of(model, batches[1])).backward()


def forward_forward_backward_backward(model: nn.Module, batches: list[Batch], _index: int) -> None:
    losses = [loss_of(model, batch) for batch in batches[:2]]
    for loss in losses:
        loss.backward()


def last_forward_first(model: nn.Module, batches: list[Batch], _index: int) -> None:
    losses = [loss_of(model, batch) for batch in batches[:3]]
    for loss in reversed(losses):
        loss.backward()


def forward_without_backward(model: nn.Module, batches: list[Batch], _index: int) -> Tensor:
    unused = loss_of(model, batches[0])
    loss_of(model, batches[1]).backward()
    return unused


def kept_graph(model: nn.Module, batches: list[Batch], _index: int) -> None:
    loss = loss_of(model, batches[0])
    loss.backward(retain_graph=True)
    loss.backward()


def changing_number(model: nn.Module, batches: list[Batch], index: int) -> None:
    for batch in batches[: 1 + index % 3]:
        loss_of(model, batch).backward()


def output_by_output(model: nn.Module, batches: list[Batch], _index: int) -> Tensor:
    """Backward of parts of the output, and with respect to what went in."""
    hidden = torch.ones(2, 4, WIDTH, device=batches[0][0].device, requires_grad=True)
    output = model.layers[2](model.layers[1](hidden))  # type: ignore[index]
    gradient = torch.autograd.grad(output[0].sum(), hidden, retain_graph=True)[0]
    output[1].square().sum().backward()
    return gradient + hidden.grad  # type: ignore[operator]


ORDERS = [
    sum_of_two,
    forward_forward_backward_backward,
    last_forward_first,
    forward_without_backward,
    kept_graph,
    changing_number,
]


@pytest.mark.core(checkpointing="none")
@pytest.mark.parametrize("cycle", ORDERS)
@pytest.mark.parametrize("checkpointing", ["none", "non-reentrant"])
def test_orders(cycle: Any, checkpointing: str, compute_device: torch.device) -> None:
    assert_exact(lambda: DENSE.build(checkpointing), repeated(compute_device, cycle), compute_device)


def test_layers_called_from_outside(compute_device: torch.device) -> None:
    assert_exact(DENSE.build, repeated(compute_device, output_by_output), compute_device)


# checkpoints in other places ----------------------------------------------------------------------------------------
class CheckpointInside(Decoder):
    """Checkpoints inside of each layer, around its parts."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            x = x + self.run(layer.attention, layer.attention_norm(x))
            x = x + self.run(layer.mlp, layer.mlp_norm(x))
        return self.head(self.norm(x))


class OwnCheckpoint(DecoderLayer):
    reentrant = False

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + checkpoint(lambda y: self.mlp(self.mlp_norm(y)), x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


def with_own_checkpoints(reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        layer.__class__ = OwnCheckpoint
        layer.reentrant = reentrant
    return model


class PairsCheckpointed(Decoder):
    """One checkpoint around two layers."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda y, a=first, b=second: b(a(y)), x, use_reentrant=self.checkpointing == "reentrant")
        return self.head(self.norm(x))


def one_pass(model: nn.Module, batches: list[Batch], _index: int) -> Tensor:
    loss = loss_of(model, batches[0])
    loss.backward()
    return loss


@pytest.mark.parametrize("kind", [CheckpointInside, PairsCheckpointed])
@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_checkpoints_around_parts_and_pairs(kind: Any, checkpointing: str, compute_device: torch.device) -> None:
    def make() -> Checkpointed:
        torch.manual_seed(0)
        model: Checkpointed = kind()
        model.checkpointing = checkpointing
        return model

    assert_exact(make, repeated(compute_device, one_pass), compute_device)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_inside_a_block(reentrant: bool, compute_device: torch.device) -> None:
    assert_exact(lambda: with_own_checkpoints(reentrant), repeated(compute_device, one_pass), compute_device)


def test_saved_tensors_of_the_users_own_context(compute_device: torch.device) -> None:
    packed_bytes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        packed_bytes.append(tensor.nbytes)
        return tensor.to("cpu", copy=True)

    def cycle(model: nn.Module, batches: list[Batch], _index: int) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.to(compute_device)):
            loss = loss_of(model, batches[0])
        loss.backward()
        return loss

    assert_exact(DENSE.build, repeated(compute_device, cycle), compute_device)
    plain, offloaded = (sum(half) for half in (packed_bytes[: len(packed_bytes) // 2], packed_bytes))
    assert offloaded < 2 * plain  # weights are no business of theirs


# calls ---------------------------------------------------------------------------------------------------------------
class Wandering(Decoder):
    """Layers twice, skipped, in another order, and differently each time."""

    def __init__(self, order: Callable[[int], list[int]]) -> None:
        super().__init__()
        self.order = order
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.order(self.calls):
            x = self.layers[index](x)
        self.calls += 1
        return self.head(self.norm(x))


WALKS: dict[str, Callable[[int], list[int]]] = {
    "twice": lambda call: [0, 0, 1, 2, 1, 2, 3, 4, 5],
    "skipped": lambda call: [index for index in range(6) if index != call % 6],
    "backwards": lambda call: [5, 4, 3, 2, 1, 0],
    "changing": lambda call: [(index * (call + 1)) % 6 for index in range(6)],
    "one_only": lambda call: [3],
}


@pytest.mark.parametrize("walk", WALKS)
def test_layers_in_any_order(walk: str, compute_device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Wandering(WALKS[walk])

    if walk == "one_only":  # so few weights in use fit the budget
        plain = repeated(compute_device, one_pass)(make().to(compute_device))
        model = make()
        handle = offload(model, compute_device)
        assert_same(repeated(compute_device, one_pass)(model), plain)
        assert 0 < handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes
    else:
        assert_exact(make, repeated(compute_device, one_pass), compute_device)


class Borrowing(Decoder):
    """Uses weights of children without calling them: in the model itself, and inside a layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding.weight)
        for layer in self.layers:
            x = layer(x)
        first: Any = self.layers[0]
        x = x + F.linear(x, first.attention.query.weight) + x @ first.mlp.gate.weight.T @ first.mlp.up.weight
        return F.linear(self.norm(x), self.head.weight)


class BorrowingLayer(DecoderLayer):
    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        mlp = self.mlp
        assert isinstance(mlp, GatedMLP)
        y = self.mlp_norm(x + F.linear(self.attention_norm(x), self.attention.query.weight))
        return x + F.linear(F.silu(F.linear(y, mlp.gate.weight)), mlp.down.weight)


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_used_without_their_modules_call(frozen: bool, compute_device: torch.device) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        model = Borrowing()
        for layer in model.layers[3:]:
            layer.__class__ = BorrowingLayer
        if frozen:
            model.layers.requires_grad_(False)
        return model

    handle, _ = assert_exact(make, repeated(compute_device, one_pass), compute_device, 0.5)
    assert handle.stats().device_peak_bytes <= handle.stats().device_budget_bytes


def test_generation_step_by_step(compute_device: torch.device) -> None:
    """Many short passes without gradients: the plan goes round from the last block to the first."""
    plain = DENSE.build(training="inference").to(compute_device)
    model = DENSE.build(training="inference")
    handle = offload(model, compute_device)

    def generate(model: nn.Module) -> Tensor:
        tokens = torch.tensor([[1, 2]], device=compute_device)
        with torch.no_grad():
            for _ in range(6):
                tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        return on_cpu(tokens)

    expected = generate(plain)
    assert same(generate(model), expected)
    handle.reset_stats()
    assert same(generate(model), expected)
    assert handle.plan is not None
    assert handle.stats().onload_bytes == 6 * handle.plan.predicted.onload_bytes


def test_one_thread_at_a_time(compute_device: torch.device) -> None:
    """A second one is told so at once, and does not disturb the first."""
    tokens = DENSE.batches(1)[0][0].to(compute_device)
    expected = DENSE.build(training="inference").to(compute_device)(tokens)
    model: Any = DENSE.build(training="inference")
    offload(model, compute_device)
    refusals: list[BaseException] = []

    def choose_device() -> None:
        if compute_device.index is not None:
            torch.accelerator.set_device_index(compute_device.index)

    def call_too() -> None:
        choose_device()
        with pytest.raises(headrace.StateError, match=r"computing on thread.*Lock") as refusal:
            model(tokens)
        refusals.append(refusal.value)

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=call_too)
        thread.start()
        thread.join()

    hook = model.layers[3].register_forward_pre_hook(meanwhile)
    assert same(on_cpu(model(tokens)), on_cpu(expected))
    assert len(refusals) == 1
    hook.remove()
    later: list[Tensor] = []
    thread = threading.Thread(target=lambda: (choose_device(), later.append(on_cpu(model(tokens)))))
    thread.start()
    thread.join()
    assert same(later[0], on_cpu(expected))


def test_a_forward_before_the_backward_of_another_undoes_nothing(
    compute_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DPO and GANs have it: nothing was interrupted."""
    undone: list[Any] = []
    monkeypatch.setattr(Residency, "mend", lambda *arguments: undone.append(arguments))
    assert_exact(DENSE.build, repeated(compute_device, forward_forward_backward_backward), compute_device)
    assert undone == []


class Direct(nn.Module):
    """Uses the weight of a layer without calling that, and an encoder, which looks at weights first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(F.linear(self.layers[0](x), self.layers[1].weight)) + self.layers[2](x)


def test_a_model_for_each_thread() -> None:
    """Which take turns at every line that concerns all models."""
    models, found = [seeded(Direct).eval() for _ in range(3)], list[Tensor]()
    x = torch.randn(1, 2, 8)
    with torch.no_grad():
        expected = models[0](x)
    for model in models:
        headrace.offload(model, device="cpu", device_memory="3KiB")

    def others_too(frame: FrameType, _event: str, _arg: Any) -> Any:
        if frame.f_code.co_filename != parameter_access.__file__:
            return None
        time.sleep(0)
        return others_too

    @torch.no_grad()
    def work(model: nn.Module) -> None:
        sys.settrace(others_too)
        try:
            found.extend(model(x) for _ in range(10))
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, models))
    assert len(found) == 30
    assert all(same(one, expected) for one in found)


def test_functional_calls(compute_device: torch.device) -> None:
    """With tensors in the place of parameters, which are as they were afterwards; and under a transform."""

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        tokens = DENSE.batches(1)[0][0].to(compute_device)
        halves = {name: on_cpu(p).to(compute_device) / 2 for name, p in model.named_parameters()}
        with torch.no_grad():
            for _ in range(3):
                outcome.outputs.append(on_cpu(torch.func.functional_call(model, halves, (tokens,))))
                outcome.outputs.append(on_cpu(model(tokens)))
        return outcome.read(model)

    assert_exact(DENSE.build, script, compute_device)


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_function_transforms(transform: str) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return linears(5, 8, nn.Tanh)

    def script(model: nn.Module) -> Outcome:
        outcome = Outcome()
        with torch.no_grad():
            for _ in range(3):
                x = torch.ones(4, 8)
                both = torch.func.jvp(model, (x,), (x,)) if transform == "jvp" else [torch.func.vmap(model)(x)]
                outcome.outputs += [on_cpu(value) for value in both]
                outcome.outputs.append(on_cpu(model(x)))
        return outcome.read(model)

    assert_exact(make, script, torch.device("cpu"), 0.5)
