"""Does torch.compile around an offloaded model compile its blocks, however it was asked for, and change nothing?"""

import copy
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import headrace
from headrace.runtime import module_calls
from tests.support.compare import assert_same_gradients, assert_same_weights
from tests.support.held import weight_bytes
from tests.support.models import Layer, Stack, seeded

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),  # Dynamo's own
]
BATCH = torch.arange(5, 25).view(2, 10)
BLOCKS = "compiles its blocks"
NOT = "runs without torch.compile"


class Graphs:
    """A backend that computes as without one, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, _memo: Any) -> "Graphs":  # of Fabric, which keeps what torch.compile was given
        return self

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        self.count += 1
        return graph.forward  # type: ignore[no-any-return]


Ask = Callable[[Any, Graphs], Any]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def offload(model: nn.Module, **settings: Any) -> headrace.Offloaded:
    return headrace.offload(model, device="cpu", device_memory=int(0.8 * weight_bytes(model)), **settings)


@pytest.fixture(autouse=True)
def _no_compiled_code() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def outer(model: Any, graphs: Graphs) -> Any:
    return torch.compile(model, backend=graphs)


def own(model: Any, graphs: Graphs) -> Any:
    model.compile(backend=graphs)
    return model


def part(model: Any, graphs: Graphs) -> Any:
    model.model.compile(backend=graphs)
    return model


def replaced_part(model: Any, graphs: Graphs) -> Any:
    model.model = torch.compile(model.model, backend=graphs)
    return model


def call(model: Any, graphs: Graphs) -> Any:
    return torch.compile(model.__call__, backend=graphs)


def around(model: Any, graphs: Graphs) -> Any:
    return torch.compile(lambda **inputs: model(**inputs), backend=graphs)


def graphs_in_place(model: Any) -> Any:
    model.compile(mode="reduce-overhead")
    return model


def train(model: Any, ask: Callable[[], Any]) -> torch.Tensor:
    compiled = ask()
    for _ in range(3):
        model.zero_grad()
        loss = compiled(input_ids=BATCH, labels=BATCH).loss
        loss.backward()
    return loss  # type: ignore[no-any-return]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("ask", "says", "activations"),
    [
        (outer, BLOCKS, False),
        (outer, BLOCKS, True),
        (own, BLOCKS, False),
        (part, BLOCKS, False),
        (replaced_part, BLOCKS, False),
        (call, NOT, False),
        (around, NOT, False),
    ],
)
def test_blocks_are_compiled(ask: Ask, says: str, activations: bool) -> None:
    plain, model, graphs = llama(), llama(), Graphs()
    loss = plain(input_ids=BATCH, labels=BATCH).loss
    loss.backward()
    with offload(model, activations=activations) as handle:
        with pytest.warns(RuntimeWarning, match=says) as told:
            found = train(model, lambda: ask(model, graphs))
        assert len([one for one in told if "offloaded model" in str(one.message)]) == 1
        assert torch.equal(found, loss)
        assert_same_gradients(model, plain)
        assert (graphs.count > 0) == (says == BLOCKS)
        stats = handle.stats()
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        assert stats.onload_bytes > weight_bytes(model)


@pytest.mark.extended
def test_layers_by_hand() -> None:
    """Those of transformers have a `__call__` of their own."""
    plain, model, graphs = llama(), llama(), Graphs()
    loss = train(plain, lambda: plain)
    with offload(model):
        for layer in model.model.layers:
            layer.compile(backend=graphs)
        assert torch.equal(train(model, lambda: model), loss)
    assert 0 < graphs.count <= 3 * 2  # of three layers
    assert_same_gradients(model, plain)


def test_the_compiler_sees_nothing_of_what_happens_beside_the_users_code() -> None:
    """Parts of blocks are compiled, whose tensors are saved, and objects with finalizers go within their calls."""
    plain, model = (seeded(Stack, [Layer(16) for _ in range(3)]) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    batch, mine, ended = torch.randn(2, 16), list[Any](), list[int]()

    class Mine:
        pass

    class Clearing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            torch._dynamo.graph_break()
            mine.clear()
            return y + 1

    torch._dynamo.reset()
    with headrace.offload(model, device="cpu", device_memory=weight_bytes(model) // 2, blocks=list(model.layers)):
        for layer in model.layers:
            layer.up = torch.compile(layer.up, backend=Graphs())
            layer.down.__class__ = Clearing
            layer.down.compile(backend=Graphs())
        for _ in range(2):
            mine.append(Mine())
            weakref.finalize(mine[0], ended.append, 1)
            model(batch).sum().backward()
    for layer in plain.layers:
        layer.down.__class__ = Clearing
    for _ in range(2):
        plain(batch).sum().backward()
    assert ended == [1, 1]
    seen = {code().co_filename for code in torch._dynamo.convert_frame.input_codes.seen if code() is not None}
    allowed = {module_calls.__file__}  # by which the compiler comes to a module's own call
    package = Path(headrace.__file__).parent
    assert {name for name in seen if name == weakref.__file__ or Path(name).is_relative_to(package)} <= allowed
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.extended
@pytest.mark.parametrize("which", ["model", "compiled"])
def test_a_model_that_was_compiled_before(which: str) -> None:
    model, graphs = llama(), Graphs()
    expected = model(input_ids=BATCH).logits
    compiled: Any = torch.compile(model, backend=graphs)
    with offload(model if which == "model" else compiled):
        with pytest.warns(RuntimeWarning, match=NOT if which == "model" else BLOCKS):
            found = compiled(input_ids=BATCH).logits
        assert torch.equal(found, expected)
        assert (graphs.count > 0) == (which == "compiled")


@pytest.mark.parametrize("ask_for", [lambda model: torch.compile(model, mode="reduce-overhead"), graphs_in_place])
def test_cuda_graphs_are_left_out(ask_for: Callable[[Any], Any]) -> None:
    model = llama()
    expected = model(input_ids=BATCH).logits
    with offload(model):
        with pytest.warns(RuntimeWarning, match="CUDA graphs"):
            found = ask_for(model)(input_ids=BATCH).logits
        assert torch.equal(found, expected)


def test_a_static_cache_generates() -> None:
    """transformers compiles by itself then, on accelerators; and here, as it is told to."""
    settings = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    model, told = llama().eval(), CompileConfig(backend="eager", mode=None)  # type: ignore[arg-type]
    expected = model.generate(BATCH, disable_compile=True, **settings)
    told._compile_all_devices = True  # type: ignore[assignment]
    with offload(model):
        with pytest.warns(RuntimeWarning, match="disable_compile=True"):
            found = model.generate(BATCH, compile_config=told, **settings)
        assert torch.equal(found, expected)


@pytest.mark.extended
def test_trainer_compiles(tmp_path: Path) -> None:
    def train(model: LlamaForCausalLM) -> None:
        examples = [{"input_ids": BATCH[0], "labels": BATCH[0]}] * 4
        settings = TrainingArguments(
            output_dir=str(tmp_path),
            torch_compile=True,
            torch_compile_backend="eager",
            max_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            dataloader_pin_memory=False,
        )
        Trainer(model=model, args=settings, train_dataset=examples).train()  # type: ignore[arg-type]

    plain, model = llama(), llama()
    train(plain)
    with offload(model) as handle:
        with pytest.warns(RuntimeWarning, match=BLOCKS):
            train(model)
        assert handle.stats().onload_bytes > weight_bytes(model)
        assert_same_weights(model, plain)


@pytest.mark.extended
def test_fabric_takes_a_compiled_model() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model, graphs = llama(), Graphs()
    expected = copy.deepcopy(model)(input_ids=BATCH, labels=BATCH).loss
    with offload(model):
        ready = fabric.setup(torch.compile(model, backend=graphs))
        with pytest.warns(RuntimeWarning, match=BLOCKS):
            found = ready(input_ids=BATCH, labels=BATCH).loss
        assert torch.equal(found, expected)
        assert graphs.count > 0
