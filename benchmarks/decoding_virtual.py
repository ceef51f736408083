"""What does a token take where no experts are: all blocks visit, or most stay? Virtual time, so no noise.

    PYTHONPATH=. python benchmarks/decoding_virtual.py

A Llama of 16 layers decodes by transformers' `generate` on the emulated accelerator: greedy with a growing cache, with
a static one, with an assistant that is on the device, and a batch of four with padding. Its device has the rates of
`experts_virtual.py`: a layer's load takes 33 times its compute. Room for 3 layers of 16, 12, and 15; with blocks as by
default, where a model that nearly fits is cut more finely than into layers, and with a block for each layer. (How
finely depends on what crosses the link while the host makes a visit; like the device's rates, that is a 200th of a
card's here.)

Rows: milliseconds of a forward of the model in the second half, and these over

- `link|compute`: max(bytes moved / link, the same with all weights on the device, the assistant and the host's part
  included).
- `bound`: what no order of loads can beat with these blocks and this room, by the planner's own lower bounds: where
  most layers stay, the one that comes has room only once another has computed, and all others that are left to compute
  before it are soon done. The bar is 1.05 of the larger of both, with blocks as by default.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from experts_virtual import BAR, LINK, SLOWER, configure

import headrace
from headrace.cli.noise import without_noise
from headrace.planning import lower_bound
from headrace.weights.model import partition

LAYERS, HIDDEN, TOKENS = 16, 256, 40
CASES = ((3, "auto"), (12, "auto"), (15, "auto"), (12, "layers"), (15, "layers"))  # layers that have room, and blocks


def llama(layers: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=256,
        eos_token_id=None,
        bos_token_id=1,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval().requires_grad_(False)


def greedy(model: Any, **settings: Any) -> None:
    prompt = torch.arange(1, 9)[None].to("emu")
    model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TOKENS, do_sample=False, **settings)


def static(model: Any) -> None:
    greedy(model, cache_implementation="static", disable_compile=True)


def assisted(model: Any) -> None:
    assistant = llama(1).to("emu")
    assistant.generation_config.num_assistant_tokens = 3
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    greedy(model, assistant_model=assistant)


def padded(model: Any) -> None:
    prompt = torch.arange(1, 33).view(4, 8).to("emu")
    mask = torch.ones_like(prompt)
    for row in range(4):
        mask[row, :row] = 0
    model.generate(prompt * mask, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)


WAYS: dict[str, Callable[[Any], None]] = {
    "greedy": greedy,
    "static cache": static,
    "assisted": assisted,
    "padded": padded,
}


def measured(model: Any, way: Callable[[Any], None], handle: Any = None) -> tuple[float, float]:
    """Seconds and bytes of a forward, in the second half."""
    moments: list[torch.Event] = []
    moved: list[int] = []

    def begin(_module: Any, _args: Any) -> None:
        moments.append(torch.Event("emu", enable_timing=True))
        moments[-1].record()
        moved.append(0 if handle is None else handle.stats().onload_bytes)

    hook = model.register_forward_pre_hook(begin)
    way(model)
    hook.remove()
    torch.accelerator.synchronize()
    first = len(moments) // 2
    first += (len(moments) - 1 - first) % 2  # plans may take turns
    count = len(moments) - 1 - first
    return moments[first].elapsed_time(moments[-1]) / 1e3 / count, (moved[-1] - moved[first]) / count


def main() -> None:
    print(f"{'':14}{'room':>6}{'blocks':>9}{'ms':>9}{'link|compute':>14}{'bound':>8}{'on the device: ms':>19}")
    worst = 0.0
    partition._VISIT_BYTES //= SLOWER
    for name, way in WAYS.items():
        configure()
        resident, _ = measured(llama(LAYERS).to("emu"), way)
        for room, cut in CASES:
            configure()
            model = llama(LAYERS)
            layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
            limit = sum(parameter.nbytes for parameter in model.parameters()) - (LAYERS - room) * layer + 2**16
            blocks = "auto" if cut == "auto" else layer
            with headrace.offload(model, device="emu", device_memory=limit, blocks=blocks) as handle:
                seconds, nbytes = measured(model, way, handle)
                plan = handle.plan
            simple = max(nbytes / LINK, resident)
            bound = simple if plan is None else max(simple, lower_bound(plan.problem))
            if cut == "auto":
                worst = max(worst, seconds / bound)
            print(
                f"{name:14}{room:6}{cut:>9}{seconds * 1e3:9.1f}"
                f"{seconds / simple:14.3f}{seconds / bound:8.3f}{resident * 1e3:19.1f}",
                flush=True,
            )
    print(f"\nworst {worst:.3f}, bar {BAR}: {'held' if worst <= BAR else 'missed'}")


if __name__ == "__main__":
    with without_noise():
        main()
