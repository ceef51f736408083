"""What can a user set? Frozen, validated settings; sizes are bytes, given as an int or as text such as "8GiB"."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from math import ceil
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch  # not imported here: `headrace plan` reads sizes without
    from torch import nn


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
_SIZE = re.compile(r"\s*(-?[0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*")
_LEAST_PLAIN = 1024  # a budget of fewer bytes, given as text without a unit, is one whose unit was forgotten

Size = int | str
Blocks = Literal["auto"] | int | Sequence["nn.Module | str"]
BlocksSpec = Blocks | str  # a size may be text


def parse_bytes(size: Size, *, name: str = "size") -> int:
    """Returns `size` in bytes: an int, or text with a unit.

    Units are B; KB, MB, GB and TB of 1000; and KiB, MiB, GiB and TiB of 1024, for which K, M, G and T are short.

    Raises TypeError when `size` is neither, and ValueError when the text is not of this form or the size is negative.
    Both errors name the setting `name`.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'{name} is {size!r}; give bytes as an int, or text such as "8GiB"')
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(f'{name}={size!r} is not a size; give bytes as an int, or text such as "8GiB" or "500MB"')
        nbytes = int(Fraction(match[1]) * _UNITS[match[2].upper()])  # exact, where a float would round
    else:
        nbytes = size
    if nbytes < 0:
        raise ValueError(f"{name}={size} is negative; give a size of 0 bytes or more")
    return nbytes


def parse_budget(size: Size, *, name: str, whole_bytes: int | None = None) -> int:
    """A budget in bytes, as `parse_bytes` takes it; or text such as "25%" for that share of `whole_bytes`."""
    if isinstance(size, str):
        if whole_bytes is not None and (percent := _PERCENT.fullmatch(size)):
            return int(whole_bytes * Fraction(percent[1]) / 100)
        if size.strip().isdigit() and 0 < int(size) < _LEAST_PLAIN:
            raise ValueError(f'{name}={size!r} is {counted(int(size), "byte")}; did you mean "{size.strip()}GB"?')
    try:
        return parse_bytes(size, name=name)
    except ValueError as error:
        share = "" if whole_bytes is None else ', or a share of the weights such as "25%"'
        raise ValueError(f"{error}{share}") from error


def how_to_download(directory: str | os.PathLike[str]) -> str:
    """What to do where a model's directory does not exist: `directory` may be a name of the Hugging Face hub."""
    name = os.fspath(directory)
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        return "give the directory of a model"
    place = name.rpartition("/")[2]
    return (
        "models are read from a directory, not downloaded; if this is a name of the Hugging Face hub, run:"
        f" hf download {name} --local-dir {place}; then give {place!r}"
    )


def counted(number: int, noun: str) -> str:
    """A number of things, for people to read: "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(nbytes: float, *, at_least: bool = False) -> str:
    """`nbytes` for people to read: three significant digits and a unit of 1024, such as "1.5 GiB".

    `at_least` rounds up, for sizes that a user is told to give.
    """
    value, units = abs(float(nbytes)), ["TiB", "GiB", "MiB", "KiB", "B"]
    while len(units) > 1 and _three_digits(value, units[-1], at_least) >= 1024:
        value /= 1024
        units.pop()
    return f"{'-' if nbytes < 0 else ''}{_three_digits(value, units[-1], at_least):.10g} {units[-1]}"


def _three_digits(value: float, unit: str, up: bool) -> float:
    """`value` with three significant digits, or more if more stand before the point; no fractions of a byte."""
    places = 0 if unit == "B" or value >= 100 else 1 if value >= 10 else 2
    return ceil(value * 10**places) / 10**places if up else round(value, places)


@dataclass(frozen=True)
class Policy:
    """In which dtypes a module computes: the fields of FSDP2's MixedPrecisionPolicy. None: as they are."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """The settings of `headrace.offload`, validated; see there for what each one means."""

    device: torch.device
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    disk: Path | None = None
    checkpoint: Any = None  # a path, or an open Checkpoint (which this layer does not know)
    blocks: Blocks = "auto"
    resident: tuple[nn.Module | str, ...] = ()
    prefetch_blocks: int | None = None
    param_dtype: torch.dtype | Mapping[str, Policy] | None = None  # policies: by names of modules, and patterns
    grad_dtype: torch.dtype | None = None
    activations: ActivationConfig | None = None
    mesh: Any = None  # a DeviceMesh
    onload: Literal["own", "gather", "auto"] = "own"
    packed: bool | Literal["disk"] = "disk"
    check_gradients: bool = True
    shared: Any = None  # a SharedBudget (which this layer does not know); its sizes are those above

    @property
    def computes_at_home(self) -> bool:
        """Whether blocks compute where they rest, on the CPU: without a budget, nothing comes and goes. With a node or
        a disk, the memory in which blocks rest is not the process's own.
        """
        others = self.device_memory_bytes, self.disk, self.checkpoint, self.mesh
        return self.device.type == "cpu" and all(other is None for other in others)

    def __post_init__(self) -> None:
        if not isinstance(self.packed, bool) and self.packed != "disk":
            raise TypeError(f'packed={self.packed!r} is neither True nor False, nor "disk"')
        if self.onload not in ("own", "gather", "auto"):
            raise ValueError(f'onload={self.onload!r}; give one of "own", "gather", "auto"')
        if self.onload != "own" and self.mesh is None:
            raise ValueError(f"onload={self.onload!r} is what several ranks do; give mesh=, or leave onload out")
        if not isinstance(self.param_dtype, Mapping):
            _check_dtype(self.param_dtype, "param_dtype")
        _check_dtype(self.grad_dtype, "grad_dtype")
        check_flag(self.check_gradients, "check_gradients")


@dataclass(frozen=True, kw_only=True)
class ActivationConfig:
    """The settings of `headrace.offload_activations`, validated; see there for what each one means."""

    layers: int | tuple[nn.Module | str, ...] | None = None
    fraction: float = 1.0
    min_bytes: int = 2**20
    modules: tuple[nn.Module | str, ...] | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    most_in_flight: int | None = None
    tier: str = "host"
    all_leave: bool = False
    stays_without_room: bool = False  # what finds no room in a share of host memory that nobody asked for

    @staticmethod
    def of(
        *,
        layers: int | Sequence[nn.Module | str] | None = None,
        min_bytes: Size = "1MiB",
        modules: Sequence[nn.Module | str] | None = None,
        device_memory: Size | None = None,
        host_memory: Size | None = None,
        fraction: float = 1.0,
        most_in_flight: int | None = None,
        tier: str = "host",
        all_leave: bool = False,
    ) -> ActivationConfig:
        """The settings as a user gives them, validated."""
        return ActivationConfig(
            layers=layers if layers is None or isinstance(layers, int) else modules_of(layers, "layers"),
            min_bytes=parse_bytes(min_bytes, name="min_bytes"),
            modules=None if modules is None else modules_of(modules, "modules"),
            device_memory_bytes=None if device_memory is None else parse_bytes(device_memory, name="device_memory"),
            host_memory_bytes=None if host_memory is None else parse_bytes(host_memory, name="host_memory"),
            fraction=fraction,
            most_in_flight=most_in_flight,
            tier=tier,
            all_leave=all_leave,
        )

    def __post_init__(self) -> None:
        check_flag(self.all_leave, "all_leave")
        if self.all_leave and self.device_memory_bytes is not None:
            raise ValueError("all_leave and device_memory are two ways to say how much stays; give one of them")
        if isinstance(self.layers, bool) or (isinstance(self.layers, int) and self.layers < 0):
            raise ValueError(f"layers={self.layers!r}; give a number of layers, 0 or more, or modules and names")
        check_share(self.fraction, "fraction", "a number from 0 to 1")
        if self.tier not in ("host", "disk"):
            raise ValueError(f'tier={self.tier!r} is neither "host" nor "disk"')
        if self.most_in_flight is not None:
            check_count(self.most_in_flight, "most_in_flight", "None or a number of copies, 1 or more")


def _check_dtype(given: Any, setting: str) -> None:
    """Raises TypeError for anything but None and a floating-point dtype."""
    import torch

    if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
        raise TypeError(f"{setting}={given!r} is not a floating-point torch.dtype; give one such as torch.bfloat16")


def check_flag(given: Any, setting: str) -> None:
    """Raises TypeError for anything but True and False."""
    if not isinstance(given, bool):
        raise TypeError(f"{setting}={given!r} is neither True nor False")


def is_number(given: Any) -> bool:
    """Whether this is a real number. True and False are none."""
    return isinstance(given, Real) and not isinstance(given, bool)


def check_count(given: Any, setting: str, wanted: str = "at least 1") -> None:
    """Raises TypeError for anything but a whole number, ValueError for one below 1."""
    if not (is_number(given) and isinstance(given, Integral)):
        raise TypeError(f"{setting}={given!r}; give {wanted} (a whole number)")
    if given < 1:
        raise ValueError(f"{setting}={given!r}; give {wanted}")


def check_share(given: Any, setting: str, wanted: str) -> None:
    """Raises TypeError for anything but a number, ValueError for one that is not from 0 to 1."""
    if not is_number(given):
        raise TypeError(f"{setting}={given!r} is a {type(given).__name__}; give {wanted}")
    if not 0 <= given <= 1:
        raise ValueError(f"{setting}={given!r}; give {wanted}")


def path_of(given: Any, setting: str) -> Path:
    """A path as a user gives it. Raises TypeError for anything else, ValueError for an empty one (it would be ".")."""
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise TypeError(f"{setting}={given!r} is a {type(given).__name__}; give a path, as text or as a pathlib.Path")
    if not os.fspath(given).strip():
        raise ValueError(f"{setting}={given!r} names no path; give one ('.' is the current directory)")
    return Path(given)


def directory_of(disk: Any) -> Path | None:
    """The path that is given as `disk`; None for None. Raises what `path_of` raises."""
    return None if disk is None else path_of(disk, "disk")


def modules_of(given: Any, setting: str) -> tuple[nn.Module | str, ...]:
    """Modules and name patterns as a user gives them, one or several. Raises TypeError for anything else."""
    from torch import nn

    one = isinstance(given, str | bytes | nn.Module) or not isinstance(given, Iterable)
    several = (given,) if one else tuple(given)
    for each in several:
        if not isinstance(each, str | nn.Module):
            raise TypeError(
                f"{setting}={each!r} names no modules: it is a {type(each).__name__}; give modules and name patterns"
            )
        if isinstance(each, str) and not each.strip():
            raise ValueError(f"{setting}={each!r} names no modules; give modules and name patterns ('*' is all)")
    return several


def blocks_of(blocks: Any) -> Blocks:
    """`blocks` as a user gives it, with a size in bytes. Raises TypeError, ValueError."""
    if isinstance(blocks, Iterable) and not isinstance(blocks, str):
        given: Blocks = modules_of(blocks, "blocks")
    elif isinstance(blocks, int | str):
        given = "auto" if blocks == "auto" else parse_bytes(blocks or 0, name="blocks")
    else:
        raise TypeError(
            f'blocks={blocks!r} is neither "auto", nor a size such as "256MiB", nor a list of modules and name patterns'
        )
    if not given:
        raise ValueError(
            f'blocks={blocks!r} names no blocks; give "auto", a size such as "64MiB", or some of the modules'
        )
    return given


def param_dtypes(given: Any) -> Any:
    """`param_dtype` as a user gives it: policies by module names, if it is one policy or several; else itself.

    Raises TypeError, ValueError.
    """
    if not isinstance(given, Mapping):
        return {"": _policy("param_dtype", given)} if _is_policy(given) else given
    if not given:
        raise ValueError("param_dtype={} names no modules; give a dtype for the whole model, or None for its own")
    for name in given:
        if not isinstance(name, str):
            raise TypeError(f"param_dtype[{name!r}]: give the name of a module, or a name pattern ('' is the model)")
    return {name: _policy(f"param_dtype[{name!r}]", each) for name, each in given.items()}


def _policy(setting: str, given: Any) -> Policy:
    if not _is_policy(given):
        _check_dtype(given, setting)
        return Policy(given)
    for field in ("param_dtype", "reduce_dtype", "output_dtype"):
        _check_dtype(getattr(given, field), f"{setting}.{field}")
    check_flag(given.cast_forward_inputs, f"{setting}.cast_forward_inputs")
    return Policy(given.param_dtype, given.reduce_dtype, given.output_dtype, given.cast_forward_inputs)


def _is_policy(given: Any) -> bool:
    return type(given).__name__ == "MixedPrecisionPolicy"  # by name: FSDP takes long to import


def prefetch_blocks(prefetch: Any) -> int | None:
    """`prefetch` as a user gives it: a number of blocks; None for "auto". Raises TypeError, ValueError."""
    if prefetch == "auto":
        return None
    if isinstance(prefetch, bool) or not isinstance(prefetch, int):
        raise TypeError(f'prefetch={prefetch!r} is neither "auto" nor a number of blocks')
    if prefetch < 0:
        raise ValueError(f'prefetch={prefetch} is negative; give "auto" or a number of blocks')
    return prefetch


def activation_config(activations: bool | Mapping[str, Any]) -> ActivationConfig | None:
    """`activations` as a user gives it: True, or a dict of settings; None for False. Raises TypeError, ValueError."""
    if isinstance(activations, bool):
        return ActivationConfig() if activations else None
    if not isinstance(activations, Mapping):
        raise TypeError(f"activations={activations!r} is neither True nor a dict of settings of offload_activations")
    known = signature(ActivationConfig.of).parameters
    unknown = next((name for name in activations if name not in known), None)
    if unknown is not None:
        also = "; give disk to headrace.offload() itself" if unknown == "disk" else ""
        raise TypeError(f"activations has no setting {unknown!r}{also}; it has {', '.join(known)}")
    if not activations:
        raise ValueError("activations={} sets nothing; give True for the defaults, or False to leave activations alone")
    return ActivationConfig.of(**activations)
