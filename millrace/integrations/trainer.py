"""How does transformers' Trainer log what offloading did, save by `millrace.save`, and name millrace's optimizers?"""

import ast
import dataclasses
import time
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

import millrace.optim
from millrace.api import Offloaded
from millrace.report import Stats
from millrace.saving import Saving, save

__all__ = ["MillraceCallback", "optimizer_cls_and_kwargs"]

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
    """The optimizer of `millrace.optim` that `arguments.optim` names: for `Trainer(optimizer_cls_and_kwargs=...)`.

    Its learning rate, betas and eps are those of `arguments`, and weight decay is as the Trainer groups parameters;
    `arguments.optim_args` and then `settings` (`overlap="forward"`, `tier="disk"`, ...) go before them. Not
    `overlap="backward"`: the Trainer scales gradients after backward, by 1 where it does not clip them.

    Raises ValueError for a name that no optimizer of millrace stands for.
    """
    name = str(getattr(arguments.optim, "value", arguments.optim))
    if name not in _BY_NAME:
        raise ValueError(
            f"no optimizer of millrace stands for optim={name!r}; give one of {', '.join(_BY_NAME)}, or the"
            " class and its settings yourself: optimizer_cls_and_kwargs=(millrace.optim.Adafactor, {'lr': 1e-3})"
        )
    kind, made_so = _BY_NAME[name]
    found: dict[str, Any] = {"lr": arguments.learning_rate, **made_so}
    if kind != "SGD":
        found["betas"] = (arguments.adam_beta1, arguments.adam_beta2)
    if kind == "AdamW":
        found["eps"] = arguments.adam_epsilon
    if isinstance(arguments.optim_args, str) and arguments.optim_args:
        pairs = (pair.split("=") for pair in arguments.optim_args.replace(" ", "").split(","))
        found |= {key: ast.literal_eval(value) for key, value in pairs}
    return getattr(millrace.optim, kind), found | settings


@dataclasses.dataclass(frozen=True)
class _Mark:
    """Where the counters were."""

    stats: Stats
    tokens: int = 0
    seconds: float = 0.0


class MillraceCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed
    """Puts what the handle measured into the Trainer's logs, and saves checkpoints by `millrace.save` beside its own.

    - `save`: whether each checkpoint of the Trainer has one of millrace beside it, `<output_dir>/millrace/step-<n>`.
      Training goes on while it is written. `millrace.load` reads it, with the states of the scheduler and the Trainer
      as `extra`. As many stay as `save_total_limit` says. With `save_only_model` the Trainer's own are smaller.

    Given as `callbacks=[...]` it is after the callbacks that report to TensorBoard and others, which so do not see its
    numbers; `attach(trainer)` puts it before them. Numbers are of the time since the log before, and in the last log
    of all of training: bytes that were moved, `millrace_stall_share` of the time of compute and stalls, and tokens
    (`input_ids`, with padding) per second.
    """

    def __init__(self, handle: Offloaded, *, save: bool = False) -> None:
        self._handle = handle
        self._save = save
        self._began = self._logged = _Mark(handle.stats())
        self._tokens = 0
        self._counting: Any = None
        self._saving: Saving | None = None

    def attach(self, trainer: Trainer) -> "MillraceCallback":
        """Becomes the first of the trainer's callbacks."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Begins to count."""
        self._stop_counting()
        self._counting = found["model"].register_forward_pre_hook(self._count, with_kwargs=True)
        self._began = self._logged = self._mark()

    def on_log(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Adds the numbers to what is logged."""
        if self._counting is None:  # outside of training
            return
        mark = self._mark()
        since = self._began if "train_runtime" in found["logs"] else self._logged
        now, before = mark.stats, since.stats
        stalled = now.stall_seconds - before.stall_seconds
        computed = now.compute_seconds - before.compute_seconds
        numbers: dict[str, float] = {
            "millrace_device_peak_bytes": now.device_peak_bytes,
            "millrace_host_bytes": now.host_bytes,
            "millrace_onload_bytes": now.onload_bytes - before.onload_bytes,
            "millrace_offload_bytes": now.offload_bytes - before.offload_bytes,
            "millrace_fetch_bytes": now.fetch_bytes - before.fetch_bytes,
            "millrace_spill_bytes": now.spill_bytes - before.spill_bytes,
            "millrace_stall_share": stalled / (stalled + computed) if stalled + computed else 0.0,
            "millrace_tokens_per_second": (mark.tokens - since.tokens) / max(mark.seconds - since.seconds, 1e-9),
        }
        found["logs"].update(numbers)
        state.log_history[-1].update(numbers)
        self._logged = mark

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Saves beside the Trainer's checkpoint."""
        if self._save:
            self._saving = save(
                Path(args.output_dir or ".") / "millrace" / f"step-{state.global_step}",
                found["model"],
                getattr(found["optimizer"], "optimizer", found["optimizer"]),  # accelerate's wraps it
                extra={"scheduler": found["lr_scheduler"], "trainer_state": dataclasses.asdict(state)},
                keep=args.save_total_limit,
                wait=False,
            )

    def on_train_end(self, args: TrainingArguments, state: Any, control: Any, **found: Any) -> None:
        """Stops counting, and waits for the last checkpoint."""
        self._stop_counting()
        if self._saving is not None:
            self._saving.wait()

    def _stop_counting(self) -> None:
        if self._counting is not None:
            self._counting.remove()
        self._counting = None

    def _mark(self) -> _Mark:
        return _Mark(self._handle.stats(), self._tokens, time.perf_counter())

    def _count(self, model: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        tokens = named.get("input_ids")
        if tokens is not None and model.training:
            self._tokens += tokens.numel()
