"""The page's server answers to its own name and secret alone, and hands out nothing but what the page lists."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from penstock.core.errors import ConfigError
from penstock.view.server import ViewServer
from tests.view.served import ask, serving, three_runs, told


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[ViewServer]:
    with serving(three_runs(tmp_path_factory.mktemp("runs"))) as server:
        yield server


def test_every_file_that_the_page_names_is_served_under_a_strict_policy(server: ViewServer) -> None:
    page = Path(__file__).parents[2] / "penstock" / "view" / "page"
    for name in ("", *(path.name for path in page.iterdir() if path.name != "uPlot-LICENSE.txt")):
        answer = ask(server, name)
        assert answer.status == 200, name
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy and "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer" and answer.headers["Cache-Control"] == "no-store"
        kind = answer.headers["Content-Type"].split(";")[0]
        assert kind == {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}.get(
            name.rpartition(".")[2], "text/html"
        )
    text = ask(server).body.decode()
    assert "<script>" not in text and "style=" not in text
    assert "MIT License" in (page / "uPlot-LICENSE.txt").read_text()
    assert "v1.6.32" in (page / "uPlot.iife.min.js").read_text()[:200]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    page = Path(__file__).parents[2] / "penstock" / "view" / "page"
    for path in page.iterdir():
        if path.name not in ("uPlot-LICENSE.txt", "uPlot.iife.min.js"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http:" not in text and "https:" not in text and "innerHTML" not in text, path


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "127.0.0.1:1", "localhost:8080", "127.0.0.2"]
)
def test_it_answers_to_names_of_this_machine(host: str, server: ViewServer) -> None:
    assert ask(server, "api/runs", Host=host).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "10.0.0.1", "a@127.0.0.1", "[::]"],
)
def test_it_answers_to_no_other_name(host: str, server: ViewServer) -> None:
    for path in ("", "api/runs", "page.js"):
        answer = ask(server, path, Host=host)
        assert answer.status == 403 and b"own address alone" in answer.body and b"a-s0" not in answer.body


def test_a_request_without_a_host_is_refused(server: ViewServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=10) as line:
        line.sendall(f"GET /{server.token}/api/runs HTTP/1.0\r\n\r\n".encode())
        assert b" 403 " in line.recv(4096)


def test_a_server_for_every_address_answers_to_numbers_but_to_no_foreign_name(tmp_path: Path) -> None:
    with serving(three_runs(tmp_path), host="0.0.0.0") as server:
        assert not server.is_private
        assert ask(server, "api/runs", Host="10.1.2.3:80").status == 200
        assert ask(server, "api/runs", Host="evil.example").status == 403
    with serving(tmp_path) as server:
        assert server.is_private


def test_without_the_secret_nothing_is_told(tmp_path: Path) -> None:
    with serving(three_runs(tmp_path)) as server, serving(tmp_path) as other:
        assert len(server.token) >= 20 and server.token != other.token
        for path in (
            "/",
            "/api/runs",
            "/page.js",
            f"/{other.token}/api/runs",
            f"/{server.token[:-1]}/",
            "//",
            "*",
            "/%00/",
            "/%C3%A9",
        ):
            answer = ask(server, path, raw=True)
            assert answer.status == 403, path
            assert b"a-s0" not in answer.body and server.token.encode() not in answer.body
        bare = ask(server, f"/{server.token}", raw=True)
        assert bare.status == 308 and bare.headers["Location"] == f"/{server.token}/"


@pytest.mark.parametrize(
    "path",
    [
        "../pyproject.toml", "..%2f..%2fetc%2fpasswd", "page/../server.py", "server.py", "uPlot-LICENSE.txt", "api", "api/",
        "api/nothing", "video/", "video/x", "video/x/y.mp4", "/etc/passwd", "%2fetc%2fpasswd", ".%00.", "api/run?id=../a-s0",
    ],
)  # fmt: skip
def test_no_path_leads_anywhere_else(path: str, server: ViewServer) -> None:
    answer = ask(server, path)
    assert answer.status == 404 and len(answer.body) < 60


def test_no_curve_is_an_answer_too(server: ViewServer) -> None:
    at = "api/chart?metric=rollout/ep_rew_mean&x=steps"
    assert len(told(server, at)["curves"]) == 2 and told(server, f"{at}&groups=")["curves"] == []


def test_videos_are_those_that_a_run_lists_whole_or_in_part(tmp_path: Path) -> None:
    runs = three_runs(tmp_path / "runs")
    videos = runs / "b" / "videos"
    videos.mkdir()
    data = bytes(range(256)) * 4
    (videos / "000000000007.mp4").write_bytes(data)
    (videos / "other.txt").write_bytes(b"x")
    (videos / "folder.mp4").mkdir()
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (videos / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    with serving(runs) as server:
        run = next(one for one in told(server, "api/runs")["runs"] if one["name"] == "b")["id"]
        assert told(server, f"api/run?id={run}")["videos"] == ["000000000007.mp4"]
        at = f"video/{run}/000000000007.mp4"
        whole = ask(server, at)
        assert (whole.status, whole.body, whole.headers["Content-Type"]) == (200, data, "video/mp4")
        assert ask(server, at, "HEAD").body == b"" and ask(server, at, "HEAD").headers["Content-Length"] == "1024"
        for text, part in (
            ("bytes=0-", data),
            ("bytes=10-19", data[10:20]),
            ("bytes=-5", data[-5:]),
            ("bytes=1000-9999", data[1000:]),
        ):
            answer = ask(server, at, Range=text)
            assert (answer.status, answer.body) == (206, part), text
        assert ask(server, at, Range="bytes=10-19").headers["Content-Range"] == "bytes 10-19/1024"
        for text in ("bytes=1024-", "bytes=5-4", "bytes=-", "bytes=a-b", "lines=1-2", "bytes=0-1,3-4", "bytes=-0"):
            assert ask(server, at, Range=text).status == 416, text
        for name in (
            "other.txt",
            "link.mp4",
            "folder.mp4",
            "../config.json",
            "..%2fconfig.json",
            "%2e%2e/config.json",
            "",
        ):
            assert ask(server, f"video/{run}/{name}").status == 404, name


def test_other_methods_are_refused_and_a_fault_ends_one_answer_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(three_runs(tmp_path)) as server:
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "api/runs", method).status == 501
        server.charts.chart = None  # pyright: ignore
        answer = ask(server, "api/chart?metric=x")
        assert answer.status == 500 and b"TypeError" in answer.body
        assert ask(server, "api/runs").status == 200
    assert "penstock view: TypeError" in capsys.readouterr().err


def test_a_browser_that_says_nothing_or_goes_away_keeps_nobody_waiting(tmp_path: Path) -> None:
    with serving(three_runs(tmp_path)) as server:
        address = ("127.0.0.1", server.server_address[1])
        silent = [socket.create_connection(address, timeout=10) for _ in range(20)]
        gone = socket.create_connection(address, timeout=10)
        gone.sendall(f"GET /{server.token}/api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        gone.close()
        assert told(server, "api/runs")["runs"]
        started = time.monotonic()
    assert time.monotonic() - started < 5, "the end waits for no browser"
    for line in silent:
        line.close()


def test_what_it_cannot_listen_on_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1, port {port}: .*use.*choose another --port"):
            ViewServer(tmp_path, port=port)
    with pytest.raises(ConfigError, match="--port 70000; expected 0 for a free one, or up to 65535"):
        ViewServer(tmp_path, port=70000)
    for host in ("192.0.2.1", "no such host", "a" * 80):
        with pytest.raises(ConfigError, match=r"cannot listen on .*, port 0: .*choose another --host"):
            ViewServer(tmp_path, host=host)
    (tmp_path / "file").write_text("x")
    for name in ("missing", "file"):
        with pytest.raises(ConfigError, match=f"no run in .*{name}: "):
            ViewServer(tmp_path / name)
