"""The loop with its acts, steps and waits noted as spans of time, while a trace is going on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.core import trace
from penstock.samplers.collector import Collect, LoopAgent, LoopPool, collect


def loop() -> Collect:
    """Returns `collect`, or its traced form while a trace is going on."""
    return collect if trace.ring is None else _collect_traced


def _collect_traced(pool: LoopPool, agents: Sequence[LoopAgent], *rest: Any) -> None:
    collect(_TracedPool(pool), [_TracedAgent(agent, getattr(pool, "remote", False)) for agent in agents], *rest)


class _TracedPool:
    """An `EnvPool` that notes its waits and steps in a trace."""

    def __init__(self, pool: LoopPool) -> None:
        remote = getattr(pool, "remote", False)
        self.groups, self.seats, self.takes_turns = pool.groups, pool.seats, pool.takes_turns
        self.bind, self.pending, self.finished = pool.bind, pool.pending, pool.finished
        self.send = trace.timed(trace.SEND if remote else trace.STEP, pool.send)
        self.recv = trace.timed(trace.SERVER_WAIT, pool.recv) if remote else pool.recv


class _TracedAgent:
    """An agent that notes its acting in a trace."""

    def __init__(self, agent: LoopAgent, remote: bool) -> None:
        self.noise_size, self.env_ranks = agent.noise_size, agent.env_ranks
        self.held_noise, self.evaluates_with_noise = agent.held_noise, agent.evaluates_with_noise
        self.act = trace.timed(trace.SERVE if remote else trace.ACT, agent.act)
