"""BC: its loss by hand, its gradient by hand, and that it imitates what it is shown."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.bc import BC, loss_fn
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_map
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec
from penstock.envs.toy import BoundedBandit, Match
from tests.algos.by_hand import ROWS, Fixed, P, minibatch
from tests.params import slow_but


def loss(agent: Fixed, valid: torch.Tensor | None = None, **settings: Any) -> Any:
    return loss_fn(agent, minibatch(valid, action=ROWS["action"]), BC(**settings))  # pyright: ignore


def test_the_loss_by_hand() -> None:
    got = loss(Fixed(), entropy_coef=0.1)
    neglogp = -(math.log(0.5) + math.log(0.2) + math.log(0.2)) / 3
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 3
    assert {name: m.item() for name, m in got.metrics.items()} == {
        "neglogp": pytest.approx(neglogp),
        "entropy_loss": pytest.approx(-entropy),
        "loss": pytest.approx(neglogp - 0.1 * entropy),
    }
    assert got.total.requires_grad


def test_its_gradient_by_hand() -> None:
    agent = Fixed()
    (gradient,) = torch.autograd.grad(loss(agent).total, [agent.logits])
    torch.testing.assert_close(gradient, (P - torch.nn.functional.one_hot(ROWS["action"], 3)) / 3)


def test_a_mask_leaves_rows_out() -> None:
    agent = Fixed()
    got = loss(agent, torch.tensor([True, False, True]))
    (gradient,) = torch.autograd.grad(got.total, [agent.logits])
    assert not gradient[1].any()
    assert got.metrics["neglogp"].item() == pytest.approx(-(math.log(0.5) + math.log(0.2)) / 2)


def test_settings_that_contradict_are_refused() -> None:
    for settings, message in (
        ({"epochs": 0}, "^epochs=0; expected 1 or more$"),
        ({"lr": 0.0}, "^lr=0.0; expected more than 0$"),
    ):
        with pytest.raises(ConfigError, match=message):
            BC(**settings)


def imitated(env: Any, episodes: list[Episode], folder: Path, updates: int, **net: Any) -> tuple[ps.Policy, Any]:
    """The policy after some batches of a dataset of these episodes, and its sampler."""
    with DatasetWriter(folder / "d", env_spec(env())) as writer:
        for episode in episodes:
            writer.append(episode)
    sampler = ps.OfflineSampler(str(folder / "d"), T=16, B=8).build(env, 1)
    policy = BC(lr="linear(2e-2, 0)", minibatch=128, net=ps.Net(hidden=(32,), **net)).build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    for itr in range(updates):
        policy.set_progress(itr / updates)
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    return policy, sampler


def of_one_step(env: Any, seed: int, action: Any) -> Episode:
    """One step of an environment whose episodes have one: the action is a function of the observation."""
    live = env()
    obs, _ = live.reset(seed=seed)
    taken = action(obs)
    after, reward, terminated, truncated, _ = live.step(taken)
    return Episode(np.stack([obs, after]), np.asarray(taken)[None], np.float32([reward]), terminated, truncated)


def test_it_does_what_was_done(tmp_path: Path) -> None:
    """In `Match` the action should meet the observation; the rewards of the data play no part."""
    for name, expert in (("good", lambda obs: np.int64(obs[0] > 0)), ("bad", lambda obs: np.int64(obs[0] < 0))):
        (tmp_path / name).mkdir()
        episodes = [of_one_step(Match, seed, expert) for seed in range(64)]
        _, sampler = imitated(Match, episodes, tmp_path / name, 40)
        assert sampler.evaluate_agent(0, 50).mean_return == {"good": 1.0, "bad": -1.0}[name]


@pytest.mark.parametrize("squash", slow_but("squashed", {"plain": False, "squashed": True}))
def test_it_finds_mean_and_deviation_of_a_continuous_expert(squash: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = BoundedBandit().action_space.shape
    episodes = [
        of_one_step(BoundedBandit, seed, lambda obs: rng.normal(3.0, 0.2, shape).astype(np.float32))
        for seed in range(256)
    ]
    taken = np.concatenate([e.action for e in episodes])
    policy, sampler = imitated(BoundedBandit, episodes, tmp_path, 200, squash=squash, log_std_init=-2.4)
    assert policy.predict(np.zeros(1, np.float32)) == pytest.approx(taken.mean(), abs=0.05)
    inputs = tree_map(torch.from_numpy, sampler.obtain_samples(0)[0].inputs_t).flat()
    with torch.no_grad():
        drawn = policy.agent(inputs).dist.sample(torch.rand(len(inputs.first), policy.agent.noise_size))
    assert float(drawn.std()) == pytest.approx(taken.std(), rel=0.3)
