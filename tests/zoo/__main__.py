"""Which architectures of transformers and diffusers train and run offloaded as they do without?

    python -m tests.zoo [--where cpu everything emu] [--only NAME ...] --results zoo.jsonl
    python -m tests.zoo --results zoo.jsonl --write docs/models.md

Or `--of diffusers`, `--write docs/models_diffusers.md`. Hours for all; zoo.py says what is compared.
"""

import argparse
import collections
import json
from functools import partial
from pathlib import Path

import torch

from tests.zoo.zoo import LIBRARIES, PLACES, compare, in_a_process, page


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.zoo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--of", choices=list(LIBRARIES), default="transformers")
    parser.add_argument("--where", nargs="+", choices=list(PLACES), default=list(PLACES))
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--results", type=Path, help="JSON lines, to which those of this run are added")
    parser.add_argument("--write", type=Path, help="nothing is run: a page of the results")
    chosen = parser.parse_args()
    if chosen.write and not chosen.results:
        parser.error("--write makes a page of results: name their file with --results")
    if chosen.write:
        chosen.write.write_text(page(chosen.results, chosen.of))
        return
    torch.set_num_threads(1)
    counts: dict[str, collections.Counter[str]] = {place: collections.Counter() for place in chosen.where}
    library = LIBRARIES[chosen.of]
    for name, make in library.models():
        if chosen.only and name not in chosen.only:
            continue
        for place in chosen.where:
            found = in_a_process(partial(compare, library, make, place))
            counts[place][found["result"]] += 1
            line = {"name": name, "place": place, **found}
            print(f"{name:32} {place:10} {found['result']:10} {found.get('reason', '')[:150]!r}", flush=True)
            if chosen.results:
                with chosen.results.open("a") as file:
                    print(json.dumps(line), file=file)
            if found["result"] == "not built" and place == "cpu":
                break
    for place, count in counts.items():
        print(PLACES[place], dict(count))


if __name__ == "__main__":
    main()
