"""Do experts that come one by one give the bits of a plain run, and are no others brought?"""

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.integrations.moe import use_experts_implementation
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import headrace
from headrace.planning import Keeping, passes_through
from headrace.runtime.autograd import without_overrides
from headrace.weights.model.experts import slice_parts
from headrace.weights.movement.block import Block
from headrace.weights.passes import expert_dispatch
from headrace.weights.passes.expert_stand_ins import standing_in
from tests.support.compare import assert_same, assert_same_weights, on_cpu, same
from tests.support.held import weight_bytes
from tests.support.loops import adamw, steps, trained_parameters

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 8, "shared_expert_intermediate_size": 32, **ROUTED},
    "Qwen3Moe": {"num_experts": 8, "head_dim": 8, **ROUTED},
    "Qwen3Next": {"num_experts": 8, "shared_expert_intermediate_size": 16, "head_dim": 8, **ROUTED, **LINEAR},
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
    "DeepseekV2": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        **ROUTED,
        **LATENT,
    },
    "DeepseekV3": {
        "n_routed_experts": 8,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        **ROUTED,
        **LATENT,
    },
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "Glm4Moe": {"n_routed_experts": 8, "first_k_dense_replace": 1, "head_dim": 8, "n_group": 1, **ROUTED},
    "Ernie4_5_Moe": {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "Phimoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "Jamba": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_dt_rank": 4,
    },
}
EXPERTS = 8  # of a layer
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
PROMPT = torch.tensor([[5, 9, 33, 2, 60, 41, 17], [8, 8, 3, 50, 12, 7, 29]])


def model_of(name: str, implementation: str = "eager") -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **ARCHITECTURES[name]})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(implementation)
    return model


def experts_in(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def expert_bytes(model: nn.Module) -> int:
    """Of one, without the gaps between its parts."""
    return sum(parameter[0].nbytes for parameter in experts_in(model)[0].parameters())


def budget(model: nn.Module, slots: int) -> int:
    """Room for all other weights, buffers, and so many experts."""
    experts = [parameter for module in experts_in(model) for parameter in module.parameters()]
    beside = weight_bytes(model) - weight_bytes(nn.ParameterList(experts))
    one = weight_bytes(nn.ParameterList(parameter[:1] for parameter in experts_in(model)[0].parameters()))
    return beside + sum(buffer.nbytes for buffer in model.buffers()) + slots * one + 2**11  # and gaps


def answer(model: Any, prompt: torch.Tensor, *, tokens: int = 32, sampled: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=sampled,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [tensor.cpu() for tensor in (found.sequences, *found.logits)]


def slot_counts(model: Any) -> Iterator[int]:
    """One and a half times what a token needs; a quarter of all; all but one."""
    routed = 2 if model.config.model_type in ("mixtral", "phimoe") else 3
    total = sum(module.num_experts for module in experts_in(model))
    yield from (routed * 3 // 2, total // 4, total - 1)


@pytest.mark.core(name="Qwen3Moe", implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_generation_has_the_bits_of_a_plain_run(name: str, implementation: str) -> None:
    """Each architecture with each number of slots, and each implementation with each, in turn."""
    model = model_of(name, implementation)
    wanted = {sampled: answer(model, PROMPT, sampled=sampled) for sampled in (False, True)}
    turn = list(ARCHITECTURES).index(name) + IMPLEMENTATIONS.index(implementation)
    limit = budget(model, list(slot_counts(model))[turn % 3])
    with headrace.offload(model, device="cpu", device_memory=limit) as handle:
        for sampled, plain in wanted.items():
            assert_same(answer(model, PROMPT, sampled=sampled), plain)
        stats = handle.stats()
        assert 0 < stats.expert_loads <= stats.expert_uses
        assert stats.expert_bytes == stats.expert_loads * expert_bytes(model)
        assert stats.device_peak_bytes <= limit


@pytest.mark.core(implementation="grouped_mm", name="GptOss")
@pytest.mark.emu("random:0", "lazy")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_on_an_accelerator(compute_device: torch.device, name: str, implementation: str) -> None:
    model = model_of(name, implementation)
    plain = copy.deepcopy(model).to(compute_device)
    prompt = PROMPT.to(compute_device)
    wanted = answer(plain, prompt, tokens=6)
    del plain
    for slots in slot_counts(model):
        limit = budget(model, slots)
        with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
            assert_same(answer(model, prompt, tokens=6), wanted)
            assert handle.stats().expert_bytes == handle.stats().expert_loads * expert_bytes(model) > 0
            assert handle.stats().device_peak_bytes <= limit


class Bank:
    """What is loaded for calls, where `Keeping` says who makes room."""

    def __init__(self, slots: int, layers: int) -> None:
        self.slots = slots
        self.held: set[tuple[int, int]] = set()
        self.keeping = Keeping(slots, layers)
        self.loads = 0

    def call(self, layer: int, experts: list[int], *, loop: bool) -> None:
        """A call that uses these, in turns of half of the slots (a loop) or all (rounds) where they are too many."""
        passing = passes_through(len(experts), EXPERTS)
        turn = len(experts) if len(experts) <= self.slots else self.slots // 2 if loop else self.slots
        last: list[tuple[int, int]] = []
        for first in range(0, len(experts), turn):
            wanted = [(layer, expert) for expert in experts[first : first + turn]]
            kept = {*wanted, *(last if loop else ())}
            for key in wanted:
                if key not in self.held:
                    self.loads += 1
                    if len(self.held) == self.slots:
                        gone = self.keeping.victim(layer, kept)
                        assert gone is not None
                        self.held.remove(gone)
                        self.keeping.went(gone)
                    self.held.add(key)
                    self.keeping.came(key, passing=passing)
            self.keeping.used(layer, [expert for _, expert in wanted], passing=passing)
            last = wanted


@pytest.mark.extended
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_crosses_the_link_is_what_is_used_and_not_there(implementation: str) -> None:
    model = model_of("Qwen3Moe", implementation)
    model.get_input_embeddings().scale_grad_by_freq = True  # so that the table travels whole, and stays
    routing: list[tuple[int, list[int]]] = []
    hooks = [
        module.register_forward_pre_hook(
            lambda _module, args, layer=layer: routing.append((layer, args[1].unique().tolist()))
        )
        for layer, module in enumerate(experts_in(model))
    ]
    answer(model, PROMPT)
    for hook in hooks:
        hook.remove()
    for slots in (4, 6, 12, 23):
        count = max(1, slots // 8)
        banks = [Bank(slots // count, -(-3 // count)) for _ in range(count)]
        before = 0
        with headrace.offload(model, device="cpu", device_memory=budget(model, slots)) as handle:
            for _ in range(2):
                answer(model, PROMPT)
                for layer, experts in routing:
                    banks[layer % count].call(layer, experts, loop=implementation != "grouped_mm")
                stats = handle.stats()
                loads = sum(bank.loads for bank in banks)
                assert stats.expert_loads == loads - before
                assert stats.expert_uses == sum(len(experts) for _, experts in routing)
                assert stats.expert_bytes == stats.expert_loads * expert_bytes(model)
                before = loads
                handle.reset_stats()
            answer(model, PROMPT)
            assert handle.stats().onload_bytes == handle.stats().expert_bytes  # all other weights stay


@pytest.mark.core(name="GptOss", tier="disk")
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("tier", ["disk", "checkpoint"])
@pytest.mark.parametrize("name", ["Qwen3Moe", "GptOss"])
def test_from_disk(compute_device: torch.device, tmp_path: Path, name: str, tier: str) -> None:
    model = model_of(name, "grouped_mm")
    plain = copy.deepcopy(model).to(compute_device)
    prompt = PROMPT.to(compute_device)
    wanted = answer(plain, prompt, tokens=8)
    whole_bytes = sum(parameter.nbytes for parameter in experts_in(model)[0].parameters())
    options: dict[str, Any] = {"device": compute_device, "device_memory": budget(model, 6)}
    if tier == "disk":
        options |= {"disk": tmp_path / "disk", "host_memory": weight_bytes(model) // 2}
    else:
        save_file(model.state_dict(), tmp_path / "model.safetensors")
        buffers = {key: value.clone() for key, value in model.named_buffers()}
        model = model.to("meta")
        for key, value in buffers.items():
            owner = model.get_submodule(key.rpartition(".")[0])
            owner._buffers[key.rpartition(".")[2]] = value
        options |= {"checkpoint": tmp_path / "model.safetensors", "host_memory": 2 * weight_bytes(plain) // 3}
    with headrace.offload(model, **options) as handle:
        on_disk = [block for block in handle._blocks() if block.experts is not None and block.is_fetched]
        assert on_disk
        assert_same(answer(model, prompt, tokens=8), wanted)
        handle.reset_stats()
        calls = 4
        answer(model, PROMPT[:1, :1].to(compute_device), tokens=calls)
        stats = handle.stats()
        assert 0 < stats.fetch_bytes < calls * len(on_disk) * whole_bytes  # 3 of 8, in whole pages
        assert stats.expert_bytes == stats.expert_loads * expert_bytes(plain)


def test_homes_that_change_are_brought_anew(compute_device: torch.device) -> None:
    model = model_of("Qwen3Moe", "grouped_mm")
    plain = copy.deepcopy(model).to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 20)):
        for turn in range(3):
            assert all(
                map(
                    same,
                    answer(model, PROMPT.to(compute_device), tokens=3),
                    answer(plain, PROMPT.to(compute_device), tokens=3),
                )
            ), turn
            for one in (model, plain):
                module = experts_in(one)[1]
                with torch.no_grad():
                    module.down_proj.mul_(1.5)
                    if turn == 1:
                        module.gate_up_proj.data = module.gate_up_proj.data.flip(0).contiguous()


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_inference_mode_and_autocast(compute_device: torch.device, implementation: str) -> None:
    model = model_of("Qwen3Moe", implementation)
    plain = copy.deepcopy(model).to(compute_device)
    ids = PROMPT.to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 7)) as handle:
        for _ in range(2):
            with torch.inference_mode():
                assert same(model(ids).logits.cpu(), plain(ids).logits.cpu())
            with torch.no_grad(), torch.autocast(compute_device.type, dtype=torch.bfloat16):
                assert same(model(ids).logits.cpu(), plain(ids).logits.cpu())
        assert handle.stats().expert_loads > 0


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which PEFT asks for
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adapters_on_attention(compute_device: torch.device, implementation: str) -> None:
    def adapted() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(model_of("Qwen3Moe", implementation), config)

    model, plain = adapted(), adapted().to(compute_device)
    ids = PROMPT.to(compute_device)
    wanted = train(plain, ids, checkpointed=False)
    limit = budget(model, 10)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        assert_same(train(model, ids, checkpointed=False), wanted)
        stats = handle.stats()
        assert stats.expert_bytes == stats.expert_loads * expert_bytes(model) > 0
        assert stats.device_peak_bytes <= limit


def test_an_exception_within_a_call(compute_device: torch.device) -> None:
    model = model_of("Qwen3Moe")
    wanted = answer(copy.deepcopy(model).to(compute_device), PROMPT.to(compute_device), tokens=3)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 6)) as handle:
        for number in (1, 5):
            experts = experts_in(model)[1]
            own, calls = experts.act_fn, []

            def failing(hidden: torch.Tensor, own: Any = own, calls: Any = calls, number: int = number) -> torch.Tensor:
                calls.append(hidden)
                if len(calls) == number:
                    raise KeyError("within")
                return own(hidden)

            experts.__dict__["act_fn"] = failing
            with pytest.raises(KeyError, match="within"):
                model(PROMPT.to(compute_device))
            del experts.__dict__["act_fn"]
            assert experts.num_experts == 8
            assert type(experts.gate_up_proj) is type(experts.down_proj) is type(model.lm_head.weight)
            assert_same(answer(model, PROMPT.to(compute_device), tokens=3), wanted)
        assert handle.stats().device_peak_bytes <= budget(model, 6)


def test_all_weights_have_room(compute_device: torch.device) -> None:
    model = model_of("Qwen3Moe")
    with headrace.offload(model, device=compute_device, device_memory="16MiB") as handle:
        answer(model, PROMPT.to(compute_device), tokens=2)
        assert handle.stats().expert_uses == 0
        assert handle.stats().onload_bytes > weight_bytes(nn.ParameterList(experts_in(model)[0].parameters()))


def test_training_takes_whole_blocks(compute_device: torch.device) -> None:
    model = model_of("Qwen3Moe")
    plain = copy.deepcopy(model).to(compute_device)
    limit = budget(model, 17)
    ids = PROMPT.to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle:
        answer(model, ids, tokens=2)
        assert handle.stats().expert_uses > 0
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
        for _ in range(3):
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                one(ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert handle.stats().device_peak_bytes <= limit
        assert_same_weights(model, plain)
        wanted = answer(plain, ids, tokens=4)
        assert_same(answer(model, ids, tokens=4), wanted)


@use_experts_implementation(has_gate=False, is_concatenated=False)
class Keeps(nn.Module):
    """Experts that do more with their weights than to take one by its number, keep what they take, or write to it."""

    def __init__(self, config: Any, how: str) -> None:
        super().__init__()
        self.num_experts, self.how, self.kept = 8, how, []
        self.up_proj = nn.Parameter(torch.randn(8, 64, 64))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.how == "all":
            return hidden + self.up_proj.sum()
        found = torch.zeros_like(hidden)
        self.kept = []
        for expert in index.unique():
            weight = self.up_proj[expert]
            if self.how == "keep":
                self.kept.append(weight)
            if self.how == "write":
                weight.mul_(1.5)
            found += hidden @ weight * (index == expert).any(1, keepdim=True) * weights.sum()
        return found


class Scaled(MixtralExperts):
    """What a buffer has for each expert is counted by their numbers, too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", 1 + torch.arange(config.num_local_experts) / 8)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, index, weights * self.scale[index])


@pytest.mark.parametrize("how", ["subclass", "patched", "without torch functions"])
def test_other_forwards_compute_as_they_do_alone(compute_device: torch.device, how: str) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(hidden_size=32, intermediate_size=64, num_local_experts=8)
    config._experts_implementation = "eager"
    layers = [(Scaled if how == "subclass" else MixtralExperts)(config) for _ in range(4)]
    for parameter in nn.ModuleList(layers).parameters():
        nn.init.normal_(parameter, std=0.1)
    plain = copy.deepcopy(layers)
    hidden, index = torch.randn(3, 32), torch.tensor([[1, 5], [2, 7], [5, 6]])
    weights = torch.rand(3, 2)
    expected = [one(hidden, index, weights) for one in plain]
    model = nn.ModuleList(layers)
    limit = sum(parameter.nbytes for parameter in layers[0].parameters()) * 3 // 2
    with headrace.offload(model, device=compute_device, device_memory=limit), torch.no_grad():
        for one, alone, wanted in zip(layers, plain, expected, strict=True):
            if how == "patched":
                own = one.forward
                one.forward = lambda h, i, w, own=own: own(h, i, w) * (1 + i.sum())
                wanted = alone(hidden, index, weights) * (1 + index.sum())
            inputs = (hidden.to(compute_device), index.to(compute_device), weights.to(compute_device))
            switched_off = how == "without torch functions"
            with without_overrides() if switched_off else contextlib.nullcontext():
                given = one(*inputs)
            assert same(given.cpu(), wanted)


@pytest.mark.core(slots=[2, 7])
@pytest.mark.parametrize("slots", [2, 4, 7])
@pytest.mark.parametrize("how", ["all", "keep", "write"])
def test_modules_that_do_something_else(compute_device: torch.device, how: str, slots: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = transformers.PretrainedConfig(experts_implementation="eager", num_experts_per_tok=2)
            self.first, self.experts, self.last = nn.Linear(64, 64), Keeps(config, how), nn.Linear(64, 64)

        def forward(self, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            hidden = self.first(hidden)
            return self.last(self.experts(hidden, index, torch.ones_like(index, dtype=hidden.dtype)))

    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model).to(compute_device)
    hidden = torch.randn(6, 64).to(compute_device)
    index = torch.tensor([[0, 1], [2, 3], [4, 7], [1, 2], [0, 3], [6, 7]]).to(compute_device)
    limit = sum(parameter.nbytes for parameter in model.experts.parameters()) + 2 * (64 * 65 * 4) + slots * 1024
    with headrace.offload(model, device=compute_device, device_memory=limit) as handle, torch.no_grad():
        for tokens in (6, 1, 6, 2):
            assert same(model(hidden[:tokens], index[:tokens]).cpu(), plain(hidden[:tokens], index[:tokens]).cpu())
            kept = [expert.clone() for expert in plain.experts.kept]
            assert_same([one.cpu() for one in model.experts.kept], [one.cpu() for one in kept])
        assert_same(model.parameters(), (parameter.cpu() for parameter in plain.parameters()))
        assert handle.stats().device_peak_bytes <= limit


def test_parts_of_an_expert_do_not_overlap() -> None:
    model = model_of("GptOss")
    with headrace.offload(model, device="cpu", device_memory=budget(model, 6)) as handle:
        block = next(block for block in handle._blocks() if block.experts is not None)
        parts, nbytes = slice_parts([param.layout for param in block.params])
        ends = [part.offset + part.nbytes for part in parts]
        assert all(end <= part.offset for end, part in zip(ends, parts[1:], strict=False))
        assert ends[-1] <= nbytes == block.experts.slice_bytes


def train(model: Any, ids: torch.Tensor, *, checkpointed: bool) -> list[torch.Tensor]:
    """Losses of three steps of what is trained, and the gradients of the last one."""
    model.train()
    model.zero_grad()
    if checkpointed:
        model.activation_checkpointing_enable()
    trained = trained_parameters(model)
    batches = [ids.roll(step) for step in range(3)]
    losses = steps(
        model, adamw(trained), batches, lambda model, batch: model(batch, labels=ids).loss, keep_gradients=True
    )
    return [*losses, *on_cpu(parameter.grad for parameter in trained)]


@pytest.mark.core(name="GptOss", implementation="grouped_mm", checkpointed=True)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "GptOss"])
def test_gradients_beside_frozen_experts(
    compute_device: torch.device, name: str, implementation: str, checkpointed: bool
) -> None:
    model = model_of(name, implementation)
    for module in experts_in(model):
        module.requires_grad_(False)
    plain = copy.deepcopy(model).to(compute_device)
    wanted = train(plain, PROMPT.to(compute_device), checkpointed=checkpointed)
    for slots in (6, 8, 12, 23):
        offloaded = copy.deepcopy(model) if slots < 23 else model
        limit = budget(offloaded, slots)
        with headrace.offload(offloaded, device=compute_device, device_memory=limit) as handle:
            try:
                found = train(offloaded, PROMPT.to(compute_device), checkpointed=checkpointed)
            except headrace.BudgetError:
                assert implementation == "grouped_mm"
                assert slots < 8  # then all of a block's have to be there
                continue
            stats = handle.stats()
            assert all(map(same, found, wanted)), slots
            assert stats.expert_bytes == stats.expert_loads * expert_bytes(model)
            assert stats.expert_loads > 0 or slots < 8
            assert stats.device_peak_bytes <= limit
        with torch.no_grad():
            assert_same_weights(offloaded, plain)


def checkpointed_model(name: str, implementation: str, how: str) -> Any:
    """A model with experts that are trained, frozen, or adapted. "dropped": trained, and nothing keeps their output."""
    model = model_of(name, implementation)
    model.train().activation_checkpointing_enable({"use_reentrant": False})
    if how == "adapted":
        model.enable_input_require_grads()
        weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        config = peft.LoraConfig(r=1, target_modules=["q_proj"], target_parameters=weights, init_lora_weights=False)
        with warnings.catch_warnings(action="ignore"):  # PEFT uses an older name of transformers'
            return peft.get_peft_model(model, config)
    for module in experts_in(model):
        module.requires_grad_(how != "frozen")
        if how == "dropped":
            module.register_forward_hook(lambda _module, args, output: args[0] + (output.tanh() - args[0]).detach())
    return model


@pytest.mark.core(name="GptOss", implementation="grouped_mm", is_there_in="backward", how="frozen")
@pytest.mark.parametrize("how", ["trained", "dropped", "frozen", "adapted"])
@pytest.mark.parametrize("is_there_in", ["forward", "backward", "both"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_a_checkpoint_takes_experts_as_its_call_did(
    monkeypatch: pytest.MonkeyPatch, name: str, implementation: str, is_there_in: str, how: str
) -> None:
    """A plan has loaded all experts of a layer, which stay in the forward alone, in the backward alone, or in both."""
    model = checkpointed_model(name, implementation, how)
    plain, ids, stays, phases = copy.deepcopy(model), PROMPT[:1, :2], list[Block](), ["forward"]
    is_free: Any = Block.is_free
    monkeypatch.setattr(Block, "is_free", property(lambda block: block not in stays and is_free.fget(block)))
    with headrace.offload(model, device="cpu", device_memory=budget(model, 16)) as handle:
        *_, last = (block for block in handle.settled_blocks("a look") if block.experts is not None)

        def before_the_layer(*_: object) -> None:
            stays.clear()
            handle._executor.slices.give_way()
            handle._executor.evict(last)
            if is_there_in in (phases[-1], "both"):
                handle._executor.prefetch(last)
                assert last.buffer is not None
                stays.append(last)

        (mlp,) = (module for name, module in model.named_modules() if name.endswith("layers.2.mlp"))
        mlp.register_forward_pre_hook(before_the_layer)
        loss = model(ids, labels=ids).loss
        phases.append("backward")
        loss.backward()
        stays.clear()
        wanted = plain(ids, labels=ids).loss
        wanted.backward()
        assert_same(loss, wanted)
        assert_same(*([parameter.grad for parameter in trained_parameters(one)] for one in (model, plain)))
        assert handle.stats().expert_loads > 0


@pytest.mark.core(slots=5)
@pytest.mark.parametrize("slots", [5, 6, 7])
def test_a_checkpoint_computes_again_with_experts_in_the_slots_of_forward(slots: int) -> None:
    """Though others had been in them in between: its routing is drawn at random, and differs from step to step."""
    model = model_of("Phimoe", "grouped_mm")
    for module in experts_in(model):
        module.requires_grad_(False)
    plain = copy.deepcopy(model)
    torch.manual_seed(5)
    wanted = train(plain, PROMPT[:1, :2], checkpointed=True)
    with headrace.offload(model, device="cpu", device_memory=budget(model, slots)) as handle:
        torch.manual_seed(5)
        assert_same(train(model, PROMPT[:1, :2], checkpointed=True), wanted)
        assert handle.stats().expert_loads > 0


def test_backward_brings_what_is_not_there_any_more() -> None:
    model = model_of("Qwen3Moe", "grouped_mm")
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_()
    hit: list[int] = []
    for module in experts_in(model):
        module.register_forward_pre_hook(lambda _module, args: hit.append(len(args[1].unique())))
    with headrace.offload(model, device="cpu", device_memory=budget(model, 8)) as handle:  # one bank for all layers
        model(PROMPT[:1], labels=PROMPT[:1]).loss.backward()
        forth_and_back = sum(hit) + sum(hit[:-1])  # the last layer's are still there
        assert forth_and_back - handle.stats().expert_loads <= 2 * 8  # and maybe some of the layer before
        assert handle.stats().expert_loads <= forth_and_back
        assert handle.stats().expert_bytes == handle.stats().expert_loads * expert_bytes(model)


def test_experts_that_change_between_forward_and_backward(compute_device: torch.device) -> None:
    model = model_of("Qwen3Moe")
    model.requires_grad_(False)
    model.model.embed_tokens.requires_grad_()
    ids = PROMPT.to(compute_device)
    with headrace.offload(model, device=compute_device, device_memory=budget(model, 9)):
        loss = model(ids, labels=ids).loss
        with torch.no_grad():
            experts_in(model)[1].down_proj.mul_(2)
        with pytest.raises(headrace.WeightChangedError, match=r"layers.1.mlp.experts.down_proj"):
            loss.backward()


@pytest.mark.core(implementation="grouped_mm", disk=True, casts=True)
@pytest.mark.filterwarnings("ignore:the filesystem of disk=")  # where it refuses direct I/O
@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(compute_device: torch.device, tmp_path: Path, implementation: str, casts: bool, disk: bool) -> None:
    model = model_of("GptOss", implementation)
    plain = copy.deepcopy(model).to(compute_device, torch.bfloat16)
    ids = PROMPT.to(compute_device)
    options: dict[str, Any] = {"param_dtype": {"*": torch.bfloat16} if disk else torch.bfloat16} if casts else {}
    if not casts:
        model = model.to(torch.bfloat16)
    if disk:
        options |= {"disk": tmp_path, "host_memory": weight_bytes(plain) // 2}
    limit = budget(plain, 9)
    with headrace.offload(model, device=compute_device, device_memory=limit, **options) as handle:
        for _ in range(2):
            assert_same(answer(model, ids, tokens=5), answer(plain, ids, tokens=5))
        stats = handle.stats()
        assert stats.expert_bytes == stats.expert_loads * expert_bytes(plain) > 0
        assert stats.device_peak_bytes <= limit
        assert (stats.fetch_bytes > 0) == disk


@pytest.mark.core(implementation="grouped_mm", checkpointed=True, targets=[["down_proj"]])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # which PEFT asks for
@pytest.mark.parametrize("checkpointed", [False, True], ids=["saved", "checkpointed"])
@pytest.mark.parametrize("targets", [["gate_up_proj", "down_proj"], ["down_proj"]], ids=["both", "one"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_adapters_on_experts(
    compute_device: torch.device, implementation: str, targets: list[str], checkpointed: bool
) -> None:
    """PEFT's target_parameters: three steps, and no slice of an expert that is not wanted."""

    def adapted() -> Any:
        torch.manual_seed(0)
        weights = [f"mlp.experts.{target}" for target in targets]
        config = peft.LoraConfig(r=1, target_modules=["q_proj"], target_parameters=weights, init_lora_weights=False)
        return peft.get_peft_model(model_of("Qwen3Moe", implementation), config)

    model, plain = adapted(), adapted().to(compute_device)
    ids = PROMPT[:1, :2].to(compute_device)  # with which most experts are not wanted
    hit: list[int] = []
    for module in experts_in(plain):
        module.register_forward_pre_hook(lambda _module, args: hit.append(len(args[1].unique())))
    wanted = train(plain, ids, checkpointed=checkpointed)
    uses = sum(hit)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    for slots in (2, 4, 23):
        offloaded = adapted()
        limit = budget(model_of("Qwen3Moe"), slots) + 2 * trained
        limit = min(limit, weight_bytes(model) - 1)
        with headrace.offload(offloaded, device=compute_device, device_memory=limit) as handle:
            assert_same(train(offloaded, ids, checkpointed=checkpointed), wanted, f"{slots} slots")
            stats = handle.stats()
            assert stats.expert_uses == uses < 3 * len(experts_in(model)) * 8 * (2 if checkpointed else 1)
            assert stats.expert_bytes == stats.expert_loads * expert_bytes(model) > 0
            assert stats.expert_loads <= uses
            assert stats.device_peak_bytes <= limit
            with offloaded.disable_adapter(), torch.no_grad():
                given = offloaded(ids).logits.cpu()
            offloaded.eval()
            with torch.no_grad():
                also = offloaded(ids).logits.cpu()
        plain.eval()
        with torch.no_grad():
            assert same(also, plain(ids).logits.cpu())
            with plain.disable_adapter():
                assert same(given, plain(ids).logits.cpu())
        plain.train()


@pytest.mark.core(implementation="grouped_mm")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_an_interrupt_amid_giving_weights_back(
    compute_device: torch.device, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C where a module's weights are about to take the place of their stand-ins again."""
    model = model_of("Qwen3Moe", implementation)
    wanted = answer(copy.deepcopy(model).to(compute_device), PROMPT.to(compute_device), tokens=3)

    begun = []

    @contextlib.contextmanager
    def struck(*args: Any) -> Iterator[None]:
        begun.append(standing_in(*args))  # and not ended when it is let go of
        begun[-1].__enter__()
        yield
        raise KeyboardInterrupt

    with headrace.offload(model, device=compute_device, device_memory=budget(model, 9)):
        with monkeypatch.context() as patch:
            patch.setattr(expert_dispatch, "standing_in", struck)
            with torch.no_grad(), pytest.raises(KeyboardInterrupt):
                model(PROMPT.to(compute_device))
        for module in experts_in(model):
            assert module.num_experts == 8
            assert type(module.gate_up_proj) is type(module.down_proj) is type(model.lm_head.weight)
        with pytest.raises(ValueError, match="not in list"):
            begun[0].__exit__(None, None, None)  # it was ended already
        assert_same(answer(model, PROMPT.to(compute_device), tokens=3), wanted)
