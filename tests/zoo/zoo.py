"""Does an architecture of transformers or diffusers train and run offloaded as without? The comparison, and the page.

Every kind of configuration of transformers, or every model class of diffusers, that can be built small, with random
weights; each in a process of its own. `SETTINGS` and `LEGEND` say what is compared, and what the outcomes mean.
"""

import collections
import datetime
import importlib.metadata
import json
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import headrace
import headrace.optim
from headrace.runtime.tensors import map_tensors, tensors_in
from tests.zoo import of_diffusers, of_transformers

SECONDS = 90  # for the plain runs of one architecture in one place, and for the offloaded one
STEPS = 2
PLACES = {
    "cpu": "CPU",
    "everything": "all of it at once",
    "emu": "emulated accelerator",
}
LIBRARIES: dict[str, Any] = {"transformers": of_transformers, "diffusers": of_diffusers}
SETTINGS = (
    "two training steps and an inference, plain and offloaded, compared bit for bit. *CPU*: the CPU as the device, with"
    " a budget for half of the weights; *all of it at once*: blocks on disk, activations on the host, recomputation"
    " where the model has it, and headrace's AdamW beside the next forward; *emulated"
    " accelerator*: judged for races, too. Each runs in a process of its own."
)
LEGEND = (
    "*equal*: to the last bit, within the budget. *refused*: an error of headrace's own. *failed*: another error, or no"
    " answer, after the plain runs. *wrong*: other bits, more than the budget, or a race. *not built*: no plain run to"
    " compare with: the model is not built small, takes none of the inputs, has no answer in time, or two plain runs"
    " differ."
)
OUTCOMES = ("equal", "refused", "failed", "wrong", "not built")


# running --------------------------------------------------------------------------------------------------------------
def floats_of(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def outcome(model: nn.Module, inputs: dict[str, Any], make_optimizer: Callable[[Any], Any]) -> list[Tensor]:
    """Losses, weights after the steps, and what it gives then without gradients; all on the CPU."""
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    found: list[Tensor] = []
    model.train()
    for step in range(STEPS):
        seed(step)
        loss = sum(tensor.float().square().mean() for tensor in floats_of(model(**inputs)) if tensor.requires_grad)
        if not isinstance(loss, Tensor):
            raise TypeError("no output has a gradient")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    model.eval()
    with torch.no_grad():
        seed(STEPS)
        found += [tensor.cpu() for tensor in floats_of(model(**inputs))]
    return found + [parameter.detach().cpu().clone() for parameter in model.parameters()]


def compare(
    library: Any, make: Callable[[], nn.Module], place: str, plain_is_done: Callable[[], None]
) -> dict[str, Any]:
    """Whether one model is equal; what kept it from being tried, or from being offloaded."""
    if place == "emu":
        import emulator.emu  # noqa: F401
    device = "emu" if place == "emu" else "cpu"
    reason = "no inputs known"
    try:
        for inputs in library.inputs_of(make()):
            try:
                plain = plain_outcome(make(), inputs, place, device)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            break
        else:
            return {"result": "not built", "reason": reason}
        again = plain_outcome(make(), inputs, place, device)
    except Exception as error:
        return {"result": "not built", "reason": f"{type(error).__name__}: {error}"}
    if not equal(plain, again):
        return {"result": "not built", "reason": "two plain runs differ"}
    plain_is_done()
    model = make()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as directory:
        options = _options(place, nbytes, directory)
        try:
            handle = _offload(model, options)
            got = outcome(model, inputs, _optimizer(place, model, directory))
            stats = handle.stats()
            blocks = len(handle.plan.problem.block_bytes) if handle.plan else 0
            handle.remove()
        except headrace.HeadraceError as error:
            return {"result": "refused", "reason": str(error)}
        except Exception as error:
            return {"result": "failed", "reason": f"{type(error).__name__}: {error}"}
    result = {"blocks": blocks, "moved": stats.onload_bytes, "weights": nbytes}
    if not equal(plain, got):
        return result | {"result": "wrong", "reason": "differs"}
    if stats.device_peak_bytes > stats.device_budget_bytes:
        return result | {"result": "wrong", "reason": f"{stats.device_peak_bytes} > {stats.device_budget_bytes} bytes"}
    if place == "emu":
        from emulator import emu

        races = emu.take_reports()
        if races:
            return result | {"result": "wrong", "reason": races[0]}
    return result | {"result": "equal"}


def plain_outcome(model: nn.Module, inputs: dict[str, Any], place: str, device: str) -> list[Tensor]:
    """That of a model which is whole on its device."""
    make_optimizer = _optimizer(place, model, None)
    return outcome(model.to(device), dict(map_tensors(inputs, lambda tensor: tensor.to(device))), make_optimizer)


def _offload(model: Any, options: dict[str, Any]) -> headrace.Offloaded:
    """With twice the budget as long as that is too small."""
    for _ in range(5):
        try:
            return headrace.offload(model, **options)
        except headrace.BudgetError as error:
            kept = error
            options["device_memory"] *= 2
    raise kept


def _options(place: str, nbytes: int, directory: str) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "emu" if place == "emu" else "cpu", "device_memory": nbytes // 2 + (64 << 10)}
    if place == "everything":
        options |= {"disk": f"{directory}/disk", "host_memory": max(nbytes, 2 << 20), "activations": True}
    return options


def _optimizer(place: str, model: Any, directory: str | None) -> Callable[[Any], Any]:
    if place == "everything" and getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    if place == "everything" and of_diffusers.can_recompute(model):
        model.enable_gradient_checkpointing()
    if place == "everything":
        overlap: Any = "none" if directory is None else "forward"
        return lambda parameters: headrace.optim.AdamW(parameters, lr=1e-3, overlap=overlap)
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))

    return len(one) == len(other) and all(map(same, one, other))


# processes ------------------------------------------------------------------------------------------------------------
def in_a_process(work: Callable[[Callable[[], None]], dict[str, Any]]) -> dict[str, Any]:
    """What it gives, in a child; or how that ended.

    `work` gets a function to call when the plain runs are done: how the child ends without a result is a failure then.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def say(found: dict[str, Any]) -> None:
            os.write(writes, json.dumps(found).encode() + b"\n")

        try:
            say(work(lambda: say({"result": "failed"})))
        except BaseException:
            say({"reason": traceback.format_exc()[-300:]})
        os._exit(0)
    os.close(writes)
    said, until, killed = b"", time.monotonic() + SECONDS, False
    while not killed:
        if select.select([reads], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (piece := os.read(reads, 1 << 16)):
                break
            said += piece
            until = time.monotonic() + SECONDS
        else:
            os.kill(pid, signal.SIGKILL)
            killed = True
    os.close(reads)
    ended = f"the process ended with {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}"
    found = {"result": "not built"}
    for line in said.splitlines():
        found |= json.loads(line)
    if found["result"] in ("not built", "failed"):
        found.setdefault("reason", f"no answer in {SECONDS} s" if killed else ended)
    return found


def page(results: Path, library: str = "transformers") -> str:
    """The results, in words and as a table; of what was tried twice, the last.

    What no plain run was made of on the CPU is not tried elsewhere. Raises ValueError for anything else that was not.
    """
    tried: dict[str, dict[str, dict[str, Any]]] = {}
    for line in results.read_text().splitlines():
        one = json.loads(line)
        tried.setdefault(one["name"], {})[one["place"]] = one
    found = {}
    for name, places in sorted(tried.items()):
        left = [place for place in PLACES if place not in places]
        if left and places.get("cpu", {}).get("result") != "not built":
            raise ValueError(f"{results} has no result of {name}: run --only {name} --where {' '.join(left)}")
        found[name] = [places.get(place, places.get("cpu")) for place in PLACES]
    versions = f"{library} {importlib.metadata.version(library)}, PyTorch {torch.__version__.split('+')[0]}"
    lines = [
        f"# Models of {library}",
        "",
        f"Made by `python -m tests.zoo` on {datetime.date.today()} with {versions}."
        f" {LIBRARIES[library].TRIED} that can be built small, with random weights: {SETTINGS}",
        "",
        LEGEND,
        "",
        LIBRARIES[library].NOTE,
        "",
        f"| {len(found)} architectures | {' | '.join(OUTCOMES)} |",
        "|---|" + len(OUTCOMES) * "---|",
    ]
    for number, title in enumerate(PLACES.values()):
        counts = collections.Counter(outcomes[number]["result"] for outcomes in found.values())
        lines.append(f"| {title} | {' | '.join(str(counts[outcome]) for outcome in OUTCOMES)} |")
    nowhere = [name for name, outcomes in found.items() if all(one["result"] == "not built" for one in outcomes)]
    lines += [
        "",
        f"The {len(nowhere)} that were built nowhere say nothing here: {', '.join(nowhere)}.",
        "",
        "| architecture | " + " | ".join(PLACES.values()) + " |",
        "|---|" + len(PLACES) * "---|",
    ]
    for name, outcomes in found.items():
        if name not in nowhere:
            cells = [
                one["result"] + (f": {one['reason'].splitlines()[0]}" if "reason" in one else "") for one in outcomes
            ]
            lines.append(f"| {name} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"
