"""How does an optimizer step that works element by element? All parameters at once, in one pass over memory."""

from collections.abc import Sequence
from typing import Any

import torch

from millrace.optim import update
from millrace.optim.devices import Member
from millrace.optim.optimizer import HostOptimizer
from millrace.optim.rules import ElementRule
from millrace.optim.update import Update

__all__ = ["ElementOptimizer"]


class ElementOptimizer(HostOptimizer):
    """Adam and its like: a subclass names its state and gives its rule."""

    MAXIMUM: str | None = None  # the running maximum of groups with amsgrad, in float32
    COUNTS_STEPS = True  # whether the stock optimizer keeps "step" in its state

    def _rule(self, group: dict[str, Any], step: float) -> ElementRule:
        """The rule of a group at one step."""
        raise NotImplementedError

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state that this group needs: the first, and the second, of ELEMENTWISE."""
        return self.ELEMENTWISE

    def _maximum_name(self, group: dict[str, Any]) -> str | None:
        return self.MAXIMUM if group.get("amsgrad") else None

    def _perform(self, members: Sequence[Member], scale: float) -> None:
        rules: dict[tuple[int, float], ElementRule] = {}
        updates = []
        states = []
        for member in members:
            state, fresh = self._state_of(member)
            states.append(state)
            step = float(state["step"]) if "step" in state else 1.0
            key = (id(member.group), step)
            if key not in rules:
                rules[key] = self._rule(member.group, step)
            updates.append(self._update_of(member, state, rules[key], fresh))
        update.perform(updates, scale)
        for member, item, state in zip(members, updates, states, strict=True):
            member.weights.performed(item.checksum)
            member.updated = True
            member.state.clear()
            member.state.update(state)

    def _update_of(self, member: Member, state: dict[str, Any], rule: ElementRule, fresh: bool) -> Update:
        weights = member.weights
        tensors = [weights.flat(state[name]) for name in self._state_names(member.group)]
        maximum = self._maximum_name(member.group)
        return Update(
            rule=rule,
            weight=weights.exposed(),
            gradient=weights.flat(member.gradient),
            form=weights.form,
            master=weights.master(state),
            first=tensors[0] if tensors else None,
            second=tensors[1] if len(tensors) > 1 else None,
            maximum=None if maximum is None else weights.flat(state[maximum]),
            first_step=fresh,
            stream=member.index,
        )

    def _state_of(self, member: Member) -> tuple[dict[str, Any], bool]:
        """The state of a parameter in host memory, counted one step on, and whether it was made just now.

        Its entries become the parameter's when the update has been performed: nothing has changed if that fails.
        """
        state: dict[str, Any] = dict(member.state)
        weights = member.weights
        own_dtype = weights.host.dtype if weights.host.dtype == torch.float64 else torch.float32
        moments = self._options.state_dtype if own_dtype == torch.float32 else own_dtype
        dtypes = dict.fromkeys(self._state_names(member.group), moments)
        maximum = self._maximum_name(member.group)
        if maximum is not None:
            dtypes[maximum] = own_dtype
        fresh = False
        for name, dtype in dtypes.items():
            value = state.get(name)
            if isinstance(value, torch.Tensor) and value.dtype != dtype:  # somebody cast it while it was away
                value = value.to(dtype)
            kept = weights.adopt(value, dtype)
            fresh = fresh or kept is None
            state[name] = weights.zeros(dtype) if kept is None else kept
        if self.COUNTS_STEPS or moments == torch.bfloat16:  # its stochastic rounding differs from step to step
            state["step"] = state["step"].to("cpu") + 1 if "step" in state else torch.tensor(1.0)
        return state, fresh
