"""Few file descriptors, closed standard streams, no more processes, and short writes."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.processes import child, descriptors
from penstock.processes.descriptors import read_all, write_all
from penstock.processes.limits import require_room
from penstock.workers.process import DESCRIPTORS
from tests.slow import slow

pytestmark = pytest.mark.timeout(200)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_too_few_descriptors_are_a_config_error_with_counts_and_nothing_leaks() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = open_descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 60, limits[1]))
    try:
        match = rf"workers=16 need 112 file descriptors beside the \d+ .* have {before + 60} \(ulimit -n\).*workers<=5"
        with pytest.raises(ConfigError, match=match):
            ps.CpuSampler(T=4, B=16, workers=16).build("CartPole-v1")
        require_room(5, "workers", DESCRIPTORS, "none")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert open_descriptors() == before


def test_a_process_that_may_not_start_is_a_config_error_and_nothing_leaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(child, "subprocess", SimpleNamespace(Popen=refuse, DEVNULL=subprocess.DEVNULL))
    gc.collect()
    before = open_descriptors()
    with pytest.raises(ConfigError, match=r"cannot be started: .*\(ulimit -u.*use fewer workers"):
        ps.CpuSampler(T=4, B=2, workers=2).build("CartPole-v1")
    gc.collect()
    assert open_descriptors() == before


CLOSED = """
import os
{close}
from penstock.workers.env_check import check_apart
os._exit(check_apart("CartPole-v1").steps)
"""


@pytest.mark.parametrize("streams", [[0, 1, 2], *slow([0])])
def test_workers_start_where_standard_streams_are_closed(streams: list[int]) -> None:
    close = "; ".join(f"os.close({fd})" for fd in streams)
    assert subprocess.run([sys.executable, "-c", CLOSED.format(close=close)], timeout=150).returncode == 30


def test_a_short_write_is_followed_by_another_and_a_short_read_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors, "_MOST_AT_ONCE", 7)
    fd = os.memfd_create("test")
    data = bytes(range(100))
    write_all(fd, data, 5)
    assert read_all(fd, 100, 5) == data
    assert read_all(fd, 1000, 50) == data[45:]
    assert read_all(fd, 10, 1000) == b""
    os.close(fd)


def test_a_file_size_limit_is_named() -> None:
    script = (
        "import os, resource, signal; from penstock.processes.descriptors import write_all\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); fd = os.memfd_create('a')\n"
        "write_all(fd, b'x' * 900)\n"
        "try: write_all(fd, b'x' * 2000)\n"
        "except OSError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=100, capture_output=True, text=True)
    assert "a message of 2,000 bytes to or from a worker" in done.stdout, done
    assert "1,000 bytes (ulimit -f), raise that" in done.stdout


@pytest.mark.slow
def test_train_in_a_shell_with_few_descriptors_or_without_stdin(tmp_path: Any) -> None:
    train = f"{sys.executable} -m penstock train ppo --env CartPole-v1 --run.steps 256 --run.progress off"
    workers = "--sampler cpu --sampler.B 16 --sampler.workers 16"
    for line, code in (
        (f"ulimit -n 64; {train} {workers} --run.dir {tmp_path}/a", 2),
        (f"{train} --sampler cpu --sampler.workers 2 --run.dir {tmp_path}/b <&-", 0),
    ):
        done = subprocess.run(["bash", "-c", line], timeout=190, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert (code == 0) == ("ulimit -n" not in done.stderr)
