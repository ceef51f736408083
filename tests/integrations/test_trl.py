"""Do TRL's trainers give the same bits, where they hold a second model, write completions, or keep what they found?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import headrace
from headrace.integrations.transformers import micro_batches_together
from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer
from tests.support.compare import Outcome, assert_same
from tests.support.held import weight_bytes

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of each other's deprecated names

IDS = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
PAIRS = [
    {"prompt": f"{n} + 1 =", "chosen": f" {n + 1}.", "rejected": f" not {n + 7}, not at all."} for n in range(90, 98)
]


class Run:
    """One run of a trainer: plain, or with models that are offloaded."""

    def __init__(
        self,
        device: torch.device,
        directory: Path,
        *,
        offloads: bool,
        together: bool = False,
        shared: headrace.SharedBudget | None = None,
        activations: Any = False,
        **settings: Any,
    ) -> None:
        self.device, self.directory, self.offloads, self.together = device, directory, offloads, together
        self.shared, self.activations, self.settings = shared, activations, settings
        self.handles: list[headrace.Offloaded] = []

    def llama(self, kind: Any = LlamaForCausalLM, **settings: Any) -> Any:
        torch.manual_seed(0)
        return self.offload(kind(LlamaConfig(**IDS, **SIZES, **settings)))

    def offload(self, model: Any) -> Any:
        if self.shared is not None:
            with self.shared:
                self.handles.append(headrace.offload(model, device=self.device))
        elif self.offloads:
            memory = weight_bytes(model) * 2 // 3
            handle = headrace.offload(model, device=self.device, device_memory=memory, activations=self.activations)
            self.handles.append(handle)
        return model

    def train(
        self, trainer: Any, config: Any, model: Any, rows: list[Any], settings: dict[str, Any], **more: Any
    ) -> Any:
        common = {"max_steps": 3, "learning_rate": 1e-3, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
        batch = {"per_device_train_batch_size": 2, "use_cpu": self.device.type == "cpu", "bf16": False}
        made = trainer(
            model,
            args=config(str(self.directory), **{**common, **batch, **settings, **self.settings}),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=byte_tokenizer(longest=64),
            **more,
        )
        if self.offloads and getattr(made, "ref_model", None) is not None and "ref_model" not in more:
            self.offload(made.ref_model.cpu())  # one that the trainer has loaded
        if self.together:
            micro_batches_together(made, self.handles[0])
        made.train()
        return made


def dpo(run: Run, **settings: Any) -> Outcome:
    model, reference = run.llama(), run.llama().requires_grad_(False)
    run.train(DPOTrainer, DPOConfig, model, PAIRS, settings, ref_model=reference)
    outcome = Outcome().read(model)
    outcome.parameters |= {f"reference.{name}": tensor for name, tensor in Outcome().read(reference).parameters.items()}
    return outcome


def synchronised(run: Run) -> Outcome:
    """The reference model follows the one that trains."""
    return dpo(run, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)


def precomputed(run: Run) -> Outcome:
    """What the reference says is computed before; the model itself is it."""
    model = run.llama()
    run.train(DPOTrainer, DPOConfig, model, PAIRS, {"precompute_ref_log_probs": True})
    return Outcome().read(model)


def rewarded(run: Run) -> Outcome:
    model = run.llama(LlamaForSequenceClassification, num_labels=1)
    run.train(RewardTrainer, RewardConfig, model, PAIRS, {})
    return Outcome().read(model)


def grpo(run: Run) -> Outcome:
    """Completions are used twice, and a reference model, which the trainer loads, holds the other back."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**IDS, **SIZES)).save_pretrained(run.directory / "model")
    model = run.offload(LlamaForCausalLM.from_pretrained(run.directory / "model"))
    settings = {"num_generations": 4, "max_completion_length": 6, "num_iterations": 2, "beta": 0.1}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion))) for completion in completions]

    run.train(GRPOTrainer, GRPOConfig, model, PAIRS, settings | {"per_device_train_batch_size": 4}, reward_funcs=reward)
    return Outcome().read(model)


@pytest.mark.extended
@pytest.mark.parametrize("script", [dpo, synchronised, precomputed, rewarded, grpo])
def test_trainer(script: Callable[[Run], Outcome], trainer_device: torch.device, tmp_path: Path) -> None:
    plain = script(Run(trainer_device, tmp_path, offloads=False))
    run = Run(trainer_device, tmp_path, offloads=True)
    assert_same(script(run), plain)
    assert len(run.handles) == 1 if script in (precomputed, rewarded) else 2
    for handle in run.handles:
        stats = handle.stats()
        assert stats.onload_bytes > stats.device_budget_bytes
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        handle.remove()


@pytest.mark.extended
def test_one_budget_for_grpo(trainer_device: torch.device, tmp_path: Path) -> None:
    """The policy generates and is trained, and the reference computes, in the room for 1.2 of one of them."""
    plain = grpo(Run(trainer_device, tmp_path, offloads=False))
    nbytes = weight_bytes(LlamaForCausalLM(LlamaConfig(**IDS, **SIZES)))
    shared = headrace.budget(device_memory=nbytes * 6 // 5)
    run = Run(trainer_device, tmp_path, offloads=True, shared=shared)
    assert_same(grpo(run), plain)
    assert nbytes < shared.device_peak_bytes <= nbytes * 6 // 5
    policy, reference = (handle.stats() for handle in run.handles)
    assert policy.onload_bytes < 5 * nbytes  # in 3 steps, with 7 tokens generated twice
    assert reference.onload_bytes < 2 * nbytes


def tuned(run: Run) -> Outcome:
    model = run.llama()
    rows = [{"text": pair["prompt"] + pair["chosen"]} for pair in PAIRS]
    run.train(SFTTrainer, SFTConfig, model, rows, {"gradient_accumulation_steps": 2})
    return Outcome().read(model)


def accumulating(run: Run) -> Outcome:
    return dpo(run, gradient_accumulation_steps=2)


@pytest.mark.extended
@pytest.mark.parametrize("script", [tuned, accumulating])
def test_micro_batches_together(script: Callable[[Run], Outcome], trainer_device: torch.device, tmp_path: Path) -> None:
    """DPO's trainer takes hooks of the model off for its reference, and puts the same on again."""
    plain = script(Run(trainer_device, tmp_path, offloads=False))
    run = Run(trainer_device, tmp_path, offloads=True, together=True)
    assert_same(script(run), plain)
    stats = run.handles[0].stats()
    assert (stats.micro_batches_together, stats.micro_batches_in_turn) == (3 * 2, 0)
    for handle in run.handles:
        handle.remove()


CHECKPOINTING: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": False},
    **{
        name: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": name == "reentrant"}}
        for name in ("reentrant", "non-reentrant")
    },
    "chosen": {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "context_fn": headrace.checkpoint_contexts},
    },
}


@pytest.mark.extended
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("script", [tuned, dpo, grpo])
def test_activations(
    script: Callable[[Run], Outcome], checkpointing: str, trainer_device: torch.device, tmp_path: Path
) -> None:
    """Each layer's leave, in each forward that trains. A reference saves nothing, nor does what writes completions."""
    settings = CHECKPOINTING[checkpointing]
    plain = script(Run(trainer_device, tmp_path, offloads=False, **settings))
    least_bytes = 4096
    activations = {"min_bytes": least_bytes, "all_leave": True}
    run = Run(trainer_device, tmp_path, offloads=True, activations=activations, **settings)
    assert_same(script(run), plain)
    for handle in run.handles:
        assert handle.activations is not None
        stats = handle.activations.stats()
        forwards = stats.planned_forwards + stats.similar_forwards + stats.recorded_forwards
        trains = handle is run.handles[0]
        assert forwards == (trains and (6 if script is tuned else 3))
        assert stats.offload_bytes >= forwards * SIZES["num_hidden_layers"] * least_bytes
        assert 0.8 * stats.offload_bytes <= stats.onload_bytes <= stats.offload_bytes
        assert stats.host_held_bytes == 0
        handle.remove()
