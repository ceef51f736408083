"""What do handles have in common? Each is a context manager, and belongs to one model."""

from typing import Any, Self

__all__ = ["Handle"]


class Handle:
    """What `offload()` and `offload_activations()` return. As a context manager it calls `remove()` at the end."""

    def remove(self) -> None:
        """Ends the offloading: the model is a plain one again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a handle belongs to one model, and is neither copied nor pickled; copy.deepcopy(model) gives a plain"
            " model, to be given to headrace.offload()"
        )
