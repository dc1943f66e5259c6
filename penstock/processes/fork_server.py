"""Process of which workers that act are forked: it has imported torch, runs nothing else, and forks when it is told.

A worker so is ready in milliseconds and shares the memory of its imports with the others. The learner talks with this
process through a socket, one request at a time (see `penstock.processes.fork_client`). A worker is a child of this
process, which therefore reaps it and passes its exit status on, when it is asked to and not before: until then the
number of the worker cannot be another's. Where this process ends, so do all that it has forked.

A forked worker is to be like one that was started by itself: it has the descriptors that came with the request and no
others, the learner's present standard streams, directory and environment variables, and a process group of its own.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys
from typing import Any

from penstock.processes.descriptors import read_all
from penstock.processes.termination import MARK
from penstock.processes.tie import settle

MOST_FDS = 64
"""Descriptors of a request, at most: the request itself, output, errors, directory, and those of the worker."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.getenv.restype = ctypes.c_void_p
_libc.getenv.argtypes = [ctypes.c_char_p]


def main() -> None:
    """Imports what workers need, and serves until the learner hangs up; returns in no process but a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    spawn_args: dict[str, Any] = json.loads(sys.argv[1])
    link = socket.socket(fileno=spawn_args["link"])
    for module in spawn_args["modules"]:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while ignored, perhaps since the learner's parent, no child waits
    gc.collect()
    gc.freeze()  # so that a worker's collector leaves the shared pages alone
    _send(link, threads=len(os.listdir("/proc/self/task")))
    worker = _serve(link)
    if worker is not None:
        importlib.import_module(worker).main()


def _serve(link: socket.socket) -> str | None:
    """Answers requests; None once the learner hangs up, in a forked process the module that it is to run."""
    while True:
        try:
            data, fds, _, _ = socket.recv_fds(link, 64, MOST_FDS)
        except ConnectionResetError:  # it hung up without reading an answer
            return None
        if not data:
            return None
        reaped = json.loads(data)["reap"]
        if reaped:
            _send(link, status=os.waitstatus_to_exitcode(os.waitpid(reaped, 0)[1]))
            continue
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _send(link, errno=error.errno)
        else:
            if not pid:
                link.detach()
                return _become_worker(parent, fds)
            os.setpgid(pid, pid)  # the worker does it too, and the first one wins
            _send(link, pid=pid)
        for fd in fds:
            os.close(fd)


def _send(link: socket.socket, **words: int | None) -> None:
    link.send(json.dumps(words).encode())


def _become_worker(parent: int, fds: list[int]) -> str:
    """Makes a process that was just forked a worker; returns the module that it is to run."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    os.setpgid(0, 0)
    said, out, err, directory, *own = fds
    asked = json.loads(read_all(said, os.fstat(said).st_size))
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.fchdir(directory)
    for low, high in zip([2, *sorted(own)], [*sorted(own), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    _take_environment(asked["environment"])
    spawn_args = _with_own(asked["spawn_args"], asked["fds"], own) | {"parent": parent}
    settle(spawn_args)
    sys.argv[:] = [asked["module"], json.dumps(spawn_args)]
    return asked["module"]


def _with_own(spawn_args: dict[str, Any], theirs: list[int], own: list[int]) -> dict[str, Any]:
    """Spawn arguments whose descriptors are those that this process was given for the learner's."""
    here = dict(zip(theirs, own))
    named = {name: spawn_args[name] for name in spawn_args["descriptors"]}
    return spawn_args | {name: here[x] if isinstance(x, int) else [here[fd] for fd in x] for name, x in named.items()}


def _take_environment(variables: dict[str, str]) -> None:
    """Takes on environment variables; the mark also where /proc shows it, which are the bytes of before the fork."""
    value, place = os.fsencode(variables[MARK]), _libc.getenv(MARK.encode())
    assert place and len(ctypes.string_at(place)) == len(value)
    ctypes.memmove(place, value, len(value))
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    for name, text in variables.items():
        if os.environ.get(name) != text:
            os.environ[name] = text
