"""The process of one runner: makes the object, carries calls out, and answers with plain data."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import penstock.actors.note as note
from penstock.actors.link import Packet, placed, receive, send
from penstock.core.errors import words_of
from penstock.core.wire import encode
from penstock.processes.serialization import unship


def main() -> None:
    """Serves the calls that come by the link which the command line names, until its owner closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spawn_args = json.loads(sys.argv[1])
    note.take(spawn_args["note"])
    link = socket.socket(fileno=spawn_args["link"])
    link.set_inheritable(False)
    first = receive(link)
    if first is None:
        return
    runner, refused = _make(first)
    while (packet := receive(link)) is not None:
        send(link, packet.number, refused or _answer(runner, packet))
        del packet  # its arguments are released before the next call arrives
    link.close()
    os._exit(0)  # despite threads that the runner has left


def _make(packet: Packet) -> tuple[Any, bytes]:
    """The object, or why there is none, as the answer to every call."""
    try:
        cls, args = unship(packet.body)
        return cls(*placed(args, packet.fds)), b""
    except Exception as error:
        return None, _refusal(error)


def _answer(runner: Any, packet: Packet) -> bytes:
    try:
        method, args = unship(packet.body)
        found = getattr(runner, method)(*placed(args, packet.fds))
    except Exception as error:
        return _refusal(error)
    try:
        return encode({"value": found})
    except TypeError as error:
        return _refusal(TypeError(f"the result of {method}() cannot travel: {error}"))


def _refusal(error: Exception) -> bytes:
    trace = "".join(traceback.format_exception(error))
    return encode({"error": words_of(error), "trace": trace})
