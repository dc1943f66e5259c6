"""The floor: what a hand-written loop over the same Python environments costs, with a numpy policy and nothing else.

It stores observations, actions, log-probabilities, values, rewards and ends. It has no episode statistics, no learner,
no recurrent state, no checks of what environments return and no noise that can be reproduced: a ceiling for a design
that steps Python environments in one process, or in several that meet once a batch, not a framework.
"""

from __future__ import annotations

import mmap
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
from turns import look

Layers = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
_DTYPES = {"action": np.int64, "logp": np.float32, "value": np.float32, "reward": np.float32, "done": np.bool_}
_OBS_SIZE = 4
_LINE = 8
"""Words of a cache line: no two processes write the same one."""
_LOOKS = 100_000
"""Looks at a counter between two at whether the other process lives."""


def mlp(x: np.ndarray[Any, Any], layers: Layers) -> np.ndarray[Any, Any]:
    """[N, inputs] -> [N, outputs] with tanh between layers."""
    for w, b in layers[:-1]:
        x = np.tanh(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def random_layers(rng: np.random.Generator, *sizes: int, last: float) -> Layers:
    """Weights of deviation 1/sqrt(inputs), the last layer's scaled by `last`, and zero biases."""
    scales = [1.0] * (len(sizes) - 2) + [last]
    return [
        ((s * rng.standard_normal((i, o)) / np.sqrt(i)).astype(np.float32), np.zeros(o, np.float32))
        for i, o, s in zip(sizes, sizes[1:], scales)
    ]


class Loop:
    """N environments and the arrays [T, N] that they fill, batch after batch."""

    def __init__(self, env_id: str, T: int, N: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.envs = [gym.make(env_id, disable_env_checker=True) for _ in range(N)]
        self.obs = np.stack([env.reset(seed=seed + b)[0] for b, env in enumerate(self.envs)])
        space: Any = self.envs[0].action_space
        self.actor = random_layers(self.rng, self.obs.shape[1], 64, 64, int(space.n), last=0.01)
        self.critic = random_layers(self.rng, self.obs.shape[1], 64, 64, 1, last=1.0)
        self.T = T

    def batch(self, out: dict[str, Any]) -> None:
        """T steps of every environment, into `out`."""
        rng, envs, obs, actor, critic = self.rng, self.envs, self.obs, self.actor, self.critic
        observations, actions, logps = out["obs"], out["action"], out["logp"]
        values, rewards, dones = out["value"], out["reward"], out["done"]
        N = len(envs)
        slots = np.arange(N)
        for t in range(self.T):
            logits = mlp(obs, actor)
            logits -= logits.max(1, keepdims=True)
            p = np.exp(logits)
            p /= p.sum(1, keepdims=True)
            action = (p[:, :-1].cumsum(1) < rng.random((N, 1))).sum(1)
            observations[t], actions[t], values[t] = obs, action, mlp(obs, critic)[:, 0]
            logps[t] = np.log(p[slots, action])
            for b, env in enumerate(envs):
                obs[b], rewards[t, b], terminated, truncated, _ = env.step(action[b])
                dones[t, b] = terminated or truncated
                if dones[t, b]:
                    obs[b] = env.reset()[0]


def arrays(T: int, B: int, memory: mmap.mmap) -> dict[str, Any]:
    """What a batch stores, [T, B] each and obs [T, B, 4], in this memory."""
    out: dict[str, Any] = {"obs": np.frombuffer(memory, np.float32, T * B * _OBS_SIZE).reshape(T, B, _OBS_SIZE)}
    end = out["obs"].nbytes
    for name, dtype in _DTYPES.items():
        out[name] = np.frombuffer(memory, dtype, T * B, end).reshape(T, B)
        end += T * B * 8
    return out


def _size(T: int, B: int) -> int:
    return T * B * (4 * _OBS_SIZE + 8 * len(_DTYPES))


def floor_unit(env_id: str, T: int, B: int, seed: int = 0) -> Callable[[], float]:
    """A function that collects a batch of T rows of B environments, and returns their number of steps."""
    loop, out = Loop(env_id, T, B, seed), arrays(T, B, mmap.mmap(-1, _size(T, B)))

    def unit() -> float:
        loop.batch(out)
        return T * B

    return unit


@contextmanager
def shared_floor(
    env_id: str, T: int, B: int, seed: int = 0, processes: int = 2, cpus: Sequence[int] = ()
) -> Iterator[Callable[[], float]]:
    """The same of several processes with a share of the environments each, which meet once a batch.

    They write their columns of one batch in shared memory and wait for each other by looking at counters there; nobody
    locks, and nobody goes to sleep. A learner is none of them.

    Args:
        cpus: one for each process; empty leaves it to the kernel.
    """
    out = arrays(T, B, mmap.mmap(-1, _size(T, B)))
    done: Any = memoryview(mmap.mmap(-1, (processes + 1) * _LINE * 8)).cast("q")
    last, share = processes * _LINE, B // processes
    children = [_forked(w, env_id, out, share, seed, done, last, cpus) for w in range(1, processes)]
    batches = 0

    def unit() -> float:
        nonlocal batches
        batches += 1
        done[last] = batches  # go
        loop.batch(mine)
        for w, pid in enumerate(children, 1):
            looks = 0
            while done[w * _LINE] < batches:
                looks += 1
                if looks % _LOOKS == 0 and os.waitpid(pid, os.WNOHANG)[0]:
                    children.remove(pid)
                    raise RuntimeError(f"process {w} of the floor ended; its traceback is above")
        return T * share * processes

    try:
        if cpus:
            os.sched_setaffinity(0, {cpus[0]})
        loop = Loop(env_id, T, share, seed)
        mine = {name: x[:, :share] for name, x in out.items()}
        yield unit
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _forked(
    w: int, env_id: str, out: dict[str, Any], share: int, seed: int, done: Any, last: int, cpus: Sequence[int]
) -> int:
    """A process that fills its columns each time the counter at `last` goes up; its process id."""
    pid = os.fork()
    if pid:
        return pid
    parent = os.getppid()
    try:
        if cpus:
            os.sched_setaffinity(0, {cpus[w]})
        loop = Loop(env_id, out["obs"].shape[0], share, seed + 1000 * w)
        mine = {name: x[:, w * share : (w + 1) * share] for name, x in out.items()}
        looks = 0
        while True:
            while done[last] <= done[w * _LINE]:
                looks += 1
                if looks % _LOOKS == 0 and os.getppid() != parent:
                    os._exit(0)
            loop.batch(mine)
            done[w * _LINE] += 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    for B in (16, 64):
        one = look(floor_unit("CartPole-v1", 128, B), 3.0)
        print(f"CartPole-v1, B={B}: {one['work'] / one['wall']:,.0f} steps/s")
        with shared_floor("CartPole-v1", 128, B) as both:
            one = look(both, 3.0)
            print(f"CartPole-v1, B={B}, two processes: {one['work'] / one['wall']:,.0f} steps/s")
