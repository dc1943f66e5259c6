"""A replay filled from an environment of chance, and the same record in plain rows, for losses against slow loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from penstock.core.batch import Inputs, SampleBatch
from penstock.core.tree import tree_map
from penstock.envs.toy.base import Toy, box
from penstock.learn.policy import Policy
from penstock.learn.train_ops import samples, train_one_step
from penstock.samplers.serial import SerialSampler

T, B = 5, 3
CHOICE = spaces.Discrete(4, start=2)
BOX = spaces.Box(np.array([-3.0, 0.0], np.float32), np.array([5.0, 0.5], np.float32))


class Chance(Toy):
    """Observations, rewards and ends of both kinds by chance; with `masked` one action of the choice is illegal."""

    def __init__(self, action: spaces.Space[Any] = CHOICE, masked: bool = False) -> None:
        shown: Any = box(-10, 10, 3)
        self.masked = masked
        if masked:
            shown = spaces.Dict({"obs": shown, "action_mask": spaces.MultiBinary(4)})
        super().__init__(shown, action)

    def observe(self) -> Any:
        obs = self.np_random.normal(size=3).clip(-10, 10).astype(np.float32)
        if not self.masked:
            return obs
        mask = np.ones(4, np.int8)
        mask[self.np_random.integers(4)] = 0
        return {"obs": obs, "action_mask": mask}

    def act(self, action: Any) -> tuple[float, bool, bool]:
        end = self.np_random.random()
        return float(self.np_random.normal()) * 2, end < 0.15, 0.15 <= end < 0.3


class Record:
    """Batches that follow each other, row by row."""

    def __init__(self, batches: list[SampleBatch]) -> None:
        self.batches = batches

    def at(self, t: int, name: str, b: int) -> Any:
        """`reward`, `valid`, ... of row t of slot b."""
        batch, row = self.batches[t // T], t % T
        return tree_map(lambda x: x[row, b], getattr(batch, name))

    def inputs(self, t: int, b: int, after: bool = False) -> Inputs:
        """What was seen at row t, or after it, as tensors [1, ...]."""
        batch, row = self.batches[t // T], t % T + after
        return Inputs(*(tree_map(lambda x: torch.as_tensor(x[row, b])[None], part) for part in batch.inputs))

    def transition(self, t: int, b: int, n: int, discount: float) -> tuple[float, float, Inputs]:
        """Sum of rewards, weight of the next value and what it is the value of, reward by reward."""
        total = 0.0
        for k in range(n):
            total += discount**k * float(self.at(t + k, "reward", b))
            if self.at(t + k, "terminated", b):
                return total, 0.0, self.inputs(t + k, b, after=True)
            if self.at(t + k, "truncated", b) or k == n - 1 or not self.at(t + k + 1, "valid", b):
                return total, discount ** (k + 1), self.inputs(t + k, b, after=True)
        raise AssertionError


def filled(cfg: Any, env: Any, batches: int = 12) -> tuple[Policy, Record]:
    """A policy that was not trained, whose networks all differ, with a replay that it filled by random actions."""
    sampler = SerialSampler(T=T, B=B).build(env, 1)
    policy: Policy = cfg.build(sampler.spec, 2)
    examples = sampler.initialize(policy.agent)
    policy.prepare(sampler.batch_spec, examples["info"])
    kept: list[SampleBatch] = []
    assert policy.replay_schedule is not None
    for itr in range(batches):
        batch = sampler.obtain_samples(itr)[0]
        kept.append(batch.copy())
        policy.replay_schedule.replay.append(batch)
    generator = torch.Generator().manual_seed(3)
    for parameter in policy.agent.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    policy.agent.renew_noise(np.random.default_rng(4))
    return policy, Record(kept)


def trained(cfg: Any, env: Any, batches: int) -> tuple[Policy, list[dict[str, Tensor]]]:
    """A policy, and the state of its agent before any gradient step and after each."""
    sampler = SerialSampler(T=2, B=4).build(env, 1)
    policy: Policy = cfg.build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    own: Any = policy.replay_schedule
    inner = own.after_update

    def copied() -> dict[str, Tensor]:
        return {k: v.clone() for k, v in policy.agent.state_dict().items() if isinstance(v, Tensor)}

    states = [copied()]

    def watch(agent: Any, settings: Any, updates: int) -> None:
        inner(agent, settings, updates)
        states.append(copied())

    own.after_update = watch
    for itr in range(batches):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, states


def part(state: dict[str, Tensor], name: str) -> list[Tensor]:
    """The parameters of one network in an agent's state."""
    return [v for k, v in state.items() if k.startswith(f"{name}.")]


def drawn(policy: Policy) -> tuple[Any, Any]:
    """(drawing, sample) of the policy's replay, as `train_on_replay` takes it."""
    return next(samples(policy, 1, np.random.default_rng(0)))


def assert_gradients_equal(seen: Tensor, slow: Tensor, parameters: list[Tensor], rtol: float = 1e-3) -> None:
    """Of two losses, by every parameter."""
    found = (torch.autograd.grad(x, parameters, retain_graph=True) for x in (seen, slow))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-5)
