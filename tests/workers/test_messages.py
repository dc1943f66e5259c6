"""The spawn arguments of a worker process, as they stand on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict

from penstock.workers.messages import SpawnArgs

SPAWN_ARGS = SpawnArgs(
    index=0, workers=2, parent=7, control=10, event=11, learner_event=12, mailbox=13, report=14, memory_fds=[17, 18]
)  # fmt: skip


def test_a_boot_is_read_from_a_command_line_that_says_more() -> None:
    assert (
        SpawnArgs.read(json.dumps({**asdict(SPAWN_ARGS), "crash": 15, "alive": 16, "descriptors": ["event"]}))
        == SPAWN_ARGS
    )
