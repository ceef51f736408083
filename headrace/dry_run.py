"""What does a forward save, compute and cache, block by block? Seen in one whose tensors have no memory."""

import copy
import dataclasses
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.runtime.autograd import FakeTensorMode, more_flops, tree_flatten

BATCH = 2  # sequences: with a single one, some operations copy less, or more

_ATTENTION = ("scaled_dot_product", "bmm")  # in names of operations: products whose size depends on the context


@dataclasses.dataclass
class Seen:
    """What one block did in a forward: totals over all its tokens.

    `saved_bytes`: what backward needs, without parameters. `input_bytes`: what recomputation keeps: for a layer, its
    first input tensor; for what comes before layers, all that is saved and the layers' other inputs. `cache_window`: of
    how many tokens at most keys and values are kept; 0: of all.
    """

    saved_bytes: int = 0
    input_bytes: int = 0
    flops: int = 0
    attention_flops: int = 0
    cached_elements: int = 0
    cache_window: int = 0


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A forward and its loss: `layers` by the name of each; what is done before them, and after.

    What all layers share, such as a mask, counts as done before them. `first`: the modules, outside the layers, that
    were called before any layer. `logits`: how many elements the result has, of `logit_bytes` each. `tied`: a
    parameter outside the layers has several names.
    """

    before: Seen
    after: Seen
    layers: dict[str, Seen]
    first: frozenset[str]
    logits: int
    logit_bytes: int
    tied: bool


def dry_run(
    model: nn.Module, layers: Sequence[str], sequence_length: int, trained: Collection[str] | None = None
) -> DryRun:
    """One forward of a copy of transformers' `model`, of `BATCH` sequences. Nothing is allocated or changed.

    `layers`: the names of its layers, in order. Only as many of them run as are needed to see one of each kind; the
    others are taken to do the same. Attention runs in PyTorch's flash kernel where the model uses
    `scaled_dot_product_attention`; no token is masked. `trained`: the names of the parameters that get gradients; None:
    those that require them. Raises whatever the model raises when it cannot run so.
    """
    kinds = {name: _kind_of(name, model.get_submodule(name)) for name in layers}
    wanted = _with_one_of_each(kinds)
    with FakeTensorMode():
        twin = _twin(model, set(layers) - wanted)
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(parameter.requires_grad if trained is None else name in trained)
        watch = _Watch(twin, wanted)
        tokens = torch.zeros((BATCH, sequence_length), dtype=torch.long)
        with watch.watching():
            result = twin(**_inputs(twin, tokens, watch))
    seen = {kinds[name]: found for name, found in watch.layers.items()}
    logits = getattr(result, "logits", None)
    return DryRun(
        before=watch.before,
        after=watch.after,
        layers={name: seen.get(kind, Seen()) for name, kind in kinds.items()},
        first=frozenset(watch.first),
        logits=0 if logits is None else logits.numel(),
        logit_bytes=0 if logits is None else logits.element_size(),
        tied=_is_tied(twin),
    )


def _kind_of(name: str, layer: nn.Module) -> tuple[Any, ...]:
    """The kind of a layer: its modules' settings and parameters. Equal kinds save and compute alike."""
    found: list[Any] = [re.sub(r"\d+", "", name)]
    for inner in layer.modules():
        settings = (pair for pair in vars(inner).items() if isinstance(pair[1], int | float | str | None))
        found += [type(inner), *((key, value) for key, value in settings if "idx" not in key)]
        found += [parameter.shape for parameter in inner.parameters(recurse=False)]
    return tuple(found)


def _with_one_of_each(kinds: dict[str, tuple[Any, ...]]) -> set[str]:
    """In each stack, the layers up to the last one of a new kind, because models count their layers from the first."""
    last: dict[str, int] = {}
    stacks: dict[str, list[str]] = {}
    met = set()
    for name, kind in kinds.items():
        stack = name.rpartition(".")[0]
        stacks.setdefault(stack, []).append(name)
        if kind not in met:
            met.add(kind)
            last[stack] = len(stacks[stack])
    return {name for stack, names in stacks.items() for name in names[: last.get(stack, 0)]}


def _twin(model: nn.Module, without: Collection[str]) -> nn.Module:
    """A copy of the model, whose tensors have no memory in the mode that is on; it lacks the layers in `without`."""
    config = getattr(model, "config", None)
    memo: dict[int, Any] = {id(config): config}
    for name in without:
        memo[id(model.get_submodule(name))] = None
    for tensor in _tensors(model, memo):
        empty = torch.empty(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    twin = copy.deepcopy(model, memo)
    for name in without:
        stack, _, index = name.rpartition(".")
        delattr(twin.get_submodule(stack), index)
    return twin.train()


def _tensors(module: nn.Module, without: Collection[int]) -> list[torch.Tensor]:
    """The module's tensors, except those of inner modules with `id` in `without`."""
    if id(module) in without:
        return []
    found = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [*found, *(tensor for inner in module.children() for tensor in _tensors(inner, without))]


def _is_tied(model: nn.Module) -> bool:
    names = (name for name, _ in model.named_parameters(remove_duplicate=False))
    return len(list(names)) > len(list(model.parameters()))


def _inputs(model: nn.Module, tokens: torch.Tensor, watch: "_Watch") -> dict[str, Any]:
    import transformers  # here: it takes seconds to import, and only its own models come here

    given: Any = model
    kept: list[Any] = []

    class Noted(transformers.DynamicCache):  # type: ignore[misc]
        """Says that no token came before, and keeps nothing. Without a cache, models look at tokens' values."""

        def update(
            self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_args: Any, **_kw: Any
        ) -> tuple[Any, Any]:
            watch.now.cached_elements += key.numel() + value.numel()
            watch.now.cache_window = getattr(kept[layer_idx], "sliding_window", 0) if layer_idx < len(kept) else 0
            return key, value

    inputs: dict[str, Any] = {"input_ids": tokens}
    if given.get_output_embeddings() is not None:
        inputs["labels"] = tokens
    if given.can_generate() and given.config.is_encoder_decoder:
        inputs["use_cache"] = False
    elif given.can_generate():
        inputs["past_key_values"] = Noted()
        kept += transformers.DynamicCache(config=given.config.get_text_config(decoder=True)).layers
    return inputs


class _Watch:
    """Attributes what a forward does to the layer that is called, or to what comes before or after the layers."""

    def __init__(self, model: nn.Module, layers: Collection[str]) -> None:
        self.before, self.after = Seen(), Seen()
        self.layers = {name: Seen() for name in layers}
        self.first: set[str] = set()
        self.now = self.before
        self._model = model
        self._counted = self._counted_attention = 0
        # By their `id`. They are kept, so that no other storage gets the same one.
        self._known = {id(own): own for own in (parameter.untyped_storage() for parameter in model.parameters())}
        self._shared: dict[int, torch.UntypedStorage] = {}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._counter = FlopCounterMode(display=False, custom_mapping=more_flops)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts, the model is called once."""
        with ExitStack() as stack:
            for name, module in self._model.named_modules():
                if name in self.layers:
                    entering = self._entering(self.layers[name])
                    stack.callback(module.register_forward_pre_hook(entering, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(self._leaving).remove)
                else:
                    stack.callback(module.register_forward_pre_hook(self._calling(name)).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor))
            stack.enter_context(_Kernels())
            stack.enter_context(self._counter)
            yield
            self._count()
        self.before.input_bytes = sum(storage.nbytes() for storage in (self._shared | self._kept).values())

    def _calling(self, name: str) -> Any:
        def calling(_module: nn.Module, _args: Any) -> None:
            if self.now is self.before:
                self.first.add(name)

        return calling

    def _entering(self, layer: Seen) -> Any:
        def entering(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._count()
            self.now = layer
            values = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)]
            if values and not values[0].requires_grad:
                values[0].requires_grad_()  # behind a frozen embedding: all layers are like the first
            given = [value.untyped_storage() for value in values]
            if given:
                layer.input_bytes = given[0].nbytes()
                self._shared |= {id(other): other for other in given[1:] if other is not given[0]}

        return entering

    def _leaving(self, *_: Any) -> None:
        self._count()
        self.now = self.after

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in self._known:
            self._known[id(storage)] = storage
            block = self.before if id(storage) in self._shared else self.now
            block.saved_bytes += storage.nbytes()
            if self.now is self.before:
                self._kept[id(storage)] = storage
        return tensor

    def _count(self) -> None:
        """Attributes the operations since the last count."""
        counts = self._counter.flop_counts["Global"].items()
        attention = sum(n for kind, n in counts if any(name in str(kind) for name in _ATTENTION))
        total = sum(n for _, n in counts)
        self.now.flops += total - self._counted
        self.now.attention_flops += attention - self._counted_attention
        self._counted, self._counted_attention = total, attention


class _Kernels(TorchFunctionMode):
    """Lets a model run in kernels of the CPU that save and compute as those of accelerators do.

    Flash attention, which keeps no scores: without dropout, and with values as wide as queries. Products of rows with
    the matrix of their group (an expert): as if all were in the first, in every dtype.
    """

    def __torch_function__(
        self, function: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is functional.scaled_dot_product_attention:
            query, key, value, *others = args
            more = query.shape[-1] - value.shape[-1]
            wide = functional.pad(value, (0, more)) if more else value  # which copies
            result = function(query, key, wide, *others, **((kwargs or {}) | {"dropout_p": 0.0}))
            return result[..., : value.shape[-1]]
        if getattr(function, "__name__", "").endswith("grouped_mm"):
            rows, matrices, *_ = args
            return rows @ matrices[0]
        return function(*args, **(kwargs or {}))
