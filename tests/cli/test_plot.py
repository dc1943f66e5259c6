from __future__ import annotations

import re
import shutil
from pathlib import Path

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
    assert cli("plot", "all", "--metric", "train/nothing").code == 2


def test_plot_names_what_is_no_run_and_remarks_on_one_without_the_metric(
    cli: Cli, trained: Path, tmp_path: Path
) -> None:
    said = cli("plot", str(trained), "nope", "nada", "--out", "x/y.png")
    assert said.code == 2
    assert "nothing to plot in nope, nada" in said.err
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
