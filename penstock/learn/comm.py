"""Comm: the ranks that learn one policy together, and the few collectives they need; one learner is a Comm of one."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.errors import ConfigError, LearnerLostError
from penstock.core.wire import decode, encode

TIMEOUT_S = 300.0
"""Seconds that a rank waits for the others before it counts them as lost."""
_LOOK_S = 0.5
"""Longest wait in native code, in which no handler of a signal is called."""


class Comm(Protocol):
    """Collectives over ranks: every rank calls the same ones in the same order.

    After `Policy.join(comm)` the policy trains its share of what all ranks hold. Any object with these members is one.
    """

    rank: int
    """Own number, from 0."""
    size: int
    """Number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Makes x the sum of every rank's x, in place and to the same bits everywhere; returns it."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Returns the x of every rank, by rank; all are of one shape and dtype, and arrive bit for bit."""
        ...

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Makes x that of rank `source`, in place; returns it."""
        ...

    def barrier(self) -> None:
        """Returns once every rank has come here."""
        ...


class SingleComm:
    """The Comm of one learner."""

    rank, size = 0, 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x

    def barrier(self) -> None:
        """Returns at once."""


SINGLE = SingleComm()


class GroupComm:
    """A Comm over a process group of torch.distributed: gloo on CPU, nccl on CUDA.

    Args:
        group: a process group of torch, such as `torch.distributed.group.WORLD` after `init_process_group`.
        timeout_s: seconds that a collective waits for the other ranks.
        device: where the group's backend wants tensors; None: the device of `group`, cuda for nccl, else cpu.
        entering: called with the number of each collective as it begins, so that a rank that hangs can be named.
        looking: called now and then while a collective on the CPU waits; an exception from it ends the wait.

    Raises:
        LearnerLostError: by every collective, if a rank has ended or does not come in time.
    """

    def __init__(
        self,
        group: Any,
        timeout_s: float = TIMEOUT_S,
        device: str | None = None,
        entering: Callable[[int], None] = lambda number: None,
        looking: Callable[[], None] = lambda: None,
    ) -> None:
        if group is None or not hasattr(group, "allreduce"):
            raise ConfigError(
                f"GroupComm got {group!r:.60}; expected a process group: call torch.distributed.init_process_group(), "
                "then pass torch.distributed.group.WORLD"
            )
        self.rank, self.size = int(group.rank()), int(group.size())
        self._group: Any = group
        self._timeout_s, self._entering, self._entered = timeout_s, entering, 0
        self._looking = looking
        import torch.distributed.distributed_c10d as c10d  # takes long, and one learner needs none of it

        api: Any = c10d
        # Of each collective: else the group's own holds, which is how long ranks may take to meet.
        self._summed, self._gathered, self._sent = (
            api.AllreduceOptions(),
            api.AllgatherOptions(),
            api.BroadcastOptions(),
        )
        for options in (self._summed, self._gathered, self._sent):
            options.timeout = timedelta(seconds=timeout_s)
        self._device = device or ("cuda" if "nccl" in str(group.name()).lower() else "cpu")

    def all_reduce(self, x: Tensor) -> Tensor:
        there = x.contiguous() if x.device.type == self._device else x.to(self._device)
        self._done("all_reduce", lambda: self._group.allreduce([there], self._summed))
        return x if there is x else x.copy_(there)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        # As bytes: no backend knows every dtype.
        there = x.contiguous().reshape(-1).view(torch.uint8).to(self._device)
        found = [torch.empty_like(there) for _ in range(self.size)]
        self._done("all_gather", lambda: self._group.allgather([found], [there], self._gathered))
        return [y.to(x.device).view(x.dtype).reshape(x.shape) for y in found]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        there = x.contiguous().reshape(-1).view(torch.uint8).to(self._device, copy=True)
        self._sent.rootRank = source
        self._done("broadcast", lambda: self._group.broadcast([there], self._sent))
        return x.copy_(there.to(x.device).view(x.dtype).reshape(x.shape))

    def barrier(self) -> None:
        self.all_reduce(torch.zeros(1))

    def close(self) -> None:
        """Closes the group with its threads and sockets; the other ranks must have closed theirs, or do so now."""
        self._group = None

    def _done(self, what: str, begin: Callable[[], Any]) -> None:
        self._entered += 1
        self._entering(self._entered)
        try:
            self._wait(begin())
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        else:
            return
        # Without its cause, whose traceback would keep the group, and so threads and sockets, from ending with `close`.
        raise LearnerLostError(
            f"rank {self.rank} of {self.size} waited in {what} number {self._entered} for a rank that has ended, "
            f"or did not come within {self._timeout_s:g} s ({said:.200}); "
            "every rank must train the same batches in the same order"
        )

    def _wait(self, work: Any) -> None:
        until = time.monotonic() + self._timeout_s
        try:
            while (left := until - time.monotonic()) > _LOOK_S and self._device == "cpu":
                try:
                    work.wait(timedelta(seconds=_LOOK_S))
                    return
                except RuntimeError:
                    if work.is_completed():
                        break  # with an error, or just now
                    self._looking()
            work.wait(timedelta(seconds=max(left, 1e-3)))
        finally:
            del work  # which holds the group, where a traceback holds this frame


def meet(path: str, rank: int, size: int, backend: str = "gloo", timeout_s: float = TIMEOUT_S) -> Any:
    """The process group of ranks of this machine that meet by a file; what gloo opens listens on 127.0.0.1 only.

    Args:
        path: of a file that is not there yet, the same for all ranks, in a folder that they can write.
        backend: gloo; or nccl, which asks for the file again and again as long as the group lives.

    Raises:
        ConfigError: the file cannot be written. LearnerLostError: not all have come in time.
    """
    import torch.distributed as dist  # takes long, and one learner needs none of it

    api: Any = dist
    try:
        with open(path, "ab"):
            pass
    except OSError as error:
        raise ConfigError(
            f"ranks cannot meet in {path}: {error.strerror or error}; give a folder that all of them may write, e.g. "
            "by TMPDIR"
        ) from error
    from penstock.learn.lent_store import LentStore

    try:
        store = LentStore(api.FileStore(path, size))
    except RuntimeError as error:
        raise _unmet(error, rank, size, path, timeout_s) from error
    try:
        return meet_by(store, rank, size, backend, timeout_s, where=path)
    finally:
        if backend != "nccl":
            store.give_back()


def meet_by(
    store: Any,
    rank: int,
    size: int,
    backend: str = "gloo",
    timeout_s: float = TIMEOUT_S,
    host: str = "127.0.0.1",
    where: str = "their store",
) -> Any:
    """The process group of ranks that meet by a store of torch.distributed.

    Args:
        host: name or address of this machine at which gloo listens for the other ranks.
        where: the store, for messages.

    Raises:
        LearnerLostError: not all have come in time.
    """
    import torch.distributed as dist

    api: Any = dist
    timeout = timedelta(seconds=timeout_s)
    try:
        store.set_timeout(timeout)
        if backend == "nccl":
            options = api.ProcessGroupNCCL.Options()
            options._timeout = timeout
            return api.ProcessGroupNCCL(store, rank, size, options)
        options = api.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [api.ProcessGroupGloo.create_device(hostname=host)]
        return api.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        raise _unmet(error, rank, size, where, timeout_s) from error


def _unmet(error: RuntimeError, rank: int, size: int, where: str, timeout_s: float) -> LearnerLostError:
    return LearnerLostError(
        f"rank {rank} did not meet the other {size - 1} in {where} within {timeout_s:g} s "
        f"({str(error).splitlines()[0]:.200}); did one of them fail, or begin with another number of ranks?"
    )


def gathered(comm: Comm, value: Any) -> list[Any]:
    """Plain data and arrays of every rank, by rank."""
    data = np.frombuffer(encode(value), np.uint8)
    sizes = [int(x) for x in comm.all_gather(torch.tensor(len(data)))]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: len(data)] = torch.from_numpy(data.copy())
    return [decode(x[:size].numpy().tobytes()) for x, size in zip(comm.all_gather(padded), sizes)]
