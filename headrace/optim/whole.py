"""How do rules that need a whole parameter update it? One parameter at a time, with PyTorch's own arithmetic."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from headrace.optim import kernel, narrow
from headrace.optim.devices import Member
from headrace.optim.kernel import Master
from headrace.optim.not_finite import NotFiniteSteps
from headrace.optim.on_device import DeviceUpdates, Piece
from headrace.optim.states import ParamStates
from headrace.optim.update import are_apart, scaled
from headrace.optim.weights import flat
from headrace.runtime.lanes import Copy


def update_whole(
    members: Sequence[Member],
    scale: float,
    states: ParamStates,
    not_finite: NotFiniteSteps,
    device: DeviceUpdates | None = None,
) -> None:
    """Updates the members one after the other, in the memory where they are, or else on `device`.

    State on disk comes into memory for one member at a time, or for the few that are on their way to `device` and back.
    """

    def pieces(batch: Sequence[Member]) -> Iterator[Piece]:
        for member in batch:
            if states.disk is not None and member.master.state_device.type == "cpu":
                states.fetch(states.disk, member.rule, member.master, member.state)
            yield _piece(member, scale, states, not_finite, device)

    if device is None:
        for piece in pieces(members):
            piece.update(piece.columns)
            piece.done()
        return
    apart = are_apart([member.master.host for member in members])
    for batch in [members] if apart else [[member] for member in members]:
        device.run(pieces(batch))


def _piece(
    member: Member, scale: float, states: ParamStates, not_finite: NotFiniteSteps, device: DeviceUpdates | None
) -> Piece:
    weights, state = member.master, member.state
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            state[name] = _dense(value.to("cpu" if name == "step" else weights.state_device))
    weights.master(state)
    names = _tensors(state)
    if device is not None:
        states.in_locked_memory(state, names, device.device)
    flag = None if device is None else device.flag()  # the same as in `found`, on the host
    found: list[torch.Tensor] = []  # whether the gradient is not finite
    stored, gradient = weights.exposed(), _dense(member.gradient.detach())

    def perform(here: Sequence[torch.Tensor]) -> Sequence[Copy]:
        there = state | dict(zip(names, here[2:], strict=True))
        member.begins()
        found.append(_apply(member, here[0], here[1], there, scale))
        new = {name: value for name, value in there.items() if name not in names}
        state.update(new)
        if device is None or flag is None:
            return ()
        made = _tensors(new)
        state.update({name: torch.empty_like(new[name], device="cpu") for name in made})
        states.in_locked_memory(state, made, device.device)
        copies = [(flag, found[0]), (stored, here[0]), *((state[name], there[name]) for name in (*names, *made))]
        return [(target, source) for target, source in copies if target is not source]

    def done() -> None:
        not_finite.note(member.step, found[0] if flag is None else bool(flag))
        weights.performed(kernel.checksum(stored) if weights.form is Master.SPLIT else None)
        member.updated = True
        if states.disk is not None and weights.state_device.type == "cpu":
            states.to_disk(states.disk, member.rule, weights, state)

    return Piece([stored, gradient, *(state[name] for name in names)], perform, done)


def _apply(
    member: Member,
    stored: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, Any],
    scale: float,
) -> torch.Tensor:
    """Updates one parameter, of which everything is on one device. Returns whether its gradient is not finite."""
    weights = member.master
    master = next((flat(weights.dense(state[name])) for name in weights.master_dtypes), None)
    step = float(state.get("step", 0.0)) + 1
    exact = narrow.join(stored, master, weights.form)
    largest = torch.linalg.vector_norm(gradient, torch.inf) if gradient.numel() else gradient.sum()
    # In the shape and layout of the parameter: rows and columns matter here.
    member.rule.apply(state, weights.shaped(exact), scaled(gradient, scale).to(exact.dtype))
    narrow.split_master(exact, stored, master, weights.form, narrow.key(step, member.index, of_weight=True))
    if weights.form is Master.NONE:
        state["step"] = torch.tensor(step, device="cpu")  # which not every rule counts
    return ~largest.isfinite().view(1)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy of it if there are gaps between its elements."""
    return tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()


def _tensors(state: dict[str, Any]) -> list[str]:
    """The names of the tensors in a parameter's state that rest beside its master."""
    return [name for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step"]
