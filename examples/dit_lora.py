"""How are LoRA adapters of a diffusion transformer trained by flow matching? Add them, offload, and write the loop."""

import tiny
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig

import headrace

DEVICE_MEMORY = "1MiB"  # for 3.4 MiB of weights
SIZES = {"num_layers": 4, "num_single_layers": 4, "attention_head_dim": 16, "num_attention_heads": 4}


def transformer():
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16, **SIZES, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6)
    )
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return model


def main(device=None, device_memory=DEVICE_MEMORY, offload=True):
    model = transformer()
    handle = headrace.offload(model, device=device, device_memory=device_memory) if offload else None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(4):
        latents, noise = torch.randn(2, 16, 16), torch.randn(2, 16, 16)  # of two images: 16 patches, 16 channels
        time = torch.rand(2)
        noisy = torch.lerp(latents, noise, time.view(-1, 1, 1))
        velocity = model(
            hidden_states=noisy,
            timestep=time,
            encoder_hidden_states=torch.randn(2, 8, 32),  # of their captions
            pooled_projections=torch.randn(2, 32),
            img_ids=torch.zeros(16, 3),
            txt_ids=torch.zeros(8, 3),
        ).sample
        loss = torch.nn.functional.mse_loss(velocity, (noise - latents).to(velocity.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


if __name__ == "__main__":
    _, handle = main(**tiny.options(device_memory=DEVICE_MEMORY))
    print(handle.report())
