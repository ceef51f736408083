"""How do Megatron's and Megatron-Bridge's settings make a model and an optimizer here? Set, then checked when used.

`OptimizerConfig.optimizer_for(model)` stands for `get_megatron_optimizer`, and `apply(config.model, model)` for what
Megatron's layers do by themselves. What differs is in docs/coming_from/megatron.md. A recipe, and what runs it, is
`examples/run_recipe.py`.
"""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn

import torch
from torch import nn

import headrace
from headrace.compat.hybrid import HybridDeviceOptimizer, tensor_of
from headrace.compat.transformer_engine import check_layers, offload_layers, saving_settings
from headrace.config import Size, check_count

__all__ = [
    "CPUOffloadConfig",
    "ConfigContainer",
    "HybridDeviceOptimizer",
    "OptimizerConfig",
    "TrainingConfig",
    "apply",
    "override",
]


class Settings:
    """Base of dataclasses whose fields may be set at any time. Any other name raises AttributeError with a near one."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __getattr__(self, name: str) -> NoReturn:
        near = difflib.get_close_matches(name, self.__dataclass_fields__, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "headrace has no such setting"
        raise AttributeError(f"{type(self).__name__} has no {name!r}; {hint}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            self.__getattr__(name)
        super().__setattr__(name, value)


@dataclasses.dataclass(kw_only=True)
class CPUOffloadConfig(Settings):
    """Megatron's settings of layer-level CPU offloading. `num_layers` is the model's number of layers.

    You may change them one after another: `validate()` checks them again, and so does whatever uses them. Raises
    ValueError for settings that cannot work. Recomputation and pipeline stages may have any values.
    """

    num_layers: int
    cpu_offloading: bool = False
    cpu_offloading_num_layers: int = 0
    cpu_offloading_activations: bool = True
    cpu_offloading_weights: bool = False
    cpu_offloading_double_buffering: bool = False
    cpu_offloading_retain_pinned_cpu_buffers: bool = False
    pipeline_model_parallel_size: int = 1
    recompute_granularity: str | None = None
    cuda_graph_impl: str = "none"
    fine_grained_activation_offloading: bool = False
    offload_modules: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if self.fine_grained_activation_offloading and self.cpu_offloading:
            raise ValueError(
                "fine_grained_activation_offloading=True with cpu_offloading=True says a second time what leaves;"
                " set one of them to False (headrace.offload_activations(model, layers=N, modules=[...]) takes both)"
            )
        if self.fine_grained_activation_offloading and not self.offload_modules:
            raise ValueError(
                "fine_grained_activation_offloading=True names no modules; give parts of their names in the model, such"
                ' as offload_modules=["mlp"]'
            )
        if not self.cpu_offloading:
            return
        check_layers(self.cpu_offloading_num_layers, self.num_layers, "cpu_offloading_num_layers")
        if self.cuda_graph_impl != "none":
            raise ValueError(
                f"cuda_graph_impl={self.cuda_graph_impl!r}: a graph would replay copies into memory of another step;"
                ' set "none", or cpu_offloading=False'
            )
        if not (self.cpu_offloading_activations or self.cpu_offloading_weights):
            raise ValueError("cpu_offloading has nothing to do; set cpu_offloading_activations or _weights")


@dataclasses.dataclass(kw_only=True)
class OptimizerConfig(Settings):
    """Megatron's settings of one optimizer, with Megatron's defaults. If `lr` is None, the class's default applies.

    Settings that cannot work raise ValueError when they are used.
    """

    optimizer: str = "adam"
    lr: float | None = None
    weight_decay: float = 0.01
    decoupled_weight_decay: bool = True
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    sgd_momentum: float = 0.9
    muon_momentum: float = 0.95
    muon_nesterov: bool = False
    muon_num_ns_steps: int = 5
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: torch.dtype = torch.float32
    main_params_dtype: torch.dtype = torch.float32
    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    store_param_remainders: bool = True
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    use_torch_optimizer_for_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    pin_cpu_grads: bool = True
    pin_cpu_params: bool = True
    optimizer_cuda_graph: bool = False

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work."""
        if self.optimizer not in ("adam", "sgd", "muon"):
            raise ValueError(f"optimizer={self.optimizer!r} is not available; allowed: adam, sgd, muon")
        fraction = self.optimizer_offload_fraction
        if isinstance(fraction, bool) or not 0 <= fraction <= 1:
            raise ValueError(f"optimizer_offload_fraction={fraction!r} is outside [0, 1]")
        for name in ("main_grads_dtype", "main_params_dtype"):
            if getattr(self, name) != torch.float32:
                raise ValueError(f"{name}={getattr(self, name)} is not available: updates are of float32 values")
        if self.use_torch_optimizer_for_cpu_offload and self.optimizer_cpu_offload:
            for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
                if getattr(self, name) != torch.float32:
                    raise ValueError(
                        f"{name}={getattr(self, name)} with use_torch_optimizer_for_cpu_offload=True: PyTorch's classes"
                        " keep float32 moments; leave one of the two out"
                    )
        if self.optimizer_cuda_graph:
            raise ValueError("optimizer_cuda_graph=True: an update on the host cannot be in a graph; set it to False")

    def optimizer_for(self, params: nn.Module | Iterable[Any], *, mesh: Any = None) -> HybridDeviceOptimizer:
        """Makes the optimizer for a model, for parameters, or for groups of parameters. Raises what `validate` raises.

        `mesh`: the DeviceMesh of replicas over which `use_distributed_optimizer` deals state and updates out.
        """
        self.validate()
        if mesh is not None and not self.use_distributed_optimizer:
            raise ValueError("mesh with use_distributed_optimizer=False, which deals nothing out; set it to True")
        kind, settings = self._class_and_settings()
        by_torch = self.use_torch_optimizer_for_cpu_offload and self.optimizer_cpu_offload
        if self.optimizer == "adam" and not by_torch:
            settings |= {"exp_avg_dtype": self.exp_avg_dtype, "exp_avg_sq_dtype": self.exp_avg_sq_dtype}
        if self.lr is not None:
            settings["lr"] = self.lr
        if isinstance(params, nn.Module):
            params = params.named_parameters()
        return HybridDeviceOptimizer(
            [one for one in params if isinstance(one, dict) or tensor_of(one).requires_grad],
            self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0,
            kind,
            kind,
            pin_cpu_grads=self.pin_cpu_grads,
            pin_cpu_params=self.pin_cpu_params,
            overlap_cpu_optimizer_d2h_h2d=self.overlap_cpu_optimizer_d2h_h2d,
            use_torch_optimizer=by_torch,
            max_grad_norm=self.clip_grad or None,
            master_form="split" if self.store_param_remainders else "full",
            mesh=mesh,
            weight_decay=self.weight_decay,
            **settings,
        )

    def _class_and_settings(self) -> tuple[Any, dict[str, Any]]:
        """PyTorch's class, and the settings that only this class has."""
        if self.optimizer == "sgd":
            return torch.optim.SGD, {"momentum": self.sgd_momentum, "fused": True}
        if self.optimizer == "muon":
            steps, nesterov = self.muon_num_ns_steps, self.muon_nesterov
            return torch.optim.Muon, {"momentum": self.muon_momentum, "nesterov": nesterov, "ns_steps": steps}
        adam = torch.optim.AdamW if self.decoupled_weight_decay else torch.optim.Adam
        return adam, {"betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_eps, "fused": True}


@dataclasses.dataclass(kw_only=True)
class TrainingConfig(Settings):
    """How many steps to train, with `global_batch_size` samples in each step, `micro_batch_size` at a time."""

    train_iters: int = 1
    global_batch_size: int = 1
    micro_batch_size: int = 1

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work, TypeError for a number that is not an integer."""
        for name in ("train_iters", "global_batch_size", "micro_batch_size"):
            check_count(getattr(self, name), name)
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is no multiple of"
                f" micro_batch_size={self.micro_batch_size}; one step takes whole micro-batches"
            )


@dataclasses.dataclass(kw_only=True)
class ConfigContainer(Settings):
    """The settings of a run, by namespace: what a recipe returns (`examples/run_recipe.py` runs one)."""

    model: CPUOffloadConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)

    def validate(self) -> None:
        """Raises ValueError for settings that cannot work, in any namespace."""
        for part in (self.model, self.optimizer, self.train):
            part.validate()


def apply(
    config: CPUOffloadConfig, model: nn.Module, *, device_memory: Size | None = None, min_bytes: Size | None = None
) -> headrace.Offloaded | headrace.ActivationOffloading | None:
    """Makes `model` do what `config.cpu_offloading...` says, without a context, as Megatron's layers do by themselves.

    With `cpu_offloading_weights` the model should be on the CPU: weights of offloaded layers then visit the
    accelerator, and the others go there to stay. With `fine_grained_activation_offloading`, a tensor leaves if the
    module that saves it has one of `offload_modules` in its name. Returns the handle, or None if there is nothing to
    offload. The other settings are as in `get_cpu_offload_context`, which also says what is raised.
    """
    config.validate()
    settings = saving_settings(device_memory, min_bytes)
    if config.fine_grained_activation_offloading:
        modules = [f"*{name}*" for name in config.offload_modules]
        return headrace.offload_activations(model, modules=modules, **settings)
    if not config.cpu_offloading or config.cpu_offloading_num_layers == 0:
        return None
    return offload_layers(
        model,
        config.cpu_offloading_num_layers,
        settings,
        activations=config.cpu_offloading_activations,
        weights=config.cpu_offloading_weights,
    )


def override(config: ConfigContainer, assignments: Iterable[str]) -> None:
    """Applies texts such as "optimizer.optimizer_offload_fraction=0.5". A value gets the type of the one it replaces.

    Raises ValueError for a text of another form or a value of another type, and AttributeError for a setting that does
    not exist.
    """
    for text in assignments:
        path, equals, value = text.removeprefix("cfg.").partition("=")
        *places, name = path.split(".")
        if not equals or not places:
            raise ValueError(f"{text!r} is no override; give NAMESPACE.NAME=VALUE, as in optimizer.lr=1e-4")
        held: Any = config
        for place in places:
            held = getattr(held, place)
        setattr(held, name, _value(value, getattr(held, name), path))


def _value(text: str, before: Any, path: str) -> Any:
    lower = text.lower()
    if lower in ("null", "none"):
        return None
    if isinstance(before, bool):
        if lower not in ("true", "false"):
            raise ValueError(f"{path}={text}: give True or False")
        return lower == "true"
    if isinstance(before, torch.dtype):
        dtype = getattr(torch, text.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{path}={text}: give a dtype such as bfloat16")
        return dtype
    if isinstance(before, list):
        return [item for item in (one.strip(" \"'") for one in text.strip("[]").split(",")) if item]
    if isinstance(before, str):
        return text.strip("\"'")
    for kind in (int,) if isinstance(before, int) else (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if before is None:
        return text
    raise ValueError(f"{path}={text}: give a number, as {before!r} is")
