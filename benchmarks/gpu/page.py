"""What did the first contact find? One page of all steps and rows, and the rows' table as text.

PYTHONPATH=. python -m benchmarks.gpu.page DIRECTORY
"""

import html
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import is_headrace
from headrace.config import format_bytes

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 90em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; }
td { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { white-space: normal; } td:first-child, td.text, th { text-align: left; }
.bad { color: #b00020; } pre { overflow-x: auto; background: #f6f6f6; padding: 1em; font-size: 12px; }
"""
COLUMNS = {
    "way": lambda row: row["way"],
    "work": lambda row: " ".join(str(row.get(name, "")) for name in ("case", "size", "load", "stage")),
    "budget": lambda row: format_bytes(row["device_memory"]) if row.get("device_memory") else "",
    "s/turn": lambda row: f"{row['seconds']:.3f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.1f}",
    "of plain": lambda row: f"{row['share_of_plain']:.3f}" if "share_of_plain" in row else "",
    "of floor": lambda row: f"{row['share_of_floor']:.3f} ({row['floor_by']})" if "share_of_floor" in row else "",
    "allocated": lambda row: format_bytes(row["device_peak_bytes"]),
    "reserved": lambda row: (
        f"{format_bytes(row['device_reserved_peak_bytes'])} ({row['reserved_over_allocated']:.2f}x)"
    ),
    "host CPU s": lambda row: f"{row['host_cpu_seconds']:.3f}",
    "equal": lambda row: f"{row['results_equal']} of {len(row['results'])}" if "results_equal" in row else "",
}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def cells(row: dict[str, Any]) -> list[str]:
    """The row as texts; of a row that was not measured, why."""
    if "seconds" in row:
        return [column(row) for column in COLUMNS.values()]
    return [COLUMNS["way"](row), COLUMNS["work"](row), row.get("failed") or f"skipped: {row.get('skipped')}"]


def table(head: list[str], rows: list[list[str]], bad: list[bool]) -> str:
    shown = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = ""
    for row, is_bad in zip(rows, bad, strict=True):
        row = [*row, *[""] * (len(head) - len(row))]
        body += f"<tr{' class=bad' * is_bad}>" + "".join(_cell(text) for text in row) + "</tr>\n"
    return f"<table><tr>{shown}</tr>\n{body}</table>"


def _cell(text: str) -> str:
    return f"<td{'' if text[:1].isdigit() else ' class=text'}>{html.escape(text)}</td>"


def is_bad(row: dict[str, Any]) -> bool:
    """Whether something went wrong: nothing measured by us or by the plain run, or other results."""
    ours = row["way"] == "plain" or is_headrace(row["way"])
    return ours and ("failed" in row or ("results_equal" in row and row["results_equal"] < len(row["results"])))


def main() -> None:
    directory = Path(sys.argv[1])
    steps, rows = lines_of(directory / "steps.jsonl"), lines_of(directory / "rows.jsonl")
    heads = [row for row in rows if "versions" in row]
    rows = [row for row in rows if "way" in row]
    texts = [cells(row) for row in rows]
    (directory / "table.txt").write_text("".join("\t".join(text) + "\n" for text in [list(COLUMNS), *texts]))
    about = "; ".join(f"{name} {value}" for name, value in (heads[-1] if heads else {}).items() if name != "versions")
    logs = ""
    for name in dict.fromkeys(step["step"] for step in steps):
        log = directory / f"{name}.log"
        if log.exists():
            logs += f"<h2>{name}</h2><pre>{html.escape(log.read_text()[-6000:])}</pre>"
    done = [[step["step"], str(step["code"]), f"{step['seconds']} s", step["command"]] for step in steps]
    (directory / "page.html").write_text(
        f"<!doctype html><meta charset=utf-8><title>headrace: first contact</title><style>{STYLE}</style>"
        f"<h1>First contact</h1><p>{html.escape(about)}</p>"
        + table(["step", "exit", "took", "command"], done, [step["code"] != 0 for step in steps])
        + table(list(COLUMNS), texts, [is_bad(row) for row in rows])
        + logs
    )
    print(f"{len(steps)} steps, {len(rows)} rows: {directory / 'page.html'}")


if __name__ == "__main__":
    main()
