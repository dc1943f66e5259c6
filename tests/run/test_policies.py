"""Runs of `ps.Policies`: of one agent as a plain algorithm's, of many agents by the same path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint

NET = ps.Net(hidden=(8,))
PPO = ps.PPO(net=NET, epochs=2, minibatch=16)
DQN = ps.DQN(net=NET, batch_size=8, replay_ratio=8.0, learning_starts=40, replay=ps.ReplaySettings(capacity=600))
SAMPLER = ps.SerialSampler(T=8, B=4)
Same = Callable[[Path, Path], None]


def run_config(run: Path, steps: int = 128, **changes: object) -> ps.RunConfig:
    given: dict[str, object] = {"eval_episodes": 3, "checkpoint_interval": 64, "log_interval": 1} | changes
    return ps.RunConfig(steps=steps, dir=run, progress="off", tensorboard=False, **given)  # pyright: ignore


@pytest.mark.parametrize("algo", [PPO, DQN], ids=["ppo", "dqn"])
def test_one_policy_in_an_environment_of_one_agent_is_the_plain_algorithm(
    algo: ps.PPO, same_run: Same, tmp_path: Path
) -> None:
    plain, many = tmp_path / "plain", tmp_path / "many"
    ps.train(ps.Experiment("CartPole-v1", algo, SAMPLER, run_config(plain)))
    result = ps.train(ps.Experiment("CartPole-v1", ps.Policies({"a": algo}), SAMPLER, run_config(many)))
    same_run(plain, many)
    files = [find_checkpoint(run) for run in (plain, many)]
    assert sorted(x.name for x in files[0].iterdir()) == sorted(x.name for x in files[1].iterdir())
    for file in (x for x in files[0].iterdir() if x.suffix in (".safetensors", ".npy")):
        assert file.read_bytes() == (files[1] / file.name).read_bytes(), file.name
    found = ps.load(many)
    assert isinstance(found, ps.PolicySet) and list(found) == ["a"]
    assert isinstance(result.policy, ps.PolicySet)
    played = [ps.evaluate(x, "CartPole-v1", 3).return_.tolist() for x in (ps.load(plain), found, result.policy)]
    assert played[0] == played[1] == played[2]
    ps.resume(many, {"run.steps": 192})
    ps.resume(plain, {"run.steps": 192})
    same_run(plain, many)


def test_several_policies_with_one_agent_are_refused(tmp_path: Path) -> None:
    algo = ps.Policies({"a": PPO, "b": PPO}, {"x": "a", "y": "b"})
    with pytest.raises(ConfigError, match="an environment of one agent"):
        ps.train(ps.Experiment("CartPole-v1", algo, SAMPLER, run_config(tmp_path / "run")))
