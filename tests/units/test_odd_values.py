"""Do 0, "", (), None and False mean off, or are they refused by name? Of every setting of every public function."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace
import headrace.optim
from headrace.checkpoint import newest
from headrace.cli import path_argument
from headrace.cli.main import build_parser, main
from headrace.integrations.trainer import HeadraceCallback
from headrace.integrations.transformers import open_pretrained
from tests.cost.conftest import LLAMA_8B

ODD: list[Any] = [0, 0.0, "", " ", (), [], {}, None, False, True, b"", float("nan"), object]


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)])


@pytest.fixture(autouse=True)
def _own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the current directory for an empty name writes into this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trained(handle: Any, model: nn.Module) -> None:
    with handle:
        model(torch.ones(2, 4)).sum().backward()


def offload(**settings: Any) -> None:
    model = net()
    trained(headrace.offload(model, **{"device": "cpu", **settings}), model)


def offload_activations(**settings: Any) -> None:
    model = net()
    trained(headrace.offload_activations(model, **settings), model)


def on_disk(**settings: Any) -> None:
    offload_activations(tier="disk", **settings)


def as_part_of_offload(**settings: Any) -> None:
    offload(activations={"min_bytes": 0, **settings})


def adamw(**settings: Any) -> None:
    headrace.optim.AdamW(net().parameters(), **settings)


def adamw_on_disk(**settings: Any) -> None:
    adamw(tier="disk", **settings)


def muon(**settings: Any) -> None:
    headrace.optim.Muon(net().parameters(), **settings)


def save(**settings: Any) -> None:
    headrace.save(**{"path": "saved-1", "model": net(), **settings}).wait()


def load(**settings: Any) -> None:
    model = net()
    headrace.save("saved-1", model)
    headrace.load(**{"path": "saved-1", "model": model, **settings})


def plan(**settings: Any) -> None:
    headrace.plan(LLAMA_8B, **{"hardware": "h100", **settings})


def forward_backward(**settings: Any) -> None:
    model = net()
    with headrace.offload(model, device="cpu") as handle:
        handle.forward_backward(
            **{
                "micro_batches": [torch.ones(2, 4)],
                "loss_function": lambda batch: model(batch).sum(),
                **settings,
            }
        )


def with_handle(use: Callable[[headrace.Offloaded], Any]) -> None:
    model = net()
    with headrace.offload(model, device="cpu") as handle:
        model(torch.ones(2, 4)).sum().backward()
        use(handle)


def limit_copies(**settings: Any) -> None:
    with_handle(lambda handle: handle.limit_copies(**{"bytes_per_second": "1GB", **settings}))


def stats(**settings: Any) -> None:
    with_handle(lambda handle: handle.stats(**settings))


def timeline(**settings: Any) -> None:
    with_handle(lambda handle: handle.timeline(**settings))


def report(**settings: Any) -> None:
    with_handle(lambda handle: handle.report().to_html(**settings))


def callback(**settings: Any) -> None:
    with_handle(lambda handle: HeadraceCallback(handle, **settings))


def experts(**settings: Any) -> None:
    headrace.experts(nn.Bilinear(4, 4, 4, bias=False), **{"argument": "input1", **settings})


# Functions, their settings, and which of the odd values each of these takes, as Python writes them. None and () stand
# for "not this" there, 0 for nothing, and True and False for themselves.
OF_ACTIVATIONS = {
    "layers": "0 () [] {} None",
    "fraction": "0 0.0",
    "min_bytes": "0",
    "modules": "() [] {} None",
    "tier": "",
    "device_memory": "0 None",
    "host_memory": "0 None",  # nothing of this model is large enough to leave
    "disk": "None",
    "most_in_flight": "None",
    "all_leave": "False True",
}
TAKEN: dict[Callable[..., None], dict[str, str]] = {
    offload: {
        **dict.fromkeys(("device", "device_memory", "host_memory", "disk", "checkpoint", "mesh"), "None"),
        **dict.fromkeys(("param_dtype", "grad_dtype"), "None"),
        "blocks": "",
        "resident": "() [] {}",
        "prefetch": "0",
        "activations": "False True",
        "onload": "",
        "packed": "False True",
    },
    offload_activations: OF_ACTIVATIONS,
    as_part_of_offload: OF_ACTIVATIONS | {"host_memory": "None", "disk": "", "stays_without_room": ""},
    on_disk: {"disk": ""},
    adamw: {
        **dict.fromkeys(("master_dtype", "master_form", "state_dtype", "tier", "update", "overlap", "zero_stage"), ""),
        "disk": "None",
        "device_fraction": "0 0.0",
        "pin": "False True",
        "overlap_d2h_h2d": "False True",
        "max_grad_norm": "None",
        "mesh": "None",
    },
    adamw_on_disk: {"disk": ""},
    save: {
        "path": "",
        "optimizer": "() [] None",
        "files": "{} None",
        "keep": "None",
        "wait": "False True",
        "host_memory": "None",
    },
    load: {"path": "", "optimizer": "() [] None"},
    plan: {
        **dict.fromkeys(("hardware", "device_memory", "devices", "adapter_rank", "weight_bits", "method"), "None"),
        **dict.fromkeys(("batch_size", "sequence_length", "micro_batches", "nodes"), ""),
        **dict.fromkeys(("training", "overlap", "state_dtype", "master_form"), ""),
        "host_memory": "0 None",  # a plan that does not fit is none that is refused
        "disk": "0 None False True",
        "zero_stage": "0 0.0 False",
        "optimizer_fraction": "0 0.0 None",
        "expert_hit_rate": "None",
    },
    forward_backward: {"micro_batches": "", "loss_function": "", "together": "None"},
    limit_copies: {"bytes_per_second": "None", "window_seconds": ""},
    stats: {"wait_for_updates": "False True"},
    timeline: {"path": ""},
    report: {"path": ""},
    callback: {"save": "False True"},
    experts: {"argument": ""},
}
EXEMPT = [("device", "0"), ("loss_function", repr(object))]  # the first accelerator, if there is one; a class
CASES = [(function, setting) for function, settings in TAKEN.items() for setting in settings]


@pytest.mark.parametrize(("function", "setting"), CASES)
def test_an_odd_value_is_off_or_refused_by_name(function: Callable[..., None], setting: str, tmp_path: Path) -> None:
    taken = TAKEN[function][setting].split()
    for value in ODD:
        if repr(value) in taken:
            function(**{setting: value})
        elif (setting, repr(value)) not in EXEMPT:
            with pytest.raises((TypeError, ValueError, headrace.BudgetError)) as caught:
                function(**{setting: value})
            assert setting in str(caught.value), f"{setting}={value!r}: {caught.value}"
    if TAKEN[function][setting] == "":
        assert {path.name for path in tmp_path.iterdir()} <= {"saved-1"}


@pytest.mark.parametrize("value", ["", " ", 0, False, (), b"model"])
def test_paths_of_models(value: Any) -> None:
    for use, setting in (
        (lambda: headrace.from_pretrained(value), "path_or_config"),
        (lambda: headrace.from_pretrained("model", disk=value), "disk"),
        (lambda: open_pretrained(value), "path"),
        (lambda: open_pretrained("model", disk=value), "disk"),
        (lambda: newest(value), "directory"),
    ):
        with pytest.raises((TypeError, ValueError), match=setting):
            use()
    with pytest.raises(TypeError, match=r"path=None: newest\(\) returns None where there is no complete checkpoint"):
        headrace.load(None, nn.Linear(2, 2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="trainable=None is neither True nor False"):
        headrace.from_pretrained("model", trainable=None)  # type: ignore[arg-type]


def test_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.probing.link_rates", lambda device: pytest.fail("measured"))
    for settings in ({"cache": 0}, {"disk": ""}, {"disk": 0}, {"device": 0.0}, {"device": ""}):
        with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
            headrace.probe(**settings)  # type: ignore[arg-type]


def test_settings_of_muon_for_other_parameters() -> None:
    for setting in ("adamw_lr", "adamw_betas", "adamw_eps", "adamw_weight_decay"):
        for value in (-1.0, "", ()):
            with pytest.raises(ValueError, match=f"{setting}="):
                muon(**{setting: value})


def test_empty_paths_on_the_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An empty name, as of a variable of the shell that is not set, is not the current directory."""
    tried = 0
    for command, parser in build_parser().commands.items():
        for action in parser._actions:
            assert action.type is not Path, f"headrace {command} {action.dest}: an empty name would be '.'"
            if action.type is path_argument and action.option_strings:
                with contextlib.suppress(SystemExit):
                    main([command, f"{action.option_strings[0]}="])
                assert f"argument {action.option_strings[0]}: '' names no path; give one" in capsys.readouterr().err
                tried += 1
    assert tried > 12
    assert not list(tmp_path.iterdir())
