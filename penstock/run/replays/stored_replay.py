"""The replay in a checkpoint, read from its files without the run's environment and networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.machine import counted
from penstock.replay.columns import Array, Rows
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.checkpoints.cleanup import candidates
from penstock.run.checkpoints.manifest import MANIFEST, good_manifest, read_manifest
from penstock.run.files import RUN_EXPECTED
from penstock.run.files.stored_experiment import as_checkpoint_error

_EXPERIENCE = "experience"


@dataclass(frozen=True)
class StoredReplay:
    """The replay of a checkpoint; its arrays are memory-mapped files.

    Rows are numbered from the first that was ever written; row n of an array [rows, slots, ...] lies at n % len(array).
    """

    path: Path
    """The checkpoint's directory."""
    step: int
    state: Mapping[str, Any]
    """The result of `Replay.state_dict`."""
    trained: int
    """Gradient steps taken."""
    arrays: Mapping[str, Array]
    history: int
    """Earlier rows that a row's observation may need: one less than the frames of a stack, else 0."""
    policy: str = ""
    """Id of the replay's policy; "" if the run has one."""

    @property
    def capacity(self) -> int:
        """Rows in a full replay, over all slots."""
        rows, slots = self.state["prepared"]
        return (rows - 1) * slots

    @property
    def slots(self) -> int:
        return int(self.state["prepared"][1])

    @property
    def head(self) -> int:
        """Number of the first row without an action, of which only the observation is known: one after the newest."""
        return int(self.state["storage"]["head"])

    @property
    def oldest(self) -> int:
        """Number of the oldest row; with stacks kept frame by frame, of the oldest that can be rebuilt."""
        tail = max(0, self.head - (int(self.state["prepared"][0]) - 1))
        return tail + self.history if tail else 0

    @property
    def stride(self) -> int:
        """Rows from one sample to the next: 1, or the spacing of sequences."""
        return int(self.state["prepared"][0]) // len(self.units)

    @property
    def units(self) -> Array:
        """[units, slots] bool, True if it can be drawn; or float64, its weight among the draws."""
        return self.arrays["index.mass" if "index.mass" in self.arrays else "index.usable"]

    def rows(self, name: str, start: int, stop: int) -> Array:
        """[stop - start, slots, ...] a copy of the rows of an array, by their numbers."""
        x = self.arrays[name]
        return x[np.arange(start, stop) % len(x)]

    def drawable(self) -> Array:
        """[n, slots] of `units` from the oldest to the newest."""
        index = self.state["index"]
        numbers: Rows = np.arange(index["tail"], index["head"])
        return self.units[numbers % len(self.units)]


def open_replay(path: Path | str, which: str = "last", policy: str | None = None) -> StoredReplay:
    """Opens the replay of a checkpoint and checks it against its sha256.

    Args:
        path: a run (its checkpoint `which`: last, best or a step), a checkpoint's directory, or a file in one.
        policy: id of the replay's policy, if a run has several.

    Raises:
        CheckpointError: the replay is damaged or removed (names the file), or there never was one.
        ConfigError: several policies have one and none is named, or one that has none.
    """
    replays = open_replays(path, which)
    if policy is None and len(replays) == 1:
        return next(iter(replays.values()))
    if policy is None:
        raise ConfigError(f"{path} holds the replays of {list(replays)}; say whose: --policy {next(iter(replays))}")
    if policy not in replays:
        known = nearest(policy, replays) if any(replays) else "the run has one policy, leave --policy out"
        raise ConfigError(f"{path} holds no replay of a policy {policy!r}; {known}")
    return replays[policy]


def open_replays(path: Path | str, which: str = "last") -> dict[str, StoredReplay]:
    """The replays of a checkpoint by policy id, "" where the run has one policy; all else as in `open_replay`."""
    path = Path(path)
    path = path.resolve() if path.is_symlink() else path  # one that the user names may be a link
    folder = path.parent if path.is_file() and (path.parent / MANIFEST).is_file() else path
    run = folder.absolute().parent.parent if (folder / MANIFEST).is_file() else folder
    if run == folder and not (folder / "checkpoints").is_dir():
        raise ConfigError(
            f"{path} is no run or checkpoint; {RUN_EXPECTED}; a checkpoint is RUN/checkpoints/000000050000"
        )
    try:
        folder = find_checkpoint(folder, which, replay=True) if run == folder else folder
        checkpoint = load_checkpoint(folder, replay=True)
        if not checkpoint.array_files and read_manifest(folder).replay_dropped:
            raise CheckpointError(
                f"{folder} holds no replay: it is gone, as the run keeps that of its newest checkpoints "
                "only (run.keep_replays)"
            )
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_remedy(run)}") from error
    if not checkpoint.array_files:
        raise CheckpointError(
            f"{folder} holds no replay: its algorithm learns from each batch once, or nothing was collected yet"
        )
    arrays = checkpoint.arrays()
    with as_checkpoint_error(folder, "or it was written by another version"):
        states: Mapping[str, Any] = checkpoint.state["policy"]
        owners = [
            key.removesuffix(_EXPERIENCE) for key in states if key == _EXPERIENCE or key.endswith(f"/{_EXPERIENCE}")
        ]
        replays: dict[str, StoredReplay] = {}
        for prefix in owners:
            state = states[prefix + _EXPERIENCE]
            mine = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
            history = max((int(x.max(initial=0)) for name, x in mine.items() if name.endswith(".age")), default=0)
            whose = prefix.removesuffix("/")
            replays[whose] = StoredReplay(
                folder, checkpoint.step, state["replay"], int(state["trained"]), mine, history, whose
            )
            _require_sound(replays[whose])
        if not replays:
            raise KeyError(_EXPERIENCE)
        return replays


def _require_sound(replay: StoredReplay) -> None:
    """Raises ValueError if the counters ask for more rows than are stored: none is read, nor room for it taken."""
    index, stored = replay.state["index"], len(replay.arrays["valid"])
    if not 0 <= replay.head - replay.oldest <= stored:
        raise ValueError(f"head {replay.head:,} and {replay.capacity:,} rows of capacity, but {stored:,} are stored")
    if not 0 <= index["head"] - index["tail"] <= len(replay.units):
        raise ValueError(f"samples {index['tail']:,} to {index['head']:,}, but {len(replay.units):,} are stored")


def summary(replay: StoredReplay) -> dict[str, str]:
    """Facts about a replay as text by name, in the order of `penstock replay info`."""
    start, head, slots = replay.oldest, replay.head, replay.slots
    valid = replay.rows("valid", start, head)
    index = replay.state["index"]
    out = {
        "checkpoint": f"{replay.path}, step {replay.step:,}",
        **({"policy": replay.policy} if replay.policy else {}),
        "capacity": f"{replay.capacity:,} rows in {counted(slots, 'slot')}",
        "rows kept": f"{len(valid) * slots:,}, {np.count_nonzero(valid):,} of them environment steps",
        "oldest, newest": f"{start:,} and {head - 1:,} of {head:,} rows that each slot has had" if head else "none yet",
        "steps, updates": f"{replay.state['appended']:,} environment steps appended, "
        f"{replay.trained:,} gradient steps by the ratio",
        "bytes": f"{sum(x.nbytes for x in replay.arrays.values()):,}",
        "episodes": _episodes(replay),
        "reward": _numbers(replay.rows("prev_reward", start + 1, head + 1)[valid]),
        "index": f"{replay.state['index_kind']}, {np.count_nonzero(replay.drawable()):,} samples can be drawn",
    }
    if replay.stride > 1:
        out["index"] += f", one begins every {replay.stride:,} rows"
    if "largest" in index:
        mass = replay.drawable()
        mass = mass[mass > 0.0]
        out["priorities^alpha"] = f"{_numbers(mass)}; largest ever {index['largest']:.4g}"
        if len(mass):
            tenth = np.sort(mass)[-max(len(mass) // 10, 1) :].sum() / mass.sum()
            out["drawn most"] = f"a tenth of the samples takes {tenth:.0%} of the draws"
    return out


def fields(replay: StoredReplay) -> list[tuple[str, str, str, str]]:
    """Name, dtype, shape and bytes of every array that is stored."""
    return [(name, x.dtype.name, str(list(x.shape)), f"{x.nbytes:,}") for name, x in replay.arrays.items()]


def _remedy(run: Path) -> str:
    """A phrase that names the checkpoints with a good replay; their replays are read for it."""
    good = [m.step for path in candidates(run / "checkpoints") if (m := good_manifest(path)) and m.arrays]
    if good:
        steps = ", ".join(str(step) for step in sorted(good))
        return f"good replays of {run} are of step {steps}: take one by --which STEP"
    return f"no checkpoint of {run} has a good replay: copy it again; `penstock eval` needs none"


def whole_episodes(replay: StoredReplay) -> list[tuple[int, int, int]]:
    """Slot, first row and the row after the last of every episode that is stored from its reset to its end."""
    start, head = replay.oldest, replay.head
    flags = [replay.rows(name, start, head) for name in ("first", "terminated", "truncated", "valid")]
    episodes: list[tuple[int, int, int]] = []
    for b in range(replay.slots):
        first, terminated, truncated, valid = (x[:, b] for x in flags)
        row = np.arange(len(first))
        opened = np.maximum.accumulate(np.where(first, row, -1))
        over = valid & (terminated | truncated)
        # Rows lost, or ended before, between an episode's first row and each row.
        breaks = np.concatenate([[0], np.cumsum(~valid | over)])
        ends = np.flatnonzero(over & (opened >= 0) & (breaks[row] == breaks[opened]))
        episodes += [(b, start + int(opened[last]), start + int(last) + 1) for last in ends]
    return episodes


def _episodes(replay: StoredReplay) -> str:
    """Returns and lengths of the whole episodes as text."""
    rewards, base = replay.rows("prev_reward", replay.oldest + 1, replay.head + 1), replay.oldest
    episodes = whole_episodes(replay)
    if not episodes:
        return "none is kept from its first row to its last"
    returns = [rewards[start - base : stop - base, b].sum(dtype=np.float64) for b, start, stop in episodes]
    lengths = [stop - start for _, start, stop in episodes]
    return f"{len(episodes):,} kept whole; return {_numbers(returns)}; length {_numbers(lengths)}"


def _numbers(x: Any) -> str:
    x = np.asarray(x, np.float64)
    return f"mean {x.mean():.4g} (min {x.min():.4g}, max {x.max():.4g})" if x.size else "none"
