"""How is a diffusion transformer trained in two stages, whole or by adapters? Encode once, then learn the velocity.

What text encoder and autoencoder make is saved; the transformer trains on it by flow matching. lora=True: adapters.
"""

import tempfile

import tiny
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from peft import LoraConfig
from transformers import T5Config, T5EncoderModel

import headrace

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 4, "num_heads": 4}
VAE = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
DIT = {"num_layers": 6, "attention_head_dim": 16, "num_attention_heads": 4, "axes_dims_rope": (4, 6, 6)}
CAPTIONS = [text[:32] for text in tiny.docstrings(4).values()]


def encode(encoder, vae, directory):
    for index, caption in enumerate(CAPTIONS):
        with torch.no_grad():
            embedding = encoder(tiny.tokenizer()(caption, return_tensors="pt").input_ids).last_hidden_state
            latents = vae.encode(torch.rand(1, 3, 1, 16, 16)).latent_dist.mode()[:, :, 0]  # of an image of 16 by 16
        patches = torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).mT
        torch.save((embedding.cpu(), patches.cpu()), f"{directory}/{index}.pt")


def train(model, directory):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for index in range(len(CAPTIONS)):
        embedding, latents = torch.load(f"{directory}/{index}.pt")
        noise, time = torch.randn_like(latents), torch.rand(1)
        text = {"encoder_hidden_states": embedding, "img_shapes": [[(1, 4, 4)]]}
        velocity = model(hidden_states=torch.lerp(latents, noise, time), timestep=time, **text).sample
        torch.nn.functional.mse_loss(velocity, (noise - latents).to(velocity.device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def main(device=None, device_memory="2MiB", offload=True, lora=False):
    torch.manual_seed(0)
    encoder, vae = T5EncoderModel(T5Config(vocab_size=258, **T5)).eval(), AutoencoderKLQwenImage(**VAE).eval()
    model = QwenImageTransformer2DModel(in_channels=16, out_channels=4, joint_attention_dim=32, **DIT)
    model.enable_gradient_checkpointing()
    if lora:
        model.requires_grad_(False).add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    parts = (encoder, vae, model) if offload else ()
    handles = [headrace.offload(part, device=device, device_memory=device_memory) for part in parts]
    with tempfile.TemporaryDirectory() as directory:
        encode(encoder, vae, directory)
        train(model, directory)
    return model, handles


if __name__ == "__main__":
    for handle in main(**tiny.options(device_memory="2MiB"))[1]:  # of text encoder, autoencoder and transformer
        print(handle.report())
