"""A run that was killed, stopped or extended ends in the bits of one that was not; what cannot be resumed says why."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.trainer import Trainer
from penstock.samplers.live import LiveSampler

if TYPE_CHECKING:
    from conftest import Child, Zygote
from tests.run.resumed import EXPERIMENTS, RUN, STEPS, Same, at, checkpoints, logged, train


@pytest.fixture(scope="module", params=EXPERIMENTS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def whole(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of an experiment that nothing ever stopped."""
    found: dict[str, Path] = {}

    def whole(name: str) -> Path:
        if name not in found:
            run = tmp_path_factory.mktemp("whole") / name
            assert zygote.train(at(EXPERIMENTS[name], run)).succeed()["stopped_by"] == "steps"
            found[name] = run
        return found[name]

    return whole


def beginning(zygote: Zygote, exp: ps.Experiment, run: Path, **changes: Any) -> Callable[[], Child]:
    def begin() -> Child:
        shutil.rmtree(run, ignore_errors=True)
        return zygote.train(at(exp, run, **changes))

    return begin


@pytest.mark.slow
def test_kill_right_after_a_checkpoint(
    name: str, whole: Any, zygote: Zygote, ended_by: Any, same_run: Same, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended_by(beginning(zygote, EXPERIMENTS[name], run), lambda: max(checkpoints(run), default=0) > STEPS // 3)
    last = checkpoints(run)[-1]
    child = zygote.resume(run)
    assert child.succeed()["env_steps"] >= STEPS
    assert "cut" not in child.output
    assert not [x for x in json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) if x.startswith("resume/")]
    assert last <= checkpoints(run)[-1] >= STEPS
    same_run(whole(name), run)


@pytest.mark.slow
def test_kill_at_random(name: str, whole: Any, zygote: Zygote, ended_by: Any, same_run: Same, tmp_path: Path) -> None:
    """Anywhere: in a step, in an update, in the middle of a file; then once more in the resumed run."""
    rng = random.Random(name)
    run, before = tmp_path / "run", tmp_path / "before"
    total = logged(whole(name))
    first = rng.randrange(total // 5, total // 2)
    ended_by(
        beginning(zygote, EXPERIMENTS[name], run), lambda: checkpoints(run) and logged(run) >= first,
        pause_s=rng.random() * 0.02,
    )  # fmt: skip
    run.rename(before)

    def resume() -> Child:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(before, run)
        return zygote.resume(run)

    ended_by(resume, lambda: logged(run) >= 0.75 * total, pause_s=rng.random() * 0.02)
    zygote.resume(run).succeed()
    same_run(whole(name), run)


@pytest.mark.slow
def test_kill_in_the_final_evaluation(zygote: Zygote, ended_by: Any, same_run: Same, tmp_path: Path) -> None:
    """All steps are done, and a checkpoint of the last one is there; what is left must still be done."""
    exp = replace(
        EXPERIMENTS["continuous"],
        run=replace(RUN, steps=256, checkpoint_interval=64, eval_interval=0, eval_episodes=60),
    )
    assert zygote.train(at(exp, tmp_path / "whole")).succeed()
    run = tmp_path / "run"
    ended_by(beginning(zygote, exp, run), lambda: max(checkpoints(run), default=0) >= 256)
    assert not (run / "eval").exists()
    zygote.resume(run).succeed()
    same_run(tmp_path / "whole", run)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_then_resume(
    number: int, code: int, whole: Any, zygote: Zygote, ended_by: Any, same_run: Same, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    child = ended_by(beginning(zygote, EXPERIMENTS["recurrent"], run), lambda: logged(run) >= 7, number, code)
    assert "Traceback" not in child.output
    stopped_at = checkpoints(run)[-1]
    assert stopped_at < STEPS
    assert stopped_at >= json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert zygote.resume(run).succeed()["env_steps"] >= STEPS
    same_run(whole("recurrent"), run)


@pytest.mark.slow
def test_broken_newest_checkpoint_of_a_killed_run(
    whole: Any, zygote: Zygote, ended_by: Any, same_run: Same, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended_by(beginning(zygote, EXPERIMENTS["ppo"], run), lambda: len(checkpoints(run)) >= 2)
    newest = find_checkpoint(run)
    data = bytearray((newest / "policy.safetensors").read_bytes())
    data[-3] ^= 1
    (newest / "policy.safetensors").write_bytes(data)
    child = zygote.resume(run)
    child.succeed()
    assert "policy.safetensors is damaged" in child.output
    same_run(whole("ppo"), run)
    left = {path.name for path in (run / "checkpoints").iterdir()}
    assert newest.name in left or any(name.startswith(f"{newest.name}.broken") for name in left)


def test_nothing_good_left(run: Path) -> None:
    for path in run.glob("checkpoints/*/state.json"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match="no good checkpoint") as caught:
        ps.resume(run, {"run.steps": STEPS})
    assert caught.value.exit_code == 5
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before


@pytest.mark.slow
def test_killed_before_the_first_checkpoint(zygote: Zygote, ended_by: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended_by(beginning(zygote, EXPERIMENTS["ppo"], run, checkpoint_interval=0), lambda: logged(run) >= 2)
    child = zygote.resume(run)
    assert child.wait() == 5
    assert "no good checkpoint" in child.output
    assert "start" in child.output  # what to do


@pytest.mark.parametrize("name", ["a2c", "continuous", "recurrent"])
def test_extension_equals_the_longer_run(name: str, same_run: Same, tmp_path: Path) -> None:
    """No schedules, no evaluation: a finished run that is extended is the longer run, bit for bit."""
    exp = ps.override(EXPERIMENTS[name], {"algo.entropy_coef": 0.01})
    train(exp, tmp_path / "long", steps=480)
    train(exp, tmp_path / "short", steps=200)
    assert ps.resume(tmp_path / "short", {"run.steps": 480}).env_steps >= 480
    same_run(tmp_path / "long", tmp_path / "short")


STOPS = {
    "interval": {"eval_interval": 90},
    "end": {"eval_interval": 0},
    "stop rule": {"eval_interval": 0, "stop": {"time/total_timesteps": 100}},
    "interval at the end": {"eval_interval": 180},
}


def stopping(case: str) -> dict[str, Any]:
    return {"steps": 180, "eval_episodes": 2, "checkpoint_interval": 60, **STOPS[case]}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def run(case: str) -> Path:
        return train(EXPERIMENTS["a2c"], tmp_path_factory.mktemp("never") / "run", **stopping(case)).run_dir

    return run


@pytest.mark.parametrize(
    ("case", "moment"),
    [
        *((case, "before") for case in STOPS),
        ("stop rule", "after"),
        *(pytest.param(case, "after", marks=pytest.mark.slow) for case in STOPS if case != "stop rule"),
    ],
)
def test_signal_in_an_evaluation(
    case: str, moment: str, never_stopped: Any, same_run: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be cut short; the resumed run does it again, or not if it was done, and is the run that was never stopped."""
    whole = never_stopped(case)
    inner, calls = LiveSampler.evaluate_agent, [0]

    def evaluate_agent(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 1 and moment == "before":
            signal.raise_signal(signal.SIGTERM)
        found = inner(*args, **kwargs)
        if calls[0] == 1 and moment == "after":
            signal.raise_signal(signal.SIGTERM)
        return found

    monkeypatch.setattr(LiveSampler, "evaluate_agent", evaluate_agent)
    with pytest.raises(SystemExit) as end:
        train(EXPERIMENTS["a2c"], tmp_path / "run", **stopping(case))
    assert (calls, end.value.code) == ([1], 143)
    with contextlib.suppress(ConfigError):  # it had finished
        ps.resume(tmp_path / "run")
    same_run(whole, tmp_path / "run")


@pytest.mark.parametrize(
    ("case", "last"),
    [
        *((case, "evaluation") for case in STOPS),
        ("interval", "row"),
        *(pytest.param(case, "row", marks=pytest.mark.slow) for case in STOPS if case != "interval"),
    ],
)
def test_kill_right_after_the_last_evaluation(
    case: str, last: str, never_stopped: Any, same_run: Same, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are on disk and no checkpoint knows of them."""
    whole, run, inner = never_stopped(case), tmp_path / "run", Trainer.save
    rows = logged(whole)
    evaluations = len((whole / "eval" / "evaluations.jsonl").read_text().splitlines())

    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
        path = run / "eval" / "evaluations.jsonl"
        done = path.exists() and len(path.read_text().splitlines()) == evaluations
        if done and (last == "evaluation" or logged(run) == rows):
            raise KeyboardInterrupt  # dies here
        return inner(self, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Trainer, "save", save)
        train(EXPERIMENTS["a2c"], run, **stopping(case))
    ps.resume(run)
    same_run(whole, run)


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "empty manifest"])
def test_broken_newest_checkpoint_is_passed_over(harm: str, run: Path, recwarn: pytest.WarningsRecorder) -> None:
    newest = find_checkpoint(run)
    victim = newest / ("MANIFEST.json" if harm == "empty manifest" else "state.npy")
    data = bytearray(victim.read_bytes())
    if harm == "flip":
        data[len(data) // 2] ^= 4
    victim.write_bytes({"flip": data, "truncate": data[: len(data) // 2]}.get(harm, b""))
    if harm == "delete":
        victim.unlink()
    assert ps.resume(run, {"run.steps": 400}).env_steps >= 400
    told = [str(w.message) for w in recwarn if "passed over a broken checkpoint" in str(w.message)]
    assert len(told) == 1
    assert str(victim) in told[0]


def test_slots_that_cannot_be_restored_are_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exp = replace(
        EXPERIMENTS["a2c"], env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "unseeded", "length": 1000}
    )
    train(exp, tmp_path / "run")
    capsys.readouterr()
    ps.resume(tmp_path / "run", {"run.steps": 640, "run.progress": "plain"})
    assert "6 of 6 slots could not be brought back" in capsys.readouterr().out
    reported = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["resume/cut_slots"] for row in reported if "resume/cut_slots" in row] == [6.0]
