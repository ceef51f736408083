"""Do checkpoints of other programs load, and do these load ours? Weights and optimizer state, to the last bit."""

from pathlib import Path
from typing import Any

import accelerate
import lightning
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import headrace
import headrace.optim
from tests.checkpoint.runs import Net, run
from tests.support.compare import assert_same
from tests.support.loops import causal_loss, steps

CONFIG = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


def llama(*, tied: bool = True, seed: int = 0) -> transformers.LlamaForCausalLM:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, tie_word_embeddings=tied))


def train(model: nn.Module, optimizer: Any, count: int = 2) -> None:
    steps(model, optimizer, [torch.arange(step, step + 24).view(2, 12) for step in range(count)], causal_loss)


def values(model: nn.Module, optimizer: Any = None) -> list[torch.Tensor]:
    state = {} if optimizer is None else optimizer.state_dict()["state"]
    entries = [value for number in sorted(state) for _, value in sorted(state[number].items())]
    return [value.detach().clone() for value in [*model.state_dict().values(), *entries]]


def goes_on(path: Path, wanted: list[torch.Tensor], groups: Any = None) -> Any:
    """Loads into an offloaded model whose optimizer is ours; the values are these."""
    model = llama(seed=1)
    handle = headrace.offload(model, device="cpu", device_memory="200KiB")
    optimizer = headrace.optim.AdamW(model.parameters() if groups is None else groups(model), lr=0.5)
    extra = headrace.load(path, model, optimizer)
    assert_same(values(model, optimizer), wanted)
    handle.remove()
    return extra


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [None, 20000])
def test_transformers_reads_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, shard_bytes: int | None
) -> None:
    if shard_bytes is not None:
        monkeypatch.setattr("headrace.checkpoint.files.SHARD_BYTES", shard_bytes)
    model = llama(tied=tied)
    handle = headrace.offload(model, device="cpu", device_memory="200KiB")
    optimizer = headrace.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    headrace.save(tmp_path / "step-2", model, optimizer)
    shards = len(list((tmp_path / "step-2").glob("model*.safetensors")))
    assert shards == 1 if shard_bytes is None else shards > 2
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "step-2")
    assert type(again) is transformers.LlamaForCausalLM
    assert_same(values(again), values(model))
    stock = torch.optim.AdamW(again.parameters(), lr=7.0, fused=True)
    stock.load_state_dict(torch.load(tmp_path / "step-2" / "optimizer.pt", mmap=True, weights_only=True))
    assert stock.param_groups[0]["lr"] == 1e-2
    stock.param_groups[0]["fused"] = True  # whose arithmetic ours has
    train(again, stock)
    train(model, optimizer)
    handle.remove()
    assert_same(values(again, stock), values(model, optimizer))


def test_a_mixture_of_experts_is_read_by_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**CONFIG, num_local_experts=4))
    headrace.save(tmp_path / "moe", model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert_same(values(again), values(model))


def test_the_trainers_checkpoint(tmp_path: Path) -> None:
    model = llama()
    data = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(16)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        decayed = set(trainer.get_decay_parameter_names(model))
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if name in decayed]},
            {"params": [p for name, p in named if name not in decayed]},
        ]

    optimizer = trainer.optimizer
    extra = goes_on(tmp_path / "checkpoint-2", values(model, getattr(optimizer, "optimizer", optimizer)), groups)
    assert extra["trainer_state"]["global_step"] == 2
    assert extra["scheduler"]["last_epoch"] == 2


@pytest.mark.parametrize("safe", [True, False])
def test_accelerates_state(tmp_path: Path, safe: bool) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    train(model, optimizer)
    accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
    goes_on(tmp_path / "state", values(model, optimizer.optimizer))


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_checkpoint(tmp_path: Path) -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, torch.utils.data.DataLoader([torch.arange(12) for _ in range(4)], batch_size=2))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    extra = goes_on(tmp_path / "last.ckpt", values(module.model, trainer.optimizers[0]))
    assert extra["global_step"] == 2


def test_files_of_torch_and_of_safetensors(tmp_path: Path) -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 2}, tmp_path / "both.pt")
    model.save_pretrained(tmp_path / "pretrained")
    assert goes_on(tmp_path / "both.pt", values(model, optimizer)) == {"step": 2}
    for name in ("weights.pt", "pretrained", "pretrained/model.safetensors"):
        again = llama(seed=2)
        headrace.load(tmp_path / name, again)
        assert_same(values(again), values(model))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("place", ["host", "disk"])
def test_distributed_checkpoints(tmp_path: Path, place: str, named: bool) -> None:
    with run("host", tmp_path / "a") as one:
        one.step(2)
        model, optimizer = one.model.state_dict(), one.optimizer.state_dict()
        if named:
            model, optimizer = get_state_dict(one.model, one.optimizer)
        writer = FileSystemWriter(tmp_path / "dcp", thread_count=2)  # with one it wants more of an accelerator
        dcp.save({"model": model, "optim": optimizer}, storage_writer=writer, no_dist=True)
        wanted = one.values()
    with run(place, tmp_path / "b", seed=1) as other:
        other.step()
        other.optimizer.param_groups[0]["lr"] = 5.0
        headrace.load(tmp_path / "dcp", other.model, other.optimizer)
        assert_same(other.values(), wanted)
        assert other.optimizer.param_groups[0]["lr"] == 1e-2
        other.step()
    with pytest.raises(headrace.CheckpointError, match="does not hold all weights"):
        headrace.load(tmp_path / "dcp", torch.nn.LSTM(2, 2))


def test_a_tensor_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    """Which accelerate writes for two models, and diffusers for two dtypes."""
    for number, name in enumerate(("model", "model_1")):
        save_file({"weight": torch.full((2, 2), number), "bias": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        headrace.CheckpointError, match=r"model\.safetensors and in .*model_1\.safetensors; give the path"
    ):
        headrace.load(tmp_path, nn.Linear(2, 2))


class _Counting(nn.Linear):
    seen = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_modules_keep_besides_is_loaded(tmp_path: Path, prefix: str) -> None:
    model, again = (nn.Sequential(_Counting(2, 2)) for _ in range(2))
    model[0].seen = 7
    torch.save({"state_dict": model.state_dict(prefix=prefix)}, tmp_path / "last.ckpt")
    headrace.load(tmp_path / "last.ckpt", again)
    assert again[0].seen == 7


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_modules_keep_besides_is_refused_in_distributed_checkpoints(tmp_path: Path) -> None:
    model = _Counting(2, 2)
    dcp.save({"model": model.state_dict()}, storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    with pytest.raises(headrace.CheckpointError, match=r"'model._extra_state.seen', which a module keeps besides"):
        headrace.load(tmp_path, model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")
def test_settings_of_flat_distributed_checkpoints(tmp_path: Path) -> None:
    model, again = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, other = (torch.optim.AdamW(one.parameters(), lr=0.5) for one in (model, again))
    model(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    parts = zip(("model", "optimizer"), get_state_dict(model, optimizer, options=flat), strict=True)
    dcp.save(dict(parts), storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    headrace.load(tmp_path, again, other)
    assert other.param_groups[0]["lr"] == 0.125
    assert_same(values(model, optimizer), values(again, other))


def test_what_is_returned_outlives_the_file(tmp_path: Path) -> None:
    model, path = nn.Linear(2, 2), tmp_path / "last.ckpt"
    torch.save({"state_dict": model.state_dict(), "average": torch.ones(5000)}, path)
    extra = headrace.load(path, model)
    torch.save({"state_dict": model.state_dict(), "average": torch.zeros(5000)}, path)
    assert torch.equal(extra["average"], torch.ones(5000))


def test_views_with_other_signs_are_refused(tmp_path: Path) -> None:
    model = nn.Module()
    model.register_buffer("buffer", torch.ones(2, dtype=torch.complex64))
    torch.save({"buffer": model.buffer.conj()}, tmp_path / "one.pt")
    with pytest.raises(headrace.CheckpointError, match=r"resolve_conj\(\)"):
        headrace.load(tmp_path / "one.pt", model)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*TypedStorage")
def test_a_state_dict_of_copies_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    dcp.save(model.state_dict(), storage_writer=FileSystemWriter(tmp_path, thread_count=2), no_dist=True)
    model._register_state_dict_hook(lambda _, state, *__: {name: value.clone() for name, value in state.items()})
    with pytest.raises(headrace.CheckpointError, match="none of its parameters and buffers"):
        headrace.load(tmp_path, model)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_state_with_gaps_between_its_elements(tmp_path: Path, tier: str) -> None:
    model = nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 100)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    wide = torch.randn(100, 200)
    state["state"][0]["exp_avg"] = wide[:, :100]
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "both.pt")
    place = {"tier": tier, "disk": tmp_path / "tier"} if tier == "disk" else {}
    again = headrace.optim.AdamW(model.parameters(), **place)
    headrace.load(tmp_path / "both.pt", model, again)
    assert torch.equal(again.state[model.weight]["exp_avg"], wide[:, :100])


def test_what_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    model = Net(torch.float32)
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.pt").write_text("no checkpoint")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights": Net}, tmp_path / "code.pt")
    for name, what in (
        ("empty", "has no safetensors file and no pytorch_model.bin"),
        ("note.pt", "no sound file of torch.save"),
        ("list.pt", "holds a list, and no state_dict"),
        ("code.pt", "cannot be read safely"),
        ("nowhere", "does not exist"),
    ):
        with pytest.raises(headrace.CheckpointError, match=what):
            headrace.load(tmp_path / name, model)
