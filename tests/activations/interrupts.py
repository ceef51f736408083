"""How does Ctrl-C strike at a chosen moment? As the n-th function of headrace's is entered."""

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn

from tests.activations.models import step

FOLDERS = ("/headrace/activations/", "/headrace/memory/pool", "/headrace/compat/")
SWALLOWED = ("__del__", "<genexpr>")  # where nobody hears of it


class Calls:
    """Counts functions in `folders` that are entered; raises KeyboardInterrupt at the last of `left`."""

    def __init__(self, left: int = sys.maxsize, folders: tuple[str, ...] = FOLDERS) -> None:
        self.left = left
        self.folders = folders
        self.seen = 0

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in SWALLOWED and any(part in code.co_filename for part in self.folders):
            self.seen += 1
            if self.seen == self.left:
                raise KeyboardInterrupt

    def during(self, model: nn.Module, x: Tensor) -> None:
        sys.setprofile(self)
        try:
            step(model, x)
        finally:
            sys.setprofile(None)
