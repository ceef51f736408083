"""What does a directory's config.json decide: is a broken one told by name, and whose dtype is taken?"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headrace
from headrace.errors import CheckpointError
from headrace.integrations.transformers import open_pretrained

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose norms are in float32, and the rest in bfloat16."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).bfloat16()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path)
    return tmp_path


def rewrite(directory: Path, **entries: Any) -> None:
    """Entries of config.json; those that are ... are left out."""
    config = json.loads((directory / "config.json").read_text()) | entries
    kept = {name: entry for name, entry in config.items() if entry is not ...}
    (directory / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"architectures": [3]}, r"has \[3\] for 'architectures'; give a list of names"),
        ({"architectures": "LlamaForCausalLM"}, "has 'LlamaForCausalLM' for 'architectures'; give a list of names"),
        ({"architectures": ...}, r'names no architecture; set architectures there .* \["LlamaForCausalLM"\]'),
        ({"architectures": []}, "names no architecture; set architectures there"),
        ({"architectures": ["set_seed"]}, r"the architectures \['set_seed'\], none of which is a model of this"),
        ({"architectures": ["GenerationConfig"]}, r"\['GenerationConfig'\], none of which is a model of this"),
        ({"quantization_config": "x"}, "has 'x' for 'quantization_config'; give an object with quant_method"),
        ({"quantization_config": [1]}, r"has \[1\] for 'quantization_config'; give an object with quant_method"),
        ({"dtype": "float99"}, "has 'float99' for 'dtype'; give the name of a dtype"),
    ],
)
def test_an_unsound_entry_is_told_by_name(directory: Path, entries: dict[str, Any], says: str) -> None:
    rewrite(directory, **entries)
    with pytest.raises(CheckpointError, match=rf"config\.json .*{says}"):
        headrace.from_pretrained(directory, device="cpu")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("null", "holds None, not an object"),
        ("[]", r"holds \[\], not an object"),
        ('{"a', "is not readable as JSON: Unt"),
    ],
)
def test_a_config_that_is_no_object_is_told(directory: Path, text: str, says: str) -> None:
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config\.json {says}.* save the model again"):
        headrace.from_pretrained(directory, device="cpu")


def test_what_is_no_directory_is_told(directory: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is a file; give the directory that it is in: '.*'"):
        headrace.from_pretrained(directory / "config.json")
    for given, kind in ((None, "NoneType"), (5, "int"), (b"/", "bytes")):
        with pytest.raises(TypeError, match=f"path_or_config is a {kind}; give the directory of a model, or a config"):
            headrace.from_pretrained(given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "entries", [{}, {"dtype": "float16"}, {"dtype": ..., "torch_dtype": "float16"}, {"dtype": {"": "bfloat16"}}]
)
def test_weights_have_the_dtype_of_the_files(directory: Path, entries: dict[str, Any]) -> None:
    """Whatever dtype the config names. Of files that mix several it is that of most bytes, or the config's."""
    rewrite(directory, dtype="bfloat16")
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(directory, dtype="auto").eval()(IDS).logits
        rewrite(directory, **entries)
        model, handle = headrace.from_pretrained(directory, device="cpu", trainable=False)
        with handle:
            assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
            assert model.config.dtype == torch.bfloat16
            assert torch.equal(model(IDS).logits, expected)


@pytest.mark.parametrize("named", ["bfloat16", "float16"])
def test_float32_files_stay_float32_and_are_mapped(directory: Path, named: str) -> None:
    plain = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    plain.save_pretrained(directory)
    rewrite(directory, dtype=named)
    opened, files = open_pretrained(directory)
    assert all(files.name_of(parameter.detach()) for parameter in opened.parameters())
    files.close()
    model, handle = headrace.from_pretrained(directory, device="cpu", trainable=False)
    with handle, torch.no_grad():
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_float32_of_the_config_is_taken_where_the_files_have_some(directory: Path) -> None:
    rewrite(directory, dtype="float32")
    model, handle = headrace.from_pretrained(directory, device="cpu", trainable=False)
    with handle:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
