"""The process of one rank: it builds its share of the run and carries out what rank 0 orders."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle

import penstock.core.errors as errors
from penstock.learn.comm import Comm, meet
from penstock.learn.policy_set import each
from penstock.processes.descriptors import read_all
from penstock.run.checkpoints.checkpoint import load_checkpoint
from penstock.run.gang.gang import Member
from penstock.run.gang.local import progress_in
from penstock.run.gang.ranks import MEET_TIMEOUT_S
from penstock.run.trainer import Trainer

_LOOK_MS = 60_000
_MOST_BYTES = 1 << 16


class Follower(Member):
    """A rank that takes orders; it says that it is ready before it meets the others."""

    def __init__(self, link: socket.socket, boot: dict[str, Any], timeout_s: float) -> None:
        rank, size, progress = boot["rank"], boot["size"], progress_in(boot["progress"], boot["size"])

        def entering(number: int) -> None:
            progress[rank] = number

        super().__init__(
            rank, size, lambda backend: meet(boot["meeting"], rank, size, backend, MEET_TIMEOUT_S), entering, timeout_s
        )
        self._link = link

    def comm(self, device: str) -> Comm:
        if self._comm is None:
            self._link.send(json.dumps({"ready": self.rank}).encode())
        return super().comm(device)

    def orders(self) -> Iterator[dict[str, Any]]:
        """Yields the orders of rank 0 until it closes."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        while True:
            if not poll.poll(_LOOK_MS):
                continue
            data = self._link.recv(_MOST_BYTES)
            if not data:
                return
            yield json.loads(data)


def main() -> None:
    """Serves until rank 0 says stop or goes away; an error is reported before the process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable(all_threads=True)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    boot = json.loads(sys.argv[1])
    link = socket.socket(fileno=boot["link"])
    link.set_inheritable(False)
    code = 0
    try:
        size = int.from_bytes(os.pread(boot["mail"], 8, 0), "little")
        sys.path[:] = json.loads(os.pread(boot["mail"], size, 8))  # unpickling needs it
        exp, init = cloudpickle.loads(read_all(boot["mail"], os.fstat(boot["mail"]).st_size - 8 - size, 8 + size))
        follow(Follower(link, boot, exp.run.learner_timeout_s), exp, init)
    except BaseException as error:
        code = error.exit_code if isinstance(error, errors.PenstockError) else 1
        told = report_of(error)
        with contextlib.suppress(OSError):
            link.send(json.dumps(told).encode())
        print(told["trace"], file=sys.stderr, flush=True)
    os._exit(code)  # whatever threads gloo has left


def report_of(error: BaseException) -> dict[str, str]:
    """What rank 0 is told of an error that ended a rank."""
    trace = "".join(traceback.format_exception(error))[-20_000:]
    return {"error": type(error).__name__, "text": str(error)[:20_000], "trace": f"\n{trace}"}


def follow(member: Any, exp: Any, init: Any) -> None:
    """Builds a rank's share of the run, and carries out what rank 0 orders; a `Member` with `orders`."""
    with Trainer(exp, init=init, member=member) as trainer:
        for order in member.orders():
            match order["do"]:
                case "train":
                    trainer.train()
                case "state":
                    trainer.state()
                case "give":
                    schedule = each(trainer.policy)[order["policy"]].replay_schedule
                    assert schedule is not None
                    schedule.replay.give(order["name"], order["start"], order["stop"])
                case "restore":
                    trainer.restore(load_checkpoint(Path(order["path"]), replay=True))
                case _:
                    return


if __name__ == "__main__":
    main()
