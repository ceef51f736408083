"""What do the results look like? Draws docs/images/*.svg from benchmarks/results, and one schematic step.

    PYTHONPATH=. python benchmarks/pictures.py

The same results give the same bytes: tests/test_site.py holds the pictures to them.
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"

OURS, OTHERS, INK, MUTED = "#00897b", "#b0bec5", "#263238", "#607d8b"
HEAD = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
    ' font-family="system-ui, sans-serif" font-size="14">\n'
    "<title>{title}</title>\n"
    '<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
)


@dataclass(frozen=True)
class Bar:
    """One measured value; ours have another colour."""

    label: str
    value: float
    ours: bool = False


def text(x: float, y: float, words: str, *, colour: str = INK, anchor: str = "start", size: int = 14) -> str:
    words = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{words}</text>\n'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{colour}"/>\n'


def bars(title: str, note: str, groups: dict[str, list[Bar]], *, digits: int = 2) -> str:
    """Groups of horizontal bars, all on one scale that begins at 0."""
    left, width, row = 250, 760, 26
    longest = max(bar.value for group in groups.values() for bar in group)
    y, drawn = 62.0, ""
    for name, group in groups.items():
        if name:
            drawn += text(20, y + 15, name, colour=MUTED)
            y += row
        for bar in group:
            length = bar.value / longest * (width - left - 80)
            drawn += text(left - 10, y + 15, bar.label, anchor="end")
            drawn += box(left, y + 2, length, row - 8, OURS if bar.ours else OTHERS)
            drawn += text(left + length + 8, y + 15, f"{bar.value:.{digits}f}")
            y += row
        y += 8
    height = int(y + 26)
    return (
        HEAD.format(width=width, height=height, title=title)
        + text(20, 30, title, size=16)
        + text(20, 50, "Shorter is better." if "shorter" in note else "Longer is better.", colour=MUTED, size=12)
        + drawn
        + text(20, height - 14, note.removeprefix("shorter: "), colour=MUTED, size=12)
        + "</svg>\n"
    )


def newest(pattern: str) -> str:
    return sorted(RESULTS.glob(pattern))[-1].read_text()


def number(pattern: str, content: str) -> float:
    """What the first group of the pattern matches. Raises LookupError where the results no longer say it."""
    found = re.search(pattern, content, re.MULTILINE)
    if found is None:
        raise LookupError(f"no result matches {pattern!r}")
    return float(found[1])


def overlap() -> str:
    content = newest("overlap-2*.txt")

    def group(kind: str, ratio: float, blocks: int) -> list[Bar]:
        row = rf"^uniform {kind} +{ratio} +{blocks} blocks +\S+ +\S+ +\S+ +"
        return [
            Bar("headrace", number(row + r"(\S+)", content), ours=True),
            Bar("prefetch beside fixed residents", number(row + r"\S+ \| +\S+ +(\S+)", content)),
            Bar("each layer when it is needed", number(row + r"\S+ \| +(\S+)", content)),
        ]

    return bars(
        "Step time over the step with all weights on the device",
        "shorter: virtual time on the emulated accelerator: 24 equal blocks. Nothing here was timed on a GPU.",
        {
            "training, a load takes 0.9 of its compute, room for 3 blocks": group("training", 0.9, 3),
            "training, 1.5 of its compute, room for 6 blocks": group("training", 1.5, 6),
            "inference, 0.9 of its compute, room for 3 blocks": group("inference", 0.9, 3),
        },
        digits=3,
    )


def disk() -> str:
    content = newest("disk-*.txt")
    ours, theirs = (number(rf"{name}: loaded.* forward (\S+) s", content) for name in ("headrace", "accelerate"))
    return bars(
        "A forward over 4 GiB of weights on disk, over headrace's time",
        "shorter: CPU and a virtual drive, 2 cores, wall-clock; 4 tokens, budgets of 410 MiB.",
        {"": [Bar("headrace", 1.0, ours=True), Bar("accelerate, disk_offload", theirs / ours)]},
    )


def experts() -> str:
    content = newest("experts-2*.txt")
    rates = [number(rf"^ *{name}: +(\S+) tokens/s", content) for name in ("experts", "blocks", "accelerate")]
    return bars(
        "Decoding with a mixture of experts of 7.9 GiB on disk, over accelerate's tokens/s",
        "CPU and a virtual drive, 2 cores that others used too, wall-clock; 2 GiB for each tier.",
        {
            "": [
                Bar("headrace, expert by expert", rates[0] / rates[2], ours=True),
                Bar("headrace, whole layers", rates[1] / rates[2], ours=True),
                Bar("accelerate, disk_offload", 1.0),
            ]
        },
        digits=1,
    )


def optimizer() -> str:
    content = newest("optimizer-step-*.txt").split("DeepSpeed 0.", 1)[1]

    def over(name: str) -> float:
        return number(rf"^ *{name} +\S+ +\S+ +\S+ +\S+ +(\S+)", content)

    return bars(
        "An AdamW step in host memory, over PyTorch's fused float32 step",
        "shorter: CPU, 2 quiet cores, 67 M parameters, medians of paired rounds.",
        {
            "": [
                Bar("headrace, bfloat16 weights", over("ours"), ours=True),
                Bar("headrace, float32 weights", over("ours, float32"), ours=True),
                Bar("DeepSpeedCPUAdam, bfloat16", over("DeepSpeed bfloat16")),
                Bar("DeepSpeedCPUAdam, float32", over("DeepSpeed float32")),
                Bar("PyTorch, fused float32", over("fused float32")),
                Bar("bfloat16 in three passes", over("three passes")),
            ]
        },
    )


def rivals() -> str:
    content = newest("rivals-*.txt")

    def over(task: str, name: str) -> float:
        return number(rf"^{task}: headrace over {name}: (\S+) ", content)

    return bars(
        "headrace's time over that of others, medians of paired turns",
        "shorter: CPU and a virtual drive, 2 quiet cores.",
        {
            "": [
                Bar("forward from disk, accelerate", over("disk", "accelerate"), ours=True),
                Bar("training step, FSDP2 offloaded", over("sharded", "FSDP2"), ours=True),
                Bar("the other", 1.0),
            ]
        },
    )


BLOCKS, ROOM, LOAD, FORWARD, BACKWARD = 8, 4, 0.8, 1.0, 2.0  # of the schematic step


def step() -> str:
    """Eight layers, room for four: what computes, what arrives, what leaves, and the update beside the next forward."""
    compute, onload, offload, update = [], [], [], []
    visits = [("F", block) for block in range(BLOCKS)] + [("B", block) for block in reversed(range(BLOCKS))]
    here: dict[int, float] = {}  # block: the moment from which its memory may be given away
    link = clock = gradients = 0.0
    for index, (phase, block) in enumerate(visits):
        if block in here:
            arrived = 0.0
        else:
            room_at = 0.0
            if len(here) == ROOM:
                later = [other for _, other in visits[index:]]
                wanted = {other: later.index(other) if other in later else len(visits) for other in here}
                room_at = here.pop(max(here, key=lambda other: (wanted[other], -here[other])))
            begin = max(link, room_at)
            link = arrived = begin + LOAD
            onload.append((begin, LOAD, block))
        begin = max(clock, arrived)
        clock = begin + (FORWARD if phase == "F" else BACKWARD)
        compute.append((begin, clock - begin, block, phase))
        here[block] = clock
        if phase == "B":
            gradients = max(gradients, clock) + LOAD
            offload.append((gradients - LOAD, LOAD, block))
    done = gradients
    for block in range(BLOCKS):  # in the order in which the next forward wants them
        update.append((done, 0.6, block))
        done += 0.6
    following, link = gradients + 0.6, gradients
    for block in range(4):  # the first layers of the next forward wait for their own update alone
        link = max(link, gradients + 0.6 * (block + 1)) + LOAD
        onload.append((link - LOAD, LOAD, block))
        following = max(following, link) + FORWARD
        compute.append((following - FORWARD, FORWARD, block, "F"))
    left, scale, top, lane = 150, 31.0, 70, 52
    width = int(left + following * scale + 30)
    height = top + 4 * lane + 70
    shades = ["#004d40", "#00695c", "#00796b", "#00897b", "#26a69a", "#4db6ac", "#80cbc4", "#b2dfdb"]

    def lanes(row: int, name: str, note: str, tasks: list[tuple[float, float, int, str]]) -> str:
        y = top + row * lane
        drawn = text(20, y + 15, name) + text(20, y + 31, note, colour=MUTED, size=11)
        for begin, length, block, label in tasks:
            x = left + begin * scale
            ink = "#ffffff" if block < 5 else INK
            drawn += box(x, y, length * scale - 1.5, 34, shades[block])
            drawn += text(x + length * scale / 2, y + 22, label, colour=ink, anchor="middle", size=12)
        return drawn

    def labelled(tasks: list[tuple[float, float, int]]) -> list[tuple[float, float, int, str]]:
        return [(begin, length, block, str(block + 1)) for begin, length, block in tasks]

    turn = left + next(begin for begin, _, _, phase in compute if phase == "B") * scale
    end = left + gradients * scale
    bottom = top + 4 * lane
    return (
        HEAD.format(width=width, height=height, title="One training step: weights arrive while others compute")
        + text(20, 28, "One training step of eight layers, with room for four on the device", size=16)
        + "".join(
            f'<line x1="{x:.1f}" y1="58" x2="{x:.1f}" y2="{bottom}" stroke="{MUTED}" stroke-dasharray="4 4"/>\n'
            for x in (turn, end)
        )
        + text((left + turn) / 2, 54, "forward", colour=MUTED, anchor="middle", size=12)
        + text((turn + end) / 2, 54, "backward", colour=MUTED, anchor="middle", size=12)
        + text((end + width - 30) / 2, 54, "next forward", colour=MUTED, anchor="middle", size=12)
        + lanes(0, "compute", "on the device", [(b, n, k, str(k + 1)) for b, n, k, _ in compute])
        + lanes(1, "weights arrive", "host to device", labelled(onload))
        + lanes(2, "gradients leave", "device to host", labelled(offload))
        + lanes(3, "update", "on the host", labelled(update))
        + text(
            20,
            bottom + 22,
            "Numbers are layers. The last four stay for backward: they are not loaded twice."
            " Each layer's gradients leave while the one before computes.",
            colour=MUTED,
            size=12,
        )
        + text(
            20,
            bottom + 42,
            "The update runs in the order in which the next forward wants the layers, beside it."
            " Drawn, not measured; a picture of a real step is on the page about reports.",
            colour=MUTED,
            size=12,
        )
        + "</svg>\n"
    )


PICTURES = {
    "step": step,
    "bench-overlap": overlap,
    "bench-disk": disk,
    "bench-experts": experts,
    "bench-optimizer": optimizer,
    "bench-rivals": rivals,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (IMAGES / f"{name}.svg").write_text(draw())
        print(IMAGES / f"{name}.svg")
