"""What is one parameter's update, and who performs it? The native kernel if it can, else PyTorch in chunks."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.optim import eight_bit, kernel, narrow, threads
from headrace.optim.eight_bit import RECORD_BYTES, RUN_ELEMENTS
from headrace.optim.kernel import CHUNK_ELEMENTS, Master, Number, Task
from headrace.optim.rules import ElementRule

_NUMBERS = {torch.float32: Number.FLOAT32, torch.bfloat16: Number.BFLOAT16, torch.float16: Number.FLOAT16}
_STATE_NUMBERS = {torch.float32: Number.FLOAT32, torch.bfloat16: Number.BFLOAT16, torch.uint8: Number.EIGHT_BIT}
_DEVICE_CHUNK_ELEMENTS = 1 << 23  # at a time on an accelerator, which bounds the memory for widened state
_COLUMNS = ("weight", "gradient", "master", "first", "second", "maximum")


@dataclass(kw_only=True)
class Update:
    """The update of one parameter, or of a run of its elements, in the memory where it is performed.

    All tensors are dense, with their elements in the same order in memory; for moments in 8 bits, see eight_bit.py.
    """

    rule: ElementRule
    weight: torch.Tensor
    gradient: torch.Tensor  # in any floating-point dtype
    form: Master
    master: torch.Tensor | None = None  # int16 remainders (split), float32 (full)
    first: torch.Tensor | None = None  # float32 (float64 if the weights are), bfloat16, or 8 bits
    second: torch.Tensor | None = None
    maximum: torch.Tensor | None = None  # float32
    first_step: bool = False
    stream: int = 0  # selects the parameter's own random numbers, for stochastic rounding
    place: int = 0  # of the first element in the parameter, so that runs do not change the random numbers
    offset: int = 0  # of the parameter in the whole one of which it is a shard, for the same reason
    checksum: int | torch.Tensor = 0  # of the written weights, in split form
    not_finite: bool | torch.Tensor = False  # whether some gradient was not finite
    begins: Callable[[], None] = lambda: None  # called just before anything is written

    @property
    def columns(self) -> dict[str, Any]:
        """The tensors that take part, by name."""
        return {name: column for name in _COLUMNS if (column := getattr(self, name)) is not None}

    def part(self, start: int, stop: int, **given: Any) -> "Update":
        """The update of elements [start, stop) of this one, flat. `given` columns take the place of its own."""
        columns = self.columns
        for name in columns.keys() - given.keys():
            given[name] = part_of(columns[name], start, stop)
        return dataclasses.replace(self, place=self.place + start, **given)


def part_of(column: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a dense column, flat; of an 8-bit moment, the runs that have them. The same memory."""
    if column.dtype == torch.uint8:
        start, stop = start // RUN_ELEMENTS * RECORD_BYTES, -(-stop // RUN_ELEMENTS) * RECORD_BYTES
    return column.detach().as_strided((column.numel(),), (1,))[start:stop]


def perform(updates: Sequence[Update], gradient_scale: float, *, native: bool | None = None) -> None:
    """Performs the updates, in place. `gradient_scale` multiplies every gradient, rounded to the gradient's dtype.

    `native` chooses the kernel or PyTorch; None takes the kernel if it was built. PyTorch does dtypes unknown to it.
    """
    if not are_apart([update.weight for update in updates]):  # one after the other, as in a loop over parameters
        for update in updates:
            perform([update], gradient_scale, native=native)
        return
    use_kernel = kernel.available() if native is None else native
    known: list[Update] = []
    others: list[Update] = []
    for update in updates:
        (known if use_kernel and _fits_kernel(update) else others).append(update)
    if known:
        rules = {id(update.rule): update.rule for update in known}
        places = {key: index for index, key in enumerate(rules)}
        tasks = [_task(update, places[id(update.rule)]) for update in known]
        for update in known:
            update.begins()
        found = kernel.run(tasks, [rule.constants(gradient_scale) for rule in rules.values()])
        for update, (checksum, not_finite) in zip(known, found, strict=True):
            update.checksum, update.not_finite = checksum, not_finite
    if others:
        for update in others:
            update.begins()
        _perform_in_torch(others, gradient_scale)


def scaled(gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """`gradient * scale` with the arithmetic of `torch.nn.utils.clip_grad_norm_`; the gradient itself for scale 1."""
    if scale == 1:
        return gradient
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    return gradient * torch.tensor(scale, dtype=dtype, device="cpu")


def are_apart(weights: Sequence[torch.Tensor]) -> bool:
    """Whether no two of these have the same memory. Otherwise they are updated one after the other."""
    spans = sorted((weight.data_ptr(), weight.nbytes) for weight in weights if weight.numel())
    return all(begin + nbytes <= following for (begin, nbytes), (following, _) in itertools.pairwise(spans))


def _fits_kernel(update: Update) -> bool:
    return update.weight.device.type == "cpu" and update.weight.dtype in _NUMBERS and update.gradient.dtype in _NUMBERS


def _task(update: Update, constants: int) -> Task:
    return Task(
        weight=update.weight.data_ptr(),
        master=_address(update.master),
        gradient=update.gradient.data_ptr(),
        first=_address(update.first),
        second=_address(update.second),
        maximum=_address(update.maximum),
        elements=update.weight.numel(),
        constants=constants,
        master_form=update.form,
        weight_number=_NUMBERS[update.weight.dtype],
        gradient_number=_NUMBERS[update.gradient.dtype],
        state_number=Number.FLOAT32 if update.first is None else _STATE_NUMBERS[update.first.dtype],
        first_step=update.first_step,
        stream=update.stream,
        place=update.offset + update.place & 0xFFFFFFFF,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _perform_in_torch(updates: Sequence[Update], gradient_scale: float) -> None:
    """Updates chunks that fit the cache, each on one thread with one intra-op thread: at 0.8 of the memory's speed.

    On an accelerator, larger chunks are updated on the current stream.
    """
    on_host: list[tuple[Update, int, int]] = []
    for update in updates:
        at_once = CHUNK_ELEMENTS * 4 if update.weight.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
        chunks = [(update, start, start + at_once) for start in range(0, update.weight.numel(), at_once)]
        if update.weight.device.type == "cpu":
            on_host += chunks
            continue
        with torch.no_grad():
            for chunk in chunks:
                _chunk_in_torch(*chunk, gradient_scale)
    queue = iter(on_host)  # next() on a list iterator is atomic
    before = torch.get_num_threads()  # not in `work`: the number set there is also that of threads that begin

    def work() -> None:
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for chunk in queue:
                    _chunk_in_torch(*chunk, gradient_scale)
        finally:
            torch.set_num_threads(before)

    if on_host:
        threads.on_each(work, at_most=len(on_host))
    for update in updates:
        if update.form is Master.SPLIT:
            update.checksum = kernel.checksum(part_of(update.weight, 0, update.weight.numel()))


def _chunk_in_torch(whole: Update, start: int, stop: int, gradient_scale: float) -> None:
    update = whole.part(start, stop)
    exact = narrow.join(update.weight, update.master, update.form)
    gradient = scaled(update.gradient, gradient_scale).to(exact.dtype)
    finite = torch.linalg.vector_norm(gradient, torch.inf).isfinite()  # unlike gradient.isfinite(), takes no memory
    if finite.device.type != "cpu":
        whole.not_finite = ~finite | whole.not_finite
    elif not finite:
        whole.not_finite = True
    moments = [moment for moment in (update.first, update.second) if moment is not None]
    wide = [_widened(moment, exact, signed=moment is update.first) for moment in moments]
    maximum = [] if update.maximum is None else [update.maximum]
    update.rule.apply(exact, gradient, *wide, *maximum, first_step=update.first_step)
    begin = _begin(update, of_weight=True)
    narrow.split_master(exact, update.weight, update.master, update.form, begin)
    for moment, values in zip(moments, wide, strict=True):
        _narrowed(update, moment, values)


def _widened(moment: torch.Tensor, exact: torch.Tensor, *, signed: bool) -> torch.Tensor:
    if moment.dtype == torch.uint8:
        return eight_bit.decode(moment, exact.numel(), signed=signed)
    return moment.to(exact.dtype)


def _narrowed(update: Update, moment: torch.Tensor, values: torch.Tensor) -> None:
    """Stores `values` in the moment, unless they are that memory already."""
    if moment.dtype == values.dtype:
        return
    is_first = moment is update.first
    random = narrow.randoms(_begin(update, of_weight=False), values) >> (0 if is_first else 16) & 0xFFFF
    if moment.dtype == torch.uint8:
        eight_bit.encode(values, moment, random, signed=is_first)
    else:
        moment.copy_(narrow.stochastic_bfloat16(values, random))


def _begin(update: Update, *, of_weight: bool) -> int:
    """Where an update's random numbers begin."""
    return narrow.key(update.rule.step, update.stream, of_weight=of_weight) + update.offset + update.place
