"""What is a program, and how is it judged? A model and a list of actions, done plain and offloaded side by side."""

import contextlib
import gc
import random
import re
import tempfile
import traceback
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.planning import search
from tests.programs.models import LayerSpec, Model, ModelSpec, random_model
from tests.programs.modes import ACTIONS, random_mode
from tests.programs.world import StopError, World, difference, has_weights


@dataclass(frozen=True)
class Program:
    """`actions` are names of ACTIONS, each with the seed of its choices."""

    mode: str
    seed: int
    model: ModelSpec
    actions: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.model}: {' '.join(name for name, _ in self.actions)}"


def random_program(mode: str, seed: int, without: Collection[str] = (), *, encodes: bool = False) -> Program:
    """The program of this seed; `without` names kinds of layers and actions that it does not have.

    `encodes`: whether it calls the model's method `encode`, and not the model.
    """
    rng = random.Random(f"{mode} {seed}")
    how = random_mode(mode, random.Random(seed), Path())
    model = replace(random_model(rng, how.widths, without, steady=how.steady), encodes=encodes)
    names = [name for name in how.weights if name not in without]
    chosen = rng.choices(names, [how.weights[name] for name in names], k=rng.randrange(3, 9))
    return Program(mode, seed, model, tuple((name, rng.randrange(10**6)) for name in chosen))


@dataclass(frozen=True)
class Failure:
    """Why a program failed, where, and with which traceback."""

    reason: str
    at: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.at}: {self.reason}"


class _FailedError(Exception):
    pass


def judge(program: Program) -> Failure | None:
    """Runs the program on both sides, and compares them after every action; None when nothing differs."""
    at = "offload()"
    with tempfile.TemporaryDirectory(prefix="headrace-programs-") as directory, _quiet():
        worlds = None
        try:
            worlds = plain, ours = _worlds(program, Path(directory))
            for index, (name, seed) in enumerate(program.actions):
                at = f"action {index} {name}"
                _act(plain, ours, name, seed)
            at = "remove()"
            _end(plain, ours)
            at = "afterwards"
            _act(plain, ours, "plain_train", 0)
        except _FailedError as error:
            return Failure(str(error), at)
        except Exception as error:
            return Failure(_one_line(error), at, traceback.format_exc())
        finally:
            if worlds is not None:
                with contextlib.suppress(Exception):
                    worlds[1].handle.remove()
    return None


def _worlds(program: Program, directory: Path) -> tuple[World, World]:
    mode = random_mode(program.mode, random.Random(program.seed), directory)
    plain = World(Model(program.model).to(mode.device), mode.device, mode.plain)
    ours = World(Model(program.model), mode.device, mode.ours, mode.offload)
    ours.handle = mode.offload(ours.model, random.Random(program.seed))
    return plain, ours


def _act(plain: World, ours: World, name: str, seed: int) -> None:
    """One action on both sides; raises where they differ. What both refuse in the same words is the program's error."""
    errors: list[BaseException | None] = []
    for world in (plain, ours):
        torch.manual_seed(seed)
        world.seen = []
        errors.append(None)
        try:
            ACTIONS[name][0](world, random.Random(seed))
        except Exception as error:
            errors[-1] = error
            if errors[0] is None or not isinstance(error, StopError | RuntimeError):
                raise
            error.__traceback__ = None
            world.model.zero_grad()
    if (type(errors[0]), str(errors[0])) != (type(errors[1]), str(errors[1])):
        raise _FailedError(f"{errors[1]!r}, where plain raises {errors[0]!r}")
    if random.Random(seed).random() < 0.6:
        _look(plain, ours)
    _compare(plain, ours)
    _check_budget(ours)


def _look(plain: World, ours: World) -> None:
    for world in (plain, ours):
        world.look()
    if has_weights(ours.handle) and any(p.device.type != "cpu" for p in ours.model.parameters()):
        raise _FailedError("a parameter is not on the host")


def _compare(plain: World, ours: World) -> None:
    different = difference(ours.seen, plain.seen)
    if different is not None:
        raise _FailedError(different)


def _check_budget(ours: World) -> None:
    if not has_weights(ours.handle) or not ours.keeps_budget:
        return
    stats = ours.handle.stats()
    if stats.device_peak_bytes > stats.device_budget_bytes:
        raise _FailedError(f"{stats.device_peak_bytes} bytes on the device, {stats.device_budget_bytes} allowed")


def _end(plain: World, ours: World) -> None:
    if ours.device.type == "emu":
        torch.accelerator.synchronize()
        from emulator import emu

        reports = emu.take_reports()
        if reports:
            raise _FailedError(f"{len(reports)} reports from the emulator: {reports[0]}")
    streams = has_weights(ours.handle) and len(ours.handle._engine.passes.blocks) > 0
    streams = streams and ours.handle._config.device_memory_bytes is not None  # else blocks stay where they rest
    if streams and ours.passes and ours.handle.stats().onload_bytes == 0:
        raise _FailedError("nothing was brought to the device")
    ours.handle.remove()
    ours.model.to(ours.device)
    ours.make_optimizer = plain.make_optimizer  # the model is a plain one, beside whose passes nothing is updated
    for world in (plain, ours):
        world.seen = []
        world.optimizer = None
    _look_after(plain, ours)


def _look_after(plain: World, ours: World) -> None:
    for world in (plain, ours):
        world.look()
        world.see("class of parameters", {type(p) for p in world.model.parameters()})
    _compare(plain, ours)


def _one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-6:-1])
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({where})"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Plans are searched for shortly, sums do not depend on threads, and warnings are of no concern."""
    before = search.TRIALS, torch.get_num_threads()
    search.TRIALS = 20
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        search.TRIALS = before[0]
        torch.set_num_threads(before[1])


# many of them --------------------------------------------------------------------------------------------------------
def run(job: tuple[str, int, tuple[str, ...], bool, bool]) -> tuple[int, list[str]]:
    """The failure of one seed, in lines."""
    mode, seed, without, reduces, encodes = job
    if mode == "emulated":
        import emulator.emu  # noqa: F401  # before the first backward of the process
    program = random_program(mode, seed, without, encodes=encodes)
    failure = judge(program)
    if seed % 50 == 0:
        gc.collect()
    if failure is None:
        return seed, []
    lines = [f"{mode} {seed}: {failure}"]
    if reduces:
        program, failure = reduced(program, failure)
        lines += [f"    reduced: {program}", f"    {failure}", failure.traceback]
    return seed, lines


# reduction ------------------------------------------------------------------------------------------------------------
def reduced(program: Program, failure: Failure) -> tuple[Program, Failure]:
    """A program with fewer actions and layers that fails likewise."""
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(program):
            again = judge(smaller)
            if again is not None and _gist(again) == _gist(failure):
                program, failure, shrunk = smaller, again, True
                break
    return program, failure


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.actions)):
        yield replace(program, actions=program.actions[:index] + program.actions[index + 1 :])
    model, layers = program.model, program.model.layers
    for index in range(len(layers)):
        if len(layers) > 1:
            yield replace(program, model=replace(model, layers=layers[:index] + layers[index + 1 :]))
    for index, layer in enumerate(layers):
        for simpler in (replace(layer, checkpointing="none"), replace(layer, skipped=0.0)):
            if simpler != layer:
                changed: tuple[LayerSpec, ...] = (*layers[:index], simpler, *layers[index + 1 :])
                yield replace(program, model=replace(model, layers=changed))
    for flag in ("listed", "tied_head", "tied_layers"):
        if getattr(model, flag):
            yield replace(program, model=replace(model, **{flag: False}))


def _gist(failure: Failure) -> str:
    """What two failures of one cause have in common."""
    kind, colon, _ = failure.reason.partition(":")
    if colon:
        return kind
    _, differs, how = failure.reason.partition(" differs in ")
    return re.sub(r"\d+", "#", differs + how if differs else failure.reason)
