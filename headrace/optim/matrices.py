"""How do optimizers step that need a whole matrix at once? One parameter at a time, with PyTorch's own arithmetic."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch

from headrace.memory.disk import TensorAtRest
from headrace.optim import kernel, narrow
from headrace.optim.devices import Member
from headrace.optim.disk_state import DiskState
from headrace.optim.gathered import Gathered
from headrace.optim.kernel import Master
from headrace.optim.optimizer import HostOptimizer
from headrace.optim.options import Given, Options
from headrace.optim.rules import AdamRule
from headrace.optim.update import scaled
from headrace.optim.weights import Weights
from headrace.runtime.pending import name_of, unit_of
from headrace.runtime.sharded import cut_of
from headrace.runtime.torch_rules import adafactor, muon

__all__ = ["Adafactor", "MatrixOptimizer", "Muon"]

_TABLE = re.compile(
    r"(^|\.)(embed\w*|\w*embeddings?|wte|wpe|shared|relative_attention_bias|\w*lm_head|head|output|classifier|score)"
    r"\.weight$"
)
LEAST_BYTES = 1 << 14  # of a tensor of state that goes to disk; the others stay


class MatrixOptimizer(HostOptimizer):
    """A subclass updates one float32 (or float64) weight in place.

    DTensors that are cut are dealt out to the ranks of their mesh, each of which updates its own for all: `step()` and
    `consolidate_state_dict()` are collectives, and `state_dict()` is as with `mesh` (see `headrace.optim.AdamW`).
    """

    SPLITS = False

    def _deal_out(self, added: Sequence[torch.Tensor], owners: Sequence[int]) -> None:
        cuts = (cut for parameter in added if (cut := cut_of(parameter)) is not None)
        first = next(cuts, None) if self._dealt is None else None
        if first is not None:
            self._dealt = Gathered(first, self._local_shards, owners)
        super()._deal_out(added, owners)

    def _apply(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        raise NotImplementedError

    def _perform(self, members: Sequence[Member], scale: float) -> None:
        disk = None if members[0].weights.host.device.type != "cpu" else self._disk
        for member in members:
            if disk is not None:
                self._fetch(disk, member)
            member.begun = self._disk is not None
            self._update_one(member, scale)
            if disk is not None:
                self._spill(disk, member.parameter, member.weights, member.state)

    def _update_one(self, member: Member, scale: float) -> None:
        weights = member.weights
        state = member.state
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to("cpu" if name == "step" else weights.host.device)
        master = weights.master(state)
        master = None if master is None else weights.flat(master)
        stored = weights.exposed()
        exact = narrow.join(stored, master, weights.form)
        gradient = member.gradient.detach()
        if gradient.numel():
            self._not_finite.note(member.step, ~torch.linalg.vector_norm(gradient, torch.inf).isfinite())
        gradient = scaled(gradient, scale)
        # In the shape and layout of the parameter: rows and columns matter here.
        shaped = weights.shaped(exact)
        member.begins()
        self._apply(member.group, state, shaped, gradient.to(exact.dtype))
        narrow.part(exact, stored, master, weights.form)
        weights.performed(kernel.checksum(stored) if weights.form is Master.SPLIT else None)
        member.updated = True

    # state on disk: of one parameter at a time, under a key for each tensor, as these differ in size ------------------
    def _fetch(self, disk: DiskState, member: Member) -> None:
        for name, shape in self._resting.get(member.parameter, {}).items():
            key = (member.parameter, name)
            lent = self._lent.get(member.parameter, {}).get(name)
            if lent is not None:
                disk.take_back(key)
            if member.state.get(name) is lent:  # nobody put another one there
                flat = disk.fetch(key, shape.numel())[name]
                member.state[name] = _lying_as(flat, shape, member.weights.host)
        self._lent.pop(member.parameter, None)

    def _spill(self, disk: DiskState, parameter: torch.Tensor, weights: Weights, state: dict[str, Any]) -> None:
        large = {
            name: value
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.nbytes >= LEAST_BYTES
        }
        for name, value in large.items():
            like = _lying_as(torch.empty(value.numel(), dtype=value.dtype, device="cpu"), value.shape, weights.host)
            flat = value if value.stride() == like.stride() else like.copy_(value)
            disk.keep((parameter, name), value.numel(), {name: flat.as_strided((value.numel(),), (1,))})
        self._resting[parameter] = {name: value.shape for name, value in large.items()}
        for name in large:
            del state[name]

    def _begin_state(self, parameter: torch.Tensor) -> None:
        super()._begin_state(parameter)
        if parameter not in self._lent:
            self._resting.pop(parameter, None)

    def _show_state(self) -> None:
        super()._show_state()
        for parameter, shapes in self._resting.items():
            if self._disk is not None and parameter not in self._lent:
                lent = {name: self._disk.lend((parameter, name), shape.numel())[name] for name, shape in shapes.items()}
                host = self._weights_of(parameter).host
                self._lent[parameter] = {name: _lying_as(lent[name], shapes[name], host) for name in lent}
                self.entries[parameter].update(self._lent[parameter])

    def _at_rest(self, parameter: torch.Tensor) -> dict[str, TensorAtRest]:
        if self._disk is None or parameter in self._lent:
            return {}
        host, found = self._weights_of(parameter).host, {}
        for name, shape in self._resting.get(parameter, {}).items():
            one = self._disk.at_rest((parameter, name), shape.numel())[name]
            found[name] = replace(one, like=_lying_as(one.like, shape, host))
        return found

    def fill(self, state: Mapping[torch.Tensor, Mapping[str, TensorAtRest]]) -> None:
        for parameter, tensors in state.items():
            self.entries[parameter].update({name: one.load() for name, one in tensors.items()})
            if self._disk is not None and parameter.device.type == "cpu":
                self._spill(self._disk, parameter, self._weights_of(parameter), self.entries[parameter])
        if self._disk is not None:
            self._disk.synchronize()

    def _forget_weights(self) -> None:
        super()._forget_weights()
        self._resting: dict[torch.Tensor, dict[str, torch.Size]] = {}  # what of each parameter's state is on disk


def _lying_as(flat: torch.Tensor, shape: torch.Size, weights: torch.Tensor) -> torch.Tensor:
    """`flat` in a shape; in that of the weights its elements lie as theirs do."""
    if shape == weights.shape and torch.ops.aten.is_non_overlapping_and_dense(weights):
        return flat.as_strided(shape, weights.stride())
    return flat.view(shape)


class Adafactor(MatrixOptimizer, torch.optim.Adafactor):
    """torch.optim.Adafactor with state and update in host memory; other settings as in `headrace.optim.AdamW`.

    The float32 state is a row and a column per matrix. `state_dtype` stays torch.float32. With `tier="disk"`, only
    state of 16 KiB or more rests on disk: for matrices, the masters of low-precision weights.
    """

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
        super().__init__(
            params,
            options=_float32_state(Options.of(self, options), "Adafactor"),
            lr=lr,
            beta2_decay=beta2_decay,
            eps=eps,
            d=d,
            weight_decay=weight_decay,
            maximize=maximize,
            foreach=False,
        )

    def _apply(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
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
            d=group["d"],
            lr=group["lr"],
            beta2_decay=group["beta2_decay"],
            weight_decay=group["weight_decay"],
            eps1=group["eps"][0],
            eps2=group["eps"][1],
            maximize=group["maximize"],
        )


class Muon(MatrixOptimizer, torch.optim.Muon):
    """torch.optim.Muon with state and update in host memory, and AdamW for all other parameters, in one optimizer.

    Give it all parameters of a model, or `model.named_parameters()`. A group with both kinds of parameters is split in
    two. Muon gets those of two dimensions, except embeddings and output heads, which are recognised by name: the
    parameter's last module is named embed*, *embedding(s), wte, wpe, shared, relative_attention_bias, *lm_head, head,
    output, classifier or score. Names are known for offloaded models, and from named_parameters(); without names, Muon
    gets every matrix. `use_muon` in a group, True or False, decides for the whole group. The groups of AdamW have
    "use_muon": False, and come after those of Muon.

    State: a float32 momentum, 4 bytes per parameter; for AdamW 8 bytes. `state_dtype` stays torch.float32. The other
    settings are as in `headrace.optim.AdamW`, and its own are `adamw_lr` and `adamw_weight_decay` (None: the group's),
    `adamw_betas` and `adamw_eps`.
    """

    ELEMENTWISE = ("momentum_buffer", "exp_avg", "exp_avg_sq")

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
        by_muon, by_adamw = params, []
        if params is not None and not isinstance(params, torch.Tensor):  # which torch.optim refuses
            params = list(params)
            groups = params if params and isinstance(params[0], dict) else [{"params": params}]
            parts = [part for group in groups for part in self._parts(group)]
            by_muon = [part for part in parts if part.get("use_muon", True)]
            by_adamw = [part for part in parts if not part.get("use_muon", True)]
        if by_adamw and not by_muon:
            raise ValueError("Muon got no matrix to update; use headrace.optim.AdamW for these parameters")
        super().__init__(
            by_muon,
            options=_float32_state(Options.of(self, options), "Muon"),
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        for part in by_adamw:
            super().add_param_group(part)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or two where it has matrices and others. Raises as with every optimizer of headrace."""
        for part in self._parts(param_group):
            super().add_param_group(part)

    def _parts(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """The group as one or two: what goes by Muon, and what goes by AdamW with the settings of that."""
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

    def _apply(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        if not group.get("use_muon", True):
            self._apply_adamw(group, state, weight, gradient)
            return
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        muon(
            [weight],
            [gradient],
            [state["momentum_buffer"]],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            ns_coefficients=group["ns_coefficients"],
            ns_steps=group["ns_steps"],
            eps=group["eps"],
            adjust_lr_fn=group["adjust_lr_fn"],
            has_complex=False,
        )

    def _apply_adamw(
        self, group: dict[str, Any], state: dict[str, Any], weight: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        rule = AdamRule(
            lr=float(group["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=True,
            maximize=False,
            step=float(state["step"]),
        )
        rule.apply(weight, gradient, state["exp_avg"], state["exp_avg_sq"], None, first_step=False)


def _goes_by_muon(parameter: torch.Tensor, name: str | None = None) -> bool:
    """Whether a parameter is a matrix and, as far as its name tells, no table."""
    if parameter.dim() != 2:
        return False
    if name is None and unit_of(parameter) is not None:
        name = name_of(parameter)
    return name is None or _TABLE.search(name) is None


def _float32_state(options: Options, name: str) -> Options:
    if options.state_dtype != torch.float32:
        raise ValueError(f"state_dtype={options.state_dtype!r} is not available for {name}; allowed: torch.float32")
    return options
