"""Do caches that rest on the host give the same tokens and logits, within the budget, and do only new tokens return?"""

import copy
import gc
import os
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache, QuantizedCache, QuantizedLayer

import headrace
from headrace.errors import BudgetError, StateError
from headrace.integrations.transformers import offload_cache
from headrace.memory.ledger import Tier
from tests.support.compare import same
from tests.support.held import weight_bytes
from tests.support.interrupts import interrupted_at

LAYERS, PROMPT = 4, 40


def config(**changes: Any) -> LlamaConfig:
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return LlamaConfig(**settings | changes)


def model_of(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(config(**changes)).eval().requires_grad_(False)


TOKEN_BYTES = 2 * 2 * 8 * 4  # of keys and values of a layer, in float32


def prompt(device: torch.device, rows: int = 1) -> torch.Tensor:
    return (torch.arange(PROMPT * rows) % 63 + 1).view(rows, PROMPT).to(device)


class _Eighths(QuantizedLayer):
    """Quantised without a library: multiples of an eighth, as a tuple of tensors."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        return (tensor * 8).round().to(torch.int8), torch.tensor(8.0, device=tensor.device)

    def _dequantize(self, q_tensor: Any) -> torch.Tensor:
        return (q_tensor[0] / q_tensor[1]).to(self.dtype)


def quantised(_: Any) -> Cache:
    return Cache(layers=[_Eighths(residual_length=4) for _ in range(LAYERS)])


CACHES: dict[str, Callable[[Any], Cache]] = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "lazy": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=PROMPT + 24),
    "quantised": quantised,
    "fp8": lambda model: QuantizedCache("fp8", model.config),
}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16}


def write(model: Any, cache: Cache, device: torch.device, **settings: Any) -> Any:
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **settings}
    rows = options.pop("rows", 1)
    found = model.generate(
        prompt(device, rows),
        past_key_values=cache,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
        **options,
    )
    return found.sequences, torch.stack(found.logits)


def assert_same_text(found: Any, expected: Any) -> None:
    for one, wanted in zip(found, expected, strict=True):
        assert same(one, wanted)


@pytest.mark.core(kind=["dynamic", "static", "quantised"])
@pytest.mark.parametrize("kind", list(CACHES))
def test_the_same_text(kind: str, compute_device: torch.device) -> None:
    plain = model_of().to(compute_device)
    expected = write(plain, CACHES[kind](plain), compute_device)
    model = model_of()
    with headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.7)) as handle:
        cache = offload_cache(CACHES[kind](model), handle)
        assert_same_text(write(model, cache, compute_device), expected)
        stats = handle.stats()
        assert stats.cache_onload_bytes > 0
        assert stats.device_peak_bytes <= stats.device_budget_bytes
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                assert tensor.device.type == "cpu" or tensor.numel() == 0
        if kind in ("dynamic", "lazy"):
            # The prompt, and each of the 7 new tokens that went through the layers, left once.
            assert stats.cache_offload_bytes == LAYERS * (PROMPT + 7) * TOKEN_BYTES
            assert stats.cache_onload_bytes >= LAYERS * sum(range(PROMPT, PROMPT + 7)) * TOKEN_BYTES
        assert stats.cache_bytes >= LAYERS * (PROMPT + 7) * TOKEN_BYTES or kind in ("quantised", "fp8")
        assert stats.cache_bytes <= stats.cache_peak_bytes <= stats.host_peak_bytes
        del cache, layer, tensor
        gc.collect()
        handle.synchronize()
        assert handle.stats().cache_bytes == 0


@pytest.mark.parametrize("lookup", [0, 3])  # the most tokens that are guessed at once, and may be taken back
def test_sliding_windows(lookup: int, compute_device: torch.device) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make() -> Any:
        torch.manual_seed(0)
        settings = config().to_dict() | SLIDING | {"use_sliding_window": True, "max_window_layers": 0}
        settings = {name: value for name, value in settings.items() if name not in ("model_type", "architectures")}
        return Qwen2ForCausalLM(Qwen2Config(**settings)).eval().requires_grad_(False)

    settings = {"prompt_lookup_num_tokens": lookup or None}
    for kind in ("dynamic",) if lookup else ("dynamic", "static"):
        plain = make().to(compute_device)
        expected = write(plain, CACHES[kind](plain), compute_device, **settings)
        model = make()
        with headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.7)) as handle:
            cache = offload_cache(CACHES[kind](model), handle)
            assert cache.layers[0].is_sliding
            assert_same_text(write(model, cache, compute_device, **settings), expected)
            assert handle.stats().cache_onload_bytes > 0


@pytest.mark.core(kind="dynamic")
@pytest.mark.parametrize("kind", ["dynamic", "static", "quantised"])
def test_beams(kind: str, compute_device: torch.device) -> None:
    settings = {"num_beams": 3, "rows": 2}
    plain = model_of().to(compute_device)
    expected = write(plain, CACHES[kind](plain), compute_device, **settings)
    model = model_of()
    with headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.9)) as handle:
        cache = offload_cache(CACHES[kind](model), handle)
        assert_same_text(write(model, cache, compute_device, **settings), expected)
        assert handle.stats().cache_onload_bytes > 0


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_and_decoder(beams: int, compute_device: torch.device) -> None:
    from transformers import EncoderDecoderCache, T5Config, T5ForConditionalGeneration

    def make() -> Any:
        torch.manual_seed(0)
        settings = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": LAYERS, "num_heads": 4}
        shape = T5Config(**settings, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
        return T5ForConditionalGeneration(shape).eval().requires_grad_(False)

    def new() -> Any:
        return EncoderDecoderCache(DynamicCache(), DynamicCache())

    expected = write(make().to(compute_device), new(), compute_device, num_beams=beams)
    model = make()
    with headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.7)) as handle:
        cache = offload_cache(new(), handle)
        assert_same_text(write(model, cache, compute_device, num_beams=beams), expected)
        assert handle.stats().cache_onload_bytes > 0
        assert cache.self_attention_cache.layers[0].keys.device.type == "cpu"
        assert cache.cross_attention_cache.layers[0].keys.device == compute_device


def turns(model: Any, cache: Cache, device: torch.device) -> list[torch.Tensor]:
    """A conversation: a prompt, an answer, the answer taken back in part, more rows, a copied cache."""
    logits = []
    with torch.no_grad():
        found = model(prompt(device), past_key_values=cache)
        cache = found.past_key_values
        logits.append(found.logits)
        for token in (3, 9, 27):
            logits.append(model(torch.tensor([[token]], device=device), past_key_values=cache).logits)
        cache.crop(-2)
        more = torch.arange(5, 12, device=device).view(1, -1)
        logits.append(model(more, past_key_values=cache).logits)
        other = copy.deepcopy(cache)
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([0, 2]))
        logits.append(model(more.repeat(2, 1), past_key_values=cache).logits)
        logits.append(model(more, past_key_values=other).logits)
        logits.append(cache.layers[0].keys.clone())
        cache.reset()
        logits.append(model(more, past_key_values=cache).logits)
    return logits


@pytest.mark.emu("random:3", "lazy")
def test_it_is_continued(compute_device: torch.device) -> None:
    plain = model_of().to(compute_device)
    expected = turns(plain, DynamicCache(config=plain.config), compute_device)
    model = model_of()
    with headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.7)) as handle:
        found = turns(model, offload_cache(DynamicCache(config=model.config), handle), compute_device)
        assert_same_text(found, expected)
        gc.collect()
        handle.synchronize()
        assert handle.stats().cache_bytes == 0


def surgery(model: Any, cache: Cache, device: torch.device) -> list[torch.Tensor]:
    """The user writes to a cache's tensors, takes rows and tokens away, and then all of them."""

    def step(token: int, rows: int) -> Any:
        return model(torch.full((rows, 1), token, device=device), past_key_values=cache).logits

    with torch.no_grad():
        model(prompt(device, 3), past_key_values=cache)
        logits = [step(3, 3), step(9, 3)]  # from now on, layers come ahead
        for layer in cache.layers:
            layer.keys[:, :, 5:9] = 0
            layer.values.mul_(0.5)
        logits.append(step(5, 3))
        cache.batch_select_indices(torch.tensor([2, 0], device=device))
        logits.append(step(6, 2))
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[1:, :, 7:], layer.values[1:, :, 7:]
        logits.append(step(7, 1))
        none = torch.empty(1, 2, 0, 8, device=device)
        logits += [*cache.update(none, none, 0), step(8, 1)]
        cache.crop(-cache.get_seq_length())
        logits.append(step(8, 1))
    return logits


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_user_changes_it(tier: Any, compute_device: torch.device, tmp_path: Path) -> None:
    plain = model_of().to(compute_device)
    expected = surgery(plain, DynamicCache(config=plain.config), compute_device)
    model = model_of()
    budget = int(weight_bytes(model) * 0.9)
    with headrace.offload(model, device=compute_device, device_memory=budget, disk=tmp_path) as handle:
        cache = offload_cache(DynamicCache(config=model.config), handle, tier=tier)
        assert_same_text(surgery(model, cache, compute_device), expected)
        stats = handle.stats()
        assert stats.cache_onload_bytes >= LAYERS * 3 * 4 * PROMPT * TOKEN_BYTES
        assert stats.device_peak_bytes <= budget


def test_a_filled_cache_leaves(compute_device: torch.device) -> None:
    model = model_of()
    with headrace.offload(model, device=compute_device) as handle, torch.no_grad():
        cache = model(prompt(compute_device)).past_key_values
        expected = copy.deepcopy(cache)
        assert offload_cache(cache, handle) is cache
        assert offload_cache(cache, handle) is cache  # twice changes nothing
        assert handle.stats().cache_bytes >= LAYERS * PROMPT * TOKEN_BYTES
        assert same(cache.layers[1].keys, expected.layers[1].keys)
        assert cache.layers[1].keys.device.type == "cpu"
        token = torch.tensor([[7]], device=compute_device)
        logits = model(token, past_key_values=cache).logits
        assert same(logits, model(token, past_key_values=expected).logits)
        assert handle.stats().cache_onload_bytes >= LAYERS * PROMPT * TOKEN_BYTES


def test_what_is_refused(compute_device: torch.device) -> None:
    model = model_of()
    handle = headrace.offload(model, device=compute_device, device_memory=int(weight_bytes(model) * 0.7))
    with pytest.raises(TypeError, match="give a cache of transformers"):
        offload_cache([], handle)  # type: ignore[type-var]
    with pytest.raises(ValueError, match='tier="disk" needs a directory'):
        offload_cache(DynamicCache(), handle, tier="disk")
    cache = offload_cache(DynamicCache(config=model.config), handle)
    elsewhere = pytest.raises(ValueError, match="rests in another tier or with another handle already")
    with headrace.offload(model_of(), device=compute_device) as other, elsewhere:
        offload_cache(cache, other)
    model.requires_grad_(True)
    with pytest.raises(StateError, match="pass use_cache=False to train"):
        model(prompt(compute_device), past_key_values=cache)
    model.requires_grad_(False)
    with torch.no_grad():
        long = prompt(compute_device).repeat(1, 6)[:, :230].repeat(4, 1)
        model(long, past_key_values=cache)
        with pytest.raises(BudgetError, match=r"a layer of the cache needs .* raise it by"):
            model(prompt(compute_device)[:, :1].repeat(4, 1), past_key_values=cache)
    handle.remove()
    with torch.no_grad(), pytest.raises(StateError, match="is offloaded no more; begin a new cache"):
        model(prompt(torch.device("cpu"))[:, :1], past_key_values=cache)
    with pytest.raises(StateError, match="is offloaded no more"):
        offload_cache(cache, handle), offload_cache(DynamicCache(config=model.config), handle)


@pytest.mark.core(kind="dynamic")
@pytest.mark.emu("random:3")
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_on_disk(kind: str, compute_device: torch.device, tmp_path: Path) -> None:
    plain = model_of().to(compute_device)
    expected = write(plain, CACHES[kind](plain), compute_device)
    model = model_of()
    budget = int(weight_bytes(model) * 0.7)
    with headrace.offload(model, device=compute_device, device_memory=budget, disk=tmp_path) as handle:
        cache = offload_cache(CACHES[kind](model), handle, tier="disk")
        assert_same_text(write(model, cache, compute_device), expected)
        stats = handle.stats()
        assert stats.disk_bytes >= LAYERS * (PROMPT + 7) * TOKEN_BYTES
        assert stats.cache_bytes == 0
        assert stats.spill_bytes == stats.cache_offload_bytes > 0
        assert stats.fetch_bytes >= stats.cache_onload_bytes > 0
        if kind == "dynamic" or compute_device.type != "cpu":  # on the CPU, what is on its way out counts as well
            assert stats.device_peak_bytes <= budget
        if kind == "dynamic":
            again = turns(model, copy.deepcopy(cache), compute_device)
            assert_same_text(again, turns(plain, on_device(cache, compute_device), compute_device))
        del cache
        gc.collect()
        handle.synchronize()
        assert handle.stats().disk_bytes == 0


def on_device(cache: Cache, device: torch.device) -> Cache:
    """A plain cache with the same tensors."""
    return DynamicCache([(layer.keys.to(device), layer.values.to(device)) for layer in cache.layers])


def test_the_host_budget_counts_it(compute_device: torch.device) -> None:
    model = model_of()
    room = weight_bytes(model) + 64 * 2**10
    with headrace.offload(model, device=compute_device, host_memory=room) as handle:
        cache = offload_cache(DynamicCache(config=model.config), handle)
        with torch.no_grad(), pytest.raises(BudgetError, match="caches need"):
            model(prompt(compute_device).repeat(16, 1), past_key_values=cache)
        assert handle.stats().host_peak_bytes <= room


def test_a_cache_that_was_let_go_of_makes_room(compute_device: torch.device) -> None:
    model = model_of()
    with headrace.offload(model, device=compute_device) as handle:
        for _ in range(4):
            cache = offload_cache(DynamicCache(config=model.config), handle)
            write(model, cache, compute_device)
            handle._ledger.host_budget_bytes = handle._ledger.host_held_bytes  # for one cache
            del cache
            gc.collect()


def test_no_cache_is_pickled(compute_device: torch.device) -> None:
    from transformers.cache_utils import LinearAttentionLayer

    model = model_of()
    with headrace.offload(model, device=compute_device) as handle, torch.no_grad():
        cache = offload_cache(DynamicCache(config=model.config), handle)
        model(prompt(compute_device), past_key_values=cache)
        for action in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match=r"copied by copy\.deepcopy, but not pickled; save its tensors"):
                action(cache.layers[0])
        again = DynamicCache([(layer.keys, layer.values) for layer in cache.layers])
        logits = model(prompt(compute_device), past_key_values=offload_cache(again, handle)).logits
        assert same(logits, model(prompt(compute_device), past_key_values=cache).logits)
        linear = offload_cache(Cache(layers=[LinearAttentionLayer()]), handle).layers[0]
        assert not hasattr(linear, "keys")


def seconds_of_token(model: Any, cache: Cache, rows: int, tokens: int, settled: Callable[[], None]) -> float:
    begin, end = (torch.Event("emu", enable_timing=True) for _ in range(2))
    with torch.no_grad():
        model(torch.zeros(rows, tokens, dtype=torch.long, device="emu"), past_key_values=cache)
        token = torch.zeros(rows, 1, dtype=torch.long, device="emu")
        for index in range(8):
            if index == 5:
                settled()
                begin.record()
            model(token, past_key_values=cache)
    end.record()
    torch.accelerator.synchronize()
    return begin.elapsed_time(end) / 1e3 / 3


@pytest.mark.core(ratio=0.8, width=64)
@pytest.mark.emu("lazy")
@pytest.mark.parametrize("ratio", [0.8, 1.0, 2.0])  # seconds of the cache's copies, as a part of those of compute
@pytest.mark.parametrize("width", [64, 512])  # all weights stay; they are twice the budget
def test_copies_hide(emu_device: ModuleType, ratio: float, width: int) -> None:
    """A cache of four times the budget: a token takes no longer than the link or compute does."""
    layers, tokens, rows = 24, 1024, 4
    settings = {"num_hidden_layers": layers, "hidden_size": 64, "intermediate_size": width}
    cache_bytes = layers * rows * tokens * 2 * 2 * 16 * 4  # keys and values: 2 heads of 16
    budget = cache_bytes // 4

    def configure(rate: float) -> None:
        emu_device.configure(
            dry_run=True,
            allocator="exact",
            device_bytes_per_second=1e10,
            h2d_bytes_per_second=rate,
            d2h_bytes_per_second=rate,
            register_seconds_per_gib=0.0,
        )

    configure(1e12)
    plain = model_of(**settings).to("emu")
    compute_seconds = seconds_of_token(plain, DynamicCache(config=plain.config), rows, tokens, lambda: None)
    rate = cache_bytes / (ratio * compute_seconds)
    configure(rate)
    model = model_of(**settings)
    with headrace.offload(model, device="emu", device_memory=budget) as handle:
        cache = offload_cache(DynamicCache(config=model.config), handle)
        seconds = seconds_of_token(model, cache, rows, tokens, handle.reset_stats)
        stats = handle.stats()
        assert stats.cache_bytes > 4 * budget >= 4 * stats.device_peak_bytes
        assert stats.cache_onload_bytes > 3 * cache_bytes
        assert (stats.onload_bytes > 0) == (weight_bytes(model) > budget)
        link_seconds = (stats.cache_onload_bytes + stats.onload_bytes) / 3 / rate
    assert seconds <= 1.05 * max(compute_seconds, link_seconds)
    assert link_seconds >= ratio * compute_seconds


@pytest.mark.extended
@pytest.mark.emu("lazy")
def test_a_plan_says_what_a_token_takes(emu_device: ModuleType) -> None:
    """The budget, what rests on the host, what a token brings of weights and of the cache, and its seconds."""
    settings = {"num_hidden_layers": 24, "hidden_size": 64, "intermediate_size": 512, "vocab_size": 16}
    rows, tokens = 4, 1024
    plan = headrace.plan(
        config(**settings),
        hardware=headrace.Hardware.named("4090").changed(link="1GB/s", link_latency_seconds=0),
        device_memory="30MB",
        training="inference",
        method="weights=host,cache=host",
        batch_size=rows,
        sequence_length=tokens,
    )
    assert plan.decoding is not None
    rests = {held.place.value: held.nbytes for held in plan.tiers.held if held.purpose == "keys and values"}
    budget, token = plan.tiers.streaming_bytes + rests["device"], plan.decoding.whole
    rates = {"device_bytes_per_second": 1e12, "h2d_bytes_per_second": 1e9, "d2h_bytes_per_second": 1e9}
    emu_device.configure(dry_run=True, allocator="exact", register_seconds_per_gib=0.0, **rates)
    model = model_of(**settings).bfloat16()
    assert plan.tiers.streaming_bytes < 0.8 * weight_bytes(model)
    with headrace.offload(model, device="emu", device_memory=budget) as handle:
        cache = offload_cache(DynamicCache(config=model.config), handle)
        seconds = seconds_of_token(model, cache, rows, tokens, handle.reset_stats)
        stats = handle.stats()
    assert stats.device_peak_bytes <= budget
    assert stats.cache_bytes == pytest.approx(rests["host"], rel=0.01)
    assert stats.cache_onload_bytes / 3 == pytest.approx(plan.decoding.cache_bytes, rel=0.01)
    blocks = 3 * weight_bytes(model.model.layers[0])  # whole ones stay, and others have to have room beside them
    moved = (stats.onload_bytes + stats.cache_onload_bytes) / 3
    assert rows * token.onload_bytes <= moved <= rows * token.onload_bytes + blocks
    assert 1 <= seconds * token.tokens_per_second / rows <= 1.1


@pytest.mark.core(tier="host", compute_device="emu")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_interrupts(tier: Any, compute_device: torch.device, tmp_path: Path) -> None:
    """After Ctrl-C at any moment of a cache's moves, the model and the cache go on, and no byte is held for nothing."""
    whole, token = prompt(compute_device), prompt(compute_device)[:, :1]
    plain, model = model_of().to(compute_device), model_of()
    budget = int(weight_bytes(model) * 0.7)
    with headrace.offload(model, device=compute_device, device_memory=budget, disk=tmp_path) as handle, torch.no_grad():
        expected = plain(token, past_key_values=plain(whole).past_key_values).logits
        moment, came = 1, True
        while came:
            cache = offload_cache(DynamicCache(config=model.config), handle, tier=tier)
            model(whole, past_key_values=cache)
            came = interrupted_at(moment, partial(model, token, past_key_values=cache), f"movement{os.sep}cache")
            moment += 1 + moment // 3
            for one in cache.layers:
                one.crop(PROMPT - one.get_seq_length())
            assert same(model(token, past_key_values=cache).logits, expected)
            del cache, one
            gc.collect()
            handle.sleep()
            assert handle._residency.held_bytes == handle._ledger.held_bytes(Tier.DEVICE, "weights") == 0
            assert handle._ledger.held_bytes(Tier.HOST, "caches") == handle._ledger.held_bytes(Tier.DISK, "caches") == 0
            assert handle.caches.copies._staging.held_bytes == 0
        assert moment > 100
