"""How does a diffusers pipeline make a video with less device memory than its models? Offload all of them as one.

`WanPipeline.from_pretrained(...)` gives the same components, with weights that mean something.
"""

import tiny
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5Config, T5EncoderModel

import headrace

DEVICE_MEMORY = "600KiB"  # for 1.8 MiB of weights
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
WAN = {"num_attention_heads": 4, "attention_head_dim": 16, "ffn_dim": 128, "num_layers": 6, "freq_dim": 32}
VAE = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}


def pipeline():
    torch.manual_seed(0)
    return WanPipeline(
        tiny.tokenizer(),
        T5EncoderModel(T5Config(vocab_size=258, **T5)),
        AutoencoderKLWan(**VAE, temperal_downsample=[False, True, True]),
        FlowMatchEulerDiscreteScheduler(shift=3.0),
        WanTransformer3DModel(in_channels=16, out_channels=16, text_dim=32, rope_max_seq_len=32, **WAN),
    )


def main(device=None, device_memory=DEVICE_MEMORY, offload=True):
    pipe = pipeline()
    for model in (pipe.text_encoder, pipe.transformer, pipe.vae):
        model.eval()
    handle = headrace.offload_pipeline(pipe, device=device, device_memory=device_memory) if offload else None
    pipe.set_progress_bar_config(disable=True)
    video = pipe(
        "water turns the wheel",
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    return video, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
