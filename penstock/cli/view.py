"""`penstock view [FOLDER]`: a page of runs in the browser."""

from __future__ import annotations

import signal
import sys
import threading
import webbrowser
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from penstock.cli.options import Parser
from penstock.core.machine import counted, has_display

_DESCRIPTION = """Shows a folder's runs in the browser, as they grow: curves, settings, evaluations, videos.

  penstock view
  penstock view runs/cartpole --port 8000

The page is served by this machine to itself alone, under an address with a secret in it; nothing is sent anywhere.
Ctrl-C ends it.
"""


def run(argv: list[str]) -> int:
    """Serves the page until a signal; returns the exit code."""
    parser = Parser("view", _DESCRIPTION)
    parser.add_argument(
        "folder", nargs="?", default="runs", metavar="FOLDER", help="a run, or a folder that holds some"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: a free one)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine's own)")
    parser.add_argument("--no-browser", action="store_true", help="print the page's address, and open nothing")
    args = parser.parse_args(argv)
    from penstock.view.server import ViewServer  # it loads numpy, which help does not need

    with _ending() as ended, ViewServer(args.folder, args.host, args.port) as server:
        count = len(server.catalog.refresh())
        print(f"{counted(count, 'run')} in {server.catalog.folder}; the page, until Ctrl-C: {server.url}", flush=True)
        if not count:
            print(
                f"penstock: no run in {server.catalog.folder} yet, no metrics.jsonl: they appear as they begin",
                file=sys.stderr,
            )
        if not server.is_private:
            text = f"penstock: on {args.host} whoever has this address can read these runs, over an open line"
            print(text, file=sys.stderr)
        if not args.no_browser and has_display():
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        while not ended:
            server.handle_request()
    return 128 + ended[0]


@contextmanager
def _ending() -> Generator[list[int]]:
    """Signals that ask for the end, in a list that is empty until then, instead of ending the process at once."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    names = [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for name in names if signal.getsignal(number := getattr(signal, name)) is not signal.SIG_IGN]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
