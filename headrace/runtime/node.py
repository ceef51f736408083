"""How do the ranks of one node meet? In memory that they share: each posts how far it has come, and waits for others.

The shared memory is in files without a name. The first rank makes them, and the other ranks open its descriptors, so
nothing is left behind, however a rank ends. Ranks of other nodes are reached through process groups.
"""

import contextlib
import errno
import os
import struct
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed

from headrace.errors import RankError, StateError
from headrace.runtime.numa import Spread, node_of, nodes_of_process
from headrace.runtime.ranks import Ranks, new_group, timeout_seconds

# The counters that every node has, for each rank:
_PASS = 0  # the pass that the rank has begun
_MET = 1  # how many meetings it has been at
_BROKEN = 2  # the last pass whose backward it has broken off
_SAID = 3  # its answers in `all_agree`: two counters, used in turn
_HANDED = 5  # how many calls of `hand_out` it has finished: the first rank has given, the others have taken
_GIVEN = 6  # of the first rank: the `number` of its last `hand_out`, or the negative errno of an error
_DESCRIPTOR = 7  # of the first rank: the descriptor that it hands out, or -1
_COUNTERS = 8
_NOTE_BYTES = 2048  # for each rank's note about its last error
_ENDS_SECONDS = 1.0  # a process closes its connections up to this long before it counts as ended
_LOOK_SECONDS = 0.2  # between two checks whether a rank that is waited for has ended
_LONGEST_PAUSE_SECONDS = 1e-3
_SAYS_SECONDS = 5.0  # a rank breaks off a backward up to this long before it notes its error


@dataclass(eq=False)
class BorrowedGroup:
    """A process group that is lent to one user at a time."""

    group: Any
    user: "weakref.ref[object] | None"
    intact: bool = True  # False once a collective has failed

    @property
    def is_free(self) -> bool:
        return self.intact and (self.user is None or self.user() is None)


_Borrowed = dict[str, list[BorrowedGroup]]  # by backend
_borrowed: "weakref.WeakKeyDictionary[Any, _Borrowed]" = weakref.WeakKeyDictionary()  # by the process group of the mesh


class Node:
    """The ranks of a mesh that share the memory of one node, as one of them sees it.

    This is rank `rank` of `size` on node `number` of `nodes`; the mesh has `world` ranks in all. The process group
    `group` has the ranks of this node; `across` has the ranks with the same `rank` on all nodes (None: one node only).
    """

    def __init__(self, mesh: Any) -> None:
        """A collective of all ranks of the mesh. Raises StateError for a mesh or nodes that are not supported."""
        group = _group_of(mesh)
        self._mesh = Ranks(group, mesh.device_type)
        self.world = self._mesh.count
        self._timeout_seconds = timeout_seconds(group)
        _allow_descriptors()
        made = _memory((8 * _COUNTERS + _NOTE_BYTES) * self.world)  # a node uses its first rank's
        own = (distributed.get_rank(), _node_name(), os.getpid(), _status(os.getpid())[1], made)
        facts = self._mesh.objects(own)
        names = list(dict.fromkeys(fact[1] for fact in facts))
        on_nodes = [[number for number, fact in enumerate(facts) if fact[1] == name] for name in names]
        _check_even(names, on_nodes, facts)
        self.number = names.index(own[1])
        here = on_nodes[self.number]
        self.nodes, self.size, self.rank = len(names), len(here), here.index(self._mesh.own)
        self.ranks: tuple[int, ...] = tuple(facts[number][0] for number in here)
        self._processes = [(facts[number][2], facts[number][3]) for number in here]
        self._mesh_group, self.group, self.across = group, group, None
        if self.nodes > 1 or "cpu" not in self._mesh.backends:  # NCCL cannot send host memory
            self.group = new_group(group, self.ranks, "gloo")
        if self.nodes > 1:
            self.across = new_group(group, [facts[on_node[self.rank]][0] for on_node in on_nodes], "gloo")
        look = partial(Node.look, weakref.proxy(self))  # no cycle
        self._here = Ranks(self.group, "cpu", look)
        self._across = self._here if self.across is None else Ranks(self.across, "cpu", look)
        self._mesh = Ranks(group, mesh.device_type, look)
        self.spread = Spread()  # of memory that the ranks of the node share
        self._asked = self._handed = 0
        memory = mapped(self._opened(facts[here[0]][4]), (8 * _COUNTERS + _NOTE_BYTES) * self.size)
        self._meetings = Counters(self, _COUNTERS, memory)
        self._notes = memory[8 * _COUNTERS * self.size :]
        self.meet("the memory of the node")
        os.close(made)  # all have opened it
        _watch_uncaught()
        _nodes.add(self)

    def backend_of(self, device: torch.device) -> str:
        """The backend by which the mesh's process group sends this device's memory; if none, "gloo" (via the host)."""
        return self._mesh.backends.get(device.type, "gloo")

    def borrow_group(self, device: torch.device, user: object) -> "BorrowedGroup":
        """A process group of the ranks of this node, which nobody else gets while `user` lives.

        A collective of the mesh. A group that nobody uses any more is reused. Each rank lets go of a group at its own
        time, so the ranks agree on one that is free and intact on all of them.
        """
        backend = self.backend_of(device)
        known = _borrowed.setdefault(self._mesh_group, {}).setdefault(backend, [])
        free = self.least([group.is_free for group in known]) if known else []  # equally many on all ranks
        if 1 in free:
            found = known[free.index(1)]
            found.user = weakref.ref(user)
        else:
            found = BorrowedGroup(new_group(self._mesh_group, self.ranks, backend), weakref.ref(user))
            known.append(found)
        return found

    def together(self, what: str, *, across: bool = False) -> contextlib.AbstractContextManager[None]:
        """Encloses a collective of the node, or `across` nodes. Raises RankError if a rank's end makes it fail."""
        return (self._across if across else self._here).together(what)

    def reduce_across(self, tensor: torch.Tensor, what: str, *, largest: bool = False) -> None:
        """Puts the sum of all nodes' values, or the `largest`, into `tensor`. A collective of the ranks with the same
        number on all nodes; it does nothing where there is one node. Raises RankError.
        """
        if self.across is not None:
            with self.together(f"{what} of all nodes", across=True):
                by = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
                distributed.all_reduce(tensor, by, group=self.across)

    @property
    def is_first(self) -> bool:
        """Whether this is the node's first rank, which does what needs doing once on each node."""
        return self.rank == 0

    def part(self, count: int, rank: int | None = None) -> slice:
        """The part of `count` elements that is this rank's, or `rank`'s: about equal parts, in the order of ranks."""
        rank = self.rank if rank is None else rank
        return slice(count * rank // self.size, count * (rank + 1) // self.size)

    def share(self, nbytes: int) -> int:
        """A descriptor of `nbytes` of zeros that all ranks of the node share. A collective. Close it when it is mapped.

        Raises OSError when the system has no memory for them.
        """
        return self.hand_out(nbytes, f"{nbytes:,} bytes of the node's memory", partial(_memory, nbytes))

    def grow(self, descriptor: int, offset: int, nbytes: int) -> None:
        """Adds `nbytes` of zeros at `offset` to memory that `share` gave. A collective. Raises OSError as `share`."""
        self.hand_out(nbytes, f"{nbytes:,} bytes of the node's memory", partial(_take, descriptor, offset, nbytes))

    def hand_out(self, number: int, what: str, make: Callable[[], int | None]) -> int:
        """Calls `make` on the first rank. If it returns a descriptor, each rank gets its own for that file; else -1.

        A collective. When `make` raises, the first rank raises its error and the others raise OSError. Raises
        StateError where a rank's `number` is not the first rank's; RankError.
        """
        self._handed += 1
        return self._receive(number, what) if self.rank else self._give(number, what, make)

    def _give(self, number: int, what: str, make: Callable[[], int | None]) -> int:
        """The first rank's side of `hand_out`. When it returns, all others have opened what `make` returned."""
        self._meetings.wait(_HANDED, self._handed - 1, what, in_pass=False)  # after a failed call, nobody has waited
        made = None
        try:
            made = make()
        except BaseException as error:
            number = -((error.errno if isinstance(error, OSError) else None) or errno.ECANCELED)
            raise
        finally:
            self._meetings.post(_GIVEN, number)
            self._meetings.post(_DESCRIPTOR, -1 if made is None else made)
            self._meetings.post(_HANDED, self._handed)
        self._meetings.wait(_HANDED, self._handed, what, in_pass=False)
        return -1 if made is None else made

    def _receive(self, number: int, what: str) -> int:
        self._meetings.wait(_HANDED, self._handed, what, in_pass=False, ranks=(0,))
        found, theirs = self._meetings.of(0, _GIVEN), self._meetings.of(0, _DESCRIPTOR)
        try:
            own = self._opened(theirs) if found == number and theirs >= 0 else -1
        except FileNotFoundError:
            self.look(what)
            raise
        self._meetings.post(_HANDED, self._handed)
        if found < 0:
            raise OSError(-found, f"rank {self.ranks[0]} could not get {what}: {os.strerror(-found)}; see its error")
        if found != number:
            raise StateError(
                f"rank {self.ranks[self.rank]} wants {what} where rank {self.ranks[0]} wants {found:,}: the models, the"
                " settings, or the parameters that are trained, differ between ranks"
            )
        return own

    def _opened(self, descriptor: int) -> int:
        """Opens the file that the first rank has under that descriptor. Returns a descriptor of this process."""
        return os.open(f"/proc/{self._processes[0][0]}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)

    def least(self, values: Sequence[int]) -> list[int]:
        """The least of each value over all ranks of the mesh. A collective of the mesh."""
        return [min(each) for each in zip(*self._mesh.numbers(values), strict=True)]

    def check_alike(self, settings: Mapping[str, object]) -> None:
        """Raises StateError on all ranks of the mesh if their settings differ. A collective of the mesh."""
        found = self._mesh.objects({name: str(value) for name, value in settings.items()})
        for name in {name: None for one in found for name in one}:
            ranks: dict[str, list[int]] = {}
            for rank, one in enumerate(found):
                ranks.setdefault(one.get(name, "none"), []).append(rank)
            if len(ranks) > 1:
                told = ", ".join(f"{value} on ranks {those}" for value, those in ranks.items())
                raise StateError(f"ranks of the mesh differ in {name}: {told}; give all of them the same")

    @torch.inference_mode()  # in which tensors that were made in it can be written to, too
    def give_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Gives all ranks the values that the mesh's first rank has in these tensors. A collective of the mesh.

        As in DistributedDataParallel, `_version`s stay: the graph of an earlier forward may have saved these tensors.
        """
        what, by_device = "its buffers, as the first rank has them", defaultdict(list)
        for tensor in tensors:  # of an expanded one, which has one element in many places, that element
            once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
            by_device[tensor.device].append(tensor.data[once])
        for device, those in by_device.items():
            if self._mesh.reaches(device):
                self._mesh.spread([(0, one) for one in those], what)
                continue
            sent = [one.to("cpu", copy=True) for one in those]
            for ranks in dict.fromkeys((self._across, self._here)):
                ranks.spread([(0, one) for one in sent], what)
            for one, come in zip(those, sent, strict=True):
                one.copy_(come)

    def spread_memory(self, device: torch.device, *, by_ranks: bool) -> None:
        """Memory that is shared from now on is spread over the NUMA nodes of all ranks. With `by_ranks`, the part that
        only one rank copies to its device lies at that device. A collective.
        """
        found = self._here.objects((nodes_of_process(), node_of(device)))
        nodes = {node for those, _ in found for node in those}
        self.spread = Spread(tuple(sorted(nodes)), tuple(node for _, node in found) if by_ranks else ())

    def all_agree(self, yes: bool, what: str) -> bool:
        """Whether all ranks of the node say yes. A collective of the node."""
        self._asked += 1
        self._meetings.post(_SAID + self._asked % 2, 2 * self._asked + yes)  # others may still read the last
        self.meet(what)
        return all(self._meetings.of(rank, _SAID + self._asked % 2) & 1 for rank in range(self.size))

    def from_first(self, value: Any, what: str) -> Any:
        """The `value` of the node's first rank, on all of its ranks. A collective."""
        told = [value]
        with self.together(what):
            distributed.broadcast_object_list(told, group=self.group, group_src=0)
        return told[0]

    def meet(self, what: str) -> None:
        """Waits until every rank of the node has called this; what they wrote before is visible. Raises RankError."""
        value = self._meetings.of(self.rank, _MET) + 1
        self._meetings.come(_MET, value, what)

    def begin_pass(self, number: int) -> None:
        """Called when this rank begins a pass with gradients, of that number. Waits until all do. Raises RankError."""
        self._meetings.come(_PASS, number, f"forward {number}")

    def break_off(self) -> None:
        """Called when this rank's backward has raised: its gradients will not come, and no one need wait for them."""
        self._meetings.post(_BROKEN, self._meetings.of(self.rank, _PASS))

    def note(self, error: BaseException) -> None:
        """Notes an error that this rank has raised, so that others that wait for it in vain can say why."""
        text = f"{type(error).__name__}: {error}".encode()[: _NOTE_BYTES - 4]
        self._notes[_NOTE_BYTES * self.rank : _NOTE_BYTES * self.rank + 4 + len(text)] = (
            struct.pack("i", len(text)) + text
        )

    def look(self, what: str = "its part of a step") -> None:
        """Raises RankError if a rank of the node will not come, or ends within a second."""
        for _ in range(20):
            for rank in range(self.size):
                self.check(rank, what, 0.0, lambda: True)
            time.sleep(_ENDS_SECONDS / 20)

    def check(
        self, rank: int, what: str, waited_seconds: float, still: Callable[[], bool], *, in_pass: bool = True
    ) -> None:
        """Raises RankError if `rank` will not come, and `still()` is true. `in_pass`: see `Counters.wait`."""
        reason, own = None, self._meetings.of(self.rank, _PASS)
        broken = in_pass and rank != self.rank and self._meetings.of(rank, _BROKEN) >= own > 0
        if broken:
            self._let_say(rank)
        if self._has_ended(rank):
            reason = "has ended"
        elif in_pass and self._meetings.of(rank, _PASS) > own:
            reason = f"has gone on to forward {self._meetings.of(rank, _PASS)}"
        elif broken:
            reason = f"has broken off the backward of forward {own}"
        elif waited_seconds > self._timeout_seconds:
            reason = f"did not come within {self._timeout_seconds:.0f} s, the timeout of the process group"
        if reason is not None and still():
            error = RankError(
                f"rank {self.ranks[rank]} {reason}, and rank {self.ranks[self.rank]} waits for it: {what}."
                f"{self._said(rank)} Ranks have to make the same calls in the same order; end this run, and go on"
                " from its last checkpoint"
            )
            self.note(error)  # so whoever finds this rank gone learns which rank failed first
            raise error

    def _has_ended(self, rank: int) -> bool:
        """Whether the rank's process has ended. Another process may have its number by now."""
        process, began = self._processes[rank]
        state, found = _status(process)
        return state in "ZX" or found != began

    def _let_say(self, rank: int) -> None:
        """Waits a while for a rank that has broken off its backward: it may note its error and end, or begin a pass."""
        began, own = time.monotonic(), self._meetings.of(self.rank, _PASS)
        while time.monotonic() - began < _SAYS_SECONDS:
            if self._has_ended(rank) or self._meetings.of(rank, _PASS) > own:
                break
            time.sleep(_ENDS_SECONDS / 20)

    def _said(self, rank: int) -> str:
        begin = _NOTE_BYTES * rank
        (length,) = struct.unpack("i", self._notes[begin : begin + 4])
        text = bytes(self._notes[begin + 4 : begin + 4 + length]).decode(errors="replace")
        return f" Its last error: {text}." if text else " It left no word of an error."


class Counters:
    """`count` numbers for each rank of a node. A rank posts its own, and waits until the others' reach a value."""

    def __init__(self, node: Node, count: int, cells: memoryview | None = None) -> None:
        """A collective. `cells`: memory that all ranks share, with 8 bytes for each number; None: it is made."""
        self._node = weakref.ref(node)
        self._count, self._rank, self._size = count, node.rank, node.size
        self._owner = os.getpid()
        nbytes = 8 * count * node.size
        self._cells = (mapped(node.share(nbytes), nbytes) if cells is None else cells[:nbytes]).cast("q")
        self._broken: BaseException | None = None

    def post(self, index: int, value: int) -> None:
        """Posts that this rank has come as far as `value`. A rank that sees the number sees what was written before.

        Raises StateError in a process that was forked from the rank.
        """
        if os.getpid() != self._owner:
            raise StateError(f"process {self._owner} is rank {self._rank}, and this one was forked from it: step there")
        self._cells[self._rank * self._count + index] = value

    def of(self, rank: int, index: int) -> int:
        """The number that the rank has posted last."""
        return self._cells[rank * self._count + index]

    def have_come(self, index: int, value: int) -> bool:
        """Whether all ranks have come as far as `value`."""
        return all(self.of(rank, index) >= value for rank in range(self._size))

    def wait(
        self, index: int, value: int, what: str, *, in_pass: bool = True, ranks: Iterable[int] | None = None
    ) -> None:
        """Blocks until all ranks, this one included, or the given `ranks` have come as far as `value`.

        Raises RankError, naming `what` and the rank, when one has ended or does not come within the process group's
        timeout. With `in_pass`, for numbers that are posted within a pass, it also raises this when a rank has broken
        off this pass or gone on to another.
        """
        ranks = range(self._size) if ranks is None else tuple(ranks)  # this one too: its own threads post
        pause, began, looked = 0.0, time.monotonic(), 0.0
        while late := [rank for rank in ranks if self._is_late(rank, index, value)]:
            if self._broken is not None:
                raise self._broken
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, pause + 1e-5)
            now = time.monotonic()
            if now - looked > _LOOK_SECONDS:
                looked = now
                self._look_at(late, index, value, what, now - began, in_pass=in_pass)

    def come(self, index: int, value: int, what: str, *, in_pass: bool = True) -> None:
        """Posts `value`, and waits for all ranks. Where this rank has broken off, it raises that error and posts
        nothing: others would count on this rank.
        """
        if self._broken is not None:
            raise self._broken
        self.post(index, value)
        self.wait(index, value, what, in_pass=in_pass)

    @contextlib.contextmanager
    def unbroken(self) -> Iterator[None]:
        """After an error inside, this rank waits for no other: each `wait` that it is in raises the error, too, and so
        does each later one in which it would have to wait. Ctrl-C is no such error.
        """
        try:
            yield
        except Exception as error:
            self._broken = self._broken or error
            raise

    def _is_late(self, rank: int, index: int, value: int) -> bool:
        return self.of(rank, index) < value

    def _look_at(
        self, late: list[int], index: int, value: int, what: str, waited_seconds: float, *, in_pass: bool
    ) -> None:
        """Raises RankError if any of these ranks will not come. All are looked at: the first may wait for this one."""
        node = self._node()
        if node is None:
            return
        for rank in late:
            node.check(rank, what, waited_seconds, partial(self._is_late, rank, index, value), in_pass=in_pass)


_nodes: "weakref.WeakSet[Node]" = weakref.WeakSet()


def _watch_uncaught() -> None:
    """From now on, an uncaught error of this process is noted for the other ranks before the process ends."""
    report = sys.excepthook
    if getattr(report, "tells_ranks", False):
        return

    def note_uncaught(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        for node in list(_nodes):
            node.note(error)
        report(kind, error, trace)  # which may call an earlier one of these: others wrap the hook, too

    note_uncaught.tells_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = note_uncaught


def _group_of(mesh: Any) -> Any:
    """The process group of all ranks of the mesh. Raises TypeError or StateError for a mesh that is not supported."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; give a DeviceMesh, such as"
            ' torch.distributed.init_device_mesh("cuda", (torch.distributed.get_world_size(),))'
        )
    if sys.platform != "linux":
        raise StateError(f"ranks share memory by files without a name, which {sys.platform} does not have; use Linux")
    if mesh.get_coordinate() is None:
        raise StateError(f"rank {distributed.get_rank()} is not in the mesh {mesh}")
    if mesh.ndim == 1:
        return mesh.get_group()
    if mesh.size() != distributed.get_world_size():
        raise StateError(
            f"the mesh has {mesh.ndim} dimensions and {mesh.size()} of {distributed.get_world_size()} ranks; every rank"
            " of the mesh gets a batch of its own: give a mesh of one dimension, or of all ranks"
        )
    return distributed.group.WORLD


def _node_name() -> str:
    """Names this node: by the machine's boot, its network and process namespaces, and torchrun's agent. Two agents on
    one machine count as two nodes.
    """
    with open("/proc/sys/kernel/random/boot_id") as file:
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid")]
        return f"{file.read().strip()} {spaces} {os.environ.get('GROUP_RANK', '')}"


def _check_even(names: Sequence[str], on_nodes: Sequence[Sequence[int]], facts: Sequence[Any]) -> None:
    if len({len(on_node) for on_node in on_nodes}) > 1:
        found = ", ".join(f"{len(on_node)} (from rank {facts[on_node[0]][0]} on)" for on_node in on_nodes)
        raise StateError(f"{len(names)} nodes have different numbers of ranks: {found}; start as many on each")


def _allow_descriptors() -> None:
    """Raises the limit of open descriptors as far as the system allows: each block takes some."""
    import resource  # of Unix alone

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _status(process: int) -> tuple[str, str]:
    """The state and start time of a process, as in /proc; ("X", "") if it does not exist."""
    try:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]


def _memory(nbytes: int) -> int:
    descriptor = os.memfd_create("headrace", os.MFD_CLOEXEC)
    try:
        _take(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _take(descriptor: int, offset: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, offset, nbytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"the system has no {nbytes:,} bytes of memory for the ranks of this node to share ({error.strerror});"
            " lower what is offloaded, or raise the memory limit of the container",
        ) from error


def mapped(descriptor: int, nbytes: int) -> memoryview:
    """Maps the memory of a descriptor, and closes it. Python's own mmap would keep a descriptor for the mapping."""
    try:
        file = f"/proc/self/fd/{descriptor}"
        return torch.from_file(file, shared=True, size=nbytes, dtype=torch.uint8, device="cpu").numpy().data
    finally:
        os.close(descriptor)
