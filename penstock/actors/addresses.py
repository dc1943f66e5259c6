"""Addresses: the cluster that a setting means, whether it is this user's and answers, and what listens where."""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.core.errors import ConfigError

PREFIX = "penstock-ray-"
"""Begins the name of the folder of a cluster that `start_ray` started, which nobody joins."""

_HELLO, _SETTINGS = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5), b"\x04"
"""The preface of an HTTP/2 (and gRPC) client (RFC 9113, 3.4) with empty settings; and the frame type of settings."""


class ClusterAddress(NamedTuple):
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


def find_cluster(address: str, timeout_s: float) -> ClusterAddress:
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
    return ClusterAddress(address, _is_loopback(host))


def nodes_here() -> list[Node]:
    """The raylets of this machine, started by any user, except those of clusters that are not to be joined."""
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
    """Raises ConfigError unless something that speaks HTTP/2 listens there; Ray itself waits for it for 5 minutes."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as link:
            link.sendall(_HELLO)
            head = link.recv(9)  # settings of its own
        seen = "" if head[3:4] == _SETTINGS else f"something answers there that is not Ray: {head!r}"
    except OSError as error:
        seen = f"{type(error).__name__}: {error}"
    if seen:
        raise ConfigError(
            f"no cluster answers at {address} within {timeout_s:g} s ({seen}); is it up (`ray status --address "
            f"{address}`), and may this machine reach that port? Or use address='local'"
        )


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
