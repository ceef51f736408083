"""How are many programs run? `python -m tests.programs --mode disk --count 3000 --first-seed 0 --jobs 1`"""

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Iterable

import torch  # noqa: F401

from tests.programs.layers import LAYERS
from tests.programs.models import CHECKPOINTS
from tests.programs.modes import ACTIONS, MODES
from tests.programs.programs import run


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
    parser.add_argument("--encode", action="store_true", help="calls a method of the model other than forward")
    options = parser.parse_args()
    unknown = set(options.without) - {*LAYERS, *CHECKPOINTS, *ACTIONS}
    if unknown:
        parser.error(f"--without: no such layers, checkpoints or actions: {', '.join(sorted(unknown))}")
    seeds = range(options.first_seed, options.first_seed + options.count)
    jobs = [(options.mode, seed, tuple(options.without), options.reduce, options.encode) for seed in seeds]
    began, failures = time.perf_counter(), 0
    with contextlib.ExitStack() as stack:
        results: Iterable[tuple[int, list[str]]] = map(run, jobs)
        if options.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(options.jobs))
            results = pool.imap(run, jobs, chunksize=10)
        for _, lines in results:
            failures += bool(lines)
            if lines:
                print("\n".join(lines), flush=True)
    seconds = time.perf_counter() - began
    print(f"{options.mode}: {options.count} programs, {failures} failed, {1000 * seconds / options.count:.0f} ms each")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
