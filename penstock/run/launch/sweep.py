"""A sweep, which is a grid of settings x seeds, and the queue of its runs in launch.json."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.core.errors import CheckpointError, ConfigError, legible, nearest
from penstock.core.files import require_name, write_atomic
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.files.stored import read_json, require_plain_run, undamaged
from penstock.run.files.trust import VARIABLE, is_trusted, remember

STATE, LOGS = "launch.json", "logs"
PROMPT = "$ python -m penstock "
"""Start of the first line of each attempt in a log; the command follows."""
Status = Literal["waiting", "running", "stopped", "finished", "failed"]
_FORMAT = 1


@dataclass(frozen=True)
class Sweep:
    """Every combination of a grid of settings, each with every seed."""

    algo: str
    options: tuple[str, ...]
    """Options of `penstock train` for all runs."""
    grid: Mapping[str, tuple[str, ...]]
    """Values of each option that varies, as text: {"algo.lr": ("1e-3", "3e-4")}."""
    seeds: tuple[int, ...] = (0,)

    @property
    def digest(self) -> str:
        """sha256 of all that decides which commands are executed."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    def combinations(self) -> list[dict[str, str]]:
        """Every combination of the grid's values; without a grid a single empty one."""
        return [dict(zip(self.grid, values)) for values in itertools.product(*self.grid.values())]

    def arguments(self, combination: Mapping[str, str]) -> list[str]:
        """ALGO and options of `penstock train` for a combination, without seed and directory."""
        varied = [text for key, value in combination.items() for text in _option(key, value)]
        return [self.algo, *self.options, *varied]


@dataclass
class Run:
    """One run of a sweep and its state."""

    name: str
    """Name of its directory, such as `lr=1e-3_s1`."""
    arguments: list[str]
    """Arguments of `penstock train`, without directory."""
    status: Status = "waiting"
    """`running` in the file of a killed launcher means interrupted; `stopped` means ended by a signal."""
    code: int | None = None
    """Exit code of the last attempt, negative for the signal that killed it."""
    attempts: int = 0
    seconds: float = 0.0
    """Duration of all attempts that ended."""


@dataclass
class Queue:
    """The runs of a sweep in their directory. `save` after every change."""

    folder: Path
    sweep: Sweep
    runs: list[Run] = field(default_factory=list[Run])

    def save(self) -> None:
        """Writes launch.json. Raises CheckpointError if the disk refuses."""
        runs = {run.name: {k: v for k, v in asdict(run).items() if k not in ("name", "arguments")} for run in self.runs}
        text = json.dumps({"format": _FORMAT, **asdict(self.sweep), "runs": runs}, indent=1)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.folder / STATE, text.encode() + b"\n")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.folder / STATE}: {error.strerror or error}; choose another --dir"
            ) from error

    def run_dir(self, run: Run) -> Path:
        """The run directory of a run."""
        return self.folder / run.name

    def log(self, run: Run) -> Path:
        """The log of a run: the output of all attempts, one after the other."""
        return self.folder / LOGS / f"{run.name}.log"

    def command(self, run: Run) -> list[str]:
        """Arguments of `penstock` that begin a run, or resume it if it has a checkpoint."""
        if has_checkpoint(self.run_dir(run)):
            return ["resume", str(self.run_dir(run))]
        return ["train", *run.arguments, "--run.dir", str(self.run_dir(run))]

    def count(self, status: Status) -> int:
        """Number of runs in a state."""
        return sum(run.status == status for run in self.runs)


def split_values(text: str) -> tuple[str, ...]:
    """The values between commas outside brackets: "linear(1e-3, 0),3e-4" holds two."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return tuple(part.strip() for part in parts)


def new_queue(folder: Path, sweep: Sweep) -> Queue:
    """A queue of every run of a sweep, all waiting; nothing is written yet."""
    require_name(folder, "directory")
    last = [key.split(".")[-1] for key in sweep.grid]
    short = {key: key if last.count(key.split(".")[-1]) > 1 else key.split(".")[-1] for key in sweep.grid}
    runs: dict[str, Run] = {}
    for combination, seed in itertools.product(sweep.combinations(), sweep.seeds):
        words = [f"{short[key]}={_in_a_name(value)}" for key, value in combination.items()]
        name = base = "_".join([*words, f"s{seed}"])[:200]
        if "/" in name:
            raise ConfigError(
                f"a run would be named {name!r}; expected settings in the grid, such as algo.lr=1e-3,3e-4"
            )
        for n in itertools.count(2):
            if name not in runs:
                break
            name = f"{base}-{n}"
        arguments = [*sweep.arguments(combination), "--run.seed", str(seed)]
        runs[name] = Run(name, arguments)
    return Queue(folder, sweep, list(runs.values()))


def read_queue(folder: Path) -> Queue:
    """Reads the queue of a directory; runs that were running count as stopped, or as finished if they are.

    Raises CheckpointError if there is none, or launch.json is damaged.
    """
    file = folder / STATE
    if not os.path.isfile(file):
        raise CheckpointError(f"{folder} holds no {STATE}; begin with penstock launch ALGO --env ID --dir {folder}")
    require_plain_run(folder, (STATE, LOGS))
    with undamaged(file):
        plain: dict[str, Any] = read_json(file)
        if plain["format"] != _FORMAT:
            raise CheckpointError(f"{file} has format {plain['format']}; this penstock reads {_FORMAT}")
        grid = {str(key): tuple(map(str, values)) for key, values in plain["grid"].items()}
        sweep = Sweep(plain["algo"], tuple(plain["options"]), grid, tuple(map(int, plain["seeds"])))
        queue = new_queue(folder, sweep)
        for run in queue.runs:
            stored = plain["runs"][run.name]
            if stored["status"] not in get_args(Status):
                raise ValueError(f"status {stored['status']!r} of {run.name}")
            run.status, run.code = stored["status"], None if stored["code"] is None else int(stored["code"])
            run.attempts, run.seconds = int(stored["attempts"]), float(stored["seconds"])
    for run in queue.runs:
        if run.status in ("running", "stopped", "failed") and _is_finished(queue.run_dir(run)):
            run.status, run.code = "finished", 0  # its end was not seen, or it was resumed by hand
        elif run.status == "running":
            run.status = "stopped"
    return queue


def require_trust(queue: Queue, trust: bool) -> None:
    """Raises CheckpointError unless this user made a sweep, trusts its directory, or trusts it from now on."""
    file = queue.folder / STATE
    if trust:
        remember(file, queue.sweep.digest)
    elif not is_trusted(file, queue.sweep.digest):
        raise CheckpointError(
            f"{legible(file)} is no sweep that you launched here, and it would execute {len(queue.runs)} runs such as "
            f"{shown(queue.command(queue.runs[0])) if queue.runs else 'none'}. If you know who wrote it: --trust, "
            f"which is needed once, or {VARIABLE}={legible(queue.folder.absolute())}; see docs/security.md"
        )


def require_same(queue: Queue, sweep: Sweep) -> None:
    """Raises ConfigError that names the difference between a sweep and the one in a directory."""
    for name, before, now in (
        ("ALGO", queue.sweep.algo, sweep.algo),
        (
            "--grid",
            {k: ",".join(v) for k, v in queue.sweep.grid.items()},
            {k: ",".join(v) for k, v in sweep.grid.items()},
        ),
        ("--seeds", list(queue.sweep.seeds), list(sweep.seeds)),
        ("the options of train", " ".join(queue.sweep.options), " ".join(sweep.options)),
    ):
        if before != now:
            raise ConfigError(
                f"{queue.folder} holds another sweep: {name} was {before} and is {now}. Choose another --dir, or go on "
                f"with what is there by `penstock launch {queue.folder}`"
            )


def choose(queue: Queue, retry: Sequence[str] | None) -> list[Run]:
    """The runs to execute: those waiting or stopped; with `retry` those that failed, all ([]) or by name."""
    if retry is None:
        return [run for run in queue.runs if run.status in ("waiting", "stopped")]
    by_name = {run.name: run for run in queue.runs}
    for name in retry:
        if name not in by_name:
            raise ConfigError(f"--retry {name}: no such run in {queue.folder}; {nearest(name, by_name)}")
        if by_name[name].status != "failed":
            raise ConfigError(f"--retry {name}: it is {by_name[name].status}; expected a run that failed")
    return [run for run in queue.runs if run.status == "failed" and (not retry or run.name in retry)]


def has_checkpoint(run_dir: Path) -> bool:
    """True if a run has a checkpoint, whole or broken: `resume` names a broken one, the launcher removes none."""
    folder = run_dir / "checkpoints"
    return folder.is_dir() and any(path.name[0].isdigit() for path in folder.iterdir())


def shown(command: Sequence[str]) -> str:
    """A command as text for a shell."""
    return shlex.join(["python", "-m", "penstock", *command])


def _in_a_name(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", value.strip("[]() \"'")).rstrip("-")


def _option(key: str, value: str) -> list[str]:
    """An option as arguments: `--algo.lr 1e-3`; of a value in square brackets `--algo.net.hidden 64 64`."""
    if value.startswith("[") and value.endswith("]"):
        return [f"--{key}", *split_values(value[1:-1])]
    return [f"--{key}={value}"] if value.startswith("-") else [f"--{key}", value]


def _is_finished(run_dir: Path) -> bool:
    try:
        return bool(load_checkpoint(find_checkpoint(run_dir)).state["trainer"]["finished"])
    except (CheckpointError, LookupError, TypeError):
        return False
