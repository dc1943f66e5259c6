from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, PenstockError
from penstock.run.files.stored_experiment import read_config
from tests.run.resumed import EXPERIMENTS, Same, at, checkpoints, train


def test_extension_is_kept_in_the_config(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"finished its 320 steps.*run\.steps"):
        ps.resume(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    ps.resume(run, {"run.steps": 400})
    with pytest.raises(ConfigError, match="finished its 400 steps"):
        ps.resume(run)
    assert ps.resume(run, {"run.steps": 450, "run.keep": 1}).env_steps >= 450
    assert len(checkpoints(run)) == 1


def test_an_end_before_the_place_where_a_run_stands_is_refused(tmp_path: Path) -> None:
    with ps.Run(at(EXPERIMENTS["a2c"], tmp_path / "run", steps=320)) as run:
        next(iter(run))
    stands = run.trainer.env_steps
    with pytest.raises(ConfigError, match=rf"stands at {stands} steps, beyond run\.steps={stands - 1}"):
        ps.resume(tmp_path / "run", {"run.steps": stands - 1})
    assert ps.resume(tmp_path / "run").env_steps >= 320


def test_a_moved_run_is_resumed_where_it_is(tmp_path: Path) -> None:
    train(EXPERIMENTS["a2c"], tmp_path / "a", steps=30)
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert ps.resume(tmp_path / "b", {"run.steps": 60}).run_dir == tmp_path / "b"
    assert not (tmp_path / "a").exists()


def test_changes_that_would_make_it_another_experiment(run: Path) -> None:
    for change in ("algo.lr", "sampler.B", "env", "env_kwargs", "run.seed", "run.dir"):
        says = "would make other batches: B is 1, and was" if change == "sampler.B" else f"cannot change {change}"
        with pytest.raises(ConfigError, match=rf"{says}.*--init"):
            ps.resume(run, {change: 1, "run.steps": 640})
    with pytest.raises(ConfigError, match="'steps'"):
        ps.resume(run, {"run.stps": 640})


def test_a_setting_that_may_change_in_a_run_is_told_with_the_lines_that_do_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with ps.Run(at(EXPERIMENTS["a2c"], run, steps=320)) as begun:
        next(iter(begun))
    with pytest.raises(ConfigError, match=r"run\.set changes it while the run goes on") as told:
        ps.resume(run, {"algo.lr": 1e-4})
    lines = str(told.value).splitlines()[1:]
    said: list[ps.Run] = []
    exec("\n".join([*(line[2:] for line in lines), "said.append(run)"]), {"ps": ps, "said": said})
    assert said[0].result.metrics["settings/algo.lr"] == 1e-4
    for change in ({"algo.net.hidden": (3,)}, {"algo.lrr": 1.0}, {"algo.lr": -1.0}):
        with pytest.raises(ConfigError) as told:
            ps.resume(run, change)
        assert "run.set" not in str(told.value)


def test_the_function_of_each_iteration_can_be_dropped_by_resume(tmp_path: Path) -> None:
    exp = EXPERIMENTS["a2c"]
    train(replace(exp, run=replace(exp.run, each="tests.run.test_loop:look")), tmp_path / "a", steps=30)
    assert ps.resume(tmp_path / "a", {"run.steps": 60, "run.each": None}).env_steps >= 60
    assert read_config(tmp_path / "a").to_play().run.each is None


def test_resume_of_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no run directory: .*; expected .* config.json .*runs/, .*runs FOLDER`"):
        ps.resume(tmp_path / "nothing")
    (tmp_path / "config.json").touch()
    with pytest.raises(
        CheckpointError, match=f"config.json .*: it is a file; expected the directory of the run, {tmp_path}$"
    ):
        ps.load(tmp_path / "config.json")
    assert not (tmp_path / "nothing").exists()


def test_warm_start_takes_networks_and_normalisers_only(tmp_path: Path) -> None:
    first = train(EXPERIMENTS["continuous"], tmp_path / "first", steps=128)
    exp = EXPERIMENTS["continuous"]
    trainer = ps.Trainer(at(exp, tmp_path / "x"), init=ps.load(tmp_path / "first").agent.state_dict())
    with trainer:
        for (key, a), b in zip(trainer.policy.agent.state_dict().items(), first.policy.agent.state_dict().values()):
            assert torch.equal(a, b), key
        assert trainer.policy.updates == trainer.policy.version == trainer.env_steps == 0
        assert not any(
            step for optimizer in trainer.policy.optimizers.values() for step in optimizer.state_dict()["steps"]
        )
    second = train(exp, tmp_path / "second", init=tmp_path / "first", steps=128)
    assert second.env_steps >= 128
    assert second.policy.version == first.policy.version
    cold = train(exp, tmp_path / "cold", steps=128)
    assert not torch.equal(second.policy.agent.value_head.weight, cold.policy.agent.value_head.weight)
    again = train(exp, tmp_path / "again", init=tmp_path / "first", steps=128)
    for a, b in zip(second.policy.agent.parameters(), again.policy.agent.parameters()):
        assert torch.equal(a, b)


def test_warm_start_from_other_networks_is_refused(finished: Path, tmp_path: Path) -> None:
    other = ps.override(EXPERIMENTS["a2c"], {"algo.net.hidden": (8,)})
    with pytest.raises(CheckpointError, match="do not fit"):
        train(other, tmp_path / "second", init=finished)
    with pytest.raises(CheckpointError, match="no run directory"):
        train(other, tmp_path / "second", init=tmp_path / "nothing")
    assert not (tmp_path / "second").exists()


def test_lambda_env_has_to_be_given_again(tmp_path: Path, same_run: Same) -> None:
    def make() -> Any:
        return gym.make("CartPole-v1", max_episode_steps=30)

    exp = replace(EXPERIMENTS["a2c"], env=lambda: make())
    train(exp, tmp_path / "run", steps=90)
    with pytest.raises(ConfigError, match=r"lambda.*resume\(run_dir, env="):
        ps.resume(tmp_path / "run", {"run.steps": 180})
    ps.resume(tmp_path / "run", {"run.steps": 180}, env=lambda: make())
    train(exp, tmp_path / "long", steps=180)
    same_run(tmp_path / "long", tmp_path / "run")


def test_lambda_wrappers_are_given_again_in_an_env_config(tmp_path: Path) -> None:
    def make() -> ps.EnvConfig:
        return ps.EnvConfig("CartPole-v1", wrappers=(lambda env: env,))

    for name, exp in (
        ("a", replace(EXPERIMENTS["a2c"], env=make())),
        ("b", replace(EXPERIMENTS["a2c"], wrappers=(lambda env: env,))),
    ):
        train(exp, tmp_path / name, steps=30)
        with pytest.raises(ConfigError, match="again"):
            ps.resume(tmp_path / name, {"run.steps": 60})
        assert ps.resume(tmp_path / name, {"run.steps": 60}, env=make()).env_steps >= 60


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_a_bit_flipped_in_the_settings_is_an_error_of_ours(seed: int, run: Path) -> None:
    rng = random.Random(seed)
    text = (run / "config.json").read_bytes()
    for _ in range(200):
        data = bytearray(text)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        (run / "config.json").write_bytes(data)
        for read in (ps.load, ps.resume):  # resume: the run is finished, so nothing is ever trained
            with contextlib.suppress(PenstockError):
                read(run)


def test_settings_that_are_none(run: Path) -> None:
    for text in ("", "{", "[]", "null", "{}", '{"experiment": {}, "spec": {}}', '{"experiment": 3}', "\xff"):
        (run / "config.json").write_bytes(text.encode("latin-1"))
        for read in (ps.load, ps.resume):
            with pytest.raises((CheckpointError, ConfigError), match=r"config\.json"):
                read(run)


def test_lambda_agent_has_to_be_given_again(tmp_path: Path, same_run: Same) -> None:
    def agent(spec: Any, settings: Any) -> Any:
        return ps.actor_critic(spec, settings)

    exp = ps.override(EXPERIMENTS["a2c"], {"algo.agent": agent})
    train(exp, tmp_path / "run", steps=90)
    with pytest.raises(ConfigError, match="agent="):
        ps.resume(tmp_path / "run", {"run.steps": 180})
    ps.resume(tmp_path / "run", {"run.steps": 180}, agent=agent)
    assert ps.load(tmp_path / "run", agent=agent).predict(np.zeros(4)) in (0, 1)
    train(exp, tmp_path / "long", steps=180)
    same_run(tmp_path / "long", tmp_path / "run")


def test_threads_can_be_changed_on_resume(run: Path) -> None:
    try:
        ps.resume(run, {"run.steps": 400, "run.learner_threads": 2})
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
