"""One run in full: what it is, its settings and their changes, metrics, evaluations, videos and timeline."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core.errors import printable
from penstock.core.files import require_inside
from penstock.run.log import CHANGES, EVALUATIONS, number, read_rows
from penstock.run.plots.bands import Floats
from penstock.run.plots.curve_groups import read_content, setting_text
from penstock.run.timeline import read_trace
from penstock.view.catalog import Entry, finite, short_id, stamp
from penstock.view.charts import thinned

VIDEOS = "videos"
SECTIONS = {
    "Returns and episodes": ("rollout/", "eval/", "self_play/"),
    "Load": ("time/", "sampler/"),
    "Learners and runners": ("group/", "sampler/lag"),
    "Faults": ("faults/", "env/", "resume/"),
    "Learning": ("train/", "replay/"),
    "Changed settings": ("settings/", "curriculum/"),
}
"""Titles of charts, and the openings of metrics below each; of several that fit, the longest counts."""
_OTHERS = "Others"
_SPREAD = re.compile(
    r"(rollout|eval)/(.*[_/])?(max|min|median|std)(_.*)?|eval/mean_.*|time/(iterations|total_.*|time_elapsed)"
)
"""Metrics that are folded away below their section."""
_FACTS = ("command", "started", "host", "git", "kernel", "cpu_capability", "threads", "env_reproducible")
_PLACES = ("learners", "learner_backend", "workers", "runners", "backend", "depth", "T", "B", "device", "eval_workers")
"""Settings that say how many processes a run has, and where."""
_MOST_SETTINGS, _MOST_EVALUATIONS, _MOST_VIDEOS, _MOST_SPANS = 2_000, 2_000, 60, 150_000
_STAMPED = (EVALUATIONS, CHANGES, VIDEOS, "crash", ".")


def run_signature(entry: Entry) -> str:
    """Changes whenever the page of a run does."""
    return short_id(str([*entry.stamps.values(), *(stamp(entry.path / name) for name in _STAMPED)]))


def run_details(entry: Entry) -> dict[str, Any]:
    """Everything that the page of a run shows, as JSON data without NaN. Raises OSError if it cannot be read."""
    meta, config = read_content(entry.path / "meta.json"), read_content(entry.path / "config.json")
    points = entry.columns.every()
    settings = list(itertools.islice(_flat(config.get("experiment")), _MOST_SETTINGS))
    hours = math.nan if entry.row is None else entry.row.hours
    return {
        "signature": run_signature(entry),
        "id": entry.id,
        "name": entry.name,
        "path": _shown(str(entry.path)),
        "state": entry.state,
        "steps": 0 if entry.row is None else entry.row.steps,
        "planned": entry.identity.planned,
        "seconds": finite(3600 * hours),
        "facts": [[name, _shown(_joined(meta[name]))] for name in _FACTS if meta.get(name) not in (None, "")],
        "versions": _shown(", ".join(f"{k} {v}" for k, v in _items(meta.get("versions")))),
        "settings": settings,
        "places": [[path, text] for path, text in settings if path.rpartition(".")[2] in _PLACES],
        "sections": _sections(points),
        "changes": _changes(entry.path),
        "evaluations": _evaluations(entry.path),
        "videos": video_names(entry.path),
        "crash": (entry.path / "crash").is_dir(),
        **_timeline(entry.path, dict(settings).get("run.trace", "")),
    }


def video_names(run_dir: Path) -> list[str]:
    """Names of the newest videos of a run, plain files that do not lead out of it; the newest first."""
    names: list[str] = []
    try:
        for found in sorted(os.listdir(run_dir / VIDEOS), reverse=True):
            if found.endswith(".mp4") and found.isprintable() and _is_inside(run_dir / VIDEOS / found, run_dir):
                names.append(found)
    except OSError:
        return []
    return names[:_MOST_VIDEOS]


def _is_inside(path: Path, folder: Path) -> bool:
    try:
        require_inside(path, folder)
    except OSError:
        return False
    return path.is_file()


def _sections(points: Mapping[str, Floats]) -> list[dict[str, Any]]:
    of_section: dict[str, list[dict[str, Any]]] = {title: [] for title in (*SECTIONS, _OTHERS)}
    for key in sorted(points):
        pairs = points[key][np.argsort(points[key][:, 0], kind="stable")]
        x, y = thinned(pairs[:, 0], pairs[:, 1])
        of_section[section_of(key)].append(
            {"metric": key, "folded": bool(_SPREAD.fullmatch(key)), "x": x.tolist(), "y": y.tolist()}
        )
    return [{"title": title, "charts": charts} for title, charts in of_section.items() if charts]


def section_of(metric: str) -> str:
    """The title under which a metric is shown."""
    fitting = [
        (len(start), title) for title, starts in SECTIONS.items() for start in starts if metric.startswith(start)
    ]
    return max(fitting, default=(0, _OTHERS))[1]


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for row in _rows(run_dir / EVALUATIONS)[-_MOST_EVALUATIONS:]:
        returns, lengths = (_numbers(row.get(name)) for name in ("returns", "lengths"))
        reported = number(row.get("eval/mean_reward"))
        if returns or math.isfinite(reported):
            mean = reported if math.isfinite(reported) else float(np.mean(returns))
            spread = {"low": min(returns, default=mean), "high": max(returns, default=mean)}
            more = {"std": float(np.std(returns)), "length": float(np.mean(lengths))} if returns and lengths else {}
            numbers = {"step": float(row["step"]), "mean": mean, **spread, **more}
            found.append({"episodes": len(returns), **{name: finite(x) for name, x in numbers.items()}})
    return sorted(found, key=lambda one: one["step"])


def _numbers(values: Any) -> list[float]:
    return [x for value in values if math.isfinite(x := float(number(value)))] if isinstance(values, list) else []


def _changes(run_dir: Path) -> list[list[str]]:
    rows = _rows(run_dir / CHANGES)
    return [
        [f"{row['step']:,}", _shown(name if name != "set" else path), _shown(_joined(value))]
        for row in rows
        for name, part in row.items()
        if name != "step"
        for path, value in (_items(part) if isinstance(part, dict) else [("", part)])
    ][-_MOST_SETTINGS:]


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return read_rows(path)
    except OSError:
        return []


def _timeline(run_dir: Path, named: str) -> dict[str, Any]:
    """The newest trace in a run's folder, `{"timeline": ..., "timeline_note": ...}`."""
    outside = named not in ("", "None")
    note = f"Written to {named}, outside of the run: --run.trace RUN/trace.json is shown here." if outside else ""
    for path in _traces(run_dir):
        try:
            rows = read_trace(path, run_dir)
        except (OSError, ValueError, RecursionError):
            continue
        left, shown = _MOST_SPANS, list[dict[str, Any]]()
        kinds = list(dict.fromkeys(name for _, spans in rows for _, _, name in spans))[:32]
        for title, spans in rows:
            spans = [span for span in spans[: max(left, 0)] if span[2] in kinds and all(map(math.isfinite, span[:2]))]
            left -= len(spans)
            flat = [x for start, length, name in spans for x in (round(start, 1), round(length, 1), kinds.index(name))]
            shown.append({"title": _shown(title), "spans": flat})
        return {"timeline": {"kinds": list(map(_shown, kinds)), "rows": shown}, "timeline_note": ""}
    return {"timeline": None, "timeline_note": note}


def _traces(run_dir: Path) -> list[Path]:
    try:
        names = [
            name for name in os.listdir(run_dir) if name.endswith(".json") and name not in ("config.json", "meta.json")
        ]
    except OSError:
        return []
    return [run_dir / name for name in sorted(names)]


def _flat(tree: Any, path: str = "", depth: int = 12) -> Iterator[tuple[str, str]]:
    """Dotted settings as text; a part's class stands at its own path."""
    if isinstance(tree, dict) and depth and tree:
        if path and isinstance(tree.get("class"), str):
            yield path, _shown(tree["class"].rpartition(":")[2])
        for key, value in tree.items():
            if key != "class":
                yield from _flat(value, f"{path}.{_shown(str(key))}".lstrip("."), depth - 1)
    elif path:
        yield path, _shown(setting_text(tree))


def _joined(value: Any) -> str:
    return " ".join(map(setting_text, value)) if isinstance(value, list) else setting_text(value)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    return [(str(key), item) for key, item in value.items()] if isinstance(value, dict) else []


def _shown(text: str) -> str:
    return printable(text, kept="")
