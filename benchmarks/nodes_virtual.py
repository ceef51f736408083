"""Do steps of ranks that share one copy take as long as their plan says? Virtual time on the emulated accelerator.

    PYTHONPATH=. python benchmarks/nodes_virtual.py

2 and 4 ranks train a decoder of 24 uniform blocks with a budget of 6, by `onload="own"` and by "gather".
Loading a whole block over a rank's own link takes 0.9, 1.5 and 3 times its forward. Each row shows the settled step
over what the planner predicted, over the step with all weights on the device, and the share of the weights that
crossed a rank's link to the device in a step; of the ranks the slowest counts.

What is modelled: each rank has an emulated accelerator with a clock and two copy engines of its own. A collective is
an exchange on a stream of its own, as long as what comes from other ranks takes at 8 times the link's rate; ranks enter
it together, and wait for each other in no virtual time, as they do the same. Not modelled: that ranks share the host's
memory, what their sums of gradients and their meetings cost the host, and that a collective slows down what computes,
or another collective.
"""

import argparse
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import overlap
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import headrace
from emulator import emu

RATIOS = (0.9, 1.5, 3.0)
BUDGETS = (6,)
RANKS = (2, 4)
PEER_RATE = 8  # of the link's
SETTLED_AFTER = 8  # as overlap.py's, and what ranks need to agree on a plan
BAR = 1.03


@dataclasses.dataclass(frozen=True)
class Collectives:
    """Stands in for DeviceGroup: the time that collectives take, and nothing else."""

    bytes_per_second: float

    def gather(self, ranges: torch.Tensor, _what: str) -> None:
        self._take(ranges)

    def reduce(self, ranges: torch.Tensor, _what: str) -> None:
        self._take(ranges)

    def close(self) -> None:
        """Nothing is held."""

    def _take(self, ranges: torch.Tensor) -> None:
        emu.exchange_with_peers(ranges, ranges.nbytes * (1 - 1 / len(ranges)) / self.bytes_per_second)


def cases() -> list[tuple[str, float, int]]:
    return list(itertools.product(("own", "gather"), RATIOS, BUDGETS))


def measured(onload: str, ratio: float, budget: int) -> dict[str, Any]:
    """One row, as this rank has it."""
    case = overlap.Case(model="uniform", mode="training", ratio=ratio, budget_blocks=budget)
    bandwidth = overlap.configure(case)
    resident = overlap.settled_seconds(_cycles(case.build().to("emu")))
    overlap.configure(case)
    model = case.build()
    block_bytes = overlap.WIDTH**2 * 4 * overlap.LINEARS
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    settings: dict[str, Any] = {"device_memory": budget * block_bytes, "blocks": [model.layers], "onload": onload}
    group = mock.Mock(return_value=Collectives(PEER_RATE * bandwidth))
    with (
        mock.patch("headrace.weights.movement.gathering.DeviceGroup", group),
        mock.patch("headrace.weights.movement.sums.DeviceGroup", group),
        headrace.offload(model, device="emu", mesh=mesh, **settings) as handle,
    ):
        cycle = _cycles(model)
        for _ in range(SETTLED_AFTER - overlap.SETTLED_AFTER):
            cycle()
        handle.reset_stats()
        seconds, plan, stats = overlap.settled_seconds(cycle), handle.plan, handle.stats()
        if plan is None:
            raise RuntimeError("nothing was planned")
        if reports := emu.take_reports():
            raise RuntimeError(f"{len(reports)} races, the first: {reports[0]}")
        crossed = stats.onload_bytes / (overlap.SETTLED_AFTER + overlap.MEASURED) / (overlap.BLOCKS * block_bytes)
        return {
            "predicted": seconds / plan.predicted.cycle_seconds,
            "resident": seconds / resident,
            "crossed": crossed,
            "demand": stats.demand_onloads,
        }


def _cycles(model: torch.nn.Module) -> Any:
    return lambda: overlap.cycle(model, "training")


def run_rank(store: str, world: int, rank: int) -> None:
    """All rows of `world` ranks, one line each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    overlap.WIDTH = 512
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{store}", world_size=world, rank=rank)
    for case in cases():
        print(json.dumps(measured(*case)), flush=True)
        distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        run_rank(arguments.rank[0], int(arguments.rank[1]), int(arguments.rank[2]))
        return
    print("step over                       predicted  resident  weights loaded  on demand")
    worst = dict.fromkeys(("own", "gather"), 0.0)
    for world in RANKS:
        with tempfile.TemporaryDirectory() as directory:
            line = [sys.executable, __file__, "--rank", str(Path(directory) / "store"), str(world)]
            ranks = [
                subprocess.Popen([*line, str(rank)], stdout=subprocess.PIPE, text=True, bufsize=1)
                for rank in range(world)
            ]
            for onload, ratio, budget in cases():
                rows = [json.loads(one.stdout.readline()) for one in ranks if one.stdout is not None]
                row = {name: max(one[name] for one in rows) for name in rows[0]}
                label = f"{world} ranks {onload:7}{ratio:4.1f}{budget:3} blocks"
                print(
                    f"{label:32}{row['predicted']:9.3f} {row['resident']:9.3f} {row['crossed']:15.2f}"
                    f" {row['demand']:10}",
                    flush=True,
                )
                worst[onload] = max(worst[onload], row["predicted"])
            if any(one.wait() for one in ranks):
                raise RuntimeError("a rank has failed")
    for onload, over in worst.items():
        print(f"\nover the prediction, {onload}: worst {over:.3f} (bar {BAR})")


if __name__ == "__main__":
    main()
