"""What does a plan say of decoding, and of experts that come one by one? Against counts and sums made by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.planning.cost import MACHINES, Place, RunPlan
from headrace.planning.cost.experts import ExpertCut
from headrace.shapes import shape_of
from tests.cost.conftest import LLAMA_8B, LLAMA_70B

CONFIGS = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "configs").glob("*.json")}
GB = 10**9
ROW = 2 * 2048  # bytes of a token's row in the table of qwen3-30b-a3b


def planned(model: str, **settings: Any) -> RunPlan:
    return headrace.plan(CONFIGS[model], hardware="4090", training="inference", **settings)


@pytest.mark.parametrize(
    ("model", "parameters", "experts", "routed", "expert_bytes"),
    [
        ("gpt-oss-120b", 116_829_156_672, 128, 4, 2 * (3 * 2880 * 2880 + 3 * 2880)),
        ("qwen3-30b-a3b", 30_532_122_624, 128, 8, 2 * 3 * 2048 * 768),
        pytest.param("qwen3-235b-a22b", 235_093_634_560, 128, 8, 2 * 3 * 4096 * 1536, marks=pytest.mark.extended),
        pytest.param("deepseek-v3", 671_026_404_352, 256, 8, 2 * 3 * 7168 * 2048, marks=pytest.mark.extended),
        ("mixtral-8x7b", 46_702_792_704, 8, 2, 2 * 3 * 4096 * 14336),
    ],
)
def test_published_models(model: str, parameters: int, experts: int, routed: int, expert_bytes: int) -> None:
    plan = planned(model)
    assert plan.model.parameters == parameters  # as transformers counts them
    assert plan.decoding is not None
    cut = plan.decoding.cut
    assert cut is not None
    assert (cut.count, cut.routed, cut.expert_bytes) == (experts, routed, expert_bytes)
    dense = 3 if model == "deepseek-v3" else 0
    assert cut.layers == CONFIGS[model]["num_hidden_layers"] - dense
    assert plan.decoding.wanted_experts == pytest.approx(routed)
    assert cut.slots * cut.expert_bytes + cut.other_room_bytes <= cut.budget_bytes
    assert cut.budget_bytes <= plan.tiers.capacity[headrace.planning.cost.Place.DEVICE]


def test_bytes_and_seconds_of_a_token_by_the_share_that_is_there() -> None:
    """Of 48 layers with 8 experts each for a token, a quarter is missing: 96 experts over the link, one at a time.

    Before them the token's row comes, after its number has gone to the host.
    """
    plan = planned("qwen3-30b-a3b", expert_hit_rate=0.75, host_memory=GB * 1000)
    machine, decoding = MACHINES["4090"], plan.decoding
    assert decoding is not None
    assert decoding.given is not None
    missing = 48 * 8 * 0.25
    nbytes = 2 * 3 * 2048 * 768
    assert decoding.given.onload_bytes == missing * nbytes + ROW
    assert decoding.given.fetch_bytes == 0
    waits = (48 + missing + 2) * machine.link_latency_seconds  # one for each layer's router, and of each load
    loads = (missing * nbytes + ROW) / machine.onload_bytes_per_second
    seconds = waits + loads + decoding.compute_seconds
    assert decoding.given.tokens_per_second == pytest.approx(1 / seconds)
    speeds = [rate.tokens_per_second for rate in decoding.rates]
    assert speeds == sorted(speeds)
    assert decoding.whole.tokens_per_second < speeds[0] / 5
    # Each token reads what it uses, and all keys and values.
    used = plan.model.active_parameters - 151936 * 2048
    read = 2 * used + 2048 * 48 * 2 * 4 * 128 * 2
    assert decoding.compute_seconds == pytest.approx(read / machine.device_bytes_per_second, rel=0.01)


def test_a_batch_wants_fewer_experts_than_its_tokens_together() -> None:
    """Of 128 experts 8 for each of 8 tokens: 128 (1 - (1 - 1/16)^8) = 51.6."""
    one, several = (planned("qwen3-30b-a3b", batch_size=size, sequence_length=64).decoding for size in (1, 8))
    assert one is not None
    assert several is not None
    assert several.wanted_experts == pytest.approx(128 * (1 - (15 / 16) ** 8))
    assert several.rates[0].onload_bytes == pytest.approx(
        one.rates[0].onload_bytes * several.wanted_experts / 8 / 8
    )  # for a token
    assert several.rates[0].tokens_per_second > one.rates[0].tokens_per_second


def test_more_device_memory_holds_more_experts() -> None:
    plans = [planned("qwen3-30b-a3b", device_memory=size * GB) for size in (12, 24, 48)]
    cuts = [plan.decoding.cut for plan in plans if plan.decoding is not None]
    assert [cut.slots for cut in cuts if cut is not None] == sorted({cut.slots for cut in cuts if cut is not None})
    for plan, cut in zip(plans, cuts, strict=True):
        assert cut is not None
        assert plan.decoding is not None
        # Each expert more takes its bytes from what is left beside the other weights.
        assert 0 <= cut.budget_bytes - cut.other_bytes - cut.bank_bytes < cut.banks[0] * cut.expert_bytes
        assert plan.decoding.even is not None
        assert plan.decoding.even.hit_rate == pytest.approx(cut.held_share, rel=0.05)


@pytest.mark.extended
def test_what_does_not_travel_alone() -> None:
    """Experts that are trained, that are stored in fewer bits, that all have room, or that several devices share."""
    for settings in ({"weight_bits": 4.5, "device_memory": 12 * GB}, {"device_memory": 100 * GB}, {"hardware": "h100"}):
        decoding = headrace.plan(CONFIGS["qwen3-30b-a3b"], **{"hardware": "4090", "training": "inference"} | settings)
        assert decoding.decoding is not None
        assert decoding.decoding.cut is None
        assert "experts" not in {held.purpose for held in decoding.tiers.held}
    roomy = planned("qwen3-30b-a3b", device_memory=100 * GB, method="stream-weights").decoding
    assert roomy is not None
    assert roomy.cut is None
    assert roomy.whole.onload_bytes == 0
    full = headrace.plan(CONFIGS["qwen3-30b-a3b"], hardware="4090")
    assert full.decoding is None
    assert "experts" not in {held.purpose for held in full.tiers.held}
    assert planned("qwen3-30b-a3b", devices=2).decoding is None
    dense = headrace.plan(LLAMA_70B, hardware="4090", training="inference").decoding
    assert dense is not None
    assert dense.cut is None
    assert dense.whole.onload_bytes > 100 * GB
    assert "tokens/s" in headrace.plan(LLAMA_8B, hardware="4090", training="inference").to_text().splitlines()[-1]


def test_a_prompt_loads_each_expert_and_waits_for_it() -> None:
    """2,048 tokens want all experts, which come once their router has computed: nothing computes meanwhile. What the
    prompt before has left is there: what has room beside the experts of one layer, in each bank.
    """
    plan = planned("qwen3-30b-a3b", host_memory=GB * 1000)
    assert plan.run is not None
    slots = next(held.nbytes for held in plan.tiers.held if held.purpose == "experts") // (2 * 3 * 2048 * 768)
    banks = slots // 128
    left = banks * (slots // banks - 128)
    assert left > 0
    experts = (48 * 128 - left) * 2 * 3 * 2048 * 768
    moved = plan.run.step.moved_bytes[headrace.planning.cost.lanes.CostLane.ONLOAD]
    assert moved == pytest.approx(experts + 2048 * ROW, rel=1e-6)
    loads = experts / MACHINES["4090"].onload_bytes_per_second
    assert plan.run.seconds == pytest.approx(loads + plan.run.floors.compute_seconds, rel=0.05)


def test_experts_beside_adapters_come_in_both_directions() -> None:
    plan = headrace.plan(
        CONFIGS["qwen3-30b-a3b"],
        hardware="4090",
        training="adapter",
        method="stream-weights",
        batch_size=2,
        device_memory=32 * GB,
    )
    assert plan.run is not None
    cut = next(held.nbytes for held in plan.tiers.held if held.purpose == "experts")
    one = 2 * 3 * 2048 * 768
    banks = cut // one // 128
    assert banks >= 2
    moved = plan.run.step.moved_bytes[headrace.planning.cost.lanes.CostLane.ONLOAD]
    rows = 2 * 2048 * ROW  # in forward alone
    assert moved == pytest.approx(2 * (48 - banks) * 128 * one + rows, rel=1e-4)


@pytest.mark.parametrize("rate", [-0.1, 1.5])
def test_a_share_that_is_none(rate: float) -> None:
    with pytest.raises(ValueError, match="expert_hit_rate"):
        planned("qwen3-30b-a3b", expert_hit_rate=rate)


def test_shapes_of_one_expert() -> None:
    for config in CONFIGS.values():
        shape = shape_of(config)
        for block in shape.blocks:
            if block.experts:
                assert block.expert_bytes * block.experts == 2 * block.expert_parameters
                assert block.wanted_experts(1) == pytest.approx(block.experts_per_token)
                assert block.wanted_experts(10**6) == pytest.approx(block.experts)
                assert block.read_bytes(10**6) == pytest.approx(block.weight_bytes)


def test_host_memory_beside_a_disk_has_experts_that_the_device_gave_up() -> None:
    """A fourth of 100 experts has room on the device, and as many on the host: of three that come, two are read."""
    cut = ExpertCut(layers=10, count=10, routed=2, expert_bytes=1000, other_bytes=500, budget_bytes=25500)
    assert cut.slots == 24  # of two banks
    assert cut.read_share(25 * 1000) == pytest.approx(51 / 76)
    assert cut.read_share(0) == 1
    assert cut.read_share(76 * 1000) == cut.read_share(10**6) == 0

    plan = planned("qwen3-30b-a3b", host_memory=32 * GB, expert_hit_rate=0.5)
    decoding = plan.decoding
    assert decoding is not None
    assert decoding.cut is not None
    assert decoding.given is not None
    experts = 48 * 128
    on_host = (1 - decoding.disk_share) * experts
    assert 0 < on_host < experts - decoding.cut.slots
    assert decoding.experts_disk_share == pytest.approx(1 - on_host / (experts - decoding.cut.slots))
    missing = 48 * 8 * 0.5 * decoding.cut.expert_bytes + ROW
    assert decoding.given.fetch_bytes == pytest.approx(missing * decoding.experts_disk_share, rel=1e-6)
    assert decoding.given.onload_bytes == pytest.approx(missing)
    assert f"{1 - decoding.experts_disk_share:.0%} of the others are in host memory" in plan.to_text()


def test_when_a_table_travels_by_rows() -> None:
    """A frozen one that is no head, and that is not small beside a layer; only where not all weights have room."""
    settings: dict[str, Any] = {"hardware": "4090", "method": "stream-weights", "sequence_length": 64}
    for config, others, expected in [
        (LLAMA_8B, {"training": "inference"}, {0}),
        (LLAMA_8B, {"training": "adapter"}, {0}),
        (LLAMA_8B, {"training": "full"}, set()),  # it is not larger than the head
        (LLAMA_8B | {"tie_word_embeddings": True}, {"training": "inference"}, set()),
        (LLAMA_8B | {"vocab_size": 10_000}, {"training": "inference"}, set()),
        (LLAMA_8B, {"training": "inference", "devices": 2}, set()),
        (LLAMA_8B, {"training": "inference", "device_memory": 64 * GB}, set()),
    ]:
        plan = headrace.plan(config, **{"device_memory": 8 * GB} | settings | others)
        assert plan.tiers.tables == expected, others
    token = headrace.plan(LLAMA_8B, **settings | {"sequence_length": 1}, training="inference", device_memory=8 * GB)
    assert token.decoding is not None
    room = token.tiers.streaming_bytes - token.decoding.cache_bytes
    beside = token.model.weight_bytes - 2 * 128256 * 4096 - room
    assert token.decoding.whole.onload_bytes == beside + 2 * 4096


def held(plan: RunPlan, purpose: str) -> dict[Place, int]:
    return {item.place: item.nbytes for item in plan.tiers.held if item.purpose == purpose}


TOKEN = 2 * 8 * 128 * 2  # bytes of keys and values of one token in one layer of LLAMA_8B


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_keys_and_values_that_rest_elsewhere(tier: str) -> None:
    """Room for an eighth more tokens where they rest, for three layers on the device, for six on the way to disk. Each
    token brings all of them, and the weights that do not stay.
    """
    settings: dict[str, Any] = {"hardware": "4090", "training": "inference", "sequence_length": 16384, "batch_size": 2}
    plan, stays = (headrace.plan(LLAMA_8B, method=f"weights=host,cache={at}", **settings) for at in (tier, "device"))
    machine, layer, cached = MACHINES["4090"], 2 * 16384 * TOKEN, 32 * 2 * 16384 * TOKEN
    rests = {Place.DEVICE: 3 * layer, Place.HOST: 6 * layer, Place(tier): cached * 9 // 8}
    assert held(plan, "keys and values") == rests
    assert not held(stays, "keys and values")
    decoding, before = plan.decoding, stays.decoding
    assert decoding is not None
    assert before is not None
    assert decoding.cache_bytes == before.cache_bytes == cached
    assert decoding.lacks_bytes == before.lacks_bytes == 0
    room = stays.tiers.streaming_bytes - 3 * layer
    assert plan.tiers.streaming_bytes == room
    beside = plan.model.weight_bytes - 2 * 128256 * 4096 - room + 2 * 2 * 4096  # the table's rows come alone
    assert decoding.whole.onload_bytes == pytest.approx((beside + cached) / 2, rel=1e-6)
    assert decoding.whole.fetch_bytes == (cached / 2 if tier == "disk" else 0)
    waits = (2 * 34 + 2) * machine.link_latency_seconds  # weights, keys and values of each block; the rows
    link = waits + (beside + cached) / machine.onload_bytes_per_second
    slower = max(link, cached / machine.disk_read_bytes_per_second if tier == "disk" else 0)
    assert slower > decoding.compute_seconds
    assert 2 / decoding.whole.tokens_per_second == pytest.approx(slower, rel=1e-3)
    text = plan.to_text()
    assert f"keys and values {'on disk' if tier == 'disk' else 'in host memory'}" in text
    assert "call      cache = offload_cache(DynamicCache(config=model.config), handle" in text
    asked = int(text.partition('device_memory="')[2].partition(".")[0]) * GB
    assert room + 2 * layer < asked <= room + 3 * layer
    assert plan.to_dict()["method"]["cache"] == tier


def test_keys_and_values_of_windows() -> None:
    """A layer with a window keeps its last tokens alone, and computes with them."""
    settings: dict[str, Any] = {"hardware": "4090", "training": "inference", "sequence_length": 16384}
    kinds = ["sliding_attention", "full_attention"] * 16
    windows = LLAMA_8B | {"sliding_window": 1024, "layer_types": kinds}
    plan, whole = (headrace.plan(one, method="cache=host", **settings) for one in (windows, LLAMA_8B))
    assert held(plan, "keys and values") == {
        Place.DEVICE: 3 * 16384 * TOKEN,
        Place.HOST: 16 * (16384 + 1024) * TOKEN * 9 // 8,
    }
    assert plan.decoding is not None
    assert whole.decoding is not None
    assert plan.decoding.cache_bytes == 16 * (16384 + 1024) * TOKEN
    assert plan.decoding.compute_seconds < whole.decoding.compute_seconds
    assert plan.decoding.whole.tokens_per_second > whole.decoding.whole.tokens_per_second
    short = settings | {"sequence_length": 1024}
    assert held(headrace.plan(windows, method="cache=host", **short), "keys and values") == held(
        headrace.plan(LLAMA_8B, method="cache=host", **short), "keys and values"
    )


def test_keys_and_values_without_room_on_the_device() -> None:
    """They are planned on the host, or on disk where that lacks room, too; and if neither has it, the plan says so."""
    settings: dict[str, Any] = {"hardware": "4090", "training": "inference", "sequence_length": 65536}
    plan = headrace.plan(LLAMA_8B, **settings)
    assert plan.method.cache is Place.HOST
    assert plan.decoding is not None
    assert plan.decoding.lacks_bytes == 0
    assert plan.to_dict() == headrace.plan(LLAMA_8B, method="cache=host", **settings).to_dict()
    stays = headrace.plan(LLAMA_8B, method="cache=device", **settings)
    assert stays.decoding is not None
    assert stays.method.cache is Place.DEVICE
    head = 2 * 128257 * 4096  # the largest block: the output layer, and the norm before it
    assert stays.decoding.lacks_bytes == 32 * 65536 * TOKEN - (stays.tiers.streaming_bytes - head)
    assert "to let them rest in host memory: --method cache=host" in stays.to_text()
    assert headrace.plan(LLAMA_8B, host_memory=8 * GB, **settings).method.cache is Place.DISK
    for none in ({"disk": False, "host_memory": 24 * GB}, {"method": "none", "device_memory": 34 * GB}):
        without = headrace.plan(LLAMA_8B, **settings, **none)
        assert without.decoding is not None
        assert without.method.cache is Place.DEVICE
        assert without.decoding.lacks_bytes > 0
    lacking = headrace.plan(LLAMA_8B, **settings, host_memory=10 * GB, method="weights=host,cache=host")
    assert lacking.shortfall is not None
    assert "keys and values on disk (cache=disk in the method)" in lacking.shortfall.fixes


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "cache=host", "training": "full"},
        {"method": "none,cache=host"},
        {"method": "cache=host", "devices": 2},
        {"method": "cache=disk", "disk": False},
    ],
)
def test_keys_and_values_that_cannot_leave(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cache=disk need inference on one device, with weights off it\. Leave"):
        headrace.plan(LLAMA_8B, **{"hardware": "4090", "training": "inference"} | settings)
