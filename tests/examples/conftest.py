"""How do the examples run here? In this process, in quiet, where Hugging Face's trainers know the emulated device."""

import inspect
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from tests.integrations.conftest import the_accelerator

_DIRECTORY = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(path.stem for path in _DIRECTORY.glob("*.py") if path.stem != "tiny")


def run_example(name: str, *, as_program: bool) -> dict[str, Any]:
    """The names in an example, which has been run."""
    return runpy.run_path(str(_DIRECTORY / f"{name}.py"), run_name="__main__" if as_program else name)


@pytest.fixture
def at_examples(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """They find each other, write into an empty directory, and trainers take the test's device for the accelerator."""
    uses_device = "compute_device" in request.fixturenames
    device = request.getfixturevalue("compute_device") if uses_device else torch.device("cpu")
    monkeypatch.syspath_prepend(_DIRECTORY)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)  # which has what TMPDIR was
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()
    with the_accelerator(device, monkeypatch):
        yield
    forget_tables()


def forget_tables() -> None:
    """Of positions, which diffusers caches for each model, with the model, for good: on the device they take memory."""
    models = [module for name, module in list(sys.modules.items()) if name.startswith("diffusers.models.transformers.")]
    for model in {kind for module in models for kind in vars(module).values() if inspect.isclass(kind)}:
        for method in filter(inspect.isfunction, vars(model).values()):
            for cell in method.__closure__ or ():
                if hasattr(cell.cell_contents, "cache_clear"):
                    cell.cell_contents.cache_clear()
