"""Runs of `ps.Policies`: of one agent as a plain algorithm's, of many agents by the same path."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.result import headline

NET = ps.Net(hidden=(8,))
PPO = ps.PPO(net=NET, epochs=2, minibatch=16)
DQN = ps.DQN(net=NET, batch_size=8, replay_ratio=8.0, learning_starts=40, replay=ps.ReplaySettings(capacity=600))
SAMPLER, WORKERS = ps.SerialSampler(T=8, B=4), ps.CpuSampler(T=5, B=4, workers=2)
Same = Callable[[Path, Path], None]


def run_config(run: Path, steps: int = 128, **changes: object) -> ps.RunConfig:
    given: dict[str, object] = {"eval_episodes": 3, "checkpoint_interval": 64, "log_interval": 1} | changes
    return ps.RunConfig(steps=steps, dir=run, progress="off", **given)  # pyright: ignore


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


BITS, NIM = "penstock.envs.toy:TeamBits", "penstock.envs.toy:Nim"
ONE_EACH = {"agent_0": "a", "agent_1": "b"}


def swapped(agent: str, episode: int, seed: int) -> str:
    return "ab"[(int(agent[-1]) + episode) % 2]


def called(agent: str, episode: int, seed: int, by: Any) -> str:
    return by(agent, episode, seed)


def two(mapping: object = None, **changes: object) -> ps.Policies:
    given: dict[str, object] = {"seats": {"a": 1, "b": 1}} | changes
    return ps.Policies({"a": PPO, "b": DQN}, mapping or swapped, **given)  # pyright: ignore


def test_a_plain_algorithm_plays_all_agents_by_one_policy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = ps.train(ps.Experiment(BITS, PPO, SAMPLER, run_config(run)))
    assert result.env_steps == 32 + 4 * 28  # of 9 rows in each environment one is a reset
    assert {"train/value_loss", "rollout/agent/agent_1/ep_rew_mean"} <= result.metrics.keys()
    assert not [name for name in result.metrics if "shared" in name]
    stored = json.loads((run / "config.json").read_text())
    assert stored["experiment"]["algo"]["class"] == "penstock.algos.ppo:PPO"
    assert stored["spec"]["policies"]["shared"]["agents"] == 2
    found = ps.load(run)
    assert isinstance(found, ps.PolicySet) and list(found) == ["shared"]
    played = ps.evaluate(run, episodes=5)
    assert len(played) == 5 and played.length.tolist() == [8] * 5
    again = ps.evaluate(found, BITS, 5, seed=0)
    assert ps.evaluate(found["shared"], BITS, 5, seed=0).return_.tolist() == again.return_.tolist()
    assert ps.resume(run, {"run.steps": 160}).env_steps >= 160


@pytest.mark.parametrize(
    ("env", "sampler"),
    [
        pytest.param(BITS, WORKERS, id="cpu-at once", marks=pytest.mark.slow),
        pytest.param(NIM, SAMPLER, id="serial-turns"),
        pytest.param(BITS, SAMPLER, id="serial-at once", marks=pytest.mark.slow),
        pytest.param(NIM, WORKERS, id="cpu-turns", marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("forked")
def test_a_run_of_two_policies_goes_on_in_the_bits_of_one_that_never_stopped(
    env: str, sampler: ps.SerialSampler, same_run: Same, tmp_path: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    mapping = ONE_EACH if env == NIM else swapped
    result = ps.train(ps.Experiment(env, two(mapping), sampler, run_config(whole, 120, checkpoint_interval=30)))
    ps.train(ps.Experiment(env, two(mapping), sampler, run_config(cut, 60, checkpoint_interval=30, eval_episodes=0)))
    ps.resume(cut, {"run.steps": 120, "run.eval_episodes": 3})
    same_run(whole, cut)
    assert {"train/a/value_loss", "train/b/loss", "rollout/b/ep_rew_mean", "eval/a/mean_reward"} <= set(result.metrics)
    files = sorted(x.name for x in find_checkpoint(whole).iterdir())
    assert any(name.startswith("replay-") for name in files)
    assert {name.partition("/")[0] for name in load_file(find_checkpoint(whole) / "policy.safetensors")} == {"a", "b"}


@pytest.mark.parametrize(
    "unnamed", [lambda *asked: swapped(*asked), partial(called, by=lambda *asked: swapped(*asked))]
)
def test_a_mapping_that_cannot_be_stored_is_asked_for_again(unnamed: Any, same_run: Same, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ps.train(ps.Experiment(BITS, two(swapped), SAMPLER, run_config(whole, 128, eval_episodes=0)))
    ps.train(ps.Experiment(BITS, two(unnamed), SAMPLER, run_config(cut, 64, eval_episodes=0)))
    with pytest.raises(ConfigError, match=r"policy_mapping_fn=\.\.\."):
        ps.resume(cut, {"run.steps": 128})
    found = ps.load(cut)
    assert list(found) == [name for name, _ in found.items()] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"ps\.load\(run, policy_mapping_fn=\.\.\.\)"):
        found.predict([1.0], agent="agent_0")
    again = ps.load(cut, policy_mapping_fn=unnamed)
    assert again.predict([1.0], agent="agent_0") == found["a"].predict([1.0])
    assert again.predict([1.0], agent="agent_1") == found["b"].predict([1.0])
    with pytest.raises(ConfigError, match="name the agent, predict"):
        again.predict([1.0])
    with pytest.raises(ConfigError, match="without a policy_mapping_fn"):
        ps.evaluate(cut, episodes=2)
    assert len(ps.evaluate(ps.load(cut, policy_mapping_fn=unnamed), BITS, 2)) == 2
    ps.resume(cut, {"run.steps": 128}, policy_mapping_fn=unnamed)
    same_run(whole, cut)


def test_a_run_ends_by_a_metric_of_one_policy_and_starts_from_anothers_networks(tmp_path: Path) -> None:
    first = tmp_path / "first"
    algo = two(ONE_EACH, policies_to_train=("b",))
    stop = {"eval/b/mean_reward": -1.0}
    config = run_config(first, 100_000, stop=stop, eval_interval=32)
    result = ps.train(ps.Experiment(BITS, algo, SAMPLER, config))
    assert result.stopped_by == "stop rule" and result.env_steps < 200
    assert not [name for name in result.metrics if name.startswith("train/a/")]
    second = ps.train(
        ps.Experiment(BITS, algo, SAMPLER, run_config(tmp_path / "second", 32, eval_episodes=0)), init=first
    )
    before, after = ps.load(first)["a"], second.policy["a"]
    state = after.agent.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in before.agent.state_dict().items())
    wrong = ps.Experiment(BITS, two(ONE_EACH), SAMPLER, run_config(tmp_path / "w", stop={"rollout/c/ep_rew_mean": 1.0}))
    with pytest.raises(ConfigError, match="rollout/c/ep_rew_mean"):
        ps.train(wrong)


def test_a_sampler_that_one_of_the_policies_cannot_learn_from_is_refused(tmp_path: Path) -> None:
    exp = ps.Experiment(BITS, two(ONE_EACH), ps.RunnerSampler(2, ps.SerialSampler(T=4, B=1), mode="ready"))
    with pytest.raises(ConfigError, match=r"policy .a.: sampler\.mode=.ready."):
        ps.train(replace(exp, run=run_config(tmp_path / "run")))


@pytest.mark.parametrize(
    ("env", "algo", "end"),
    [
        (BITS, ps.QMIX(net=NET, batch_size=8, replay_ratio=4.0, learning_starts=100, replay=DQN.replay),
         "; one update of 8 teams of 2 rows every 4 rows after the first 100 (replay ratio 4)"),
        (BITS, replace(DQN, learning_starts=128),
         "; one update of 8 every row after the first 128 (replay ratio 8), which is never in the 64 steps of this run"),
        (NIM, replace(DQN, learning_starts=64),
         "; one update of 8 every row after the first 64 (replay ratio 8), which is never in the 64 moves of this run"),
    ],
)  # fmt: skip
def test_the_first_lines_count_the_rows_of_a_policy(env: str, algo: ps.DQN, end: str) -> None:
    with ps.Trainer(ps.Experiment(env, algo, SAMPLER, ps.RunConfig(steps=64))) as trainer:
        (line,) = (x for x in headline(trainer).splitlines() if "policy shared, 2 agents" in x)
    assert line.endswith(end)
