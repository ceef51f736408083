"""Which experts should stay? Rules for who makes room, on a routing that was recorded, beside the best there could be.

    PYTHONPATH=. python benchmarks/experts_cache.py [--steps 300] [--tokens 256]

A small mixture of experts learns Python's own library for a while, so that its routing is a learned one, and then
writes text of its own: what each layer wants for each token is the trace. Each rule walks it with room for so many
experts; what a call wants is never given up for others of the same call. Loads for each token, and the share of wanted
experts that was there:

- lru: the one that was used longest ago goes. Over all layers, and with the room split by layer where it is enough.
- lfu: the one that was used least goes; counts halve every so many tokens (ageing). Of as many uses, the oldest.
- fixed: those that were used most in the first half of the trace stay for good; others come and go.
- ours: what `headrace.planning.Keeping` says: lfu 64, within the layer's share of the room.
- belady: the one that is used farthest in the future goes. No rule loads less.

A second table is of two tiers: beside a disk, host memory has room for so many experts as well. Reads from disk for
each token, where the device keeps what `ours` says, and the host

- layers: whole layers, as many as have room, spread evenly: what headrace does.
- fixed: the experts that were used most in the first half of the trace and are not the device's own share of them.
- passed: what passes through on its way to the device, by the same rule as the device's.
- given up: what the device gives up, by the same rule, and nothing that the device has; it crosses the link back.
- belady: one room as large as both, with the best rule: nothing reads less.

The other traces have no learning in it: for each layer a Zipf law of its own over experts, as flat or steep as
published counts are, where a part of a token's experts are those of the token before.
"""

import argparse
import sysconfig
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers

from headrace.cli.noise import without_noise
from headrace.planning import Keeping, Key

Trace = list[list[Key]]  # what each call wants
LAYERS, EXPERTS, ROUTED = 8, 32, 4


def learned_trace(steps: int, tokens: int) -> Trace:
    """Of a model that has learned for so many steps, and then writes."""
    torch.manual_seed(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24,
        num_experts=EXPERTS,
        num_experts_per_tok=ROUTED,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        bos_token_id=10,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        starts = torch.randint(len(data) - 129, (8,)).tolist()
        batch = torch.stack([data[start : start + 128].long() for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    trace: Trace = []
    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(
            lambda _module, args, layer=layer: trace.append([(layer, one) for one in args[1].unique().tolist()])
        )
    prompt = data[:32].long()[None]
    model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=True)
    return trace[LAYERS:]  # without the prompt


def drawn_trace(tokens: int, steepness: float, kept: float) -> Trace:
    """Of a Zipf law for each layer; this share of a token's experts are those of the token before, on average."""
    generator = torch.Generator().manual_seed(0)
    weights = [
        (1.0 / torch.arange(1, EXPERTS + 1) ** steepness)[torch.randperm(EXPERTS, generator=generator)]
        for _ in range(LAYERS)
    ]
    last: list[list[int]] = [[] for _ in range(LAYERS)]
    trace: Trace = []
    for _ in range(tokens):
        for layer in range(LAYERS):
            stay = [one for one in last[layer] if torch.rand((), generator=generator) < kept]
            law = weights[layer].clone()
            law[stay] = 0
            missing = ROUTED - len(stay)
            new = torch.multinomial(law, missing, generator=generator).tolist() if missing else []
            last[layer] = sorted(stay + new)
            trace.append([(layer, one) for one in last[layer]])
    return trace


def walked(
    trace: Trace, room: int, victim: Callable[[set[Key], set[Key], int], Key], used: Callable[[Key, int], None]
) -> int:
    """Loads, where `victim(held, kept, call)` makes room."""
    held: set[Key] = set()
    loads = 0
    for call, wanted in enumerate(trace):
        for key in wanted:
            if key not in held:
                loads += 1
                if len(held) >= room:
                    held.discard(victim(held, set(wanted), call))
                held.add(key)
        for key in wanted:
            used(key, call)
    return loads


def lru(trace: Trace, room: int) -> int:
    order: OrderedDict[Key, None] = OrderedDict()

    def used(key: Key, _call: int) -> None:
        order[key] = None
        order.move_to_end(key)

    def victim(held: set[Key], kept: set[Key], _call: int) -> Key:
        return next(key for key in order if key in held and key not in kept)

    return walked(trace, room, victim, used)


def lru_by_layer(trace: Trace, room: int) -> int:
    parts: dict[int, Trace] = defaultdict(list)
    for wanted in trace:
        parts[wanted[0][0]].append(wanted)
    return sum(lru(part, room // LAYERS) for part in parts.values()) if room >= LAYERS * ROUTED else lru(trace, room)


def lfu(trace: Trace, room: int, half_life_tokens: int) -> int:
    counts: Counter[Key] = Counter()
    last: dict[Key, int] = {}
    aged = [0]

    def used(key: Key, call: int) -> None:
        if call // (half_life_tokens * LAYERS) > aged[0]:
            aged[0] = call // (half_life_tokens * LAYERS)
            for other in counts:
                counts[other] /= 2  # type: ignore[assignment]
        counts[key] += 1
        last[key] = call

    def victim(held: set[Key], kept: set[Key], _call: int) -> Key:
        return min(held - kept, key=lambda key: (counts[key], last[key]))

    return walked(trace, room, victim, used)


def ours(trace: Trace, room: int) -> int:
    keeping = Keeping(room, LAYERS)
    held: set[Key] = set()
    loads = 0
    for wanted in trace:
        for key in wanted:
            if key not in held:
                loads += 1
                if len(held) >= room:
                    gone = keeping.victim(key[0], wanted)
                    held.discard(gone)
                    keeping.went(gone)
                held.add(key)
                keeping.came(key)
        keeping.used(wanted[0][0], [expert for _, expert in wanted])
    return loads


def fixed(trace: Trace, room: int) -> int:
    counts = Counter(key for wanted in trace[: len(trace) // 2] for key in wanted)
    stay = {key for key, _ in counts.most_common(room - ROUTED)}
    last: dict[Key, int] = {}

    def victim(held: set[Key], kept: set[Key], _call: int) -> Key:
        return min(held - kept - stay or held - kept, key=lambda key: last[key])

    return walked(trace, room, victim, lambda key, call: last.__setitem__(key, call))


def belady(trace: Trace, room: int) -> int:
    uses: dict[Key, list[int]] = defaultdict(list)
    for call, wanted in enumerate(trace):
        for key in wanted:
            uses[key].append(call)
    at: Counter[Key] = Counter()

    def victim(held: set[Key], kept: set[Key], call: int) -> Key:
        def following(key: Key) -> float:
            while at[key] < len(uses[key]) and uses[key][at[key]] <= call:
                at[key] += 1
            return uses[key][at[key]] if at[key] < len(uses[key]) else float("inf")

        return max(held - kept, key=following)

    return walked(trace, room, victim, lambda _key, _call: None)


def two_tiers(trace: Trace, room: int, host_room: int, host: str) -> int:
    """Reads from disk, with a host tier of that kind."""
    keeping, below = Keeping(room, LAYERS), Keeping(host_room, LAYERS)
    stay: set[Key] = set()
    if host == "layers":
        layers = round(host_room / EXPERTS)
        stay = {(round(i * LAYERS / layers), one) for i in range(layers) for one in range(EXPERTS)}
    elif host == "fixed":
        counts = Counter(key for wanted in trace[: len(trace) // 2] for key in wanted)
        stay = {key for key, _ in counts.most_common(room // 2 + host_room)[room // 2 :]}
    held: set[Key] = set()
    kept: set[Key] = set(stay)
    reads = 0

    def keep(key: Key, wanted: list[Key]) -> None:
        if host in ("layers", "fixed") or key in kept:
            return
        if host == "given up":
            below.came(key)
        if len(kept) >= host_room:
            gone = below.victim(key[0], wanted)
            if gone is None:
                return
            below.went(gone)
            if gone == key:
                return
            kept.discard(gone)
        kept.add(key)
        if host != "given up":
            below.came(key)

    for wanted in trace:
        for key in wanted:
            if key in held:
                continue
            reads += key not in kept
            if host == "given up":
                kept.discard(key)
                below.went(key)
            else:
                keep(key, wanted)
            if len(held) >= room:
                gone = keeping.victim(key[0], wanted)
                held.discard(gone)
                keeping.went(gone)
                if host == "given up":
                    keep(gone, wanted)
            held.add(key)
            keeping.came(key)
        experts = [expert for _, expert in wanted]
        keeping.used(wanted[0][0], experts)
        below.used(wanted[0][0], experts)
    return reads


HOSTS = ("layers", "fixed", "passed", "given up")
ROOMS = ((0.05, 0.25), (0.05, 0.5), (0.125, 0.25), (0.125, 0.5), (0.25, 0.25), (0.25, 0.5))


def shown_two_tiers(trace: Trace) -> None:
    tokens = len(trace) // LAYERS
    print(f"\n{'device, host':>14}" + "".join(f"{host:>12}" for host in (*HOSTS, "belady")))
    for shares in ROOMS:
        room, host_room = (max(ROUTED, int(LAYERS * EXPERTS * share)) for share in shares)
        reads = [two_tiers(trace, room, host_room, host) for host in HOSTS]
        cells = [f"{one / tokens:12.1f}" for one in (*reads, belady(trace, room + host_room))]
        print(f"{room:6} and {host_room:3} " + "".join(cells), flush=True)


RULES: dict[str, Callable[[Trace, int], int]] = {
    "lru": lru,
    "lru by layer": lru_by_layer,
    "lfu 16": lambda trace, room: lfu(trace, room, 16),
    "lfu 64": lambda trace, room: lfu(trace, room, 64),
    "fixed": fixed,
    "ours": ours,
    "belady": belady,
}


def shown(name: str, trace: Trace, shares: Iterable[float]) -> None:
    tokens = len(trace) // LAYERS
    wanted = sum(map(len, trace))
    print(f"\n{name}: {tokens} tokens, {wanted / tokens:.0f} experts for each")
    print(f"{'room':>14}" + "".join(f"{rule:>18}" for rule in RULES))
    for share in shares:
        room = max(ROUTED, int(LAYERS * EXPERTS * share))
        loads = [rule(trace, room) for rule in RULES.values()]
        cells = [f"{one / tokens:8.1f} ({1 - one / wanted:5.1%})" for one in loads]
        print(f"{room:6} ({share:4.0%}) " + "".join(f"{cell:>18}" for cell in cells), flush=True)
    shown_two_tiers(trace)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--tokens", type=int, default=256)
    given = arguments.parse_args()
    shares = (0.05, 0.125, 0.25, 0.375, 0.5, 0.75)
    shown("learned", learned_trace(given.steps, given.tokens), shares)
    for steepness, kept in ((0.0, 0.0), (0.6, 0.3), (1.0, 0.3)):
        shown(f"drawn, Zipf {steepness}, {kept:.0%} kept", drawn_trace(given.tokens, steepness, kept), shares)


if __name__ == "__main__":
    with without_noise():
        main()
