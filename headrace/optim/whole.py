"""How do rules that need a whole parameter update it? One parameter at a time, with PyTorch's own arithmetic."""

from collections.abc import Sequence

import torch

from headrace.optim import kernel, narrow
from headrace.optim.devices import Member
from headrace.optim.kernel import Master
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.states import ParamStates
from headrace.optim.update import scaled

__all__ = ["update_whole"]


def update_whole(members: Sequence[Member], scale: float, states: ParamStates, not_finite: NotFiniteSteps) -> None:
    """Updates the members one after the other; state on disk comes into memory for one member at a time."""
    for member in members:
        disk = states.disk if member.master.host.device.type == "cpu" else None
        if disk is not None:
            states.fetch(disk, member.rule, member.master, member.state)
        _update(member, scale, not_finite)
        if disk is not None:
            states.to_disk(disk, member.rule, member.master, member.state)


def _update(member: Member, scale: float, not_finite: NotFiniteSteps) -> None:
    weights, state = member.master, member.state
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = value.to("cpu" if name == "step" else weights.host.device)
    master = weights.master(state)
    master = None if master is None else weights.flat(master)
    stored = weights.exposed()
    exact = narrow.join(stored, master, weights.form)
    gradient = member.gradient.detach()
    if gradient.numel():
        not_finite.note(member.step, ~torch.linalg.vector_norm(gradient, torch.inf).isfinite())
    gradient = scaled(gradient, scale)
    # In the shape and layout of the parameter: rows and columns matter here.
    shaped = weights.shaped(exact)
    member.begins()
    member.rule.apply(state, shaped, gradient.to(exact.dtype))
    narrow.split_master(exact, stored, master, weights.form)
    weights.performed(kernel.checksum(stored) if weights.form is Master.SPLIT else None)
    member.updated = True
