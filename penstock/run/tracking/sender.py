"""The thread of a tracker, which sends what the run directory holds: it costs the run little and never stops it."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from penstock.core.errors import words_of
from penstock.core.machine import counted
from penstock.run.tracking.backlog import Backlog
from penstock.run.tracking.tracker import Tracker, make_tracker

_LOOK_S = 30.0
"""The longest time without a look at the directory, of which videos appear without a row."""
_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
"""Pause after a failure, which doubles each time up to the longest."""
_CALL_S = 30.0
"""At the end, patience with a call of a tracker that has begun, from the call's beginning."""
_TELL_S, _TICK_S = 2.0, 0.01
_State = Literal["import", "start", "call", "idle", "pause"]


class Sender:
    """Feeds one tracker from a thread of its own; the run directory is its queue, so a full or dead one loses no row.

    A failure is kept in `trouble`. The tracker is then made anew, after pauses, and gets what it lacks.

    Args:
        run_dir: holds config.json and meta.json already.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.name, self.trouble = name, ""
        self._backlog = Backlog(run_dir, name)
        self._news, self._cut, self._ended_at = threading.Event(), False, 0.0
        self._state: _State = "import"
        self._since = time.monotonic()
        self._refused = set[Path]()
        self._thread = threading.Thread(target=self._serve, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tells that there may be something to send; takes microseconds."""
        self._news.set()

    def rewind(self) -> None:
        """Tells that metrics.jsonl was cut, and its rows are about to be repeated."""
        self._cut = True
        self._news.set()

    def end(self) -> None:
        """Has it send what is left, with the final policy, and end; returns at once."""
        self._ended_at = time.monotonic()
        self._news.set()

    def awaited(self, start_s: float) -> bool:
        """True while it is at work and worth waiting for, after `end`; see `finish`."""
        state, began = self._state, self._since
        if state in ("pause", "start", "idle"):
            began = max(began, self._ended_at)
        patience_s = start_s if state in ("pause", "start") else _CALL_S
        return self._thread.is_alive() and time.monotonic() - began < patience_s

    def left(self) -> str:
        """What to say of a tracker that has not got all; "" if it has. For the time after `awaited` is False."""
        rows, alive = 0, self._thread.is_alive()
        with contextlib.suppress(OSError):
            rows = self._backlog.unsent()
        if not rows and not alive and not self.trouble:
            return ""
        why = "does not answer" if alive else f"failed ({self.trouble})" if self.trouble else "has ended"
        what = f"{counted(rows, 'row')} not sent" if rows else "files may not be sent"
        return f"tracker {self.name} {why}, {what}: penstock track {self._backlog.run_dir} sends them"

    def _serve(self) -> None:
        pause = _RETRY_S
        while True:
            last = bool(self._ended_at)
            try:
                self._follow()
                return
            except (Exception, SystemExit) as error:
                self.trouble = self._words(error)
            self._enter("pause")
            if last:
                return
            until = time.monotonic() + pause
            while not self._ended_at and (left_s := until - time.monotonic()) > 0:
                self._news.wait(left_s)
                self._news.clear()
            pause = min(2 * pause, _LONGEST_RETRY_S)

    def _follow(self) -> None:
        """Sends with a new tracker until the end of the run."""
        self._enter("import")
        self._backlog.rewind()
        run, tracker = self._backlog.run(), make_tracker(self.name)
        try:
            self._enter("start")
            tracker.start(run)
            while not self._send(tracker):
                self._enter("idle")
                self._news.wait(_LOOK_S)
            self._enter("call")
            tracker.close()
        except BaseException:
            with contextlib.suppress(Exception, SystemExit):
                tracker.close()
            raise
        if not self._refused:
            self.trouble = ""

    def _send(self, tracker: Tracker) -> bool:
        """Sends what there is; True if the run has ended, so that nothing more will come."""
        self._news.clear()
        final = bool(self._ended_at)  # before the directory is looked at
        if self._cut:
            self._cut = False
            self._backlog.rewind()
        self._enter("call")
        for step, row in self._backlog.rows():
            tracker.write(step, row)
            self._enter("call")
        for path, kind in self._backlog.files(final):
            if path in self._refused:
                continue
            self._enter("call")
            try:
                tracker.artifact(path, kind)
            except (Exception, SystemExit) as error:  # rows must not wait for it
                self._refused.add(path)
                self.trouble = f"{path.name}: {self._words(error)}"
            else:
                self._backlog.sent(path)
        return final

    def _words(self, error: BaseException) -> str:
        """An error in words, of a tracker of the user's own with file and line of the deepest frame in its package."""
        package = self.name.rpartition(":")[0].partition(".")[0]
        frames = traceback.walk_tb(error.__traceback__)
        own = [(f, line) for f, line in frames if f.f_globals.get("__name__", "").partition(".")[0] == package]
        return words_of(error) + (f", at {own[-1][0].f_code.co_filename}:{own[-1][1]}" if own else "")

    def _enter(self, state: _State) -> None:
        self._since = time.monotonic()  # first: `awaited` reads the state first
        self._state = state


def finish(senders: Sequence[Sender], say: Callable[[str], None], most_s: float = 60.0, start_s: float = 0.7) -> bool:
    """Has trackers send what is left and end, in bounded time; says what they could not get. True if they got all.

    Args:
        most_s: patience with all of them. start_s: with one that has never begun, as its server may never answer.
    """
    for sender in senders:
        sender.end()
    began, told = time.monotonic(), False
    while waiting := [sender.name for sender in senders if sender.awaited(start_s)]:
        waited_s = time.monotonic() - began
        if waited_s > most_s:
            break
        if waited_s > _TELL_S and not told:
            told = True
            say(f"waiting for {' and '.join(waiting)}, at most {most_s:.0f} s")
        time.sleep(_TICK_S)
    left = [text for sender in senders if (text := sender.left())]
    for text in left:
        say(text)
    return not left
