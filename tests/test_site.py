"""Does the documentation site say what the code is? Every public name, quoted plans, pictures, links."""

import importlib
import re
from pathlib import Path

import pytest

from benchmarks.pictures import IMAGES, PICTURES
from tests.test_documents import PAGES, ROOT, name_of

MODULES = {
    "headrace": {"__version__"},
    "headrace.optim": set(),
    "headrace.formulas": set(),
    "headrace.checkpoint": set(),
    "headrace.compat": set(),
}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_a_section_in_the_reference(module: str):
    pages = "".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    names = set(importlib.import_module(module).__all__) - MODULES[module]
    assert names <= set(re.findall(rf"^::: {re.escape(module)}\.(\w+)$", pages, re.MULTILINE))


def test_the_reference_names_what_is_there():
    for page in ROOT.glob("docs/reference/*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), f"{page.name}: {name}"


QUOTED = re.compile(r"^```text\n# (tests/golden/[\w.-]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_lines_that_pages_quote_from_plans_stand_in_them():
    quotes = [found for page in PAGES for found in QUOTED.findall(page.read_text())]
    assert len(quotes) >= 3
    for path, lines in quotes:
        plan = (ROOT / path).read_text().splitlines()
        assert [line for line in lines.splitlines() if line not in plan] == [], path


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_drawn_from_the_results(name: str):
    assert (IMAGES / f"{name}.svg").read_text() == PICTURES[name](), "run PYTHONPATH=. python benchmarks/pictures.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_to_other_files_lead_somewhere(page: Path):
    """Those to headings are checked by `make docs`."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), target
