"""Which names does millrace export? A change here is a change for users: it belongs in the changelog."""

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
    "StateError",
    "Stats",
    "WeightChangedError",
    "__version__",
    "from_pretrained",
    "mark_not_offload",
    "offload",
    "offload_activations",
    "plan",
    "probe",
]


def test_the_public_names_are_these_and_no_others():
    assert sorted(millrace.__all__) == sorted(PUBLIC_NAMES)


def test_every_public_name_exists():
    missing = [name for name in PUBLIC_NAMES if not hasattr(millrace, name)]
    assert missing == []
