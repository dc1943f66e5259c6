"""Grouping of runs that are seeds of one curve, and the name of each curve."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.core.files import read_stored

_NOT_OF_THE_CURVE = ("seed", "dir", "progress", "tensorboard", "trackers", "steps", "stop", "trace", "video_interval")
"""Settings of `run` that do not change a curve; one that was made longer, or pruned, is the same curve."""
_NAMED, _LONGEST = 3, 24
"""Most settings in a name, and most characters of one value."""
_ABSENT = object()


@dataclass(frozen=True)
class Identity:
    """A run's environment, algorithm and settings, without seed, as its directory names them."""

    run_dir: Path
    """Resolved path, so that one directory has one identity."""
    env: str
    """The folder's name if meta.json names none."""
    algo: str
    settings: Any
    """The experiment in config.json, numbers as floats, without settings that change no curve; None if unreadable."""
    seed: float | None = None
    """The run's seed; None if it is not known."""
    planned: float | None = None
    """Environment steps that the run was asked for; None if that is not known."""

    @property
    def group(self) -> tuple[str, str, str]:
        """A key that is equal for seeds of one curve. A run whose settings are unknown is a curve by itself."""
        known = self.settings is not None and bool(self.algo)
        return self.env, self.algo, json.dumps(self.settings, sort_keys=True) if known else str(self.run_dir)

    @property
    def panel(self) -> str:
        """The environment, whose curves share axes; "" for a folder that does not name it."""
        return self.env if self.algo else ""

    @property
    def offline(self) -> bool:
        """True if the run's sampler plays a dataset back; none of the run's code is loaded for it."""
        sampler = self.settings.get("sampler") if self.settings is not None else None
        return isinstance(sampler, dict) and sampler.get("class") == "penstock.samplers.offline:OfflineSampler"


def identify(run_dir: Path) -> Identity:
    """The identity of the run in a directory, from its meta.json and config.json."""
    run_dir = run_dir.resolve()
    meta, settings = read_content(run_dir / "meta.json"), read_content(run_dir / "config.json").get("experiment")
    env, algo = meta.get("env"), meta.get("algo")
    if not isinstance(env, str) or not isinstance(algo, str):
        env, algo = run_dir.name, ""
    if not isinstance(settings, dict):
        return Identity(run_dir, env, algo, None)
    seed, planned = meta.get("seed"), None
    if isinstance(run := settings.get("run"), dict):
        seed, planned = run.get("seed", seed), run.get("steps")
        settings = {**settings, "run": {key: value for key, value in run.items() if key not in _NOT_OF_THE_CURVE}}
    seed, planned = (x if isinstance(x, float) else None for x in (seed, planned))
    return Identity(run_dir, env, algo, settings, seed, planned)


def curve_names(curves: Sequence[Identity]) -> list[str]:
    """A name for each curve, given one run of each.

    The algorithm, and the environment if there are several; among curves of equal name also the settings that differ,
    e.g. `ppo, lr=0.001`, or as much of the path as tells them apart if the settings do not.
    """
    several = len({curve.env for curve in curves}) > 1
    plain = [f"{c.algo} on {c.env}" if c.algo and several else c.algo or c.env for c in curves]
    names = list(plain)
    for name in set(plain):
        alike = [i for i, other in enumerate(plain) if other == name]
        if len(alike) > 1:
            ends = _by_settings([curves[i].settings for i in alike]) or _by_path([curves[i].run_dir for i in alike])
            for i, end in zip(alike, ends):
                says_so = re.match(rf"{re.escape(name)}(?![A-Za-z])", end)  # a folder dqn-2 of a dqn
                names[i] = end if says_so or not curves[i].algo else f"{name}, {end}"
    return [name if names.count(name) == 1 else f"{name}, {c.run_dir}" for name, c in zip(names, curves)]


def by_number(name: str) -> list[str | float]:
    """Sort key of a name, numbers by value: run-2 before run-10, lr=3e-05 before lr=0.001."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[-+]?\d+)?)", name)
    return [float(part) if i % 2 else part for i, part in enumerate(parts)]


def _by_settings(settings: list[Any]) -> list[str]:
    """A name of the settings that differ for each curve; [] if two names would be equal."""
    columns = setting_columns(settings)
    shown = {key: columns[key] for key in telling(columns)}
    more = ", ..." if len(columns) > len(shown) else ""
    names = [", ".join(f"{key}={texts[i]}" for key, texts in shown.items()) + more for i in range(len(settings))]
    return names if len(set(names)) == len(names) and columns else []


def setting_columns(settings: Sequence[Any]) -> dict[str, list[str]]:
    """The settings that differ among runs, each as text for every run; {} if those of a run are not known."""
    if not settings or any(tree is None for tree in settings):
        return {}
    return _named(dict(_differing(list(settings), "")))


def columns_of_algorithms(runs: Sequence[Identity]) -> dict[str, list[str]]:
    """The settings that differ among all runs, or among those of one algorithm, as `setting_columns`; its own first.

    A run without a setting has "?" there.
    """
    known = [run for run in runs if run.settings is not None]
    paths: dict[str, None] = {}
    for alike in (
        known,
        *([run for run in known if run.algo == algo] for algo in dict.fromkeys(r.algo for r in known)),
    ):
        paths |= dict.fromkeys(path for path, _ in (_differing([run.settings for run in alike], "") if alike else ()))
    order = sorted(paths, key=lambda path: not path.startswith("algo."))
    return _named({path: [_at(run.settings, path) for run in runs] for path in order})


def _at(tree: Any, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key, _ABSENT) if isinstance(tree, dict) else _ABSENT
    return tree


def _named(found: dict[str, list[Any]]) -> dict[str, list[str]]:
    """Columns of text by the shortest name of each setting."""
    columns: dict[str, list[str]] = {}
    for path, values in found.items():
        texts = [setting_text(value) for value in values]
        short = path.partition(".")[2] or path  # without algo, sampler or run
        if columns.setdefault(short, texts) != texts:
            columns[path] = texts
    return columns


def telling(columns: dict[str, list[str]], most: int = _NAMED) -> list[str]:
    """At most so many settings, those that tell most curves apart, in the order of the stored settings."""
    chosen: list[str] = []
    for _ in range(min(most, len(columns))):
        left = [key for key in columns if key not in chosen]
        chosen.append(max(left, key=lambda key: len(set(zip(*(columns[k] for k in [*chosen, key]))))))
    return [key for key in columns if key in chosen]


def _differing(values: list[Any], path: str) -> list[tuple[str, list[Any]]]:
    """The dotted settings whose values are not all equal, in the order of the stored settings."""
    if all(value == values[0] for value in values):
        return []
    if not all(isinstance(value, dict) and value.get("class") == values[0].get("class") for value in values):
        return [(path, values)]
    keys = dict.fromkeys(key for value in values for key in value)
    below = [_differing([value.get(key, _ABSENT) for value in values], f"{path}.{key}".lstrip(".")) for key in keys]
    return [found for part in below for found in part]


def setting_text(value: Any) -> str:
    """A stored setting as a person reads it; of a part with many fields only the name of its class."""
    if value is _ABSENT:
        return "?"
    if isinstance(value, float):
        return f"{value:.12g}" if value.is_integer() else f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(setting_text(item) for item in value)}]"
    if isinstance(value, dict):
        name = str(value.get("class") or value.get("import") or "").rpartition(":")[2]
        fields = ", ".join(setting_text(item) for key, item in value.items() if key not in ("class", "import"))
        whole = f"{name}({fields})" if fields else name
        return whole if len(whole) <= _LONGEST else name or "..."
    return str(value)


def _by_path(paths: list[Path]) -> list[str]:
    """For each path the shortest end that no other path has; folders at the end of all paths are left out."""
    parts = [path.parts for path in paths]
    while len({part[-1] for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[:-1] for part in parts]

    def own(part: tuple[str, ...]) -> int:
        return next((n for n in range(1, len(part)) if sum(p[-n:] == part[-n:] for p in parts) == 1), len(part))

    return [str(Path(*part[-own(part) :])) for part in parts]


def read_content(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a run's directory, numbers as floats; {} if it cannot be read, or is none."""
    try:
        content = json.loads(read_stored(path, path.parent), parse_int=float)  # 0 and 0.0 are one setting
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
