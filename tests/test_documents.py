"""Do the Python examples in the documents run?

Each page's ```python blocks run in order, in one namespace, in an empty directory that holds what the pages take for
granted: a small causal language model saved in `my-model`, and `loader`, batches of token ids on the CPU.
"""

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
