from __future__ import annotations

import csv
import errno
import json
import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import CheckpointError
from penstock.core.files import write_atomic
from penstock.run.log import Appender, MetricsLog, RowReader, read_metrics


def csv_rows(run_dir: Path) -> list[dict[str, str]]:
    with open(run_dir / "progress.csv", newline="") as file:
        return list(csv.DictReader(file))


def fill(run_dir: Path, steps: range, resume_step: int | None = None, scale: float = 1.0) -> None:
    log = MetricsLog(run_dir, resume_step)
    for step in steps:
        log.write(step, {"loss": step * scale})
    log.close()


def test_rows_come_back_from_every_file(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "a" / "b")
    log.write(1, {"loss": 0.1, "n": 3})
    log.write(np.int64(2), {"loss": np.float32(0.5), "n": torch.tensor(4)})  # type: ignore[arg-type]
    log.close()
    log.close()
    run = tmp_path / "a" / "b"
    assert read_metrics(run) == [{"step": 1, "loss": 0.1, "n": 3}, {"step": 2, "loss": 0.5, "n": 4.0}]
    assert csv_rows(run) == [{"step": "1", "loss": "0.1", "n": "3"}, {"step": "2", "loss": "0.5", "n": "4.0"}]


def test_new_columns_leave_empty_cells_behind(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"a": 1.0})
    log.write(2, {'b,"x"': 2.0})
    log.write(3, {"a": 3.0})
    log.close()
    assert csv_rows(tmp_path) == [
        {"step": "1", "a": "1.0", 'b,"x"': ""},
        {"step": "2", "a": "", 'b,"x"': "2.0"},
        {"step": "3", "a": "3.0", 'b,"x"': ""},
    ]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "progress.csv"]


def test_a_new_name_in_every_row_makes_the_csv_anew_a_few_times_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def counted(path: Path, data: bytes) -> None:
        made.append(len(data))
        write_atomic(path, data)

    monkeypatch.setattr("penstock.run.log.write_atomic", counted)
    log = MetricsLog(tmp_path)
    for step in range(300):
        log.write(step, {"a": step, f"opponent/{step}": 1.0})
        lines = (tmp_path / "progress.csv").read_text().splitlines()
        assert len(lines) == step + 2 and len({line.count(",") for line in lines}) == 1  # only columns may be missing
    log.close()
    size = (tmp_path / "progress.csv").stat().st_size
    assert len(made) <= 11 and sum(made) < 3 * size  # at 0, 1, 2, 4, ..., 256 rows, and at the end
    rows = csv_rows(tmp_path)
    assert len(rows) == 300 and len(rows[0]) == 302
    assert all(row[f"opponent/{s}"] == ("1.0" if s == step else "") for step, row in enumerate(rows) for s in (0, step))


def test_after_a_kill_the_csv_is_behind_by_columns_and_made_anew_on_opening(tmp_path: Path) -> None:
    def write(log: MetricsLog, steps: range) -> MetricsLog:
        for step in steps:
            log.write(step, {"a": step / 7, "b": 1.0} | ({"late": 1.0} if step >= 2 else {}) | {f"c{step // 3}": 1.0})
        return log

    write(MetricsLog(tmp_path / "killed"), range(1, 4))  # not closed
    rows = csv_rows(tmp_path / "killed")
    assert [row["step"] for row in rows] == ["1", "2", "3"] and list(rows[2]) == ["step", "a", "b", "c0", "late"]
    resumed = MetricsLog(tmp_path / "killed", 3)
    assert csv_rows(tmp_path / "killed")[2]["c1"] == "1.0"
    write(resumed, range(4, 11)).close()
    write(MetricsLog(tmp_path / "whole"), range(1, 11)).close()
    for name in ("metrics.jsonl", "progress.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_not_a_number_is_null_in_json_and_nan_in_csv(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"a": math.nan, "b": -math.inf, "c": 1.0})
    log.write(2, {"a": math.inf, "b": 1.0, "c": 1.0})
    log.close()
    text = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(text[0]) == {"step": 1, "a": None, "b": None, "c": 1.0}
    assert json.loads(text[1]) == {"step": 2, "a": None, "b": 1.0, "c": 1.0}
    assert csv_rows(tmp_path)[0] == {"step": "1", "a": "nan", "b": "nan", "c": "1.0"}
    assert csv_rows(tmp_path)[1]["a"] == "nan"
    assert math.isnan(read_metrics(tmp_path)[0]["a"])


def test_resume_cuts_later_rows_everywhere(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 11))
    fill(tmp_path, range(7, 9), resume_step=6, scale=100.0)
    expected = [(s, float(s)) for s in range(1, 7)] + [(7, 700.0), (8, 800.0)]
    assert [(row["step"], row["loss"]) for row in read_metrics(tmp_path)] == expected
    assert [(int(row["step"]), float(row["loss"])) for row in csv_rows(tmp_path)] == expected


def test_a_resumed_run_leaves_the_files_of_one_that_never_stopped(tmp_path: Path) -> None:
    def rows(log: MetricsLog, steps: range) -> None:
        for step in steps:
            log.write(step, {"a": math.nan if step == 2 else step / 7} | ({"late": 1.0} if step >= 5 else {}))
        log.close()

    rows(MetricsLog(tmp_path / "whole"), range(1, 9))
    rows(MetricsLog(tmp_path / "cut"), range(1, 7))
    rows(MetricsLog(tmp_path / "cut", 3), range(4, 9))
    for name in ("metrics.jsonl", "progress.csv"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_opening_without_a_step_keeps_every_row(tmp_path: Path) -> None:
    fill(tmp_path, range(1, 4))
    fill(tmp_path, range(4, 6))
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in csv_rows(tmp_path)] == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("torn", ['{"step": 4, "lo', '{"step": 4, "loss": 4.0}', '{"step": 4, "lo\n', "\x00\x00\x00"])
def test_a_torn_last_line_is_left_out_and_not_built_on(tmp_path: Path, torn: str) -> None:
    fill(tmp_path, range(1, 4))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write(torn)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]
    fill(tmp_path, range(5, 6), resume_step=4)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3, 5]
    assert [row["step"] for row in csv_rows(tmp_path)] == ["1", "2", "3", "5"]
    assert torn.strip() not in (tmp_path / "metrics.jsonl").read_text()


def test_what_is_no_number_in_a_row_is_nan_and_what_is_no_row_left_out(tmp_path: Path) -> None:
    big = "9" * 4_000
    odd = [f'{{"step": 2, "a": "x", "b": [1], "c": {big}, "d": 2}}', '{"step": true}', f'{{"step": {big}}}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(['{"step": 1, "a": 1.5}', *odd, '{"step": 3}', ""]))
    first, second, third = read_metrics(tmp_path)
    assert (first, third) == ({"step": 1, "a": 1.5}, {"step": 3})
    assert second["d"] == second["step"] == 2
    assert all(math.isnan(second[name]) for name in "abc")


def test_a_line_longer_than_any_row_ends_the_reading(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    os.truncate(file, 1 << 42)
    assert read_metrics(tmp_path) == [{"step": 1}]


def test_read_metrics_of_nothing(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


@pytest.mark.slow
def test_kill_loses_no_row_that_was_written(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from penstock.run.log import MetricsLog\n"
        "log = MetricsLog(Path(sys.argv[1]))\n"
        "for step in range(50): log.write(step, {'x': step})\n"
        "os.kill(os.getpid(), 9)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=200, check=False, env=env)
    assert done.returncode == -9
    assert len(read_metrics(tmp_path)) == len(csv_rows(tmp_path)) == 50


def test_a_full_disk_loses_rows_but_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"x": 1.0})
    write = os.write

    def full(fd: int, data: bytes) -> int:
        """Takes three bytes of a piece, then none, as a disk does."""
        if len(data) > 3 and not taken:
            taken.append(write(fd, data[:3]))
            return 3
        taken.clear()
        raise OSError(errno.ENOSPC, "No space left on device")

    taken: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.warns(UserWarning, match="No space left"):
            log.write(2, {"x": 2.0})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            log.write(3, {"x": 3.0})
    assert log.lost_rows == 2
    log.write(4, {"x": 4.0, "new": 1.0})
    log.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 4]
    assert [row["step"] for row in csv_rows(tmp_path)] == ["1", "4"]


def test_a_csv_that_fell_behind_catches_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"x": 1.0})

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.warns(UserWarning, match="falls behind"):
            log.write(2, {"y": 2.0})
        log.write(3, {"y": 2.0})
    log.write(4, {"x": 4.0})
    log.close()
    assert log.lost_rows == 0
    assert [(row["step"], row["y"]) for row in csv_rows(tmp_path)] == [("1", ""), ("2", "2.0"), ("3", "2.0"), ("4", "")]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl", "progress.csv"]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot keep the metrics of .*file"):
        MetricsLog(tmp_path / "file")


def test_a_log_with_another_name_is_not_written_through_it(tmp_path: Path) -> None:
    """A hard link, as of a copy by `cp -al` or of a run that came from elsewhere: what it links to stays as it was."""
    (tmp_path / "mine").write_text('{"step": 1}\n')
    os.link(tmp_path / "mine", tmp_path / "metrics.jsonl")
    log = Appender(tmp_path / "metrics.jsonl")
    log.write(b"more\n")
    log.close()
    assert (tmp_path / "mine").read_text() == '{"step": 1}\n'
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\nmore\n'


def test_a_reader_follows_a_file_that_grows(tmp_path: Path) -> None:
    reader = RowReader(tmp_path / "metrics.jsonl")
    assert [*reader.rows()] == []
    log = MetricsLog(tmp_path)
    log.write(1, {"a": 1.5, "b": math.nan})
    (first,) = reader.rows()
    assert first["step"] == 1 and first["a"] == 1.5 and math.isnan(first["b"])
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "a": 2')
        file.flush()
        assert [*reader.rows()] == []
        file.write(b".0}\nno row\n")
    log.write(3, {"a": 3.0})
    assert [*reader.rows()] == [{"step": 2, "a": 2.0}, {"step": 3, "a": 3.0}]
    log.close()
