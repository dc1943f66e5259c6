from __future__ import annotations

import re
import shutil
from pathlib import Path

from penstock.run.plots.run_table import run_dirs
from tests.cli.short import Cli


def test_plot(cli: Cli, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "all" / "a")
    shutil.copytree(trained, tmp_path / "all" / "b")
    said = cli("plot", "all", "--out", "two.svg", "--metric", "train/value_loss")
    assert said.code == 0, said.both
    assert said.out == "two.svg\n"
    assert (tmp_path / "two.svg").read_text().startswith("<?xml")
    assert cli("plot", "all/a", "all/b").out == "all/a/plots/rollout-ep_rew_mean.png\n"
    assert cli("plot", "all", "--out", "x.gif").code == 2
    said = cli("plot", "all", "--metric", "train/value_los")
    assert (said.code, "no row with 'train/value_los'" in said.err) == (2, True)
    assert "did you mean 'train/value_loss'" in said.err


def test_plot_prints_tables_and_draws_what_is_asked_for(cli: Cli, trained: Path) -> None:
    run = str(trained)
    said = cli("plot", run, "--table", "md")
    assert said.code == 0 and said.out.startswith("rollout/ep_rew_mean, last values:\n\n| environment | curve |")
    assert "\\end{tabular}" in cli("plot", run, "--table", "latex", "--smooth", "3").out
    assert cli("plot", run, "--x", "updates", "--out", "u.svg").code == 0
    assert "Updates" in Path("u.svg").read_text() and "Wall time" not in Path("u.svg").read_text()
    assert cli("plot", run, "--kind", "profiles").out == f"{run}/plots/rollout-ep_rew_mean-profiles.png\n"
    for words in (("--x", "wall"), ("--out", "x.png"), ("--kind", "profiles")):
        said = cli("plot", run, "--table", "md", *words)
        assert (said.code, f"{words[0]} is of a picture" in said.err) == (2, True)


def test_plot_names_what_is_no_run_and_remarks_on_one_without_the_metric(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    said = cli("plot", str(trained), "nope", "nada", "--out", "x/y.png")
    assert said.code == 2
    assert "no run in nope: there is no such folder; expected the directory of a run" in said.err
    assert not (tmp_path / "x").exists()
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "metrics.jsonl").touch()
    said = cli("plot", str(trained), "early", "--out", "x.png")
    assert (said.code, said.out) == (0, "x.png\n")
    assert re.fullmatch(r"penstock: left out, without a row with 'rollout/ep_rew_mean': \S+early\n", said.err)


def test_plot_where_nothing_can_be_written(cli: Cli, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = cli("plot", str(trained), "--out", "file/x.png")
    assert said.code in (2, 5)
    assert "file" in said.err


def test_plot_finds_the_seeds_beside_the_directory_that_was_named(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for name in ("cp-s1", "cp-s12", "cp-sac"):
        shutil.copytree(trained, tmp_path / name)
    said = cli("plot", "cp")
    assert (said.code, said.out) == (0, "cp-plots/rollout-ep_rew_mean.png\n")
    assert not (tmp_path / "cp").exists()
    assert run_dirs(tmp_path / "cp") == [tmp_path / "cp-s1", tmp_path / "cp-s12"]
    (tmp_path / "cp").mkdir()
    assert run_dirs(tmp_path / "cp") == [tmp_path / "cp-s1", tmp_path / "cp-s12"]
    shutil.copytree(trained, tmp_path / "cp" / "own")
    assert run_dirs(tmp_path / "cp") == [tmp_path / "cp" / "own"]


def test_runs_prints_the_table_in_the_order_asked_for(cli: Cli, trained: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(trained, tmp_path / "runs" / name)
    with (tmp_path / "runs" / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999999}\n')
    for words, names in (((), "ab"), (("--sort", "steps"), "ab"), (("--sort", "steps", "--reverse"), "ba")):
        said = cli("runs", *words)
        assert said.code == 0
        assert [line.split()[0] for line in said.out.splitlines()[1:3]] == [f"runs/{name}" for name in names]
    said = cli("runs", "--sort", "stps")
    assert said.code == 2 and "no run has 'stps'; did you mean 'steps'" in said.err
