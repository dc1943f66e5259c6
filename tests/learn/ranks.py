"""Ranks in the threads of one process: a Comm whose sums come out the same everywhere, and policies that train by it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

import penstock as ps

R = TypeVar("R")
LIMIT_S = 60.0


class ThreadComm:
    """The Comm of one of several threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: dict[int, Tensor]) -> None:
        self.rank, self.size, self._barrier, self._board = rank, size, barrier, board
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.calls.append(("all_gather", tuple(x.shape)))
        self._board[self.rank] = x.clone()
        self._barrier.wait(LIMIT_S)
        found = [self._board[i].clone() for i in range(self.size)]
        self._barrier.wait(LIMIT_S)
        assert {y.shape for y in found} == {x.shape}, "ranks gather different things"
        assert {y.dtype for y in found} == {x.dtype}, "ranks gather different things"
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for y in self.all_gather(x):
            total += y
        self.calls[-1] = ("all_reduce", tuple(x.shape))
        return x.copy_(total)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return x.copy_(self.all_gather(x)[source])

    def barrier(self) -> None:
        self._barrier.wait(LIMIT_S)


def on_ranks(size: int, work: Callable[[ThreadComm], R]) -> list[R]:
    """What `work` returns on each rank; raises what the lowest rank raised that was not merely left alone."""
    barrier, board = threading.Barrier(size), dict[int, Tensor]()
    found: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadComm(rank, size, barrier, board))
        except BaseException as error:
            errors[rank] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if own or any(errors):
        raise own[0] if own else AssertionError("every rank was left alone")
    return found


def bounds(widths: Sequence[int]) -> list[slice]:
    """The columns of each rank."""
    starts = [sum(widths[:i]) for i in range(len(widths) + 1)]
    return [slice(a, b) for a, b in zip(starts, starts[1:])]


def batches_of(env: str, algo: Any, T: int, B: int, count: int) -> tuple[ps.EnvSpec, list[ps.SampleBatch]]:
    """Batches that the untrained policy collected."""
    sampler = ps.SerialSampler(T=T, B=B).build(env, 3)
    try:
        sampler.initialize(algo.build(sampler.spec, seed=5).agent)
        return sampler.spec, [sampler.obtain_samples(itr)[0].copy() for itr in range(count)]
    finally:
        sampler.shutdown()


def trained(
    algo: Any, spec: ps.EnvSpec, batches: Sequence[ps.SampleBatch], widths: Sequence[int], double: bool = False
) -> list[tuple[ps.Policy, list[ps.ResultDict]]]:
    """The policy of each rank, and its results, after training on its columns of each batch; one width is one learner."""
    places = bounds(widths)

    def work(comm: ThreadComm) -> tuple[ps.Policy, list[ps.ResultDict]]:
        policy = algo.build(spec, seed=5)
        if double:
            policy.agent.double()
            policy.optimizers = policy.optimizer_fn(policy.agent, policy.settings)
        policy.join(comm)
        results = [ps.multi_gpu_train_one_step(policy, batch[:, places[comm.rank]]) for batch in batches]
        return policy, results

    return on_ranks(len(widths), work)


def apart(one: ps.Policy, other: ps.Policy) -> float:
    """The largest difference of any parameter or buffer, of those above 1 relative to them."""
    mine, theirs = one.agent.state_dict(), other.agent.state_dict()
    assert mine.keys() == theirs.keys()
    pairs = [(x, y) for name, x in mine.items() if (y := theirs[name]).shape == x.shape and x.numel()]
    return max(float(((x.double() - y.double()).abs() / x.double().abs().clamp(min=1)).max()) for x, y in pairs)
