"""Is a user told in time: of settings by types, and of a kernel that is missing by the first optimizer?"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Unpack, get_args, get_type_hints

import pytest
import torch

import headrace
from headrace.cli.main import main
from headrace.optim import AdamW, kernel
from headrace.optim.options import Given, Options


@pytest.mark.parametrize("name", sorted(headrace.optim.__all__))
def test_types_know_every_setting_of_an_optimizer(name: str) -> None:
    assert get_type_hints(getattr(headrace.optim, name).__init__)["options"] == Unpack[Given]
    assert list(get_type_hints(Given)) == [field.name for field in dataclasses.fields(Options)]


@pytest.mark.parametrize(
    ("call", "name", "choices"),
    [
        (Given, "master_form", {"split", "full", "none"}),
        (Given, "tier", {"host", "disk"}),
        (Given, "overlap", {"none", "forward", "backward"}),
        (Given, "state_dtype", {"8bit"}),
        (Given, "device_fraction", {"auto"}),
        (headrace.offload, "prefetch", {"auto"}),
        (headrace.offload_activations, "tier", {"host", "disk"}),
        (headrace.plan, "training", {"full", "adapter", "inference"}),
        (headrace.plan, "overlap", {"none", "forward", "backward"}),
        (headrace.plan, "state_dtype", {"float32", "bfloat16", "8bit"}),
        (headrace.plan, "master_form", {"split", "full", "none"}),
    ],
)
def test_types_know_the_choices_of_a_setting(call: Any, name: str, choices: set[str]) -> None:
    """So that `overlap="sideways"` is told before anything runs."""
    hint = get_type_hints(call, localns={"torch": torch})[name]  # `plan` does without importing it
    assert str not in get_args(hint)
    assert {word for part in (hint, *get_args(hint)) for word in get_args(part) if isinstance(word, str)} == choices


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel, "native_library", lambda: None)
    kernel.warn_if_missing.cache_clear()
    yield
    kernel.warn_if_missing.cache_clear()


@pytest.mark.usefixtures("no_kernel")
def test_the_first_optimizer_says_once_that_the_kernel_is_missing() -> None:
    with pytest.warns(RuntimeWarning, match=r"the native optimizer kernel is missing.* install a C\+\+ comp") as seen:
        _ = [AdamW([torch.nn.Parameter(torch.ones(2))]) for _ in range(2)]
    assert [warning.filename for warning in seen] == [__file__]


@pytest.mark.usefixtures("no_kernel")
def test_the_doctor_says_that_the_kernel_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu"])
    shown = capsys.readouterr().out
    assert "the native optimizer kernel is missing, so updates on the host take 4 to 40 times as long" in shown
    assert "fix: install a C++ compiler" in shown


@pytest.mark.parametrize("name", sorted(headrace.optim.__all__))
def test_an_argument_that_nobody_has_is_told_as_the_optimizers_own(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name}.__init__\(\) got an unexpected keyword argument 'nonsense'"):
        getattr(headrace.optim, name)([torch.nn.Parameter(torch.ones(2, 2))], nonsense=1)
