"""The list of runs: what it says of each, and that it follows files that change, half-written and hostile ones too."""

from __future__ import annotations

import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.view import catalog as module
from penstock.view.catalog import Catalog
from tests.run.plots.made import PPO_META, make_run, settings
from tests.view.served import three_runs


@pytest.fixture(autouse=True)
def _looks_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)


def by_name(catalog: Catalog) -> dict[str, Any]:
    listing = catalog.listing()
    json.dumps(listing, allow_nan=False)
    return {run["name"]: run for run in listing["runs"]}


def test_runs_are_listed_by_curve_with_their_last_numbers(tmp_path: Path) -> None:
    listing = Catalog(three_runs(tmp_path)).listing()
    assert [group["name"] for group in listing["groups"]] == ["ppo, lr=0.001", "ppo, lr=0.01"]
    assert [len(group["runs"]) for group in listing["groups"]] == [2, 1]
    assert [group["settings"] for group in listing["groups"]] == [{"lr": "0.001"}, {"lr": "0.01"}]
    assert listing["metrics"] == ["eval/mean_reward", "rollout/ep_rew_mean", "time/time_elapsed"]
    run = next(run for run in listing["runs"] if run["name"] == "a-s1")
    assert run["seed"] == 1 and run["steps"] == 10_000 and run["return"] == 20 and run["evaluation"] == 21
    assert run["hours"] == 300 / 3600 and run["planned"] == 1001 and run["state"] == "done" and run["faults"] == 0


def test_it_follows_runs_that_grow_begin_change_and_go(tmp_path: Path) -> None:
    catalog = Catalog(three_runs(tmp_path))
    first, ids = catalog.signature(), {run["id"] for run in catalog.listing()["runs"]}
    assert catalog.signature() == first
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20000, "rollout/ep_rew_mean": 7.0, "faults/restarts": 2, "faults/eval/x": 1}\n{"step": 3')
    assert catalog.signature() != first
    assert by_name(catalog)["b"]["steps"] == 20_000 and by_name(catalog)["b"]["faults"] == 2
    make_run(tmp_path / "deep" / "c", 1.0, PPO_META, settings(0))
    assert set(by_name(catalog)) == {"a-s0", "a-s1", "b", "deep/c"}
    second = catalog.signature()
    (tmp_path / "b" / "config.json").write_text(json.dumps({"experiment": settings(0, lr=5.0)}))
    assert catalog.signature() != second and "lr=5" in str(catalog.listing()["groups"])
    shutil.rmtree(tmp_path / "a-s1")
    assert set(by_name(catalog)) == {"a-s0", "b", "deep/c"} and ids >= {
        by_name(catalog)[x]["id"] for x in ("a-s0", "b")
    }


def test_a_folder_without_runs_is_empty_until_one_begins(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path)
    assert catalog.listing()["runs"] == [] and catalog.listing()["metrics"] == []
    make_run(tmp_path / "a")
    assert list(by_name(catalog)) == ["a"]
    shutil.rmtree(tmp_path)
    assert catalog.listing()["runs"] == []


def test_a_run_by_itself_and_seeds_beside_a_name_are_listed(tmp_path: Path) -> None:
    three_runs(tmp_path)
    assert list(by_name(Catalog(tmp_path / "b"))) == ["b"]
    assert sorted(by_name(Catalog(tmp_path / "a"))) == ["a-s0", "a-s1"]


def test_half_written_folders_are_listed_as_far_as_they_go(tmp_path: Path) -> None:
    for name, meta, config, metrics in (
        ("empty", None, None, ""),
        (
            "torn",
            '{"env": "E", "al',
            '{"experiment": {"algo"',
            '{"step": 1, "rollout/ep_rew_mean": 2.5}\n{"step": 2, "ro',
        ),
        ("odd", "[1]", '{"experiment": {"run": 5, "algo": []}}', "[]\nnull\n{}\n"),
        ("deep", '{"env": 5}', "[" * 100_000, '{"step": 9}\n'),
        ("seeds", '{"env": "E", "algo": "a"}', '{"experiment": {"run": {"seed": "x", "steps": []}}}', '{"step": 9}\n'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(metrics)
        if meta is not None and config is not None:
            (tmp_path / name / "meta.json").write_text(meta)
            (tmp_path / name / "config.json").write_text(config)
    found = by_name(Catalog(tmp_path))
    assert {name: run["steps"] for name, run in found.items()} == {
        "deep": 9,
        "empty": 0,
        "odd": 0,
        "seeds": 9,
        "torn": 1,
    }
    assert found["torn"]["return"] == 2.5 and not any(run["error"] for run in found.values())


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside" / "run", meta={**PPO_META, "env": "Secret"}, settings=settings())
    runs = tmp_path / "runs"
    make_run(runs / "own")
    (runs / "linked").symlink_to(outside)
    (runs / "half").mkdir()
    (runs / "half" / "metrics.jsonl").symlink_to(outside / "metrics.jsonl")
    make_run(runs / "meta")
    (runs / "meta" / "meta.json").symlink_to(outside / "meta.json")
    (runs / "meta" / "config.json").symlink_to(outside / "config.json")
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe" / "metrics.jsonl")
    found = by_name(Catalog(runs))
    assert "linked" not in found and "Secret" not in str(Catalog(runs).listing())
    assert "leads out" in found["half"]["error"] and "plain file" in found["pipe"]["error"]
    (tmp_path / "way").symlink_to(runs)
    assert "own" in by_name(Catalog(tmp_path / "way")), "the folder itself may be a link"


def test_names_are_text_without_control_characters(tmp_path: Path) -> None:
    names = ["<img src=x onerror=alert(1)>", "a\x1b[31m", "\u202eabc", "q\"'`&amp;", "snow \u2603"]
    for name in names:
        make_run(tmp_path / name, meta={"env": name, "algo": name}, settings=settings())
    make_run(tmp_path / os.fsdecode(b"\xff\xfe"))
    found = by_name(Catalog(tmp_path))
    assert all(name.isprintable() for name in found) and len(found) == 6
    assert "<img src=x onerror=alert(1)>" in found and "snow \u2603" in found
    assert all(
        group["name"].isprintable() and group["env"].isprintable() for group in Catalog(tmp_path).listing()["groups"]
    )


@pytest.mark.parametrize(
    ("lock", "state"),
    [
        ({"pid": os.getpid(), "host": socket.gethostname()}, "running"),
        ({"pid": 1 << 22, "host": socket.gethostname()}, "killed"),
        ({"pid": 1 << 22, "host": "elsewhere"}, "running"),
        ({"pid": "1", "host": socket.gethostname()}, "killed"),
        ({}, "ended"),
        ([], "ended"),
    ],
)
def test_a_run_is_said_to_go_on_by_its_lock(lock: Any, state: str, tmp_path: Path) -> None:
    make_run(tmp_path / "a", meta=PPO_META, settings={"run": {"steps": 1e6}})
    catalog = Catalog(tmp_path)
    first = catalog.signature()
    assert by_name(catalog)["a"]["state"] == "ended"
    (tmp_path / "a" / ".lock").write_text(json.dumps(lock))
    assert by_name(catalog)["a"]["state"] == state and (catalog.signature() == first) == (state == "ended")
