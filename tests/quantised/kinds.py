"""Models with weights that are not plain tensors: those of torchao, bitsandbytes, GGUF, and packed ones in buffers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import Adapted

WIDTH = 128
LAYERS = 8


@dataclass(frozen=True)
class Kind:
    """One way to quantise. `wrap` makes a quantised layer of a plain one, or quantises it in place."""

    wrap: Callable[[nn.Linear], nn.Module]
    dtype: torch.dtype = torch.float32
    trains: bool = True  # gradients go through it, on a CPU
    bits: float = 8  # of a weight, at most, with scales and all
    emulated: bool = True  # the library takes a device that it does not know

    def model(self) -> nn.Sequential:
        """Frozen, with adapters: LAYERS times a quantised layer of WIDTH."""
        torch.manual_seed(0)
        return nn.Sequential(*(self.adapted() for _ in range(LAYERS)))

    def adapted(self) -> Adapted:
        """A quantised layer with a LoRA adapter beside it."""
        base = self.wrap(nn.Linear(WIDTH, WIDTH).to(self.dtype))
        return Adapted(base, WIDTH, rank=4, activation=nn.functional.gelu, dtype=self.dtype)

    def batch(self, device: torch.device) -> Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1)).to(self.dtype).to(device)


def torchao(make_config: Callable[[Any], Any]) -> Callable[[nn.Linear], nn.Module]:
    def wrap(layer: nn.Linear) -> nn.Module:
        import torchao.quantization

        torchao.quantization.quantize_(layer, make_config(torchao.quantization))
        return layer

    return wrap


def torchao_int4(layer: nn.Linear) -> nn.Module:
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    layer.weight = nn.Parameter(Int4OpaqueTensor.from_hp(layer.weight.detach(), [1, 32]), requires_grad=False)
    return layer


class NF4Linear(nn.Module):
    """As torchtune has it."""

    def __init__(self, layer: nn.Linear) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

        super().__init__()
        self.linear = linear_nf4
        self.weight = nn.Parameter(to_nf4(layer.weight.detach(), 32, 2), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x, self.weight) + self.bias


def bitsandbytes_4bit(quant_type: str) -> Callable[[nn.Linear], nn.Module]:
    def wrap(layer: nn.Linear) -> nn.Module:
        import bitsandbytes

        quantised = bitsandbytes.nn.Linear4bit(
            WIDTH, WIDTH, compute_dtype=layer.weight.dtype, quant_type=quant_type, compress_statistics=True
        )
        quantised.load_state_dict(layer.state_dict())
        return quantised.to("cpu")  # which quantises

    return wrap


def bitsandbytes_8bit(layer: nn.Linear) -> nn.Module:
    import bitsandbytes

    quantised = bitsandbytes.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False)
    quantised.load_state_dict(layer.state_dict())
    return quantised.to("cpu")


def gguf(kind: str) -> Callable[[nn.Linear], nn.Module]:
    def wrap(layer: nn.Linear) -> nn.Module:
        import gguf
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

        quant_type = gguf.GGMLQuantizationType[kind]
        packed = torch.from_numpy(gguf.quants.quantize(layer.weight.detach().numpy(), quant_type).copy())
        quantised = GGUFLinear(WIDTH, WIDTH, bias=True, compute_dtype=torch.float32)
        quantised.weight = GGUFParameter(packed, requires_grad=False, quant_type=quant_type)
        quantised.bias = layer.bias
        return quantised

    return wrap


class PackedLinear(nn.Module):
    """Four-bit weights in buffers, eight to an int32, with scales and zeros for each group of rows, as GPTQ's."""

    def __init__(self, layer: nn.Linear, group: int = 32, repeat: int = 8) -> None:
        super().__init__()
        weight = layer.weight.detach().float().repeat(1, repeat).t()  # large enough to be worth a trip
        grouped = weight.reshape(-1, group, weight.shape[1])
        low, high = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        scales = (high - low).clamp_min(1e-8) / 15
        values = ((grouped - low) / scales).round().clamp(0, 15).to(torch.int32).reshape(weight.shape)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (values.reshape(-1, 8, weight.shape[1]) << shifts[:, None]).sum(1, dtype=torch.int32)
        self.group, self.repeat = group, repeat
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", low)
        self.register_buffer("shifts", shifts, persistent=False)
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        values = (self.qweight[:, None, :] >> self.shifts[:, None]) & 15
        values = values.reshape(-1, self.group, values.shape[-1])
        weight = (values * self.scales + self.zeros).reshape(-1, values.shape[-1])
        return x.repeat(1, self.repeat) @ weight / self.repeat + self.bias


KINDS = {
    "torchao int8": Kind(torchao(lambda q: q.Int8WeightOnlyConfig()), torch.bfloat16, bits=10),
    "torchao int8 dynamic": Kind(torchao(lambda q: q.Int8DynamicActivationInt8WeightConfig()), torch.bfloat16, bits=10),
    "torchao float8": Kind(torchao(lambda q: q.Float8WeightOnlyConfig()), torch.bfloat16, bits=10),
    "torchao intx": Kind(torchao(lambda q: q.IntxWeightOnlyConfig()), torch.bfloat16, bits=10),
    "torchao int4": Kind(torchao_int4, torch.bfloat16, trains=False, bits=6, emulated=False),
    "torchao nf4": Kind(NF4Linear, torch.bfloat16, bits=6),
    "bitsandbytes nf4": Kind(bitsandbytes_4bit("nf4"), bits=9),  # with two tables of 1 KiB
    "bitsandbytes fp4": Kind(bitsandbytes_4bit("fp4"), bits=9),
    "bitsandbytes int8": Kind(bitsandbytes_8bit, bits=10, emulated=False),
    "gguf q8": Kind(gguf("Q8_0"), bits=10),
    "gguf q4": Kind(gguf("Q4_0"), bits=6),
}
