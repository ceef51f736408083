"""Which settings do Adafactor and Muon have, which need a whole matrix at once? Those of torch.optim.

Sharded DTensors are assigned as wholes to the ranks of their mesh. Each rank updates its own and sends the result to
all others. So `step()` and `consolidate_state_dict()` are collectives, and `state_dict()` is as with `mesh` (see
`headrace.optim.AdamW`).
"""

import re
from functools import partial
from typing import Any, Unpack

import torch

from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options, snapshot
from headrace.optim.rules import AdamRule, MatrixRule
from headrace.runtime.pending import name_of, unit_of
from headrace.runtime.torch_rules import adafactor, muon

_TABLE = re.compile(
    r"(^|\.)(embed\w*|\w*embeddings?|wte|wpe|shared|relative_attention_bias|\w*lm_head|head|output|classifier|score)"
    r"\.weight$"
)


class Adafactor(HostOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor with state and update in host memory. Other settings are as in `headrace.optim.AdamW`.

    The state is a row and a column per matrix, in float32; `state_dtype` cannot be changed. With `tier="disk"`, only
    state of 16 KiB or more rests on disk; for matrices, that is the masters of low-precision weights.
    """

    _updates_whole = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **options: Unpack[Given],
    ) -> None:
        own = _float32_state(Options.of(self, options), "Adafactor")
        super().__init__(params, lr, beta2_decay, eps, d, weight_decay, maximize=maximize, foreach=False, options=own)

    def _rule(self, group: dict[str, Any], step: float) -> MatrixRule:
        return MatrixRule(partial(_adafactor_step, snapshot(group)))


def _adafactor_step(group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor) -> None:
    if "step" not in state:
        state["step"] = torch.tensor(0.0, device="cpu")
        if gradient.dim() > 1:
            state["row_var"] = gradient.new_zeros((*gradient.shape[:-1], 1))
            state["col_var"] = gradient.new_zeros((*gradient.shape[:-2], 1, gradient.shape[-1]))
        else:
            state["variance"] = torch.zeros_like(gradient)
    adafactor(
        [weight],
        [gradient],
        [state.get("row_var")],
        [state.get("col_var")],
        [state.get("variance")],
        [state["step"]],
        foreach=False,
        eps1=group["eps"][0],
        eps2=group["eps"][1],
        **{name: group[name] for name in ("d", "lr", "beta2_decay", "weight_decay", "maximize")},
    )


class Muon(HostOptimizer, torch.optim.Muon):
    """torch.optim.Muon with state and update in host memory, and AdamW for all other parameters, in one optimizer.

    Give it all parameters of a model, or `model.named_parameters()`. A group with both kinds of parameters is split in
    two. Muon gets parameters of two dimensions, except embeddings and output heads. These are recognised by the name of
    the module that holds the parameter: embed*, *embedding(s), wte, wpe, shared, relative_attention_bias, *lm_head,
    head, output, classifier or score. Names are known for offloaded models, and from named_parameters(); without names,
    Muon gets every matrix. `use_muon` in a group, True or False, decides for the whole group. AdamW's groups have
    "use_muon": False, and come after Muon's.

    The state is a float32 momentum, 4 bytes per parameter; for AdamW, 8 bytes. `state_dtype` cannot be changed. AdamW's
    own settings are `adamw_lr` and `adamw_weight_decay` (None: the group's), `adamw_betas` and `adamw_eps`. Other
    settings are as in `headrace.optim.AdamW`.
    """

    _updates_whole = True

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | torch.Tensor | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
        **options: Unpack[Given],
    ) -> None:
        given = {"lr": adamw_lr, "betas": adamw_betas, "eps": adamw_eps, "weight_decay": adamw_weight_decay}
        self._adamw = {name: value for name, value in given.items() if value is not None}
        for name, value in self._adamw.items():
            _check_for_adamw(name, value)
        by_muon, by_adamw = params, []
        if params is not None and not isinstance(params, torch.Tensor):  # which torch.optim refuses
            params = list(params)
            groups = params if params and isinstance(params[0], dict) else [{"params": params}]
            parts = [part for group in groups for part in self._parts(group)]
            by_muon = [part for part in parts if part.get("use_muon", True)]
            by_adamw = [part for part in parts if not part.get("use_muon", True)]
        if by_adamw and not by_muon:
            raise ValueError("Muon got no matrix to update; use headrace.optim.AdamW for these parameters")
        own = _float32_state(Options.of(self, options), "Muon")
        stock = lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn
        super().__init__(by_muon, *stock, options=own)
        for part in by_adamw:
            super().add_param_group(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or two if it has matrices and other parameters. Raises what every optimizer here raises."""
        for part in self._parts(param_group):
            super().add_param_group(part)

    def _parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The group as one or two: what Muon updates, and what AdamW updates, with AdamW's settings."""
        params = group["params"]
        if isinstance(params, set):
            raise TypeError("parameters of a group are a set, which has no order; give a list")
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        if group.get("use_muon"):
            for entry in params:
                tensor = entry[1] if isinstance(entry, tuple) else entry
                if tensor.dim() != 2:
                    raise ValueError(
                        f"a group with use_muon=True has a parameter of shape {tuple(tensor.shape)}; Muon is for those"
                        " of two dimensions: leave use_muon out, and the others go by AdamW"
                    )
        if "use_muon" in group:
            chosen = [bool(group["use_muon"])] * len(params)
        else:
            chosen = [_goes_by_muon(*entry[::-1] if isinstance(entry, tuple) else (entry,)) for entry in params]
        by_muon = [entry for entry, muons in zip(params, chosen, strict=True) if muons]
        others = [entry for entry, muons in zip(params, chosen, strict=True) if not muons]
        parts = [{**group, "params": by_muon}] if by_muon or not others else []
        return [*parts, {**group, **self._adamw, "params": others, "use_muon": False}] if others else parts

    def _rule(self, group: dict[str, Any], step: float) -> AdamRule | MatrixRule:
        if group.get("use_muon", True):
            return MatrixRule(partial(_muon_step, snapshot(group)), ("momentum_buffer",))
        return AdamRule.of(group, step, decoupled=True)


def _muon_step(group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor) -> None:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "ns_steps", "eps", "adjust_lr_fn")
    settings = {name: group[name] for name in names}
    muon([weight], [gradient], [state["momentum_buffer"]], has_complex=False, **settings)


def _check_for_adamw(name: str, value: Any) -> None:
    """Raises ValueError for what torch.optim.AdamW does not take as its setting `name`."""
    try:
        torch.optim.AdamW([torch.zeros(1)], **{name: value})
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(f"adamw_{name}={value!r} is not valid for AdamW: {error}") from error


def _goes_by_muon(parameter: torch.Tensor, name: str | None = None) -> bool:
    """Whether a parameter is a matrix and, as far as its name tells, not an embedding or an output head."""
    if parameter.dim() != 2:
        return False
    if name is None and unit_of(parameter) is not None:
        name = name_of(parameter)
    return name is None or _TABLE.search(name) is None


def _float32_state(options: Options, name: str) -> Options:
    if options.state_dtype != torch.float32:
        raise ValueError(f"state_dtype={options.state_dtype!r} is not available for {name}; allowed: torch.float32")
    return options
