"""Does a plan say what was published of Qwen3-30B-A3B on 16 H100, with 0 to 100% of the optimizer on the host?"""

import pytest

import headrace
from headrace.planning.cost import Place, RunPlan

PUBLISHED = {0.0: (0.996, 47.2), 0.25: (1.871, 43.4), 0.5: (2.484, 39.6), 0.75: (3.187, 35.6), 1.0: (4.189, 32.0)}
# As many parameters as each of the 16 devices updates (tensor 2, pipeline 2, expert 4): 1.91B.
OWN = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 10336,
    "vocab_size": 32000,
}


def planned(share: float) -> RunPlan:
    """One device with an eighth of its node's host memory; rates fitted to the first row and the last."""
    return headrace.plan(
        OWN,
        hardware=headrace.Hardware.named("h100").changed(flops=1.12e14, host=134e9 / 8),
        sequence_length=4096,
        micro_batches=2,
        method="update=host,activations=kept",
        optimizer_fraction=share,
        disk=False,
    )


@pytest.mark.extended
@pytest.mark.usefixtures("short_search")
def test_quarters_of_the_optimizer() -> None:
    """Steps within 10%. Memory falls by 10 bytes for each of 1.91B parameters, where theirs fell by the moments' 8."""
    plans = {share: planned(share) for share in PUBLISHED}
    own = next(held.nbytes for held in plans[0.0].tiers.held if held.purpose == "master and state") / 10
    assert own == pytest.approx(1.906e9, rel=0.01)  # what the published savings come to, at 8 bytes
    assert own * 8 == pytest.approx((47.2 - 32.0) * 1e9, rel=0.01)
    for share, (seconds, _) in PUBLISHED.items():
        assert plans[share].step_seconds == pytest.approx(seconds, rel=0.1)
    for share in (0.25, 0.5, 0.75):
        saved = plans[0.0].tiers.total(Place.DEVICE) - plans[share].tiers.total(Place.DEVICE)
        assert saved == pytest.approx(share * 10 * own, rel=1e-6)
