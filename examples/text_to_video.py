"""How does a diffusers pipeline make a video with less device memory than its models? Offload each of them.

`WanPipeline.from_pretrained(...)` gives the same components, with weights that mean something.
"""

import tiny
import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import T5Config, T5EncoderModel

import millrace

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


def main(device=None, device_memory="600KiB", offload=True):
    pipe = pipeline()
    models = [pipe.text_encoder.eval(), pipe.transformer.eval(), pipe.vae.eval()]
    handles = [millrace.offload(model, device=device, device_memory=device_memory) for model in models if offload]
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
    return video, handles


if __name__ == "__main__":
    _, handles = main(**tiny.options(device_memory="600KiB"))
    for handle in handles:  # of the text encoder, the transformer and the decoder
        print(handle.report())
