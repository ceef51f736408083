"""Which steps took gradients that were NaN or infinite? Who performs updates tells; no accelerator is waited for."""

import torch

__all__ = ["NotFiniteSteps"]


class NotFiniteSteps:
    """The steps of one optimizer in which some gradient was not finite, and weights were updated all the same."""

    def __init__(self) -> None:
        self.number = 0  # of the step that is under way, or comes next
        self._found: set[int] = set()
        self._unread: dict[int, torch.Tensor] = {}  # flags on an accelerator, by step

    def note(self, step: int, not_finite: bool | torch.Tensor) -> None:
        """Some gradients of a step were updated with; whether one of them was not finite."""
        if isinstance(not_finite, torch.Tensor) and not_finite.device.type != "cpu":
            before = self._unread.get(step)
            self._unread[step] = not_finite if before is None else before | not_finite
        elif not_finite:
            self._found.add(step)

    def known(self) -> int:
        """How many steps of those whose updates are over. Waits for nothing."""
        return len(self._found)

    def count(self) -> int:
        """How many steps, so far."""
        unread, self._unread = self._unread, {}
        self._found |= {step for step, flag in unread.items() if flag}
        return len(self._found)
