"""Shares of a batch by hand-computed numbers: columns of workers, invalidated columns, and the activity of a dead one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import gymnasium as gym
import pytest

from penstock.envs.toy.plumbing import SeedEcho
from tests.workers.first_batches import TWO_KINDS, no_process_is_left, refuse

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_spaces_that_differ_between_workers_are_shown_side_by_side(kind: str, tmp_path: Path) -> None:
    claimed = str(tmp_path / "claimed")

    class OfThisProcess(SeedEcho):
        """Shows one number more in every process but the first that makes one."""

        def __init__(self) -> None:
            super().__init__()
            with contextlib.suppress(FileExistsError):
                os.symlink(str(os.getpid()), claimed)  # at once, or not at all
            if os.readlink(claimed) != str(os.getpid()):
                self.observation_space = gym.spaces.Box(0.0, 1.0, (4,))

    text = r"(?s)differs between workers: one shows box\[[34]\].*another shows box\[[34]\].*the same in every instance"
    refuse(kind, OfThisProcess, text)
