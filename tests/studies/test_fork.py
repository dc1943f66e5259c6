from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files.stored_experiment import CONFIG, read_json
from penstock.studies.fork import fork_run
from penstock.studies.tune import locked_study, prepared, search_settings

ALGOS: dict[str, Any] = {
    "ppo": ps.PPO(minibatch=32, epochs=2, net=ps.Net(hidden=(16,), normalize_obs=True), optimizer="rmsprop"),
    "dqn": ps.DQN(
        batch_size=16,
        replay_ratio=4,
        learning_starts=32,
        net=ps.Net(hidden=(16,)),
        replay=ps.ReplaySettings(capacity=500),
    ),
}
CHANGES: dict[str, dict[str, Any]] = {
    "ppo": {"algo.lr": 7e-4, "algo.weight_decay": 0.03, "algo.adam_eps": 1e-3, "algo.entropy_coef": 0.07},
    "dqn": {"algo.lr": 7e-4, "algo.adam_eps": 1e-3, "algo.replay_ratio": 8.0, "algo.discount": 0.9},
}


def experiment(name: str, folder: Path) -> ps.Experiment:
    run = ps.RunConfig(steps=256, seed=1, dir=folder, progress="off", eval_episodes=1, log_interval=1)
    return ps.Experiment("CartPole-v1", ALGOS[name], ps.SerialSampler(T=16, B=4), run)


def fork(source: Path, target: Path, exp: ps.Experiment) -> None:
    fork_run(source, target, exp, read_json(source / CONFIG)["spec"])


@pytest.mark.parametrize("name", ALGOS)
def test_a_fork_without_changes_goes_on_as_the_run_itself(
    name: str, tmp_path: Path, same_run: Callable[[Path, Path], None]
) -> None:
    exp = experiment(name, tmp_path / "a")
    ps.train(exp)
    fork(tmp_path / "a", tmp_path / "b", ps.override(exp, {"run.dir": str(tmp_path / "b")}))
    for folder in ("a", "b"):
        ps.resume(tmp_path / folder, {"run.steps": 512})
    same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", ALGOS)
def test_changed_settings_take_effect_on_the_state_of_the_other(name: str, tmp_path: Path) -> None:
    exp = experiment(name, tmp_path / "a")
    before = ps.train(exp).policy
    fork(tmp_path / "a", tmp_path / "b", ps.override(exp, {**CHANGES[name], "run.dir": str(tmp_path / "b")}))
    assert not list(tmp_path.glob(".*"))
    with ps.Run.resume(tmp_path / "b", {"run.steps": 512}) as run:
        policy = run.policy
        assert all(map(torch.equal, before.agent.state_dict().values(), policy.agent.state_dict().values()))
        assert policy.updates == before.updates > 0
        for optimizer in policy.optimizers.values():
            group = optimizer.param_groups[0]
            assert (group["lr"], group["eps"]) == (7e-4, 1e-3)
            assert group["weight_decay"] == CHANGES[name].get("algo.weight_decay", 0.0)
            assert len(optimizer.param_groups) == (2 if name == "ppo" else 1)
        if policy.replay_schedule is not None and before.replay_schedule is not None:
            assert len(policy.replay_schedule.replay) == len(before.replay_schedule.replay) > 0
        for path, value in CHANGES[name].items():
            assert getattr(policy.settings, path.partition(".")[2]) == value
        begin = run.trainer.env_steps
        for _ in run:
            pass
        if name == "dqn":
            per_step = (policy.updates - before.updates) / (run.trainer.env_steps - begin)
            assert per_step == pytest.approx(8 / 16, rel=0.05)


def test_networks_of_other_shapes_are_refused_by_resume(tmp_path: Path) -> None:
    exp = experiment("ppo", tmp_path / "a")
    ps.train(exp)
    fork(tmp_path / "a", tmp_path / "b", ps.override(exp, {"algo.net.hidden": (8,), "run.dir": str(tmp_path / "b")}))
    with pytest.raises(CheckpointError, match="do not fit"):
        ps.resume(tmp_path / "b", {"run.steps": 512})


def test_nothing_is_overwritten_and_nothing_half_made_stays(tmp_path: Path) -> None:
    exp = experiment("ppo", tmp_path / "a")
    ps.train(exp)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        fork(tmp_path / "a", tmp_path / "b", exp)
    with pytest.raises(CheckpointError, match="cannot copy"):
        fork(tmp_path / "a", tmp_path / "b" / "thesis.tex" / "c", exp)
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        fork(tmp_path / "a", tmp_path / "c", exp)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_parameters_alone_are_a_run_that_trials_start_from(tmp_path: Path) -> None:
    exp = ps.Experiment(
        "CartPole-v1", ps.A2C(net=ps.Net(hidden=(8,))), ps.SerialSampler(T=8, B=2),
        ps.RunConfig(steps=64, dir=str(tmp_path / "a"), progress="off", eval_episodes=0),
    )  # fmt: skip
    source = ps.train(exp).policy.agent.state_dict()
    space = {"algo.lr": [1e-3, 1e-2]}
    found = search_settings(prepared(exp), space, "none", 2, None, "max", "random", None, 3, True, tmp_path / "a")
    with locked_study([prepared(exp)], found, tmp_path / "search") as queue:
        shutil.rmtree(tmp_path / "a")
        run = queue.ask()
        assert run is not None
        command = queue.command(run)
    kept = tmp_path / "search" / "init"
    assert command[command.index("--init") + 1] == str(kept)
    copy = ps.load(kept).agent.state_dict()
    assert copy.keys() == source.keys()
    assert all(torch.equal(x, source[name]) for name, x in copy.items())
    with locked_study([prepared(exp)], found, tmp_path / "search"):  # the run itself is needed no more
        pass
    for other, said in (
        (exp, r"--init .*init does not suit --search algo\.net\.hidden, at \(16,\)"),
        (replace(exp, algo=ps.A2C(net=ps.Net(hidden=(4,)))), r"does not suit these settings \(a preset may have"),
    ):
        wide = {"algo.net.hidden": [(8,), (16,)]} if other is exp else space
        found = search_settings(prepared(other), wide, "none", 2, None, "max", "random", None, 3, True, kept)
        with pytest.raises(ps.CheckpointError, match=said), locked_study([prepared(other)], found, tmp_path / "other"):
            pass
    assert not (tmp_path / "other").exists()
