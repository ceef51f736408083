"""What do the ranks of a mesh tell each other? Numbers, objects and tensors, in collectives that all of them call."""

import contextlib
import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from headrace.errors import RankError

_BUCKET_BYTES = 32 << 20  # of small tensors that travel together
_ALONE_BYTES = 4 << 20  # a tensor of this size or more travels alone, without a copy
_IN_FLIGHT = 4  # buckets at once, to limit the memory that they take
_ALIGNED = 16  # bytes: the alignment of each tensor in a bucket


class Ranks:
    """The ranks of a process group, such as that of one dimension of a `DeviceMesh`, by their numbers in it."""

    def __init__(self, group: Any, device_type: str, look: Callable[[str], None] = lambda what: None) -> None:
        """`look` is called with the name of a collective that failed; it raises RankError if it knows who is gone."""
        self._group = group
        self._look = look
        self.count: int = torch.distributed.get_world_size(self._group)
        self.own: int = torch.distributed.get_rank(self._group)
        config = str(torch.distributed.get_backend_config(self._group))
        self.backends: dict[str, str] = dict(entry.split(":") for entry in config.split(","))  # by type of device
        self._device = torch.device("cpu" if "cpu" in self.backends else device_type)

    def reaches(self, device: torch.device) -> bool:
        """Whether the process group can send tensors that are on this device."""
        return device.type in self.backends

    def named(self, rank: int) -> str:
        """The name of a rank in errors: its number as torchrun counts."""
        return f"rank {torch.distributed.get_global_rank(self._group, rank)}"

    @contextlib.contextmanager
    def together(self, what: str = "its part of a step") -> Iterator[None]:
        """Encloses a collective of these ranks. Raises RankError if it fails because not all of them take part."""
        try:
            yield
        except RuntimeError as error:
            self._look(what)
            raise RankError(
                f"{self.named(self.own)} waited for all {self.count} ranks of the mesh, and at least one did not come"
                f" for {what} (it raised an error, ended, or took no step: {str(error).splitlines()[0]}); end this"
                " run, and go on from its last checkpoint"
            ) from error

    def numbers(self, values: Sequence[int]) -> list[list[int]]:
        """The `values` of every rank; all give equally many. Raises RankError if one does not call this in time."""
        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        every = [torch.empty_like(own) for _ in range(self.count)]
        with self.together():
            torch.distributed.all_gather(every, own, group=self._group)
        found: list[list[int]] = torch.stack(every).tolist()
        return found

    def objects(self, value: Any) -> list[Any]:
        """The `value` of every rank, pickled on its way."""
        found: list[Any] = [None] * self.count
        with self.together():
            torch.distributed.all_gather_object(found, value, group=self._group)
        return found

    def failures(self, error: BaseException | None) -> dict[int, str]:
        """What has failed, by rank; `error` is what failed on this one. All ranks call this."""
        if not any(failed for (failed,) in self.numbers([error is not None])):
            return {}
        told = self.objects(None if error is None else f"{type(error).__name__}: {error}")
        return {rank: text for rank, text in enumerate(told) if text is not None}

    @contextlib.contextmanager
    def as_one(self, what: str) -> Iterator[None]:
        """Encloses what one rank does, such as "save the model", and waits for it. All ranks enter it.

        What it raises is raised on its rank; the others raise RankError, which has its text.
        """
        try:
            yield
        except Exception as error:  # not Ctrl-C, which the others may have got, too
            with contextlib.suppress(RankError):  # of another that is gone: this error came first
                self.failures(error)
            raise
        for rank, text in self.failures(None).items():
            raise RankError(
                f"{self.named(rank)} could not {what}, and the others waited for it: mend that, and go on from the last"
                f" checkpoint on all ranks. Its error: {text}"
            )

    def added(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `values`, on the CPU."""
        total = values.to(self._device, copy=True)
        with self.together():
            torch.distributed.all_reduce(total, group=self._group)
        return total.cpu()

    def spread(self, tensors: Iterable[tuple[int, torch.Tensor]], what: str = "its part of a step") -> None:
        """Gives each tensor, on all ranks, the values that its rank has. Small tensors of one rank travel together."""
        under_way: list[_Bucket] = []
        with self.together(what):
            for owner, batch in _batches(tensors):
                under_way.append(_Bucket(batch, owner, owner == self.own, self._group))
                if len(under_way) == _IN_FLIGHT:
                    under_way.pop(0).wait()
            for bucket in under_way:
                bucket.wait()

    def exchange(self, outgoing: Sequence[Sequence[torch.Tensor]], incoming: Sequence[Sequence[torch.Tensor]]) -> None:
        """Sends each rank its tensors in `outgoing`, and receives those from each rank into its tensors in `incoming`.

        Shapes and dtypes agree on both sides. All tensors are on one device.
        """
        device = next(tensor.device for tensors in (*outgoing, *incoming) for tensor in tensors)
        sent = torch.empty(sum(map(_room, outgoing)), dtype=torch.uint8, device=device)
        come = torch.empty(sum(map(_room, incoming)), dtype=torch.uint8, device=device)
        every = [tensor for tensors in outgoing for tensor in tensors]
        for place, tensor in zip(_places(sent, every), every, strict=True):
            place.copy_(tensor)
        sizes = list(map(_room, incoming)), list(map(_room, outgoing))
        with self.together():
            torch.distributed.all_to_all_single(come, sent, *sizes, group=self._group)
        every = [tensor for tensors in incoming for tensor in tensors]
        for place, tensor in zip(_places(come, every), every, strict=True):
            tensor.copy_(place)

    def apart(self) -> "Ranks":
        """The same ranks with another process group, whose collectives have an order of their own. A collective."""
        ranks = torch.distributed.get_process_group_ranks(self._group)
        group = new_group(self._group, ranks, str(torch.distributed.get_backend_config(self._group)))
        return Ranks(group, self._device.type, self._look)

    def reduce(self, tensor: torch.Tensor, to: int) -> Any:
        """Begins to sum all ranks' tensors into rank `to`'s; others become undefined. Returns what `wait` takes."""
        with self.together():
            return torch.distributed.reduce(tensor, group=self._group, group_dst=to, async_op=True)

    def wait(self, work: Any) -> None:
        """Makes the device's current stream (the host, on the CPU) wait for `work`, which `reduce` returned."""
        with self.together():
            work.wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Sends a tensor to one rank, which calls `receive`."""
        flat = tensor.to(self._device).contiguous().view(-1).view(torch.uint8)
        with self.together():
            torch.distributed.send(flat, group=self._group, group_dst=to)

    def receive(self, into: torch.Tensor, source: int) -> None:
        """Receives what rank `source` sends, a tensor of the same shape and dtype, into `into`."""
        flat = torch.empty(into.nbytes, dtype=torch.uint8, device=self._device)
        with self.together():
            torch.distributed.recv(flat, group=self._group, group_src=source)
        into.copy_(flat.view(into.dtype).view(into.shape))


def new_group(like: Any, ranks: Sequence[int], backend: str) -> Any:
    """A process group of these ranks (global numbers), with the timeout of the process group `like`."""
    timeout = datetime.timedelta(seconds=timeout_seconds(like))
    return torch.distributed.new_group(ranks, timeout=timeout, backend=backend, use_local_synchronization=True)


def timeout_seconds(group: Any) -> float:
    """The timeout of a process group's collectives; if it does not tell, half an hour, which is PyTorch's default."""
    kind = str(torch.distributed.get_backend_config(group)).partition(":")[0]  # such as "cuda:nccl" or "xpu:xccl"
    timeout = getattr(getattr(group._get_backend(torch.device(kind)), "options", None), "_timeout", None)
    return 1800.0 if timeout is None else float(timeout.total_seconds())


class _Bucket:
    """Tensors of one rank on their way to the others."""

    def __init__(self, tensors: Sequence[torch.Tensor], owner: int, is_own: bool, group: Any) -> None:
        self._arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat = tensors[0].view(-1).view(torch.uint8)
        else:
            flat = torch.empty(_room(tensors), dtype=torch.uint8, device=tensors[0].device)
            places = _places(flat, tensors)
            if is_own:
                for place, tensor in zip(places, tensors, strict=True):
                    place.copy_(tensor)
            else:
                self._arriving = list(zip(places, tensors, strict=True))
        self._work = torch.distributed.broadcast(flat, group=group, group_src=owner, async_op=True)

    def wait(self) -> None:
        """Makes the device's current stream (the host, on the CPU) wait until the tensors have their values."""
        if self._work is not None:
            self._work.wait()
        for place, tensor in self._arriving:
            tensor.copy_(place)


def _batches(tensors: Iterable[tuple[int, torch.Tensor]]) -> Iterable[tuple[int, list[torch.Tensor]]]:
    """Groups tensors of one rank on one device, which travel together."""
    gathering: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
    gathered_bytes: dict[tuple[int, torch.device], int] = {}
    for owner, tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.nbytes >= _ALONE_BYTES:
            yield owner, [tensor]
            continue
        key = owner, tensor.device
        gathering.setdefault(key, []).append(tensor)
        gathered_bytes[key] = gathered_bytes.get(key, 0) + _room([tensor])
        if gathered_bytes[key] >= _BUCKET_BYTES:
            yield owner, gathering.pop(key)
            del gathered_bytes[key]
    for (owner, _), batch in gathering.items():
        yield owner, batch


def _room(tensors: Sequence[torch.Tensor]) -> int:
    return sum(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)


def _places(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Where each of the tensors lies in a bucket, in its own shape and dtype."""
    places, begin = [], 0
    for tensor in tensors:
        places.append(flat[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        begin += _room([tensor])
    return places
