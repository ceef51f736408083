"""Are the architectures that docs/models.md and its sibling call equal on the CPU still equal there?"""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from torch import nn

from tests.zoo.zoo import LIBRARIES, compare

DOCS = Path(__file__).parents[2] / "docs"
# They compute for many seconds, or loop over tokens in Python. `make zoo` runs them.
SLOW = [
    "AceStepAudioTokenDetokenizer",
    "AutoencoderKLMagvit",
    "AutoencoderKLMiniMaxH3Audio",
    "AutoencoderKLMochi",
    "AutoencoderVidTok",
    "I2VGenXLUNet",
    "Kandinsky6SRVAE",
    "LongCatAudioDiTVae",
    "MMAudioVocoder",
    "UNet3DConditionModel",
    "UNetControlNetXSModel",
    "UNetMotionModel",
    "UNetSpatioTemporalConditionModel",
    "afmoe",
    "bailing_hybrid",
    "cvt",
    "falcon_h1",
    "maskformer",
    "olmo_hybrid",
    "pvt",
    "qwen3_5_moe_text",
    "qwen3_next",
    "qwen4_exp_text",
    "regnet",
    "univnet",
]
PAGES = {"transformers": "models.md", "diffusers": "models_diffusers.md"}


def equal_on_the_cpu() -> list[tuple[str, str]]:
    """Each library, with the names of its table whose first column says equal, but for those in `SLOW`."""
    row = re.compile(r"^\| (\S+) \| equal \|", re.MULTILINE)
    found = [(library, name) for library, page in PAGES.items() for name in row.findall((DOCS / page).read_text())]
    return [(library, name) for library, name in found if name not in SLOW]


@cache
def makers(library: str) -> dict[str, Callable[[], nn.Module]]:
    return dict(LIBRARIES[library].models())


@pytest.mark.core(name=["gemma4_text", "llama", "qwen3_moe", "QwenImageTransformer2DModel"])
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("library", "name"), equal_on_the_cpu())
def test_is_equal(library: str, name: str) -> None:
    """Two training steps and an inference, with a budget for half of the weights."""
    found = compare(LIBRARIES[library], makers(library)[name], "cpu", lambda: None)
    assert found["result"] == "equal", found


def test_the_pages_have_all_that_was_built() -> None:
    names = equal_on_the_cpu()
    assert len(names) == len(set(names)) == 321 + 134 - len(SLOW)
