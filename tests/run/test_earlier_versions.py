"""Runs that earlier versions made go on here, or are refused in one line that says which version reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import penstock as ps
from penstock.run.files.stored import read_config

STORED = Path(__file__).parent.parent / "data"
RUNS = sorted(path for path in STORED.glob("runs-*/*") if path.is_dir())
STEPS = 1_600


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("stored", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_goes_on(stored: Path, tmp_path: Path) -> None:
    run = tmp_path / stored.name
    shutil.copytree(stored, run)
    before = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    result = ps.resume(run, {"run.steps": STEPS + 100})
    assert STEPS + 100 <= result.env_steps < STEPS + 200
    assert result.stopped_by == "steps"
    assert result.run_dir == run
    after = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert after[-1]["train/n_updates"] > before["train/n_updates"] > 0
    assert after[-1]["time/iterations"] > before["time/iterations"]
    assert result.checkpoint is not None
    assert int(result.checkpoint.name) == result.env_steps
    assert [int(path.name) for path in (run / "checkpoints").iterdir()] != []
    if "replay/size" in before:
        assert after[-1]["replay/size"] > before["replay/size"] > 0


@pytest.mark.parametrize("stored", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_acts_as_it_did(stored: Path) -> None:
    """The last evaluation, played again: its return says that networks and normalisers are whole."""
    last = json.loads((stored / "metrics.jsonl").read_text().splitlines()[-1])
    env = json.loads((stored / "config.json").read_text())["experiment"]["env"]
    sampler = ps.SerialSampler(T=1, B=1).build(env, seed=3)
    sampler.initialize(ps.load(stored).agent)
    episodes = sampler.evaluate_agent(int(last["time/iterations"]), 2)
    sampler.shutdown()
    assert episodes.mean_return == pytest.approx(last["eval/mean_reward"], rel=0.05)


@pytest.mark.parametrize("stored", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_evaluates_as_long_as_it_did(stored: Path) -> None:
    assert read_config(stored).to_resume().run.eval_max_steps == 200_000
    assert read_config(stored).to_resume().eval_env_config == read_config(stored).to_resume().env_config


def test_there_are_three_of_0_1_0() -> None:
    assert [path.name for path in RUNS if path.parent.name == "runs-0.1.0"] == ["dqn-per", "ppo-lstm", "sac"]


def test_a_run_over_runners_knows_the_class_that_has_moved(tmp_path: Path) -> None:
    content = json.loads((STORED / "runs-0.1.0" / "sac" / "config.json").read_text())
    inner = content["experiment"]["sampler"]
    old = {"class": "penstock.distributed.sampler:RunnerSampler", "runners": 2, "inner": inner, "backend": "processes"}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({**content, "experiment": {**content["experiment"], "sampler": old}})
    )
    sampler = read_config(tmp_path / "run", trust=True).to_resume().sampler
    assert isinstance(sampler, ps.RunnerSampler) and sampler.runners == 2
