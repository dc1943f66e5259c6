from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.run.log import TAKEN_AT, MetricsLog
from penstock.run.tracking import sender as module
from penstock.run.tracking.sender import Sender
from tests.run.tracking import made
from tests.run.tracking.made import HERE, LINE, Told, ended, run_dir, write

NAME = f"{HERE}:Told"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (Told.rows, Told.files, Told.runs, Told.ended, Told.fails):
        part.clear()
    monkeypatch.setattr(module, "_RETRY_S", 0.01)


def until(condition: Callable[[], Any], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def note(run: Path) -> dict[str, Any]:
    return json.loads((run / "trackers" / f"{NAME.replace(':', '.')}.json").read_text())


def test_it_sends_rows_settings_and_files(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=3)
    (run / "videos").mkdir()
    (run / "videos" / "b.mp4").write_bytes(b"x")
    (run / "videos" / ".half.tmp-1.mp4").write_bytes(b"x")
    assert ended(Sender(run, NAME)) == []
    assert Told.rows == [(step, {"a": float(step)}) for step in (1, 2, 3)]
    assert Told.files == [("config.json", "settings"), ("meta.json", "versions"), ("b.mp4", "video")]
    (told,) = Told.runs
    assert told.name == "ppo CartPole-v1 run" and told.sent_step == -1 and told.versions["versions"] == {"torch": "2"}
    assert told.settings == {"class": "x:Y", "algo.lr": 1e-3, "algo.net.hidden": "[8, 8]", "run.steps": 5,
                             "run.stop": "{}"}  # fmt: skip
    assert Told.ended == [f"tracker-{NAME}"]


def test_a_second_one_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=2)
    ended(Sender(run, NAME))
    write(run, range(3, 5))
    (run / "meta.json").write_text("{}")
    assert ended(Sender(run, NAME)) == []
    assert Told.steps() == [1, 2, 3, 4]
    assert Told.files == [("config.json", "settings"), ("meta.json", "versions"), ("meta.json", "versions")]
    first, second = Told.runs
    assert first.id == second.id and len(first.id) == 12 and second.sent_step == 2


def test_without_its_note_all_is_sent_anew_as_another_tracked_run(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=2)
    ended(Sender(run, NAME))
    (run / "trackers" / f"{NAME.replace(':', '.')}.json").unlink()
    assert ended(Sender(run, NAME)) == []
    assert Told.steps() == [1, 2, 1, 2] and len({told.id for told in Told.runs}) == 2


def test_rows_that_a_resumed_run_repeats_are_not_sent_again(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=6)
    ended(Sender(run, NAME))
    write(run, range(4, 9), resume_step=3, scale=10.0)
    ended(Sender(run, NAME))
    assert Told.steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert Told.rows[-2:] == [(7, {"a": 70.0}), (8, {"a": 80.0})]


def test_several_rows_of_one_step_are_told_apart(tmp_path: Path) -> None:
    """An evaluation beside training has the step of its policy, and stands where it was taken into account."""
    run = run_dir(tmp_path / "run")
    rows = [(2, {"b": 0.0}), (1, {"eval/mean_reward": 1.0, TAKEN_AT: 4.0}), (4, {"a": 1.0}), (4, {"a": 2.0})]
    for stop in (2, 3, 4):
        log = MetricsLog(run, None)
        for step, row in rows[stop - 1 if stop > 2 else 0 : stop]:
            log.write(step, row)
        log.close()
        ended(Sender(run, NAME))
    assert Told.rows == rows


def test_a_cut_in_the_same_process_sends_none_twice(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=5)
    live = Sender(run, NAME)
    until(lambda: len(Told.rows) == 5)
    log = MetricsLog(run, 2)
    live.rewind()
    for step in range(3, 8):
        log.write(step, {})  # shorter than those that were cut
        live.wake()
    log.close()
    assert ended(live) == []
    assert Told.steps() == [1, 2, 3, 4, 5, 6, 7]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    log = MetricsLog(run)
    log.write(1, {"a": math.nan, "b": math.inf, "c": 1.0})
    log.close()
    ended(Sender(run, NAME))
    assert Told.rows == [(1, {"c": 1.0})]


def test_one_that_fails_gets_every_row_later_once_and_in_order(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=5)
    Told.fails |= {"start": 2, "write 3": 3}
    live = Sender(run, NAME)
    until(lambda: live.trouble)
    assert live.trouble == f"RuntimeError: no start, at {made.__file__}:{LINE}"
    until(lambda: len(Told.rows) == 5)
    assert Told.steps() == [1, 2, 3, 4, 5]
    assert len({told.id for told in Told.runs}) == 1 and len(Told.runs) == 4
    assert ended(live) == []


def test_one_that_always_fails_is_said_with_what_sends_the_rest(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=3)
    Told.fails |= {"write 2": 1000}
    (said,) = ended(Sender(run, NAME))
    assert said == (
        f"tracker {NAME} failed (RuntimeError: no write 2, at {made.__file__}:{LINE}), 2 rows not sent: "
        f"penstock track {run} sends them"
    )
    Told.fails.clear()
    ended(Sender(run, NAME))
    assert Told.steps() == [1, 2, 3]


def test_a_file_that_is_refused_holds_up_no_row_and_is_tried_again_by_the_next(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=1)
    Told.fails |= {"settings": 1}
    live = Sender(run, NAME)
    until(lambda: Told.files)
    write(run, range(2, 4))
    (said,) = ended(live)
    assert "failed (config.json: RuntimeError: no settings, at " in said and "), files may not be sent" in said
    assert Told.steps() == [1, 2, 3] and Told.files == [("meta.json", "versions")]
    assert ended(Sender(run, NAME)) == []
    assert Told.files == [("meta.json", "versions"), ("config.json", "settings")]


def test_one_whose_server_never_answers_costs_less_than_a_second_and_no_row(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=4)
    live = Sender(run, f"{HERE}:Silent")
    until(lambda: live._state == "start")  # pyright: ignore[reportPrivateUsage]
    began = time.monotonic()
    (said,) = ended(live)
    assert time.monotonic() - began < 5.0, "0.7 s on an idle machine"
    assert "does not answer, 4 rows not sent" in said and not Told.rows


def test_one_that_hangs_is_waited_for_in_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CALL_S", 0.1)
    live = Sender(run_dir(tmp_path / "run", rows=3), f"{HERE}:Hanging")
    until(lambda: Told.rows)
    (said,) = ended(live)
    assert "does not answer, 2 rows not sent" in said
    monkeypatch.setattr(module, "_CALL_S", 60.0)
    live = Sender(run_dir(tmp_path / "other", rows=3), f"{HERE}:Hanging")
    until(lambda: len(Told.rows) == 2)
    assert "2 rows not sent" in ended(live, most_s=0.1)[0]


def test_one_in_its_pause_is_tried_once_more_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 60.0)
    Told.fails |= {"start": 1}
    live = Sender(run_dir(tmp_path / "run", rows=2), NAME)
    until(lambda: live.trouble)
    assert ended(live) == [] and Told.steps() == [1, 2]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"id": "x"}', '{"id": "x", "at": 1, "count": 1, "step": 1, "files": 3}']
)
def test_a_damaged_note_begins_anew(tmp_path: Path, text: str) -> None:
    run = run_dir(tmp_path / "run", rows=2)
    (run / "trackers").mkdir()
    (run / "trackers" / f"{NAME.replace(':', '.')}.json").write_text(text)
    assert ended(Sender(run, NAME)) == []
    assert Told.steps() == [1, 2] and note(run)["at"] == 2 and note(run)["id"] == Told.runs[0].id != "x"


def test_a_note_that_cannot_be_written_is_trouble_and_sends_none_twice(tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run", rows=3)
    (run / "trackers").write_text("in the way")
    (said,) = ended(Sender(run, NAME))
    assert "failed (FileExistsError" in said and not Told.rows
