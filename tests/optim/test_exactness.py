"""Do weights change bit for bit as with PyTorch's own optimizers, and as with cast, step, cast for narrow weights?"""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

import headrace.optim
from headrace.optim import kernel, threads, update
from tests.optim.references import MATRICES, RULES, SHAPES, copies, give_gradients, parameters, ties_up
from tests.support.compare import assert_same

STEPS = 100


def make(name: str, ours: Any, theirs: Any, **options: Any) -> tuple[Any, Any]:
    own, reference, settings = RULES[name]
    common = {key: value for key, value in settings.items() if key not in ("fused", "foreach")}
    return getattr(headrace.optim, own)(ours, **common, **options), reference(theirs, **settings)


def shapes_of(name: str) -> Any:
    return MATRICES if name == "muon" else SHAPES


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(kernel, "available", lambda: False)
        monkeypatch.setattr(kernel, "native_library", lambda: None)
        monkeypatch.setattr(kernel, "warn_if_missing", lambda: None)
    elif not kernel.available():
        pytest.skip("the native kernel was not built")
    return str(request.param)


def test_native_kernel_is_built() -> None:
    assert kernel.available(), "no native kernel: run `make setup` with g++ present"


@pytest.mark.parametrize("name", list(RULES))
def test_float32_equals_torch(name: str, path: str) -> None:
    ours = parameters(shapes=shapes_of(name))
    theirs = copies(ours)
    optimizer, reference = make(name, ours, theirs)
    for step in range(STEPS if path == "native" else 10):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_float64_equals_torch(name: str) -> None:
    ours = parameters(torch.float64)
    theirs = copies(ours)
    optimizer, reference = make(name, ours, theirs)
    for step in range(10):
        give_gradients(ours, theirs, step)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.core(dtypes=(torch.float32,))
@pytest.mark.parametrize("name", [name for name in RULES if name != "lion"])
@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float32,), (torch.float64, torch.float32)])
def test_clipping_equals_torch(name: str, dtypes: tuple[torch.dtype, ...], path: str) -> None:
    """Also of wide weights, and of some of each kind: the factor has the dtype of the norm."""
    if name == "adafactor":  # PyTorch's takes the eps of a group's first parameter for all of them
        dtypes = dtypes[:1]
    shapes = ((33, 16), (8, 24), (5, 7)) if name == "muon" else SHAPES
    ours = [parameter for dtype in dtypes for parameter in parameters(dtype, shapes)]
    theirs = copies(ours)
    optimizer, reference = make(name, ours, theirs, max_grad_norm=1.0)
    for step in range(5):
        give_gradients(ours, theirs, step)
        for own, other in zip(ours, theirs, strict=True):  # a third: not to be had in fewer digits
            other.grad = torch.as_tensor(other.grad) / 3
            own.grad = other.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        reference.step()
        assert norm > 1
        assert optimizer.last_grad_norm == float(norm)
    assert_same(ours, theirs)


@pytest.mark.core(form="split")
@pytest.mark.parametrize("name", ["adamw", "adam_decay", "sgd_nesterov", "lion", "adafactor", "muon"])
@pytest.mark.parametrize("form", ["split", "full", "float16"])
def test_narrow_weights_equal_cast_step_cast(name: str, form: str, path: str) -> None:
    """A float32 reference gets the narrow gradients, widened; its weights, rounded, are ours."""
    dtype = torch.float16 if form == "float16" else torch.bfloat16
    ours = parameters(dtype, shapes=shapes_of(name))
    exact = copies(ours, torch.float32)
    optimizer, reference = make(name, ours, exact, master_form="split" if form == "split" else "full")
    for step in range(STEPS if path == "native" else 10):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
    assert_same(ours, [ties_up(weight) if form == "split" else weight.detach().to(dtype) for weight in exact])


@pytest.mark.parametrize("form", ["split", "full"])
def test_masters_hold_the_exact_value(form: str) -> None:
    ours = parameters(torch.bfloat16)
    exact = copies(ours, torch.float32)
    optimizer, reference = make("adamw", ours, exact, master_form=form)
    for step in range(5):
        give_gradients(ours, exact, step)
        optimizer.step()
        reference.step()
    for weight, wanted in zip(ours, exact, strict=True):
        state = optimizer.state[weight]
        if form == "full":
            assert torch.equal(state["master"], wanted.detach())
        else:
            bits = (weight.detach().view(torch.int16).to(torch.int32) << 16) + state["master_remainder"]
            assert torch.equal(bits.view(torch.float32), wanted.detach())


@pytest.mark.parametrize("name", ["adamw", "sgd_momentum", "lion"])
def test_parameters_over_the_same_memory(name: str, path: str) -> None:
    """They are updated one after the other, however many threads there are."""
    ours, theirs = [], []
    for made in (ours, theirs):
        memory = torch.linspace(-1, 1, 3 << 18)
        made += [torch.nn.Parameter(memory[begin:]) for begin in (0, 0, 1 << 18)]
    optimizer, reference = make(name, ours, theirs)
    for step in range(5):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            one.grad = other.grad = torch.sin(torch.arange(one.numel()) * (index + 1.0) + step)
        optimizer.step()
        reference.step()
        assert_same(ours, theirs)


@pytest.mark.parametrize("number", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_thread_count_changes_nothing(number: int, dtype: torch.dtype, path: str) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, other = headrace.optim.AdamW(ours), headrace.optim.AdamW(theirs)
    for step in range(3):
        give_gradients(ours, theirs, step)
        with threads.limited_to(number):
            optimizer.step()
        with threads.limited_to(1):
            other.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_kernel_equals_its_replacement(state_dtype: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    """The native kernel and the PyTorch path give the same bits, stochastic rounding and checksums included."""
    results: list[list[torch.Tensor]] = []
    rule = headrace.optim.AdamW([torch.zeros(1)], lr=0.01)._rule(
        {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}, 3.0
    )
    for native in (True, False):
        generator = torch.Generator().manual_seed(3)
        count = 70003
        weight = torch.randn(count, generator=generator).to(dtype)
        form = kernel.Master.IS_WEIGHT
        master: torch.Tensor | None = None
        if dtype == torch.bfloat16:
            form, master = kernel.Master.SPLIT, torch.randint(-32768, 32767, (count,), generator=generator).short()
        elif dtype == torch.float16:
            form, master = kernel.Master.FULL, weight.float()
        item = update.Update(
            rule=rule,
            weight=weight,
            gradient=torch.randn(count, generator=generator).to(dtype),
            form=form,
            master=master,
            first=torch.randn(count, generator=generator).to(state_dtype),
            second=torch.rand(count, generator=generator).to(state_dtype),
            stream=5,
        )
        update.perform([item], scale, native=native)
        assert item.first is not None
        assert item.second is not None
        kept = [] if item.master is None else [item.master]
        results.append([item.weight, item.first, item.second, torch.tensor(item.checksum), *kept])
    assert_same(*results)


def test_bfloat16_state_rounds_without_bias() -> None:
    """A gradient that rounding to nearest would lose is not lost on average."""
    weight = torch.nn.Parameter(torch.zeros(1 << 16))
    optimizer = headrace.optim.AdamW([weight], betas=(0.0, 0.999), state_dtype=torch.bfloat16)
    value = 1.0 + 2.0**-10  # an eighth of bfloat16's step at 1
    weight.grad = torch.full_like(weight, value)
    optimizer.step()
    first = optimizer.state[weight]["exp_avg"]
    assert first.dtype == torch.bfloat16
    assert set(first.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs(first.double().mean().item() - value) < 2.0**-7 * 0.01


def test_a_nan_is_none_the_less_in_bfloat16(path: str) -> None:
    """Also one of which the lower half of the bits alone tells that it is not infinite."""
    weight = torch.nn.Parameter(torch.zeros(300))
    optimizer = headrace.optim.SGD([weight], lr=0.1, momentum=0.9, state_dtype=torch.bfloat16)
    weight.grad = torch.full((300,), 0x7F800001, dtype=torch.int32).view(torch.float32)
    optimizer.step()
    assert optimizer.state[weight]["momentum_buffer"].isnan().all()


@pytest.mark.extended
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_other_vector_levels(capability: str) -> None:
    """PyTorch adds and multiplies in another order on older CPUs; so does the kernel."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    command += ["-k", "test_float32_equals_torch and native and (adamw_amsgrad or sgd_nesterov or lion)"]
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_the_default_device_is_of_no_concern(name: str, path: str) -> None:
    """What optimizers make for themselves is in host memory, whatever `torch.set_default_device()` says."""
    ours = parameters(shapes=shapes_of(name))
    theirs = copies(ours)
    options = {"max_grad_norm": 0.1}
    optimizers = [make(name, one, one, **options)[0] for one in (ours, theirs)]
    for step in range(3):
        give_gradients(ours, theirs, step)
        with torch.device("meta"):
            optimizers[0].step()
        optimizers[1].step()
    assert_same(ours, theirs)
