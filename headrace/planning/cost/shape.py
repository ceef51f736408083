"""What must be known of a model to price it? Its blocks: parameters, operations and activations; no weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property


class BlockKind(Enum):
    """What a block is to the model."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One block in numbers; "per token" counts one forward.

    - `parameters`: all of them; `active_parameters`: those that one token is multiplied with (mixtures of experts have
      fewer, an embedding has none); `trainable`: those that get gradients.
    - `weight_bits`: bits of one parameter as it rests and travels (16; 4.5 for NF4 with its scales).
    - `context_flops`: attention's operations per token and per position of the context.
    - `saved_bytes`: bytes per token that backward needs when nothing is recomputed, without parameters; `input_bytes`:
      those that recomputation keeps: a layer's input, and of an embedding also what it gives to all layers.
    - `logit_bytes`: bytes per position that a head's logits take, as computed and in 32 bits, beside what it saves.
    - `adapter_sizes`: inputs and outputs of all linear layers together: an adapter of rank r has r times as many
      parameters.
    - `expert_parameters`: those of its parameters that belong to routed experts; `experts`: how many experts there are
      (0: none, or none that could travel one by one); `experts_per_token`: how many a token goes to.
    - `cache_elements`: elements of a token's keys and values, which decoding keeps.
    - `cache_window`: of how many tokens it keeps them at most, as with a sliding window; 0: of all.
    - `row_parameters`: those of one row of an embedding that is only looked up (0: none).
    - `last_parameters`: those of its last matrix. Recomputation leaves it out: backward does not need its output.
    """

    name: str
    kind: BlockKind = BlockKind.LAYER
    parameters: int
    active_parameters: int
    trainable: int
    weight_bits: float = 16.0
    context_flops: float = 0.0
    saved_bytes: float = 0.0
    input_bytes: float = 0.0
    logit_bytes: float = 0.0
    adapter_sizes: int = 0
    last_parameters: int = 0
    expert_parameters: int = 0
    experts_per_token: int = 1
    experts: int = 0
    cache_elements: int = 0
    cache_window: int = 0
    row_parameters: int = 0

    @property
    def trains_experts(self) -> bool:
        """Whether experts are trained; adapters leave them alone."""
        return bool(self.expert_parameters) and self.trainable == self.parameters

    @property
    def weight_bytes(self) -> int:
        return round(self.parameters * self.weight_bits / 8)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert; 0 if there are none."""
        return round(self.expert_parameters * self.weight_bits / 8 / self.experts) if self.experts else 0

    def wanted_experts(self, tokens: int) -> float:
        """How many different experts this many tokens go to, if each token's are drawn evenly."""
        share = min(1.0, self.experts_per_token / max(1, self.experts))
        return self.experts * (1.0 - (1.0 - share) ** tokens)

    def read_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a forward of `tokens` tokens reads at least once."""
        return self.weight_bytes - self.expert_bytes * (self.experts - self.wanted_experts(tokens))

    def cached_tokens(self, context: int) -> int:
        """Of how many tokens of a context the keys and values are kept."""
        return min(context, self.cache_window or context)

    def activation_bytes(self, tokens: int) -> float:
        """Bytes of one forward of `tokens` tokens that backward needs, when nothing is recomputed, and of logits."""
        return (self.saved_bytes + self.logit_bytes) * tokens

    def forward_flops(self, tokens: int, context: int) -> float:
        """Operations of one forward of `tokens` tokens in sequences of `context`."""
        return tokens * (2.0 * self.active_parameters + self.context_flops * context)

    def again_share(self, context: int) -> float:
        """The share of a forward that recomputation does again."""
        whole = self.forward_flops(1, context)
        return 1.0 - 2.0 * self.last_parameters / whole if whole else 0.0


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A model as a sequence of blocks, in the order of its forward. `tied`: the head reuses the embedding's weights."""

    name: str
    blocks: tuple[BlockShape, ...]
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ValueError(f"model {self.name!r} has no blocks, so there is nothing to plan")

    @cached_property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets: multiplied with, or looked up in an embedding that is not the head's."""
        return sum(block.active_parameters or (0 if self.tied else block.parameters) for block in self.blocks)

    @cached_property
    def trainable(self) -> int:
        return sum(block.trainable for block in self.blocks)

    @cached_property
    def weight_bytes(self) -> int:
        return sum(block.weight_bytes for block in self.blocks)

    @property
    def layers(self) -> int:
        return sum(block.kind is BlockKind.LAYER for block in self.blocks)

    def forward_flops(self, tokens: int, context: int) -> float:
        return sum(block.forward_flops(tokens, context) for block in self.blocks)

    def with_adapters(self, rank: int) -> ModelShape:
        """The same model, frozen, with adapters of `rank` on the linear layers of its layers (LoRA)."""
        if rank < 1:
            raise ValueError(f"adapter_rank={rank}; give a rank of at least 1")

        def adapted(block: BlockShape) -> BlockShape:
            return replace(block, trainable=rank * block.adapter_sizes if block.kind is BlockKind.LAYER else 0)

        return self._each(adapted)

    def frozen(self) -> ModelShape:
        """The same model with nothing to train."""
        return self._each(lambda block: replace(block, trainable=0))

    def with_bits(self, bits: float) -> ModelShape:
        """The same model with the weights of its layers stored in `bits` bits each (a quantised base)."""
        if not 0 < bits <= 32:
            raise ValueError(f"weight_bits={bits}; give a number of bits above 0 and up to 32")
        return self._each(lambda block: replace(block, weight_bits=bits) if block.kind is BlockKind.LAYER else block)

    def _each(self, change: Callable[[BlockShape], BlockShape]) -> ModelShape:
        return replace(self, blocks=tuple(change(block) for block in self.blocks))
