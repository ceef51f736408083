"""What ranks run that hand a training run on to others: saved by some, loaded by other numbers of them, saved again.

All ranks compute the same batches, so that averages over two or four of them are a single process's gradients.
"""

import random
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import headrace
from headrace import optim
from tests.distributed.meshed import BUDGET_BYTES, Model, batch, cpu_mesh

KINDS: tuple[dict[str, Any], ...] = ({}, {"experts": 4}, {"adapters": True}, {"tied": True})
RULES: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 0.01, "max_grad_norm": 0.05},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Lion": {"lr": 0.001},
    "Adafactor": {},
    "Muon": {"lr": 0.01, "momentum": 0.9},
}
ALONE, TOGETHER = ("plain", "own", "disk"), ("own", "gather", "disk", "zero 1", "zero 2")


class Run:
    """A random run of several stages; the same on all ranks for the same seed."""

    def __init__(self, directory: Path, seed: int) -> None:
        rng = random.Random(seed)
        self.directory = directory
        self.kind, self.rule, self.seed = rng.choice(KINDS), rng.choice(list(RULES)), seed
        self.frozen = {index for index in range(64) if rng.random() < 0.2}
        self.on_disk = rng.random() < 0.3
        self.stages: list[tuple[int, str, list[int | None]]] = []  # ranks, how, and the expert of each step
        for number in range(rng.randrange(3, 5)):
            ranks = rng.choice([1, 2, 4])
            steps = rng.randrange(1, 3) if number == 0 else rng.choice([0, 0, 1, 2])
            experts = [rng.choice([0, 1, 2]) if self.kind.get("experts") else None for _ in range(steps)]
            self.stages.append((ranks, rng.choice(TOGETHER if ranks > 1 else ALONE), experts))

    def __str__(self) -> str:
        stages = ", ".join(f"{ranks} {way} x{len(steps)}" for ranks, way, steps in self.stages)
        return f"seed {self.seed}: {self.kind} {self.rule}{' on disk' if self.on_disk else ''}: {stages}"

    def model(self) -> Model:
        """As it is in the beginning."""
        model = Model(**self.kind)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for index, parameter in enumerate(trained):
            parameter.requires_grad_(index not in self.frozen or index == len(trained) - 1)
        return model

    def optimizer(self, model: nn.Module, stage: int, **settings: Any) -> Any:
        """Of what is trained."""
        if self.on_disk and not settings:
            settings = {"tier": "disk", "disk": str(self.directory / f"state {stage}")}
        trained = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        return getattr(optim, self.rule)(trained, **RULES[self.rule], **settings)

    def run(self, stage: int) -> None:
        """One stage, on this rank."""
        ranks, way, _ = self.stages[stage]
        model = self.model()
        if way == "plain":
            self._train(stage, model, self.optimizer(model, stage))
        elif way.startswith("zero"):
            self._train(stage, model, self.optimizer(model, stage, mesh=cpu_mesh(), zero_stage=int(way[-1])))
        else:
            where: dict[str, Any] = {"device": "cpu", "device_memory": 2 * BUDGET_BYTES}
            if ranks > 1:
                where |= {"mesh": cpu_mesh(), "onload": "gather" if way == "gather" else "own"}
            if way == "disk":
                where |= {"disk": str(self.directory / f"weights {stage}"), "host_memory": ranks * 2**17}
            with headrace.offload(model, **where):
                self._train(stage, model, self.optimizer(model, stage))

    def _train(self, stage: int, model: nn.Module, optimizer: Any) -> None:
        ranks, _, steps = self.stages[stage]
        if stage:
            headrace.load(self.directory / str(stage - 1), model, optimizer)
        self.step(stage, model, optimizer, steps)
        if ranks > 1:
            optimizer.consolidate_state_dict(to=0)
        if distributed.get_rank() == 0:
            headrace.save(self.directory / str(stage), model, optimizer)
        distributed.barrier()

    def step(self, stage: int, model: nn.Module, optimizer: Any, steps: list[int | None]) -> None:
        """Steps of a stage, whoever does them."""
        for number, expert in enumerate(steps):
            model(batch(0, 10 * stage + number), expert).backward()
            optimizer.step()
            optimizer.zero_grad()

    def check(self) -> None:
        """Each checkpoint has the weights and the state that a process has which ran through."""
        model = self.model()
        optimizer = getattr(optim, self.rule)(
            [pair for pair in model.named_parameters() if pair[1].requires_grad], **RULES[self.rule]
        )
        for stage, (_, _, steps) in enumerate(self.stages):
            self.step(stage, model, optimizer, steps)
            found = self.model()
            of_found = self.optimizer(found, 100 + stage)
            headrace.load(self.directory / str(stage), found, of_found)
            for (name, ours), plain in zip(found.state_dict().items(), model.state_dict().values(), strict=True):
                assert torch.equal(ours, plain), f"{self}: stage {stage}: {name}"
            mine, theirs = of_found.state_dict()["state"], optimizer.state_dict()["state"]
            assert mine.keys() == theirs.keys(), f"{self}: stage {stage}: state of {sorted(mine)}, not {sorted(theirs)}"
            for number, entries in theirs.items():
                for key, value in entries.items():
                    assert torch.equal(torch.as_tensor(mine[number][key]), torch.as_tensor(value)), (
                        f"{self}: stage {stage}: {key} of parameter {number}"
                    )


def runs(directory: str, seeds: range) -> list[Run]:
    """Those of these seeds, in folders of their own."""
    return [Run(Path(directory) / str(seed), seed) for seed in seeds]


def stage(directory: str, seeds: range, number: int) -> None:
    """Of all of these runs whose stage of this number is for as many ranks as there are."""
    for run in runs(directory, seeds):
        if number < len(run.stages) and run.stages[number][0] == distributed.get_world_size():
            run.directory.mkdir(exist_ok=True)
            run.run(number)


def check(directory: str, seeds: range) -> None:
    """All stages are over: in one process."""
    for run in runs(directory, seeds):
        run.check()
