"""Which names does millrace export? A change here is a change for users: it belongs in the changelog."""

import subprocess
import sys

import millrace

PUBLIC_NAMES = [
    "ActivationOffloading",
    "ActivationStats",
    "BudgetError",
    "CheckpointError",
    "DiskError",
    "Hardware",
    "HardwareNotFound",
    "LayoutError",
    "MillraceError",
    "Offloaded",
    "Probe",
    "RunPlan",
    "Saving",
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "from_pretrained",
    "load",
    "mark_not_offload",
    "offload",
    "offload_activations",
    "offload_pipeline",
    "plan",
    "probe",
    "save",
]


def test_the_public_names_are_these_and_no_others():
    assert sorted(millrace.__all__) == sorted(PUBLIC_NAMES)


def test_every_public_name_exists():
    missing = [name for name in PUBLIC_NAMES if not hasattr(millrace, name)]
    assert missing == []


def test_pytorchs_compiler_is_not_loaded_before_it_is_needed():
    code = "import sys, millrace; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
