"""How does a run look? Its last step's lanes and the memory that it held, drawn by matplotlib."""

import math
import os

from headrace.report.record import RunRecord

_COLOURS = {
    "compute": "#2b6cb0",
    "onload": "#2f855a",
    "gather": "#68a87f",
    "offload": "#b7791f",
    "reduce": "#d9a95a",
    "fetch": "#6b46c1",
    "spill": "#9b2c2c",
}
_STALL = "#e53e3e"


def draw(record: RunRecord, path: str | os.PathLike[str]) -> None:
    """Writes the picture; its kind follows the ending of `path`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error.name} is not installed; run: pip install matplotlib") from error
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    lanes, memory = figure.subplots(2, 1, height_ratios=(3, 2), sharex=True)
    names = record.lanes
    for row, lane in enumerate(names):
        spans = record.of_lane(lane)
        lanes.broken_barh(
            [(span.begin_seconds * 1e3, span.seconds * 1e3) for span in spans],
            (row - 0.4, 0.8),
            facecolors=[_STALL if span.name == "stall" else _COLOURS.get(lane, "#4a5568") for span in spans],
            edgecolor="white",
            linewidth=0.3,
        )
    lanes.set_yticks(range(len(names)), names)
    lanes.invert_yaxis()
    figure.suptitle(record.title)
    lanes.set_title(f"one step of {record.step_seconds * 1e3:.4g} ms; red: compute waits")
    for tier in ("device", "host", "disk"):
        sizes = [getattr(sample, f"{tier}_bytes") / 2**20 for sample in record.samples]
        if any(sizes):
            memory.step([sample.seconds * 1e3 for sample in record.samples], sizes, where="post", label=tier)
        if any(sizes) and record.budgets.get(tier, math.inf) < 2**21 * max(sizes):
            memory.axhline(record.budgets[tier] / 2**20, linestyle=":", linewidth=1, label=f"{tier}, at most")
    memory.set_ylabel("MiB held")
    memory.set_xlabel("ms")
    if record.samples:
        memory.set_ylim(bottom=0)
        memory.legend(loc="upper right")
    figure.savefig(path, dpi=110)
