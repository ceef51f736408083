"""What is done, and to which model? One step of training, one pass of decoding, one step of denoising."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.cases import Job
from benchmarks.gpu.models import CHANNELS, DITS, LLAMAS, MOES, TEXT_TOKENS, dit, fill, language_model

SEQUENCE, PREFILL_TOKENS = 2048, 4096
BATCHES = 4  # different ones, in turn
RANK = 16
Turn = Callable[[int], Tensor]


@dataclass(frozen=True)
class Stage:
    """Turns that are measured together. A turn gives what the same turn of every other way must give, too."""

    name: str
    turn: Turn
    tokens: int  # of a turn
    warm_up: int = 3  # headrace records the first, and plans the second
    turns: int | None = None  # on the clock; None: as the job says


def is_training(job: Job) -> bool:
    return job.kind in ("train", "lora", "activations")


def build(
    job: Job,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    *,
    recomputing: bool = True,
) -> nn.Module:
    """The model of the job, on `device`, ready to train or to infer."""
    if job.kind == "dit":
        return dit(job.size, device, dtype).eval().requires_grad_(False)
    model: Any = language_model(job.kind, job.size, device, dtype)
    if not is_training(job):
        return model.eval().requires_grad_(False)
    model.train()
    if recomputing:
        older = model.gradient_checkpointing_enable  # transformers before 5.18
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})
    if job.kind == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()  # as PEFT wants it with gradient checkpointing
        settings = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings, autocast_adapter_dtype=False)
        fill(model, (parameter for parameter in model.parameters() if parameter.requires_grad))
    return model


def stages(job: Job, load: int, device: torch.device, forward: Callable[..., Any], step: Any) -> Iterator[Stage]:
    """What is run for one load: `step` trains, `forward` is called as the model is."""
    if is_training(job):
        batches = token_batches(job, load, device)
        yield Stage("step", lambda number: step(batches[number % BATCHES]), batches[0].numel())
    elif job.kind == "dit":
        yield Stage("forward", denoising(job, load, device, forward), load)
    else:
        decoding = Decoding(job, load, device, forward)
        yield Stage("prefill", decoding.prefill, decoding.prompt.numel(), warm_up=2, turns=1)
        yield Stage("decode", decoding.token, load)


def token_batches(job: Job, tokens: int, device: torch.device) -> list[Tensor]:
    """Each (rows, sequence), of `tokens` in all."""
    sequence = min(SEQUENCE, tokens if job.size != "tiny" else 32)
    generator = torch.Generator().manual_seed(1)
    vocabulary = vocabulary_of(job)
    shape = tokens // sequence, sequence
    return [torch.randint(0, vocabulary, shape, generator=generator).to(device) for _ in range(BATCHES)]


def vocabulary_of(job: Job) -> int:
    return (MOES if job.kind == "moe" else LLAMAS)[job.size][5]


class Decoding:
    """A prompt for each row, then tokens one after another, the likeliest each time."""

    def __init__(self, job: Job, rows: int, device: torch.device, forward: Callable[..., Any]) -> None:
        if device.type == "cuda":  # cuDNN makes a plan for each new length of the cache: 42 ms of the host on an H100
            torch.backends.cuda.enable_cudnn_sdp(False)
        total = PREFILL_TOKENS if job.size != "tiny" else 32
        generator = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(0, vocabulary_of(job), (rows, total // rows), generator=generator).to(device)
        self._forward = forward

    @torch.no_grad()
    def prefill(self, number: int) -> Tensor:
        """Anew each time; the tokens that come next, (rows,)."""
        return self._next(self.prompt, None)

    @torch.no_grad()
    def token(self, number: int) -> Tensor:
        """The next one of each row, (rows,)."""
        return self._next(self._last[:, None], self._cache)

    def _next(self, tokens: Tensor, cache: Any) -> Tensor:
        output = self._forward(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        self._last = output.logits[:, -1].argmax(-1)
        return self._last


def denoising(job: Job, tokens: int, device: torch.device, forward: Callable[..., Any]) -> Turn:
    """Steps of denoising one latent; each gives the model's output."""
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, tokens, CHANNELS, generator=generator).to(device, torch.bfloat16)
    text_tokens = min(TEXT_TOKENS, tokens)
    text = torch.randn(1, text_tokens, DITS[job.size][1], generator=generator).to(device, torch.bfloat16)

    @torch.no_grad()
    def turn(number: int) -> Tensor:
        return forward(latents, text, torch.full((1,), 1 / (1 + number % BATCHES)).to(device))

    return turn
