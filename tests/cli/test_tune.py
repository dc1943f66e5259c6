from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from penstock.studies.study_file import STATE
from tests.cli.short import SHORT, Cli, config, metrics

SEARCH = (
    "tune", "a2c", "--env", "CartPole-v1", *SHORT, "--run.steps", "320",
    "--search", "algo.lr=loguniform(1e-4,1e-2)", "algo.entropy_coef=choice(0,0.01)",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("launched")
def test_a_search_from_the_line_to_its_best_settings(cli: Cli, tmp_path: Path) -> None:
    line = (*SEARCH, "--scheduler", "asha", "--interval", "64", "--trials", "3", "--dir", "x")
    said = cli(*line)
    assert said.code == 0, said.both
    assert "x: 3 of 3 trials to do, 1 at a time; asha looks at eval/mean_reward after 64, 320 steps" in said.out
    assert "best of 3: " in said.out
    trials = json.loads((tmp_path / "x" / STATE).read_text())["trials"]
    assert sorted(t["state"] for t in trials) == ["finished", "pruned", "pruned"]
    best = next(t for t in trials if t["state"] == "finished")
    run = tmp_path / "x" / best["run"]["name"]
    assert config(run)["algo"]["lr"] == best["values"]["algo.lr"]
    assert metrics(run)[-1]["eval/mean_reward"] == best["scores"]["320"]
    assert metrics(run)[-1]["step"] == best["steps"] >= 320
    assert config(run)["run"]["stop"] == {}
    assert {path.name for path in (tmp_path / "x" / "plots").iterdir()} == {"history.png", "coordinates.png"}
    for trial in trials:  # what was pruned is kept
        assert any((tmp_path / "x" / trial["run"]["name"] / "checkpoints").iterdir())
    before = (tmp_path / "x" / STATE).read_bytes()
    for again in (line, ("tune", "x")):
        said = cli(*again)
        assert said.code == 0, said.both
        assert "x: nothing is left to do" in said.out
        assert (tmp_path / "x" / STATE).read_bytes() == before
    preset = ("--preset-file", "x/best.toml", "--run.eval-episodes", "1")
    said = cli("train", "a2c", "--env", "CartPole-v1", *preset, "--run.dir", "best")
    assert said.code == 0, said.both
    assert config(tmp_path / "best")["algo"] == config(run)["algo"]
    assert config(tmp_path / "best")["sampler"] == config(run)["sampler"]
    for other, message in (
        ((*line, "--eta", "4"), "holds another search: eta was 3 and is 4"),
        (("tune", "x", "--trials", "4"), "--trials was given; only --parallel"),
        (("tune", "x", "--retry", "trial-000"), "no such failed run in x; none has failed"),
    ):
        said = cli(*other)
        assert said.code == 2, said.both
        assert message in said.err


@pytest.mark.usefixtures("launched")
def test_the_best_settings_of_several_policies_are_trained_by_the_line_that_is_printed(
    cli: Cli, tmp_path: Path
) -> None:
    (tmp_path / "two_tuned.py").write_text(
        "import penstock as ps\nTWO = ps.Policies({'a': ps.PPO(), 'b': ps.PPO()}, {'agent_0': 'a', 'agent_1': 'b'})\n"
    )
    vary = ("--search", "algo.algos.a.lr=choice(1e-4,1e-2)", "--trials", "1", "--dir", "x")
    said = cli("tune", "two_tuned:TWO", "--env", "penstock.envs.toy:TeamBits", *SHORT, *vary)
    assert said.code == 0, said.both
    (line,) = (line for line in said.out.splitlines() if line.startswith("train it:"))
    command = shlex.split(line.removeprefix("train it:"))
    assert command[:2] == ["penstock", "train"]
    said = cli(*command[1:], "--run.dir", "best", "--run.progress", "off")
    assert said.code == 0, said.both
    (trial,) = json.loads((tmp_path / "x" / STATE).read_text())["trials"]
    assert config(tmp_path / "best")["algo"] == config(tmp_path / "x" / "trial-000")["algo"]
    assert config(tmp_path / "best")["algo"]["algos"]["a"]["lr"] == trial["values"]["algo.algos.a.lr"]


WRONG = (
    (("tune",), "what to train comes first"),
    (("tune", "ppo", "--search", "algo.lr=uniform(0,1)"), "--env is missing"),
    (("tune", "ppo", "--env", "CartPole-v1"), "needs settings to vary"),
    (("tune", "ppo", "--env", "CartPole-v1", "--search", "algo.lr"), "expected setting=form"),
    (("tune", "ppo", "--env", "CartPole-v1", "--search", "algo.lrr=uniform(0.1,1)"), "did you mean 'lr'"),
    (("tune", "ppo", "--env", "CartPole-v1", "--seeds", "1,2", "--search", "x=1"), "use --run.seed"),
    (("tune", "ppo", "--env", "CartPole-v1", "--run.dir", "a", "--search", "x=1"), "use --dir"),
    (("tune", "ppo", "--env", "CartPole-v1", "--run.stop", "a", "1", "--search", "x=1"), "use --scheduler"),
    ((*SEARCH, "--schedular", "asha"), "did you mean --scheduler"),
    ((*SEARCH, "--scheduler", "bohb"), "--scheduler bohb"),
    ((*SEARCH, "--run.eval-episodes", "0", "--metric", "eval/mean_reward"), "no trial would have it"),
    (("tune", "nowhere/x"), "no study.json"),
)


def test_a_wrong_line_is_told_before_anything_is_made(cli: Cli, tmp_path: Path) -> None:
    for line, message in WRONG:
        said = cli(*line)
        assert said.code in (2, 5)
        assert message in said.err, said.both
        assert not list(tmp_path.iterdir())
