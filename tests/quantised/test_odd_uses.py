"""What may a user do with quantised weights of an offloaded model? What one may do without, or a clear refusal."""

import copy
import gc
import io
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import headrace
from tests.quantised.kinds import KINDS, WIDTH, PackedLinear
from tests.support.models import linears

CPU = torch.device("cpu")

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]


class Doubled(nn.Module):
    """A layer whose weight is of a class of its own: a pair of tensors, of which it computes with the first."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(TwoTensor(torch.randn(width, width), torch.randn(width, width)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).a.tanh()


class Through(torch.autograd.Function):
    """Keeps a weight where autograd's hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.weight = weight
        return x @ weight.a

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] @ ctx.weight.a.t(), None


class Pair(torch.Tensor):
    """As TwoTensor, but for tensors that lie anywhere."""

    @staticmethod
    def __new__(cls, a: Tensor, b: Tensor) -> "Pair":
        made: Pair = torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype, device=a.device)  # type: ignore[attr-defined]
        made.a, made.b = a, b
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "Pair":
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default), func
        return Pair(args[0].a, args[0].b)


class Saving(torch.autograd.Function):
    """Saves a weight by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.a

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        assert type(weight) is Pair
        return gradients[0] @ weight.a.t(), None


def pairs(count: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Doubled() for _ in range(count)))


PAIR_BYTES = 2 * WIDTH * WIDTH * 4
BUDGET_BYTES = 3 * PAIR_BYTES


def offload(model: nn.Sequential, **options: Any) -> headrace.Offloaded:
    options.setdefault("device_memory", BUDGET_BYTES)
    return headrace.offload(model, device="cpu", blocks=list(model), **options)


def batch() -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))


def test_both_of_a_pair_travel() -> None:
    plain = pairs()
    model = pairs()
    with torch.no_grad(), offload(model) as handle:
        assert torch.equal(model(batch()), plain(batch()))
        assert handle.stats().onload_bytes == 8 * PAIR_BYTES
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES


def test_after_remove_the_parts_go_with_the_model() -> None:
    """Somebody keeps the handle."""
    model = pairs()
    handle = offload(model)
    with torch.no_grad():
        model(batch())
    handle.remove()
    weights = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert weights
    assert all(weight() is None for weight in weights)
    assert handle.stats().onload_bytes > 0


def test_the_user_keeps_his_own_objects() -> None:
    model = pairs()
    weights = [layer.weight for layer in model]
    inner = [(weight.a, weight.b) for weight in weights]
    values = [(weight.a.clone(), weight.b.clone()) for weight in weights]
    with torch.no_grad(), offload(model):
        model(batch())
        assert all(parameter is weight for parameter, weight in zip(model.parameters(), weights, strict=True))
    for weight, layer, (a, b), (was_a, was_b) in zip(weights, model, inner, values, strict=True):
        assert layer.weight is weight
        assert type(weight) is TwoTensor
        assert weight.a is a
        assert weight.b is b
        assert type(a) is torch.Tensor
        assert torch.equal(a, was_a)
        assert torch.equal(b, was_b)


def test_parameters_in_a_forward_are_the_users_own() -> None:
    model = pairs()
    wanted = list(map(id, model.parameters()))
    seen: list[list[int]] = []

    def look(layer: nn.Module, _args: Any) -> None:
        seen.append([id(parameter) for parameter in model.parameters()])

    for layer in model:
        layer.register_forward_pre_hook(look)
    with torch.no_grad(), offload(model):
        model(batch())
    assert seen == 8 * [wanted]


def test_copies_and_pickles_are_plain() -> None:
    model = pairs()
    plain = pairs()
    with torch.no_grad(), offload(model):
        model(batch())
        copied = copy.deepcopy(model)
        stored = io.BytesIO()
        torch.save(model.state_dict(), stored)
    with torch.no_grad():
        assert torch.equal(copied(batch()), plain(batch()))
        stored.seek(0)
        again = pairs(8)
        again.load_state_dict(torch.load(stored, weights_only=False), assign=True)
        assert torch.equal(again(batch()), plain(batch()))


def test_what_is_written_to_a_part_is_seen() -> None:
    plain, model = pairs(), pairs()
    with torch.no_grad(), offload(model):
        for one in (plain, model):
            one(batch())
            one[5].weight.a.mul_(0.5)
            one[7].weight.a.copy_(one[0].weight.b)
        assert torch.equal(model(batch()), plain(batch()))


def test_what_is_written_to_a_wrapper_is_seen() -> None:
    """Its own version counts that, and none of its parts'."""
    kind = KINDS["torchao int8"]
    other = KINDS["torchao int8"].model()
    for write in ("copy", "load", "scale"):
        plain, model = kind.model(), kind.model()
        with torch.no_grad(), offload(model, device_memory="1MiB"):
            for one in (plain, model):
                one(kind.batch(CPU))
                weight: Any = one[2].base.weight
                if write == "copy":
                    weight.copy_(other[5].base.weight)
                elif write == "load":
                    weights = {"2.base.weight": other[5].base.weight}
                    one.load_state_dict(weights, strict=False)
                else:
                    weight.scale = weight.scale * 2
            assert torch.equal(model(kind.batch(CPU)), plain(kind.batch(CPU))), write
            assert not torch.equal(model(kind.batch(CPU)), kind.model()(kind.batch(CPU))), write


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4"])
def test_a_pattern_for_a_weight_is_one_for_all_of_it(name: str) -> None:
    kind = KINDS[name]
    for pattern in ("1.base.weight", "*.base.weight", "2.base.weight.*"):
        plain, model = kind.model(), kind.model()
        with torch.no_grad(), offload(model, device_memory="1MiB", resident=[pattern]) as handle:
            assert torch.equal(model(kind.batch(CPU)), plain(kind.batch(CPU)))
            resident = next(block for block in handle._engine.passes.residents if block.name == "resident")
            assert resident.nbytes >= WIDTH * WIDTH // 2
    with pytest.raises(ValueError, match="matches no module or parameter"):
        offload(kind.model(), resident=["*.base.nothing"])


@pytest.mark.extended
def test_a_block_with_packed_weights_is_compiled() -> None:
    kind = KINDS["bitsandbytes nf4"]
    plain, model = kind.model(), kind.model()
    with offload(model, device_memory="1MiB"), torch.no_grad():
        for one in (plain, model):
            for layer in one:
                layer.compile(backend="eager")
        assert torch.equal(model(kind.batch(CPU)), plain(kind.batch(CPU)))


@pytest.mark.extended
def test_a_compiled_block_with_packed_weights_gives_gradients() -> None:
    """bitsandbytes keeps a view of its weight for backward; in a graph it is autograd that keeps it, with our hooks."""
    kind = KINDS["bitsandbytes nf4"]
    plain, model = kind.model(), kind.model()
    block_bytes = WIDTH * WIDTH
    with offload(model, device_memory=3 * block_bytes) as handle:
        for one in (plain, model):
            for layer in one:
                layer.compile(backend="aot_eager")
            for _ in range(2):
                one(kind.batch(CPU)).square().mean().backward()
        assert all(torch.equal(a.down.weight.grad, b.down.weight.grad) for a, b in zip(plain, model, strict=True))
        assert handle.stats().onload_bytes > 0
        assert handle.stats().device_peak_bytes <= 3 * block_bytes


class State:
    """Of a quantiser, with a slot, and a reference to itself."""

    __slots__ = ("own", "scale")

    def __init__(self, scale: Tensor) -> None:
        self.scale, self.own = scale, self


class Scaled(nn.Parameter):
    state: State


class ScaledLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = Scaled(torch.randn(WIDTH, WIDTH), requires_grad=False)
        self.weight.state = State(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.state.scale.device == x.device
        return (x @ self.weight * self.weight.state.scale).tanh()


def test_state_in_slots_travels_too(compute_device: torch.device) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(ScaledLayer() for _ in range(6)))

    model = make()
    with torch.no_grad():
        wanted = make()(batch())
        with headrace.offload(model, device=compute_device, device_memory=3 << 16, blocks=list(model)) as handle:
            assert torch.equal(model(batch()).cpu(), wanted)
            assert handle.stats().onload_bytes == 6 * (WIDTH * WIDTH * 4 + WIDTH * 4)


def test_other_data_of_a_packed_parameter_is_seen() -> None:
    kind = KINDS["gguf q8"]
    plain, model = kind.model(), kind.model()
    with torch.no_grad(), offload(model, device_memory="128KiB"):
        for one in (plain, model):
            one(kind.batch(CPU))
            one[2].base.weight.data = one[4].base.weight.data.clone()  # type: ignore[union-attr]
        assert torch.equal(model(kind.batch(CPU)), plain(kind.batch(CPU)))
        assert not torch.equal(model(kind.batch(CPU)), kind.model()(kind.batch(CPU)))


def test_a_weight_that_is_replaced_by_one_of_its_kind_is_the_weight() -> None:
    plain, model = pairs(), pairs()
    with torch.no_grad(), offload(model) as handle:
        model(batch())
        for one in (plain, model):
            other = TwoTensor(torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH))
            one[3].weight = nn.Parameter(other, requires_grad=False)
        assert torch.equal(model(batch()), plain(batch()))
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES
        model[2].weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)
        with pytest.raises(
            headrace.LayoutError, match=r"'2.weight' was offloaded as a TwoTensor .*and is a Parameter now"
        ):
            model(batch())


def test_a_weight_of_two_layers_travels_once() -> None:
    plain, model = pairs(), pairs()
    for one in (plain, model):
        one[6].weight = one[1].weight
    with torch.no_grad(), offload(model, device_memory=BUDGET_BYTES) as handle:
        assert torch.equal(model(batch()), plain(batch()))
        assert model[6].weight is model[1].weight
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES


def test_one_that_is_kept_for_backward_by_a_function_comes_back() -> None:
    class Layer(Doubled):
        def forward(self, x: Tensor) -> Tensor:
            return Through.apply(x, self.weight).tanh()  # type: ignore[no-untyped-call,no-any-return]

    def run(model: nn.Module) -> Tensor:
        x = batch().requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        return x.grad

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(8)))

    wanted, model = run(make()), make()
    with offload(model) as handle:
        assert torch.equal(run(model), wanted)
        assert handle.stats().device_peak_bytes <= BUDGET_BYTES


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("together", [1, 4])
def test_a_checkpoint_counts_one_as_one(reentrant: bool, together: int) -> None:
    """What forward saved of a weight made of two, and what is computed again, are as many."""
    from torch.utils.checkpoint import checkpoint

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Pair(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return Saving.apply(x, self.weight).tanh()  # type: ignore[no-untyped-call,no-any-return]

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Layer() for _ in range(8)))

    def run(model: nn.Sequential) -> Tensor:
        x = batch().requires_grad_()
        y = x
        for begin in range(0, len(model), together):
            y = checkpoint(model[begin : begin + together], y, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    wanted, model = run(make()), make()
    with offload(model, device_memory=max(3, together) * PAIR_BYTES) as handle:
        assert torch.equal(run(model), wanted)
        assert handle.stats().device_peak_bytes <= max(3, together) * PAIR_BYTES


def test_attributes_that_are_no_tensors_are_taken_over(compute_device: torch.device) -> None:
    class Powered(ScaledLayer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.weight.power  # type: ignore[attr-defined]

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        layers = [Powered() for _ in range(3)]
        for layer in layers:
            layer.weight.power = 2.0  # type: ignore[attr-defined]
        return nn.Sequential(*layers)

    plain, model = make(), make()
    with torch.no_grad(), headrace.offload(model, device=compute_device, device_memory="1MiB") as handle:
        for one in (plain, model):
            one(batch())
            one[1].weight.power = 0.5  # type: ignore[union-attr]
        assert torch.equal(model(batch()).cpu(), plain(batch()))
        assert handle.stats().onload_bytes > 0


def test_one_that_somebody_kept_from_a_pass_is_lent_again() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = pairs()
            self.kept: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
                self.kept.append(layer.weight)
            return x + (x @ self.kept[0]).a

    plain, model = Model(), Model()
    with torch.no_grad():
        wanted = plain(batch())
        with headrace.offload(model, device="cpu", device_memory=BUDGET_BYTES, blocks=list(model.layers)) as handle:
            assert torch.equal(model(batch()), wanted)
            assert torch.equal((batch() @ model.kept[2]).a, (batch() @ model.layers[2].weight).a), "outside of a pass"
            assert handle.stats().device_peak_bytes <= BUDGET_BYTES
        with pytest.raises(headrace.StateError, match="is no longer offloaded"):
            batch() @ model.kept[2]


def test_a_trained_one_is_refused() -> None:
    model = pairs(2)
    model[1].weight.requires_grad_(True)
    with pytest.raises(
        headrace.LayoutError, match=r"'1.weight' cannot be offloaded: it is a TwoTensor that is trained"
    ):
        offload(model)
    model[1].weight.requires_grad_(False)
    with offload(model):
        model[1].weight.requires_grad_(True)
        with pytest.raises(headrace.LayoutError, match=r"'1.weight' cannot be offloaded: .* Freeze it"):
            model(batch())


def test_two_models_cannot_have_the_same() -> None:
    one, other = pairs(2), pairs(2)
    other[0].weight = one[0].weight
    with offload(one):
        with pytest.raises(headrace.LayoutError, match=r"'0.weight.a' cannot be offloaded: another offloaded model"):
            offload(other)
        with torch.no_grad():
            assert torch.equal(one(batch()), pairs(2)(batch())), "the first goes on"
    with torch.no_grad(), offload(other):
        other(batch())


def test_quantising_an_offloaded_model_is_refused_clearly() -> None:
    import torchao.quantization

    model = linears(4, WIDTH)

    def quantise_and_run() -> None:
        torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
        model(batch())

    with (
        torch.no_grad(),
        headrace.offload(model, device="cpu", device_memory="160KiB"),
        pytest.raises(headrace.LayoutError, match=r"remove\(\) on the handle before"),
    ):
        quantise_and_run()


def test_one_buffer_of_two_models_is_refused() -> None:
    one, other = packed(2), packed(2)
    other[1].qweight = one[1].qweight
    with torch.no_grad(), offload(one, device_memory="4MiB"):
        with pytest.raises(headrace.LayoutError, match=r"'1.qweight' cannot be offloaded: another offloaded model"):
            offload(other, device_memory="4MiB")
        assert torch.equal(one(batch()), packed(2)(batch()))


# packed weights in buffers ------------------------------------------------------------------------------------------
def packed(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(PackedLinear(nn.Linear(WIDTH, WIDTH), repeat=64) for _ in range(count)))


PACKED_BYTES = 64 * WIDTH * WIDTH // 2  # of `qweight`
LAYER_BYTES = 2 * PACKED_BYTES  # with scales and zeros for groups of 32, in float32


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
def test_large_buffers_travel_with_their_block(on_disk: bool, tmp_path: Path) -> None:
    plain, model = packed(), packed()
    budget_bytes = 3 * LAYER_BYTES
    options: dict[str, Any] = {"host_memory": 3 * LAYER_BYTES, "disk": tmp_path} if on_disk else {}
    with torch.no_grad(), offload(model, device_memory=budget_bytes, **options) as handle:
        for _ in range(2):
            assert torch.equal(model(batch()), plain(batch()))
        stats = handle.stats()
        assert stats.device_peak_bytes <= budget_bytes
        assert stats.onload_bytes >= 6 * PACKED_BYTES
        assert stats.fetch_bytes > 0 or not on_disk
        for one in (plain, model):
            one[2].qweight.bitwise_xor_(5)
            one[4].qweight.data.bitwise_xor_(3)
            one[5].qweight.data = one[5].qweight.data ^ 9
            one[1].qweight.set_(one[3].qweight.clone())
            Tensor.set_(one[3].scales, one[0].scales.clone())
        assert torch.equal(model(batch()), plain(batch())), "what the user writes is seen"
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in model.state_dict().items())
        assert type(pickle.loads(pickle.dumps(model[0].qweight))) is Tensor
        model.load_state_dict(packed().state_dict())
        assert torch.equal(model(batch()), packed()(batch()))
    assert all(type(buffer) is Tensor for buffer in model.buffers())


def test_a_large_buffer_of_another_shape_is_refused() -> None:
    model = packed()
    with torch.no_grad(), offload(model, device_memory=3 * LAYER_BYTES):
        model(batch())
        model[1].qweight.t_()
        with pytest.raises(headrace.LayoutError, match=r"'1.qweight' was offloaded with shape"):
            model(batch())


def test_copies_made_in_forward_have_plain_buffers_on_the_host(compute_device: torch.device) -> None:
    model, copies = packed(), []
    with torch.no_grad(), headrace.offload(model, device=compute_device, device_memory=3 * LAYER_BYTES):
        model[1].register_forward_pre_hook(lambda module, _: copies.append(copy.deepcopy(module)))
        model(batch().to(compute_device))
    for name, buffer in copies[0].named_buffers():
        assert (type(buffer), buffer.device) == (Tensor, CPU), name
        assert torch.equal(buffer, packed()[1].get_buffer(name)), name


class Queue(nn.Module):
    """A large buffer of integers that forward writes to, or replaces."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("queue", torch.zeros(1024, WIDTH, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        queue = torch.cat([(1000 * y.detach()).int(), self.queue[: -len(y)]])
        if self.replaces:
            self.queue = queue
        else:
            self.queue.copy_(queue)
        return y + self.queue.float().mean(0)


@pytest.mark.parametrize("replaces", [False, True])
def test_what_forward_writes_to_a_large_buffer_stays(replaces: bool) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(Queue(replaces) for _ in range(4)))

    plain, model = make(), make()
    with torch.no_grad(), offload(model, device_memory="1MiB") as handle:
        for _ in range(3):
            assert torch.equal(model(batch()), plain(batch()))
        for name, value in plain.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
        assert replaces or handle.stats().device_peak_bytes <= 1 << 20
    for name, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_kinds_are_what_the_tests_say() -> None:
    """Not plain parameters: else the tests of this directory would show nothing."""
    for name, kind in KINDS.items():
        weight = kind.model()[0].base.weight  # type: ignore[union-attr]
        assert type(weight) not in (Tensor, nn.Parameter), name
