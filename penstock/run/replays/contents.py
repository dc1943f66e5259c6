"""The content of a stored replay: its rows as arrays, oldest first, or its whole episodes as a dataset."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.replay.columns import Array, FrameColumn, Rows
from penstock.replay.endings import NUMBER, OBS, ROW
from penstock.run.files.stored_experiment import CONFIG, as_checkpoint_error, read_json
from penstock.run.replays.stored_replay import StoredReplay, open_replay, whole_episodes

_ONE_MORE = ("obs", "first")
_RECORD = {
    "obs": "obs",
    "first": "first",
    "prev_action": "action",
    "prev_reward": "reward",
    "terminated": "terminated",
    "truncated": "truncated",
    "valid": "valid",
    "info": "info",
}
"""Names in the record, by the name in the storage."""


def load_replay(run: str | Path, which: str = "last", *, policy: str | None = None) -> dict[str, Array]:
    """The replay of a run's checkpoint as arrays in memory; checked against its sha256 first.

    With N rows of B slots: `obs` [N + 1, B, ...] and `first` [N + 1, B]; `action`, `reward`, `terminated`,
    `truncated`, `valid` and `info` [N, B, ...]; `row` [N] numbers. `obs[t + 1]` is the successor of `obs[t]` where
    `valid[t]`; of environments that reset in the step of an end it is `final.obs[final_at[t]]` where `final_at` [N, B]
    is not -1. Samples begin at rows `sample.row` [U]: `sample.usable` or, if prioritized, `sample.mass` [U, B], to
    which the probability of a draw is proportional. Recurrent states `state` [K, B, ...] are those before rows
    `state.row` [K]. Nested parts are named by their path: `obs.KEY`. Stacks of frames are whole.

    Args:
        run: a run (its checkpoint `which`: last, best or a step), a checkpoint's directory, or a file in one.
        policy: id of the replay's policy, if a run has several.

    Raises:
        CheckpointError: the replay is damaged or removed (names the file), or there never was one.
        ConfigError: several policies have one and none is named, or one that has none.
    """
    replay = open_replay(run, which, policy)
    with as_checkpoint_error(replay.path):
        return _arrays(replay)


def replay_to_dataset(run: str | Path, dataset: str | Path, which: str = "last", *, policy: str | None = None) -> int:
    """Writes the episodes that a run's replay holds from their first row to their last; returns their number.

    They are read one by one, so the replay need not fit into memory. Ends are those of targets: where a lost life
    counts as one (`net.terminal_info`), only an episode's first life is whole.

    Args:
        dataset: missing or empty. The others are those of `load_replay`.

    Raises:
        ConfigError: `dataset` is not empty, or no episode is whole. CheckpointError: as `load_replay`, or the disk
            refuses.
    """
    replay = open_replay(run, which, policy)
    with as_checkpoint_error(replay.path):
        spec, env = _origin(replay)
        found = whole_episodes(replay)
        if not found:
            raise ConfigError(f"{replay.path} holds no episode from its first row to its last, so no dataset is made")
        columns = {name: _column(replay, name, spec) for name in replay.arrays if _base(name) in _RECORD}
    made_by = {"run": str(replay.path.parent.parent), "checkpoint": replay.step, "replay_of": replay.policy}
    with DatasetWriter(dataset, spec, env=env, made_by=made_by) as writer:
        for slot, start, stop in found:
            writer.append(_with_final(replay, _episode(columns, spec, slot, start, stop), slot, stop - 1))
    return len(found)


def _arrays(replay: StoredReplay) -> dict[str, Array]:
    slots: Rows = np.arange(replay.slots)
    start, stop = replay.oldest, replay.head
    out: dict[str, Array] = {"row": np.arange(start, stop)}
    for name in replay.arrays:
        base = _base(name)
        if base in _RECORD and not name.endswith(".age"):
            shift = int(base.startswith("prev_"))
            rows = np.arange(start + shift, stop + int(shift or base in _ONE_MORE))
            spec = _origin(replay)[0] if f"{name}.age" in replay.arrays else None
            out[_record_name(name, out)] = _column(replay, name, spec)(rows, slots)
    if NUMBER in replay.arrays:
        number = replay.rows(NUMBER, start, stop)
        out["final_at"] = np.where(number < 0, -1, number % len(replay.arrays[ROW]))
        out |= {_record_name(name, out): x for name, x in replay.arrays.items() if name.startswith(OBS)}
    index = replay.state["index"]
    kind = "sample.mass" if "index.mass" in replay.arrays else "sample.usable"
    out |= {"sample.row": np.arange(index["tail"], index["head"]) * replay.stride, kind: replay.drawable()}
    kept = np.asarray(replay.state["storage"]["state_rows"])
    at = np.argsort(kept)
    at = at[(kept[at] >= start) & (kept[at] < stop)]
    for name in [name for name in replay.arrays if name.startswith("state")]:
        out["state.row"] = kept[at]
        out[_record_name(name, out)] = replay.arrays[name][at]
    return out


def _column(replay: StoredReplay, name: str, spec: EnvSpec | None) -> Callable[[Rows, Rows], Array]:
    """Returns a reader of rows [n] and slots [k], which returns [n, k, ...]: of stacks whole ones."""
    x = replay.arrays[name]
    if f"{name}.age" not in replay.arrays or spec is None:
        return lambda rows, slots: x[rows[:, None] % len(x), slots]
    shapes = {f"obs{path}": leaf.shape for path, leaf in zip(tree_paths(spec.obs), tree_leaves(spec.obs))}
    column = FrameColumn(name, len(x), replay.slots, shapes[name], x.dtype)
    column.bind(replay.arrays)
    stacked = [key for key in replay.arrays if f"{key}.age" in replay.arrays]
    column.zeros = replay.state["storage"]["zeros"][stacked.index(name)]
    return lambda rows, slots: column.read(rows[:, None] % len(x) * replay.slots + slots)


def _episode(
    columns: dict[str, Callable[[Rows, Rows], Array]], spec: EnvSpec, slot: int, start: int, stop: int
) -> Episode:
    def read(name: str, shift: int = 0, more: int = 0) -> Array:
        return columns[name](np.arange(start + shift, stop + shift + more), np.array([slot]))[:, 0]

    def tree(leaves: Tree, name: str, shift: int, more: int) -> Tree:
        paths = iter(tree_paths(leaves))
        return tree_map(lambda leaf: read(f"{name}{next(paths)}", shift, more), leaves)

    info = [name for name in columns if _base(name) == "info"]
    return Episode(
        tree(spec.obs, "obs", 0, 1),
        tree(spec.action, "prev_action", 1, 0),
        read("prev_reward", 1),
        bool(read("terminated")[-1]),
        bool(read("truncated")[-1]),
        {_record_name(name, ()).removeprefix("info."): read(name) for name in info},
    )


def _with_final(replay: StoredReplay, episode: Episode, slot: int, row: int) -> Episode:
    """The episode with its last observation in place of the next one's first, if that is what follows its last row."""
    number = replay.rows(NUMBER, row, row + 1)[0, slot] if NUMBER in replay.arrays else -1
    for path, x in zip(tree_paths(episode.obs), tree_leaves(episode.obs)) if number >= 0 else ():
        ring = replay.arrays[f"{OBS}{path}"]
        x[-1] = ring[number % len(ring)]
    return episode


def _origin(replay: StoredReplay) -> tuple[EnvSpec, str]:
    """The environment's spec and name, by the run's config.json."""
    try:
        content: dict[str, Any] = read_json(replay.path.parent.parent / CONFIG)
        plain = content["spec"]
        policies = plain.get("policies")
        if policies is not None:
            plain = policies[replay.policy] if replay.policy else next(iter(policies.values()))
        env = content["experiment"]["env"]
        return EnvSpec.from_plain(plain), env if isinstance(env, str) else ""
    except (CheckpointError, ConfigError, LookupError) as error:
        raise CheckpointError(f"{replay.path} needs its run's {CONFIG}, which holds its spaces: {error}") from error


def _base(name: str) -> str:
    return re.split(r"[\[.]", name)[0]


def _record_name(name: str, taken: Any) -> str:
    """The name in the record: `action.arm` for `prev_action['arm']`."""
    parts: list[str] = re.findall(r"[\w-]+", name)
    plain = ".".join([_RECORD.get(parts[0], parts[0]), *parts[1:]])
    return plain if plain not in taken else f"{plain}-{len(taken)}"
