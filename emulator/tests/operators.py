"""Which operators must give on the emulator, bit for bit, what they give on the CPU? Forward and backward."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Case = tuple[Callable[..., Any], list[Tensor]]


def randn(*shape: int) -> Tensor:
    """Normal numbers that depend on the shape only, so that no case moves when another is added."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)))


def bf16(*shape: int) -> Tensor:
    return randn(*shape).bfloat16()


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(high))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options)


def triangle(query: Tensor, rows: int, columns: int) -> Tensor:
    return torch.ones(rows, columns, dtype=torch.bool, device=query.device).tril()


def running_statistics(x: Tensor, train: bool, *affine: Tensor) -> Tensor:
    mean, variance = torch.zeros(4, device=x.device), torch.ones(4, device=x.device)
    result = F.batch_norm(x, mean, variance, *affine, training=train)
    return torch.cat([result.flatten(), mean.detach(), variance.detach()])


def several_views(x: Tensor) -> list[Tensor]:
    views = (
        *(x.t(), x.unsqueeze(0).expand(3, 6, 9), x.reshape(9, 6), x.flatten(), x.movedim(0, 1), x[1:4, ::2]),
        *(x.diagonal(), x.unfold(1, 3, 2), x.narrow(0, 1, 2), x.select(1, 2), x.as_strided((3, 3), (9, 2))),
        *(x.split(4, 1), x.chunk(2, 0), x.unbind(0)),
    )
    return [view * 2 for group in views for view in (group if isinstance(group, tuple) else (group,))]


LINEAR: dict[str, Case] = {
    "linear": (F.linear, [randn(5, 8), randn(6, 8), randn(6)]),
    "linear_3d": (F.linear, [randn(2, 5, 8), randn(6, 8), randn(6)]),
    "linear_no_bias": (F.linear, [randn(2, 5, 8), randn(6, 8)]),
    "linear_transposed": (lambda x, *w: F.linear(x.transpose(0, 1), *w), [randn(2, 5, 8), randn(6, 8), randn(6)]),
    "linear_bf16": (F.linear, [bf16(2, 5, 8), bf16(6, 8), bf16(6)]),
    "matmul_bf16": (torch.matmul, [bf16(2, 5, 8), bf16(8, 6)]),
    "matmul_fp16": (torch.matmul, [randn(2, 5, 8).half(), randn(8, 6).half()]),
    "bmm": (torch.bmm, [randn(2, 5, 8), randn(2, 8, 6)]),
    "addmm": (torch.addmm, [randn(5, 6), randn(5, 8), randn(8, 6)]),
    "baddbmm": (lambda *x: torch.baddbmm(*x, beta=0.5, alpha=2), [randn(2, 5, 6), randn(2, 5, 8), randn(2, 8, 6)]),
    "matrix_vector": (lambda a, b: (a @ b, torch.outer(b, b), torch.dot(b, b)), [randn(5, 5), randn(5)]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [randn(2, 3, 4), randn(2, 4, 5)]),
    "einsum_heads": (lambda a, b: torch.einsum("bhid,bhjd->bhij", a, b), [randn(2, 2, 3, 4), randn(2, 2, 5, 4)]),
    "grouped_mm": (
        lambda a, b: torch._grouped_mm(a, b, offs=torch.tensor([2, 5, 8], dtype=torch.int32).to(a.device)),
        [bf16(8, 16), bf16(3, 16, 32)],
    ),
    "linalg": (
        lambda a: (torch.linalg.inv(a), torch.linalg.det(a), torch.linalg.solve(a, a @ a), torch.linalg.svdvals(a)),
        [randn(4, 4) + 4 * torch.eye(4)],
    ),
}
ATTENTION: dict[str, Case] = {
    "attention": (attention, [randn(2, 2, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)]),
    "attention_causal": (lambda *x: attention(*x, is_causal=True), [randn(2, 2, 5, 8)] * 3),
    "attention_bool_mask": (
        lambda q, k, v: attention(q, k, v, triangle(q, 5, 7)),
        [randn(2, 2, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)],
    ),
    "attention_bias": (attention, [randn(2, 2, 5, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8), randn(5, 7)]),
    "attention_grouped": (
        lambda *x: attention(*x, is_causal=True, enable_gqa=True),
        [randn(2, 4, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)],
    ),
    "attention_3d": (attention, [randn(2, 5, 8)] * 3),
    "attention_narrow_values": (attention, [randn(2, 2, 5, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 4)]),
    "attention_bf16": (lambda *x: attention(*x, is_causal=True), [bf16(2, 2, 5, 8)] * 3),
    "attention_transposed": (
        lambda *x: attention(*(part.transpose(1, 2) for part in x), is_causal=True),
        [randn(2, 5, 2, 8)] * 3,
    ),
}
CONVOLUTION: dict[str, Case] = {
    "conv1d": (lambda *x: F.conv1d(*x, padding=1), [randn(2, 4, 9), randn(6, 4, 3), randn(6)]),
    "conv1d_depthwise": (lambda *x: F.conv1d(*x, padding=3, groups=4), [randn(2, 4, 9), randn(4, 1, 4), randn(4)]),
    "conv2d": (lambda *x: F.conv2d(*x, padding=1, stride=2), [randn(2, 4, 9, 9), randn(6, 4, 3, 3), randn(6)]),
    "conv2d_dilated": (lambda *x: F.conv2d(*x, dilation=2), [randn(2, 4, 9, 9), randn(6, 4, 3, 3)]),
    "conv2d_bf16": (F.conv2d, [bf16(2, 4, 9, 9), bf16(6, 4, 3, 3), bf16(6)]),
    "conv2d_channels_last": (
        lambda x, *w: F.silu(F.conv2d(x.contiguous(memory_format=torch.channels_last), *w)).mean((2, 3)),
        [randn(2, 4, 9, 9), randn(6, 4, 3, 3), randn(6)],
    ),
    "conv3d": (lambda *x: F.conv3d(*x, padding=1), [randn(2, 2, 4, 5, 5), randn(3, 2, 3, 3, 3), randn(3)]),
    "conv_transpose1d": (lambda *x: F.conv_transpose1d(*x, stride=2), [randn(2, 4, 9), randn(4, 6, 3), randn(6)]),
    "conv_transpose2d": (lambda *x: F.conv_transpose2d(*x, stride=2), [randn(2, 4, 5, 5), randn(4, 6, 3, 3), randn(6)]),
    "pool2d": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 2), F.adaptive_max_pool2d(x, 2)),
        [randn(2, 3, 8, 8)],
    ),
    "pool1d": (lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 2), F.adaptive_avg_pool1d(x, 2)), [randn(2, 3, 8)]),
    "interpolate": (
        lambda x: (
            F.interpolate(x, scale_factor=2, mode="nearest"),
            F.interpolate(x, size=(5, 5), mode="bilinear"),
            F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True),
            F.interpolate(x, size=(16, 16), mode="bicubic"),
        ),
        [randn(2, 3, 8, 8)],
    ),
    "pixel_shuffle": (lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2)), [randn(2, 4, 8, 8)]),
    "unfold_fold": (
        lambda x: (F.unfold(x, 3), F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2)),
        [randn(2, 4, 8, 8)],
    ),
    "grid_sample": (
        lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=False),
        [randn(2, 4, 8, 8), randn(2, 5, 5, 2)],
    ),
    "pad": (
        lambda x: [F.pad(x, (1, 2), mode=mode) for mode in ("constant", "reflect", "replicate", "circular")],
        [randn(2, 6, 9)],
    ),
}
NORMALISATION: dict[str, Case] = {
    "batch_norm_train": (lambda x, *w: running_statistics(x, True, *w), [randn(3, 4, 5, 5), randn(4), randn(4)]),
    "batch_norm_eval": (lambda x, *w: running_statistics(x, False, *w), [randn(3, 4, 5, 5), randn(4), randn(4)]),
    "group_norm": (lambda x, *w: F.group_norm(x, 2, *w), [randn(3, 4, 5, 5), randn(4), randn(4)]),
    "instance_norm": (lambda x: F.instance_norm(x), [randn(3, 4, 5, 5)]),
    "layer_norm": (lambda x, *w: F.layer_norm(x, (8,), *w), [randn(2, 5, 8), randn(8), randn(8)]),
    "layer_norm_bf16": (lambda x, *w: F.layer_norm(x, (8,), *w), [bf16(2, 5, 8), bf16(8), bf16(8)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (8,), w), [randn(2, 5, 8), randn(8)]),
    "normalize": (F.normalize, [randn(5, 3)]),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1)), [randn(6, 9)]),
    "softmax_of_bf16": (lambda x: x.softmax(-1, dtype=torch.float32), [bf16(6, 9)]),
}
INDEXING: dict[str, Case] = {
    "embedding": (lambda i, w: F.embedding(i, w, padding_idx=0), [integers(10, 2, 5), randn(10, 8)]),
    "embedding_bag_sum": (lambda i, w: F.embedding_bag(i, w, mode="sum"), [integers(10, 2, 5), randn(10, 8)]),
    "embedding_bag_mean": (lambda i, w: F.embedding_bag(i, w, mode="mean"), [integers(10, 2, 5), randn(10, 8)]),
    "index_add": (lambda x, i, s: x.index_add(0, i, s), [randn(6, 4), integers(6, 9), randn(9, 4)]),
    "index_select": (lambda x, i: x.index_select(0, i), [randn(6, 4), integers(6, 9)]),
    "index": (lambda x, i: (x[i], x[:, i], x[..., None, i]), [randn(6, 6), integers(6, 9)]),
    "index_put": (
        lambda x, i, s: x.clone().index_put((i,), s, accumulate=True),
        [randn(6, 4), integers(6, 9), randn(9, 4)],
    ),
    "index_copy_fill": (
        lambda x, i: (x.index_fill(0, i, 0.5), x.index_copy(0, i, x[:1])),
        [randn(5, 6), integers(5, 1)],
    ),
    "topk_sort": (lambda x: (*x.topk(3, -1), *x.sort(-1), x.argsort(-1), *x.kthvalue(2, 1)), [randn(6, 9)]),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), [randn(6, 9), torch.arange(4).expand(6, 4), randn(6, 4)]),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), [randn(6, 9), integers(9, 6, 4), randn(6, 4)]),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
        [randn(6, 9), integers(9, 6, 4), randn(6, 4)],
    ),
    "gather": (lambda x, i: (x.gather(1, i), torch.take_along_dim(x, i, 1)), [randn(6, 9), integers(9, 6, 4)]),
    "nonzero": (lambda x: (x.gt(0).nonzero(), *torch.where(x > 0), x[x > 0], x.masked_select(x > 0)), [randn(6, 9)]),
    "bincount_histc_one_hot": (
        lambda i: (torch.bincount(i, minlength=7), torch.histc(i.float(), 5, 0, 4), F.one_hot(i, 5), F.one_hot(i)),
        [integers(5, 20)],
    ),
    "unique": (lambda i: torch.unique(i, return_counts=True, return_inverse=True), [integers(5, 20)]),
    "where": (lambda a, b: (torch.where(a > 0, a, b), torch.where(a > 0, a, 0.0)), [randn(6, 9), randn(6, 9)]),
    "masked_softmax": (
        lambda x: x.masked_fill(x > 0, float("-inf")).softmax(-1).nan_to_num(),
        [randn(6, 9)],
    ),
    "repeat_interleave": (
        lambda x, i: (x.repeat_interleave(2, 1), x.repeat_interleave(i, 0)),
        [randn(5, 6), integers(3, 5)],
    ),
    "searchsorted": (lambda a, b: torch.searchsorted(a.sort(-1).values, b), [randn(5, 6), randn(5, 6)]),
    "slice_scatter": (
        lambda x: (x.slice_scatter(x[:2] * 2, 0, 1, 3), x.select_scatter(x[0], 0, 1), x.diagonal_scatter(x[:, 0])),
        [randn(5, 5)],
    ),
    "cat_stack": (lambda a, b: (torch.cat([a, b], 1), torch.stack([a, b])), [randn(6, 9), randn(6, 9)]),
    "views": (several_views, [randn(6, 9)]),
    "rearranged": (lambda x: (x.flip(0), x.roll(2, 1), x.repeat(2, 1), x.tril(), x.triu(1)), [randn(6, 9)]),
    "pad_sequence": (lambda a, b: nn.utils.rnn.pad_sequence([a, b], batch_first=True), [randn(5, 6), randn(3, 6)]),
}
ELEMENTWISE: dict[str, Case] = {
    name: (getattr(torch, name), [randn(6, 9).abs() * 0.5 + 0.1])
    for name in ("exp", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "erf", "square", "lgamma")
} | {
    name: (getattr(F, name), [randn(6, 8)])
    for name in ("relu", "gelu", "silu", "mish", "elu", "leaky_relu", "softplus", "hardswish", "logsigmoid", "glu")
}
ELEMENTWISE |= {
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), [randn(6, 9)]),
    "prelu": (F.prelu, [randn(6, 9), randn(1)]),
    "binary": (
        lambda a, b: (torch.maximum(a, b), torch.fmod(a, b), torch.atan2(a, b), a.abs().pow(b), a.clamp(-0.5, 0.5)),
        [randn(5, 6), randn(5, 6)],
    ),
    "ternary": (
        lambda a, b, c: (torch.addcmul(a, b, c), torch.addcdiv(a, b, c.abs() + 1), torch.lerp(a, b, 0.3)),
        [randn(5, 6), randn(5, 6), randn(5, 6)],
    ),
    "dtypes": (lambda a, b: (a + b, a.double(), a.half(), a.long(), a.bool()), [randn(5, 6), bf16(5, 6)]),
    "integer": (lambda a, b: (a // (b + 1), a % (b + 1), a & b, a ^ b, a << 1), [integers(9, 5, 6), integers(7, 5, 6)]),
    "boolean": (lambda a, b: ((a > 0) & (b > 0), ~(a > 0), (a > 0).any(), a == b, a.isnan()), [randn(5, 6), randn(6)]),
    "foreach": (lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2), [randn(5, 6), randn(5, 6)]),
    "rotary_complex": (
        lambda a, b: torch.view_as_real(torch.view_as_complex(a) * torch.view_as_complex(b)),
        [randn(5, 6, 2), randn(5, 6, 2)],
    ),
    "polar": (lambda a, b: torch.view_as_real(torch.polar(a.abs(), b) * torch.complex(a, b).conj()), [randn(5, 6)] * 2),
    "fft": (lambda x: (torch.fft.rfft(x).abs(), torch.fft.irfft(torch.fft.rfft(x))), [randn(5, 6)]),
    "stft": (
        lambda x: torch.stft(x, 8, window=torch.hann_window(8).to(x.device), return_complex=True).abs(),
        [randn(2, 64)],
    ),
}
REDUCTION: dict[str, Case] = {
    "whole": (
        lambda x: [getattr(x, n)() for n in ("sum", "mean", "amax", "var", "std", "norm", "prod")],
        [randn(6, 9)],
    ),
    "by_dim": (
        lambda x: (x.sum(1), x.mean(0, keepdim=True), x.var(1), x.norm(dim=1), *x.max(1), *x.median(0), x.argmax(1)),
        [randn(6, 9)],
    ),
    "cumulative": (
        lambda x: (x.cumsum(-1), x.cumprod(-1), *x.cummax(-1), x.logcumsumexp(-1), torch.diff(x)),
        [randn(6, 9)],
    ),
    "counts": (lambda x: ((x > 0).sum(), torch.count_nonzero(x, 1), *torch.var_mean(x, 1)), [randn(5, 6)]),
    "distance": (lambda a, b: (torch.cdist(a, b), F.cosine_similarity(a[:4], b)), [randn(5, 3), randn(4, 3)]),
}
LOSS: dict[str, Case] = {
    "cross_entropy": (
        lambda x, t: F.cross_entropy(x, t, ignore_index=1, label_smoothing=0.1),
        [randn(6, 9), integers(9, 6)],
    ),
    "nll": (lambda x, t: F.nll_loss(x.log_softmax(1), t), [randn(6, 9), integers(9, 6)]),
    "binary_cross_entropy": (
        lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
        [randn(6, 9), randn(9, 6).t()],
    ),
    "regression": (
        lambda x, t: [loss(x, t) for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)],
        [randn(6, 9), randn(9, 6).t()],
    ),
    "kl_div": (
        lambda x, t: F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean"),
        [randn(6, 9), randn(9, 6).t()],
    ),
    "ctc": (
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (12, 12), (4, 4)),
        [randn(12, 2, 6), integers(5, 2, 4) + 1],
    ),
}
CASES: dict[str, Case] = {
    f"{group}-{name}": case
    for group, cases in {
        "linear": LINEAR,
        "attention": ATTENTION,
        "convolution": CONVOLUTION,
        "normalisation": NORMALISATION,
        "indexing": INDEXING,
        "elementwise": ELEMENTWISE,
        "reduction": REDUCTION,
        "loss": LOSS,
    }.items()
    for name, case in cases.items()
}
