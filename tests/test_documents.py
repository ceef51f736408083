"""Do the examples and commands in the documents run, and are the things there that they name?

Each page's ```python blocks run in order, in one namespace, and its ```sh blocks line by line, in an empty directory
that holds what the pages take for granted: a small causal language model with its tokenizer in `my-model`, texts in
`books`, conversations in `chat.jsonl`, and `loader`, batches of token ids on the CPU; where a page speaks of it, a
pipeline of diffusers in `my-pipeline`. /nvme is a directory in it. Installing is not done, but its extras are there.

No text says that headrace is installed from PyPI before it is there.
"""

import ast
import contextlib
import gc
import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import datasets
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig

from headrace.cli.main import build_parser, main
from headrace.train.byte_tokenizer import END_ID, PAD_ID, VOCABULARY_SIZE, byte_tokenizer
from tests.ahead.test_probe import small as small_probe  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")), *sorted(ROOT.glob("docs/**/*.md"))]
BLOCK = {kind: re.compile(rf"^```{kind}\n(.*?)^```", re.MULTILINE | re.DOTALL) for kind in ("python", "sh")}
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def pages_with(kind: str) -> list[Path]:
    return [page for page in PAGES if BLOCK[kind].search(page.read_text())]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def page_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    gc.collect()  # what earlier tests left in cycles goes while there is an accelerator
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # examples run on the CPU
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    ids = {"vocab_size": VOCABULARY_SIZE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, **ids)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "my-model")
    MixtralConfig(**sizes, **ids).save_pretrained(tmp_path / "my-mixture")
    config.save_pretrained(tmp_path / "llama-7b")  # a page writes it in Python, and plans it in the shell
    tokenizer = byte_tokenizer(longest=256)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "my-model")
    return tmp_path


def save_pipeline(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small one of an example."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    importlib.import_module("text_to_image").pipeline().save_pretrained(directory)


@pytest.mark.core(page=["README.md", "ten_minutes.md"])
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_examples_of_a_page_run(page: Path, page_directory: Path, monkeypatch: pytest.MonkeyPatch):
    if "my-pipeline" in page.read_text():
        save_pipeline(page_directory / "my-pipeline", monkeypatch)
    tokens = torch.randint(64, (2, 16))
    namespace: dict[str, object] = {"loader": [{"input_ids": tokens, "labels": tokens}] * 2}
    for block in BLOCK["python"].findall(page.read_text()):
        exec(compile(block.replace("/nvme", str(page_directory)), str(page), "exec"), namespace)


@pytest.fixture
def training_data(page_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that an epoch is a few steps."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", page_directory / "datasets")
    (page_directory / "books").mkdir()
    (page_directory / "books" / "one.txt").write_text("Once upon a time. " * 150)
    said = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "They lived."}]
    (page_directory / "chat.jsonl").write_text((json.dumps({"messages": said}) + "\n") * 5)


@pytest.mark.core(page=["README.md", "ten_minutes.md"])
@pytest.mark.usefixtures("training_data", "small_probe")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("page", pages_with("sh"), ids=name_of)
def test_commands_of_a_page_run(page: Path, page_directory: Path, capsys: pytest.CaptureFixture[str]):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for block in BLOCK["sh"].findall(page.read_text()):
        for line in block.splitlines():
            program, *arguments = shlex.split(line.replace("/nvme", str(page_directory)), comments=True)
            if program == "make":  # each takes minutes, and calls what continuous integration calls
                assert set(arguments) <= set(targets), line
            elif program == "pip":
                assert set(re.findall(r"\.\[(\w+)\]", line)) <= set(extras), line
            elif program == "python":  # tests/examples runs them
                assert (ROOT / arguments[0]).is_file(), line
            else:
                assert program == "headrace", f"{line}: make this test know what it is to do"
                fine = (0, 1) if arguments[0] == "doctor" else (0,)  # 1: something is wrong with this machine
                with contextlib.suppress(SystemExit) if arguments[-1] == "--help" else contextlib.nullcontext():
                    assert main(arguments) in fine, f"{line}\n{capsys.readouterr().err}"


# By name, and not from a path, a wheel's file or an address.
INSTALLS = r"(?:pip[\d.x]*(?: -\S+)* install|uv (?:add|tool install)|uvx|poetry add|conda install)"
FROM_PYPI = re.compile(rf"\b{INSTALLS}\b[^`;|&#]*(?<![\w/.-])headrace(?![\w/-])")
MAY_SAY_IT = ROOT / "docs" / "releasing.md"  # when other texts may


def texts_of(file: Path) -> list[str]:
    """Its lines, and what is cut into several of them: code within Markdown, strings of Python."""
    content = file.read_text()
    texts = content.splitlines()
    if file.suffix == ".md":
        texts += [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", content)]
    if file.suffix == ".py":
        strings = (node.value for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Constant))
        texts += [" ".join(value.split()) for value in strings if isinstance(value, str)]
    return texts


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.md", "so `pip install\nheadrace` does", True),
        ("a.md", "pip install --upgrade 'headrace[train]' peft", True),
        ("a.py", "error = ('run: pip install'\n    ' headrace')", True),
        ("a.py", "# python -m pip install headrace", True),
        ("a.md", "`python -m pip --quiet install headrace`, or `pip3.12 install headrace`", True),
        ("a.md", "uv tool install headrace", True),
        ("a.md", "pip install '.[train]'   # headrace and what `headrace train` needs", False),
        ("a.md", "`pip install dist/headrace-0.1.0-py3-none-any.whl`, then `headrace plan`", False),
    ],
)
def test_a_text_that_installs_from_pypi_is_noticed(name: str, content: str, told: bool, tmp_path: Path):
    (tmp_path / name).write_text(content)
    assert any(FROM_PYPI.search(text) for text in texts_of(tmp_path / name)) is told


def test_no_text_installs_headrace_from_pypi():
    """It is not there yet, and whoever takes the name first is given that command. docs/releasing.md says when."""
    kinds = (".md", ".py", ".toml", ".yml", ".html", ".txt", "")
    files = [file for file in ROOT.iterdir() if file.is_file() and file.suffix in kinds]
    for folder in (".ci", "benchmarks", "docs", "emulator", "examples", "headrace"):
        files += [file for file in (ROOT / folder).rglob("*") if file.is_file() and file.suffix in kinds]
    assert len(files) > 300
    told = {name_of(file) for file in files if any(FROM_PYPI.search(text) for text in texts_of(file))}
    assert told <= {name_of(MAY_SAY_IT)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_within_a_text_are_there(page: Path):
    text = page.read_text()
    assert not re.search(r"^ {4,}(\$ )?(headrace|make|pip|python) ", text, re.MULTILINE), "in a block of ```sh it runs"
    parser = build_parser()
    for command in re.findall(r"`headrace( [^`]+)`", text):
        name, *rest = shlex.split(command)
        assert name in parser.commands, command
        known = {option for action in parser.commands[name]._actions for option in action.option_strings}
        assert {word for word in rest if word.startswith("--")} <= known, command


def test_a_table_of_a_page_lists_every_example():
    examples = {f"examples/{path.name}": len(path.read_text().splitlines()) for path in ROOT.glob("examples/*.py")}
    del examples["examples/tiny.py"]  # what they share
    rows = [line for page in PAGES for line in page.read_text().splitlines() if line.startswith("|")]
    listed = set(re.findall(r"`(examples/[\w/.]+)`", "".join(rows)))
    assert listed == set(examples)
    assert max(examples.values()) <= 60


# The test file that a word in a document's table stands for.
SHORT = {
    "config": "test_megatron_config",
    "hybrid": "test_megatron",
    "shares": "test_sub_optimizers",
    "layers": "test_transformer_engine",
    "documents": "test_documents_code",
}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_tests_that_a_page_names_are_there(page: Path):
    """Files, and tests: in the file that a row of a table names before them, else in any."""
    text = page.read_text()
    for path in re.findall(r"`((?:tests|benchmarks|examples)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path
    tests = "".join(path.read_text() for path in ROOT.glob("tests/**/test_*.py"))
    assert [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests] == []
    if page.stem not in ("megatron", "mindie_sd"):
        return
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    for number, tried in rows:
        file = f"test_{page.stem}"
        for word, name in re.findall(r"(?:(\w+) )?`([^`]+)`", tried):
            file = SHORT.get(word, file)
            if re.fullmatch(r"test_\w+", name):
                tests = (ROOT / f"tests/compat/{file}.py").read_text()
                assert f"def {name}(" in tests, f"row {number}: {file}.py has no {name}"
            elif "/" in name:
                assert (ROOT / name).exists(), f"row {number}: {name}"


NAMED = re.compile(r"`(headrace/[\w/]+\.py)`(?: \(((?:`[\w.]+`(?:, )?)+)\))?")


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
