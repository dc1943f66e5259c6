from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from penstock.actors import addresses
from penstock.actors.addresses import (
    ClusterAddress,
    Node,
    find_cluster,
    listeners_of,
    nodes_here,
    require_loopback,
)
from penstock.actors.cluster import start_ray
from penstock.core.errors import ConfigError, MissingExtraError

pytestmark = pytest.mark.timeout(60)
ME, OTHER = os.getuid(), os.getuid() + 1
HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Server:
    """Listens on the loopback interface, and says one thing to each who comes."""

    def __init__(self, says: bytes | None) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.heard: list[bytes] = []
        if says is not None:
            threading.Thread(target=self._serve, args=(says,), daemon=True).start()

    def _serve(self, says: bytes) -> None:
        try:
            while True:
                link, _ = self.socket.accept()
                with link:
                    self.heard.append(link.recv(100))
                    link.sendall(says)
        except OSError:
            pass

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()


@pytest.fixture
def gcs() -> Iterator[Server]:
    server = Server(HTTP2_SETTINGS)
    yield server
    server.close()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Node]:
    found: list[Node] = []
    monkeypatch.setattr(addresses, "nodes_here", lambda: found)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def refused(address: str, text: str, timeout_s: float = 5.0) -> str:
    with pytest.raises(ConfigError, match=text) as found:
        find_cluster(address, timeout_s)
    return str(found.value)


@pytest.mark.parametrize("address", ["", "locale", "host", "host:", ":6379", "host:0", "host:65536", "host:x"])
def test_what_is_no_address(address: str) -> None:
    refused(address, rf"address={address!r} is no address of a cluster; expected local, auto or HOST:PORT")


def test_ray_client_is_named() -> None:
    refused("ray://host:10001", "Ray Client, which runners cannot use: start the run on a node")


def test_a_server_that_answers_is_a_cluster(gcs: Server, nodes: list[Node]) -> None:
    assert find_cluster(gcs.address, 5.0) == ClusterAddress(gcs.address, True)
    assert gcs.heard[0].startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0")


def test_nobody_there(nodes: list[Node]) -> None:
    server = Server(None)
    server.close()
    refused(server.address, rf"no cluster answers at {server.address} within 5 s \(ConnectionRefusedError.*ray status")


def test_somebody_who_says_nothing_is_waited_for_no_longer_than_the_limit(nodes: list[Node]) -> None:
    server = Server(None)
    began = time.monotonic()
    refused(server.address, r"within 0\.2 s \(TimeoutError", 0.2)
    assert time.monotonic() - began < 30.0
    server.close()


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"SSH-2"])
def test_somebody_else(says: bytes, nodes: list[Node]) -> None:
    server = Server(says)
    refused(server.address, "something answers there that is not Ray|ConnectionResetError")
    server.close()


def test_auto_is_the_one_cluster_of_this_user(gcs: Server, nodes: list[Node]) -> None:
    nodes += [Node("10.0.0.1:6379", OTHER, "mallory"), Node(gcs.address, ME, "me"), Node(gcs.address, ME, "me")]
    assert find_cluster("auto", 5.0).address == gcs.address


def test_auto_never_takes_another_users(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    refused("auto", "finds no cluster on this machine, and RAY_ADDRESS names none; start one")
    nodes.append(Node("10.0.0.1:6379", OTHER, "mallory"))
    refused("auto", "only the cluster 10.0.0.1:6379 of mallory: its owner could run code as you")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    refused("auto", "means 10.0.0.1:6379 by RAY_ADDRESS, a cluster of mallory")


def test_auto_does_not_choose(nodes: list[Node]) -> None:
    nodes += [Node("10.0.0.1:1", ME, "me"), Node("10.0.0.1:2", ME, "me")]
    refused("auto", "finds 2 clusters: 10.0.0.1:1, 10.0.0.1:2; say which")


def test_auto_takes_what_this_users_environment_names(
    gcs: Server, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.append(Node("10.0.0.1:1", ME, "me"))
    monkeypatch.setenv("RAY_ADDRESS", gcs.address)
    assert find_cluster("auto", 5.0).address == gcs.address


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_loopback_name_of_a_cluster_becomes_the_one_its_nodes_know(
    host: str, gcs: Server, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = gcs.address.split(":")[1]
    nodes.append(Node(f"10.0.0.1:{port}", ME, "me"))
    asked: list[str] = []
    monkeypatch.setattr(addresses, "_require_answer", lambda address, *rest: asked.append(address))
    assert find_cluster(f"{host}:{port}", 5.0) == ClusterAddress(f"10.0.0.1:{port}", False)
    assert asked == [f"10.0.0.1:{port}"]


def test_raylets_are_found_by_their_command_line_but_not_those_of_local_clusters() -> None:
    """A copy of `sleep` by the name that matters."""
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b'raylet', 0, 0, 0); print(flush=True); time.sleep(60)"
    lines = [
        ["--gcs-address=10.9.9.9:1"],
        ["--gcs-address=10.9.9.9:2", "--store=/tmp/penstock-ray-x/ray/s"],
        ["--other"],
    ]
    started = [subprocess.Popen([sys.executable, "-c", code, *line], stdout=subprocess.PIPE) for line in lines]
    try:
        for process in started:
            assert process.stdout and process.stdout.readline()
        found = [node for node in nodes_here() if node.address.startswith("10.9.9.9:")]
        assert [(node.address, node.uid) for node in found] == [("10.9.9.9:1", ME)]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=20)


def test_what_listens_is_seen_and_anything_but_loopback_is_refused() -> None:
    server = Server(None)
    mine = listeners_of(os.getpid())
    assert f"{server.address} this process" in mine
    require_loopback([f"{server.address} this process", "[::1]:5 gcs_server"])
    for outside in ("0.0.0.0:7 raylet", "[::]:7 raylet", "10.0.0.1:7 raylet"):
        with pytest.raises(ConfigError, match=rf"other interfaces.*{re.escape(outside)}; the cluster was ended"):
            require_loopback(["127.0.0.1:5 gcs_server", outside])
    server.close()


def test_ray_missing_is_an_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"ray is not installed.*pip install 'penstock\[ray\]'"):
        start_ray()


def test_ray_is_imported_by_nothing_before_it_is_asked_for() -> None:
    code = (
        "import sys, penstock.actors.cluster, penstock.actors.on_ray\n"
        "import penstock.actors.processes, penstock.actors.in_process\n"
        "assert 'ray' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
