"""Builds the emulator's extension module with plain g++, once for each set of inputs.

The result is cached under a hash of everything that decides it: the sources, the flags, the compiler, the
versions of torch and Python. The cache is `$HEADRACE_EMULATOR_CACHE`, else `headrace/emulator` in the user's
cache directory. Run this file to build ahead of time; `import emulator.emu` builds on demand.
"""

import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

SOURCES = Path(__file__).parent / "csrc"
MODULE_NAME = "_C"
TORCH_DIRECTORY = Path(torch.__file__).parent
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")

# The headers of PyTorch cost about 7 s of compile time in each translation unit, so files are compiled in
# groups: each group is one unit that includes its files. Groups are compiled in parallel.
GROUPS = {
    "kernels": ("torch_fallback", "op_shapes", "op_cost", "python_handovers", "torch_operators", "torch_bindings"),
    "registration": (
        "torch_autocast",
        "torch_common",
        "torch_copy",
        "torch_device",
        "torch_generator",
        "torch_memory",
        "torch_rnn",
        "torch_views",
    ),
    "runtime": (
        "allocator",
        "arena",
        "current_device",
        "fault_handler",
        "host_threads",
        "pinned",
        "race_detector",
        "registered",
        "runtime",
        "scheduler",
    ),
}


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def compile_flags() -> list[str]:
    return [
        "-std=c++20",
        "-O1",  # quick to build; the time of a run goes into the kernels of the CPU
        "-DNDEBUG",  # as PyTorch itself is built: one of its debug assertions (2.11, undefined tensors) is wrong
        "-fPIC",
        "-fvisibility=hidden",
        "-Wall",
        "-Wextra",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]


def header_flags() -> list[str]:
    system_headers = (
        TORCH_DIRECTORY / "include",
        TORCH_DIRECTORY / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    )
    return [f"-I{SOURCES}", *(f"-isystem{path}" for path in system_headers)]


def cache_directory() -> Path:
    if chosen := os.environ.get("HEADRACE_EMULATOR_CACHE"):
        return Path(chosen)
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache) / "headrace" / "emulator"


def fingerprint() -> str:
    # No paths: two checkouts or two virtual environments with the same contents share a build.
    digest = hashlib.sha256()
    compiler_version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    torch_version = (torch.__version__, str(torch.version.git_version))
    for part in (*torch_version, sys.version, compiler_version, *compile_flags(), repr(GROUPS)):
        digest.update(part.encode() + b"\0")
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]


def ensure_built() -> Path:
    """The path of the extension module, built now when the cache does not hold it."""
    missing = {path.stem for path in SOURCES.glob("*.cpp")} ^ {name for group in GROUPS.values() for name in group}
    if missing:
        raise RuntimeError(f"csrc/ and GROUPS in build.py disagree about {sorted(missing)}")
    target = cache_directory() / fingerprint() / f"{MODULE_NAME}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _only_one_builder(target.parent), tempfile.TemporaryDirectory() as scratch:
        if not target.exists():  # built by another process while this one waited
            built = _build(Path(scratch))
            # Moved in one step, on the file system of the target: a reader never sees half a file.
            partial = target.with_suffix(".partial")
            shutil.move(built, partial)
            partial.replace(target)
    return target


def load() -> Any:
    """Builds when needed, and imports. The module's functions are declared in C++, not here."""
    path = ensure_built()
    name = f"{__package__}.emu.{MODULE_NAME}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(name, loader, origin=str(path)))
    loader.exec_module(module)
    return module


def _build(scratch: Path) -> Path:
    objects = []
    commands = []
    for group, names in GROUPS.items():
        unit = scratch / f"unit_{group}.cpp"  # not a name of csrc/: it would include itself
        unit.write_text("".join(f'#include "{name}.cpp"\n' for name in names))
        objects.append(str(unit.with_suffix(".o")))
        commands.append([compiler(), *compile_flags(), *header_flags(), "-c", str(unit), "-o", objects[-1]])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    library_directory = TORCH_DIRECTORY / "lib"
    output = scratch / f"{MODULE_NAME}.so"
    libraries = (f"-l{library}" for library in LIBRARIES)
    # No run path: `import torch` has loaded these libraries by the time that the module is.
    link = ["-shared", *objects, f"-L{library_directory}", *libraries]
    _run([compiler(), *link, "-o", str(output)])
    return output


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the emulator does not build: {' '.join(command)}\n{done.stderr[-6000:]}")


@contextlib.contextmanager
def _only_one_builder(directory: Path) -> Iterator[None]:
    with open(directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    started = time.perf_counter()
    print(ensure_built(), f"{time.perf_counter() - started:.1f} s")
