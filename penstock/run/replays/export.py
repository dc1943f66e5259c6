"""Export of a stored replay to files that numpy opens, in the record's own layout, oldest row first.

With N rows of B slots: `obs` [N + 1, B, ...] and `first` [N + 1, B]; `action`, `reward`, `terminated`, `truncated`,
`valid` and `info` [N, B, ...]; `row` [N] numbers. `obs[t + 1]` is the successor of `obs[t]` where `valid[t]`. Samples
begin at rows `sample.row` [U]: `sample.usable` or, if prioritized, `sample.mass` [U, B], to which the probability of a
draw is proportional. Recurrent states `state` [K, B, ...] are those before rows `state.row` [K].
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.mapped import releaser
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_leaves, tree_paths
from penstock.replay.columns import Array, FrameColumn
from penstock.run.files.stored import CONFIG, read_json
from penstock.run.replays.stored import StoredReplay, summary

ABOUT = "about.json"
FORMAT = "penstock replay export 2"
_CHUNK_BYTES = 1 << 24
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
"""Names in the file, by the name in the storage."""


@dataclass(frozen=True)
class _Field:
    """An array to write, produced a chunk of rows at a time."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[int, int], Array]
    """Returns rows start to stop, counted from 0."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> Iterator[bytes]:
        step = max(1, _CHUNK_BYTES * self.shape[0] // max(self.nbytes, 1)) if self.shape[0] else 1
        for start in range(0, self.shape[0], step):
            yield np.ascontiguousarray(self.read(start, min(start + step, self.shape[0])), self.dtype).tobytes()


def export(replay: StoredReplay, to: Path | str, *, frames: bool = False) -> int:
    """Writes a replay into a file that ends in .npz or into a new folder of .npy files; returns the bytes written.

    Args:
        frames: stacks that are kept frame by frame stay so: `obs` holds each row's newest frame, `obs.age` the rows
            since its episode opened, at most one less than a stack.

    Raises:
        ConfigError: `to` exists already, its folder does not, or there is too little space.
        CheckpointError: stacks are to be rebuilt, and the run's config.json, which holds their size, is missing.
    """
    to = Path(to)
    if to.suffix not in (".npz", ""):
        raise ConfigError(
            f"--to {to} ends in {to.suffix!r}; expected .npz for one file, or a name without a suffix for a folder of "
            f".npy files: use {to.with_suffix('.npz').name} or {to.name.replace('.', '-')}"
        )
    if to.exists():
        raise ConfigError(f"{to} is there already and was not touched; choose another --to")
    if not to.parent.is_dir():
        raise ConfigError(f"there is no folder {to.parent} to write {to.name} into; make it, or choose another --to")
    parts = _fields(replay, frames)
    needed = sum(part.nbytes for part in parts.values())
    about = {"format": FORMAT, "summary": summary(replay), "spec": _spec(replay, needed=False)[1]}
    unnamed = to.with_name(f".{to.name}.unfinished")
    try:
        free = shutil.disk_usage(to.parent).free
        if free < needed:
            raise ConfigError(
                f"{to} needs {needed / 1e6:,.1f} MB and {free / 1e6:,.1f} MB are free; choose another --to"
            )
        _remove(unnamed)
        write = _write_zip if to.suffix == ".npz" else _write_folder
        write(unnamed, parts, about)
        unnamed.rename(to)
    except OSError as error:
        raise ConfigError(f"cannot write {to}: {error.strerror or error}; choose another --to") from error
    finally:
        _remove(unnamed)
    return needed


def _fields(replay: StoredReplay, frames: bool) -> dict[str, _Field]:
    start, n = replay.oldest, replay.head - replay.oldest
    out: dict[str, _Field] = {"row": _whole(np.arange(start, start + n))}
    for name, x in replay.arrays.items():
        base = re.split(r"[\[.]", name)[0]
        if base not in _RECORD or (name.endswith(".age") and not frames):
            continue
        if f"{name}.age" in replay.arrays and not frames:
            out[_file_name(name, out)] = _stacks(replay, name, start, n + 1)
            continue
        shift = start + base.startswith("prev_")
        out[_file_name(name, out)] = _Field(
            (n + (base in _ONE_MORE), replay.slots, *x.shape[2:]), x.dtype, _reader(replay, name, shift)
        )
    index = replay.state["index"]
    units = np.arange(index["tail"], index["head"])
    kind = "sample.mass" if "index.mass" in replay.arrays else "sample.usable"
    out |= {"sample.row": _whole(units * replay.stride), kind: _whole(replay.drawable())}
    kept = np.asarray(replay.state["storage"]["state_rows"])
    at = np.argsort(kept)
    at = at[(kept[at] >= start) & (kept[at] < replay.head)]
    states = {name: x for name, x in replay.arrays.items() if name.startswith("state")}
    if states:
        out["state.row"] = _whole(kept[at])
    for name, x in states.items():
        out[_file_name(name, out)] = _Field((len(at), *x.shape[1:]), x.dtype, lambda a, b, x=x: x[at[a:b]])
    return out


def _whole(x: Array) -> _Field:
    return _Field(x.shape, x.dtype, lambda start, stop: x[start:stop])


def _reader(replay: StoredReplay, name: str, shift: int) -> Callable[[int, int], Array]:
    forget = releaser(replay.arrays[name])

    def read(start: int, stop: int) -> Array:
        rows = replay.rows(name, start + shift, stop + shift)
        forget()
        return rows

    return read


def _stacks(replay: StoredReplay, name: str, start: int, n: int) -> _Field:
    """Stacks [n, B, C, H, W] as the environment returned them."""
    obs = _spec(replay, needed=True)[0].obs
    shapes = {f"obs{path}": leaf.shape for path, leaf in zip(tree_paths(obs), tree_leaves(obs))}
    x = replay.arrays[name]
    column = FrameColumn(name, len(x), replay.slots, shapes[name], x.dtype)
    column.bind(replay.arrays)
    stacked = [key for key in replay.arrays if f"{key}.age" in replay.arrays]
    column.zeros = replay.state["storage"]["zeros"][stacked.index(name)]
    forget, slots = releaser(x), np.arange(replay.slots)

    def read(a: int, b: int) -> Array:
        rows = column.read(np.arange(start + a, start + b)[:, None] % len(x) * replay.slots + slots)
        forget()
        return rows

    return _Field((n, replay.slots, *shapes[name]), x.dtype, read)


def _spec(replay: StoredReplay, needed: bool) -> tuple[EnvSpec, Any]:
    """The environment's spec, and its stored form in config.json."""
    try:
        plain = read_json(replay.path.parent.parent / CONFIG)["spec"]
        policies = plain.get("policies")
        if policies is not None:
            plain = policies[replay.policy] if replay.policy else next(iter(policies.values()))
        return EnvSpec.from_plain(plain), plain
    except (CheckpointError, ConfigError, LookupError) as error:
        if needed:
            raise CheckpointError(
                f"{replay.path} keeps stacks frame by frame, and their size is in the run's {CONFIG}: {error}; "
                "use --frames"
            ) from error
        return EnvSpec((), ()), None


def _file_name(name: str, taken: dict[str, _Field]) -> str:
    """The name in the file: `action.arm` for `prev_action['arm']`."""
    parts: list[str] = re.findall(r"[\w-]+", name)
    plain = ".".join([_RECORD.get(parts[0], parts[0]), *parts[1:]])
    return plain if plain not in taken else f"{plain}-{len(taken)}"


def _write_zip(path: Path, parts: dict[str, _Field], about: dict[str, Any]) -> None:
    with zipfile.ZipFile(path, "x") as file:
        entries = {
            name: _write(file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True), part)
            for name, part in parts.items()
        }
        file.writestr(zipfile.ZipInfo(ABOUT), _text(about, entries))


def _write_folder(path: Path, parts: dict[str, _Field], about: dict[str, Any]) -> None:
    path.mkdir()
    entries = {name: _write((path / f"{name}.npy").open("xb"), part) for name, part in parts.items()}
    (path / ABOUT).write_bytes(_text(about, entries))


def _text(about: dict[str, Any], entries: dict[str, Any]) -> bytes:
    return json.dumps({**about, "fields": entries}, indent=1).encode() + b"\n"


def _write(opened: AbstractContextManager[IO[bytes]], part: _Field) -> dict[str, Any]:
    """Writes an array in numpy's format; returns dtype, shape, size and sha256, by which it is verified later."""
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(part.dtype)
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": part.shape})
    digest = hashlib.sha256()
    with opened as file:
        for chunk in itertools.chain([header.getvalue()], part.chunks()):
            digest.update(chunk)
            file.write(chunk)
    return {"dtype": part.dtype.str, "shape": list(part.shape), "bytes": part.nbytes, "sha256": digest.hexdigest()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
