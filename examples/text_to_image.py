"""How does a diffusers pipeline draw an image with less device memory than its models? Offload all of them as one.

`FluxPipeline.from_pretrained(...)` gives the same components, with weights that mean something.
"""

import tiny
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

import headrace

DEVICE_MEMORY = "600KiB"  # for 4.4 MiB of weights
CLIP = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
FLUX = {"num_layers": 4, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4}
VAE = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4}


def pipeline():
    torch.manual_seed(0)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    return FluxPipeline(
        FlowMatchEulerDiscreteScheduler(),
        AutoencoderKL(**VAE, **blocks, shift_factor=0.0, use_quant_conv=False, use_post_quant_conv=False),
        CLIPTextModel(CLIPTextConfig(vocab_size=258, max_position_embeddings=tiny.LONGEST, eos_token_id=256, **CLIP)),
        tiny.tokenizer(),
        T5EncoderModel(T5Config(vocab_size=258, **T5)),
        tiny.tokenizer(),
        FluxTransformer2DModel(
            in_channels=16, **FLUX, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6)
        ),
    )


def main(device=None, device_memory=DEVICE_MEMORY, offload=True):
    pipe = pipeline()
    for model in (pipe.text_encoder, pipe.text_encoder_2, pipe.transformer, pipe.vae):
        model.eval()
    handle = headrace.offload_pipeline(pipe, device=device, device_memory=device_memory) if offload else None
    generator = torch.Generator().manual_seed(0)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(
        "a lighthouse in the fog", height=32, width=32, num_inference_steps=3, generator=generator, output_type="pt"
    ).images
    return image, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
