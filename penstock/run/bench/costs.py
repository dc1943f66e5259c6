"""Durations of the parts of a step: the environment, a forward, and a hand-shake with a worker process."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import Inputs, allocate_batch, as_arrays, padded_rows
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import MASK_KEY, BatchSpec, EnvSpec, allocate
from penstock.core.tree import Tree, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.check import tensor_device
from penstock.envs.check_agents import time_steps
from penstock.envs.closing import close_env
from penstock.envs.make import EnvConfig
from penstock.envs.seats import Seating
from penstock.envs.spaces import env_spec
from penstock.learn.policy_set import AnyPolicy, PolicySet
from penstock.samplers.cpu import CpuSampler
from penstock.workers.pool import TRAINING, ProcessPool

_HANDSHAKES = 512
_NOTHING = "penstock.envs.toy:Counter"
_MOST_STEPS = 20_000
_STARTUP = 5
"""First calls, which are left out of the median."""


@dataclass(frozen=True)
class Costs:
    """Durations of the parts of a step, in microseconds."""

    step_us: float
    """Median of `env.step`; of a native batched environment, by slot."""
    step_p99_us: float
    forward_us: Mapping[int, float]
    """Median of `agent.act` with its copy to the CPU, by number of rows."""
    handshake_us: float
    """Median of a round trip from learner to worker and back; 0 if no sampler would need one."""
    unit: Literal["row", "environment"] = "row"
    """What `forward_us` counts: rows, or environments of many agents, for which all policies act."""

    def forward(self, rows: int) -> float:
        """Duration for a number of rows, interpolated between the measured ones."""
        counts = sorted(self.forward_us)
        return float(np.interp(padded_rows(rows), counts, [self.forward_us[n] for n in counts]))


def measure_env(config: EnvConfig, seed: int, seconds: float, slots: int = 0) -> tuple[float, float]:
    """Median and 99th percentile of `env.step` in us under random actions, without resets.

    Args:
        config: of many agents one with seats. slots: of a native batched environment; 0 for one environment.
    """
    if config.seating is not None:
        took = time_steps(config, seed, seconds, _MOST_STEPS)
    else:
        took = _step_times(config, seed, seconds, slots)
    return statistics.median(took[_STARTUP:]) * 1e6, float(np.percentile(took[_STARTUP:], 99)) * 1e6


def _step_times(config: EnvConfig, seed: int, seconds: float, slots: int) -> list[float]:
    """Durations of a step in s, of each of `slots`."""
    env: Any = config.make()
    try:
        n, device = getattr(env, "num_envs", 1), tensor_device(env) if slots else None
        spec = env_spec(env)
        size = action_noise_size(spec.action)
        noise = uniform(seed, Purpose.CHECK, 1 << 20, slice(0, n), 256, size)

        def action(t: int, obs: Any) -> Tree:
            mask = obs[MASK_KEY] if isinstance(obs, dict) and MASK_KEY in obs else None
            mask = mask[None] if mask is not None and not slots else mask
            drawn = sample_action(spec.action, noise[t % 256], None if mask is None else as_arrays(mask))
            if device is not None:
                return tree_map(lambda x: torch.as_tensor(x, device=device), drawn)
            return drawn if slots else tree_map(lambda x: x[0].item() if x[0].ndim == 0 else x[0], drawn)

        obs, _ = env.reset(seed=seed)
        took: list[float] = []
        deadline = time.perf_counter() + seconds
        while len(took) < _MOST_STEPS and (time.perf_counter() < deadline or len(took) < 2 * _STARTUP):
            chosen = action(len(took), obs)
            started = time.perf_counter()
            obs, reward, terminated, truncated, _ = env.step(chosen)
            if device is not None:
                reward.cpu()  # waits until the device is done
            took.append((time.perf_counter() - started) / n)
            if not slots and (terminated or truncated):
                obs, _ = env.reset()
    finally:
        close_env(env, config.name)
    return took


def measure_acting(policy: AnyPolicy, seating: Seating | None, slots: int, seconds: float) -> float:
    """Median time in us to act for a number of slots; of many agents the sum over the policies that play there.

    Args:
        seating: of the environments; None for those of one agent. Where agents take turns one of them acts at a time,
            so that a policy is taken to have its share of the seats.
    """
    if seating is None:
        return measure_forward(policy.agent, policy.spec, slots, seconds)
    assert isinstance(policy, PolicySet)
    at_once = 1 if not seating.turns else sum(seating.seats)
    rows = [padded_rows(math.ceil(slots * seats / at_once)) for seats in seating.seats]
    each_s = seconds / len(rows)
    return sum(measure_forward(own.agent, own.spec, n, each_s) for n, own in zip(rows, policy.values()))


def measure_forward(agent: Agent, spec: EnvSpec, rows: int, seconds: float) -> float:
    """Median of `agent.act` on a number of rows in us, until its action is on the CPU."""
    device = agent_device(agent)

    def put(tree: Tree) -> Tree:
        return tree_map(lambda x: torch.as_tensor(x, device=device), tree)

    action = tree_map(lambda leaf: np.broadcast_to(leaf.null(), (rows, *leaf.shape)).copy(), spec.action)
    first = torch.ones(rows, dtype=torch.bool, device=device)
    inputs = Inputs(put(allocate(spec.obs, rows)), put(action), torch.zeros(rows, device=device), first)
    noise = torch.full((rows, agent.noise_size), 0.5, device=device)
    with torch.inference_mode():
        state = agent.initial_state(rows)
        return median_us(lambda: tree_map(lambda x: x.cpu(), agent.act(inputs, state, noise)[:2]), seconds)


def measure_handshake(seconds: float) -> float:
    """Median round trip of a row to one worker and back in us, with an environment that takes next to no time."""
    config = EnvConfig(_NOTHING)
    settings = CpuSampler(T=_HANDSHAKES, B=1, workers=1)
    workers = settings.start_workers(config, 0, 2, None)
    try:
        pool = ProcessPool(workers, TRAINING, config, 0, 1)
        blank = allocate_batch(pool.spec, BatchSpec(_HANDSHAKES, 1), {}, None, pool.info_keys)
        (batch,), _ = pool.place([blank], None)
        took: list[float] = []
        send, recv = pool.send, pool.recv
        deadline = time.perf_counter() + seconds
        while not took or time.perf_counter() < deadline:
            pool.bind([batch])
            for row in range(_HANDSHAKES):
                started = time.perf_counter()
                send(0, row)
                recv()
                took.append(time.perf_counter() - started)
    finally:
        workers.close()
    return statistics.median(took) * 1e6


def median_us(call: Callable[[], Any], seconds: float) -> float:
    """Median duration of a call in us, over a time in seconds."""
    took: list[float] = []
    deadline = time.perf_counter() + seconds
    while time.perf_counter() < deadline or len(took) < 2 * _STARTUP:
        started = time.perf_counter()
        call()
        took.append(time.perf_counter() - started)
    return statistics.median(took[_STARTUP:]) * 1e6
