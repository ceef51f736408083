"""How does a test start processes of its own without importing PyTorch in each? From one that has imported it already.

The `nursery` fixture runs Python code in a child that was forked from a process in which headrace is imported, and in
which nothing has happened yet. The code is the end of the child's main module: an exception, Ctrl-C and the end of the
interpreter are what they are in a script.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

_MAIN = """
import gc, importlib, json, os, sys
import torch._dynamo  # the first optimizer imports it
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.tensor.parallel
import headrace.optim
import pytest
for name in headrace.__all__:  # which are imported when they are first asked for
    getattr(headrace, name)
gc.freeze()  # children copy fewer pages of memory, and their interpreters end in a third of the time
while True:
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        os._exit(0)
    if "imports" in order:
        for name in order["imports"]:
            importlib.import_module(name)
        gc.freeze()
        print(flush=True)
        continue
    if "wait" in order:
        print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
writes = os.O_WRONLY | os.O_CREAT
for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, order["output"], writes), (2, order["errors"], writes)):
    descriptor = os.open(path, flags)
    os.dup2(descriptor, number)
    os.close(descriptor)
sys.argv = ["child", *order["arguments"]]
exec(compile(order["code"], "<child>", "exec"))
"""


class Child:
    """A process under way."""

    def __init__(self, nursery: "Nursery", pid: int, output: Path, errors: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._errors = errors
        self._code: int | None = None
        self._output = output.open()  # which lets the child begin

    def read_line(self) -> str:
        """The next line that it prints; empty at its end."""
        return self._output.readline()

    def read_rest(self) -> str:
        """All that it prints from here to its end."""
        return self._output.read()

    @property
    def errors(self) -> str:
        """What it has written to its standard error."""
        return self._errors.read_text()

    def send(self, number: int) -> None:
        """It gets this signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code once it has ended; -n of one that signal n has ended."""
        if self._code is None:
            self._code = int(self._nursery.order(wait=self.pid))
        return self._code

    def close(self) -> None:
        """It is gone."""
        if self._code is None:
            self.send(signal.SIGKILL)
            self.wait()
        self._output.close()


class Nursery:
    """Starts children. The first makes it import PyTorch, which takes seconds."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process: subprocess.Popen[str] | None = None
        self._children: list[Child] = []

    def start(self, code: str, *arguments: object) -> Child:
        """A process that runs `code`, with these as `sys.argv[1:]`."""
        at = self._directory / str(len(self._children))
        output, errors = at.with_suffix(".out"), at.with_suffix(".err")
        os.mkfifo(output)
        settings = {"code": code, "arguments": list(map(str, arguments))}
        pid = int(self.order(**settings, output=str(output), errors=str(errors)))
        self._children.append(Child(self, pid, output, errors))
        return self._children[-1]

    def prepare(self, *modules: str) -> None:
        """Those that start from now on have these imported."""
        self.order(imports=modules)

    def order(self, **order: object) -> str:
        """What the process answers to that."""
        if self._process is None:
            command = [sys.executable, "-W", "ignore", "-c", _MAIN]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._process.stdout.readline()

    def end_children(self) -> None:
        """None of them outlives its test."""
        for child in self._children:
            child.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            with self._process:
                pass


def start_ranks(nursery: Nursery, directory: Path, world_size: int, call: str, setup: str = "") -> list[Child]:
    """Ranks that meet in the directory; each makes that call of a module in tests/distributed.

    A call is written as "meshed.saved, 'path', 3": a function of a module, and its arguments.
    """
    module = call.partition(".")[0]
    code = f"""
import torch
from pathlib import Path
from tests.distributed import {module}
from tests.support.ranks import run
{setup}
run({call})
"""
    file = directory / f"store-{len(list(directory.iterdir()))}"
    return [nursery.start(code, file, world_size, rank) for rank in range(world_size)]


def run_ranks(nursery: Nursery, directory: Path, world_size: int, call: str, setup: str = "") -> None:
    """Every rank comes to the end of its call; see start_ranks()."""
    ranks = start_ranks(nursery, directory, world_size, call, setup)
    said = [one.read_rest() for one in ranks]
    ended = [one.wait() for one in ranks]
    assert (said, ended) == (["done\n"] * world_size, [0] * world_size), "\n".join(one.errors for one in ranks)


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    """Starts processes that have headrace imported."""
    yield _nursery
    _nursery.end_children()
