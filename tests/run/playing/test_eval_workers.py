"""Evaluations beside training: the same episodes and numbers, at iterations that no speed decides."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import safetensors.torch
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, EnvWorkerError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.wire import encode
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import CallRecord
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint
from penstock.run.checkpoints.manifest import read_manifest
from penstock.run.files.sizes import check_batch, check_processes
from penstock.run.playing.eval_workers import EvaluationRequest
from tests.run.conftest import rows
from tests.samplers.levels import Levels
from tests.slow import slow

pytestmark = pytest.mark.timeout(180)
Same = Callable[[Path, Path], None]
NET = ps.Net(hidden=(8,))
PPO = ps.PPO(lr=1e-2, epochs=2, minibatch=32, net=NET)
SERIAL = ps.SerialSampler(T=16, B=4)
EVALUATIONS = "eval/evaluations.jsonl"
POLE, BITS = "CartPole-v1", "penstock.envs.toy:TeamBits"
DQN = ps.DQN(learning_starts=40, replay_ratio=8, batch_size=16, net=NET, epsilon=0.5, eps_eval=0.3)
LSTM = ps.PPO(lr=1e-2, epochs=1, minibatch=16, net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8))
CASES: dict[str, tuple[Any, Any, Any]] = {
    "serial": (POLE, PPO, SERIAL),
    "cpu": (POLE, PPO, ps.CpuSampler(T=16, B=4, workers=2)),
    "gpu": (POLE, PPO, ps.GpuSampler(T=16, B=4, workers=2)),
    "async": (POLE, PPO, ps.AsyncSerialSampler(SERIAL, depth=1)),
    "runners": (POLE, PPO, ps.RunnerSampler(2, ps.SerialSampler(T=16, B=2), backend="processes")),
    "noisy": (POLE, DQN, SERIAL),
    "lstm": (POLE, LSTM, SERIAL),
    "agents": (BITS, DQN, SERIAL),
    "policies": (BITS, ps.Policies({"a": PPO, "b": DQN}, {"agent_0": "a", "agent_1": "b"}), SERIAL),
    "normalised": (POLE, ps.PPO(epochs=1, minibatch=32, net=ps.Net(hidden=(8,), normalize_obs=True)), SERIAL),
}


def experiment(case: str, folder: Path, workers: int, **given: Any) -> ps.Experiment:
    env, algo, sampler = CASES[case]
    config: dict[str, Any] = {"steps": 640, "eval_interval": 128, "eval_episodes": 5, "eval_slots": 3, **given}
    config = {"checkpoint_interval": 192, "log_interval": 0, "progress": "off", **config}
    more = {name: config.pop(name) for name in ("eval_env", "eval_env_kwargs") if name in config}
    run = ps.RunConfig(seed=3, dir=str(folder), eval_workers=workers, **config)
    return ps.Experiment(config.pop("env", env), algo, sampler, run, **more)


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics without those that depend on who collects."""
    kinds = ("step", "train", "rollout", "replay", "eval")
    return [{k: v for k, v in row.items() if k.split("/")[0] in kinds} for row in rows(folder)]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run without where they were taken into account."""
    return [{k: v for k, v in row.items() if k != "eval/taken_at"} for row in rows(folder, EVALUATIONS)]


def test_the_process_plays_the_episodes_that_the_sampler_would(tmp_path: Path) -> None:
    check_the_same_evaluations("serial", 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_sampler_and_policy_is_evaluated_the_same_beside_training(
    case: str, workers: int, tmp_path: Path
) -> None:
    check_the_same_evaluations(case, workers, tmp_path)


def check_the_same_evaluations(case: str, workers: int, tmp_path: Path) -> None:
    without, beside = tmp_path / "without", tmp_path / "beside"
    results = [ps.train(experiment(case, folder, n)) for folder, n in ((without, 0), (beside, workers))]
    assert evaluations(without) == evaluations(beside)
    assert len({json.dumps(x["returns"]) for x in evaluations(beside)}) > 1
    *earlier, last = rows(beside, EVALUATIONS)
    due = [row["step"] for row in rows(beside, EVALUATIONS)]
    assert [row["eval/taken_at"] for row in earlier] == due[1:]
    assert "eval/taken_at" not in last
    names = {"eval/taken_at"} | {name for name in rows(without)[-1] if name.startswith("eval/")}
    plain, split = (numbers(x) for x in (without, beside))
    found: dict[int, dict[str, Any]] = {}
    for row in split:
        found.setdefault(row["step"], {}).update(row)
    assert [{k: v for k, v in row.items() if k != "eval/taken_at"} for _, row in sorted(found.items())] == plain
    assert all({*row} <= {"step", *names} for row in split if "eval/taken_at" in row)
    one, other = (result.metrics for result in results)
    assert {k: v for k, v in one.items() if k.startswith("eval/")} == {
        k: v for k, v in other.items() if k.startswith("eval/")
    }
    for which in ("last", "best"):
        policies = [load_checkpoint(find_checkpoint(folder, which)) for folder in (without, beside)]
        assert policies[0].step == policies[1].step
        for name, x in policies[0].policy.items():
            torch.testing.assert_close(x, policies[1].policy[name], rtol=0, atol=0)


class Troubled(gym.Wrapper[Any, Any, Any, Any]):
    """An environment whose steps take `pause` seconds, and hang once, or raise, when there is a file of that name."""

    def __init__(self, env: Any, pause: float = 0.0, hang: str = "", error: str = "") -> None:
        super().__init__(env)
        self._pause, self._hang, self._error = pause, hang, error

    def step(self, action: Any) -> Any:
        time.sleep(self._pause)
        if self._hang and Path(self._hang).exists():
            Path(self._hang).unlink()
            time.sleep(600)
        if self._error and Path(self._error).exists():
            raise ValueError("no fuel")
        return self.env.step(action)


def troubled(**how: Any) -> Any:
    return Troubled(gym.make(POLE), **how)


def test_the_best_policy_is_kept_by_the_evaluation_of_its_own_step(tmp_path: Path) -> None:
    folder, given = tmp_path / "run", dict[int, dict[str, torch.Tensor]]()
    with ps.Run(experiment("serial", folder, 1, keep=1, checkpoint_interval=64 * 3, steps=1280)) as run:
        for it in run:
            given[it.env_steps] = {k: x.clone() for k, x in it.policy.agent.state_dict().items()}
            if it.itr >= 6:
                taken = [row for row in rows(folder, EVALUATIONS) if "eval/taken_at" in row]
                scores = {row["step"]: row["eval/mean_reward"] for row in taken}
                best = find_checkpoint(folder, "best")
                step = max(scores, key=lambda x: (scores[x], -x))
                assert int(best.name) == step
                assert read_manifest(best).score == scores[step]
                for name, x in load_checkpoint(best).policy.items():
                    assert torch.equal(x, given[step][name])
                resumable = load_checkpoint(find_checkpoint(folder, replay=True), replay=True)
                assert resumable.state["trainer"]["env_steps"] == resumable.step
    assert len({row["eval/mean_reward"] for row in rows(folder, EVALUATIONS)}) > 2
    assert read_manifest(find_checkpoint(folder, "best")).score == run.trainer.evaluations.best_score


def test_a_run_cannot_be_resumed_from_a_policy_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with ps.Run(experiment("serial", folder, 1, checkpoint_interval=0)) as run:
        for it in run:
            if it.itr == 5:  # the evaluation after the second was taken in the fourth
                alone = find_checkpoint(folder)
                assert read_manifest(alone).policy_only
                with pytest.raises(CheckpointError, match="no good checkpoint"):
                    find_checkpoint(folder, replay=True)
                assert ps.load(folder, "best").predict(torch.zeros(4).numpy()) in (0, 1)
                run.stop()
    assert find_checkpoint(folder, replay=True) == find_checkpoint(folder)


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0.0, 0.02])
def test_speed_does_not_decide_where_a_stop_rule_ends_the_run(pause: float, tmp_path: Path) -> None:
    for name, eval_pause in (("fast", 0.0), ("slow", pause or 0.003)):
        env = EnvConfig(troubled, kwargs={"pause": eval_pause})
        exp = experiment("serial", tmp_path / name, 1, eval_env=env, stop={"eval/mean_reward": 9.0}, steps=6_400)
        result = ps.train(exp)
        assert result.stopped_by == "stop rule"
    fast, late = (rows(tmp_path / name, EVALUATIONS) for name in ("fast", "slow"))
    assert fast == late
    *_, reached, last = fast
    assert reached["eval/mean_reward"] >= 9.0
    assert reached["eval/taken_at"] == last["step"]


@pytest.mark.parametrize("stop", [3, *slow(1, 2, 4, 5, 7, 9)])
def test_a_resumed_run_plays_the_evaluation_that_was_under_way(stop: int, same_run: Same, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    env = EnvConfig(troubled, kwargs={"pause": 0.002})
    ps.train(experiment("serial", whole, 1, eval_env=env))
    with ps.Run(experiment("serial", cut, 1, eval_env=env)) as run:
        for it in run:
            if it.itr == stop:
                break
    state = load_checkpoint(find_checkpoint(cut)).state["trainer"]
    assert (state["evaluation"] is not None) == (stop >= 3)
    ps.resume(cut)
    same_run(whole, cut)


def test_a_row_that_was_written_after_the_checkpoint_is_cut_though_its_step_is_earlier(
    same_run: Same, tmp_path: Path
) -> None:
    whole, killed, at_once = tmp_path / "whole", tmp_path / "killed", tmp_path / "at-once"
    ps.train(experiment("serial", whole, 1, checkpoint_interval=0))
    with ps.Run(experiment("serial", killed, 1, checkpoint_interval=0)) as run:
        for it in run:
            if it.itr == 3:
                run.save()
            if it.itr == 6:  # as a kill would leave it: the evaluation of iteration 3 was taken in 5
                shutil.copytree(killed, at_once)
                break
    assert rows(at_once, EVALUATIONS)[-1]["step"] <= int(find_checkpoint(at_once, replay=True).name)
    ps.resume(at_once, trust=True)
    same_run(whole, at_once)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_resumed_with_other_workers_is_the_same(workers: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ps.train(experiment("serial", whole, 1))
    with ps.Run(experiment("serial", cut, 1)) as run:
        for it in run:
            if it.itr == 5:
                break
    ps.resume(cut, {"run.eval_workers": workers})
    assert sorted(evaluations(cut), key=lambda row: row["step"]) == evaluations(whole)


def children() -> set[int]:
    return {int(x) for x in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def evaluating_process(folder: Path) -> tuple[ps.Experiment, set[int]]:
    env = EnvConfig(troubled, kwargs={"pause": 0.002})
    return experiment("serial", folder, 1, eval_env=env, eval_max_steps=20), children()


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGSTOP)])
@pytest.mark.filterwarnings("ignore:.*replaced")
def test_a_process_that_dies_or_stands_still_is_replaced_and_plays_again(
    number: signal.Signals, same_run: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    ps.train(evaluating_process(whole)[0])
    exp, before = evaluating_process(hurt)
    killed: list[int] = []
    with ps.Run(exp) as run:
        beside: Any = run.trainer.evaluations.beside
        monkeypatch.setattr(beside, "_limits_s", (60.0, 1.0))
        for it in run:
            if it.itr == 4:
                monkeypatch.setattr(beside, "_limit_s", 1.0)
                killed = [pid for pid in children() - before if b"evaluation process" in cmdline(pid)]
                for pid in killed:
                    os.kill(pid, number)
    assert len(killed) == 1
    assert evaluations(hurt) == evaluations(whole)
    faults = "faults/eval_signal" if number == signal.SIGKILL else "faults/eval_timeout"
    assert rows(hurt)[-1][faults] == 1


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*replaced")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_environment_that_hangs_in_an_evaluation_is_found(workers: int, tmp_path: Path) -> None:
    hang = tmp_path / "hang"
    sampler = ps.CpuSampler(T=16, B=4, workers=2, step_timeout_s=3.0)
    exp = experiment("serial", tmp_path / "run", workers, eval_env=EnvConfig(troubled, kwargs={"hang": str(hang)}))
    exp = replace(exp, sampler=sampler)
    with warnings.catch_warnings(record=True) as caught, ps.Run(exp) as run:
        warnings.simplefilter("always")
        beside: Any = run.trainer.evaluations.beside
        beside._limit_s, beside._limits_s = 3.0, (20.0, 3.0)  # a busy machine may have it start twice
        hang.touch()
        for _ in run:
            pass
    assert not hang.exists()
    assert any("replaced" in str(x.message) for x in caught)
    without = experiment("serial", tmp_path / "without", 0)
    ps.train(without)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "without")


@pytest.mark.parametrize("workers", [1, *slow(2)])
def test_an_error_of_the_environment_ends_the_run_and_names_the_evaluation(workers: int, tmp_path: Path) -> None:
    error = tmp_path / "error"
    env = EnvConfig(troubled, kwargs={"error": str(error)})
    with ps.Run(experiment("serial", tmp_path / "run", workers, eval_env=env)) as run:
        error.touch()
        with pytest.raises(EnvWorkerError, match=r"(?s)evaluation of step \d+, run.eval_workers: .*no fuel"):
            for _ in run:
                pass


@pytest.mark.slow
def test_a_signal_does_not_wait_for_the_evaluation_and_a_resumed_run_has_it(same_run: Same, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    env = EnvConfig(troubled, kwargs={"pause": 0.005})
    given = {"eval_env": env, "eval_max_steps": 20, "steps": 320}
    ps.train(experiment("serial", whole, 1, **given))
    begun = time.monotonic()
    with pytest.raises(SystemExit), ps.Run(experiment("serial", cut, 1, **given)) as run:
        for it in run:
            if it.itr == 3:  # the next iteration waits for the evaluation of the second
                begun = time.monotonic()
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert time.monotonic() - begun < 3.0
    ps.resume(cut)
    same_run(whole, cut)


def test_calls_reach_the_environments_that_are_evaluated_next(tmp_path: Path) -> None:
    found: dict[int, list[Any]] = {}
    for workers in (0, 1):
        run_config = ps.RunConfig(
            steps=320, seed=3, dir=str(tmp_path / str(workers)), eval_interval=64, eval_episodes=3,
            eval_workers=workers, progress="off", log_interval=0,
        )  # fmt: skip
        exp = ps.Experiment(EnvConfig(Levels), ps.PPO(net=NET, minibatch=16, epochs=1), SERIAL, run_config)
        with ps.Run(exp) as run:
            for it in run:
                if it.itr in (2, 4):
                    it.run.envs.call("set_level", it.itr, evaluation=True)
        found[workers] = evaluations(tmp_path / str(workers))
    assert found[0] == found[1]
    assert [sum(x["returns"]) > 0 for x in found[1]] == [x["step"] > 126 for x in found[1]]


def test_the_iteration_shows_the_evaluation_that_counts_in_it(tmp_path: Path) -> None:
    seen: list[tuple[int, float, float, int]] = []
    with ps.Run(experiment("serial", tmp_path / "run", 1)) as run:
        for it in run:
            if it.evaluation is not None:
                mean, step = it.metrics["eval/mean_reward"], it.metrics.get("eval/step", it.env_steps)
                seen.append((it.env_steps, mean, step, len(it.evaluation)))
    logged = rows(tmp_path / "run", EVALUATIONS)
    assert seen[-2][0] == seen[-1][0] or len(seen) == len(logged) - 1  # the last two count in one iteration
    shown = [logged[i] for i in (*range(len(seen) - 1), -1)]
    assert [x[1:3] for x in seen] == [(row["eval/mean_reward"], row["step"]) for row in shown]
    assert {x[3] for x in seen} == {5}
    assert not any("eval/step" in row for row in rows(tmp_path / "run"))


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"eval_workers": 1}, "run.eval_workers=1 with eval_interval=0"),
        ({"eval_workers": -1, "eval_interval": 5}, "eval_workers=-1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(run: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ps.RunConfig(**run)


def test_a_batch_of_environments_has_one_worker(tmp_path: Path) -> None:
    run = ps.RunConfig(steps=64, dir=str(tmp_path / "run"), eval_interval=32, eval_workers=2, progress="off")
    exp = ps.Experiment("gymnasium:make_vec", ps.PPO(net=NET), SERIAL, run, env_kwargs={"id": POLE, "num_envs": 4})
    with pytest.raises(ConfigError, match=r"run.eval_workers=2.*use run.eval_workers=1"):
        ps.train(exp)


def asked(policy: Any) -> dict[str, Any]:
    given = {"itr": 3, "env_steps": 184, "episodes": 5, "slots": 3, "max_steps": 20}
    call = CallRecord("call", "reset_goal", encode(((1,), {})), False, 0, -1, False)
    return EvaluationRequest.of(policy, [call], extra={"eval/exploitability": 0.5}, **given).to_plain()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": b"abc"}, "deserializing"),
        ({"weights": safetensors.torch.save({"head": torch.zeros(2)})}, "networks of another policy"),
        ({"episodes": 5.5}, "episodes=5.5"),
        ({"episodes": 1 << 41}, "episodes=2,199,023,255,552; expected <="),
        ({"max_steps": 10**30}, "max_steps="),
        ({"itr": 4}, "itr=4; expected <= 3"),
        ({"env_steps": 185}, "env_steps=185; expected <= 184"),
        ({"calls": [["call", "__init__", b"", False, 0, -1, False]]}, "no call of an environment"),
        ({"calls": [["call", "reset_goal", b"abc", False, 0, -1, False]]}, "3 bytes are no value"),
        ({"calls": [["call", "reset_goal", encode((1, 2)), False, 0, -1, False]]}, "without arguments"),
        ({"calls": [["call"]]}, "missing 6"),
        ({"extra": {"eval/x": "abc"}}, "'eval/x'='abc'; expected"),
        ({"extra": {"step": 1.0}}, "'step'=1.0; expected"),
    ],
)
def test_an_evaluation_that_a_checkpoint_cannot_hold_is_refused(change: dict[str, Any], says: str) -> None:
    policy = PPO.build(EnvSpec(LeafSpec("box", (4,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))), seed=0)
    plain = asked(policy)
    assert EvaluationRequest.stored(plain, policy, 3, 184).to_plain() == plain
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        EvaluationRequest.stored({**plain, **change}, policy, 3, 184)


def test_a_run_whose_stored_evaluation_is_of_another_policy_is_not_resumed(tmp_path: Path) -> None:
    with ps.Run(experiment("serial", tmp_path / "run", 1)) as run:
        for it in run:
            if it.itr == 3:
                break
    found = load_checkpoint(find_checkpoint(tmp_path / "run"))
    found.state["trainer"]["evaluation"]["weights"] = safetensors.torch.save({"head": torch.zeros(2)})
    save_checkpoint(tmp_path / "run", found.step + 1, found.state, found.policy)
    with pytest.raises(CheckpointError, match=r"is damaged.*networks of another policy"):
        ps.resume(tmp_path / "run")


def test_a_stranger_starts_no_crowd_of_evaluation_processes_or_environments(tmp_path: Path) -> None:
    exp = experiment("serial", tmp_path, 100_000)
    spec = EnvSpec(LeafSpec("box", (4,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    stored: Any = SimpleNamespace(path=tmp_path / "config.json", spec=spec)
    with pytest.raises(CheckpointError, match=r"run\.eval_workers=100,000; expected at most"):
        check_processes(exp, stored)
    check_batch(exp, stored, {"slots": 10**12, "episodes": 5})
    with pytest.raises(CheckpointError, match=r"run\.eval_slots=1000000000000 need"):
        check_batch(exp, stored, {"slots": 10**12, "episodes": 10**13})
