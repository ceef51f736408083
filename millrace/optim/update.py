"""What is one parameter's update, and who performs it? The native kernel where it can, PyTorch in chunks where not."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from millrace.optim import kernel, narrow, threads
from millrace.optim.kernel import CHUNK_ELEMENTS, Master, Number, Task
from millrace.optim.rules import ElementRule

__all__ = ["Update", "perform"]

_NUMBERS = {torch.float32: Number.FLOAT32, torch.bfloat16: Number.BFLOAT16, torch.float16: Number.FLOAT16}


@dataclass(kw_only=True)
class Update:
    """One parameter where it is updated. All tensors are dense, their elements in the same order in memory."""

    rule: ElementRule
    weight: torch.Tensor
    gradient: torch.Tensor  # in any floating-point dtype
    form: Master
    master: torch.Tensor | None = None  # int16 remainders (split), float32 (full)
    first: torch.Tensor | None = None  # of the state dtype
    second: torch.Tensor | None = None
    maximum: torch.Tensor | None = None  # float32
    first_step: bool = False
    stream: int = 0  # the parameter's own random numbers, for stochastic rounding
    checksum: int | torch.Tensor = 0  # of what was written, in split form


def perform(updates: Sequence[Update], gradient_scale: float, *, native: bool | None = None) -> None:
    """Performs the updates, in place. `gradient_scale` multiplies every gradient, rounded to the gradient's dtype.

    `native` chooses the kernel or PyTorch; None takes the kernel wherever it was built and knows the dtypes.
    """
    use_kernel = kernel.available() if native is None else native
    known = [update for update in updates if use_kernel and _fits_kernel(update)]
    rules = {id(update.rule): update.rule for update in known}
    places = {key: index for index, key in enumerate(rules)}
    sums = (
        kernel.run(
            [_task(update, places[id(update.rule)]) for update in known],
            [rule.constants(gradient_scale) for rule in rules.values()],
        )
        if known
        else []
    )
    for update, checksum in zip(known, sums, strict=True):
        update.checksum = checksum
    others = [update for update in updates if not (use_kernel and _fits_kernel(update))]
    if others:
        _perform_in_torch(others, gradient_scale)


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
        state_number=Number.FLOAT32 if update.first is None else _NUMBERS[update.first.dtype],
        first_step=update.first_step,
        stream=update.stream,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _perform_in_torch(updates: Sequence[Update], gradient_scale: float) -> None:
    """Chunks that fit the cache, each on one thread with one intra-op thread: 0.8 of the memory's speed in PyTorch.

    On an accelerator the whole of it, on the stream that is current.
    """
    flat = [_flattened(update) for update in updates]
    with torch.no_grad():
        for update in flat:
            if update.weight.device.type != "cpu":
                _chunk_in_torch(update, slice(0, None), gradient_scale)
    on_host = [update for update in flat if update.weight.device.type == "cpu"]
    if on_host:
        _perform_in_chunks(on_host, gradient_scale)
    for update in updates:
        if update.form is Master.SPLIT:
            update.checksum = kernel.checksum(_flat(update.weight))


def _flattened(update: Update) -> Update:
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
    if gradient_scale != 1:
        gradient = gradient * torch.tensor(gradient_scale, dtype=torch.float32)
    state = [None if tensor is None else tensor[part] for tensor in (update.first, update.second)]
    wide = [None if tensor is None else tensor.to(exact.dtype) for tensor in state]
    maximum = None if update.maximum is None else update.maximum[part]
    first, second = wide
    update.rule.apply(exact, gradient.to(exact.dtype), first, second, maximum, first_step=update.first_step)
    narrow.part(exact, weight, master, update.form)
    _store_state(update, part.start, state, wide)


def _store_state(
    update: Update, start: int, state: Sequence[torch.Tensor | None], wide: Sequence[torch.Tensor | None]
) -> None:
    for which, (stored, computed) in enumerate(zip(state, wide, strict=True)):
        if stored is None or computed is None or stored.dtype == computed.dtype:
            continue
        seed = update.rule.constants(1.0).seed + update.stream & 0xFFFFFFFF
        place = int(narrow.random_bits(torch.tensor([seed]))[0]) + start
        places = torch.arange(place, place + stored.numel(), device=stored.device) & 0xFFFFFFFF
        stored.copy_(narrow.stochastic_bfloat16(computed, narrow.random_bits(places) >> 16 * which))
