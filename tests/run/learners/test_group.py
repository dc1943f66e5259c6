"""Several learners in processes; ranks that begin as users' do are those of test_many_agents.py."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import penstock as ps
from penstock.envs.toy import ThreeStep
from penstock.run.files.sizes import check_processes
from penstock.run.learners import group as gangs
from tests.children import CHILDREN, said_by
from tests.forked import forks_of
from tests.learn.ranks import apart

pytestmark = pytest.mark.usefixtures("forked")

LIMIT_S = 180.0
NET = ps.Net(hidden=(16,), normalize_obs=True, normalize_reward=True)
PPO = ps.PPO(epochs=2, minibatch=64, net=NET)
DQN = ps.DQN(
    net=ps.Net(hidden=(16,), activation="relu"),
    learning_starts=64,
    replay_ratio=16,
    epsilon=0.3,
    replay=ps.ReplaySettings(capacity=2_000, index="prioritized", priority_beta=0.5),
)


def experiment(folder: Path, algo: Any = PPO, learners: int = 1, steps: int = 1_200, **run: Any) -> ps.Experiment:
    config: dict[str, Any] = {
        "seed": 1,
        "progress": "off",
        "eval_episodes": 4,
        "checkpoint_interval": 400,
        "log_interval": 0,
        **run,
    }
    run_config = ps.RunConfig(steps=steps, dir=str(folder), learners=learners, **config)
    return ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=32, B=6), run_config)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The log, without what differs from run to run."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/") and "wait" not in k} for row in logged]


def same_bits(one: ps.Policy, other: ps.Policy) -> bool:
    mine, theirs = one.agent.state_dict(), other.agent.state_dict()
    return all(torch.equal(x, theirs[name]) for name, x in mine.items())


def ranks() -> list[psutil.Process]:
    return forks_of("rank")


def struck(folder: Path, seed: int, kills: int, number: int, until_s: tuple[float, float]) -> threading.Thread:
    """A thread that sends a signal to a rank of a run with a checkpoint, each time a while after one was started."""

    def strike() -> None:
        rng, known = random.Random(seed), set[int]()
        for _ in range(kills):
            deadline = time.monotonic() + LIMIT_S
            found: list[psutil.Process] = []
            while not (found and list(folder.glob("checkpoints/0*"))) and time.monotonic() < deadline:
                time.sleep(0.002)
                found = [p for p in ranks() if p.pid not in known]
            time.sleep(rng.uniform(*until_s))
            for process in found:
                known.add(process.pid)
                process.send_signal(number)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.parametrize("algo", [PPO, DQN], ids=["ppo", "dqn"])
def test_learners_are_one_run_that_goes_on_under_another_number(tmp_path: Path, algo: Any) -> None:
    """Two learners, then three, then one, beside one throughout: the same steps, episodes, evaluation and policy."""
    whole = ps.train(experiment(tmp_path / "one", algo))
    folder = tmp_path / "many"
    first = ps.train(experiment(folder, algo, learners=2, steps=400))
    assert first.env_steps < 800 and ranks() == []
    ps.resume(folder, {"run.steps": 800, "run.learners": 3})
    last = ps.resume(folder, {"run.steps": 1_200, "run.learners": 1})
    assert last.env_steps == whole.env_steps
    assert last.policy.updates == whole.policy.updates
    assert apart(last.policy, whole.policy) < 1e-5
    assert last.metrics["rollout/episodes"] == whole.metrics["rollout/episodes"]
    assert last.metrics["eval/mean_reward"] == whole.metrics["eval/mean_reward"]
    assert [row["step"] for row in rows(folder)] == [row["step"] for row in rows(tmp_path / "one")]
    assert rows(folder)[-1].keys() == rows(tmp_path / "one")[-1].keys()


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_no_bit(tmp_path: Path) -> None:
    whole = ps.train(experiment(tmp_path / "whole", learners=2))
    thread = struck(tmp_path / "struck", 1, 1, signal.SIGKILL, (0.0, 0.02))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = ps.train(experiment(tmp_path / "struck", learners=2))
    thread.join(LIMIT_S)
    assert [x for x in caught if "all 2 learners go on from step" in str(x.message)], (
        "it was through before it was struck"
    )
    assert same_bits(found.policy, whole.policy)
    assert rows(tmp_path / "struck") == rows(tmp_path / "whole")


def test_a_rank_that_is_lost_in_a_save_of_the_loop_or_after_a_break(tmp_path: Path) -> None:
    run, saved = ps.Run(experiment(tmp_path / "struck", learners=2)), list[int]()
    with warnings.catch_warnings(record=True), run:
        for it in run:
            if it.env_steps > 700 and not saved:
                run.set({"algo.entropy_coef": 0.01})
                assert run.standing
                ranks()[0].kill()
                saved.append(int(run.save().name))
                assert run.standing == {}  # the change came after the checkpoint
                assert saved == [run.trainer.env_steps] and 400 < saved[0] < it.env_steps
            elif it.env_steps > 1_000:
                ranks()[0].kill()
                break
    assert 800 < run.result.env_steps < 1_000 and run.result.stopped_by == "stop"
    assert run.result.checkpoint is not None and int(run.result.checkpoint.name) == run.result.env_steps
    assert rows(tmp_path / "struck")[-1]["step"] == run.result.env_steps
    assert ranks() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "steps", "seed"),
    [(PPO, 4_000, seed) for seed in range(6)] + [(DQN, 1_200, seed) for seed in range(3)],
    ids=[*(f"ppo-{seed}" for seed in range(6)), *(f"dqn-{seed}" for seed in range(3))],
)
def test_kills_at_random_moments_cost_no_bit(tmp_path: Path, algo: Any, steps: int, seed: int) -> None:
    exp = experiment(tmp_path / "whole", algo, learners=3, steps=steps)
    whole = ps.train(exp)
    thread = struck(tmp_path / "struck", seed, 3, signal.SIGKILL, (0.0, 3.0))
    with warnings.catch_warnings(record=True):
        found = ps.train(replace(exp, run=replace(exp.run, dir=str(tmp_path / "struck"))))
    assert same_bits(found.policy, whole.policy)
    assert rows(tmp_path / "struck") == rows(tmp_path / "whole")
    thread.join(0.1)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_replaced(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", learners=2, steps=100_000, learner_timeout_s=5.0)
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught, ps.Run(exp) as run:
        warnings.simplefilter("always")
        for it in run:
            said = [str(x.message) for x in caught if "go on from step" in str(x.message)]
            if said and it.itr >= 5:
                break
            if it.itr == 4 and not said:
                ranks()[0].send_signal(signal.SIGSTOP)
    assert "rank 1 (pid " in said[0] and "hangs: it has not come to collective" in said[0]
    assert "run.learner_timeout_s=5 s" in said[0]
    assert "all 2 learners go on from step" in said[0]
    assert ranks() == []


class Raises(ThreeStep):
    """Raises in every process but the one that made it."""

    def __init__(self, home: int = 0) -> None:
        super().__init__()
        self.home = home

    def step(self, action: Any) -> Any:
        if os.getpid() != self.home:
            raise ValueError("é" * 16_000 + "the simulator broke" + "é" * 3_000)
        return super().step(action)


def test_what_another_rank_raises_is_raised_here(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", ps.PPO(epochs=1), learners=2)
    exp = replace(exp, env=Raises, env_kwargs={"home": os.getpid()})
    with pytest.raises(ps.EnvWorkerError, match=r"rank 1: (.|\n)*the simulator broke"):
        ps.train(exp)
    assert ranks() == []


def test_learners_that_are_lost_too_often_end_the_run() -> None:
    restarts, lost = gangs.Restarts(), ps.LearnerLostError("rank 1 was killed")
    for _ in range(gangs.MOST_RESTARTS):
        restarts.count(400, lost)
    restarts.count(800, lost)
    for _ in range(gangs.MOST_RESTARTS - 1):
        restarts.count(800, lost)
    with pytest.raises(ps.LearnerLostError, match=r"5 times from step 800.*rank 1 was killed"):
        restarts.count(800, lost)


def test_more_learners_than_slots(tmp_path: Path) -> None:
    with pytest.raises(ps.ConfigError, match=r"run\.learners=7 with sampler\.B=6"):
        ps.train(experiment(tmp_path / "run", learners=7))


def test_ranks_meet_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a rank 0 that is killed would leave behind."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert ps.train(experiment(tmp_path / "run", learners=2)).env_steps > 0


def test_the_run_of_a_stranger_starts_no_crowd(tmp_path: Path) -> None:
    exp = replace(experiment(tmp_path, learners=100_000), sampler=ps.SerialSampler(T=1, B=200_000))
    stored: Any = SimpleNamespace(path=tmp_path / "config.json")
    with pytest.raises(ps.CheckpointError, match=r"run\.learners=100,000; expected at most"):
        check_processes(exp, stored)


def test_threads_are_not_measured_for_several() -> None:
    with pytest.raises(ps.ConfigError, match=r"run\.learners=2 with learner_threads='auto'.*give a number"):
        ps.RunConfig(learners=2, learner_threads="auto")


SCRIPT = """
import penstock as ps
exp = ps.Experiment("CartPole-v1", ps.PPO(epochs=1), ps.CpuSampler(T=32, B=4, workers=2),
    ps.RunConfig(steps=1_000_000, dir={folder!r}, learners=2, progress="off", log_interval=0))
ps.train(exp)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_no_process_outlives_the_run(tmp_path: Path, zygote: Any, until: Any, number: int, code: int) -> None:
    """Of those that are killed, rank and workers began as users' do."""
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(folder)))
    run = zygote.script(script, forked=number == signal.SIGTERM)
    log = folder / "metrics.jsonl"
    until(lambda: log.exists() and log.read_text().count("\n") > 2, run)
    family = psutil.Process(run.pid).children(recursive=True)
    assert len(family) >= 3  # a rank, and a worker of each
    listening = [
        c.laddr.ip
        for p in (psutil.Process(run.pid), *family)
        for c in p.net_connections()
        if c.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1"}
    run.send(number)
    assert run.wait() == code
    _, alive = psutil.wait_procs(family, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    if number == signal.SIGTERM:
        assert list((folder / "checkpoints").iterdir())


LEARNERS_DIE = """
exp = ps.Experiment("CartPole-v1", ps.PPO(minibatch=64, epochs=1), ps.SerialSampler(T=32, B=4),
                    ps.RunConfig(steps=10**9, dir="run", learners=2, checkpoint_interval=128, eval_episodes=0,
                                 progress="off", learner_timeout_s=20.0))
used = []
with ps.Run(exp) as run:
    for n, _ in enumerate(run, 1):
        if n % 8 == 4:
            used.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
            if len(used) == 4:
                run.stop()
            else:
                for child in children("runner_process"):
                    child.kill()
print("used", used)
assert used[1] == used[2] == used[3]
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_restarts_of_learners_leave_nothing_behind(tmp_path: Path) -> None:
    said = said_by(CHILDREN + LEARNERS_DIE, tmp_path)
    assert "used" in said and "AssertionError" not in said, said
