"""The boot of a worker process, as it stands on its command line."""

from __future__ import annotations

import json
from dataclasses import asdict

from penstock.workers.messages import Boot

BOOT = Boot(
    index=0, workers=2, parent=7, control=10, bell=11, learner_bell=12, mail=13, report=14, slabs=[17, 18]
)  # fmt: skip


def test_a_boot_is_read_from_a_command_line_that_says_more() -> None:
    assert Boot.read(json.dumps({**asdict(BOOT), "crash": 15, "alive": 16, "descriptors": ["bell"]})) == BOOT
