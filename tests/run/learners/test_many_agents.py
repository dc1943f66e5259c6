"""Several learners of several policies: whole environments a rank, and the parameters of one learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps

NET = ps.Net(hidden=(16,), normalize_obs=True)
ALGO = ps.Policies(
    {
        "a": ps.PPO(net=NET, epochs=2, minibatch=16),
        "b": ps.DQN(
            net=NET, learning_starts=20, batch_size=16, replay_ratio=4, replay=ps.ReplaySettings(capacity=1_000)
        ),
    },
    {"agent_0": "a", "agent_1": "b"},
)


def config(folder: Path, learners: int, steps: int) -> ps.RunConfig:
    return ps.RunConfig(steps=steps, dir=folder, learners=learners, eval_episodes=4, log_interval=1, progress="off")


@pytest.mark.parametrize("begun", ["forked", pytest.param("as users' are", marks=pytest.mark.slow)])
def test_two_learners_of_two_policies_are_one_and_go_on_as_one(
    begun: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if begun == "forked":
        request.getfixturevalue("forked")
    found = {}
    for learners in (1, 2):
        exp = ps.Experiment("penstock.envs.toy:Nim", ALGO, ps.SerialSampler(T=8, B=5))
        found[learners] = ps.train(ps.override(exp, {"run": config(tmp_path / str(learners), learners, 200)}))
    one, two = found[1], found[2]
    assert one.env_steps == two.env_steps
    assert np.array_equal(np.sort(one.episodes.return_), np.sort(two.episodes.return_))
    for name in ("train/a/value_loss", "train/b/loss", "rollout/a/ep_rew_mean", "eval/mean_reward"):
        assert abs(one.metrics[name] - two.metrics[name]) < 1e-4, name
    _same(ps.load(tmp_path / "1"), ps.load(tmp_path / "2"))
    ps.resume(tmp_path / "2", {"run.learners": 1, "run.steps": 300})
    ps.resume(tmp_path / "1", {"run.steps": 300})
    _same(ps.load(tmp_path / "1"), ps.load(tmp_path / "2"))


@pytest.mark.usefixtures("forked")
def test_self_play_counts_the_matches_of_all_learners(tmp_path: Path) -> None:
    found = {}
    for learners in (1, 2):
        algo = ps.SelfPlay(ps.PPO(net=ps.Net(hidden=(8,)), epochs=1, minibatch=32), interval=1)
        exp = ps.Experiment("penstock.envs.toy:Nim", algo, ps.SerialSampler(T=8, B=5))
        run = config(tmp_path / str(learners), learners, 100)
        found[learners] = ps.train(ps.override(exp, {"run": run, "run.eval_episodes": 0})).metrics
    played = {name: x for name, x in found[1].items() if name.startswith("self_play/")}
    assert played["self_play/games"] > 0
    assert played == {name: found[2][name] for name in played}


def _same(one: object, other: object) -> None:
    assert isinstance(one, ps.PolicySet) and isinstance(other, ps.PolicySet)
    theirs = other.parameters()
    for name, x in one.parameters().items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-4, atol=1e-5)
