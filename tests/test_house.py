"""Is the package still a house one likes to live in: short functions, and no files that import each other in a circle?

`lint-imports` (in `make check`) sees to the rest: imports point down, and siblings do not import each other.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import headrace

ROOT = Path(headrace.__file__).parent
FILES = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
TREES = {name.removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in FILES.items()}
MOST_LINES = 60  # of a function, without its docstring


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    docstring = isinstance(first, ast.Expr) and ast.get_docstring(function) is not None
    of_docstring = (first.end_lineno or 0) - first.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - of_docstring


def imported(tree: ast.AST) -> Iterator[str]:
    """The package's own modules that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in TREES)
        elif isinstance(node, ast.ImportFrom) and node.module in TREES:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & TREES.keys()
            yield from submodules or {node.module}


def test_functions_are_short() -> None:
    long = [
        f"{name}.{function.name}: {lines(function)} lines"
        for name, tree in TREES.items()
        for function in functions(tree)
        if lines(function) > MOST_LINES
    ]
    assert not long


def test_no_files_import_each_other_in_a_circle() -> None:
    try:
        TopologicalSorter({name: set(imported(tree)) for name, tree in TREES.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
