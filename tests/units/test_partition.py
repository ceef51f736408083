"""Is a model cut as a user expects: repeated layers, what is large on its own, and the rest resident?"""

from typing import Any

import pytest
import torch
from torch import nn

from headrace.config import blocks_of, modules_of
from headrace.weights.model.inventory import take_inventory
from headrace.weights.model.partition import Partition, partition
from tests.support.models import linears
from tests.units.models import Decoder, Layer

PLENTY_BYTES = 1 << 30


def cut(
    model: nn.Module, blocks: Any = "auto", resident: Any = (), budget_bytes: int = PLENTY_BYTES, dtype: Any = None
) -> Partition:
    """The partition, after a check that every parameter is in one part."""
    inventory = take_inventory(model, param_dtype=dtype)
    parts = partition(model, inventory, blocks_of(blocks), modules_of(resident, "resident"), budget_bytes)
    keys = [key for part in (*parts.streamed, *parts.resident) for key in part.keys]
    assert sorted(keys) == sorted(inventory.members), "a parameter is in no part, or in two"
    return parts


def names(parts: Partition) -> list[str]:
    return [part.name for part in parts.streamed]


def kept(model: nn.Module, parts: Partition) -> set[str]:
    """Names of the parameters that stay."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_id[key] for part in parts.resident for key in part.keys}


class UNet(nn.Module):
    """Lists of levels, each with lists of its own, as diffusers' UNets have."""

    def __init__(self) -> None:
        super().__init__()

        def level(width: int) -> nn.Module:
            made = nn.Module()
            made.resnets = nn.ModuleList(nn.Conv2d(width, width, 3) for _ in range(2))
            made.attentions = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
            return made

        self.conv_in = nn.Conv2d(3, 8, 3)
        self.down_blocks = nn.ModuleList(level(width) for width in (8, 16))
        self.mid_block = level(16)
        self.up_blocks = nn.ModuleList(level(width) for width in (16, 8))


class Experts(nn.Module):
    """Layers of a small attention and many experts."""

    def __init__(self, *, layers: int = 3, experts: int = 8, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.attention = nn.Linear(width, width)
            layer.experts = nn.ModuleList(Layer(width) for _ in range(experts))
            self.layers.append(layer)


# automatic ----------------------------------------------------------------------------------------------------------
class Writing(nn.Sequential):
    """Eight layers of four matrices, of 16 KiB each."""

    def __init__(self) -> None:
        super().__init__(*(linears(4, 64, bias=False) for _ in range(8)))

    def generate(self) -> None:
        """As models of transformers have it."""


@pytest.mark.parametrize(
    ("missing_layers", "matrices"),
    [(4, 2), (1, 1), (0.25, 2)],  # an eighth of what has no room; none smaller than a matrix; no more than are visited
)
def test_a_model_that_decodes_and_nearly_fits_is_cut_finely(
    monkeypatch: pytest.MonkeyPatch, missing_layers: float, matrices: int
) -> None:
    matrix_bytes, layer_bytes = 16 * 2**10, 64 * 2**10
    monkeypatch.setattr("headrace.weights.model.partition._MISSING_SHARE", 1 / 8)
    monkeypatch.setattr("headrace.weights.model.partition._VISIT_BYTES", 1024)
    model = Writing().eval()
    budget_bytes = int((8 - missing_layers) * layer_bytes)
    parts = cut(model, budget_bytes=budget_bytes)
    inventory = take_inventory(model)
    assert {inventory.nbytes(part.keys) for part in parts.streamed} == {matrices * matrix_bytes}
    layers = [str(index) for index in range(8)]
    assert names(cut(model, budget_bytes=8 * layer_bytes)) == layers
    assert names(cut(model.train(), budget_bytes=budget_bytes)) == layers


def test_layers_embedding_and_head_are_blocks_and_the_rest_stays() -> None:
    model = Decoder()
    parts = cut(model)
    assert names(parts) == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert kept(model, parts) == {"positions", "norm.weight", "norm.bias"}
    assert [part.sites for part in parts.streamed] == [[model.embedding], *([x] for x in model.layers), [model.head]]


@pytest.mark.parametrize("wrap", [nn.ModuleList, lambda layers: nn.Sequential(*layers)])
def test_lists_and_sequences_of_layers_are_alike(wrap: Any) -> None:
    model = nn.Module()
    model.layers = wrap([Layer() for _ in range(3)])
    assert names(cut(model)) == ["layers.0", "layers.1", "layers.2"]


def test_a_model_that_is_a_sequence() -> None:
    assert names(cut(linears(3, 16))) == ["0", "1", "2"]


def test_the_outermost_lists_count() -> None:
    """A ModuleList has no forward: the modules inside it are those that are called."""
    model = nn.Module()
    model.stages = nn.ModuleList(nn.ModuleList(Layer() for _ in range(2)) for _ in range(3))
    parts = cut(model)
    assert names(parts) == ["stages.0", "stages.1", "stages.2"]
    assert [part.sites for part in parts.streamed] == [list(stage) for stage in model.stages]


def test_two_lists_of_layers_are_both_cut() -> None:
    """Double-stream and single-stream blocks of a diffusion transformer."""
    model = nn.Module()
    model.double = nn.ModuleList(Layer(24) for _ in range(2))
    model.single = nn.ModuleList(Layer(16) for _ in range(3))
    assert names(cut(model)) == ["double.0", "double.1", "single.0", "single.1", "single.2"]


def test_a_unet_is_cut_into_levels_and_the_middle() -> None:
    parts = cut(UNet())
    assert names(parts) == ["down_blocks.0", "down_blocks.1", "mid_block", "up_blocks.0", "up_blocks.1"]


def test_layers_above_half_of_the_budget_are_cut_further() -> None:
    model = Experts()
    inventory = take_inventory(model)
    layer_bytes = inventory.nbytes(inventory.below(model.layers[0]))
    budget_bytes = int(1.5 * layer_bytes)
    parts = cut(model, budget_bytes=budget_bytes)
    assert all(inventory.nbytes(part.keys) <= budget_bytes // 2 for part in parts.streamed)
    assert "layers.0.experts.0" in names(parts)
    assert len([name for name in names(parts) if name.startswith("layers.1.experts.")]) == 8
    assert names(cut(model)) == ["layers.0", "layers.1", "layers.2"]  # with room, a layer stays whole


def test_without_repeated_layers_half_of_the_budget_decides() -> None:
    model = nn.Module()
    model.first, model.second, model.third = Layer(16), Layer(16), nn.Linear(4, 4)
    inventory = take_inventory(model)
    layer_bytes = inventory.nbytes(inventory.below(model.first))
    parts = cut(model, budget_bytes=2 * layer_bytes)
    assert names(parts) == ["first", "second"]  # and the third is too small for a trip
    assert names(cut(model, budget_bytes=2 * layer_bytes - 2)) == ["first.up", "first.down", "second.up", "second.down"]


def test_a_leaf_larger_than_half_of_the_budget_is_a_block_all_the_same() -> None:
    assert "embedding" in names(cut(Decoder(vocabulary=4096), budget_bytes=300_000))


def test_tied_parameters_are_in_one_block() -> None:
    model = Decoder(tied=True)
    parts = cut(model)
    assert names(parts) == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3"]
    inventory = take_inventory(model)
    assert len(inventory.members[id(model.head.weight)].places) == 2


def test_modules_that_use_their_childrens_weights_stay_whole() -> None:
    """nn.MultiheadAttention reads out_proj.weight without a call; an RNN reads its own lists."""
    model = nn.Module()
    model.attention, model.rnn = nn.MultiheadAttention(16, 4), nn.LSTM(16, 16, num_layers=2)
    assert names(cut(model, budget_bytes=1000)) == ["attention", "rnn"]


def test_adapters_stay() -> None:
    model = Decoder()
    model.requires_grad_(False)
    for layer in model.layers:
        layer.scale.requires_grad_(True)
    parts = cut(model)
    assert {f"layers.{index}.scale" for index in range(4)} <= kept(model, parts)
    assert names(parts) == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


@pytest.mark.parametrize("frozen", ["nothing", "half"])
def test_many_trainable_parameters_are_no_adapters(frozen: str) -> None:
    model = Decoder()
    if frozen == "half":
        model.layers[0].requires_grad_(False)
        model.layers[1].requires_grad_(False)
    assert kept(model, cut(model)) == {"positions", "norm.weight", "norm.bias"}


def test_adapters_that_would_take_the_budget_travel() -> None:
    model = Decoder()
    model.requires_grad_(False)
    model.layers[0].up.requires_grad_(True)
    inventory = take_inventory(model)
    adapter_bytes = inventory.nbytes(inventory.below(model.layers[0].up))
    assert kept(model, cut(model, budget_bytes=4 * adapter_bytes)) >= {"layers.0.up.weight"}
    assert "layers.0.up.weight" not in kept(model, cut(model, budget_bytes=4 * adapter_bytes - 4))


def test_the_dtype_of_travel_decides_what_fits() -> None:
    model = Experts()
    inventory = take_inventory(model)
    budget_bytes = inventory.nbytes(inventory.below(model.layers[0])) + 2048
    assert names(cut(model, budget_bytes=budget_bytes, dtype=torch.bfloat16)) == ["layers.0", "layers.1", "layers.2"]
    assert len(names(cut(model, budget_bytes=budget_bytes))) > 3


def test_a_model_without_parameters_has_no_parts() -> None:
    assert cut(nn.Sequential(nn.ReLU())) == Partition([], [])


# given --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["modules", "list", "lists inside", "pattern", "list by name"])
def test_blocks_can_be_given_in_many_ways(how: str) -> None:
    model = Decoder()
    blocks: Any = {
        "modules": list(model.layers),
        "list": [model.layers],
        "lists inside": [nn.ModuleList([model.layers[0], nn.ModuleList(model.layers[1:])])],
        "pattern": ["layers.[0-3]"],
        "list by name": ["layers"],
    }[how]
    parts = cut(model, blocks)
    assert [name for name in names(parts) if name.startswith("layers")] == [f"layers.{index}" for index in range(4)]
    assert {"embedding", "head"} <= set(names(parts))


def test_what_is_not_given_is_cut_by_the_size_of_what_is() -> None:
    model = Decoder()
    assert names(cut(model, [model.layers[1]])) == names(cut(model))


def test_blocks_of_a_size_join_neighbours() -> None:
    model = Decoder()
    inventory = take_inventory(model)
    layer_bytes = inventory.nbytes(inventory.below(model.layers[0]))
    parts = cut(model, 2 * layer_bytes)
    assert all(inventory.nbytes(part.keys) <= 2 * layer_bytes for part in parts.streamed)
    assert "layers.0 to layers.1" in " ".join(names(parts))
    assert parts == cut(model, f"{2 * layer_bytes}B")
    fine = cut(model, layer_bytes // 2)
    assert "layers.0.up" in names(fine)
    assert "layers.0.scale" in kept(model, fine)


def test_a_size_above_half_of_the_budget_is_cut_to_it() -> None:
    """Two blocks must be there at once, or nothing can arrive while another computes."""
    model = Decoder()
    inventory = take_inventory(model)
    parts = cut(model, "1GiB", budget_bytes=12_000)
    assert max(inventory.nbytes(part.keys) for part in parts.streamed) <= 6_000


@pytest.mark.parametrize("how", ["module", "pattern of a module", "pattern of parameters", "list"])
def test_what_shall_stay_stays(how: str) -> None:
    model = Decoder()
    resident: Any = {
        "module": [model.layers[2]],
        "pattern of a module": ["layers.2"],
        "pattern of parameters": ["layers.2.*"],
        "list": [nn.ModuleList([model.layers[2]])],
    }[how]
    parts = cut(model, resident=resident)
    assert names(parts) == ["embedding", "layers.0", "layers.1", "layers.3", "head"]
    assert {name for name, _ in model.named_parameters() if name.startswith("layers.2.")} <= kept(model, parts)


# refused ------------------------------------------------------------------------------------------------------------
def overlapping(model: Decoder) -> dict[str, Any]:
    return {
        "twice": [model.layers[0], model.layers[0]],
        "inside": [model.layers[0], model.layers[0].up],
        "around": [model.layers[0].up, model.layers[0]],
        "list and element": [model.layers, model.layers[1]],
        "patterns": ["layers.*", "layers.0.up"],
    }


@pytest.mark.parametrize("how", ["twice", "inside", "around", "list and element", "patterns"])
def test_blocks_that_overlap_are_refused_by_name(how: str) -> None:
    model = Decoder()
    with pytest.raises(ValueError, match=r"blocks overlap: 'layers.\d\S*' and 'layers.\d\S*' .*give each module once"):
        cut(model, overlapping(model)[how])


@pytest.mark.parametrize("setting", ["blocks", "resident"])
@pytest.mark.parametrize("given", ["decoder.layers.*", "Layers.0"])
def test_a_pattern_that_matches_nothing_is_refused(setting: str, given: str) -> None:
    with pytest.raises(ValueError, match=rf"{setting}='{given}' matches no module .*see .*named_modules\(\)"):
        cut(Decoder(), **{setting: [given]})


@pytest.mark.parametrize("setting", ["blocks", "resident"])
@pytest.mark.parametrize("foreign", [Layer(), nn.ModuleList([Layer()])])
def test_a_module_of_another_model_is_refused(setting: str, foreign: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{setting} names a Layer that is not a part of the model"):
        cut(Decoder(), **{setting: [foreign]})


def test_a_block_without_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    with pytest.raises(ValueError, match="block '1' holds no parameters; leave it out of blocks"):
        cut(model, list(model))


@pytest.mark.parametrize("setting", ["blocks", "resident"])
@pytest.mark.parametrize("given", [3, None, torch.zeros(1)])
def test_what_is_neither_module_nor_pattern_is_refused(setting: str, given: Any) -> None:
    with pytest.raises(TypeError, match="names no modules: it is a"):
        cut(Decoder(), **{setting: [given]})


@pytest.mark.parametrize("blocks", [None, 3.5, True, nn.Linear(2, 2)])
def test_blocks_of_another_type_are_refused(blocks: Any) -> None:
    with pytest.raises(TypeError, match="blocks"):
        cut(Decoder(), blocks)


def test_a_size_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="blocks='layers' is not a size"):
        cut(Decoder(), "layers")


def test_experts_that_are_modules_are_called_one_by_one() -> None:
    model = Experts(layers=2, experts=3)
    model.layers[0].shared_experts = nn.ModuleList(Layer(16) for _ in range(2))  # always called
    budget_bytes = take_inventory(model).nbytes(list(take_inventory(model).members)) - 1
    assert not any(
        part.expert_key for part in cut(model, budget_bytes=budget_bytes).streamed
    )  # it is about to be trained
    parts = cut(model.eval(), budget_bytes=budget_bytes)
    called = {part.name: part.expert_key for part in parts.streamed if part.expert_key is not None}
    assert called == {f"layers.{layer}.experts.{one}": (layer, one) for layer in range(2) for one in range(3)}
    assert not any(part.expert_key for part in cut(model).streamed)  # all weights have room
