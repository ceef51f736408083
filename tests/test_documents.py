"""Do the Python examples in the documents run, and are the things there that they name?

Each page's ```python blocks run in order, in one namespace, in an empty directory that holds what the pages take for
granted: a small causal language model saved in `my-model`, and `loader`, batches of token ids on the CPU.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def pages_with_examples() -> list[Path]:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    return [page for page in pages if PYTHON_BLOCK.search(page.read_text())]


@pytest.fixture
def page_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # examples run on the CPU
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "my-model")
    return tmp_path


@pytest.mark.parametrize("page", pages_with_examples(), ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_a_page_run(page: Path, page_directory: Path):
    tokens = torch.randint(64, (2, 16))
    namespace: dict[str, object] = {"loader": [{"input_ids": tokens, "labels": tokens}] * 2}
    for block in PYTHON_BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), namespace)


def test_the_readme_lists_every_example():
    examples = {f"examples/{path.name}": len(path.read_text().splitlines()) for path in ROOT.glob("examples/*.py")}
    del examples["examples/tiny.py"]  # what they share
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    listed = set(re.findall(r"`(examples/[\w/.]+)`", "".join(rows)))
    assert listed == set(examples)
    assert max(examples.values()) <= 60


NAMED = re.compile(r"`(millrace/[\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+)\))?")


def names_in(file: Path) -> set[str]:
    """Functions, classes, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return names


def test_the_tour_leads_to_what_is_there():
    stops = NAMED.findall((ROOT / "docs" / "tour.md").read_text())
    assert len(stops) > 25
    for file, names in stops:
        there = names_in(ROOT / file)
        for name in re.findall(r"[\w.]+", names):
            assert name in there, f"{file} has no {name}"
