"""Addresses: the cluster that a setting means, whether it is this user's and answers, and what listens where."""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError

PREFIX = "penstock-ray-"
"""Begins the name of the folder of a cluster that `start_ray` started, which nobody joins."""
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + struct.pack(">I", 0)[1:] + b"\x04\x00" + bytes(4)
"""What a client of HTTP/2, and so of gRPC, says first (RFC 9113, 3.4), with empty settings."""
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
"""Types of its frames."""
_END_STREAM, _END_HEADERS = 1, 4
_CALL = "/ray.rpc.NodeInfoGcsService/GetClusterId"
"""The first call of everyone who joins; its request is empty."""


class Found(NamedTuple):
    """A cluster to join."""

    address: str
    """HOST:PORT of its control service, as its nodes know it."""
    loopback: bool
    """It is reachable on this machine alone."""


class Node(NamedTuple):
    """A raylet of this machine, as its command line tells."""

    address: str
    uid: int
    user: str


def find_cluster(address: str, timeout_s: float) -> Found:
    """Returns the cluster that `auto` or HOST:PORT means, which answered.

    Raises:
        ConfigError: there is none, or several, it is another user's, or there is no answer in time.
    """
    nodes = nodes_here()
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", "") or _only(nodes)
        _refuse_others(address, nodes)
    host, port = _parsed(address)
    if _is_loopback(host):  # its nodes know the cluster by another name of this machine
        known = {node.address for node in nodes if node.address.endswith(f":{port}")}
        if len(known) == 1:
            address = known.pop()
            host, port = _parsed(address)
    _require_answer(address, host, port, timeout_s)
    return Found(address, _is_loopback(host))


def nodes_here() -> list[Node]:
    """The raylets that run on this machine, whoever started them, but those of clusters that nobody is to join."""
    psutil: Any = importlib.import_module("psutil")
    found: list[Node] = []
    for process in psutil.process_iter(["name", "cmdline", "username"]):
        line = " ".join(process.info["cmdline"] or [])
        known = re.search(r"--gcs-address=(\S+)", line)
        if process.info["name"] == "raylet" and known and f"/{PREFIX}" not in line:
            try:
                found.append(Node(known[1], process.uids().real, str(process.info["username"])))
            except psutil.Error:  # it has ended
                continue
    return found


def _only(nodes: list[Node]) -> str:
    ours = sorted({node.address for node in nodes if node.uid == os.getuid()})
    if len(ours) == 1:
        return ours[0]
    if ours:
        raise ConfigError(f"address='auto' finds {len(ours)} clusters: {', '.join(ours)}; say which as the address")
    theirs = sorted({f"{node.address} of {node.user}" for node in nodes})
    if theirs:
        raise ConfigError(
            f"address='auto' finds only the cluster {', '.join(theirs)}: its owner could run code as you, since Ray "
            "unpickles what its nodes send. Use address='local', start your own (`ray start --head`), or, if you trust "
            "its owner, say its HOST:PORT"
        )
    raise ConfigError(
        "address='auto' finds no cluster on this machine, and RAY_ADDRESS names none; start one (`ray start --head`), "
        "say its HOST:PORT, or use address='local'"
    )


def _refuse_others(address: str, nodes: list[Node]) -> None:
    for node in nodes:
        if node.address == address and node.uid != os.getuid():
            raise ConfigError(
                f"address='auto' means {address} by RAY_ADDRESS, a cluster of {node.user}, who could run code as you; "
                "if you trust them, say that address itself"
            )


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        client = "; ray:// is Ray Client, which runners cannot use: start the run on a node" if "://" in address else ""
        raise ConfigError(f"address={address!r} is no address of a cluster; expected local, auto or HOST:PORT{client}")
    return host.strip("[]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _require_answer(address: str, host: str, port: int, timeout_s: float) -> None:
    """Raises ConfigError unless a server of gRPC answers there; Ray itself waits for minutes, then ends the process."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as link:
            link.sendall(_HELLO)
            head = link.recv(9)  # settings of its own
        seen = "" if len(head) == 9 and head[3] == _SETTINGS else f"something answers there that is not Ray: {head!r}"
    except OSError as error:
        seen = f"{type(error).__name__}: {error}"
    if seen:
        raise ConfigError(
            f"no cluster answers at {address} within {timeout_s:g} s ({seen}); is it up (`ray status --address "
            f"{address}`), and may this machine reach that port? Or use address='local'"
        )


def answers_without_token(address: str, timeout_s: float) -> bool:
    """True if the control service of a cluster answers a call that brings no token, whoever it is from.

    Ray's own client complains to the terminal where it is refused, as it should be.
    """
    headers = {":method": "POST", ":scheme": "http", ":path": _CALL, ":authority": address, "te": "trailers",
               "content-type": "application/grpc"}  # fmt: skip
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())  # literals: RFC 7541, 6.2.2
    asked = _frame(_HEADERS, _END_HEADERS, block) + _frame(_DATA, _END_STREAM, bytes(5))  # no bytes, not compressed
    until = time.monotonic() + timeout_s
    try:
        with socket.create_connection(_parsed(address), timeout=timeout_s) as link:
            link.sendall(_HELLO + asked)
            while True:
                size, kind, flags, _ = struct.unpack(">IBBI", b"\0" + _received(link, 9, until))
                _received(link, size, until)
                if kind == _DATA:
                    return True
                if kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
                    return False
    except OSError:
        return False  # whether it answers at all is for others to say


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    """A frame of the connection's first stream (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, 1) + payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


def _received(link: socket.socket, size: int, until: float) -> bytes:
    """So many bytes. Raises OSError if the connection ends before, or there is no time left."""
    found = b""
    while len(found) < size:
        link.settimeout(max(until - time.monotonic(), 0.001))
        part = link.recv(size - len(found))
        if not part:
            raise ConnectionError("closed")
        found += part
    return found


def listeners_of(pid: int, children: bool = True) -> list[str]:
    """`HOST:PORT NAME` of all that listens in a process and, if asked for, its descendants, sorted."""
    psutil: Any = importlib.import_module("psutil")
    root = psutil.Process(pid)
    names = {p.pid: p for p in [root, *(root.children(recursive=True) if children else [])]}
    found: set[str] = set()
    for link in psutil.net_connections("inet"):
        if link.pid in names and link.status == psutil.CONN_LISTEN:
            try:
                name = "this process" if link.pid == os.getpid() else names[link.pid].name()
            except psutil.Error:  # it has ended
                continue
            host = link.laddr.ip.removeprefix("::ffff:")
            found.add(f"{f'[{host}]' if ':' in host else host}:{link.laddr.port} {name}")
    return sorted(found)


def require_loopback(listeners: Sequence[str]) -> None:
    """Raises ConfigError if anything listens on another interface than the loopback one."""
    open_to_all = [x for x in listeners if not _is_loopback(_parsed(x.split()[0])[0])]
    if open_to_all:
        raise ConfigError(
            f"Ray listens on other interfaces than the loopback one: {', '.join(open_to_all)}; the cluster was ended. "
            "Import ray after penstock has started it, or set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before"
        )
