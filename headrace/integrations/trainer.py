"""How does transformers' Trainer log what offloading did, save by `headrace.save`, name headrace's optimizers, and take
micro-batches together?
"""

import ast
import contextlib
import dataclasses
import io
import json
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

import headrace.optim
from headrace.api import Offloaded
from headrace.config import check_flag
from headrace.integrations.ranks import as_one, consolidate
from headrace.report import Stats
from headrace.saving import Saving, save

__all__ = ["HeadraceCallback", "micro_batches_together", "optimizer_cls_and_kwargs"]

_EIGHT_BIT = {"state_dtype": "8bit"}
# What stands for each name of `TrainingArguments.optim`: the class, and its settings.
_BY_NAME: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"), ("AdamW", {})),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), ("AdamW", _EIGHT_BIT)),
    **dict.fromkeys(("lion_32bit", "paged_lion_32bit"), ("Lion", {})),
    **dict.fromkeys(("lion_8bit", "paged_lion_8bit"), ("Lion", _EIGHT_BIT)),
    "sgd": ("SGD", {}),
}


def optimizer_cls_and_kwargs(arguments: TrainingArguments, **settings: Any) -> tuple[type, dict[str, Any]]:
    """The `headrace.optim` optimizer that `arguments.optim` names, for `Trainer(optimizer_cls_and_kwargs=...)`.

    Learning rate, betas and eps are those of `arguments`, and weight decay follows the Trainer's parameter groups.
    `arguments.optim_args` override these, and `settings` (`overlap="forward"`, `tier="disk"`, ...) override both.
    `overlap="backward"` does not work, because the Trainer scales gradients after backward (by 1 if it does not clip).

    Raises ValueError for a name that no optimizer of headrace corresponds to, and for `optim_args` that cannot be read.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in _BY_NAME:
        raise ValueError(
            f"no optimizer of headrace stands for optim={name!r}; give one of {', '.join(_BY_NAME)}, or the"
            " class and its settings yourself: optimizer_cls_and_kwargs=(headrace.optim.Adafactor, {'lr': 1e-3})"
        )
    kind, made_so = _BY_NAME[name]
    found: dict[str, Any] = {"lr": arguments.learning_rate, **made_so}
    if kind != "SGD":
        found["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
    if kind == "AdamW":
        found["eps"] = arguments.adam_epsilon
    if isinstance(arguments.optim_args, str) and arguments.optim_args:
        found |= dict(map(_setting, arguments.optim_args.replace(" ", "").split(",")))
    return getattr(headrace.optim, kind), found | settings


def _setting(pair: str) -> tuple[str, Any]:
    """The name and the value of one pair of `optim_args`, such as "eps=1e-4"."""
    name, _, value = pair.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"TrainingArguments(optim_args=...) has {pair!r}; give pairs name=value with commas between them, where a"
            " value is a number, True, False, None or a string in quotes, such as \"eps=1e-4,state_dtype='8bit'\"."
            " Tuples are settings of their own: optimizer_cls_and_kwargs(arguments, betas=(0.9, 0.95))"
        ) from error


@dataclasses.dataclass(frozen=True)
class _Mark:
    """The counters at one moment."""

    stats: Stats
    tokens: int = 0
    seconds: float = 0.0


class HeadraceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Adds what the handle measured to the Trainer's logs, and saves checkpoints with `headrace.save` next to its own.

    - `save`: whether to write a headrace checkpoint to `<output_dir>/headrace/step-<n>` whenever the Trainer writes one
      of its own. Training continues while it is written.
      `trainer.train(resume_from_checkpoint="<output_dir>/headrace/step-<n>")` resumes from it, bit for bit;
      `headrace.load` reads it, too, and returns the states of the scheduler and the Trainer as `extra`.
      `save_total_limit` says how many are kept. With `save_only_model`, the Trainer's own checkpoints are smaller, and
      training cannot resume from them exactly. With several ranks, the first one writes while the others wait;
      if it fails, all raise.

    Given as `callbacks=[...]`, it comes after the callbacks that report to TensorBoard and others, so these do not see
    its numbers; `attach(trainer)` puts it before them. The numbers are `headrace_device_peak_gib` (weights on the
    device), `headrace_stall_share` (stalls as a share of compute and stalls), and, if the model was trained since the
    last log, `headrace_tokens_per_second` (`input_ids`, with padding). They cover the time since the previous log;
    those of the last log cover all of training. `handle.stats()` has the bytes that were moved.
    """

    def __init__(self, handle: Offloaded, *, save: bool = False) -> None:
        check_flag(save, "save")
        self._handle = handle
        self._save = save
        self._began = self._logged = _Mark(handle.stats(wait_for_updates=False))
        self._tokens = 0
        self._counting: Any = None
        self._saving: Saving | None = None

    def attach(self, trainer: Trainer) -> "HeadraceCallback":
        """Puts this callback before all others of the trainer."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Starts counting."""
        self._stop_counting()
        self._counting = found["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        self._began = self._logged = self._mark()

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Adds the numbers to what is logged."""
        if "train_runtime" in found["logs"]:  # training ends, and the best model's weights may be loaded next
            self._wait()
        if self._counting is None:  # not within training
            return
        mark = self._mark()
        since = self._began if "train_runtime" in found["logs"] else self._logged
        now, before = mark.stats, since.stats
        stalled = now.stall_seconds - before.stall_seconds
        computed = now.compute_seconds - before.compute_seconds
        numbers: dict[str, float] = {
            "headrace_device_peak_gib": now.device_peak_bytes / 2**30,
            "headrace_stall_share": stalled / (stalled + computed) if stalled + computed else 0.0,
        }
        if mark.tokens > since.tokens:
            tokens, seconds = mark.tokens - since.tokens, mark.seconds - since.seconds
            numbers["headrace_tokens_per_second"] = tokens / max(seconds, 1e-9)
        found["logs"].update(numbers)
        state.log_history[-1].update(numbers)
        self._logged = mark

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Saves a checkpoint beside the Trainer's own."""
        if not self._save:
            return
        files = _files_to_resume_from(args, state, **found)
        consolidate([found["optimizer"]])
        path = Path(args.output_dir or ".") / "headrace" / f"step-{state.global_step}"
        with as_one(f"save {path}", args):
            if args.process_index == 0:
                self._saving = save(
                    path,
                    found["model"],
                    getattr(found["optimizer"], "optimizer", found["optimizer"]),  # accelerate wraps the optimizer
                    extra={"scheduler": found["lr_scheduler"], "trainer_state": dataclasses.asdict(state)},
                    files=files,
                    keep=args.save_total_limit,
                    wait=args.world_size > 1,  # other ranks' updates do not wait until they have been read
                )

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Stops counting, and waits for the last checkpoint."""
        self._stop_counting()
        self._wait()

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.remove()
        self._counting = None

    def _mark(self) -> _Mark:
        return _Mark(self._handle.stats(wait_for_updates=False), self._tokens, time.perf_counter())

    def _count(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = named.get("input_ids")
        if tokens is not None and model.training:
            self._tokens += tokens.numel()


def _files_to_resume_from(
    args: TrainingArguments, state: Any, optimizer: Any, lr_scheduler: Any, **_: Any
) -> dict[str, bytes]:
    """The other files, by name, that the Trainer reads from its checkpoints: not weights, nor the optimizer's state."""
    files = {
        "trainer_state.json": json.dumps(dataclasses.asdict(state), indent=2, sort_keys=True).encode(),
        "scheduler.pt": _as_file(lr_scheduler.state_dict()),
        **_random_files(args),
    }
    scaler = getattr(optimizer, "scaler", None)  # an attribute of accelerate's wrapper
    return files if scaler is None else {**files, "scaler.pt": _as_file(scaler.state_dict())}


def _random_files(args: TrainingArguments) -> dict[str, bytes]:
    own = _as_file(_random_states(args))
    if args.world_size == 1:
        return {"rng_state.pth": own}
    of_ranks = [own] * args.world_size
    torch.distributed.all_gather_object(of_ranks, own)
    return {f"rng_state_{rank}.pth": one for rank, one in enumerate(of_ranks)}


def _random_states(args: TrainingArguments) -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.random.get_rng_state()}
    if args.device.type != "cpu" and hasattr(device := torch.get_device_module(args.device), "get_rng_state"):
        several = args.parallel_mode == ParallelMode.DISTRIBUTED
        states[args.device.type] = device.get_rng_state_all() if several else device.get_rng_state()
    return states


def _as_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def micro_batches_together(trainer: Trainer, handle: Offloaded, together: int | None = None) -> None:
    """Makes the trainer run a step's micro-batches (`gradient_accumulation_steps`) by `handle.forward_backward`.

    Losses, gradients and weights are those of the trainer's own loop, except with dropout (see `forward_backward`).
    `together` is how many micro-batches go through a block at once; None means all of a step. The whole step is
    computed when the loop reaches its first micro-batch, so `on_substep_end` sees the gradients of the whole step.

    Raises TypeError for a trainer whose steps do more than the Trainer's (TRL's GRPO). Raises ValueError for fp16,
    where the loss is scaled before backward, for TRL's own offloading of activations, and for a model with `mesh`.
    """
    if handle.averages:
        raise ValueError(
            "ranks average the gradients of each backward, so micro-batches of a model with mesh= do not go together;"
            " leave micro_batches_together out"
        )
    own = type(trainer).training_step is Trainer.training_step
    around = getattr(trainer, "maybe_activation_offload_context", None)  # all that TRL's SFT, DPO... add to a step
    if not own and around is None:
        raise TypeError(
            f"{type(trainer).__name__} has a training_step of its own, which may count on micro-batches that come one"
            " after the other; leave micro_batches_together out"
        )
    if not own and not isinstance(around, contextlib.nullcontext):
        raise ValueError(
            "activation_offloading=True is for one micro-batch at a time; give headrace.offload activations=True"
        )
    if trainer.accelerator.scaler is not None:
        raise ValueError(
            "fp16=True scales the loss of each micro-batch; give bf16=True, or leave micro_batches_together out"
        )
    _Together(trainer, partial(handle.forward_backward, together=together))


class _Together:
    """Replaces a trainer's `get_batch_samples` and `training_step`, so that a step's micro-batches go together."""

    def __init__(self, trainer: Any, forward_backward: Callable[..., list[torch.Tensor]]) -> None:
        self._accelerator = trainer.accelerator
        self._forward_backward = forward_backward
        self._get_batches, self._go_through = trainer.get_batch_samples, trainer.training_step
        trainer.get_batch_samples, trainer.training_step = self._get, self._step
        self._batches: list[Any] = []  # the micro-batches of the next step
        self._losses: list[torch.Tensor] = []  # of this step, those that the trainer has not asked for yet
        self._own = threading.local()  # `loss` of the micro-batch that this thread computes

    def _get(self, *args: Any, **named: Any) -> tuple[list[Any], Any]:
        batches, items = self._get_batches(*args, **named)
        self._batches, self._losses = list(batches), []
        return batches, items

    def _step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if not self._losses:
            batches, self._batches = self._batches, []
            self._losses = self._all(model, batches, num_items_in_batch)
        return self._losses.pop(0)

    def _all(self, model: Any, batches: list[Any], items: Any) -> list[torch.Tensor]:
        def loss(inputs: Any) -> torch.Tensor:
            self._go_through(model, inputs, items)
            found: torch.Tensor = self._own.__dict__.pop("loss")
            return found

        self._accelerator.backward = self._keep  # the backward itself comes later
        try:
            return self._forward_backward(batches, loss)
        finally:
            del self._accelerator.backward

    def _keep(self, loss: torch.Tensor) -> None:
        self._own.loss = loss
