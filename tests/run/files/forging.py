"""Runs, checkpoints and datasets as an attacker would write them: every checksum right, and something else wrong."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import penstock as ps
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.datasets.reader import index_bytes, open_dataset, read_index
from penstock.datasets.writer import DatasetWriter
from penstock.run.checkpoints.manifest import manifest_bytes, read_manifest
from penstock.run.files.stored_experiment import config_bytes
from penstock.run.playing.evaluation import evaluate
from penstock.run.plots.figure import plot_runs
from penstock.run.recording import record
from penstock.run.replays.stored_replay import fields, open_replay, summary
from tests.datasets.test_reader import EPISODES, SPEC

Settings = dict[str, Any]
LIMIT_S = 60
SMALL = ps.ReplaySettings(capacity=100)
EXPERIMENT = ps.Experiment(
    "CartPole-v1",
    ps.DQN(learning_starts=16, batch_size=8, replay_ratio=1.0, replay=SMALL, net=ps.Net(hidden=(8,))),
    ps.SerialSampler(T=8, B=2),
    ps.RunConfig(steps=64, seed=2, eval_episodes=1, progress="off"),
)


def checkpoint(run: Path) -> Path:
    return next(path for path in sorted((run / "checkpoints").iterdir()) if path.name.isdecimal())


def seal(path: Path, files: dict[str, bytes]) -> None:
    """Replaces files of a checkpoint and writes a manifest that agrees with them."""
    manifest = read_manifest(path)
    entries = {name: dict(entry) for name, entry in manifest.files.items()}
    for name, data in files.items():
        (path / name).write_bytes(data)
        entries[name] |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "MANIFEST.json").write_bytes(manifest_bytes(manifest.step, manifest.score, entries))


def with_config(change: Callable[[Settings], Any]) -> Callable[[Path], Path]:
    """A forgery that changes settings in place, under a checksum of its own."""

    def forge(run: Path) -> Path:
        file = run / "config.json"
        content = json.loads(file.read_text())
        change(content["experiment"])
        file.write_bytes(config_bytes(content["experiment"], content["spec"]))
        return file

    return forge


def with_state(change: Callable[[Settings], Any]) -> Callable[[Path], Path]:
    """A forgery that changes the text of state.json in place."""

    def forge(run: Path) -> Path:
        path = checkpoint(run)
        state = json.loads((path / "state.json").read_text())
        change(state)
        seal(path, {"state.json": json.dumps(state).encode()})
        return path

    return forge


def with_array(header: Settings, rest: bytes = b"") -> Callable[[Path], Path]:
    """A forgery that gives the first array of the replay another header, and no content to go with it."""

    def forge(run: Path) -> Path:
        path = checkpoint(run)
        seal(path, {"replay-000.npy": npy(header) + rest})
        return path / "replay-000.npy"

    return forge


def npy(header: Settings) -> bytes:
    text = repr({"fortran_order": False, **header}).encode()
    return b"\x93NUMPY\x01\x00" + (4086).to_bytes(2, "little") + text.ljust(4085) + b"\n"


def in_place_of(name: str, make: Callable[[Path], Any]) -> Callable[[Path], Path]:
    """A forgery that puts a FIFO, link or folder where a file or folder of a run is."""

    def forge(run: Path) -> Path:
        path = run / name
        if path.exists():
            path.rename(path.with_name(f"{path.name}.was"))
        make(path)
        return path

    return forge


def with_index(change: Callable[[Settings], Any]) -> Callable[[Path], Path]:
    """A forged dataset: its index is changed in place, under a checksum of its own."""

    def forge(folder: Path) -> Path:
        with DatasetWriter(folder / "data", SPEC, env="Toy-v0") as writer:
            for one in EPISODES:
                writer.append(one)
        index = read_index(folder / "data")
        change(index)
        (folder / "data" / "dataset.json").write_bytes(index_bytes(index))
        return folder / "data"

    return forge


def elsewhere(name: str) -> Callable[[Path], Path]:
    """A forged dataset, one of whose files is a link to the same content outside of it."""

    def forge(folder: Path) -> Path:
        data = with_index(lambda index: None)(folder)
        (data / name).rename(folder / "outside")
        (data / name).symlink_to(folder / "outside")
        return data

    return forge


def openers(run: Path, to: Path) -> dict[str, Callable[[], Any]]:
    """All that opens a run."""
    return {
        "load": lambda: ps.load(run),
        "evaluate": lambda: evaluate(run, episodes=1),
        "record": lambda: record(run, to / "recorded", 1),
        "resume": lambda: ps.resume(run, {"run.steps": 80}),
        "init": lambda: ps.train(EXPERIMENT, init=run),
        "replay": lambda: (replay := open_replay(run), summary(replay), fields(replay)),
        "plot": lambda: plot_runs([run], to / "plot.png"),
    }


def read_all(folder: Path) -> None:
    source = open_dataset(folder)
    source.verify()
    for i in range(len(source.lengths)):
        source.episode(i)


@contextmanager
def no_hang() -> Generator[None]:
    def late(number: int, frame: Any) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def deep(levels: int) -> bytes:
    return b'{"experiment": ' + b'{"a": ' * levels + b"1" + b"}" * levels + b', "spec": {}}'


HUGE = EnvSpec(LeafSpec("box", (1 << 40,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))).to_plain()


def huge_spec(run: Path) -> Path:
    file = run / "config.json"
    file.write_bytes(config_bytes(json.loads(file.read_text())["experiment"], HUGE))
    return file


def deep_config(run: Path) -> Path:
    (run / "config.json").write_bytes(deep(100_000))
    return run / "config.json"


def deep_manifest(run: Path) -> Path:
    path = checkpoint(run) / "MANIFEST.json"
    path.write_bytes(deep(100_000))
    return path


def linked(target: str) -> Callable[[Path], Any]:
    return lambda path: path.symlink_to(target)


def tensor(*shape: int) -> Settings:
    """A tensor of this shape in the text of a state, with four bytes."""
    return {"$own": [["float32", [*shape], [*range(len(shape))]], {"$array": ["|u1", [4], 0]}]}


def replay_of(state: Settings) -> Settings:
    return state["policy"]["experience"]["replay"]


def array_like(array: np.ndarray[Any, Any]) -> Settings:
    return {"descr": array.dtype.str, "shape": array.shape}
