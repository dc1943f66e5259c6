"""Messages to a worker process: the descriptors that it inherits."""

from __future__ import annotations

import json
from dataclasses import asdict

from penstock.workers.messages import Boot

BOOT = Boot(
    index=0, workers=2, learner_pid=7, control=10, bell=11, learner_bell=12, mail=13, report=14, crash=15, alive=16,
    slabs=(17, 18),
)  # fmt: skip


def test_a_process_inherits_every_descriptor_and_no_other_number() -> None:
    assert sorted(BOOT.fds()) == list(range(10, 19))


def test_a_boot_can_be_written_on_a_command_line() -> None:
    there = json.loads(json.dumps(asdict(BOOT)))
    assert Boot(**{**there, "slabs": tuple(there["slabs"])}) == BOOT
