"""`penstock replay info|export` shows what a run has stored, and writes it so that numpy gives back the record itself."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.tree import tree_map
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.replays.export import export
from penstock.run.replays.stored import open_replay, summary
from penstock.run.trainer import Trainer

pytestmark = pytest.mark.timeout(60)

T, B = 8, 2
UNIFORM = ps.ReplaySettings(capacity=100)  # 50 rows a slot, in a ring of 51
SMALL = ps.Net(hidden=(8,))
DQN = ps.DQN(learning_starts=16, batch_size=8, replay_ratio=1.0, replay=UNIFORM, net=SMALL)
PRIORITIZED = replace(DQN, replay=replace(UNIFORM, index="prioritized", fresh_priority="agent"))
SEQUENCES = ps.R2D1(
    learning_starts=16, batch_size=2, train_length=8, burn_in=8, state_interval=8, n_step=1,
    replay=replace(UNIFORM, capacity=160, index="prioritized"), net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=4),
)  # fmt: skip
CASES = {
    "uniform": ("CartPole-v1", DQN),
    "prioritized": ("CartPole-v1", PRIORITIZED),
    "frames": ("stacked_frames:Dot", replace(DQN, replay=replace(UNIFORM, deduplicate_frames=True))),
    "sequences": ("CartPole-v1", SEQUENCES),
    "box": ("Pendulum-v1", ps.SAC(learning_starts=16, batch_size=8, replay_ratio=1.0, replay=UNIFORM, net=SMALL)),
}
Cli = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command in this process: code, out with its wrapped lines joined, err."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*argv: str | Path) -> SimpleNamespace:
        capsys.readouterr()
        try:
            code: Any = main([str(x) for x in argv])
        except SystemExit as error:
            code = error.code
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=" ".join(out.split()), err=err)

    return run


class Recorded:
    """A run, and every row that it collected, with nothing in between."""

    def __init__(self, run: Path, case: str, batches: int) -> None:
        env, algo = CASES[case]
        exp = ps.Experiment(env, algo, ps.SerialSampler(T, B), ps.RunConfig(steps=10**6, dir=str(run), seed=2))
        self.run, rows = run, []
        with Trainer(exp, run) as trainer:
            for _ in range(batches):
                trainer.train()
                rows.append(trainer.sampler.last_batch.copy())
            self.own: Any = trainer.policy.replay_schedule
            self.checkpoint = trainer.save()
            from penstock.run.rundir import write_config

            write_config(trainer)
        last = rows[-1]

        def joined(get: Callable[[Any], Any], one_more: bool = False) -> Any:
            parts = [get(batch)[:T] for batch in rows] + ([get(last)[T:]] if one_more else [])
            return np.concatenate(parts)

        self.record = {
            "obs": joined(lambda x: x.obs, True), "first": joined(lambda x: x.first, True), "action": joined(lambda x: x.action),
            "reward": joined(lambda x: x.reward), "terminated": joined(lambda x: x.terminated),
            "truncated": joined(lambda x: x.truncated), "valid": joined(lambda x: x.valid),
        }  # fmt: skip
        self.states = [tree_map(np.copy, batch.state) for batch in rows]
        self.length = batches * T


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Recorded]]:
    made: dict[tuple[str, int], Recorded] = {}
    folder = str(Path(__file__).parent.parent / "run")
    sys.path.insert(0, folder)

    def make(case: str, batches: int = 20) -> Recorded:
        if (case, batches) not in made:
            made[case, batches] = Recorded(tmp_path_factory.mktemp(case), case, batches)
        return made[case, batches]

    yield make
    sys.path.remove(folder)


def opened(path: Path) -> dict[str, Any]:
    """The arrays of an export, as any reader would get them."""
    if path.is_dir():
        return {file.stem: np.load(file, allow_pickle=False) for file in path.glob("*.npy")}
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files if name != "about.json"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batches", [2, 20], ids=["partly full", "gone round"])
@pytest.mark.parametrize("to", ["replay.npz", "folder"])
def test_an_export_is_the_record(
    case: str, batches: int, to: str, recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path
) -> None:
    run = recorded(case, batches)
    said = cli("replay", "export", run.run, "--to", tmp_path / to)
    assert (said.code, said.err) == (0, "")
    found = opened(tmp_path / to)
    rows = found["row"]
    kept = run.own.replay.storage
    assert rows.tolist() == list(range(kept.oldest, run.length))
    assert len(rows) < kept.rows
    for name, whole in run.record.items():
        more = name in ("obs", "first")
        used = np.ones((len(rows) + more, B), bool)
        if name in ("action", "reward"):
            used = run.record["valid"][rows]  # of a row that is not valid the null action and 0 are kept
        expected = whole[rows[0] : run.length + more]
        np.testing.assert_array_equal(found[name][used], expected[used].astype(found[name].dtype), err_msg=name)
        assert found[name].shape == expected.shape


def test_sample_rows_are_what_can_be_drawn(recorded: Callable[..., Recorded], tmp_path: Path) -> None:
    for case in CASES:
        run = recorded(case)
        export(open_replay(run.run), tmp_path / case)
        found, index = opened(tmp_path / case), run.own.replay.index
        stride = run.own.replay.view.stride
        assert found["sample.row"].tolist() == [u * stride for u in range(index.tail, index.head)]
        assert found["sample.row"].min() >= found["row"].min()
        name = "sample.mass" if "sample.mass" in found else "sample.usable"
        assert (name == "sample.mass") == (case in ("prioritized", "sequences"))
        assert np.count_nonzero(found[name]) == len(run.own.replay)
        drawn = run.own.replay.draw(200, np.random.default_rng(0))
        at = drawn.unit - index.tail
        assert (found[name][at, drawn.slot] > 0).all()


def test_recurrent_states_come_with_their_rows(recorded: Callable[..., Recorded], tmp_path: Path) -> None:
    run = recorded("sequences")
    export(open_replay(run.run), tmp_path / "x")
    found = opened(tmp_path / "x")
    assert found["state.row"].tolist() == list(range(found["state.row"][0], run.length, 8))
    for i, row in enumerate(found["state.row"]):
        for name in ("c", "h"):
            np.testing.assert_array_equal(found[f"state.{name}"][i], run.states[row // T][name])


def test_frames_can_stay_single(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    run = recorded("frames")
    assert cli("replay", "export", run.checkpoint, "--to", tmp_path / "x.npz", "--frames").code == 0
    found = opened(tmp_path / "x.npz")
    rows = found["row"]
    stacks = run.record["obs"][rows[0] : run.length + 1]
    np.testing.assert_array_equal(found["obs"], stacks[:, :, -1])
    assert found["obs.age"].max() == 3
    # The stack of a row: its own frame and the three before, the episode's first repeated.
    t, b = 20, 1
    ages = np.minimum(found["obs.age"][t, b], np.arange(3, -1, -1))
    np.testing.assert_array_equal(found["obs"][t - ages, b], stacks[t, b])


def test_info_says_what_is_stored(recorded: Callable[..., Recorded], cli: Cli) -> None:
    run = recorded("prioritized")
    said = cli("replay", "info", run.run)
    assert (said.code, said.err) == (0, "")
    own = run.own
    for text in (
        f"{run.checkpoint}, step {own.collected:,}", "100 rows in 2 slots", "110 and 159 of 160 rows",
        f"{own.collected:,} environment steps appended, {own.trained:,} gradient steps by the ratio",
        f"prioritized, {len(own.replay):,} samples can be drawn", "largest ever", "a tenth of the samples takes",
        "info['q']", "obs │ float32 │ [51, 2, 4] │ 1,632", "index.mass │ float64 │ [51, 2]",
    ):  # fmt: skip
        assert text in said.out
    again = cli("replay", "info", run.checkpoint)
    assert again.out.partition("capacity")[2] == said.out.partition("capacity")[2]


def test_info_takes_a_file_of_a_checkpoint_and_an_export(
    recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path
) -> None:
    run = recorded("uniform")
    assert "100 rows in 2 slots" in cli("replay", "info", run.checkpoint / "replay-000.npy").out
    for to in ("x.npz", "folder"):
        export(open_replay(run.run), tmp_path / to)
        said = cli("replay", "info", tmp_path / to)
        assert said.code == 0
        assert "penstock replay export 2" in said.out
        assert "first │ bool │ [51, 2] │ 102" in said.out
        assert "action │ int64 │ [50, 2] │ 800" in said.out
    with np.load(tmp_path / "x.npz") as file:
        about = json.loads(file["about.json"])
    assert about["spec"]["obs"]["leaf"][:2] == ["box", [4]]


def test_episodes_that_are_kept_whole(recorded: Callable[..., Recorded]) -> None:
    """Counted row by row: CartPole pays 1 a step, so a return is a length."""
    for case in ("uniform", "box"):
        run = recorded(case)
        replay = open_replay(run.run)
        x, returns = run.record, []
        for b in range(B):
            total: float | None = None
            for t in range(replay.oldest, run.length):
                total = 0.0 if x["first"][t, b] else total
                if not x["valid"][t, b]:
                    total = None
                if total is not None:
                    total += float(np.float32(x["reward"][t, b]))
                if total is not None and (x["terminated"] | x["truncated"])[t, b]:
                    returns.append(total)
                    total = None
        said = summary(replay)["episodes"]
        if case == "box":  # an episode of 200 steps does not fit
            assert not returns
            assert said == "none is kept from its first row to its last"
        else:
            mean = f"mean {np.mean(returns):.4g} (min {min(returns):.4g}, max {max(returns):.4g})"
            assert len(returns) > 1
            assert said == f"{len(returns)} kept whole; return {mean}; length {mean}"


def test_what_has_no_replay_says_why(recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path) -> None:
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T, B),
                           ps.RunConfig(steps=16, dir=str(tmp_path / "ppo"), progress="off", eval_episodes=0)))  # fmt: skip
    said = cli("replay", "info", tmp_path / "ppo")
    assert said.code == 5
    assert "holds no replay: its algorithm learns from each batch once" in said.err
    said = cli("replay", "info", tmp_path)
    assert said.code == 2
    assert "is no run, checkpoint or exported replay" in said.err
    run = tmp_path / "run"
    shutil.copytree(recorded("uniform").run, run)
    victim = find_checkpoint(run) / "replay-002.npy"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    said = cli("replay", "export", run, "--to", tmp_path / "x.npz")
    assert said.code == 5
    assert f"{victim} is damaged" in said.err
    victim.unlink()
    assert f"{victim} is missing" in cli("replay", "info", victim.parent).err
    assert not (tmp_path / "x.npz").exists()
    (tmp_path / "about.json").write_text("{}")
    assert "is no exported replay: its format is None" in cli("replay", "info", tmp_path).err


def test_an_export_overwrites_nothing_and_leaves_nothing_half_written(
    recorded: Callable[..., Recorded], cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("frames")
    (tmp_path / "x.npz").write_text("mine")
    said = cli("replay", "export", run.run, "--to", tmp_path / "x.npz")
    assert (said.code, "is there already" in said.err) == (2, True)
    assert (tmp_path / "x.npz").read_text() == "mine"
    assert cli("replay", "export", run.run).code == 2
    assert cli("replay", "info", run.run, "--to", tmp_path / "y").code == 2
    alone = tmp_path / "alone"
    shutil.copytree(run.checkpoint, alone)
    with pytest.raises(CheckpointError, match=r"frame by frame.*config\.json.*--frames"):
        export(open_replay(alone), tmp_path / "y.npz")
    export(open_replay(alone), tmp_path / "single.npz", frames=True)
    replay = open_replay(run.run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"y\.npz needs .* MB and 0\.0 MB are free"):
        export(replay, tmp_path / "y.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "single.npz", "x.npz"]
