from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.launch import sweep as sweep_module
from penstock.run.launch.sweep import (
    Sweep,
    choose,
    has_checkpoint,
    new_queue,
    read_queue,
    require_same,
    require_trust,
    shown,
    split_values,
)  # fmt: skip
from tests.run.launch.fakes import queue_of, statuses

# Sweeps


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-3,3e-4", ("1e-3", "3e-4")),
        ("1", ("1",)),
        ("linear(1e-3, 0), 3e-4", ("linear(1e-3, 0)", "3e-4")),
        ("[64,64],[128,128]", ("[64,64]", "[128,128]")),
        ("a,,b", ("a", "", "b")),
    ],
)
def test_values_between_commas_outside_brackets(text: str, values: tuple[str, ...]) -> None:
    assert split_values(text) == values


def test_every_combination_with_every_seed(tmp_path: Path) -> None:
    grid = {
        "algo.lr": ("1e-3", "linear(1e-3, 0)"),
        "sampler.B": ("8",),
        "algo.net.hidden": ("[64,64]",),
        "algo.x": ("-1",),
    }
    queue = new_queue(tmp_path, Sweep("ppo", ("--env", "X"), grid, (1, 2)))
    assert [run.name for run in queue.runs] == [
        "lr=1e-3_B=8_hidden=64-64_x=-1_s1", "lr=1e-3_B=8_hidden=64-64_x=-1_s2",
        "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s1", "lr=linear-1e-3-0_B=8_hidden=64-64_x=-1_s2",
    ]  # fmt: skip
    first = queue.runs[2]
    assert queue.command(first) == [
        "train", "ppo", "--env", "X", "--algo.lr", "linear(1e-3, 0)", "--sampler.B", "8", "--algo.net.hidden", "64", "64",
        "--algo.x=-1", "--run.seed", "1", "--run.dir", str(tmp_path / first.name),
    ]  # fmt: skip
    assert "'linear(1e-3, 0)'" in shown(queue.command(first))


def test_names_are_unique_and_say_which_setting_is_meant(tmp_path: Path) -> None:
    grid = {"algo.T": ("a/b", "a-b"), "sampler.T": ("1",)}
    names = [run.name for run in new_queue(tmp_path, Sweep("ppo", (), grid)).runs]
    assert names == ["algo.T=a-b_sampler.T=1_s0", "algo.T=a-b_sampler.T=1_s0-2"]
    assert [run.name for run in queue_of(tmp_path, seeds=(1, 2)).runs] == ["s1", "s2"]


def test_the_file_brings_the_queue_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(tmp_path / "s", "a", "b", "c", "d", "e")
    for run, status in zip(queue.runs, ("waiting", "running", "failed", "stopped", "finished")):
        run.status = status  # pyright: ignore
        run.attempts, run.seconds = 2, 1.5
    queue.runs[2].code = 3
    queue.save()
    back = read_queue(tmp_path / "s")
    assert list(statuses(back).values()) == ["waiting", "stopped", "failed", "stopped", "finished"]
    assert [run.name for run in choose(back, None)] == ["what=a_s0", "what=b_s0", "what=d_s0"]
    assert [run.name for run in choose(back, [])] == [run.name for run in choose(back, ["what=c_s0"])] == ["what=c_s0"]
    assert (back.runs[2].code, back.runs[2].attempts, back.runs[2].seconds) == (3, 2, 1.5)
    monkeypatch.setattr(
        sweep_module, "_is_finished", lambda run_dir: run_dir.name in ("what=a_s0", "what=b_s0", "what=c_s0")
    )  # pyright: ignore
    assert list(statuses(read_queue(tmp_path / "s")).values()) == [
        "waiting",
        "finished",
        "finished",
        "stopped",
        "finished",
    ]
    for names, message in ((["what=f_s0"], "did you mean"), (["what=a_s0"], "it is waiting")):
        with pytest.raises(ConfigError, match=message):
            choose(back, names)


def test_another_sweep_is_refused(tmp_path: Path) -> None:
    queue = queue_of(tmp_path, "a", seeds=(1,))
    require_same(queue, Sweep("ppo", ("--env", "X"), {"algo.what": ("a",)}, (1,)))
    for sweep, what in (
        (Sweep("a2c", ("--env", "X"), {"algo.what": ("a",)}, (1,)), "ALGO was ppo and is a2c"),
        (Sweep("ppo", ("--env", "Y"), {"algo.what": ("a",)}, (1,)), "options of train was --env X and is --env Y"),
        (Sweep("ppo", ("--env", "X"), {"algo.what": ("a", "b")}, (1,)), "--grid was .* and is .*a,b"),
        (Sweep("ppo", ("--env", "X"), {"algo.what": ("a",)}, (1, 2)), r"--seeds was \[1\] and is \[1, 2\]"),
    ):
        with pytest.raises(ConfigError, match=what):
            require_same(queue, sweep)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no launch\.json"):
        read_queue(tmp_path)
    queue_of(tmp_path, "a").save()
    file = tmp_path / "launch.json"
    good = json.loads(file.read_text())
    for text in ("", "[]", "{}", json.dumps({**good, "format": 9}), json.dumps({**good, "runs": {}})):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"launch\.json"):
            read_queue(tmp_path)


def test_a_sweep_of_others_is_refused_with_what_it_would_execute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = Sweep("ppo", ("--env", "X", "--import", "os"), {"algo.lr": ("1e-3",)}, (1,))
    new_queue(tmp_path, sweep).save()
    with pytest.raises(CheckpointError, match=r"(?s)launch\.json is no sweep that you launched.*--import os.*--trust"):
        require_trust(read_queue(tmp_path), False)
    monkeypatch.setenv("PENSTOCK_TRUST", str(tmp_path))
    require_trust(read_queue(tmp_path), False)
    monkeypatch.delenv("PENSTOCK_TRUST")
    require_trust(read_queue(tmp_path), True)
    require_trust(read_queue(tmp_path), False)  # it is on the list by now
    file = tmp_path / "launch.json"
    content = json.loads(file.read_text())
    content["runs"]["lr=1e-3_s1"]["arguments"] = ["ppo", "--import", "evil"]
    file.write_text(json.dumps(content))
    assert "evil" not in read_queue(tmp_path).runs[0].arguments
    file.write_text(json.dumps({**content, "grid": {"../../x": ["1"]}}))
    with pytest.raises(ConfigError, match=r"a run would be named '/x=1_s1'"):
        read_queue(tmp_path)
    (tmp_path / "logs").symlink_to("/tmp")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/logs: it leads out of"):
        read_queue(tmp_path)


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*file/s/launch\.json"):
        queue_of(tmp_path / "file" / "s", "a").save()


def test_resumes_where_there_is_a_checkpoint(tmp_path: Path) -> None:
    queue = queue_of(tmp_path, "a")
    run_dir = queue.run_dir(queue.runs[0])
    assert queue.command(queue.runs[0])[0] == "train"
    (run_dir / "checkpoints" / ".tmp-7-1-ab").mkdir(parents=True)
    assert not has_checkpoint(run_dir)
    (run_dir / "checkpoints" / "000000000007").mkdir()
    assert queue.command(queue.runs[0]) == ["resume", str(run_dir)]
