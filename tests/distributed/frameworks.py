"""What the ranks of the tests of Trainer, TRL, accelerate and Lightning run; see programs.py.

Each program trains a plain model as the framework does by itself, in DistributedDataParallel, and an offloaded one.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import headrace
from headrace.integrations.ranks import leave_unwrapped
from tests.support.compare import Outcome, assert_same

SETUP = """
import os, sys
rank, size = sys.argv[3], sys.argv[2]
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCHELASTIC_RUN_ID="tests", OMP_NUM_THREADS="1")
"""  # as torchrun does it

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "several_gpus_with_tools.md"


@contextmanager
def offloaded(model: nn.Module, device_memory: int) -> Iterator[headrace.Offloaded]:
    """Whose weights do not fit on the device."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    with headrace.offload(model, device="cpu", device_memory=device_memory, mesh=mesh) as handle:
        yield handle
        stats = handle.stats()
        assert stats.device_peak_bytes <= device_memory < sum(one.nbytes for one in model.parameters())
        assert stats.onload_bytes > device_memory


@contextmanager
def second_fails(owner: Any, name: str) -> Iterator[None]:
    """The first rank's second call of a method that saves raises; then all ranks raise, and say so."""
    calls, own = count(1), getattr(owner, name)

    def call(*args: Any, **named: Any) -> Any:
        if next(calls) == 2 and distributed.get_rank() == 0:
            raise OSError("the drive is full")
        return own(*args, **named)

    said = (OSError, "drive is full"), (headrace.RankError, "rank 0 could not save .* OSError: the drive is full")
    kind, match = said[distributed.get_rank()]
    with mock.patch.object(owner, name, call), pytest.raises(kind, match=match):
        yield


# transformers' Trainer ------------------------------------------------------------------------------------------------
def trainer_run(directory: Path, offloads: bool, changes: dict[str, Any], resume: str | None = None) -> Any:
    """What was logged, the weights, and the trainer. The seed of a run that resumes is another."""
    from transformers import PrinterCallback

    from headrace.integrations.transformers import HeadraceCallback, optimizer_cls_and_kwargs
    from tests.integrations.test_trainer import ROWS, arguments, llama, logged, trainer_of

    changes = dict(changes)
    overlap, saves = changes.pop("overlap", "none"), changes.pop("saves", False)
    settings = arguments(directory, **{"logging_steps": 1, "learning_rate": 0.01, "save_steps": 1, **changes})
    model = llama(seed=int(resume is not None))
    model.config.attention_dropout = 0.3

    def train(**more: Any) -> Any:
        trainer = trainer_of(model, settings, eval_dataset=ROWS[:4], **more)
        if offloads:
            leave_unwrapped(trainer)
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=resume)
        wrapped = isinstance(trainer.model_wrapped, DistributedDataParallel)
        assert wrapped == (not offloads)
        evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
        return trainer, [logged(trainer), evaluated], Outcome().read(model)

    if not offloads:
        return train()
    with offloaded(model, 64 << 10) as handle:
        optimizer = optimizer_cls_and_kwargs(settings, overlap=overlap)
        callbacks = [HeadraceCallback(handle, save=True)] if saves else []
        return train(optimizer_cls_and_kwargs=optimizer, callbacks=callbacks)


def trainer(directory: str, changes: dict[str, Any]) -> None:
    """Losses, norms, evaluations and weights; the best model at the end, where it is asked for."""
    _, logs, plain = trainer_run(Path(directory, "plain"), False, changes)
    trained, found, outcome = trainer_run(Path(directory, "ours"), True, changes)
    assert found == logs
    assert len(logs[0]) > 2
    assert_same(outcome, plain)
    if changes.get("load_best_model_at_end"):
        assert trained.state.best_global_step < trained.state.global_step


def trainer_resumes(directory: str, changes: dict[str, Any]) -> None:
    """From the trainer's checkpoint, or ours, in the middle."""
    where = Path(directory)
    _, logs, plain = trainer_run(where / "plain", False, {})
    trainer_run(where / "ours", True, changes)
    begun = where / "ours" / ("headrace/step-2" if changes.get("saves") else "checkpoint-2")
    _, found, outcome = trainer_run(where / "again", True, changes, str(begun))
    assert found[0][:4] == logs[0][:4]
    assert_same(outcome, plain)


def trainer_cannot_save(directory: str, place: str) -> None:
    from transformers import Trainer

    from headrace.checkpoint.directory import NewDirectory
    from tests.integrations.test_trainer import llama

    where, fails = Path(directory), {"headrace's": (NewDirectory, "publish"), "weights": (Trainer, "_save")}
    with second_fails(*fails.get(place, (Trainer, "_save_optimizer_and_scheduler"))):
        trainer_run(where, True, {"max_steps": 2, "saves": True})
    distributed.barrier()
    assert [path.name for path in (where / "headrace").iterdir()] == ["step-1"]
    headrace.load(where / "headrace" / "step-1", llama())


# accelerate -----------------------------------------------------------------------------------------------------------
def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6)))


STACK_BYTES = 3 * 4 * 33 * 32


def accelerate_run(directory: Path, precision: str, steps: range, *, offloads: bool) -> tuple[list[float], Outcome]:
    """Accumulates, clips, evaluates, saves at the end, and resumes where steps are not the first."""
    from accelerate import Accelerator

    from headrace import optim

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
    if offloads:
        leave_unwrapped(accelerator)
    model, outcome = stack(), Outcome()
    with offloaded(model, STACK_BYTES) if offloads else nullcontext():
        kind: Any = optim.AdamW if offloads else partial(torch.optim.AdamW, fused=True)
        optimizer = kind(model.parameters(), lr=0.01)
        rows = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        loader = torch.utils.data.DataLoader(rows, batch_size=4)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        assert isinstance(prepared, DistributedDataParallel) == (not offloads)
        if steps.start:
            accelerator.load_state(str(directory / str(steps.start)))
        losses = []
        for index, x in enumerate(loader):
            if index not in steps:
                continue
            with accelerator.accumulate(prepared):
                loss = prepared(x).square().mean()
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(prepared.parameters(), 0.05) if accelerator.sync_gradients else 0
                optimizer.step()
                optimizer.zero_grad()
            losses += [loss.item(), float(norm)]
        with torch.no_grad():
            losses += accelerator.gather_for_metrics(prepared(x).square().mean()).tolist()
        accelerator.save_state(str(directory / str(steps.stop)))
        outcome.read(accelerator.unwrap_model(prepared))
    return losses, outcome


def accelerate(directory: str, precision: str) -> None:
    """Losses, norms and weights; and a run that is saved and resumed in the middle."""
    where = Path(directory)
    losses, plain = accelerate_run(where / "plain", precision, range(8), offloads=False)
    found, outcome = accelerate_run(where / "ours", precision, range(8), offloads=True)
    assert found == losses
    assert_same(outcome, plain)
    accelerate_run(where / "begun", precision, range(4), offloads=True)
    distributed.barrier()
    found, outcome = accelerate_run(where / "begun", precision, range(4, 8), offloads=True)
    assert found == losses[2 * 4 :]
    assert_same(outcome, plain)


def refused() -> None:
    """What headrace would not average."""
    from accelerate import Accelerator

    from headrace.integrations.lightning import FabricMeshStrategy

    accelerator, part = Accelerator(cpu=True), stack()
    with offloaded(part, STACK_BYTES):
        with pytest.raises(headrace.StateError, match=r"leave_unwrapped\(trainer\)"):
            accelerator.prepare(part)
        leave_unwrapped(accelerator)
        with pytest.raises(headrace.StateError, match=r"parameter '1\.weight' was not offloaded with mesh="):
            accelerator.prepare(nn.Sequential(part, nn.Linear(32, 2)))
        with pytest.raises(headrace.StateError, match="the Linear was not offloaded with mesh="):
            FabricMeshStrategy().setup_module(nn.Linear(2, 2))
        other = accelerator.prepare(nn.Linear(2, 2))  # as without headrace
        assert isinstance(other, DistributedDataParallel)
        with accelerator.no_sync(other):
            assert not other.require_backward_grad_sync
        part(torch.ones(2, 32)).square().mean().backward()
        part(torch.ones(2, 32)).square().mean().backward()
        part(torch.ones(2, 32))


# Lightning ------------------------------------------------------------------------------------------------------------
def lightning_run(directory: Path, epochs: int, *, offloads: bool, resume: Path | None = None) -> Any:
    """Accumulates, clips, validates, saves each epoch, and loads the best; or resumes."""
    import lightning
    from torch.utils.data import DataLoader, TensorDataset

    from headrace.integrations.lightning import MeshStrategy
    from tests.integrations.test_lightning import Learner

    class Validated(Learner):
        def validation_step(self, batch: Any, index: int) -> None:
            inputs, labels = batch
            loss = nn.functional.cross_entropy(self.model(inputs), labels)
            self.log("loss", loss, sync_dist=True)
            self.losses.append(loss.item())

    learner = Validated(**({"overlap": "forward"} if offloads else {}))
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(96, 64, generator=generator), torch.randint(0, 4, (96,), generator=generator))
    kept = lightning.pytorch.callbacks.ModelCheckpoint(
        directory, "{epoch}", monitor="loss", mode="max", save_top_k=-1, save_weights_only=False
    )
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=2,
        strategy=MeshStrategy() if offloads else "ddp",
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        callbacks=[kept],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loaders = DataLoader(data, batch_size=8), DataLoader(data, batch_size=24)
    with offloaded(learner.model, 3 * 65 * 64 * 4) if offloads else nullcontext():
        if offloads:
            trainer.validate(learner, loaders[1], verbose=False)
            learner.losses.clear()
        trainer.fit(learner, *loaders, ckpt_path=resume, weights_only=False)
        outcome, losses = Outcome().read(learner), list(learner.losses)
        best = torch.load(kept.best_model_path, weights_only=False)
        learner.load_state_dict(best["state_dict"])
        again = trainer.validate(learner, loaders[1], verbose=False)
    return losses, again, outcome, best


def lightning_trainer(directory: str) -> None:
    where = Path(directory)
    losses, again, plain, best = lightning_run(where / "plain", 3, offloads=False)
    found = lightning_run(where / "ours", 3, offloads=True)
    assert found[:2] == (losses, again)
    assert_same(found[2], plain)
    assert_same(found[3]["state_dict"], best["state_dict"])
    mine, theirs = (one["optimizer_states"][0]["state"] for one in (found[3], best))
    assert_same([mine[number]["exp_avg"] for number in theirs], [theirs[number]["exp_avg"] for number in theirs])
    found = lightning_run(where / "on", 3, offloads=True, resume=where / "ours" / "epoch=0.ckpt")
    assert found[0] == losses[-len(found[0]) :]
    assert_same(found[2], plain)


def fabric_run(directory: Path, steps: range, *, offloads: bool) -> tuple[list[float], Outcome]:
    import lightning

    from headrace import optim
    from headrace.integrations.lightning import FabricMeshStrategy

    strategy: Any = FabricMeshStrategy() if offloads else "ddp"
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model, losses = stack(), []
    with offloaded(model, STACK_BYTES) if offloads else nullcontext():
        kind: Any = optim.AdamW if offloads else partial(torch.optim.AdamW, fused=True)
        wrapped, optimizer = fabric.setup(model, kind(model.parameters(), lr=0.01))
        state = {"model": wrapped, "optimizer": optimizer}
        if steps.start:
            fabric.load(directory / f"{steps.start}.ckpt", state)
        for step in steps:
            for last in (False, True):
                seed = 100 * distributed.get_rank() + 10 * step + last
                with fabric.no_backward_sync(wrapped, enabled=not last):
                    loss = wrapped(torch.randn(4, 32, generator=torch.Generator().manual_seed(seed))).square().mean()
                    fabric.backward(loss)
                losses.append(loss.item())
            losses.append(float(fabric.clip_gradients(wrapped, optimizer, max_norm=0.05)))
            optimizer.step()
            optimizer.zero_grad()
        fabric.save(directory / f"{steps.stop}.ckpt", state)
        return losses, Outcome().read(model)


def fabric(directory: str) -> None:
    where = Path(directory)
    losses, plain = fabric_run(where / "plain", range(4), offloads=False)
    found, outcome = fabric_run(where / "ours", range(4), offloads=True)
    assert found == losses
    assert_same(outcome, plain)
    fabric_run(where / "begun", range(2), offloads=True)
    found, outcome = fabric_run(where / "begun", range(2, 4), offloads=True)
    assert found == losses[2 * 3 :]
    assert_same(outcome, plain)


def lightning_cannot_save(directory: str) -> None:
    """Lightning's Trainer and Fabric, whose first checkpoints are whole."""
    from lightning.fabric.plugins import TorchCheckpointIO

    where = Path(directory)
    with second_fails(TorchCheckpointIO, "save_checkpoint"):
        lightning_run(where, 2, offloads=True)
    with second_fails(TorchCheckpointIO, "save_checkpoint"):
        for steps in (range(1), range(1, 2)):
            fabric_run(where, steps, offloads=True)
    distributed.barrier()
    assert sorted(path.name for path in where.iterdir()) == ["1.ckpt", "epoch=0.ckpt"]


# TRL ------------------------------------------------------------------------------------------------------------------
def trl(directory: str, name: str) -> None:
    """A script of test_trl.py on both ranks."""
    from headrace import optim
    from tests.integrations import test_trl

    class Run(test_trl.Run):
        def offload(self, model: Any) -> Any:
            if self.offloads:
                bytes_of_all = sum(one.nbytes for one in model.parameters())
                self.handles.append(self.stack.enter_context(offloaded(model, bytes_of_all * 2 // 3)))
            return model

        def train(self, trainer: Any, config: Any, *given: Any, **more: Any) -> Any:
            def made(*args: Any, **settings: Any) -> Any:
                if not self.offloads:
                    return trainer(*args, **settings)
                optimizer = optim.AdamW(args[0].parameters(), lr=1e-3, weight_decay=0.0)
                one = trainer(*args, **settings, optimizers=(optimizer, None))
                leave_unwrapped(one)
                return one

            trained = super().train(made, config, *given, **more)
            assert isinstance(trained.model_wrapped, DistributedDataParallel) == (not self.offloads)
            return trained

    outcomes = []
    where = Path(directory, str(distributed.get_rank()))
    if distributed.get_rank() == 0:
        for rank in range(2):  # in a group, transformers saves on the first rank alone
            torch.manual_seed(0)
            config = test_trl.LlamaConfig(**test_trl.IDS, **test_trl.SIZES)
            test_trl.LlamaForCausalLM(config).save_pretrained(Path(directory, str(rank), "model"))
    distributed.barrier()
    for offloads in (False, True):
        with ExitStack() as stack, redirect_stdout(StringIO()):
            run = Run(torch.device("cpu"), where, offloads=offloads)
            run.stack = stack  # type: ignore[attr-defined]
            outcomes.append(getattr(test_trl, name)(run))
    assert_same(*outcomes)


# The guide ------------------------------------------------------------------------------------------------------------
def guide(directory: str) -> None:
    """The lines of docs/guides/several_gpus_with_tools.md run."""
    import lightning
    import transformers
    from accelerate import Accelerator

    from tests.integrations import test_lightning, test_trainer

    class Learner(test_lightning.Learner):
        def __init__(self) -> None:
            super().__init__(overlap="none")

    data = torch.utils.data.TensorDataset(torch.zeros(8, 64), torch.zeros(8, dtype=torch.long))
    blocks = re.findall(r"```py\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    namespace: dict[str, Any] = {
        "torch": torch,
        "headrace": headrace,
        "lightning": lightning,
        "rows": test_trainer.ROWS,
    }
    namespace |= {
        "mesh": init_device_mesh("cpu", (2,)),
        "Trainer": transformers.Trainer,
        "Learner": Learner,
    }
    namespace["arguments"] = test_trainer.arguments(Path(directory), max_steps=1)
    namespace["accelerator"] = Accelerator(cpu=True)
    default_root_dir = directory
    for block in blocks:
        namespace |= {"model": test_trainer.llama(), "loader": torch.utils.data.DataLoader(data, batch_size=4)}
        with redirect_stdout(StringIO()):
            block = block.replace('"cuda"', '"cpu"')
            exec(block.replace("max_epochs=1", f"max_epochs=1, logger=False, {default_root_dir=}"), namespace)
    assert len(blocks) == 3
