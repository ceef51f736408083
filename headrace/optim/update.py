"""What is one parameter's update, and who performs it? The native kernel if it can, else PyTorch in chunks."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from headrace.optim import eight_bit, kernel, narrow, threads
from headrace.optim.eight_bit import RECORD_BYTES, RUN_ELEMENTS
from headrace.optim.kernel import CHUNK_ELEMENTS, Master, Number, Task
from headrace.optim.rules import ElementRule

__all__ = ["Update", "are_apart", "flattened", "part_of", "perform", "scaled"]

_NUMBERS = {torch.float32: Number.FLOAT32, torch.bfloat16: Number.BFLOAT16, torch.float16: Number.FLOAT16}
_STATE_NUMBERS = {torch.float32: Number.FLOAT32, torch.bfloat16: Number.BFLOAT16, torch.uint8: Number.EIGHT_BIT}
_DEVICE_CHUNK_ELEMENTS = 1 << 23  # at a time on an accelerator, which bounds the memory for widened state


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
    checksum: int | torch.Tensor = 0  # of the written weights, in split form
    not_finite: bool | torch.Tensor = False  # whether some gradient was not finite
    begins: Callable[[], None] = lambda: None  # called just before anything is written


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
        place=update.place & 0xFFFFFFFF,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _perform_in_torch(updates: Sequence[Update], gradient_scale: float) -> None:
    """Updates chunks that fit the cache, each on one thread with one intra-op thread: at 0.8 of the memory's speed.

    On an accelerator, larger chunks are updated on the current stream.
    """
    flat = [flattened(update) for update in updates]
    with torch.no_grad():
        for update in flat:
            if update.weight.device.type != "cpu":
                for start in range(0, update.weight.numel(), _DEVICE_CHUNK_ELEMENTS):
                    _chunk_in_torch(update, slice(start, start + _DEVICE_CHUNK_ELEMENTS), gradient_scale)
    on_host = [update for update in flat if update.weight.device.type == "cpu"]
    if on_host:
        _perform_in_chunks(on_host, gradient_scale)
    for update, done in zip(updates, flat, strict=True):
        update.not_finite = done.not_finite
        if update.form is Master.SPLIT:
            update.checksum = kernel.checksum(_flat(update.weight))


def flattened(update: Update) -> Update:
    """The update with its tensors flat, in the same memory."""
    return dataclasses.replace(
        update,
        weight=_flat(update.weight),
        gradient=_flat(update.gradient),
        master=None if update.master is None else _flat(update.master),
        first=None if update.first is None else _flat(update.first),
        second=None if update.second is None else _flat(update.second),
        maximum=None if update.maximum is None else _flat(update.maximum),
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _perform_in_chunks(updates: Sequence[Update], gradient_scale: float) -> None:
    jobs = [(update, start) for update in updates for start in range(0, update.weight.numel(), CHUNK_ELEMENTS * 4)]
    queue = iter(jobs)  # next() on a list iterator is atomic

    def work() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with torch.no_grad():
                for update, start in queue:
                    _chunk_in_torch(update, slice(start, start + CHUNK_ELEMENTS * 4), gradient_scale)
        finally:
            torch.set_num_threads(before)

    threads.on_each(work, at_most=len(jobs))


def _chunk_in_torch(update: Update, part: slice, gradient_scale: float) -> None:
    weight = update.weight[part]
    master = None if update.master is None else update.master[part]
    exact = narrow.join(weight, master, update.form)
    gradient = update.gradient[part]
    gradient = scaled(gradient, gradient_scale).to(exact.dtype)
    finite = torch.linalg.vector_norm(gradient, torch.inf).isfinite()  # unlike gradient.isfinite(), takes no memory
    if finite.device.type != "cpu":
        update.not_finite = ~finite | update.not_finite
    elif not finite:
        update.not_finite = True
    first, second = _widened(update, update.first, part, exact), _widened(update, update.second, part, exact)
    maximum = None if update.maximum is None else update.maximum[part]
    states = [state for state in (first, second, maximum) if state is not None]
    update.rule.apply(exact, gradient, *states, first_step=update.first_step)
    narrow.split_master(exact, weight, master, update.form)
    _narrowed(update, update.first, part, first)
    _narrowed(update, update.second, part, second)


def _widened(update: Update, moment: torch.Tensor | None, part: slice, exact: torch.Tensor) -> torch.Tensor | None:
    if moment is None:
        return None
    if moment.dtype == torch.uint8:
        return eight_bit.decode(part_of(moment, part), exact.numel(), signed=moment is update.first)
    return moment[part].to(exact.dtype)


def _narrowed(update: Update, moment: torch.Tensor | None, part: slice, values: torch.Tensor | None) -> None:
    """Stores `values` in a part of the moment, unless they are that memory already."""
    if moment is None or values is None or moment.dtype == values.dtype:
        return
    seed = update.rule.constants(1.0).seed + update.stream & 0xFFFFFFFF
    place = int(narrow.random_bits(torch.tensor([seed], device="cpu"))[0]) + update.place + part.start
    places = torch.arange(place, place + values.numel(), device=values.device) & 0xFFFFFFFF
    is_first = moment is update.first
    random = narrow.random_bits(places) >> (0 if is_first else 16) & 0xFFFF
    if moment.dtype == torch.uint8:
        eight_bit.encode(values, part_of(moment, part), random.to(torch.int32), signed=is_first)
    else:
        moment[part].copy_(narrow.stochastic_bfloat16(values, random))


def part_of(column: torch.Tensor, part: slice) -> torch.Tensor:
    """These elements of a flat weight, gradient, master or moment. Of an 8-bit moment: the runs that have them."""
    if column.dtype != torch.uint8:
        return column[part]
    return column[part.start // RUN_ELEMENTS * RECORD_BYTES : -(-part.stop // RUN_ELEMENTS) * RECORD_BYTES]
