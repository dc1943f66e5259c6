from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import ConfigError, EnvWorkerError, NonFiniteError
from penstock.envs.toy import Constant
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.files.lock import RunLock
from penstock.run.result import headline, summary
from penstock.samplers.episodes import Episodes
from tests.run.cartpole import CARTPOLE, RUN, at, saved

LINUX_ROOT = sys.platform == "linux" and os.geteuid() == 0 and shutil.which("unshare") is not None


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluations(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "eval" / "evaluations.jsonl").read_text().splitlines()]


def crossings(rows: list[dict[str, Any]], interval: int) -> list[int]:
    steps = [0, *dict.fromkeys(row["step"] for row in rows)]
    return [b for a, b in zip(steps, steps[1:]) if b // interval > a // interval]


def one_episode(score: float) -> Episodes:
    return Episodes(np.array([score]), np.array([1]), np.array([score]), np.array([0]), np.array([True]))


def finish(run: ps.Run) -> None:
    for _ in run:
        pass


# What a run leaves


def test_a_run_leaves_what_the_page_says(tmp_path: Path) -> None:
    run = tmp_path / "deep" / "run"
    result = ps.train(at(run, trackers=("tensorboard",)))
    assert {path.name.split(".")[0] for path in run.iterdir()} >= {
        "config", "meta", "metrics", "progress", "checkpoints", "eval", "events", "trackers",
    }  # fmt: skip
    assert result.run_dir == run
    assert result.stopped_by == "steps"
    assert 640 <= result.env_steps < 640 + 64
    assert saved(run) == [result.env_steps]
    assert {path.name for path in find_checkpoint(run).iterdir()} == {
        "state.json",
        "state.npy",
        "policy.safetensors",
        "MANIFEST.json",
    }
    meta = json.loads((run / "meta.json").read_text())
    assert meta["seed"] == 1
    assert meta["algo"] == "a2c"
    assert meta["versions"]["torch"] == torch.__version__
    assert meta["env_reproducible"] is True
    assert result.metrics["eval/mean_reward"] == evaluations(run)[-1]["eval/mean_reward"]
    assert result.metrics["train/n_updates"] == result.metrics["time/iterations"] >= 10
    assert result.policy.predict(np.zeros(4, np.float32)) in (0, 1)


SMALL_REPLAY = ps.ReplaySettings(capacity=6_400)


@pytest.mark.parametrize(
    ("algo", "says"),
    [
        (ps.A2C(), "4 slots x 16 steps = 64 rows a batch, 1 update each; seed 1"),
        (ps.PPO(minibatch=32, epochs=3), "4 slots x 16 steps = 64 rows a batch, 6 updates each; seed 1"),
        (ps.PPO(minibatch=4, epochs=1, net=ps.Net(hidden=(4,), recurrent="gru", recurrent_size=4)), "4 updates each; seed 1"),
        (
            ps.DQN(replay_ratio=8, batch_size=32, learning_starts=1_000, replay=SMALL_REPLAY),
            "in memory, uniform; one update of 32 every 4 steps after the first 1,000 (replay ratio 8), which is never in the "
            "64 steps of this run; seed 1",
        ),
        (
            ps.DQN(replay_ratio=100, batch_size=256, learning_starts=0, replay=SMALL_REPLAY),
            "uniform; 25 updates of 256 every 64 steps (replay ratio 100)",
        ),
        (ps.DQN(replay_ratio=96, learning_starts=0, replay=SMALL_REPLAY), "64 rows a batch; replay of 6,400 rows x "),
        (ps.DQN(replay_ratio=96, learning_starts=0, replay=SMALL_REPLAY), "; 3 updates of 32 every step (replay"),
        (ps.DQN(replay_ratio=1 / 3, replay=SMALL_REPLAY), "; one update of 32 every 96 steps after the"),
        (
            ps.R2D1(batch_size=4, train_length=16, burn_in=8, state_interval=16, learning_starts=0, replay_ratio=0.5,
                    replay=replace(SMALL_REPLAY, index="prioritized")),
            "in memory, prioritized; one update of 4 sequences of 16 rows every 128 steps (replay ratio 0.5)",
        ),
    ],
)  # fmt: skip
def test_the_first_line_says_how_much_is_trained(algo: Any, says: str) -> None:
    with ps.Trainer(replace(CARTPOLE, algo=algo, run=replace(RUN, steps=64))) as trainer:
        assert says in headline(trainer)


def test_the_same_settings_give_the_same_run(tmp_path: Path, same_run: Callable[[Path, Path], None]) -> None:
    exp = replace(CARTPOLE, algo=ps.PPO(epochs=2, minibatch=32))
    for name in "ab":
        ps.train(at(tmp_path / name, exp, steps=256))
    same_run(tmp_path / "a", tmp_path / "b")


# Logging and evaluation


def test_rows_at_the_log_interval(tmp_path: Path) -> None:
    ps.train(at(tmp_path / "often", eval_episodes=0))
    ps.train(at(tmp_path / "seldom", eval_episodes=0, log_interval=200))
    often, seldom = rows(tmp_path / "often"), rows(tmp_path / "seldom")
    assert len(often) == 10 + (often[-1]["time/iterations"] - 10)
    assert [row["step"] for row in seldom] == sorted({*crossings(often, 200), often[-1]["step"]})
    everything = {row["step"]: row for row in often}
    for row in seldom:
        whole = everything[row["step"]]
        assert {k: v for k, v in row.items() if k[:5] != "time/"} == {
            k: v for k, v in whole.items() if k[:5] != "time/"
        }


def test_evaluates_at_the_interval_and_at_the_end(tmp_path: Path) -> None:
    ps.train(at(tmp_path, eval_interval=150, eval_episodes=3))
    seen = rows(tmp_path)
    due = sorted({*crossings(seen, 150), seen[-1]["step"]})
    assert [row["step"] for row in evaluations(tmp_path)] == due
    assert [row["step"] for row in seen if "eval/mean_reward" in row] == due
    for row in evaluations(tmp_path):
        assert len(row["returns"]) == len(row["lengths"]) == 3
        assert row["eval/mean_reward"] == np.mean(row["returns"])


def test_no_evaluation_if_none_is_wanted(tmp_path: Path) -> None:
    result = ps.train(at(tmp_path, eval_episodes=0))
    assert not (tmp_path / "eval").exists()
    assert "eval/mean_reward" not in result.metrics


def test_evaluation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    for name, interval in (("a", 0), ("b", 64)):
        ps.train(at(tmp_path / name, eval_interval=interval, steps=256))
    a, b = (load_checkpoint(find_checkpoint(tmp_path / name)).policy for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


# Checkpoints


def test_keeps_the_last_and_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([10.0, 50.0, 30.0, 20.0, 40.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    scored: list[tuple[float, int]] = []

    with ps.Run(at(tmp_path, eval_interval=64, checkpoint_interval=64, keep=2)) as run:

        def evaluate_agent(itr: int, episodes: int, **_: Any) -> Episodes:
            score = next(scores)
            scored.append((score, run.trainer.env_steps))
            return one_episode(score)

        monkeypatch.setattr(run.trainer.sampler, "evaluate_agent", evaluate_agent)
        finish(run)
    best = max(scored)[1]
    steps = [step for _, step in scored]
    assert len(scored) >= 8
    assert saved(tmp_path) == sorted({best, *steps[-2:]})
    assert int(find_checkpoint(tmp_path, "best").name) == best
    assert run.trainer.evaluations.best_score == 50.0


def test_a_better_score_is_saved_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([1.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0])
    with ps.Run(at(tmp_path, eval_interval=64, checkpoint_interval=0)) as run:
        monkeypatch.setattr(run.trainer.sampler, "evaluate_agent", lambda *_, **__: one_episode(next(scores)))
        finish(run)
    assert len(saved(tmp_path)) == 3  # 1.0, 3.0 and the last
    assert load_checkpoint(find_checkpoint(tmp_path, "best")).state["trainer"]["best_score"] == 3.0
    assert find_checkpoint(tmp_path, "best") != find_checkpoint(tmp_path)


def test_a_score_belongs_to_the_step_that_was_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped later by a signal, the last checkpoint must not inherit the score of an earlier evaluation."""
    exp = at(tmp_path, eval_interval=128, checkpoint_interval=0, steps=10_000)
    with pytest.raises(SystemExit) as caught, ps.Run(exp) as run:
        inner, count = run.trainer.train, [0]

        def train() -> Any:
            count[0] += 1
            if count[0] == 6:
                signal.raise_signal(signal.SIGTERM)
            return inner()

        monkeypatch.setattr(run.trainer, "train", train)
        finish(run)
    assert caught.value.code == 143
    last = json.loads((find_checkpoint(tmp_path) / "MANIFEST.json").read_text())
    evaluated = {row["step"]: row["eval/mean_reward"] for row in evaluations(tmp_path)}
    assert last["score"] == evaluated.get(last["step"])
    assert evaluated


# The end


def test_stop_rule(tmp_path: Path) -> None:
    exp = replace(CARTPOLE, env="penstock.envs.toy:Constant")
    result = ps.train(at(tmp_path, exp, stop={"rollout/ep_rew_mean": 1.0, "time/total_timesteps": 300}, steps=100_000))
    assert result.stopped_by == "stop rule"
    assert 300 <= result.env_steps < 5_000
    assert len(result.episodes) == 100  # a full window before it counts
    assert "eval/mean_reward" in result.metrics
    with pytest.raises(ConfigError, match="reached its stop rule"):
        ps.resume(tmp_path)
    assert ps.resume(tmp_path, {"run.stop": {"time/total_timesteps": 1_000}}).env_steps >= 1_000


def test_stop_rule_on_evaluations(tmp_path: Path) -> None:
    exp = replace(CARTPOLE, env="penstock.envs.toy:Constant")
    result = ps.train(at(tmp_path, exp, stop={"eval/mean_reward": 0.5}, steps=100_000, eval_interval=200))
    assert result.stopped_by == "stop rule"
    assert 200 <= result.env_steps < 300
    assert len(evaluations(tmp_path)) == 1


def test_stop_rule_that_is_never_reached(tmp_path: Path) -> None:
    assert ps.train(at(tmp_path, stop={"eval/mean_reward": 1e9})).stopped_by == "steps"


def test_settings_fail_before_anything_is_made(tmp_path: Path) -> None:
    for exp in (replace(CARTPOLE, env="CartPole-v9"), replace(CARTPOLE, run=replace(RUN, device="cuda:99"))):
        with pytest.raises(ConfigError):
            ps.train(at(tmp_path / "run", exp))
    assert not (tmp_path / "run").exists()


SCRIPT = """
import sys, warnings
from pathlib import Path
import penstock as ps
from penstock.core.errors import CheckpointError
from penstock.run.checkpoints.checkpoint import find_checkpoint
run = Path({run!r})
exp = ps.Experiment("CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), ps.RunConfig(
    steps=64 * 30, dir=str(run), checkpoint_interval=64, eval_episodes=0, progress="plain", log_interval=1))
"""
FULL_DISK = (
    SCRIPT
    + """
import gymnasium
steps = 0
class Hog(gymnasium.Wrapper):
    "Fills the disk at one step, looks at what is left of the run at another, frees the disk at a third."
    def step(self, action):
        global steps
        steps += 1
        if steps == 640:
            with open(run.parent / "hog", "wb", buffering=0) as file:
                try:
                    while True: file.write(bytes(4096))
                except OSError: pass
        if steps == 1200:
            print("KEPT", find_checkpoint(run).name)
        if steps == 1300:
            (run.parent / "hog").unlink()
        return self.env.step(action)
from dataclasses import replace
result = ps.train(replace(exp, wrappers=(Hog,)))
print("ENDED", result.stopped_by, find_checkpoint(run).name, result.env_steps)
"""
)


def in_a_small_disk(
    folder: Path, script: str, before: str = "true", size: str = "6m"
) -> subprocess.CompletedProcess[str]:
    """Runs a script in a mount namespace of its own, in which `folder` is a tmpfs."""
    (folder / "disk").mkdir()
    (folder / "script.py").write_text(script.format(run=str(folder / "disk" / "run")))
    mount = f"mount -t tmpfs -o size={size} tmpfs {folder}/disk && {before} && exec {sys.executable} {folder}/script.py"
    return subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=100)


def can_mount() -> bool:
    if not LINUX_ROOT:
        return False
    return (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, timeout=10
        ).returncode
        == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_a_full_disk_does_not_stop_training(tmp_path: Path) -> None:
    done = in_a_small_disk(tmp_path, FULL_DISK)
    assert done.returncode == 0, done.stdout + done.stderr
    words = done.stdout.split()
    kept = int(words[words.index("KEPT") + 1])
    assert 500 <= kept <= 640
    assert "checkpoint not written" in done.stdout
    assert "free" in done.stdout
    assert f"ENDED steps {words[-2]}" in done.stdout
    assert int(words[-2]) == int(words[-1]) >= 1920
    assert "checkpoints lost" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_a_read_only_run_directory(tmp_path: Path) -> None:
    script = (
        SCRIPT + "\nfrom penstock.cli.main import main\nsys.exit(main(['resume', str(run), '--run.steps', '10000']))"
    )
    whole = tmp_path / "whole"
    ps.train(at(whole, steps=64))
    before = f"cp -r {whole} {tmp_path}/disk/run && mount -o remount,ro {tmp_path}/disk"
    done = in_a_small_disk(tmp_path, script, before)
    assert done.returncode == 5, done.stdout + done.stderr
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs root and mount namespaces")
def test_a_new_run_on_a_read_only_disk(tmp_path: Path) -> None:
    script = (
        SCRIPT
        + """
from penstock.cli.main import main
sys.exit(main(["train", "a2c", "--env", "CartPole-v1", "--run.dir", str(run), "--run.steps", "64"]))"""
    )
    done = in_a_small_disk(tmp_path, script, f"mount -o remount,ro {tmp_path}/disk")
    assert done.returncode == 5, done.stdout + done.stderr
    assert "Read-only file system" in done.stderr
    assert "choose" in done.stderr
    assert "Traceback" not in done.stderr


# When the learner or the environment fails


class Huge(Constant):
    """Finite rewards whose squares are not."""

    def step(self, action: Any) -> Any:
        obs, _, *rest = super().step(action)
        return obs, 1e38, *rest


def test_learning_that_breaks_down_saves_the_batch(tmp_path: Path) -> None:
    exp = replace(CARTPOLE, env=Huge)
    with pytest.raises(NonFiniteError, match=r"crash.batch-\d+\.npz") as caught:
        ps.train(at(tmp_path, exp, checkpoint_interval=64, steps=6_400))
    assert caught.value.exit_code == 4
    (file,) = (tmp_path / "crash").iterdir()
    with np.load(file) as batch:
        assert {"obs", "prev_reward", "prev_action", "terminated", "truncated", "valid", "info/logp"} <= set(
            batch.files
        )
        assert batch["prev_reward"].shape == (17, 4)
        assert (batch["prev_reward"] == np.float32(1e38)).any()
    weights = load_checkpoint(find_checkpoint(tmp_path)).policy
    assert all(torch.isfinite(x).all() for x in weights.values())
    skipped = [row["train/skipped_updates"] for row in rows(tmp_path)]
    assert skipped == sorted(skipped)
    assert max(skipped) <= 10


def test_the_batch_that_cannot_be_saved_does_not_hide_the_error(tmp_path: Path) -> None:
    trainer = ps.Trainer(replace(CARTPOLE, env=Huge), tmp_path)
    (tmp_path / "crash").write_text("a file in the way")
    with trainer, pytest.raises(NonFiniteError, match="could not be saved"):
        for _ in range(30):
            trainer.train()


def test_an_environment_that_fails_leaves_the_checkpoints(tmp_path: Path) -> None:
    exp = replace(CARTPOLE, env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "raise_in_step", "at": 100})
    with pytest.raises(EnvWorkerError, match="the arm fell off"):
        ps.train(at(tmp_path, exp, checkpoint_interval=64))
    assert find_checkpoint(tmp_path)
    assert rows(tmp_path)
    with RunLock(tmp_path):
        pass  # it was given back


def test_environments_are_closed_whatever_happens(tmp_path: Path) -> None:
    closed: list[int] = []

    class Closing(Huge):
        def close(self) -> None:
            closed.append(1)

    made: list[Any] = []

    def make() -> Any:
        made.append(1)
        return Closing()

    ps.train(at(tmp_path / "good", replace(CARTPOLE, env=lambda: make()), steps=64))
    assert len(closed) >= len(made)
    closed.clear()
    made.clear()
    with pytest.raises(NonFiniteError):
        ps.train(at(tmp_path / "bad", replace(CARTPOLE, env=lambda: make()), steps=100_000))
    assert len(closed) >= len(made)


# Signals


def test_runs_outside_the_main_thread(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(ps.train(at(tmp_path))))
    thread.start()
    thread.join(60)
    assert found[0].stopped_by == "steps"


def test_handlers_are_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ps.train(at(tmp_path / "a", steps=64))
    with pytest.raises(EnvWorkerError):
        ps.train(at(tmp_path / "b", replace(CARTPOLE, env="penstock.envs.toy:FaultEnv",
                                            env_kwargs={"fault": "raise_in_step", "at": 40})))  # fmt: skip
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_an_interactive_session_gets_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with ps.Run(at(tmp_path, steps=10_000)) as run:
        inner = run.trainer.train
        monkeypatch.setattr(run.trainer, "train", lambda: (signal.raise_signal(signal.SIGINT), inner())[1])
        finish(run)
    assert run.result.stopped_by == "SIGINT"
    assert saved(tmp_path) == [run.result.env_steps]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_tidily(number: int, code: int, zygote: Any, until: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    child = zygote.train(at(run, steps=10_000_000, progress="plain"))
    until(lambda: (run / "metrics.jsonl").exists() and len(rows(run)) > 3, child)
    child.send(number)
    assert child.wait(20) == code
    assert "Traceback" not in child.output
    shown = "".join(child.output.replace("│", "").split())  # the panel is wrapped
    assert f"penstockresume{run}" in shown
    assert f"stoppedby{signal.Signals(number).name}" in shown
    (step,) = saved(run)
    assert step >= rows(run)[-1]["step"]
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def wait_until_idle(pid: int) -> None:
    before = None
    while (now := psutil.Process(pid).cpu_times()) != before:
        before = now
        time.sleep(0.5)


@pytest.mark.slow
def test_a_second_signal_kills(zygote: Any, until: Any, tmp_path: Path) -> None:
    """The first waits for a step that never comes back; the checkpoints before stay good, and a resumed run goes on."""
    run = tmp_path / "run"
    exp = replace(CARTPOLE, env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "hang_in_step", "at": 100})
    child = zygote.train(at(run, exp, checkpoint_interval=64))
    until(lambda: (run / "checkpoints").is_dir() and saved(run) and len(rows(run)) >= 6, child)
    wait_until_idle(child.pid)  # in that step
    child.send(signal.SIGINT)
    wait_until_idle(child.pid)
    assert child.running
    child.send(signal.SIGINT)
    assert child.wait() == -signal.SIGINT
    assert load_checkpoint(find_checkpoint(run))
    with RunLock(run):
        pass


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(("number", "delay_s"), [(signal.SIGINT, 0.0), (signal.SIGINT, 0.15), (signal.SIGTERM, 0.05)])
def test_signals_at_start_up(number: int, delay_s: float, tmp_path: Path) -> None:
    """In the middle of `import torch` an exception would go through C++ and abort; see `cli.main._leave`."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "penstock", "train", "a2c", "--env", "CartPole-v1", "--run.dir", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay_s)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    assert run.exists() or f"stopped by {signal.Signals(number).name}" in err


# Code of the user's own between the iterations


def norm_of(policy: ps.Policy) -> float:
    return float(sum(p.detach().norm() for p in policy.agent.parameters()))


def untimed(run: Path) -> list[dict[str, Any]]:
    kept = ("time/iterations", "time/total_timesteps")
    return [{k: v for k, v in row.items() if k[:5] != "time/" or k in kept} for row in rows(run)]


def test_an_empty_body_is_ps_train(tmp_path: Path, same_run: Callable[[Path, Path], None]) -> None:
    ps.train(at(tmp_path / "a", eval_interval=150, steps=256))
    with ps.Run(at(tmp_path / "b", eval_interval=150, steps=256)) as run:
        finish(run)
        assert run.result.stopped_by == "steps"  # already in the with
    same_run(tmp_path / "a", tmp_path / "b")


def test_the_body_sees_every_iteration_and_its_numbers_are_logged(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ended = 0
    with ps.Run(at(tmp_path, log_interval=10**6, eval_interval=300, eval_episodes=2)) as run:
        for it in run:
            seen.append((it.itr, it.env_steps))
            assert it.run is run
            assert it.policy is run.policy
            assert it.batch is not None
            assert it.batch.env_steps == it.env_steps - (seen[-2][1] if len(seen) > 1 else 0)
            ended += len(it.episodes)
            assert it.metrics["rollout/episodes"] == ended
            assert (it.evaluation is not None) == ("eval/mean_reward" in it.metrics)
            if it.itr % 3 == 0:
                it.metrics["mine/norm"] = torch.tensor(norm_of(it.policy))  # pyright: ignore
                it.metrics["mine/count"] = np.int64(7)  # pyright: ignore
    assert [itr for itr, _ in seen] == list(range(1, len(seen) + 1))
    logged = {row["step"]: row for row in rows(tmp_path)}
    mine = [steps for itr, steps in seen if itr % 3 == 0]
    assert [step for step, row in logged.items() if "mine/norm" in row] == mine
    assert all(row["mine/count"] == 7 and "train/policy_gradient_loss" in row for row in map(logged.get, mine) if row)
    evaluated = [row["step"] for row in evaluations(tmp_path)]
    assert set(logged) == {*mine, *evaluated}  # nothing else: the interval is never crossed
    assert run.result.env_steps == seen[-1][1]


@pytest.mark.filterwarnings("ignore:ConfigError in the loop")
def test_what_is_no_number_is_refused_and_the_run_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it\.metrics\['mine'\]='x' \(str\)"), ps.Run(at(tmp_path)) as run:
        for it in run:
            it.metrics["mine"] = "x"  # pyright: ignore
    assert saved(tmp_path) == [run.trainer.env_steps]


@pytest.mark.parametrize("how", ["break", "stop"])
def test_ended_early_it_is_saved_and_goes_on_as_if_it_had_not(
    how: str, tmp_path: Path, same_run: Callable[[Path, Path], None]
) -> None:
    exp = replace(CARTPOLE, eval_env_kwargs={"max_episode_steps": 15})
    settings: dict[str, Any] = {"steps": 384, "log_interval": 200, "eval_interval": 150, "checkpoint_interval": 0}

    def body(run: ps.Run, until: int) -> None:
        for it in run:
            if it.itr % 2 == 0:
                it.metrics["mine/norm"] = norm_of(it.policy)
            if it.itr == until:
                if how == "break":
                    break
                run.stop()

    for name, until in (("whole", 0), ("cut", 4)):
        with ps.Run(at(tmp_path / name, exp, **settings)) as run:
            body(run, until)
    assert run.result.stopped_by == "stop"
    assert "stopped by your code" in repr(run.result)
    assert saved(tmp_path / "cut")[-1] == run.result.env_steps
    assert "mine/norm" in rows(tmp_path / "cut")[-1]
    with ps.Run.resume(tmp_path / "cut") as again:
        body(again, 0)
    assert again.result.stopped_by == "steps"
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    assert evaluations(tmp_path / "cut") == evaluations(tmp_path / "whole")
    assert max(evaluations(tmp_path / "cut")[-1]["lengths"]) <= 15
    a, b = (load_checkpoint(find_checkpoint(tmp_path / name)).policy for name in ("whole", "cut"))
    assert all(torch.equal(a[key], b[key]) for key in a)


def failing(exp: ps.Experiment) -> ps.Run:
    with pytest.raises(ZeroDivisionError), ps.Run(exp) as run:
        for it in run:
            if it.itr == 3:
                it.metrics["mine"] = 1.0
                _ = 1 / 0
    return run


def test_an_error_in_the_body_saves_then_goes_on(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"penstock resume {tmp_path}"):
        run = failing(at(tmp_path))
    assert run.result.stopped_by == "ZeroDivisionError"
    assert saved(tmp_path) == [run.result.env_steps] == [rows(tmp_path)[-1]["step"]]
    assert rows(tmp_path)[-1]["mine"] == 1.0
    assert ps.resume(tmp_path).metrics["time/iterations"] >= 10


def test_an_error_in_training_saves_nothing_half_done(tmp_path: Path) -> None:
    exp = replace(CARTPOLE, env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "raise_in_step", "at": 100})
    with pytest.raises(EnvWorkerError), ps.Run(at(tmp_path, exp)) as run:
        finish(run)
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ConfigError, match="before the run has ended"):
        _ = run.result


def test_a_signal_in_the_body_lets_it_finish(tmp_path: Path) -> None:
    ends: list[int] = []
    with pytest.raises(SystemExit) as caught, ps.Run(at(tmp_path, steps=10_000)) as run:
        for it in run:
            if it.itr == 2:
                signal.raise_signal(signal.SIGINT)
            ends.append(it.itr)
    assert caught.value.code == 130
    assert ends == [1, 2]
    assert run.result.stopped_by == "SIGINT"
    assert saved(tmp_path) == [run.result.env_steps]
    hint = summary(run.trainer, run.result, 1.0, 1, 0)["next"].splitlines()[-1]
    assert hint == f"penstock resume {tmp_path}"


def test_a_run_that_a_signal_ends_in_its_last_iteration_is_extended_by_more_steps(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), ps.Run(at(tmp_path, steps=10)) as run:
        for _ in run:
            signal.raise_signal(signal.SIGINT)
    result = run.result
    hint = summary(run.trainer, result, 1.0, 1, 0)["next"].splitlines()[-1]
    assert hint == f"penstock resume {tmp_path} --run.steps {2 * result.env_steps}"
    with pytest.raises(ConfigError, match="has finished its 10 steps"):
        ps.resume(tmp_path)


@pytest.mark.parametrize("steps", [1_000, 1])
def test_a_run_that_its_stop_rule_ended_goes_on_by_the_command_that_it_names(tmp_path: Path, steps: int) -> None:
    with ps.Run(at(tmp_path, stop={"time/iterations": 1.0}, steps=steps, eval_episodes=0)) as run:
        finish(run)
    before = run.result.env_steps
    assert run.result.stopped_by == "stop rule"
    command = shlex.split(summary(run.trainer, run.result, 1.0, 1, 0)["next"].splitlines()[-1])
    assert command[:3] == ["penstock", "resume", str(tmp_path)]
    assert main(command[1:]) == 0
    assert saved(tmp_path)[-1] >= max(steps, 2 * before)


def test_saves_and_evaluates_when_told(tmp_path: Path) -> None:
    told = 0.0
    with ps.Run(at(tmp_path, eval_episodes=0, checkpoint_interval=0, keep=9)) as run:
        for it in run:
            if it.itr == 2:
                assert int(run.save().name) == it.env_steps
                assert len(run.evaluate(3)) == 3
                told = it.metrics["eval/mean_reward"]
        after = run.evaluate(2)
    assert len(after) == 2
    assert saved(tmp_path)[0] == rows(tmp_path)[1]["step"]
    assert [row["eval/mean_reward"] for row in rows(tmp_path) if "eval/mean_reward" in row] == [told]
    assert [len(row["returns"]) for row in evaluations(tmp_path)] == [3, 2]
    for late in (run.save, run.evaluate):
        with pytest.raises(ConfigError, match=r"ps\.evaluate"):
            late()


def test_a_run_belongs_into_a_with(tmp_path: Path) -> None:
    run = ps.Run(at(tmp_path))
    for use in (lambda: iter(run), lambda: next(run), lambda: run.policy, run.save):
        with pytest.raises(ConfigError, match=r"with ps\.Run\(exp\) as run"):
            use()
    assert not (tmp_path / "config.json").exists()
    with run:
        run.stop()
    with pytest.raises(ConfigError, match="runs once"), run:
        pass


SEEN: list[int] = []


def look(it: ps.Iteration) -> None:
    it.metrics["mine/steps"] = it.env_steps
    SEEN.append(it.itr)
    if it.itr == 4:
        it.run.stop()


def test_a_function_for_each_iteration(tmp_path: Path) -> None:
    SEEN.clear()
    result = ps.train(at(tmp_path, each="tests.run.test_loop:look"))
    assert result.stopped_by == "stop"
    assert SEEN == [1, 2, 3, 4]
    assert [row["mine/steps"] for row in rows(tmp_path)] == [row["step"] for row in rows(tmp_path)]
    assert json.loads((tmp_path / "config.json").read_text())["experiment"]["run"]["each"] == "tests.run.test_loop:look"
    assert ps.resume(tmp_path).stopped_by == "steps"
    assert SEEN[4:] == list(range(5, SEEN[-1] + 1))


@pytest.mark.parametrize(
    ("each", "says"), [("tests.run.test_loop:lok", "look"), ("json:__name__", "expected a function")]
)
def test_a_function_that_is_none_fails_before_anything_is_made(each: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        ps.train(at(tmp_path / "run", each=each))
    assert not (tmp_path / "run").exists()


def test_a_trainer_of_its_own_leaves_a_run(tmp_path: Path) -> None:
    run = tmp_path / "by" / "hand"
    with ps.Trainer(at(run, steps=200), run) as trainer:
        while trainer.env_steps < 200:
            trainer.train()
            trainer.save()
    assert ps.load(run).predict(np.zeros(4, np.float32)) in (0, 1)
    assert ps.resume(run, {"run.steps": 400}).env_steps >= 400


def test_a_result_is_shown_in_a_line(tmp_path: Path) -> None:
    text = repr(ps.train(at(tmp_path)))
    assert len(text) < 200
    assert "stopped by steps" in text
    assert str(tmp_path) in text
