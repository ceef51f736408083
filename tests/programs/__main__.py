"""How are many programs run? `python -m tests.programs --mode disk --count 3000 --first-seed 0 --jobs 1`"""

import argparse
import gc
import multiprocessing
import time

import torch  # noqa: F401

from tests.programs.modes import MODES
from tests.programs.programs import judge, random_program, reduced


def run(job: tuple[str, int, tuple[str, ...], bool]) -> tuple[int, list[str]]:
    """The failure of one seed, in lines."""
    mode, seed, without, reduces = job
    program = random_program(mode, seed, without)
    failure = judge(program)
    if seed % 50 == 0:
        gc.collect()
    if failure is None:
        return seed, []
    lines = [f"{mode} {seed}: {failure}"]
    if reduces:
        program, failure = reduced(program, failure)
        lines += [f"    reduced: {program}", f"    {failure}", failure.traceback]
    return seed, lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.programs", description="Runs random programs.")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--without", nargs="*", default=(), help="kinds of layers, checkpoints and actions to leave out"
    )
    parser.add_argument("--reduce", action="store_true", help="makes failing programs smaller, with the traceback")
    options = parser.parse_args()
    if options.mode == "emulated":
        import emulator.emu  # noqa: F401  # before the first backward of the process
    seeds = range(options.first_seed, options.first_seed + options.count)
    jobs = [(options.mode, seed, tuple(options.without), options.reduce) for seed in seeds]
    began, failures = time.perf_counter(), 0
    if options.jobs == 1:
        results = map(run, jobs)
    else:
        results = multiprocessing.get_context("spawn").Pool(options.jobs).imap(run, jobs, chunksize=10)
    for _, lines in results:
        failures += bool(lines)
        if lines:
            print("\n".join(lines), flush=True)
    seconds = time.perf_counter() - began
    print(f"{options.mode}: {options.count} programs, {failures} failed, {1000 * seconds / options.count:.0f} ms each")


if __name__ == "__main__":
    main()
