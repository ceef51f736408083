"""What can a user set on every optimizer of headrace, beside the update rule's own settings?"""

import os
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch

from headrace.config import directory_of, is_number

_MasterForm = Literal["split", "full", "none"]
_Tier = Literal["host", "disk"]
_Overlap = Literal["none", "backward", "forward"]
_Update = Literal["host", "device"]
Pin = bool | Literal["weights", "gradients"]

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "master_dtype": (torch.float32,),
    "master_form": get_args(_MasterForm),
    "state_dtype": (torch.float32, torch.bfloat16, "8bit"),
    "tier": get_args(_Tier),
    "update": get_args(_Update),
    "overlap": get_args(_Overlap),
    "zero_stage": (1, 2),
    "pin": (True, False, "weights", "gradients"),
    "overlap_d2h_h2d": (True, False),
}


class Given(TypedDict, total=False):
    """The settings of `Options` as keyword arguments, for type checkers."""

    master_dtype: torch.dtype
    master_form: _MasterForm
    state_dtype: torch.dtype | Literal["8bit"]
    tier: _Tier
    update: _Update
    disk: str | os.PathLike[str] | None
    device_fraction: float | Literal["auto"]
    pin: Pin
    overlap_d2h_h2d: bool
    overlap: _Overlap
    max_grad_norm: float | None
    mesh: Any
    zero_stage: Literal[1, 2]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Validated settings; `headrace.optim.AdamW` says what each one means."""

    master_dtype: torch.dtype = torch.float32
    master_form: _MasterForm = "split"
    state_dtype: torch.dtype | Literal["8bit"] = torch.float32
    tier: _Tier = "host"
    update: _Update = "host"
    disk: Any = None
    device_fraction: float | Literal["auto"] = 0.0
    pin: Pin = True
    overlap_d2h_h2d: bool = True
    overlap: _Overlap = "none"
    max_grad_norm: float | None = None
    mesh: Any = None  # a DeviceMesh
    zero_stage: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):  # 1 is not True
                choices = " or ".join(repr(choice) for choice in allowed)
                raise ValueError(f"{name}={value!r} is not available; allowed: {choices}")
        if (self.tier == "disk") != (directory_of(self.disk) is not None):
            raise ValueError(
                f'tier={self.tier!r} with disk={self.disk!r}: tier="disk" needs the directory in which state rests,'
                ' such as disk="/nvme/headrace"; other tiers need none'
            )
        fraction = self.device_fraction
        if fraction != "auto" and not (is_number(fraction) and 0 <= float(fraction) <= 1):
            raise ValueError(f'device_fraction={fraction!r} is neither in [0, 1] nor "auto"')
        if self.update == "device" and fraction != 0:
            raise ValueError(
                f'device_fraction={fraction!r} keeps state on the accelerator, and update="device" updates there what'
                " rests on the host: leave one of the two out"
            )
        if self.overlap == "backward" and self.max_grad_norm is not None:
            raise ValueError(
                'overlap="backward" updates weights before the norm of all gradients is known, so it cannot clip to'
                f' max_grad_norm={self.max_grad_norm}; use overlap="forward", which can, or leave max_grad_norm out'
            )
        if self.overlap != "none" and self.mesh is not None:
            raise ValueError(
                f"overlap={self.overlap!r} with mesh: an update that runs beside a pass would send weights to the other"
                ' ranks beside the collectives of that pass, in an order that no rank knows; leave overlap at "none"'
            )
        if self.zero_stage == 2 and self.mesh is None:
            raise ValueError(
                "zero_stage=2 averages gradients over ranks: give their mesh, such as"
                " torch.distributed.init_device_mesh('cuda', (world_size,))"
            )
        if self.max_grad_norm is not None and not (is_number(self.max_grad_norm) and self.max_grad_norm > 0):
            raise ValueError(f"max_grad_norm={self.max_grad_norm!r} is not a positive number; None clips nothing")

    @classmethod
    def of(cls, optimizer: object, given: Given) -> "Options":
        """The options given to an optimizer. Raises TypeError for an argument that it does not have."""
        unknown = next((name for name in given if name not in Given.__annotations__), None)
        if unknown is not None:
            raise TypeError(f"{type(optimizer).__name__}.__init__() got an unexpected keyword argument {unknown!r}")
        return cls(**given)

    @property
    def moment_dtype(self) -> torch.dtype:
        """The dtype of moments; torch.uint8 stands for 8 bits, for parameters that allow it."""
        return torch.uint8 if isinstance(self.state_dtype, str) else self.state_dtype


def snapshot(group: dict[str, Any]) -> dict[str, Any]:
    """A copy of a param group's settings: a schedule may change them while updates are under way."""
    return {name: _copied(value) for name, value in group.items() if name != "params"}


def comparable(group: dict[str, Any]) -> dict[str, Any]:
    """A param group's settings as values that are equal if the settings are."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in snapshot(group).items()
    }


def _copied(value: Any) -> Any:
    if isinstance(value, tuple):  # betas may be tensors
        return tuple(map(_copied, value))
    return value.clone() if isinstance(value, torch.Tensor) else value
