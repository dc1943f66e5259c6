"""One run in full: each part as it is stored, and whatever another hand has put there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.core.trace import LEARN, SERVE, STEP, Track
from penstock.run.log import MetricsLog
from penstock.run.timeline import chrome_trace, read_trace
from penstock.view.catalog import Catalog
from penstock.view.details import run_details, run_signature, section_of
from tests.run.plots.made import PPO_META, make_run, settings


def details(run: Path) -> dict[str, Any]:
    entry = Catalog(run).refresh()[0]
    found = run_details(entry)
    json.dumps(found, allow_nan=False)
    return found


def test_a_run_says_what_it_is_and_where_it_ran(tmp_path: Path) -> None:
    meta = {**PPO_META, "command": ["penstock", "train", "ppo"], "host": "h\x1b", "git": None, "threads": 1}
    plain = settings(3, lr=1e-3, net={"class": "x:Net", "hidden": [64, 64], "deep": {"a": {}}}, clip=None)
    run = make_run(tmp_path / "a", 2.0, {**meta, "versions": {"torch": "2.8", "numpy": "2.1"}}, plain)
    found = details(run)
    assert found["facts"] == [["command", "penstock train ppo"], ["host", "h\\x1b"], ["threads", "1"]]
    assert found["versions"] == "torch 2.8, numpy 2.1" and found["state"] == "done" and found["planned"] == 1003
    assert (found["steps"], found["seconds"], found["name"]) == (10_000, 300.0, "a")
    flat = dict(found["settings"])
    assert flat["algo"] == "PPO" and flat["algo.lr"] == "0.001" and flat["algo.net"] == "Net"
    assert flat["algo.net.hidden"] == "[64, 64]" and flat["algo.clip"] == "None" and flat["run.steps"] == "1003"
    assert found["places"] == [["sampler.B", "16"]] and not found["crash"]
    (run / "crash").mkdir()
    assert details(run)["crash"]


def test_metrics_stand_in_sections(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "a")
    keys = (
        "rollout/ep_rew_mean",
        "rollout/ep_rew_max",
        "group/runners",
        "sampler/lag",
        "sampler/env_wait",
        "mine/x",
        "faults/oom",
    )
    for step in (2, 1):
        log.write(step, {**dict.fromkeys(keys, float(step)), "train/nan": math.nan})
    log.close()
    sections = {one["title"]: {c["metric"]: c for c in one["charts"]} for one in details(tmp_path / "a")["sections"]}
    assert {title: list(charts) for title, charts in sections.items()} == {
        "Returns and episodes": ["rollout/ep_rew_max", "rollout/ep_rew_mean"],
        "Load": ["sampler/env_wait"],
        "Learners and runners": ["group/runners", "sampler/lag"],
        "Faults": ["faults/oom"],
        "Others": ["mine/x"],
    }
    chart = sections["Returns and episodes"]["rollout/ep_rew_mean"]
    assert (chart["x"], chart["y"], chart["folded"]) == ([1, 2], [1, 2], False)
    assert sections["Returns and episodes"]["rollout/ep_rew_max"]["folded"]
    assert section_of("sampler/lag_max") == "Learners and runners" and section_of("nothing") == "Others"


def test_evaluations_and_changes_are_read_as_far_as_they_are_whole(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "eval").mkdir()
    rows: list[Any] = [
        {"step": 20, "eval/mean_reward": 2.0, "returns": [1.0, 3.0], "lengths": [5, 7]},
        {"step": 10, "returns": [4.0, "x", None, math.nan]},
        {"step": 30, "returns": "none", "eval/mean_reward": None},
        {"step": 40, "eval/mean_reward": 9.0},
        [1],
    ]
    (run / "eval" / "evaluations.jsonl").write_text(
        "".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 50, "ret'
    )
    changes = [{"step": 5, "set": {"algo.lr": 0.1}}, {"step": 6, "env_call": ["set_level", [2]]}, {"step": 7, "set": 5}]
    (run / "changes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in changes))
    found = details(run)
    assert found["evaluations"] == [
        {"step": 10, "mean": 4, "low": 4, "high": 4, "episodes": 1},
        {"step": 20, "mean": 2, "low": 1, "high": 3, "std": 1, "length": 6, "episodes": 2},
        {"step": 40, "mean": 9, "low": 9, "high": 9, "episodes": 0},
    ]
    assert found["changes"] == [["5", "algo.lr", "0.1"], ["6", "env_call", "set_level [2]"], ["7", "", "5"]]


TRACKS = [
    Track("learner", 1, np.array([[0, 5_000, LEARN], [1_000, 2_000, SERVE]]), 0),
    Track("worker 0", 2, np.array([[500, 1_500, STEP]]), 0),
]


def test_the_trace_in_a_runs_folder_is_its_timeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", meta=PPO_META, settings={"run": {"trace": "/elsewhere/trace.json"}})
    assert details(run)["timeline"] is None and "/elsewhere/trace.json" in details(run)["timeline_note"]
    (run / "a.json").write_text("{}")
    (tmp_path / "foreign.json").write_text(json.dumps(chrome_trace(TRACKS)))
    (run / "b.json").symlink_to(tmp_path / "foreign.json")
    assert details(run)["timeline"] is None
    (run / "trace.json").write_text(json.dumps(chrome_trace(TRACKS)))
    rows = [
        ("learner", [(0.0, 5.0, "learn")]),
        ("action server", [(1.0, 1.0, "serve")]),
        ("worker 0", [(0.5, 1.0, "step")]),
    ]
    assert read_trace(run / "trace.json", run) == rows
    found = details(run)["timeline"]
    assert found == {
        "kinds": ["learn", "serve", "step"],
        "rows": [
            {"title": "learner", "spans": [0, 5, 0]},
            {"title": "action server", "spans": [1, 1, 1]},
            {"title": "worker 0", "spans": [0.5, 1, 2]},
        ],
    }


@pytest.mark.parametrize(
    "events",
    [
        "5", "[5]", '[{"pid": 1}]', '[{"pid": [], "tid": 0, "ph": "X", "name": "a", "ts": 1, "dur": 1}]',
        '[{"pid": 1, "tid": 0, "ph": "X", "name": "a", "ts": NaN, "dur": 1}]',
        '[{"pid": 1, "tid": 0, "ph": "X", "name": "a", "ts": "x", "dur": 1}]',
        '[{"pid": 1, "tid": 0, "ph": "X", "name": "a", "ts": 1, "dur": Infinity}]',
        '[{"pid": 1, "tid": 0, "ph": "X", "name": "a", "ts": -Infinity, "dur": 1}]', "[" * 200_000,
    ],
)  # fmt: skip
def test_what_is_no_trace_is_no_timeline(events: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (run / "trace.json").write_text(f'{{"traceEvents": {events}}}')
    found = details(run)["timeline"]
    assert found is None or not any(row["spans"] for row in found["rows"])


def test_its_signature_changes_with_everything_that_its_page_shows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")

    def seen() -> str:
        return run_signature(Catalog(run).refresh()[0])

    known = [seen()]
    assert seen() == known[0]
    (run / "videos").mkdir()
    known.append(seen())
    (run / "videos" / "1.mp4").write_bytes(b"x")
    known.append(seen())
    (run / "eval").mkdir()
    (run / "eval" / "evaluations.jsonl").write_text('{"step": 1}\n')
    known.append(seen())
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    known.append(seen())
    assert len(set(known)) == 5
