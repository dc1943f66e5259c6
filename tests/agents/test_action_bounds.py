"""Bounds of action boxes, element by element: a policy spans what is bounded, and can move where a bound is missing."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.agents.actor_critic import ActionHead, ActorCritic
from penstock.agents.agent import ExportableAgent
from penstock.agents.networks import Net
from penstock.core.errors import ConfigError
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.actions import sample_action
from penstock.envs.spaces import leaf_spec

VECTOR = LeafSpec("box", (3,), "float32")
INF = np.inf
F16, F32, F64 = (float(np.finfo(x).max) for x in (np.float16, np.float32, np.float64))


def box(low: Any, high: Any, dtype: Any = np.float32) -> LeafSpec:
    found = leaf_spec(spaces.Box(np.asarray(low, dtype), np.asarray(high, dtype), dtype=dtype))
    assert found is not None
    return found


CASES = {
    # (low, high, dtype): the range that a fresh policy spans
    "bounded": (([-2, 0], [3, 100], np.float32), ([-2, 0], [3, 100])),
    "free": (([-INF, -INF], [INF, INF], np.float32), ([-1, -1], [1, 1])),
    "one-sided": (([50, -INF], [INF, 9], np.float32), ([50, 7], [52, 9])),
    "beside a free one": (([0, -INF], [100, INF], np.float32), ([0, -1], [100, 1])),
    "finfo.max": (([-F32, -F32], [F32, 5], np.float32), ([-1, 3], [1, 5])),
    "float16's max": (([-F16], [F16], np.float16), ([-1], [1])),
    "1e300": (([-1e300, 4], [1e300, 1e300], np.float64), ([-1, 4], [1, 6])),
    "float64's max": (([-F64], [F64], np.float64), ([-1], [1])),
    "large but bounded": (([-1e9], [1e9], np.float32), ([-1e9], [1e9])),
}


@pytest.mark.parametrize("name", CASES)
def test_each_element_has_the_range_of_its_own_bounds(name: str):
    given, (low, high) = CASES[name]
    leaf = box(*given)
    head = ActionHead(4, leaf, squash=False, log_std=0.0)
    dist: Any = head(torch.zeros(1, leaf.size))
    torch.testing.assert_close(dist.to_env(torch.full((1, leaf.size), -1.0)), torch.tensor([low], dtype=torch.float32))
    torch.testing.assert_close(dist.to_env(torch.ones(1, leaf.size)), torch.tensor([high], dtype=torch.float32))
    assert torch.isfinite(dist.log_prob(dist.mode())).all() and torch.isfinite(dist.entropy()).all()
    # The random actions of warm-up and decorrelation span the same.
    drawn = sample_action(leaf, uniform(0, Purpose.CHECK, 0, slice(0, 500), 1, leaf.size)[0]).astype(np.float64)
    assert (drawn >= low).all() and (drawn <= high).all()
    assert ((drawn.max(0) - drawn.min(0)) / (np.asarray(high, np.float64) - low) > 0.9).all()


def test_gsde_and_joint_actions_go_by_elements_as_well():
    leaf = box([0, -INF], [100, INF])
    sde: Any = ActorCritic(EnvSpec(VECTOR, leaf), Net(hidden=(4,), use_sde=True)).head
    assert sde.center_0.tolist() == [50.0, 0.0] and sde.half_0.tolist() == [50.0, 1.0]
    joint: Any = ActionHead(4, {"a": leaf, "b": box([50], [INF])}, squash=False, log_std=0.0)
    assert joint.center_0.tolist() == [50.0, 0.0] and joint.center_1.tolist() == [51.0]


def test_an_exported_agent_clips_to_single_bounds_as_predict_does():
    leaf = box([50, -INF, -INF], [INF, INF, -9])
    policy = ps.PPO(net=Net(hidden=(4,))).build(EnvSpec(VECTOR, leaf))
    with torch.no_grad():
        policy.agent.head.linear.bias.copy_(torch.tensor([-100.0, -100.0, 100.0]))  # pyright: ignore
    obs = np.zeros(3, np.float32)
    expected = policy.predict(obs)
    assert expected.tolist() == [50.0, pytest.approx(-100.0), -9.0]
    found = ExportableAgent(policy.agent)(torch.from_numpy(obs[None]))
    assert np.array_equal(found[0].detach().numpy(), expected)


@pytest.mark.parametrize("high", [INF, F32])
def test_what_needs_two_bounds_says_so(high: float):
    spec = EnvSpec(VECTOR, box([-1], [high]))
    for algo in (ps.SAC(), ps.TD3(), ps.DDPG(), ps.CQL(), ps.PPO(net=Net(squash=True))):
        with pytest.raises(ConfigError, match="needs finite action bounds"):
            algo.build(spec)


class Target(gym.Env[Any, Any]):
    """Pays the negative distance of an action from a target."""

    observation_space = spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, low: Any, high: Any, target: Any) -> None:
        self.action_space, self.target = spaces.Box(np.float32(low), np.float32(high)), np.asarray(target)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.zeros(1, np.float32), -float(np.abs(action - self.target).mean()), False, self.t >= 10, {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("low", "high", "target", "near"),
    [([50], [INF], [52.0], 0.5), ([-INF], [9], [8.0], 0.5), ([0, -INF], [100, INF], [70.0, 0.0], 5.0)],
)
def test_targets_beside_a_missing_bound_are_reached(low: Any, high: Any, target: Any, near: float):
    exp = ps.Experiment(
        Target,
        ps.PPO(lr=1e-3),
        ps.SerialSampler(T=64, B=8),
        ps.RunConfig(steps=12_000, progress="off", seed=1, eval_episodes=0),
        env_kwargs={"low": low, "high": high, "target": target},
    )
    trainer = ps.Trainer(exp)
    while trainer.env_steps < trainer.exp.run.steps:
        trainer.train()
    trainer.stop()
    action: Any = trainer.policy.predict(np.zeros(1, np.float32))  # pyright: ignore[reportAttributeAccessIssue]
    assert np.abs(action - np.asarray(target)).max() < near
