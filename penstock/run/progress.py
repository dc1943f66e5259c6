"""Progress of a run: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Mapping
from typing import IO, Any, Literal, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.run.signals import UnfailingStream

Mode = Literal["auto", "live", "plain", "off"]

_REDRAW_S = 0.25
_LINE_S = 5.0
_RATE_WINDOW_S = 15.0
_MAX_SHARE = 0.005
"""Largest share of the run's time for drawing: a slow terminal is drawn less often, not at the learner's cost."""
_SHOWN = (
    ("return", "rollout/ep_rew_mean"),
    ("episode length", "rollout/ep_len_mean"),
    ("last evaluation", "eval/mean_reward"),
    ("value loss", "train/value_loss"),
    ("policy loss", "train/policy_gradient_loss"),
    ("entropy loss", "train/entropy_loss"),
    ("approximate KL", "train/approx_kl"),
    ("loss", "train/loss"),
    ("actor loss", "train/actor_loss"),
    ("critic loss", "train/critic_loss"),
)
_OF_GAMES = (("Elo", "self_play/elo"), ("win rate against past selves", "self_play/win_rate"))
"""Metrics of self-play, where the joint return of both sides has no meaning."""
_ON_A_LINE = 3
_MOST_PARTS = 8
"""Numbers of single policies and agents in the panel, at most."""
_AGENT = "rollout/agent/"
_ANY_WIDTH = 100_000


class Progress:
    """Shows a run's progress until `close`, which also runs when the interpreter exits; a context manager.

    Args:
        total_steps: environment steps of the whole run.
        mode: "live" redraws a panel at most four times a second; "plain" prints a line at most every five seconds;
            "auto" is "live" on a terminal and "plain" elsewhere; "off" prints nothing.
        title: what runs, such as "PPO on CartPole-v1".
    """

    def __init__(self, total_steps: int, mode: Mode, title: str) -> None:
        self._total = max(total_steps, 1)
        self._title = title
        self._console = _console(force_terminal=True if mode == "live" else None, quiet=mode == "off")
        if mode == "auto":
            mode = "live" if self._console.is_terminal and not self._console.is_dumb_terminal else "plain"
        self._mode = mode
        self._metrics: dict[str, float] = {}
        self._step = 0
        self._started = time.monotonic()
        self._history: deque[tuple[float, int]] = deque()
        self._next = 0.0
        self._printed = -1
        self._live: Live | None = None
        if mode == "live":
            live = Live(self._panel(0.0), console=self._console, auto_refresh=False)
            live.start(refresh=True)
            self._restore = weakref.finalize(self, _stop, live, os.getpid())
            self._live = live
        elif mode == "plain":
            self._console.print(Text(title))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the run's step and new metrics, and draws if enough time has passed."""
        if self._mode == "off":
            return
        now = time.monotonic()
        if not self._history:
            self._history.append((now, step))
        self._step = step
        self._metrics.update(metrics)
        if now >= self._next:
            self._draw(now)

    def note(self, text: str) -> None:
        """Prints a line above the display: a checkpoint, a restarted worker."""
        if self._mode != "off":
            self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Draws once more and restores the terminal; a second call does nothing."""
        if self._mode == "off":
            return
        self._draw(time.monotonic())
        if self._live is not None:
            self._restore()
        self._mode = "off"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _draw(self, now: float) -> None:
        self._history.append((now, self._step))
        while len(self._history) > 2 and now - self._history[1][0] > _RATE_WINDOW_S:
            self._history.popleft()
        if self._live is not None:
            self._live.update(self._panel(now - self._started), refresh=True)
            cost = time.monotonic() - now
            self._next = now + max(_REDRAW_S, cost / _MAX_SHARE)
            return
        self._next = now + _LINE_S
        if self._step != self._printed:
            self._console.print(self._line(now - self._started), soft_wrap=True)
            self._printed = self._step

    def _rate(self) -> float:
        """Steps per second over the last 15 seconds; NaN before the second update."""
        if len(self._history) < 2:
            return math.nan
        (then, first), (now, last) = self._history[0], self._history[-1]
        return (last - first) / (now - then) if now > then else math.nan

    def _left(self) -> float:
        rate = self._rate()
        return max(self._total - self._step, 0) / rate if rate > 0 else math.nan

    def _line(self, elapsed: float) -> Text:
        parts = [
            f"{self._step:,}/{self._total:,} steps ({min(self._step / self._total, 1.0):.0%})",
            f"{number(self._rate())} steps/s",
            f"{clock(elapsed)} elapsed",
            f"{clock(self._left())} left",
        ]
        shown = [*_SHOWN[:_ON_A_LINE], *_OF_GAMES, *_returns(self._metrics)]
        parts += [f"{label} {number(self._metrics[key])}" for label, key in shown if key in self._metrics]
        return Text("  ".join(parts))

    def _panel(self, elapsed: float) -> RenderableType:
        head = Table.grid(padding=(0, 2), expand=True)
        head.add_column(ratio=1)
        head.add_column(justify="right", no_wrap=True)
        bar = ProgressBar(total=self._total, completed=min(self._step, self._total))
        head.add_row(bar, Text(f"{self._step:,} of {self._total:,} steps  {min(self._step / self._total, 1.0):.0%}"))
        times = Text(no_wrap=True, overflow="ellipsis")
        for value, label in (
            (number(self._rate()), " steps/s   "),
            (clock(elapsed), " elapsed   "),
            (clock(self._left()), " left"),
        ):
            times.append(value, style="bold").append(label, style="dim")
        body = Table.grid(padding=(0, 3))
        for _ in range(2):
            body.add_column(style="dim", no_wrap=True)
            body.add_column(justify="right", min_width=9, no_wrap=True)
        shown = [*_SHOWN, *_OF_GAMES, *_of_parts(self._metrics)]
        cells = [(label, number(self._metrics[key])) for label, key in shown if key in self._metrics]
        half = -(-len(cells) // 2)
        for i in range(half):
            body.add_row(*cells[i], *(cells[half + i] if half + i < len(cells) else ("", "")))
        parts = [head, times, *([Text(), body] if cells else [])]
        return Panel(Group(*parts), title=Text(self._title, style="bold"), title_align="left", padding=(0, 1))


def _of_parts(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Labels and names of the metrics of single policies, and of agents, where a run has several: `train/ID/loss`."""
    found: list[tuple[str, str]] = []
    for label, name in _SHOWN:
        kind, _, stat = name.partition("/")
        for key in metrics:
            head, *middle, tail = key.split("/")
            if (head, tail) == (kind, stat) and middle:
                found.append((f"{label} of {' '.join(middle)}", key))
    return found[:_MOST_PARTS]


def _returns(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Metrics of policies, then of agents, for a line: all of a kind, or none."""
    found: list[tuple[str, str]] = []
    returns = [part for part in _of_parts(metrics) if part[0].startswith("return")]
    for of_agents in (False, True):
        kind = [part for part in returns if part[1].startswith(_AGENT) == of_agents]
        if len(found) + len(kind) <= _ON_A_LINE:
            found += kind
    return found


def print_summary(title: str, rows: Mapping[str, str]) -> None:
    """Prints a table of two columns under a title, for the end of a run or the result of a command.

    Without its frame where a line is wider than the terminal: paths and commands are there to be copied.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    panel = Panel(table, title=Text(title, style="bold"), title_align="left", expand=False)
    console = _console()
    if console.measure(panel, options=console.options.update(width=_ANY_WIDTH)).maximum <= console.width:
        console.print(panel)
        return
    console.print(Text(title, style="bold"), soft_wrap=True)
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        for i, line in enumerate(value.splitlines()):
            console.print(Text(f"  {name if i == 0 else '':<{width}}  ", "dim").append(line, "default"), soft_wrap=True)


def _console(**settings: Any) -> Console:
    """A console on stdout whose writing never fails."""
    return Console(
        file=None if sys.stdout is None else cast(IO[str], UnfailingStream(sys.stdout)), highlight=False, **settings
    )


def _stop(live: Live, pid: int) -> None:
    if os.getpid() == pid:  # a forked worker's exit must not draw on the learner's terminal
        live.stop()


def number(value: float) -> str:
    """A number with three significant digits, whole from 1,000."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """A duration as `h:mm:ss`, `m:ss` below an hour, or `-:--` if it is not finite."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
