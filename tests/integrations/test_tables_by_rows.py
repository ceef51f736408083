"""Which tables of transformers' models travel by rows, what does a step then move, and are its bits those of before?"""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
)

import headrace
from tests.support.compare import assert_same_weights
from tests.support.held import weight_bytes

WORDS, WIDTH = 1000, 32
TABLE_BYTES = WORDS * WIDTH * 4
ROW_BYTES = WIDTH * 4


def llama(tied: bool = False) -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=tied, **sizes))


def small_table() -> nn.Module:
    """Its table has half the bytes of a layer."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 640, "num_attention_heads": 2, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, tie_word_embeddings=False, **sizes)).eval()


def bert() -> nn.Module:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3}
    no_dropout = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    return BertModel(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **no_dropout, **sizes))


def t5_sizes() -> T5Config:
    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "dropout_rate": 0.0}
    return T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes)


def t5_encoder() -> nn.Module:
    """Two embeddings hold its table."""
    return T5EncoderModel(t5_sizes())


def t5() -> nn.Module:
    """Three embeddings and the head hold its table."""
    return T5ForConditionalGeneration(t5_sizes())


def tokens(step: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int, device: torch.device) -> torch.Tensor:
    ids = tokens(step).to(device)
    labels = {"labels": ids} if isinstance(model, T5ForConditionalGeneration) else {}
    found = model(input_ids=ids, **labels)
    if labels:
        return found.loss
    return (found.logits if isinstance(model, LlamaForCausalLM) else found.last_hidden_state).square().mean()


@pytest.fixture
def pair(request: pytest.FixtureRequest, compute_device: torch.device) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = request.param()
    return model, copy.deepcopy(model).to(compute_device)


@pytest.mark.parametrize("pair", [llama, small_table, bert, t5_encoder], indirect=True)
def test_a_frozen_table_sends_only_rows(compute_device: torch.device, pair: tuple[nn.Module, nn.Module]) -> None:
    """With room for all but the table, nothing else crosses the link, and a plan agrees."""
    model, plain = (one.eval() for one in pair)
    with (
        headrace.offload(model, device=compute_device, device_memory=weight_bytes(model) - TABLE_BYTES // 2) as handle,
        torch.no_grad(),
    ):
        for step in range(4):
            handle.reset_stats()
            assert torch.equal(loss_of(model, step, compute_device), loss_of(plain, step, compute_device))
        stats = handle.stats()
        assert stats.onload_bytes == stats.row_bytes == len(tokens(3).unique()) * ROW_BYTES
        assert handle.plan is not None
        assert handle.plan.problem.by_rows
        assert handle.plan.predicted.onload_bytes + stats.row_bytes == stats.onload_bytes


@pytest.mark.parametrize("pair", [llama, small_table], indirect=True)
def test_a_frozen_table_leaves_its_room_to_others(
    compute_device: torch.device, pair: tuple[nn.Module, nn.Module]
) -> None:
    model, plain = (one.requires_grad_(False) for one in pair)
    budget = 2 * weight_bytes(model) // 3
    with headrace.offload(model, device=compute_device, device_memory=budget) as handle, torch.no_grad():
        for step in range(5):
            handle.reset_stats()
            assert torch.equal(loss_of(model, step, compute_device), loss_of(plain, step, compute_device))
        stats = handle.stats()
        assert handle.plan is not None
        assert stats.row_bytes == len(tokens(4).unique()) * ROW_BYTES
        assert stats.onload_bytes == handle.plan.predicted.onload_bytes + stats.row_bytes
        assert stats.device_peak_bytes <= budget


@pytest.mark.parametrize("pair", [bert, t5_encoder], indirect=True)
def test_a_trained_table_larger_than_every_layer(
    compute_device: torch.device, pair: tuple[nn.Module, nn.Module]
) -> None:
    """The budget is below the table. Of its gradient, too, only rows cross the link."""
    model, plain = pair
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in pair]
    with headrace.offload(model, device=compute_device, device_memory=TABLE_BYTES - 1) as handle:
        for step in range(4):
            handle.reset_stats()
            for one, optimizer in zip(pair, optimizers, strict=True):
                loss_of(one, step, compute_device).backward()
                optimizer.step()
                optimizer.zero_grad()
        stats = handle.stats()
        rows_bytes = len(tokens(3).unique()) * ROW_BYTES
        assert stats.row_bytes == rows_bytes
        others = {id(p): p.nbytes for name, p in model.named_parameters() if "pooler" not in name}
        assert stats.offload_bytes == sum(others.values()) - TABLE_BYTES + rows_bytes
        assert stats.device_peak_bytes < TABLE_BYTES
        assert_same_weights(model, plain)


@pytest.mark.parametrize(
    "pair", [llama, lambda: llama(tied=True), t5], ids=["as large as the head", "tied", "t5"], indirect=True
)
def test_a_trained_table_that_travels_whole(compute_device: torch.device, pair: tuple[nn.Module, nn.Module]) -> None:
    model, plain = pair
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in pair]
    with headrace.offload(model, device=compute_device, device_memory=TABLE_BYTES + 40_000) as handle:
        for step in range(3):
            for one, optimizer in zip(pair, optimizers, strict=True):
                loss_of(one, step, compute_device).backward()
                optimizer.step()
                optimizer.zero_grad()
        stats = handle.stats()
        assert stats.row_bytes == 0
        assert_same_weights(model, plain)


class TwoHolders(nn.Module):
    """Two embeddings hold a table, as in T5; a third one has a smaller table of its own, with a padding row."""

    def __init__(self, *, sparse: bool = False, max_norm: float | None = None) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, WIDTH, padding_idx=3)
        self.again = nn.Embedding(WORDS, WIDTH, sparse=sparse, max_norm=max_norm)
        self.again.weight = self.shared.weight
        self.other = nn.Embedding(WORDS // 2, WIDTH, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.shared(ids) + self.other(ids // 2)
        for layer in self.layers:
            hidden = layer(hidden) + self.again(ids // 3)
        return hidden


def test_several_embeddings_of_one_table(compute_device: torch.device) -> None:
    torch.manual_seed(0)
    model = TwoHolders()
    plain = copy.deepcopy(model).to(compute_device)
    budget = TABLE_BYTES // 4
    with headrace.offload(model, device=compute_device, device_memory=budget) as handle:
        optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, plain)]
        for step in range(3):
            for one, optimizer in zip((model, plain), optimizers, strict=True):
                ids = tokens(step).to(compute_device)
                ids[0, :2] = 3
                one(ids).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=step > 0)
        assert handle.stats().row_bytes > 0
        assert handle.stats().device_peak_bytes <= budget
        assert_same_weights(model, plain)


@pytest.mark.parametrize("settings", [{"sparse": True}, {"max_norm": 1.0}], ids=["sparse", "max_norm"])
def test_one_holder_that_does_more_keeps_a_table_whole(
    compute_device: torch.device, settings: dict[str, float]
) -> None:
    model = TwoHolders(**settings)
    with pytest.raises(headrace.BudgetError, match="needs 125 KiB"):
        headrace.offload(model, device=compute_device, device_memory=TABLE_BYTES // 4)


def test_a_plan_says_what_a_token_moves(compute_device: torch.device) -> None:
    model = llama().eval().requires_grad_(False)
    room = weight_bytes(model) - TABLE_BYTES // 2
    settings = {"training": "inference", "method": "stream-weights", "sequence_length": 1, "hardware": "4090"}
    plan = headrace.plan(model, device_memory=int(1.12 * room), **settings)
    assert plan.tiers.tables == {0}
    assert plan.decoding is not None
    with headrace.offload(model, device=compute_device, device_memory=room) as handle, torch.no_grad():
        for step in range(4):
            handle.reset_stats()
            model(tokens(step)[:1, :1].to(compute_device))
        assert handle.stats().onload_bytes == plan.decoding.whole.onload_bytes == ROW_BYTES
    roomy = headrace.plan(model, device_memory=2 * weight_bytes(model), **settings)
    assert not roomy.tiers.tables
    assert roomy.decoding is not None
    assert roomy.decoding.whole.onload_bytes == 0
