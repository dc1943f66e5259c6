"""Single metrics read without parsing rows are those of `read_metrics`, whatever stands in the file, and follow it."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from penstock.run.log import MetricsLog, read_metrics
from penstock.run.plots import columns
from penstock.run.plots.columns import MetricColumns
from penstock.run.plots.run_table import read_run

KEYS = ("a", 'b"\\, "a', "é/ü", "step", "", "c")


def fresh(run: Path) -> MetricColumns:
    found = MetricColumns(run)
    found.refresh()
    return found


def expected(run: Path, key: str) -> list[list[float]]:
    rows = read_metrics(run)
    return [[float(row["step"]), float(row[key])] for row in rows if math.isfinite(row.get(key, math.nan))]


def row(step: int, **values: object) -> bytes:
    return json.dumps({"step": step, **values}).encode() + b"\n"


FILES = {
    "empty": b"",
    "written": b"".join(row(i, c=1, a=i / 7, **{'b"\\, "a': -2.0, "é/ü": 1e-300}) for i in range(50)),
    "null": row(1, a=None) + row(2, a=3.0) + row(3, b=1),
    "torn at the end": row(1, a=1.5) + b'{"step": 2, "a": 2.',
    "torn in the middle": row(1, a=1.5) + b'{"step": 2, "a": 2.{"step": 3, "a": 7.0}\n' + row(4, a=4),
    "torn at a name": row(1, a=1.5) + b'{"step": 2, "a": 2.5, "c{"step": 3, "a": 7.0}\n' + row(4, a=4),
    "torn, then whole": row(1, a=1.5) + b'{"step": 2, "a": 2.5\n' + row(4, a=4),
    "another spelling": b'{"a":1,"step":5}\n{"step":6,"a":2}\n' + row(7, a=3),
    "another spelling later": row(7, a=3) + b'{"x": {"y": 1}, "step": 8, "a": 4}\n{"step": 9, "x": [1, {}], "a": 5}\n',
    "odd numbers": row(1, a=True) + b'{"step": 2, "a": NaN}\n{"step": 3, "a": -Infinity}\n{"step": 4, "a": 1e999}\n',
    "odd values": row(1, a="1") + row(2, a=[1]) + row(3, a=10**400) + row(10**40, a=1) + row(-5, a=2),
    "no numbers": row(1, a=1) + b'{"step": 2, "a": 1.2.3}\n{"step": 3, "a": 0-1}\n{"step": true, "a": 1}\n{"step": 1.5, "a": 1}\n',
    "not JSON": b"\x00\xff" * 40 + b"\n[]\n5\n" + row(3, a=1),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("block", [256, 1 << 24])
def test_they_are_those_of_the_rows(name: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(FILES[name])
    monkeypatch.setattr(columns, "_BLOCK", block)
    monkeypatch.setattr(columns, "_FIRST_BLOCK", block // 4)
    for key in KEYS[:3]:
        assert fresh(tmp_path).points(key).tolist() == expected(tmp_path, key), key
    keys = {key for row in read_metrics(tmp_path) for key in row} - {"step"}
    every = {key: points for key in keys if (points := expected(tmp_path, key))}
    assert {key: found.tolist() for key, found in fresh(tmp_path).every().items()} == every
    last = fresh(tmp_path).last(KEYS)
    for key in ("a", "é/ü", "c"):
        values = [value for _, value in expected(tmp_path, key)]
        assert last.get(key) == (values[-1] if values else None), key
    if name != "odd values":
        assert last["step"] == max((x["step"] for x in read_metrics(tmp_path)), default=0)


def test_they_follow_a_file_that_grows_is_replaced_or_shrinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(row(1, a=1.0, x=4) + b'{"step": 2, ')
    found = fresh(tmp_path)
    before = found.refresh()
    assert found.every().keys() == {"a", "x"}
    assert found.points("a").tolist() == [[1, 1]] and found.last(["a"]) == {"step": 1, "a": 1, "x": 4}
    with path.open("ab") as file:
        file.write(b'"a": 5}\n')
    assert found.points("a").tolist() == [[1, 1]], "nothing is looked at before `refresh`"
    assert found.refresh() != before
    read: list[int] = []
    real = columns._pairs  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(columns, "_pairs", lambda data, key: read.append(len(data)) or real(data, key))
    assert found.points("a").tolist() == [[1, 1], [2, 5]] and read == [len(row(2, a=5))]
    assert found.last(["a"]) == {"step": 2, "a": 5, "x": 4}
    assert {key: points.tolist() for key, points in found.every().items()} == {"a": [[1, 1], [2, 5]], "x": [[1, 4]]}
    path.with_name("new").write_bytes(row(1, a=9.0) + row(2, b=0) + row(3, a=7))
    os.replace(path.with_name("new"), path)
    found.refresh()
    assert found.points("a").tolist() == [[1, 9], [3, 7]] == found.every()["a"].tolist() and found.last(["a"]) == {
        "step": 3,
        "a": 7,
        "b": 0,
    }
    path.write_bytes(row(1, a=2.0))
    found.refresh()
    assert found.points("a").tolist() == [[1, 2]] and found.last(["a"]) == {"step": 1, "a": 2}


def test_the_last_numbers_of_a_long_run_are_found_wherever_they_stand(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.write(1, {"eval/mean_reward": 4.0, "rollout/ep_rew_mean": 1.0})
    log.write(2, {"eval/mean_reward": math.nan, "rollout/ep_rew_mean": 2.0, "time/time_elapsed": 7200.0})
    for step in range(3, 3000):
        log.write(step, {f"train/{i}": 0.5 for i in range(20)})
    for step in (1500, 1600, 1700):
        log.write(step, {"eval/taken_at": 2999, "eval/other": 1.0})
    log.close()
    assert (tmp_path / "metrics.jsonl").stat().st_size > 10 * columns._FIRST_BLOCK  # pyright: ignore
    found = read_run(tmp_path)
    assert (found.steps, found.return_, found.evaluation, found.hours) == (2999, 2.0, 4.0, 2.0)


def test_only_so_many_metrics_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(row(1, a=1, b=2, c=3))
    monkeypatch.setattr(columns, "_MOST_KEPT", 2)
    found = fresh(tmp_path)
    assert [found.points(key).tolist() for key in "abca"] == [[[1, 1]], [[1, 2]], [[1, 3]], [[1, 1]]]
    assert list(found._columns) == ["c", "a"]  # pyright: ignore[reportPrivateUsage]


def test_a_link_out_of_the_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(row(1, a=1))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="leads out"):
        fresh(tmp_path / "run").points("a")
    with pytest.raises(OSError, match="leads out"):
        read_run(tmp_path / "run")
