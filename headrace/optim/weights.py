"""How is the exact value of one weight kept between steps, and how do we notice that somebody else wrote it?

A float32 weight is its own exact value. A low-precision one has a master: in split form (bfloat16: 16 more bits) or in
full (a float32 tensor beside it); or a bfloat16 one has none, and is itself rounded stochastically. In full form each
element shows by itself whether it was written: the master counts if it rounds to the weight that is there. In split
form, the weight's `_version`, its address, and a checksum of what was written last show it.
A write that leaves no trace (`p.data.copy_(w)`) is not noticed in split form. It counts as w plus the old remainder,
which is at most half a unit of bfloat16's last place.
"""

from typing import Any

import torch

from headrace.optim import eight_bit, kernel, narrow
from headrace.optim.kernel import Master
from headrace.optim.refusals import check_bytes
from headrace.runtime.pending import Unit
from headrace.runtime.sharded import first_element

REMAINDER = "master_remainder"  # keys in the state of a parameter
FULL = "master"
_MASTER_DTYPES = {REMAINDER: torch.int16, FULL: torch.float32}


class MasterWeight:
    """The weights of one parameter, in the memory in which they are updated, and their exact value.

    `host` is the parameter itself, or its twin in host memory if it is on an accelerator and updated on the host.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        given: torch.Tensor,
        master_form: str,
        *,
        eight_bits: bool = False,
        state_on_host: bool = False,
    ) -> None:
        """`given`: the parameter as the user has it (the DTensor of a local shard), which counts its own writes.

        `state_on_host`: the master and the moments rest in host memory also if the weights do not.
        """
        self.parameter = parameter
        self._written_as = (parameter, given)
        self.dtype, self._shape, self._strides = parameter.dtype, parameter.shape, parameter.stride()
        self._device = parameter.device
        self.uses_8bit = eight_bits and eight_bit.fits(parameter)  # whether its moments are kept in 8 bits
        self.host = parameter
        self._state_on_host = state_on_host
        # The place of the first element in the whole parameter. It is whole here if its shards were brought together.
        self.offset = 0 if given.shape == parameter.shape else first_element(given)
        if parameter.dtype == torch.bfloat16 and master_form != "full":
            self.form = Master.SPLIT if master_form == "split" else Master.NONE
        elif parameter.dtype in (torch.bfloat16, torch.float16):
            self.form = Master.FULL
        else:
            self.form = Master.IS_WEIGHT
        self._key = {Master.SPLIT: REMAINDER, Master.FULL: FULL}.get(self.form)
        # The checksum of what we wrote last; None when the state was made or loaded since.
        self._checksum: int | torch.Tensor | None = None
        self._mark: tuple[int, ...] | None = None
        self.changed = True  # whether somebody may have written the parameter since our last update
        self.in_files: Unit | None = None  # the unit in whose files this step wrote; set on one member of the unit
        self._dense: torch.Tensor | None = None  # a copy of weights that have gaps between their elements

    def suspect(self) -> None:
        """Has the next step check the weights: somebody may have written them without a trace."""
        self._mark = None

    def check_version(self) -> None:
        """Called when a step begins: notes in `changed` whether somebody may have written the parameter."""
        self.changed = self._mark != self._now()

    @property
    def layout_unchanged(self) -> bool:
        """Whether the parameter still has the dtype, device, shape and strides that it had when this was made."""
        now, before = self.parameter, (self.dtype, self._device, self._shape, self._strides)
        return (now.dtype, now.device, now.shape, now.stride()) == before

    def check_layout(self, *, keeps_order: bool) -> None:
        """Raises ValueError when the parameter has another shape now, or with `keeps_order` other strides."""
        now = self.parameter
        if now.shape != self._shape or (keeps_order and now.stride() != self._strides):
            raise ValueError(
                f"a parameter of shape {tuple(self._shape)} and strides {self._strides} got shape {tuple(now.shape)}"
                f" and strides {now.stride()} since the last step, and its state does not fit; make a new optimizer,"
                " and where only the strides changed load into it the state_dict() of this one from before"
            )

    @property
    def state_device(self) -> torch.device:
        """Where the master and the moments rest, if they are in memory."""
        return torch.device("cpu") if self._state_on_host else self.host.device

    @property
    def master_dtypes(self) -> dict[str, torch.dtype]:
        """Name and dtype of the master; empty if the weight is its own master, or has none."""
        return {} if self._key is None else {self._key: _MASTER_DTYPES[self._key]}

    @property
    def master_is_stale(self) -> bool:
        """Whether the weights were written since our last update, which makes a master in split form worthless."""
        return self.form is Master.SPLIT and self._written_by_others()

    def master(self, state: dict[str, Any]) -> torch.Tensor | None:
        """The master in `state`: made if it is missing, and reset to the weights if somebody wrote them."""
        self.forget_masters(state)
        if self._key is None:
            return None
        kept = self.adopt(state.get(self._key), _MASTER_DTYPES[self._key])
        if kept is None:
            kept = self.zeros(_MASTER_DTYPES[self._key])
            self._derive(kept, state)
        elif self.master_is_stale:
            kept.zero_()
        state[self._key] = kept
        return kept

    def forget_masters(self, state: dict[str, Any]) -> None:
        """Drops loaded masters from `state` if the weight is to have none: it counts as it is."""
        for name in _MASTER_DTYPES if self.form is Master.NONE else ():
            state.pop(name, None)

    def other_form(self, state: dict[str, Any]) -> str | None:
        """The name of a loaded master of the other form, from which the next step makes the one to keep."""
        other = {REMAINDER: FULL, FULL: REMAINDER}.get(self._key or "")
        return other if other in state and self._key not in state else None

    def are_to_be_split(self, state: dict[str, Any]) -> bool:
        """Whether `master` will write the weights too, as it splits a loaded full master."""
        return self.other_form(state) == FULL

    def _written_by_others(self) -> bool:
        """Whether the weights differ from those that we wrote last; a write of the same values does not count."""
        if self._checksum is None or not self.changed:
            return False
        return bool(kernel.checksum(self.exposed()) != self._checksum)

    def _derive(self, kept: torch.Tensor, state: dict[str, Any]) -> None:
        """Fills the new master `kept` from a loaded master of the other form, or else from the weights."""
        if self.form is Master.FULL:
            kept.copy_(self.host.detach())
            remainder = self.adopt(state.pop(REMAINDER, None), torch.int16)
            if remainder is not None and self.host.dtype == torch.bfloat16:
                kept.view(torch.int32).add_(remainder)
        else:
            full = self.adopt(state.pop(FULL, None), torch.float32)
            if full is not None:
                self._split(full, kept)

    def _split(self, full: torch.Tensor, kept: torch.Tensor) -> None:
        """Splits the masters `full` into weights and remainders (`kept`). Weights are written: ties round otherwise."""
        runs = (tensor.split(kernel.CHUNK_ELEMENTS) for tensor in (self.exposed(), self.flat(full), flat(kept)))
        for stored, master, remainder in zip(*runs, strict=True):
            exact = narrow.join(stored, master.to(stored.device), Master.FULL)
            beside = remainder.to(stored.device)
            narrow.split_master(exact, stored, beside, Master.SPLIT)
            if beside is not remainder:
                remainder.copy_(beside)

    def performed(self, checksum: int | torch.Tensor | None) -> None:
        """Called when an update has been written to `exposed()`; `checksum`: of what was written, in split form."""
        if self._dense is not None:
            self.host.detach().copy_(self._dense)
            self._dense = None
        self._checksum = checksum

    def written(self) -> None:
        """Called when this step is done with the parameter."""
        self._mark = self._now()
        if self.in_files is not None:
            self.in_files.updated_in_files()
            self.in_files = None

    def broken_off(self) -> None:
        """Called when a step was cut short that may have written the parameter; others' earlier writes stay noticed."""
        self._dense = None  # the next step begins with the weights that are there then
        if not self.changed:
            self.written()

    def _now(self) -> tuple[int, ...]:
        return *(tensor._version for tensor in self._written_as), self.parameter.data_ptr()

    # layout: elements in the order in which they lie in memory --------------------------------------------------------
    def exposed(self) -> torch.Tensor:
        """The weights as a flat tensor that the update writes."""
        return flat(self.exposed_dense())

    def exposed_dense(self) -> torch.Tensor:
        """The memory of `exposed()` in the shape of the weights."""
        if self.host.is_contiguous():
            return self.host.detach()
        weights = self.host.detach()
        if not torch.ops.aten.is_non_overlapping_and_dense(weights):
            if self._dense is None:
                self._dense = weights.contiguous()
            weights = self._dense
        return weights

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A gradient or a state, flat, in the order of `exposed()`; a copy if its elements lie in another order."""
        return flat(self.dense(tensor.detach()))

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `flat`, but in the shape of the weights, and not detached."""
        if tensor.dtype == torch.uint8 or self.lies_alike(tensor):
            return tensor
        return self._empty(tensor.dtype, tensor.device).copy_(tensor.detach())

    def lies_alike(self, tensor: torch.Tensor) -> bool:
        """Whether the elements of a gradient or a state lie in the order of `exposed()`."""
        if tensor.is_contiguous() and self.host.is_contiguous():
            return True
        return _strides(tensor) == self._layout()

    def shaped(self, flat: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
        """The inverse of `flat`: the same memory in the shape of the weights, in `shape`, or in an 8-bit moment's."""
        if shape is not None:
            return flat.view(shape)
        if flat.dtype == torch.uint8:
            return flat.view(-1, eight_bit.RECORD_BYTES)
        like = self.host
        if like is self.parameter:  # as it was: it may have been given other strides since, as by `p.data = t`
            like = torch.empty_strided(self._shape, self._strides, device="meta")
        if torch.ops.aten.is_non_overlapping_and_dense(like):
            return flat.as_strided(like.shape, like.stride())
        return flat.view(like.shape)

    def is_shaped(self, tensor: torch.Tensor) -> bool:
        """Whether a state has the strides that `shaped` would give it."""
        flat = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
        return tensor.stride() == self.shaped(flat).stride()

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """A new state of zeros in the shape and layout of the weights; with dtype uint8, an 8-bit moment."""
        if dtype == torch.uint8:
            return eight_bit.zeros(self.host.numel(), self.state_device)
        return self._empty(dtype, self.state_device).zero_()

    def adopt(self, value: Any, dtype: torch.dtype) -> torch.Tensor | None:
        """A loaded state in a form that can be updated in place; None if it has another dtype or shape."""
        if not isinstance(value, torch.Tensor) or value.dtype != dtype:
            return None
        check_bytes(value, lambda: f"a state of a parameter of shape {tuple(self._shape)}")
        if dtype == torch.uint8:
            whole = eight_bit.is_record(value, self.host.numel())
            return value.to(self.state_device).contiguous() if whole else None
        if value.shape != self.host.shape:
            return None
        if value.device != self.state_device:  # Lightning and accelerate move state to the accelerator
            value = value.to(self.state_device)
        return value if self.lies_alike(value) else self._empty(dtype, self.state_device).copy_(value)

    def _empty(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        if torch.ops.aten.is_non_overlapping_and_dense(self.host):
            return torch.empty_strided(self.host.shape, self.host.stride(), dtype=dtype, device=device)
        return torch.empty(self.host.shape, dtype=dtype, device=device)

    def _layout(self) -> tuple[int, ...]:
        if torch.ops.aten.is_non_overlapping_and_dense(self.host):
            return _strides(self.host)
        return _strides(torch.empty(self.host.shape, device="meta"))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor's elements in the order in which they lie in memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that matter: those of dimensions with more than one element."""
    return tuple(step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
