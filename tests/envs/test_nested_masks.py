"""Masks of every action with choices, from the info of one agent and of many: an illegal choice is never made."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.agents.distributions import Bernoulli
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.envs.actions import sample_action
from penstock.envs.spaces import space_to_spec

BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTIONS = {
    "bits": spaces.MultiBinary(3),
    "square": spaces.MultiBinary((2, 2)),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2), BOX)),
    "dict": spaces.Dict({"go": spaces.MultiDiscrete([2, 3]), "aim": BOX, "at": spaces.Discrete(3, start=5)}),
}


def parts(space: Any) -> list[Any]:
    if isinstance(space, spaces.Dict):
        return [part for key in sorted(space.spaces) for part in parts(space.spaces[key])]
    return [part for below in space.spaces for part in parts(below)] if isinstance(space, spaces.Tuple) else [space]


def drawn_mask(space: Any, rng: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """For each choice which values are legal, at least one."""
    sizes: list[int] = []
    for part in parts(space):
        if isinstance(part, spaces.Discrete):
            sizes.append(int(part.n))
        elif isinstance(part, spaces.MultiDiscrete):
            sizes += part.nvec.tolist()
        elif isinstance(part, spaces.MultiBinary):
            sizes += [2] * int(np.prod(part.shape))
    out = [rng.random(n) < 0.5 for n in sizes]
    for legal in out:
        legal[rng.integers(len(legal))] = True
    return out


def illegal(space: Any, action: Any, mask: list[np.ndarray[Any, Any]]) -> bool:
    """A loop over the choices, one after the other."""
    flat = action.values() if isinstance(action, dict) else action if isinstance(action, tuple) else [action]
    given = [action[key] for key in sorted(action)] if isinstance(action, dict) else list(flat)
    taken: list[int] = []
    for part, value in zip(parts(space), given):
        if not isinstance(part, spaces.Box):
            taken += (np.ravel(value) - np.ravel(getattr(part, "start", 0))).astype(int).tolist()
    return not all(legal[k] for legal, k in zip(mask, taken, strict=True))


class One(gym.Env[Any, Any]):
    """Raises at an illegal action; gives no mask with the last step."""

    observation_space = spaces.Box(-9, 9, (1,), np.float32)

    def __init__(self, kind: str = "bits") -> None:
        self.action_space = ACTIONS[kind]

    def _info(self) -> dict[str, Any]:
        self.mask = drawn_mask(self.action_space, self.np_random)
        return {"action_mask": np.concatenate(self.mask).astype(np.int8)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), self._info()

    def step(self, action: Any) -> Any:
        assert not illegal(self.action_space, action, self.mask)
        self.t += 1
        over = self.t == 7
        return np.full(1, self.t, np.float32), 1.0, over, False, {} if over else self._info()


class Many:
    """Two of them at once, by PettingZoo's Parallel API."""

    possible_agents = ("a", "b")
    metadata: Any = {}  # noqa: RUF012

    def __init__(self, kind: str = "bits") -> None:
        self.ones = {agent: One(kind) for agent in self.possible_agents}
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return self.ones[agent].observation_space

    def action_space(self, agent: str) -> Any:
        return self.ones[agent].action_space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        found = {a: self.ones[a].reset(seed=None if seed is None else seed + k) for k, a in enumerate(self.agents)}
        return {a: x[0] for a, x in found.items()}, {a: x[1] for a, x in found.items()}

    def step(self, actions: Any) -> Any:
        found = {a: self.ones[a].step(actions[a]) for a in self.agents}
        self.agents = [a for a in self.agents if not found[a][2]]
        return tuple({a: x[i] for a, x in found.items()} for i in range(5))

    def close(self) -> None:
        """Nothing to end."""


@pytest.mark.parametrize("kind", ACTIONS)
def test_one_agent_never_chooses_what_its_mask_forbids(kind: str) -> None:
    config = ps.EnvConfig(One, {"kind": kind}, mask_key="action_mask")
    assert ps.check_env(config).reproducible
    sampler = ps.SerialSampler(T=16, B=4).build(config, seed=0)
    policy = ps.PPO(minibatch=32, epochs=1).build(sampler.spec)
    sampler.initialize(policy.agent)
    for itr in range(4):
        batch, _ = sampler.obtain_samples(itr)
        metrics = ps.train_one_step(policy, batch)
    assert policy.updates >= 4 and all(np.isfinite(list(metrics.values())))
    assert len(sampler.evaluate_agent(0, 4)) == 4
    sampler.shutdown()


@pytest.mark.parametrize("kind", ACTIONS)
def test_no_agent_of_many_chooses_what_its_mask_forbids(kind: str) -> None:
    config = ps.EnvConfig(Many, {"kind": kind})
    assert ps.check_env(config).reproducible
    algo = ps.Policies({"x": ps.PPO(minibatch=32, epochs=1)})
    sampler = ps.SerialSampler(T=16, B=2).build(algo.seat(config), seed=0)
    policies = algo.build(sampler.specs)
    sampler.initialize(policies.agents)
    for itr in range(3):
        ps.train_one_step(policies, sampler.obtain_samples(itr)[0])
    sampler.shutdown()


def test_bits_that_must_be_on_or_off() -> None:
    mask = torch.tensor([[1, 0, 0, 1, 1, 1, 0, 0]])
    dist = Bernoulli(torch.tensor([[3.0, -3.0, 0.0, 1.0]], requires_grad=True), (4,), mask)
    for u in (1e-7, 0.5, 1 - 1e-7):
        assert dist.sample(torch.full((1, 4), u))[0, :2].tolist() == [0, 1]
    assert dist.mode().tolist() == [[0, 1, 0, 1]]
    free = Bernoulli(torch.tensor([[0.0, 1.0]]), (2,))
    action = torch.tensor([[0, 1, 1, 0]], dtype=torch.int8)
    torch.testing.assert_close(dist.log_prob(action), free.log_prob(action[:, 2:]))
    torch.testing.assert_close(dist.entropy(), free.entropy())
    (dist.entropy() + dist.log_prob(action)).sum().backward()


def test_a_mask_may_leave_out_every_bit() -> None:
    """As masks in observations did before bits could be masked."""
    spec = space_to_spec(spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))), "action")
    drawn = sample_action(spec, np.random.default_rng(0).random((200, 3)), np.tile([0, 1, 0], (200, 1)))
    assert (drawn[0] == 1).all() and 0.3 < drawn[1].mean() < 0.7


def test_an_action_without_choices_has_no_mask() -> None:
    class Boxed(One):
        def __init__(self) -> None:
            self.action_space = BOX

    with pytest.raises(ConfigError, match="no choices to mask"):
        ps.check_env(ps.EnvConfig(Boxed, mask_key="action_mask"))


def test_a_mask_that_is_missing_names_slot_and_step() -> None:
    class Forgets(One):
        def _info(self) -> dict[str, Any]:
            return super()._info() if self.t < 5 or self.calm else {}

        calm = True

    sampler = ps.SerialSampler(T=16, B=2).build(ps.EnvConfig(Forgets, mask_key="action_mask"), seed=0)
    sampler.initialize(ps.PPO().build(sampler.spec).agent)
    Forgets.calm = False
    with pytest.raises(
        EnvWorkerError, match=r"^slot 0 of .*Forgets in step\(\) at episode 0, step 4, seed \d+: step g"
    ):
        sampler.obtain_samples(0)
    sampler.shutdown()
