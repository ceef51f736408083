"""Do models stay exact whose methods kernel libraries replace, as Liger and Unsloth do, also after `offload()`?

Their kernels need Triton. Here the same functions take the same weights in the same places, and compute with PyTorch.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from tests.support.compare import Outcome
from tests.support.held import weight_bytes
from tests.support.loops import to_device, train
from tests.support.offloaded import assert_exact

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # by PEFT, of transformers

VOCABULARY = 64
Patch = Callable[[Any], None]


class Norm(torch.autograd.Function):
    """Saves its weight, and writes over the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, scale = ctx.saved_tensors
        gradient = gradients[0]
        of_weight = (gradient * x * scale).flatten(0, -2).sum(0)
        gradient.mul_(weight)
        of_x = scale * (gradient - x * (gradient * x * scale.square()).mean(-1, keepdim=True))
        return of_x, of_weight, None


class ChunkedLoss(torch.autograd.Function):
    """A head and its cross-entropy, without all logits at once: gradients are computed in forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        of_x, of_weight = torch.zeros_like(x), torch.zeros_like(weight)
        loss = x.new_zeros(())
        logits = x.new_empty(8, weight.shape[0])
        for start in range(0, len(x), 8):
            rows = slice(start, start + 8)
            part = torch.mm(x[rows], weight.t(), out=logits[: len(x[rows])])
            loss += F.cross_entropy(part, labels[rows], reduction="sum")
            of_logits = part.softmax(-1) - F.one_hot(labels[rows], weight.shape[0])
            of_x[rows] = of_logits @ weight
            torch.addmm(of_weight, of_logits.t(), x[rows], out=of_weight)
        ctx.save_for_backward(of_x / len(x), of_weight / len(x))
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return *(gradients[0] * saved for saved in ctx.saved_tensors), None


class AdaptedMLP(torch.autograd.Function):
    """Two frozen projections with adapters at once. Frozen weights are kept on `ctx`, as autograd never sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, up_a: Tensor, up_b: Tensor, down: Tensor) -> Tensor:
        inner = torch.matmul(x, up.t())
        inner.addmm_(x @ up_a.t(), up_b.t())
        ctx.frozen = (up, down)
        ctx.save_for_backward(x, up_a, up_b, inner)
        return F.silu(inner) @ down.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, up_a, up_b, inner = ctx.saved_tensors
        up, down = ctx.frozen
        sigmoid = inner.sigmoid()
        of_inner = gradients[0] @ down * (sigmoid * (1 + inner * (1 - sigmoid)))
        of_adapted = of_inner @ up_b
        of_x = of_inner @ up + of_adapted @ up_a
        return of_x, None, of_adapted.t() @ x, of_inner.t() @ (x @ up_a.t()), None


def norm_forward(self: Any, x: Tensor) -> Tensor:
    return Norm.apply(x, self.weight, self.variance_epsilon)  # type: ignore[no-any-return,no-untyped-call]


def loss_forward(self: Any, input_ids: Tensor, labels: Tensor) -> CausalLMOutputWithPast:
    hidden = self.model(input_ids=input_ids).last_hidden_state[:, :-1].reshape(-1, self.config.hidden_size)
    loss = ChunkedLoss.apply(hidden, self.lm_head.weight, labels[:, 1:].reshape(-1))  # type: ignore[no-untyped-call]
    return CausalLMOutputWithPast(loss=loss)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    up = self.up_proj
    adapters = (up.lora_A["default"].weight, up.lora_B["default"].weight)
    rows = x.reshape(-1, x.shape[-1])
    return AdaptedMLP.apply(rows, up.base_layer.weight, *adapters, self.down_proj.weight).view_as(x)  # type: ignore[no-any-return,no-untyped-call]


def liger(model: Any) -> None:
    """Methods of instances, as `TrainingArguments(use_liger_kernel=True)` replaces them when the Trainer is made."""
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = MethodType(norm_forward, module)
    model.forward = MethodType(loss_forward, model)


def unsloth(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__ == "LlamaMLP":
            module.forward = MethodType(mlp_forward, module)


def llama(*, tied: bool = False) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, tie_word_embeddings=tied))


def adapted() -> Any:
    return get_peft_model(llama(), LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))


def forward(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = model(**batch).loss
    return loss, loss


@pytest.mark.extended
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["liger", "liger_tied", "unsloth"])
def test_training(kind: str, when: str, compute_device: torch.device) -> None:
    patch = unsloth if kind == "unsloth" else liger

    def make() -> Any:
        model = adapted() if kind == "unsloth" else llama(tied=kind == "liger_tied")
        if when == "before":
            patch(model)
        return model

    def script(model: Any) -> Outcome:
        if when == "after":
            patch(model)
        tokens = [torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(n)) for n in range(4)]
        return train(model, to_device([{"input_ids": t, "labels": t} for t in tokens], compute_device), forward)

    handle, model = assert_exact(make, script, compute_device, 0.5)
    stats = handle.stats()
    assert stats.device_peak_bytes <= stats.device_budget_bytes
    assert stats.onload_bytes > weight_bytes(model)
    handle.remove()
