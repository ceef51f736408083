"""Do modules with a policy compute in its dtypes, as if their weights, inputs and outputs were cast by hand?"""

import copy
import functools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.utils.checkpoint import checkpoint

import headrace
from tests.matrix import models
from tests.support.compare import Outcome, assert_same, on_cpu, same
from tests.support.held import weight_bytes
from tests.support.loops import random_batches
from tests.support.models import seeded
from tests.support.offloaded import offload

NARROW, WIDE = torch.bfloat16, torch.float32
WIDTH = 64
HALF = Policy(NARROW)
INTO_WIDE = Policy(NARROW, output_dtype=WIDE)
FOR_NORMS = Policy(WIDE, output_dtype=NARROW)
UNCAST = Policy(WIDE, cast_forward_inputs=False)  # a norm takes inputs in another dtype, too
LAYERS = [f"layers.{index}" for index in range(4)]
adamw = partial(torch.optim.AdamW, lr=0.01, fused=True)  # whose bits headrace.optim.AdamW has


class Layer(nn.Module):
    """Takes tensors by name, within a dict, too, and returns several."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, *, more: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y = self.down(self.up(self.norm(x)).tanh()) * more["scale"]
        return x + y, y.sum()


class Model(nn.Module):
    def __init__(self, *, recomputes: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in LAYERS)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        more = {"scale": torch.full((1,), 0.7, dtype=x.dtype, device=x.device), "rows": torch.arange(3)}
        for layer in self.layers:
            one = partial(layer, more=more)
            x, total = checkpoint(one, x, use_reentrant=False) if self.recomputes else one(x)
            x = x + total
        return self.head(x)  # type: ignore[no-any-return]


def by_hand(model: nn.Module, policies: dict[str, Policy], device: torch.device) -> nn.Module:
    """A copy whose parameters have the dtype that the nearest policy says, and whose modules cast by hooks.

    `policies`: by the names of modules, the outer ones first.
    """
    narrow = copy.deepcopy(model).to(device)
    own = {id(one): theirs for one, theirs in zip(narrow.parameters(), model.parameters(), strict=True)}
    for name, policy in policies.items():
        module = narrow.get_submodule(name)
        for parameter in module.parameters():
            parameter.data = own[id(parameter)].detach().to(device, policy.param_dtype)

        def inputs(_module: Any, args: Any, kwargs: Any, policy: Policy = policy) -> Any:
            return cast(args, policy.param_dtype), cast(kwargs, policy.param_dtype)

        def outputs(_module: Any, _args: Any, output: Any, policy: Policy = policy) -> Any:
            return cast(output, policy.output_dtype)

        if policy.cast_forward_inputs:
            module.register_forward_pre_hook(inputs, with_kwargs=True)
        module.register_forward_hook(outputs)
    return narrow


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if dtype is not None and value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: cast(item, dtype) for name, item in value.items()}
    return tuple(cast(item, dtype) for item in value) if isinstance(value, tuple) else value


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def expected_of(policies: dict[str, Policy], device: torch.device) -> Outcome:
    """Steps of two batches: gradients of casts are summed up in the dtype of the parameters."""
    model, outcome = seeded(Model), Outcome()
    optimizer = adamw(model.parameters())
    batches = random_batches(4, 3, WIDTH, device=device)
    for step in range(2):
        for batch in batches[2 * step : 2 * step + 2]:
            narrow = by_hand(model, policies, device)
            loss = loss_of(narrow, batch)
            outcome.outputs.append(on_cpu(loss))
            loss.backward()
            for parameter, theirs in zip(model.parameters(), narrow.parameters(), strict=True):
                assert theirs.grad is not None
                gradient = on_cpu(theirs.grad).to(parameter.dtype)
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        outcome.read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    narrow = by_hand(model, policies, device).eval()
    with torch.no_grad():
        outcome.outputs.append(on_cpu(narrow(batches[0])))
    return outcome.read(model)


def outcome_of(
    model: nn.Module,
    handle: Any,
    device: torch.device,
    make_optimizer: Callable[[Any], Any] = adamw,
    together: bool = False,
) -> Outcome:
    outcome = Outcome()
    optimizer = make_optimizer(model.parameters())
    batches = random_batches(4, 3, WIDTH, device=device)
    for step in range(2):
        two = batches[2 * step : 2 * step + 2]
        if together:
            outcome.outputs += on_cpu(handle.forward_backward(two, partial(loss_of, model)))
        for batch in () if together else two:
            loss = loss_of(model, batch)
            outcome.outputs.append(on_cpu(loss))
            loss.backward()
        outcome.read_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outcome.outputs.append(on_cpu(model(batches[0])))
    return outcome.read(model)


TWO_LEVELS = {"layers.1.norm": UNCAST, "": INTO_WIDE, "layers.*": HALF, "*.norm": FOR_NORMS}
TWO_LEVELS_BY_HAND = {"": INTO_WIDE} | dict.fromkeys(LAYERS, HALF) | {f"{one}.norm": FOR_NORMS for one in LAYERS}
TWO_LEVELS_BY_HAND["layers.1.norm"] = UNCAST


@functools.cache
def two_levels(device: torch.device) -> Outcome:
    return expected_of(TWO_LEVELS_BY_HAND, device)


@pytest.mark.parametrize(
    ("given", "by_hand", "memory"),
    [
        (INTO_WIDE, {"": INTO_WIDE}, "50%"),
        ({"layers": INTO_WIDE, "layers.2": None}, {one: INTO_WIDE for one in LAYERS if one != "layers.2"}, "400%"),
        (TWO_LEVELS, {}, None),
    ],
    ids=["whole", "list", "at_home"],
)
def test_training(given: Any, by_hand: dict[str, Policy], memory: str | None, compute_device: torch.device) -> None:
    expected = expected_of(by_hand, compute_device) if by_hand else two_levels(compute_device)
    model = seeded(Model)
    handle = offload(model, compute_device, device_memory=memory, param_dtype=given)
    assert_same(outcome_of(model, handle, compute_device), expected)
    copied = copy.deepcopy(model)
    handle.remove()
    batch = torch.ones(1, WIDTH)
    assert same(model(batch), copied(batch))  # both are in float32 throughout


@pytest.mark.core(way=["recomputed", "together", "checkpoint"])
@pytest.mark.parametrize("way", ["recomputed", "together", "disk", "checkpoint", "optimizer"])
def test_two_levels(way: str, compute_device: torch.device, tmp_path: Path) -> None:
    make_optimizer = partial(headrace.optim.AdamW, lr=0.01) if way == "optimizer" else adamw
    model = seeded(Model, recomputes=way == "recomputed")
    settings: dict[str, Any] = {"activations": way == "recomputed"}
    if way == "checkpoint":
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        settings["checkpoint"] = tmp_path / "model.safetensors"
        model = model.to("meta")
    if way in ("disk", "checkpoint"):
        settings |= {"disk": tmp_path / "disk", "host_memory": "512KiB"}
    with offload(model, compute_device, 0.5, param_dtype=TWO_LEVELS, **settings) as handle:
        found = outcome_of(model, handle, compute_device, make_optimizer, together=way == "together")
        assert_same(found, two_levels(compute_device))
        assert handle.stats().fetch_bytes > 0 or "disk" not in settings


class Repeating(Model):
    def repeat(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self(x)
        return x


def test_a_method_around_calls(compute_device: torch.device) -> None:
    """What is loaded when a call ends within a method, as in generate(), is loaded from homes in their own dtype."""
    model, batch = seeded(Repeating), random_batches(1, 3, WIDTH, device=compute_device)[0]
    expected = by_hand(model, {"": INTO_WIDE}, compute_device)
    offload(model, compute_device, 0.2, param_dtype=INTO_WIDE)
    with torch.no_grad():
        assert_same(model.repeat(batch), expected.repeat(batch))  # type: ignore[operator]


def test_bytes(compute_device: torch.device) -> None:
    """The weights of layers travel in half of their bytes, and so do their gradients; the others in all of them."""
    for given, saved in ((None, 0), ({"layers.*": INTO_WIDE}, weight_bytes(seeded(Model).layers) // 2)):
        model = seeded(Model)
        with offload(model, compute_device, 4, param_dtype=given) as handle:
            loss_of(model, torch.ones(1, WIDTH)).backward()
            stats = handle.stats()
        assert stats.onload_bytes == stats.offload_bytes == weight_bytes(model) - saved


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of dynamo's own
def test_compiled_layers(compute_device: torch.device) -> None:
    """Casts of a layer come around what is compiled, and those of a module within it interrupt the graph."""
    model = seeded(Model)
    handle = offload(model, compute_device, 0.5, param_dtype=TWO_LEVELS)
    for layer in model.layers:
        layer.compile(backend="eager")
    assert_same(outcome_of(model, handle, compute_device), two_levels(compute_device))


@pytest.mark.extended
def test_layers_that_torch_compile_has_wrapped(compute_device: torch.device) -> None:
    """They are compiled within their casts."""
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # type: ignore[no-any-return]

    torch.compiler.reset()
    model, batch = seeded(Model), random_batches(1, 3, WIDTH, device=compute_device)[0]
    offload(model, compute_device, 0.5, param_dtype={"layers.*": INTO_WIDE})
    with torch.no_grad():
        expected = model(batch)
        for number, layer in enumerate(model.layers):
            model.layers[number] = torch.compile(layer, backend=backend)
        for _ in range(2):
            assert_same(model(batch), expected)
    assert graphs


def test_adapters_that_come_later(compute_device: torch.device) -> None:
    """They belong to the nearest module with a policy."""
    model = seeded(Model)
    offload(model, compute_device, 0.5, param_dtype={"layers.*": INTO_WIDE, "layers.1.norm": None})
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.up = models.LoraLinear(WIDTH, 2 * WIDTH)
        models.LoraLinear.adapt(layer.up)
        layer.up.register_forward_hook(lambda module, _args, output: seen.extend((module.lora_a.dtype, output.dtype)))
    loss_of(model, torch.ones(1, WIDTH)).backward()
    assert set(seen) == {NARROW}
    assert all(p.grad is not None and p.grad.dtype == p.dtype == WIDE for p in model.parameters())


def test_a_module_in_the_place_of_one_with_a_policy(compute_device: torch.device) -> None:
    """It has none: its weights travel in their own dtype, and its inputs are not cast."""
    model, batch = seeded(Model), random_batches(1, 3, WIDTH, device=compute_device)[0]
    offload(model, compute_device, 2.0, param_dtype={"head": INTO_WIDE})
    loss_of(model, batch)
    model.head = nn.Linear(WIDTH, WIDTH)
    assert_same(model(batch), copy.deepcopy(model).to(compute_device)(batch))


def test_tied_weights(compute_device: torch.device) -> None:
    """Two policies of one weight are refused, unless both say the same."""
    model = models.Decoder(layers=2, tied=True)
    said = r"both 'embedding.weight' and 'head.weight' two dtypes, torch.bfloat16 and torch.float32; give"
    with pytest.raises(ValueError, match=said):
        offload(model, compute_device, param_dtype={"embedding": NARROW})
    offload(model, compute_device, 1.0, param_dtype={"embedding": INTO_WIDE, "head": INTO_WIDE}).remove()
    rows = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    rows[1].weight = nn.Parameter(rows[0].weight.detach())
    with pytest.raises(headrace.LayoutError, match="would no longer do so as casts"):
        offload(rows, compute_device, 1.0, param_dtype={"1": NARROW})


def test_the_dtype_of_gradients(compute_device: torch.device) -> None:
    """`reduce_dtype` of the whole model is `grad_dtype`, and a module can have no other."""
    whole = Policy(NARROW, reduce_dtype=torch.float64, output_dtype=WIDE)
    model = seeded(Model)
    with offload(model, compute_device, 0.5, param_dtype=whole):
        loss_of(model, torch.ones(1, WIDTH)).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float64}
    of_layers = Policy(NARROW, reduce_dtype=WIDE)
    offload(model, compute_device, 0.5, param_dtype={"layers.*": of_layers}).remove()  # what it is anyway
    for settings, said in (
        (
            {"param_dtype": whole, "grad_dtype": WIDE},
            r"'' reduce_dtype=torch.float64, and the gradient of 'first.weight' is to be in torch.float32",
        ),
        (
            {"param_dtype": {"": whole, "layers.*": of_layers}},
            r"'layers.0' reduce_dtype=torch.float32, and the gradient of",
        ),
        ({"param_dtype": {"head": whole}}, r"'head.weight' is to be in torch.float32: .*give grad_dtype=torch.float64"),
    ):
        with pytest.raises(ValueError, match=said):
            offload(model, compute_device, **settings)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({}, ValueError, r"param_dtype=\{\} names no modules; give a dtype"),
        ({"layer.*": NARROW}, ValueError, r"param_dtype\['layer.\*'\] matches no module; give names or patterns"),
        ({0: NARROW}, TypeError, r"param_dtype\[0\]: give the name of a module"),
        ({"layers.*": "bf16"}, TypeError, r"param_dtype\['layers.\*'\]='bf16' is not a floating-point torch.dtype"),
        (Policy(torch.int8), TypeError, r"param_dtype.param_dtype=torch.int8 is not a floating-point"),
        (Policy(NARROW, output_dtype=torch.bool), TypeError, r"output_dtype=torch.bool is not a floating-point"),
        (Policy(NARROW, cast_forward_inputs=None), TypeError, r"cast_forward_inputs=None is neither True nor False"),  # type: ignore[arg-type]
    ],
)
def test_bad_policies(given: Any, error: type[Exception], said: str, compute_device: torch.device) -> None:
    with pytest.raises(error, match=said):
        offload(seeded(Model), compute_device, param_dtype=given)
