"""The page's server: this machine's own address, a secret in every path, and only what the page itself needs."""

from __future__ import annotations

import hmac
import http.server
import ipaddress
import json
import os
import re
import secrets
import socket
import socketserver
import sys
from email.message import Message
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from penstock.core.errors import ConfigError, words_of
from penstock.core.files import open_stored
from penstock.view.catalog import Catalog
from penstock.view.charts import Charts
from penstock.view.details import VIDEOS, run_details, run_signature, video_names

_PAGE = Path(__file__).parent / "page"
_KINDS = {
    "index.html": "text/html",
    "page.css": "text/css",
    "uPlot.min.css": "text/css",
    "icon.svg": "image/svg+xml",
    "uPlot.iife.min.js": "text/javascript",
    **dict.fromkeys(("elements.js", "charts.js", "list.js", "run.js", "timeline.js", "page.js"), "text/javascript"),
}
"""Files of the page and their types."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src "
    "'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TIMEOUT_S = 20.0
"""Seconds after which a connection is closed whose browser neither sends its request nor takes the answer."""
_CHUNK = 1 << 18
_LOOK_S = 0.2
"""Seconds between looks at whether the server is to end."""


class ViewServer(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """Serves the page of a folder's runs.

    Args:
        folder: what `penstock.runs` takes; one without runs is served too, as some may come.
        host: address to listen on. Any but this machine's own lets others in who have the page's whole address.
        port: 0 for a free one.

    Raises:
        ConfigError: there is no such folder, or nothing can listen on the address.
    """

    daemon_threads = True
    request_queue_size = 64  # a browser opens several lines at once
    timeout = _LOOK_S

    def __init__(self, folder: str | Path, host: str = "127.0.0.1", port: int = 0) -> None:
        self.catalog = Catalog(Path(folder))
        self.charts = Charts(self.catalog)
        self.token = secrets.token_urlsafe(16)
        self.host = host
        if not 0 <= port < 1 << 16:
            raise ConfigError(f"--port {port}; expected 0 for a free one, or up to 65535")
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            super().__init__((host, port), _Handler)
        except (OSError, UnicodeError) as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            cure = "choose another --port, or leave it out for a free one" if port else "choose another --host"
            raise ConfigError(f"cannot listen on {host}, port {port}: {text or error}; {cure}") from error

    @property
    def url(self) -> str:
        """The page's address, with its secret."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/{self.token}/"

    @property
    def is_private(self) -> bool:
        """True if only this machine can reach the page."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def server_bind(self) -> None:
        """Binds without asking a name server for this machine's name, as HTTPServer would."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.host, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """One line for a fault of ours; nothing for a browser that went away."""
        error = sys.exception()
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"penstock view: {words_of(error)}", file=sys.stderr)

    def is_own_name(self, header: str | None) -> bool:
        """True for a Host header that names this machine by `localhost`, by the given host, or by a number.

        A page of elsewhere whose name was made to lead here (DNS rebinding) has that name in it. Numbers cannot be made
        to lead elsewhere; others than loopback's only count where the server listens for them.
        """
        name = re.sub(r":\d+$", "", header or "").strip("[]").lower()
        if name in ("localhost", self.host.lower()):
            return True
        try:
            asked, own = ipaddress.ip_address(name), ipaddress.ip_address(self.host)
        except ValueError:
            return name in ("127.0.0.1", "::1")
        return asked.is_loopback or own.is_unspecified


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "penstock", ""
    timeout = _TIMEOUT_S
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """Answers a request of the page."""
        if not self.server.is_own_name(self.headers.get("Host")):
            self._refuse(403, "This page answers to its own address alone: the one that penstock view printed.")
            return
        path, _, asked = self.path.partition("?")
        token, slash, rest = unquote(path).removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(403, "Open the whole address that penstock view printed; it changes at every start.")
            return
        if not slash:  # the page's own links are relative
            self._begin(308, "text/plain", 0, {"Location": f"/{token}/"})
            return
        try:
            fields = parse_qs(asked, keep_blank_values=True, max_num_fields=8)
            self._answer(rest, {key: values[-1] for key, values in fields.items()})
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            print(f"penstock view: {words_of(error)}", file=sys.stderr)
            self._refuse(500, words_of(error))

    do_HEAD = do_GET

    def _answer(self, path: str, query: dict[str, str]) -> None:
        catalog = self.server.catalog
        if path in ("", *_KINDS):
            name = path or "index.html"
            self._send((_PAGE / name).read_bytes(), f"{_KINDS[name]}; charset=utf-8")
        elif path == "api/runs":
            seen = query.get("seen") == catalog.signature()
            self._send_json({"unchanged": True} if seen else catalog.listing())
        elif path == "api/chart":
            groups = query["groups"].split(",") if "groups" in query else None
            curves = self.server.charts.chart(query.get("metric", ""), query.get("x") == "wall", groups)
            self._send_json({"curves": curves})
        elif path == "api/run":
            entry = catalog.entry(query.get("id", ""))
            if entry is None:
                self._refuse(404, "This run is gone.")
            elif query.get("seen") == run_signature(entry):
                self._send_json({"unchanged": True})
            else:
                try:
                    with catalog.lock:
                        found = run_details(entry)
                except OSError as error:
                    self._refuse(404, f"This run cannot be read: {error.strerror or error}")
                else:
                    self._send_json(found)
        elif path.startswith("video/"):
            run_id, _, name = path.removeprefix("video/").partition("/")
            self._send_video(run_id, name)
        else:
            self._refuse(404, "There is nothing here.")

    def _send_video(self, run_id: str, name: str) -> None:
        """A video, or the part of it that a player asks for; its name must be one of those that the run lists."""
        entry = self.server.catalog.entry(run_id)
        if entry is None or name not in video_names(entry.path):
            self._refuse(404, "This video is gone.")
            return
        try:
            file = open_stored(entry.path / VIDEOS / name, entry.path)
        except OSError as error:
            self._refuse(404, f"This video cannot be read: {error.strerror or error}")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            part = asked_range(self.headers, size)
            if part is None:
                self._begin(416, "video/mp4", 0, {"Content-Range": f"bytes */{size}"})
                return
            start, stop = part
            partial = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if "Range" in self.headers else {}
            self._begin(206 if partial else 200, "video/mp4", stop - start, {"Accept-Ranges": "bytes", **partial})
            if self.command != "HEAD":
                self._copy(file, start, stop)

    def _copy(self, file: BufferedReader, start: int, stop: int) -> None:
        file.seek(start)
        while start < stop:
            data = file.read(min(_CHUNK, stop - start))
            if not data:  # it became shorter; the length that was promised cannot be kept
                self.close_connection = True
                return
            self.wfile.write(data)
            start += len(data)

    def _send_json(self, content: Any) -> None:
        self._send(json.dumps(content, separators=(",", ":"), allow_nan=False).encode(), "application/json")

    def _refuse(self, code: int, text: str) -> None:
        self._send(f"{text}\n".encode("utf-8", "backslashreplace"), "text/plain; charset=utf-8", code)

    def _send(self, data: bytes, kind: str, code: int = 200) -> None:
        self._begin(code, kind, len(data), {})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _begin(self, code: int, kind: str, length: int, more: dict[str, str]) -> None:
        self.send_response(code)
        for name, value in {"Content-Type": kind, "Content-Length": str(length), **_HEADERS, **more}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing of a request, since the terminal shows the page's address alone."""


def asked_range(headers: Message, size: int) -> tuple[int, int] | None:
    """Start and end of the bytes that a request asks for, all without a Range; None if there are no such bytes."""
    text = headers.get("Range")
    if text is None:
        return 0, size
    found = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", text.strip())
    if found is None or not any(found.groups()):
        return None
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(size, int(last) + 1) if first and last else size
    return (start, stop) if start < stop else None
