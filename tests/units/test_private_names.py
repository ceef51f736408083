"""Does the package use what PyTorch keeps to itself only where runtime/autograd.py says so?"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.runtime import autograd

PACKAGE = Path(headrace.__file__).parent
HOMES = {"runtime/autograd.py", "runtime/torch_rules.py", "runtime/grad_scaler.py", "runtime/sharded.py"}
OF_OTHERS = {
    "_actions",
    "_asdict",
    "_current_frames",
    "_fields",
    "_replace",
    "_register_atexit",
    "_from_config",
    "_experts_implementation",
    "_is_expert_parallel",
    "_save_optimizer_and_scheduler",
    "_optimizers",
}  # Python's, transformers', and the last accelerate's


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def torch_names(tree: ast.Module) -> dict[str, str]:
    """What the names in a file stand for that were imported from PyTorch, or assigned from there."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            dotted = dotted_name(node.value, names)
            if dotted is not None:
                names[node.targets[0].id] = dotted
    return names


def dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, names)
        return None if base is None else f"{base}.{node.attr}"
    return None


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    names = torch_names(tree)
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [dotted_name(node, names) or ""]
        elif isinstance(node, ast.Call) and dotted_name(node.func, {"getattr": "getattr"}) == "getattr":
            base = dotted_name(node.args[0], names)
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            found = [] if base is None else [f"{base}.{name}"]
        for name in found:
            if name.split(".")[0] == "torch" and any(map(is_private, name.split("."))):
                yield node.lineno, name


def test_private_names_of_pytorch_have_one_home() -> None:
    found = [
        f"headrace/{path}:{line}: {name}"
        for path, tree in trees()
        if path not in HOMES
        for line, name in private_uses(tree)
    ]
    assert not found, "give it a name in headrace/runtime/autograd.py:\n" + "\n".join(found)


@pytest.mark.extended
def test_private_attributes_are_listed() -> None:
    """Those of tensors and modules, which are not headrace's own."""
    of_files = dict(trees())
    own = set(OF_OTHERS)
    for tree in of_files.values():
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in ("self", "cls")
            ):
                own.add(node.attr)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
    listed = set(re.findall(r"`(_\w+)`", autograd.__doc__ or ""))
    found = [
        f"headrace/{path}:{node.lineno}: {node.attr}"
        for path, tree in of_files.items()
        if path not in HOMES
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | listed
    ]
    assert not found, "list it in the docstring of headrace/runtime/autograd.py:\n" + "\n".join(found)


def test_what_is_looked_for_is_found() -> None:
    source = """
import torch, torch._dynamo
import torch.nn.functional as F
from torch import _C, nn
from torch.utils._pytree import tree_map
a = torch.Tensor
torch._C._has_storage(x)
torch.autograd.Variable._execution_engine
a._make_subclass
nn.Module._call_impl
getattr(torch, "_foreach_add")
F._threshold
torch.nn.Module.__call__
self._torch, x._version
"""
    assert [line for line, _ in sorted(set(private_uses(ast.parse(source))))] == [2, 4, 5, 7, 7, 8, 9, 10, 11, 12]
