"""How does a recipe of Megatron-Bridge run? As with its run_recipe.py: `--recipe NAME namespace.setting=value ...`"""

import argparse
import dataclasses

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from headrace.compat.megatron import ConfigContainer, CPUOffloadConfig, OptimizerConfig, apply, override

NAMES = {"moe_ffn_hidden_size": "moe_intermediate_size", "num_moe_experts": "num_experts", "kv_channels": "head_dim"}
NAMES |= {"moe_router_topk": "num_experts_per_tok", "num_query_groups": "num_key_value_heads"}  # of transformers
SMALL = ("num_layers=4", "hidden_size=32", "moe_ffn_hidden_size=16", "num_moe_experts=8", "vocab_size=64")
LEAVES = ["model.cpu_offloading=True", "model.cpu_offloading_num_layers=3", "model.cpu_offloading_weights=True"]


@dataclasses.dataclass(kw_only=True)
class Qwen3MoE(CPUOffloadConfig):
    hidden_size: int = 2048
    moe_ffn_hidden_size: int = 768
    num_moe_experts: int = 128
    moe_router_topk: int = 8
    num_attention_heads: int = 32
    num_query_groups: int = 4
    kv_channels: int = 128
    vocab_size: int = 151_936

    def provide(self):
        sizes = {NAMES.get(name, name): getattr(self, name) for name in Qwen3MoE.__annotations__}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=self.num_layers, **sizes)).bfloat16()
        if self.recompute_granularity is not None:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model


def qwen3_30b_a3b_pretrain_config():
    return ConfigContainer(model=Qwen3MoE(num_layers=48), optimizer=OptimizerConfig(lr=3e-4, weight_decay=0.1))


def main(device=None, offload=True, recipe="qwen3_30b_a3b_pretrain_config", overrides=None):
    torch.manual_seed(0)
    config, device = globals()[recipe](), device or torch.accelerator.current_accelerator(check_available=True) or "cpu"
    override(config, [f"model.{size}" for size in SMALL] + LEAVES * offload if overrides is None else overrides)
    model = config.model.provide().to("cpu" if config.model.cpu_offloading_weights else device)
    handle, optimizer = apply(config.model, model), config.optimizer.optimizer_for(model)
    for step in range(config.train.train_iters):
        for rows in torch.randint(64, (config.train.global_batch_size, 32)).split(config.train.micro_batch_size):
            loss = model(input_ids=rows.to(device), labels=rows.to(device)).loss
            (loss * len(rows) / config.train.global_batch_size).backward()
            print(f"iteration {step + 1}/{config.train.train_iters}: loss {loss.item()!r}")
        optimizer.step()
        optimizer.zero_grad()
    return model, handle


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", required=True)
    parser.add_argument("overrides", nargs="*")
    main(**vars(parser.parse_args()))
