"""Does a model that fits in no memory come from its directory, and write the text that the plain model writes?"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import headrace
from headrace.cli.main import main
from headrace.errors import CheckpointError
from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer
from tests.support.compare import assert_same_weights

IDS = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=64,
            **IDS,
        )
    ).bfloat16(),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=8, n_head=4, n_positions=64, **IDS)),
}


@pytest.fixture(params=list(MODELS))
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of about 700 KB in several shards, with its tokenizer; GPT-2 has tied embeddings."""
    torch.manual_seed(0)
    path = tmp_path / "model"
    MODELS[request.param]().save_pretrained(path, max_shard_size="200KB")
    byte_tokenizer(longest=64).save_pretrained(path)
    return path


def budgets(directory: Path) -> dict[str, int | Path]:
    """Room for a third of the weights on the device, for a quarter on the host, and a disk."""
    total = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    return {"device_memory": total // 3, "host_memory": total // 4, "disk": directory.parent / "spill"}


@pytest.mark.core(directory="llama")
def test_it_writes_what_the_plain_model_writes(directory: Path, compute_device: torch.device) -> None:
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(compute_device)
    prompt = torch.arange(5, 15).view(1, -1)
    expected = plain.generate(prompt.to(compute_device), max_new_tokens=12, do_sample=False)
    files = {file: file.read_bytes() for file in directory.iterdir()}
    limits = budgets(directory)
    model, handle = headrace.from_pretrained(directory, trainable=False, device=compute_device, **limits)
    with handle:
        found = model.generate(prompt.to(compute_device), max_new_tokens=12, do_sample=False)
        assert torch.equal(found, expected)
        stats = handle.stats()
        assert 0 < stats.device_peak_bytes <= limits["device_memory"]
        assert stats.host_peak_bytes <= limits["host_memory"]
        assert stats.disk_bytes == stats.spill_bytes == 0  # weights are read where the checkpoint has them
        assert stats.fetch_bytes > sum(parameter.nbytes for parameter in model.parameters())
        assert not any(parameter.requires_grad for parameter in model.parameters())
        assert_same_weights(model, plain)
    assert {file: file.read_bytes() for file in directory.iterdir()} == files


@pytest.mark.core(directory="llama")
def test_it_trains(directory: Path) -> None:
    """One step, against the plain model's gradients; and the checkpoint stays as it was."""
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    files = {file: file.read_bytes() for file in directory.glob("*.safetensors")}
    batch = torch.arange(5, 35).view(2, -1)
    plain(input_ids=batch, labels=batch).loss.backward()
    model, handle = headrace.from_pretrained(directory, device="cpu", **budgets(directory))
    with handle:
        model(input_ids=batch, labels=batch).loss.backward()
        for (name, home), weight in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert torch.equal(home.grad, weight[1].grad), name
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        torch.optim.SGD(plain.parameters(), lr=0.1).step()
        model(input_ids=batch, labels=batch)
        assert_same_weights(model, plain)
    assert {file: file.read_bytes() for file in directory.glob("*.safetensors")} == files


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config.json; give the directory of a transformers model"):
        headrace.from_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="hf download openai/gpt2 --local-dir gpt2; then give 'gpt2'"):
        headrace.from_pretrained("openai/gpt2")
    config = LlamaConfig(architectures=["LlamaForEverything"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    with pytest.raises(CheckpointError, match=r"names the architectures \['LlamaForEverything'\], none of which"):
        headrace.from_pretrained(tmp_path)


@pytest.mark.core(directory="llama")
def test_the_command_line_writes_text(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = budgets(directory)
    line = ["generate", "--model", str(directory), "--prompt", "one two", "--max-new-tokens", "8", "--device", "cpu"]
    line += [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    tokenizer = byte_tokenizer(longest=64)
    prompt = tokenizer("one two", return_tensors="pt")
    expected = plain.generate(**prompt, max_new_tokens=8, do_sample=False)[0]
    assert main(line) == 0
    written = capsys.readouterr()
    assert written.out.strip() == tokenizer.decode(expected, skip_special_tokens=True).strip()
    assert "of weights at most" in written.err
    assert "B/s came from disk" in written.err
    assert list(limits["disk"].iterdir()) == []  # type: ignore[union-attr]


def test_without_a_disk_none_is_spoken_of(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--model", str(directory), "--prompt", "one two", "--device", "cpu"]
    assert main([*line, "--max-new-tokens", "1"]) == 0
    told = capsys.readouterr().err
    assert "1 token in " in told
    assert "disk" not in told
    assert main([*line, "--host-memory", "1KiB"]) == 2
    told = capsys.readouterr().err
    assert "host_memory leaves 0 B for that; raise it by" in told
    assert "disk" not in told


@pytest.mark.extended
def test_several_prompts_are_written_on_together(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = budgets(directory)
    line = ["generate", "--model", str(directory), "--max-new-tokens", "6", "--device", "cpu"]
    line += [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    line += ["--prompt", "one two", "--prompt", "three"]
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(["one two", "three"], return_tensors="pt", padding=True)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    expected = plain.generate(**inputs, **settings)
    assert main(line) == 0
    wanted = tokenizer.batch_decode(expected, skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == "\n\n".join(wanted).strip()
    assert main([*line, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    new = expected[:, inputs["input_ids"].shape[1] :]
    assert told["texts"] == tokenizer.batch_decode(new, skip_special_tokens=True)
    assert sum(told["tokens"]) == pytest.approx(told["tokens_per_second"] * told["seconds"])
    assert 0 < told["first_token_seconds"] < told["seconds"]
    assert told["fetch_bytes"] > 0
    assert told["onload_bytes"] > told["device_peak_bytes"] > 0


@pytest.mark.core(tier="host", directory="llama")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_keys_and_values_rest_in_a_tier(tier: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same text. Each of 7 more tokens brought those of all tokens before it."""
    limits = budgets(directory)
    line = ["generate", "--model", str(directory), "--prompt", "one two", "--max-new-tokens", "8", "--device", "cpu"]
    line += [f"--device-memory={limits['device_memory']}", f"--disk={limits['disk']}", "--json"]
    assert main(line) == 0
    plain = json.loads(capsys.readouterr().out)
    assert main([*line, "--cache-tier", tier]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["texts"] == plain["texts"]
    assert told["tokens"] == [8]
    token_bytes = 8 * 2 * 64 * (2 if "llama" in (directory / "config.json").read_text() else 4)
    prompt = byte_tokenizer(longest=64)("one two")["input_ids"]
    assert told["cache_onload_bytes"] >= token_bytes * sum(len(prompt) + new for new in range(7))
    assert told["device_peak_bytes"] <= limits["device_memory"]
    held = told["cache_peak_bytes"] if tier == "host" else told["disk_bytes"] - plain["disk_bytes"]
    assert held >= token_bytes * (len(prompt) + 7)
    assert (told["cache_peak_bytes"] > 0) == (tier == "host")
    assert plain["cache_onload_bytes"] == 0
    line[-2:] = ["--cache-tier", "disk"]
    assert main(line) == 2
    assert "--cache-tier disk needs a directory" in capsys.readouterr().err


def test_a_chat_has_the_models_template(tmp_path: Path, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "chat"
    shutil.copytree(directory, copied)
    line = ["generate", "--model", str(copied), "--prompt", "one", "--max-new-tokens", "1", "--device", "cpu"]
    assert main([*line, "--chat"]) == 2
    assert "no chat template; leave --chat out" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} says {{ m.content }}.{% endfor %} answer:"
    tokenizer.save_pretrained(copied)
    assert main([*line, "--chat"]) == 0
    assert capsys.readouterr().out.startswith("user says one. answer:")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('needs a system message') }}", "cannot be used: needs a system message; leave --chat out"),
        ("{% for m in messages %}", "the chat template cannot be used: "),
        ("{# nothing #}", "the prompt has no tokens"),
    ],
)
def test_a_chat_template_that_cannot_be_used(
    tmp_path: Path, directory: Path, template: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = tmp_path / "chat"
    shutil.copytree(directory, copied)
    tokenizer = AutoTokenizer.from_pretrained(copied)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(copied)
    assert main(["generate", "--model", str(copied), "--chat", "--prompt", "one", "--device", "cpu"]) == 2
    assert says in capsys.readouterr().err


GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            lambda: GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=8, **GPT2)),
            "than the model's 8 positions",
        ),
        (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=100, **GPT2)), "the model embeds tokens below 100"),
        (lambda: GPT2Model(GPT2Config(vocab_size=300, **GPT2)), "a GPT2Model writes no text"),
    ],
)
def test_models_that_cannot_go_on_from_the_prompt(
    tmp_path: Path, model: Callable[[], PreTrainedModel], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model().save_pretrained(tmp_path)
    byte_tokenizer(longest=64).save_pretrained(tmp_path)
    line = ["generate", "--model", str(tmp_path), "--prompt", "one", "--device", "cpu"]
    assert main([*line, "--max-new-tokens", "7"]) == 2
    assert says in capsys.readouterr().err
    if "positions" in says:
        assert main([*line, "--max-new-tokens", "6"]) == 0


def test_a_model_without_keys_and_values_has_no_cache_to_offload(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    MambaForCausalLM(MambaConfig(hidden_size=32, num_hidden_layers=1, **IDS)).save_pretrained(tmp_path)
    byte_tokenizer(longest=64).save_pretrained(tmp_path)
    line = ["generate", "--model", str(tmp_path), "--prompt", "one", "--device", "cpu", "--cache-tier", "host"]
    assert main(line) == 2
    assert "a MambaForCausalLM keeps no keys and values; leave --cache-tier out" in capsys.readouterr().err


def test_text_behind_an_encoder_is_counted_from_its_beginning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = T5Config(vocab_size=300, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0)
    config.eos_token_id = None
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    byte_tokenizer(longest=64).save_pretrained(tmp_path)
    line = ["generate", "--model", str(tmp_path), "--prompt", "one", "--device", "cpu", "--max-new-tokens", "5"]
    assert main([*line, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["tokens"] == [5]
    assert main([*line, "--json", "--cache-tier", "host"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["texts"] == plain["texts"]
    assert told["cache_onload_bytes"] >= 2 * 2 * 32 * 4 * (1 + 2 + 3 + 4)  # the decoder's own


@pytest.mark.core(directory="llama")
def test_sampling_follows_the_seed(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["generate", "--model", str(directory), "--prompt", "one", "--max-new-tokens", "8", "--device", "cpu"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*line, "--sample", "--temperature", "1.5", "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens is 0; give 1 or more"),
        (["--temperature", "1"], "--temperature 1.0 needs --sample"),
        (["--prompt", ""], "the prompt is empty"),
        (["--model", "/nowhere"], "model directory /nowhere does not exist"),
        (["--model", "gpt2"], "run: hf download gpt2 --local-dir gpt2"),
        (["--device-memory", "much"], "--device-memory='much' is not a size"),
        (["--device", "abacus"], "device='abacus' is not a device"),
        (["--device-memory", "1KiB"], "raise"),
        (["--sample", "--seed", str(2**64)], "is not a number of 64 bits"),
        (["--disk", __file__], "is a file; give a directory"),
    ],
)
def test_bad_input_is_one_line(
    directory: Path, extra: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", str(directory), "--prompt", "one", "--device", "cpu", *extra]) == 2
    err = capsys.readouterr().err
    assert err.startswith("headrace generate: ")
    assert says in err


def test_a_config_gives_the_model_that_it_gives_without_headrace(tmp_path: Path, compute_device: torch.device) -> None:
    """Large weights are drawn into files; the seed decides what they are, and what comes from the generator next."""
    config = LlamaConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, **IDS)
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config)
    following = torch.rand(1)
    total = sum(parameter.nbytes for parameter in plain.parameters())
    torch.manual_seed(0)
    model, handle = headrace.from_pretrained(
        config, device=compute_device, device_memory=total // 2, host_memory=total // 2, disk=tmp_path / "disk"
    )
    with handle:
        assert torch.equal(torch.rand(1), following)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert not model.training
        for (name, home), weight in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(home, weight), name
            assert home.requires_grad
        stats = handle.stats()
        assert stats.host_peak_bytes <= total // 2
        assert stats.disk_bytes > total // 2


def test_large_new_tensors_lie_on_disk(tmp_path: Path) -> None:
    from headrace.memory.disk import TensorsOnDisk

    with TensorsOnDisk(tmp_path / "disk"):
        large = torch.empty(1024, 512)
        small, elsewhere = torch.empty(16), torch.empty(1024, 1024, device="meta")
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if f"{tmp_path / 'disk'}" in line]
    ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    assert [begin <= large.data_ptr() < end for begin, end in ranges].count(True) == 1
    assert not any(begin <= small.data_ptr() < end for begin, end in ranges)
    assert elsewhere.device.type == "meta"
    assert large.shape == (1024, 512)
    assert list((tmp_path / "disk").iterdir()) == []  # without a name, and the directory is free again
    large.fill_(1)
    assert large.sum() == large.numel()


def test_a_config_without_architecture_says_so() -> None:
    from transformers import ViTConfig

    with pytest.raises(ValueError, match=r"ViTConfig names no architecture.*set config\.architectures"):
        headrace.from_pretrained(ViTConfig(), device="cpu")
