"""A page that is served in a thread, runs to serve, and requests as a browser or an attacker makes them."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.view.server import ViewServer
from tests.run.plots.made import PPO_META, make_run, settings


@contextmanager
def serving(folder: Path, **where: Any) -> Generator[ViewServer]:
    with ViewServer(folder, **where) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
            assert not thread.is_alive()


def ask(server: ViewServer, path: str = "", method: str = "GET", raw: bool = False, **headers: str) -> Any:
    """The answer with its `body`; `raw`: the path as it is, without the secret."""
    port = server.server_address[1]
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        line.putrequest(method, path if raw else f"/{server.token}/{path}", skip_host="Host" in headers)
        for name, value in headers.items():
            line.putheader(name, value)
        line.endheaders()
        answer: Any = line.getresponse()
        answer.body = answer.read()
    finally:
        line.close()
    return answer


def told(server: ViewServer, path: str) -> Any:
    answer = ask(server, path)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def three_runs(folder: Path) -> Path:
    """Two seeds of one curve and another one."""
    for name, slope, seed, lr in (("a-s0", 1.0, 0, 1e-3), ("a-s1", 2.0, 1, 1e-3), ("b", 5.0, 0, 1e-2)):
        make_run(folder / name, slope, {**PPO_META, "seed": seed}, settings(seed, lr), evals=True)
    return folder
