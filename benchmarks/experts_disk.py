"""How fast does a mixture of experts decode from disk, and what is read for a token? With and without single experts.

    PYTHONPATH=. python benchmarks/experts_disk.py [--size 2GiB] [--tokens 12] [--rounds 3] [--share 0.2] [--prompt 1]
        [--drive 1GiB] [--against DIRECTORY]

A Qwen3-MoE of random weights in bfloat16 (64 experts in a layer, 4 for a token) in a safetensors file that has the
names of its state dict. Contestants, each in a process of its own, decode in turns, `--tokens` a turn; before each
token what the page cache has of files is dropped, as it would be gone where the model is larger than memory (but for
pages that a contestant has mapped). Tokens are drawn at random; routing by random weights is uneven all the same.

- experts: headrace; `host_memory` and `device_memory` are `--share` of the weights each, the device is the CPU.
- blocks: the same, without single experts: all of a layer's come, as other blocks do.
- accelerate: `dispatch_model` to "disk", which reads the same files, module by module.

`--prompt`: tokens in each call, without a cache. `--drive`: reads take as long as on a drive that gives so many bytes a
second, one after the other; then without accelerate, which maps the files, and without blocks. `--against`: another
contestant is the headrace in that directory, such as a checkout of another version.

Bytes are those that the process had from the drive (`/proc/self/io`); the median of all rounds but the first, and from
the least to the most.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from disk_model import drop_cache
from safetensors.torch import save_file

import headrace
from headrace.cli.noise import without_noise
from headrace.config import format_bytes, parse_bytes
from headrace.weights.model.partition import _Cutter

HIDDEN, INTERMEDIATE, EXPERTS, ROUTED = 768, 384, 64, 4
LAYER_BYTES = 2 * (3 * EXPERTS * HIDDEN * INTERMEDIATE + 4 * HIDDEN**2)


def config_of(nbytes: int) -> "transformers.Qwen3MoeConfig":
    return transformers.Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=HIDDEN,
        num_hidden_layers=max(2, round(nbytes / LAYER_BYTES)),
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=ROUTED,
        moe_intermediate_size=INTERMEDIATE,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        eos_token_id=None,
        dtype=torch.bfloat16,
    )


def on_meta(config: "transformers.Qwen3MoeConfig") -> "transformers.Qwen3MoeForCausalLM":
    """Without weights; its buffers have values."""
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval().requires_grad_(False)


def write(config: "transformers.Qwen3MoeConfig", directory: Path) -> None:
    """Layer by layer: all have the same values but for the routers."""
    torch.manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    weight_map = {}
    for name, tensor in on_meta(config).state_dict().items():
        if name == "lm_head.weight":
            continue
        layer = re.search(r"layers\.(\d+)\.", name)
        file = f"layer-{layer[1]}.safetensors" if layer else "rest.safetensors"
        files.setdefault(file, {})[name] = tensor
        weight_map[name] = file
    for file, tensors in files.items():
        spread = 1.0 if "model.embed_tokens.weight" in tensors else 0.03  # so that routing follows the token
        values = {n: (torch.randn(t.shape) * spread + (t.dim() == 1)).to(torch.bfloat16) for n, t in tensors.items()}
        save_file(values, directory / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def open_headrace(config: "transformers.Qwen3MoeConfig", directory: Path, share: float, *, single: bool) -> Any:
    if not single:
        _Cutter._cut_experts = lambda _self: None  # type: ignore[method-assign]
    model = on_meta(config)
    total = sum(parameter.nbytes for parameter in model.parameters())
    budgets = {"device_memory": int(total * share), "host_memory": int(total * share)}
    handle = headrace.offload(model, device="cpu", checkpoint=directory, **budgets)
    return model, handle


def open_accelerate(config: "transformers.Qwen3MoeConfig", directory: Path) -> Any:
    from accelerate import dispatch_model

    model = on_meta(config)
    model.tie_weights()
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    index = {
        name: {"safetensors_file": str(directory / file), "weight_name": name, "dtype": "bfloat16"}
        for name, file in weight_map.items()
    }
    index["lm_head.weight"] = index["model.embed_tokens.weight"]
    dispatch_model(model, {"": "disk"}, main_device="cpu", offload_index=index, force_hooks=True)
    return model, None


def read_bytes() -> int:
    found = re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def slow_down(bytes_per_second: int) -> None:
    """From now on reads of this process come from such a drive."""
    read, lock, free = os.preadv, threading.Lock(), [0.0]

    def slowly(*args: Any) -> int:
        found = read(*args)
        with lock:
            free[0] = done = max(free[0], time.perf_counter()) + found / bytes_per_second
        time.sleep(max(0.0, done - time.perf_counter()))
        return found

    os.preadv = slowly  # type: ignore[assignment]


def contest(
    name: str,
    config: "transformers.Qwen3MoeConfig",
    directory: Path,
    share: float,
    tokens: int,
    prompt: int,
    drive: int,
) -> None:
    """Waits for a line, decodes, and tells what it took; a line for each turn."""
    torch.set_num_threads(2)
    if drive:
        slow_down(drive)
    if name == "accelerate":
        model, handle = open_accelerate(config, directory)
    else:
        model, handle = open_headrace(config, directory, share, single=name != "blocks")
    past, digest, drawn = None, 0, torch.Generator().manual_seed(0)
    print("ready", flush=True)
    for _ in sys.stdin:
        seconds, before = 0.0, read_bytes()
        with torch.no_grad():
            for _ in range(tokens):
                drop_cache(directory)
                began = time.perf_counter()
                token = torch.randint(config.vocab_size, (1, prompt), generator=drawn)
                found = model(input_ids=token, past_key_values=past, use_cache=prompt == 1)
                seconds += time.perf_counter() - began
                past = found.past_key_values
                digest = hash((digest, *found.logits.float().flatten().tolist()))
        told: dict[str, Any] = {
            "seconds": seconds / tokens,
            "bytes": (read_bytes() - before) / tokens,
            "digest": digest,
        }
        if handle is not None:
            stats = handle.stats()
            told |= {"hits": stats.expert_hit_share, "peak": stats.device_peak_bytes}
            handle.reset_stats()
        print(json.dumps(told), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", default="2GiB")
    arguments.add_argument("--tokens", type=int, default=12)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--share", type=float, default=0.2)
    arguments.add_argument("--prompt", type=int, default=1)
    arguments.add_argument("--drive", default="")
    arguments.add_argument("--against", default="")
    arguments.add_argument("--directory", default=".")
    arguments.add_argument("--contest")
    given = arguments.parse_args()
    drive = parse_bytes(given.drive, name="drive") if given.drive else 0
    config = config_of(parse_bytes(given.size, name="size"))
    if given.contest:
        contest(given.contest, config, Path(given.directory), given.share, given.tokens, given.prompt, drive)
        return
    directory = Path(tempfile.mkdtemp(prefix="experts-", dir=given.directory))
    names = ["experts", *(["against"] if given.against else []), *([] if drive else ["blocks", "accelerate"])]
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        write(config, directory)
        total = sum(file.stat().st_size for file in directory.iterdir())
        print(
            f"{config.num_hidden_layers} layers, {format_bytes(total)} on disk; {given.share:.0%} of it for each tier"
        )
        for name in names:
            command = [sys.executable, __file__, "--contest", name, "--directory", str(directory), "--size", given.size]
            command += ["--tokens", str(given.tokens), "--share", str(given.share), "--prompt", str(given.prompt)]
            command += ["--drive", given.drive]
            paths = {"PYTHONPATH": given.against} if name == "against" else {}
            running[name] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | paths
            )
            answer(running[name])
        told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for turn in range(given.rounds + 1):
            for name in names:
                asked = running[name].stdin
                assert asked is not None
                asked.write("go\n")
                asked.flush()
                found = json.loads(answer(running[name]))
                if turn:
                    told[name].append(found)
        assert len({tuple(one["digest"] for one in told[name]) for name in names}) == 1, "logits differ"
        for name in names:
            seconds = [one["seconds"] for one in told[name]]
            nbytes = [one["bytes"] for one in told[name]]
            more = f", {told[name][-1]['hits']:.1%} of experts were there" if name in ("experts", "against") else ""
            print(
                f"{name:>12}: {1 / statistics.median(seconds):6.2f} tokens/s ({1 / max(seconds):.2f} to"
                f" {1 / min(seconds):.2f}), {format_bytes(int(statistics.median(nbytes)))} read for each"
                f" ({format_bytes(int(min(nbytes)))} to {format_bytes(int(max(nbytes)))}){more}"
            )
    finally:
        for process in running.values():
            process.kill()
            process.wait()
        shutil.rmtree(directory)


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "a contestant ended; see above"
    return line


if __name__ == "__main__":
    with without_noise():
        main()
