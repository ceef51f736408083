"""What do flags of other systems become? Flags of ours, with a note for each; none is taken without a word.

| from | flags |
|---|---|
| DiffSynth-Studio's runner | `--enable_model_cpu_offload`, `--enable_optimizer_cpu_offload`, |
| | `--cpu_offload_split_threshold`, the data-processing task, and the training flags beside them |
| Megatron-Core and -Bridge | `--optimizer-cpu-offload`, `--optimizer-offload-fraction`, |
| | `--cpu-offloading-num-layers`, ...; also as `optimizer.optimizer_cpu_offload=True` |
"""

import re
from collections.abc import Callable

from headrace.errors import TrainInputError
from headrace.train.config import TrainConfig
from headrace.train.settings import declared

__all__ = ["in_our_words"]

_OVERRIDE = re.compile(r"(?:cfg\.)?(?:optimizer|model|train|ddp)\.(\w+)=(.*)")
_FALSE = ("false", "0", "none", "no")

# Another name for the same thing.
_RENAMED = {
    "num_epochs": "epochs",
    "output_path": "output",
    "gradient_accumulation_steps": "accumulate",
    "use_gradient_checkpointing": "gradient_checkpointing",
    "lora_target_modules": "lora_targets",
    "save_steps": "save_every",
    "micro_batch_size": "batch_size",
    "seq_length": "sequence_length",
    "train_iters": "steps",
    "lr": "learning_rate",
    "clip_grad": "max_grad_norm",
    "save_interval": "save_every",
}
_SWITCHES = {  # that stand alone, or with a truth value
    "enable_model_cpu_offload",
    "enable_optimizer_cpu_offload",
    "use_gradient_checkpointing",
    "use_gradient_checkpointing_offload",
    "find_unused_parameters",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_torch_optimizer_for_cpu_offload",
    "use_precision_aware_optimizer",
    "use_distributed_optimizer",
    "cpu_offloading",
    "cpu_offloading_activations",
    "cpu_offloading_weights",
    "cpu_offloading_double_buffering",
    "cpu_offloading_retain_pinned_cpu_buffers",
    "pin_cpu_grads",
    "pin_cpu_params",
    "fine_grained_activation_offloading",
}
# Taken, and nothing follows from them.
_WITHOUT_EFFECT = {
    "dataset_num_workers": "data is tokenized once, before training",
    "remove_prefix_in_ckpt": "names in what is saved are those of --model",
    "trainable_models": "--model is the one that trains",
    "find_unused_parameters": "one process trains; parameters without gradients are left alone anyway",
    "enable_model_cpu_offload": "weights come to the device block by block anyway, trained or not, and adapters stay",
    "enable_optimizer_cpu_offload": "gradients, state and updates are on the host anyway, with any --accumulate",
    "use_torch_optimizer_for_cpu_offload": "headrace.optim gives the bits of torch.optim",
    "use_precision_aware_optimizer": "--state-dtype and --master-form say it",
    "use_distributed_optimizer": "one process trains",
    "cpu_offloading_double_buffering": "the plan chooses how many copies are under way",
    "cpu_offloading_retain_pinned_cpu_buffers": "host memory is kept from step to step anyway",
    "pin_cpu_grads": "gradients on the host are page-locked anyway",
    "pin_cpu_params": "weights on the host are page-locked anyway",
}
_LAYERS_OF_OTHERS = {
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "cpu_offloading_activations",
    "cpu_offloading_weights",
    "fine_grained_activation_offloading",
    "offload_modules",
}
_OTHER_VALUES = {
    "dataset_repeat",
    "lora_base_model",
    "cpu_offload_split_threshold",
    "use_gradient_checkpointing_offload",
    "task",
    "overlap_cpu_optimizer_d2h_h2d",
    "recompute_granularity",
    "pipeline_model_parallel_size",
    "cuda_graph_impl",
}
_REFUSED = {
    "model_id_with_origin_paths": "headrace train is for language models; for a diffusion model keep DiffSynth's script"
    " and take OffloadTrainingManager from headrace.compat",
    "dataset_base_path": "name files and directories of texts with --text",
    "dataset_metadata_path": "name files and directories of texts with --text",
    "model_paths": "headrace train takes one directory, with --model",
    "max_pixels": "headrace train is for language models",
    "lora_checkpoint": "merge it into the model first (PeftModel.from_pretrained(...).merge_and_unload() of peft), or"
    " give the same command again, which goes on from its own newest checkpoint",
}
_KNOWN = {*_RENAMED, *_SWITCHES, *_WITHOUT_EFFECT, *_LAYERS_OF_OTHERS, *_OTHER_VALUES, *_REFUSED}


def in_our_words(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments with flags of other systems replaced, and a note for each. Raises TrainInputError for some."""
    ours = {setting.name for setting in declared(TrainConfig)}
    taken: list[str] = []
    theirs: dict[str, tuple[str, str | None]] = {}  # by name: as it was written, and its value
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        override = _OVERRIDE.fullmatch(argument)
        written, equals, value = argument.partition("=")
        name = override[1] if override else written.removeprefix("--").replace("-", "_")
        if not override and not written.startswith("--"):
            taken.append(argument)
        elif name in _KNOWN:
            given = override[2] if override else value if equals else None
            if given is None and rest and not rest[0].startswith("-") and not _OVERRIDE.fullmatch(rest[0]):
                alone = name in _SWITCHES and rest[0].lower() not in (*_FALSE, "true", "1", "yes")
                given = None if alone else rest.pop(0)
            theirs[name] = (argument if override or equals or given is None else f"{argument} {given}", given)
        elif name in ours or name.removeprefix("no_") in ours:
            taken.append(f"--{name.replace('_', '-')}{equals}{value}")
        else:
            taken.append(argument)
    notes: list[str] = []
    translation = _Translation(theirs, taken, notes)
    return [*translation.flags(), *taken], notes


class _Translation:
    """Flags of others as they were given, which together become flags of ours."""

    def __init__(self, theirs: dict[str, tuple[str, str | None]], taken: list[str], notes: list[str]) -> None:
        self._theirs = theirs
        self._taken = taken  # that were ours already
        self._notes = notes

    def flags(self) -> list[str]:
        flags: list[str] = []
        rules: dict[str, Callable[[str | None], list[str]]] = {
            "cpu_offload_split_threshold": _blocks,
            "use_gradient_checkpointing_offload": lambda value: ["--gradient-checkpointing", "--offload-activations"],
        }
        for name, (written, value) in self._theirs.items():
            if name in _REFUSED:
                raise TrainInputError(f"{written}: {_REFUSED[name]}")
            off = name in (_SWITCHES | {"recompute_granularity"}) and value is not None and value.lower() in _FALSE
            if name == "overlap_cpu_optimizer_d2h_h2d":
                continue  # it goes with the optimizer's
            if off and name not in _WITHOUT_EFFECT:
                if name not in ("cpu_offloading_activations",):
                    self._notes.append(f"{written}: off, as without it")
            elif name in _WITHOUT_EFFECT:
                self._notes.append(f"{written}: nothing to do: {_WITHOUT_EFFECT[name]}")
            elif name == "num_epochs" and "dataset_repeat" in self._theirs:
                continue  # they go together
            elif name in _RENAMED:
                flags += self._became(written, _renamed(name, value))
            elif name in rules:
                flags += self._became(written, rules[name](value))
            elif name == "dataset_repeat":
                flags += self._became(self._written(name, "num_epochs"), self._epochs(value))
            elif name == "lora_base_model":
                flags += self._lora(written)
            elif name == "task":
                flags += self._task(written, value or "")
            elif name == "recompute_granularity":
                flags += self._became(written, ["--gradient-checkpointing"])
            elif name in ("pipeline_model_parallel_size", "cuda_graph_impl"):
                self._only(written, value, "1" if name == "pipeline_model_parallel_size" else "none")
        return [*flags, *self._optimizer(), *self._layers()]

    def _became(self, written: str, flags: list[str], why: str = "") -> list[str]:
        self._notes.append(f"{written}: became {' '.join(flags)}{why}")
        return flags

    def _task(self, written: str, task: str) -> list[str]:
        """`sft:data_process` prepares what `sft:train` trains on; `sft` does both."""
        if task.endswith("data_process"):
            return self._became(written, ["--data-only"])
        self._notes.append(
            f"{written}: nothing to do: headrace train trains, on data that --data-only may have prepared"
        )
        return []

    def _epochs(self, repeat: str | None) -> list[str]:
        """Each of DiffSynth's epochs has the data so many times."""
        epochs = self._theirs.get("num_epochs", ("", "1"))[1]
        try:
            return [f"--epochs={float(epochs or '') * int(repeat or ''):g}"]
        except ValueError:
            raise TrainInputError(f"{self._written('dataset_repeat', 'num_epochs')}: give whole numbers") from None

    def _lora(self, written: str) -> list[str]:
        """DiffSynth's adapters have rank 32 where none is given, and the scale 1."""
        words = [word for argument in self._taken for word in argument.split("=")]
        rank = words[words.index("--lora-rank") + 1] if "--lora-rank" in words[:-1] else None
        flags = [f"--lora-rank={rank or 32}"] * (rank is None) + [f"--lora-alpha={rank or 32}"] * (
            "--lora-alpha" not in words
        )
        if flags:
            return self._became(written, flags, ": adapters are put into --model")
        self._notes.append(f"{written}: nothing to do: adapters are put into --model")
        return []

    def _only(self, written: str, value: str | None, allowed: str) -> None:
        if (value or "").lower() != allowed:
            raise TrainInputError(f"{written}: headrace train has {allowed} of these; give {allowed}, or leave it out")
        self._notes.append(f"{written}: nothing to do: it is always so")

    def _on(self, name: str, *, default: bool = False) -> bool:
        if name not in self._theirs:
            return default
        value = self._theirs[name][1]
        return value is None or value.lower() not in _FALSE

    def _written(self, *names: str) -> str:
        return " ".join(self._theirs[name][0] for name in names if name in self._theirs)

    def _optimizer(self) -> list[str]:
        """Megatron's weights stay on the device, with the share of the state that the fraction leaves there."""
        names = ("optimizer_cpu_offload", "optimizer_offload_fraction")
        written = self._written(*names)
        overlap = self._written("overlap_cpu_optimizer_d2h_h2d")
        if overlap and (not self._on("optimizer_cpu_offload") or self._weights_leave()):
            self._notes.append(f"{overlap}: nothing to do: it needs weights on the device, and --optimizer-cpu-offload")
        if not self._on("optimizer_cpu_offload"):
            if "optimizer_offload_fraction" in self._theirs:
                self._notes.append(f"{written}: nothing to do: it needs --optimizer-cpu-offload, as in Megatron")
            return []
        given = self._theirs.get("optimizer_offload_fraction", ("", "1"))[1] or ""
        try:
            fraction = float(given)
        except ValueError:
            fraction = -1.0
        if not 0 <= fraction <= 1:
            raise TrainInputError(f"{written}: the fraction is to be from 0 to 1")
        if self._weights_leave():
            if fraction < 1:
                raise TrainInputError(
                    f"{written} {self._written('cpu_offloading_weights')}: where weights come to the device block by"
                    " block, all of the optimizer's state is on the host; give the fraction 1"
                )
            self._notes.append(f"{written}: nothing to do: state and updates are on the host anyway")
            return []
        share = "" if "optimizer_offload_fraction" in self._theirs else ", and all state is on the host"
        flags = [f"--device-fraction={round(1 - fraction, 12):g}"]
        if overlap:
            kept = "" if self._on("overlap_cpu_optimizer_d2h_h2d") else "no-"
            flags += self._became(overlap, [f"--{kept}overlap-d2h-h2d"])
        return self._became(written, flags[:1], f": weights stay on the device{share}") + flags[1:]

    def _weights_leave(self) -> bool:
        return self._on("cpu_offloading", default="cpu_offloading_num_layers" in self._theirs) and self._on(
            "cpu_offloading_weights"
        )

    def _layers(self) -> list[str]:
        """Activations of the first layers leave; with weights, those visit the device."""
        flags: list[str] = []
        names = ("cpu_offloading", "cpu_offloading_num_layers", "cpu_offloading_activations", "cpu_offloading_weights")
        written = self._written(*names)
        if self._on("cpu_offloading", default="cpu_offloading_num_layers" in self._theirs):
            layers = self._theirs.get("cpu_offloading_num_layers", ("", "0"))[1] or "0"
            if not layers.isdigit():
                raise TrainInputError(f"{written}: the number of layers is to be 0 or more")
            if self._on("cpu_offloading_activations", default=True) and int(layers):
                flags += ["--offload-activations", f"layers={layers}", "all_leave=True"]
            why = (
                "; weights come to the device block by block, as many as --device-memory says"
                if self._weights_leave()
                else ""
            )
            self._notes.append(f"{written}: became {' '.join(flags) or 'nothing'}{why}")
        elif written:
            self._notes.append(f"{written}: nothing to do: it needs --cpu-offloading, as in Megatron")
        fine = self._written("fine_grained_activation_offloading", "offload_modules")
        if self._on("fine_grained_activation_offloading"):
            if flags:
                raise TrainInputError(f"{fine}: with {written} it says for a second time what leaves; give one of them")
            modules = (self._theirs.get("offload_modules", ("", ""))[1] or "").strip("[]").replace('"', "")
            chosen = ",".join(f"*{module.strip()}*" for module in modules.split(",") if module.strip())
            flags += self._became(fine, ["--offload-activations", *([f"modules={chosen}"] if chosen else [])])
        elif fine:
            self._notes.append(f"{fine}: nothing to do: it needs --fine-grained-activation-offloading, as in Megatron")
        return flags


def _blocks(megabytes: str | None) -> list[str]:
    if megabytes is None or not re.fullmatch(r"[0-9]*\.?[0-9]+", megabytes) or not float(megabytes):
        raise TrainInputError(f"--cpu_offload_split_threshold {megabytes}: give a number of megabytes above 0")
    return [f"--blocks={'0' * megabytes.startswith('.')}{megabytes}MB"]


def _renamed(name: str, value: str | None) -> list[str]:
    own = "--" + _RENAMED[name].replace("_", "-")
    if name == "lora_target_modules":
        return [own, *(value or "").split(",")]
    return [own] if name in _SWITCHES or value is None else [f"{own}={value}"]
