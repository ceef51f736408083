"""Which architectures of transformers train and run offloaded as they do without?

    python benchmarks/zoo.py [--where cpu everything emu] [--only NAME ...] --results zoo.jsonl
    python benchmarks/zoo.py --results zoo.jsonl --write docs/models.md

Every architecture that can be built small from its configuration class alone, with random weights: two training steps
and an inference, plain and offloaded, compared bit for bit. *cpu*: the CPU as the device, with a budget for half of the
weights; *everything*: blocks on disk, activations on the host, recomputation where the model has it, and millrace's
AdamW beside the next forward; *emu*: the emulated accelerator, judged for races. Each runs in a process of its own.
"""

import argparse
import collections
import contextlib
import datetime
import importlib.metadata
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import millrace
import millrace.optim
from millrace.runtime.tensors import tensors_in

SECONDS = 90  # for one architecture in one place
STEPS = 2
PLACES = {
    "cpu": "CPU",
    "everything": "all of it at once",
    "emu": "emulated accelerator",
}

# Names that configurations give to the same few numbers.
_SIZES = {
    32: "hidden_size d_model n_embd embed_dim dim emb_dim hidden_dim embedding_size model_dim n_embed image_size"
    " decoder_hidden_size projection_dim",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size dim_feedforward"
    " max_position_embeddings n_positions max_source_positions max_target_positions max_sequence_length d_inner"
    " inner_dim decoder_intermediate_size shared_expert_intermediate_size lstm_dim",
    3: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers depth"
    " num_decoder_layers decoder_num_hidden_layers",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads heads"
    " num_local_experts num_experts n_routed_experts decoder_num_attention_heads",
    2: "num_key_value_heads num_experts_per_tok top_k n_group topk_group n_head_kv multi_query_group_num"
    " num_selected_experts moe_topk moe_top_k",
    8: "head_dim d_kv attention_head_size qk_nope_head_dim qk_rope_head_dim v_head_dim",
    16: "qk_head_dim moe_intermediate_size q_lora_rank kv_lora_rank expert_intermediate_size",
    128: "vocab_size",
    1: "n_shared_experts first_k_dense_replace num_shared_experts",
}
SMALL = {name: int(size) for size, names in _SIZES.items() for name in names.split()}


# building -------------------------------------------------------------------------------------------------------------
def shrink(config: Any, depth: int = 0) -> None:
    """Small numbers in a configuration, and in those inside of it."""
    for name in list(vars(config)) + list(getattr(type(config), "attribute_map", {})):
        value = getattr(config, name, None)
        if name in SMALL and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, SMALL[name])
        elif depth < 3 and hasattr(value, "to_dict") and hasattr(value, "model_type"):
            shrink(value, depth + 1)
    if getattr(config, "kv_lora_rank", None):  # all heads have keys of their own, of a common part
        config.num_key_value_heads = config.num_attention_heads
    layers = next((SMALL[n] for n in ("num_hidden_layers",) if getattr(config, n, None) is not None), None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type"):
        kinds = getattr(config, name, None)
        if layers and isinstance(kinds, list | tuple) and len(kinds) > layers:
            setattr(config, name, list(kinds[:layers]))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value >= SMALL["vocab_size"]:
            setattr(config, name, 1)


def transformers_models() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """The first of its model classes with a head, or else the bare one, of every kind of configuration."""
    import transformers
    from transformers.models.auto import modeling_auto

    mappings = [
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        modeling_auto.MODEL_MAPPING,
    ]
    for name, config_class in sorted(transformers.CONFIG_MAPPING.items()):
        for mapping in mappings:
            if config_class in mapping:
                with contextlib.suppress(ValueError):  # a name that this release has no class for
                    found = mapping[config_class]
                    yield name, _maker(config_class, found[0] if isinstance(found, tuple) else found)
                    break


def _maker(config_class: Any, model_class: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = config_class()
        shrink(config)
        config.use_cache = False
        for name in list(vars(config)):
            if "drop" in name and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)
        torch.manual_seed(0)
        model: nn.Module = model_class._from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > 20_000_000:
            raise MemoryError("not small")
        return model

    return make


def inputs_of(model: Any) -> Iterator[dict[str, Tensor]]:
    """What it may take, the likeliest first."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 100, (2, 12), generator=generator)
    image = torch.randn(2, 3, 32, 32, generator=generator)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "input_ids":
        if getattr(model.config, "is_encoder_decoder", False):
            yield {"input_ids": ids, "decoder_input_ids": ids.flip(1)}
        yield {"input_ids": ids}
        yield {"input_ids": ids, "pixel_values": image}
    if main == "pixel_values":
        yield {"pixel_values": image}
        yield {"pixel_values": image, "input_ids": ids}
    if main == "input_values":
        yield {"input_values": torch.randn(2, 4000, generator=generator)}
    if main == "input_features":
        bins = getattr(model.config, "num_mel_bins", 80)
        features = torch.randn(2, bins, 128, generator=generator)
        yield {"input_features": features, "decoder_input_ids": ids}
        yield {"input_features": features}
        yield {"input_features": features.transpose(1, 2)}


# running --------------------------------------------------------------------------------------------------------------
def floats_of(output: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(dict(output)) if tensor.is_floating_point()]


def seed(number: int) -> None:
    torch.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def outcome(model: nn.Module, inputs: dict[str, Tensor], make_optimizer: Callable[[Any], Any]) -> list[Tensor]:
    """Losses, weights after the steps, and what it gives then without gradients; all on the CPU."""
    optimizer = make_optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    found: list[Tensor] = []
    model.train()
    for step in range(STEPS):
        seed(step)
        loss = sum(tensor.float().square().mean() for tensor in floats_of(model(**inputs)) if tensor.requires_grad)
        if not isinstance(loss, Tensor):
            raise TypeError("no output has a gradient")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    model.eval()
    with torch.no_grad():
        seed(STEPS)
        found += [tensor.cpu() for tensor in floats_of(model(**inputs))]
    return found + [parameter.detach().cpu().clone() for parameter in model.parameters()]


def compare(make: Callable[[], nn.Module], place: str) -> dict[str, Any]:
    """Whether one model is equal; what kept it from being tried, or from being offloaded."""
    if place == "emu":
        import emulator.emu  # noqa: F401
    device = "emu" if place == "emu" else "cpu"
    try:
        for inputs in inputs_of(make()):
            model: Any = make()
            adamw = _optimizer(place, model, None)
            try:
                plain = outcome(model.to(device), _moved(inputs, device), adamw)
            except Exception as error:
                kept = f"{type(error).__name__}: {error}"
                continue
            break
        else:
            return {"result": "not built", "reason": kept if "kept" in locals() else "no inputs known"}
        again = outcome(make().to(device), _moved(inputs, device), adamw)
    except Exception as error:
        return {"result": "not built", "reason": f"{type(error).__name__}: {error}"}
    if not equal(plain, again):
        return {"result": "not built", "reason": "two plain runs differ"}
    model = make()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    with tempfile.TemporaryDirectory() as directory:
        options = _options(place, nbytes, directory)
        try:
            handle = _offload(model, options)
            got = outcome(model, inputs, _optimizer(place, model, directory))
            stats = handle.stats()
            blocks = len(handle.plan.problem.block_bytes) if handle.plan else 0
            handle.remove()
        except millrace.MillraceError as error:
            return {"result": "refused", "reason": str(error)}
        except Exception as error:
            return {"result": "failed", "reason": f"{type(error).__name__}: {error}"}
    result = {"blocks": blocks, "moved": stats.onload_bytes, "weights": nbytes}
    if not equal(plain, got):
        return result | {"result": "WRONG", "reason": "differs"}
    if stats.device_peak_bytes > stats.device_budget_bytes:
        return result | {"result": "WRONG", "reason": f"{stats.device_peak_bytes} > {stats.device_budget_bytes} bytes"}
    if place == "emu":
        from emulator import emu

        races = emu.take_reports()
        if races:
            return result | {"result": "WRONG", "reason": races[0]}
    return result | {"result": "equal"}


def _moved(inputs: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def _offload(model: Any, options: dict[str, Any]) -> millrace.Offloaded:
    """With twice the budget as long as that is too small."""
    for _ in range(5):
        try:
            return millrace.offload(model, **options)
        except millrace.BudgetError as error:
            kept = error
            options["device_memory"] *= 2
    raise kept


def _options(place: str, nbytes: int, directory: str) -> dict[str, Any]:
    options: dict[str, Any] = {"device": "emu" if place == "emu" else "cpu", "device_memory": nbytes // 2 + (64 << 10)}
    if place == "everything":
        options |= {"disk": f"{directory}/disk", "host_memory": max(nbytes, 2 << 20), "activations": True}
    return options


def _optimizer(place: str, model: Any, directory: str | None) -> Callable[[Any], Any]:
    if place == "everything" and getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable()
    if place == "everything":
        overlap: Any = "none" if directory is None else "forward"
        return lambda parameters: millrace.optim.AdamW(parameters, lr=1e-3, overlap=overlap)
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))

    return len(one) == len(other) and all(map(same, one, other))


# processes ------------------------------------------------------------------------------------------------------------
def in_a_process(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What it gives, in a child; or how that ended."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            result = work()
        except BaseException:
            result = {"result": "failed", "reason": traceback.format_exc()[-300:]}
        os.write(writes, json.dumps(result).encode())
        os._exit(0)
    os.close(writes)
    said, begun = b"", time.monotonic()
    while time.monotonic() < begun + SECONDS:
        if select.select([reads], [], [], 1)[0]:
            piece = os.read(reads, 1 << 16)
            if not piece:
                break
            said += piece
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reads)
    _, status = os.waitpid(pid, 0)
    if said:
        return dict(json.loads(said))
    code = os.waitstatus_to_exitcode(status)
    reason = f"no answer in {SECONDS} s" if code == -signal.SIGKILL else f"the process ended with {code}"
    return {"result": "not built" if code == -signal.SIGKILL else "failed", "reason": reason}


def page(results: Path) -> str:
    """The results, in words and as a table; of what was tried twice, the last."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for line in results.read_text().splitlines():
        one = json.loads(line)
        found.setdefault(one["name"], {})[one["place"]] = one
    built = {name: places for name, places in sorted(found.items()) if all(p in places for p in PLACES)}
    text = __doc__.split("\n\n")[2].strip().replace("\n", " ")
    versions = f"transformers {importlib.metadata.version('transformers')}, PyTorch {torch.__version__.split('+')[0]}"
    lines = [
        "# Models",
        "",
        f"Made by `benchmarks/zoo.py` on {datetime.date.today()} with {versions}. {text}",
        "",
        "| | equal | refused | failed | wrong |",
        "|---|---|---|---|---|",
    ]
    for place, title in PLACES.items():
        counts = collections.Counter(places[place]["result"] for places in built.values())
        lines.append(f"| {title} | {counts['equal']} | {counts['refused']} | {counts['failed']} | {counts['WRONG']} |")
    others = [name for name in sorted(found) if name not in built]
    lines += [
        "",
        f"{len(others)} of {len(found)} kinds of configuration did not build small, take simple inputs or give the same"
        f" twice without millrace, and say nothing here: {', '.join(others)}.",
        "",
        "| architecture | " + " | ".join(PLACES.values()) + " |",
        "|---|" + len(PLACES) * "---|",
    ]
    for name, places in built.items():
        cells = [places[p]["result"] + (f": {places[p]['reason']}" if "reason" in places[p] else "") for p in PLACES]
        lines.append(f"| {name} | {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--results", type=Path, help="JSON lines, to which those of this run are added")
    parser.add_argument("--write", type=Path, help="nothing is run: a page of the results")
    chosen = parser.parse_args()
    if chosen.write:
        chosen.write.write_text(page(chosen.results))
        return
    torch.set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = {place: collections.Counter() for place in chosen.where}
    for name, make in transformers_models():
        if chosen.only and name not in chosen.only:
            continue
        for place in chosen.where:
            found = in_a_process(lambda make=make, place=place: compare(make, place))  # type: ignore[misc]
            counts[place][found["result"]] += 1
            line = {"name": name, "place": place, **found}
            print(f"{name:32} {place:10} {found['result']:10} {found.get('reason', '')[:150]!r}", flush=True)
            if chosen.results:
                with chosen.results.open("a") as file:
                    print(json.dumps(line), file=file)
            if found["result"] == "not built":
                break
    for place, count in counts.items():
        print(PLACES[place], dict(count))


if __name__ == "__main__":
    sys.exit(main())
