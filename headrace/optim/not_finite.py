"""Which steps took gradients that were NaN or infinite? The updates tell; nobody waits for an accelerator."""

import torch

_UNDER_WAY = 2  # at most this many steps have updates under way: the current step, and one whose updates were put off


class NotFiniteSteps:
    """The steps of one optimizer that updated weights although some gradient was not finite."""

    def __init__(self) -> None:
        self.number = 0  # the number of the step that is under way, or comes next
        self._found: set[int] = set()
        self._unread: dict[int, torch.Tensor] = {}  # flags of the latest steps, on an accelerator
        # Counts of earlier steps that are not in `_found`: one that is known, and one that an accelerator keeps.
        self._older = 0
        self._unread_older: torch.Tensor | None = None

    def note(self, step: int, not_finite: bool | torch.Tensor) -> None:
        """Called when some gradients of a step were used; `not_finite`: whether one of them was not finite."""
        if isinstance(not_finite, torch.Tensor) and not_finite.device.type != "cpu":
            before = self._unread.get(step)
            self._unread[step] = not_finite if before is None else before | not_finite.to(before.device)
            while len(self._unread) > _UNDER_WAY:
                self._count_older(min(self._unread))
        elif not_finite:
            self._found.add(step)

    def _count_older(self, step: int) -> None:
        flag, older = self._unread.pop(step), self._unread_older
        if step not in self._found:
            self._unread_older = flag.long() if older is None else older + flag.to(older.device)

    def known(self) -> int:
        """How many such steps are known, among those whose updates are over. Waits for nothing."""
        return len(self._found) + self._older

    def count(self) -> int:
        """How many such steps there are so far. Waits for flags on accelerators."""
        unread, self._unread = self._unread, {}
        self._found |= {step for step, flag in unread.items() if flag}
        older, self._unread_older = self._unread_older, None
        self._older += 0 if older is None else int(older)
        return self.known()
