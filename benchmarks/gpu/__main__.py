"""How fast is headrace on this accelerator, beside the device alone, beside others, and beside what is possible?

    PYTHONPATH=. python -m benchmarks.gpu CASE [--size 8b] [--device-memory 8GiB,16GiB] [--tokens 2048,8192] [--steps 4]
        [--ways headrace,plain] [--output FILE.jsonl]

README.md beside this file says what each figure means, and which commands to run first. Each way runs in a process of
its own, all with the same weights and batches; what cannot run says why, and the others go on. Without an accelerator
nothing is measured. `--device emu` tries the program on the emulated one, where its seconds mean nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.gpu.cases import CASES, Case, Job, is_headrace, jobs_of, sizes_of
from benchmarks.gpu.machine import heading
from benchmarks.gpu.table import Table, judged
from headrace.config import parse_bytes
from headrace.planning.cost import Hardware


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--size", type=words, help=f"several with commas: {', '.join(sizes_of('train'))}")
    parser.add_argument("--device-memory", type=sizes, metavar="BYTES", help="headrace's budgets, such as 8GiB,16GiB")
    parser.add_argument("--host-memory", type=parse_bytes, metavar="BYTES", help="with weights on disk")
    parser.add_argument("--tokens", type=numbers, help="of a step; when decoding, rows: 1,8,64")
    parser.add_argument("--steps", type=int, metavar="N", help="on the clock")
    parser.add_argument("--ways", type=words, help="default: all of the case")
    parser.add_argument("--device", default="", help="default: the current accelerator; emu: the emulated one")
    parser.add_argument("--directory", default=None, help="for weights on disk; default: that of temporary files")
    parser.add_argument("--limit", type=float, default=300, metavar="SECONDS", help="for each way; default 300")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines; rows are added as they come")
    chosen = parser.parse_args()
    known_ways = {way for case in CASES[chosen.case] for way in case.ways}
    known_sizes = {size for case in CASES[chosen.case] for size in sizes_of(case.kind)}
    for flag, given, known in (("--ways", chosen.ways, known_ways), ("--size", chosen.size, known_sizes)):
        unknown = set(given or ()) - known
        if unknown:
            parser.error(f"{flag} {','.join(unknown)}: {chosen.case} has {', '.join(sorted(known))}")
    return chosen


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def sizes(text: str) -> list[int]:
    return [parse_bytes(word) for word in words(text)]


def machine(device: str, directory: str) -> dict[str, Any]:
    """The device and its measured rates, found out in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu.machine", device, directory]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def rows_of(job: Job, hardware: str, limit: float) -> list[dict[str, Any]]:
    """What the job's process has written when it ends, however it ends."""
    file, log = Path(job.directory, "rows"), Path(job.directory, "log")
    file.write_text("")
    command = [sys.executable, "-m", "benchmarks.gpu.child", job.to_json(), hardware, str(file)]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            code = process.wait(limit)
            ending = "" if code == 0 else f"ended with {code}"
        except subprocess.TimeoutExpired:
            ending = f"no answer in {limit:.0f} s"
        finally:
            if process.poll() is None:
                for one in (*psutil.Process(process.pid).children(recursive=True), process):  # compilers, workers
                    one.kill()
                process.wait()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    if ending:
        said = log.read_text().strip().splitlines()
        print("\n".join(said[-30:]), file=sys.stderr)
        about = {"case": job.case, "kind": job.kind, "way": job.way, "size": job.size}
        rows.append(about | {"failed": f"{ending}: {said[-1] if said else ''}"})
    return rows


def run(case: Case, chosen: argparse.Namespace, found: dict[str, Any], write: Any) -> list[dict[str, Any]]:
    """All jobs of one case; each row is judged, shown and written as it comes."""
    hardware = Hardware.from_json(found["hardware"])
    table = Table(case)
    done: list[dict[str, Any]] = []
    jobs = jobs_of(
        case,
        chosen.case,
        device=chosen.device,
        sizes=chosen.size,
        device_memory=chosen.device_memory,
        host_memory=chosen.host_memory,
        loads=chosen.tokens,
        steps=chosen.steps,
        ways=chosen.ways,
    )
    for job in jobs:
        with tempfile.TemporaryDirectory(prefix="headrace-gpu-", dir=chosen.directory) as directory:
            for row in rows_of(replace(job, directory=directory), found["hardware"], chosen.limit):
                row = judged(row, done, hardware)
                done.append(row)
                table.show(row)
                write(row)
    table.compare(done)
    return done


def main() -> None:
    chosen = arguments()
    if chosen.device.split(":")[0] != "emu" and not torch.accelerator.is_available():
        print("nothing was measured: there is no accelerator here (--device emu tries the program without one)")
        return
    found = machine(chosen.device, chosen.directory or tempfile.gettempdir())

    def write(row: dict[str, Any]) -> None:
        if chosen.output is not None:
            with chosen.output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    head = heading(found)
    write(head)
    print("; ".join(f"{name} {value}" for name, value in head.items() if name != "versions"))
    print(", ".join(f"{name} {version}" for name, version in head["versions"].items()), flush=True)
    rows = [row for case in CASES[chosen.case] for row in run(case, chosen, found, write)]
    sys.exit(any("failed" in row and (row["way"] == "plain" or is_headrace(row["way"])) for row in rows))


if __name__ == "__main__":
    main()
