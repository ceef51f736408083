"""What do the rows say? Shares of the device's own speed and of the floor, equal results, and all of it as text."""

from typing import Any

from benchmarks.gpu.cases import Case, is_headrace
from benchmarks.gpu.floor import floor_of
from headrace.config import counted, format_bytes
from headrace.planning.cost import Hardware

Row = dict[str, Any]
KEY = "kind", "size", "load", "stage"


def judged(row: Row, before: list[Row], hardware: Hardware) -> Row:
    """The row, and how it stands to plain's row of the same work, and to the floor of its budget."""
    if "seconds" not in row:
        return row
    same = [other for other in before if "seconds" in other and all(other[name] == row[name] for name in KEY)]
    plain = next((other for other in same if other["way"] == "plain"), None)
    row = dict(row)
    if plain is not None:
        row["share_of_plain"] = plain["seconds"] / row["seconds"]
    if same:
        other = plain or same[0]
        count = equal(row["results"], other["results"])
        row |= {"compared_with": other["way"], "results_equal": count}
        if count < len(row["results"]):
            row["differing"] = f"{row['results'][count]!s:.60}, not {other['results'][count]!s:.60}"
    if is_headrace(row["way"]) and row["kind"] != "activations":
        compute_seconds = (plain or row)["compute_seconds"]
        floors = floor_of(row, compute_seconds, hardware)
        binds = max(floors, key=lambda name: floors[name])
        row |= {"floors": floors, "floor_by": binds, "share_of_floor": floors[binds] / row["seconds"]}
        row["forecast_over_measured"] = row["forecast_seconds"] / row["seconds"]
        if row["planned_seconds"] and row["last_step_seconds"]:
            row["planned_over_measured"] = row["planned_seconds"] / row["last_step_seconds"]
        rates = {
            "onload": hardware.onload_bytes_per_second,
            "offload": hardware.offload_bytes_per_second,
            "fetch": hardware.disk_read_bytes_per_second,
            "spill": hardware.disk_write_bytes_per_second,
        }
        for name, lane in row["lanes"].items():
            lane["probed_bytes_per_second"] = rates.get(name)
    taken = max(row["host_resident_peak_bytes"], row["host_taken_peak_bytes"])
    row["host_bytes_per_parameter"] = taken / row["parameters"]
    return row


def equal(mine: list[Any], others: list[Any]) -> int:
    """How many of the first results are the same, to the last bit."""
    count = 0
    for one, other in zip(mine, others, strict=False):
        if one != other:
            break
        count += 1
    return count


class Table:
    """Rows as text, as they come."""

    def __init__(self, case: Case) -> None:
        print(f"\n{case.about}")
        print(
            f"{'way':18}{'budget':>10}{'size':>6}{'load':>7} {'stage':8}{'tokens/s':>11}{'s/turn':>9}{'of plain':>9}"
            f"{'of floor':>18}{'device peak':>13}{'host B/param':>13}",
            flush=True,
        )

    def show(self, row: Row) -> None:
        budget = format_bytes(row["device_memory"]) if row.get("device_memory") else ""
        start = f"{row['way']:18}{budget:>10}{row['size']:>6}"
        if "seconds" not in row:
            why = f"failed: {row['failed']}" if "failed" in row else f"skipped: {row['skipped']}"
            print(f"{start}{row.get('load', ''):>7} {why}", flush=True)
            return
        share = f"{row['share_of_plain']:.3f}" if "share_of_plain" in row else "-"
        floor = f"{row['share_of_floor']:.3f} ({row['floor_by']})" if "share_of_floor" in row else "-"
        print(
            f"{start}{row['load']:>7} {row['stage']:8}{row['tokens_per_second']:11,.1f}{row['seconds']:9.3f}{share:>9}"
            f"{floor:>18}{format_bytes(row['device_peak_bytes']):>13}{row['host_bytes_per_parameter']:13.1f}"
        )
        for line in details(row):
            print(f"{'':20}{line}", flush=True)

    def compare(self, rows: list[Row]) -> None:
        """Whose results are those of plain."""
        compared = [row for row in rows if "compared_with" in row]
        for row in compared:
            count, total = row["results_equal"], len(row["results"])
            if count < total:
                work = f"{row['way']}, {row['load']} {row['stage']}"
                print(f"{work}: {count} of {total} results equal {row['compared_with']}'s, then {row['differing']}")
        whole = [row for row in compared if row["results_equal"] == len(row["results"])]
        print(f"{counted(len(whole), 'row')} of {len(compared)} with results equal to the last bit", flush=True)


def details(row: Row) -> list[str]:
    """Where a turn's time went, and what was moved at which rate."""
    lines = []
    if "device_weights_peak_bytes" in row:
        peak, budget = row["device_weights_peak_bytes"], row["device_budget_bytes"]
        line = f"weights {format_bytes(peak)} of {format_bytes(budget)}; compute {row['compute_seconds']:.3f} s,"
        line += f" waited {row['stall_seconds']:.3f} s"
        waits = [
            f"{name} {lane['stall_seconds']:.3f} s" for name, lane in row["lanes"].items() if lane["stall_seconds"]
        ]
        line += f" (last: {', '.join(waits)})" if waits else ""
        line += f"; {counted(row['demand_onloads'], 'load')} on demand"
        lines.append(line)
        rates = []
        for name, lane in row["lanes"].items():
            if lane["bytes"]:
                probed = lane["probed_bytes_per_second"]
                beside = f" of {probed / 1e9:.1f}" if probed else ""
                achieved = f"{lane['bytes_per_second'] / 1e9:.1f}{beside} GB/s"
                rates.append(f"{name} {format_bytes(lane['bytes'])} at {achieved}")
        ratios = [
            f"{said} {row[name]:.2f} of measured"
            for name, said in (("planned_over_measured", "planned"), ("forecast_over_measured", "forecast"))
            if name in row
        ]
        lines.append("; ".join([*rates, *ratios]))
    elif is_headrace(row["way"]):
        line = f"waited {row['stall_seconds']:.3f} s; out {format_bytes(row['offload_bytes'])}"
        lines.append(f"{line}, in {format_bytes(row['onload_bytes'])}; {row['demand_onloads']} on demand")
    if row.get("note"):
        lines.append(row["note"])
    return lines
