"""The process of one runner: makes the object, carries calls out, and answers with plain data."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import cloudpickle

from penstock.core.errors import words_of
from penstock.core.wire import encode
from penstock.distributed.backends.link import Packet, Place, mapped, receive, send


def main() -> None:
    """Serves the calls that come by the link which the command line names, until its owner closes it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    link = socket.socket(fileno=json.loads(sys.argv[1])["link"])
    link.set_inheritable(False)
    first = receive(link)
    if first is None:
        return
    runner, refused = _make(first)
    while (packet := receive(link)) is not None:
        send(link, packet.number, refused or _answer(runner, packet))
        del packet  # what it brought along is let go of before the next one comes
    link.close()
    os._exit(0)  # whatever threads the runner has left


def _make(packet: Packet) -> tuple[Any, bytes]:
    """The object, or why there is none, as the answer to every call."""
    size = int.from_bytes(packet.body[:8], "little")
    sys.path[:] = json.loads(packet.body[8 : 8 + size])  # unpickling needs it
    try:
        cls, args = cloudpickle.loads(packet.body[8 + size :])
        return cls(*args), b""
    except Exception as error:
        return None, _refusal(error)


def _answer(runner: Any, packet: Packet) -> bytes:
    try:
        method, args = cloudpickle.loads(packet.body)
        places = [mapped(fd) for fd in packet.fds]
        found = getattr(runner, method)(*[places[x.which] if isinstance(x, Place) else x for x in args])
    except Exception as error:
        return _refusal(error)
    try:
        return encode({"value": found})
    except TypeError as error:
        return _refusal(TypeError(f"the result of {method}() cannot travel: {error}"))


def _refusal(error: Exception) -> bytes:
    trace = "".join(traceback.format_exception(error))
    return encode({"error": words_of(error), "trace": trace})
