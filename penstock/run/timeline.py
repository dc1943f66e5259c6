"""Trace files of a run: Chrome's trace format, which Perfetto opens, and a picture."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.core import trace
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.files import read_stored, write_atomic
from penstock.core.trace import ACT, LEARN, SAMPLE, SEND, SERVE, SERVER_WAIT, STEP, WAIT, Trace, Track
from penstock.run.plots.looks import INK, STYLE, require_matplotlib

WARM_UP, WINDOW = 3, 20
"""Batches before the trace begins, and batches in it."""
NAMES = {
    STEP: "step",
    ACT: "act",
    WAIT: "wait",
    LEARN: "learn",
    SERVE: "serve",
    SEND: "send",
    SERVER_WAIT: "wait",
    SAMPLE: "sample",
}
_SERVER = "action server"
_EXPLAINED = {
    "step": "step: environments",
    "act": "act: forward, own agent",
    "serve": "serve: forward for workers",
    "send": "send: waking workers",
    "sample": "sample: a runner's fragment",
    "learn": "learn",
    "wait": "wait",
}
_COLOURS = {
    "step": "#0072B2",
    "act": "#E69F00",
    "serve": "#D55E00",
    "send": "#CC79A7",
    "sample": "#56B4E9",
    "learn": "#009E73",
    "wait": "#DDDDDD",
}
_STEPS_IN_CLOSE_UP = 24
_MOST_ROWS = 24


class Tracing:
    """Traces `WINDOW` batches, then writes FILE.json and FILE.png and ends by itself.

    Args:
        path: ends in .json.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = check_path(path)
        self._trace = Trace()
        self._batches = 0

    def tick(self, learning_s: float) -> None:
        """Counts a batch that was collected and learned from; learning took `learning_s` until now."""
        if trace.ring is not None:
            trace.ring.add(LEARN, time.perf_counter_ns() - int(learning_s * 1e9))
        self._batches += 1
        if self._batches == WARM_UP:
            self._trace.open()
        if self._batches == WARM_UP + WINDOW:
            self.close()

    def close(self) -> None:
        """Writes the files, once; if the disk refuses, that is a warning."""
        tracks = self._trace.close()
        if tracks:
            try:
                write_trace(tracks, self._path)
            except OSError as error:
                warnings.warn(f"trace not written to {self._path}: {error}", stacklevel=2)
            except MissingExtraError as error:
                warnings.warn(f"no picture beside {self._path}: {error}", stacklevel=2)


def check_path(path: str | Path) -> Path:
    """The path of a trace. Raises ConfigError if it does not end in .json."""
    if Path(path).suffix != ".json":
        raise ConfigError(f"trace {str(path)!r}; expected a name that ends in .json, e.g. trace.json")
    return Path(path)


def write_trace(tracks: Sequence[Track], path: Path) -> None:
    """Writes the trace as JSON, and as a picture of the same name beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(chrome_trace(tracks)).encode())
    draw_trace(tracks, path.with_suffix(".png"))


def chrome_trace(tracks: Sequence[Track]) -> dict[str, Any]:
    """The trace in Chrome's JSON: complete events (`ph` X) with `ts` and `dur` in us since the first event."""
    origin = min(int(track.spans[:, 0].min()) for track in tracks)
    events: list[dict[str, Any]] = []
    for at, track in enumerate(tracks):
        meta = {"process_name": {"name": track.name}, "process_sort_index": {"sort_index": at}}
        events += [{"ph": "M", "name": key, "pid": track.pid, "tid": 0, "args": args} for key, args in meta.items()]
        for tid, title in ((0, track.name), (1, _SERVER)):
            mine = [span for span in track.spans.tolist() if _is_server(span[2]) == bool(tid)]
            if mine:
                events.append({"ph": "M", "name": "thread_name", "pid": track.pid, "tid": tid, "args": {"name": title}})
            events += [
                {
                    "ph": "X",
                    "name": NAMES[kind],
                    "cat": NAMES[kind],
                    "pid": track.pid,
                    "tid": tid,
                    "ts": (start - origin) / 1e3,
                    "dur": (stop - start) / 1e3,
                }
                for start, stop, kind in sorted(mine)
            ]
    lost = {track.name: track.lost for track in tracks if track.lost}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"lost_spans": lost}}


def read_trace(path: Path, folder: Path) -> list[tuple[str, list[tuple[float, float, str]]]]:
    """The rows of a trace that was written by `write_trace`: a title, and (start, duration, name) of its spans in us.

    Raises:
        OSError: the file cannot be read, or lies outside `folder`.
        ValueError: it is no trace.
    """
    content = json.loads(read_stored(path, folder))
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{path} is no trace")
    titles: dict[tuple[Any, Any], str] = {}
    spans: dict[tuple[Any, Any], list[tuple[float, float, str]]] = {}
    try:
        for event in events:
            row = event["pid"], event["tid"]
            if event["name"] == "thread_name":
                titles[row] = str(event["args"]["name"])
            elif event["ph"] == "X":
                spans.setdefault(row, []).append((float(event["ts"]), float(event["dur"]), str(event["name"])))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of a run") from error
    return [(titles.get(row, "?"), found) for row, found in spans.items()][:_MOST_ROWS]


def draw_trace(tracks: Sequence[Track], out: Path) -> None:
    """Draws the whole window and, below it, a close-up of a few rows of a batch.

    Raises MissingExtraError without matplotlib.
    """
    require_matplotlib()
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = _rows(tracks)
    origin = min(start for _, spans in rows for start, _, _ in spans)
    end = max(stop for _, spans in rows for _, stop, _ in spans)
    low, high = _close_up(rows)
    with rc_context(STYLE):
        figure = Figure(figsize=(12, 2.2 + 0.7 * len(rows)), layout="constrained")
        FigureCanvasAgg(figure)
        whole, close = figure.subplots(2, 1)
        _panel(whole, rows, origin, origin, end)
        _panel(close, rows, origin, low, high, edge=0.5)
        whole.axvspan((low - origin) / 1e6, (high - origin) / 1e6, facecolor="none", edgecolor=INK, linewidth=1.2)
        whole.set_title(f"{(end - origin) / 1e6:,.0f} ms of a run; the frame is shown larger below", loc="left")
        close.set_title(f"{(high - low) / 1e6:,.2f} ms of it", loc="left")
        close.set_xlabel("ms")
        used = {NAMES[kind] for _, spans in rows for _, _, kind in spans}
        handles = [Patch(color=_COLOURS[name], label=text) for name, text in _EXPLAINED.items() if name in used]
        figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False)
        figure.savefig(out, dpi=140)


_Row = tuple[str, list[tuple[int, int, int]]]


def _rows(tracks: Sequence[Track]) -> list[_Row]:
    """A row for each process, and one for an action server that shares its process; at most 24."""
    rows: list[_Row] = []
    for track in tracks:
        spans: list[tuple[int, int, int]] = [(a, b, kind) for a, b, kind in track.spans.tolist()]
        for title, server in ((track.name, False), (_SERVER, True)):
            mine = [span for span in spans if _is_server(span[2]) == server]
            rows += [(title, mine)] if mine else []
    return rows[:_MOST_ROWS]


def _panel(axes: Any, rows: list[_Row], origin: int, low: int, high: int, edge: float = 0.0) -> None:
    for at, (_, spans) in enumerate(rows):
        for name, colour in _COLOURS.items():
            bars = [
                ((a - origin) / 1e6, (b - a) / 1e6)
                for a, b, kind in spans
                if NAMES[kind] == name and b > low and a < high
            ]
            axes.broken_barh(bars, (at - 0.36, 0.72), facecolors=colour, edgecolors="white", linewidth=edge)
    axes.set_xlim((low - origin) / 1e6, (high - origin) / 1e6)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(length=0, axis="y")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _close_up(rows: list[_Row]) -> tuple[int, int]:
    """The close-up's begin and end in ns: from an end of learning in the middle of the window, some steps long."""
    everything = [span for _, spans in rows for span in spans]
    first, last = min(a for a, _, _ in everything), max(b for _, b, _ in everything)
    steps = max(([s for s in spans if s[2] == STEP] for _, spans in rows), key=len)
    ends = sorted(b for _, b, kind in everything if kind == LEARN)
    start = ends[len(ends) // 2] if ends else first
    after = [a for a, _, _ in steps if a >= start][: _STEPS_IN_CLOSE_UP + 1]
    stop = after[-1] if len(after) > 1 else last
    margin = max((stop - start) // 8, 1)
    return max(start - margin, first), min(stop + margin, last)


def _is_server(kind: int) -> bool:
    return kind in (SERVE, SEND, SERVER_WAIT)
