from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gymnasium.wrappers import TransformReward

import penstock as ps
from penstock.envs.toy import ThreeStep
from penstock.envs.toy.memory import HideVelocity
from penstock.run.presets import preset_of_file, with_preset
from penstock.studies.report import algo_word, confirmed, has_word, number, write_preset
from penstock.studies.toml import toml_table

bind: Any = partial


def experiment(algo: Any, sampler: Any = None, **changes: Any) -> ps.Experiment:
    exp = ps.Experiment("CartPole-v1", algo, sampler, ps.RunConfig(steps=5000))
    return replace(exp, sampler=exp.sampler_settings, **changes)


EXPERIMENTS = {
    "defaults": experiment(ps.PPO()),
    "nested": experiment(ps.PPO(lr="linear(1e-3, 0)", net=ps.Net(hidden=(32, 8), normalize_obs=True), max_grad_norm=0.5)),
    "infinite": experiment(ps.PPO(max_grad_norm=math.inf)),
    "none": experiment(ps.PPO(weight_decay=0.1), ps.SerialSampler(T=8, B=4, discount=None)),
    "replay": experiment(ps.DQN(replay=ps.ReplaySettings(capacity=500, index="prioritized")), ps.SerialSampler(T=2, B=3)),
    "cpu": experiment(ps.A2C(), ps.CpuSampler(T=8, B=4, workers=2, reset="batch_end")),
    "async": experiment(ps.IMPALA(), ps.AsyncSerialSampler(ps.SerialSampler(T=8, B=4), depth=1)),
    "async of another": experiment(ps.PPO(), ps.AsyncSampler(ps.CpuSampler(T=8, B=4, workers=2), depth=1)),
    "runners": experiment(ps.PPO(), ps.RunnerSampler(2, ps.SerialSampler(T=8, B=4))),
    "environment": experiment(ps.PPO(), env_kwargs={"size": 3, "goal": "a \"b\""}, env_checks="finite", env_drop=("x",)),
    "registered": experiment(ps.PPO(), imports=("ale_py",), env_mask="action_mask", env_text=16, info_keys=("a",)),
    "wrapped": experiment(ps.PPO(), wrappers=("gymnasium.wrappers:FlattenObservation",)),
    "wrapped with arguments": experiment(
        ps.PPO(), wrappers=("FrameStackObservation(2)", bind(TransformReward, func="x"), "WeightedReward((1, 0.1))")
    ),
    "evaluated elsewhere": experiment(ps.PPO(), eval_env="CartPole-v0", eval_env_kwargs={"size": 3}),
    "held out": experiment(ps.PPO(), eval_env_kwargs={"levels": "held-out"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_preset_trains_the_same_experiment(name: str, tmp_path: Path) -> None:
    exp = EXPERIMENTS[name]
    path = write_preset(tmp_path, exp, "Found by a test.")
    found = preset_of_file(path, algo_word(exp), "CartPole-v1")
    assert found is not None
    assert found.why == "Found by a test."
    again = with_preset(algo_word(exp), "CartPole-v1", found)
    assert again.algo == exp.algo
    assert again.sampler == exp.sampler
    assert again == exp


def test_an_experiment_with_a_partial_in_it_has_no_word(tmp_path: Path) -> None:
    """TOML has no form for one; its config.json has."""
    assert all(map(has_word, EXPERIMENTS.values()))
    for exp in (
        experiment(ps.PPO(agent=bind(ps.actor_critic, settings=None))),
        experiment(ps.PPO(), env=bind(ThreeStep, 3)),
        experiment(ps.PPO(), wrappers=(partial(TransformReward, func=math.sin),)),
        experiment(ps.PPO(), eval_env=bind(ThreeStep, 3)),
    ):
        assert not has_word(exp)


def test_an_env_config_is_written_as_the_settings_of_an_experiment(tmp_path: Path) -> None:
    def noisy(env: Any) -> Any:
        return env

    config = ps.EnvConfig(
        ThreeStep, {"size": 3, "reward": math.sin, "goal": None}, (HideVelocity, noisy), text=8, mask_key="action_mask"
    )
    path = write_preset(tmp_path, replace(experiment(ps.PPO()), env=config), "Found.", init="runs/a")
    said = path.read_text().splitlines()
    name = "penstock.envs.toy.probes:ThreeStep"
    assert said[0] == f"# penstock train ppo --env {name} --preset-file {path} --init runs/a"
    assert [line.partition(" = ")[0].rpartition(" ")[2] for line in said[1:4]] == [
        "env_kwargs.reward", "env_kwargs.goal", "wrappers[1]",
    ]  # fmt: skip
    found = preset_of_file(path, "ppo", name)
    again = with_preset("ppo", name, found).env_config
    wrapper = "penstock.envs.toy.memory:HideVelocity"
    assert again == ps.EnvConfig(name, {"size": 3}, (wrapper,), text=8, mask_key="action_mask")


def test_toml_is_read_as_it_was_written() -> None:
    entries: dict[str, Any] = {
        "a": 1e-05, "b": -3, "c": True, "d": 'say "x"\n\\ \x7f é', "e": [[1, 2], ["x"]], "f": {"g h": 1.5, "i": {}},
        "j": math.inf, "k": 1e300, "l": {"m": {"n": False}},
    }  # fmt: skip
    assert tomllib.loads("\n".join(toml_table("ALE/Pong-v5 [x]", entries))) == {"ALE/Pong-v5 [x]": entries}
    assert tomllib.loads("\n".join(toml_table("t", {"a": None}))) == {"t": {"a": "none"}}


def test_numbers_for_people() -> None:
    assert [number(x) for x in (None, math.nan, 0.00012346, 12.34567, 1234.56, -5.0)] == [
        "-", "-", "0.0001235", "12.35", "1,234.6", "-5",
    ]  # fmt: skip


def test_a_study_in_words() -> None:
    assert confirmed([3.0, None]) == "confirmed by 1 seed: 3"
    said = confirmed([1.0, 2.0, 3.0, 4.0, None])
    assert said.startswith("confirmed by 4 of 5 seeds: 2.5 (95% ")
    assert said.endswith("; from 1 to 4)")
    assert confirmed([None]) == "confirmed by 0 seeds: -"
