"""An agent as a module of tensors acts as `Policy.predict` does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map

VECTOR = LeafSpec("box", (3,), "float32", -5.0, 5.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,), start=1)
BOX = LeafSpec("box", (2,), "float32", (-0.05, 0.0), (0.05, 0.5))
MASKED = {"action_mask": LeafSpec("multi_binary", (3,), "int8"), "x": VECTOR}
NESTED = {"box": BOX, "choice": CHOICE}

CASES: dict[str, tuple[EnvSpec, Any]] = {
    "clipped": (EnvSpec(VECTOR, BOX), ps.PPO(net=ps.Net(hidden=(8,)))),
    "masked": (EnvSpec(MASKED, CHOICE), ps.PPO(net=ps.Net(hidden=(8,), normalize_obs=True))),
    "nested": (EnvSpec(VECTOR, NESTED), ps.PPO(net=ps.Net(hidden=(8,)))),
    "dqn": (EnvSpec(VECTOR, CHOICE), ps.DQN(net=ps.Net(hidden=(8,)))),
    "sac": (EnvSpec(VECTOR, BOX), ps.SAC(net=ps.Net(hidden=(8,)))),
}


def built(spec: EnvSpec, settings: Any) -> ps.Policy:
    policy = settings.build(spec, seed=1)
    for p in policy.agent.parameters():
        torch.nn.init.normal_(p.data, generator=torch.Generator().manual_seed(p.numel()))
    return policy


@pytest.mark.parametrize("case", CASES)
def test_actions_are_those_of_predict(case: str) -> None:
    spec, settings = CASES[case]
    policy = built(spec, settings)
    obs: Any = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    if case == "masked":
        obs = {"action_mask": np.array([[1, 0, 1], [0, 1, 1]] * 4, np.int8), "x": obs}
    expected = policy.predict(obs, deterministic=True)
    with torch.inference_mode():
        action = ps.ExportableAgent(policy.agent)(tree_map(torch.from_numpy, obs))
    for a, b in zip(tree_leaves(action), tree_leaves(expected), strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-6, atol=1e-7)
        if case in ("clipped", "sac"):
            assert np.array_equal(a.numpy(), a.numpy().clip(BOX.bound("low"), BOX.bound("high")).astype(np.float32))


def test_memory_goes_from_call_to_call() -> None:
    net = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=5, prev_action=True, prev_reward=True)
    policy = built(EnvSpec(VECTOR, CHOICE), ps.PPO(net=net))
    module, rng = ps.ExportableAgent(policy.agent), np.random.default_rng(0)
    carried: Any = None
    state, action, reward = policy.agent.initial_state(4), torch.full((4,), 1), torch.zeros(4)
    for t in range(4):
        obs = rng.normal(size=(4, 3)).astype(np.float32)
        expected, carried = policy.predict(obs, state=carried, prev_reward=reward.numpy(), deterministic=True)
        first = torch.full((4,), t == 0) if t == 0 else None
        with torch.inference_mode():
            action, state = module(torch.from_numpy(obs), state, first, action, reward)
        assert action.tolist() == expected.tolist()
        reward = torch.full((4,), float(t))
