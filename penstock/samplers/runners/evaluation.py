"""EvaluationRunners: the slots of an evaluation, played by runners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.agents.agent import Agent
from penstock.core.batch import SampleBatch
from penstock.core.noise import Noise
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, plain, recorded
from penstock.envs.pools.pool import EvaluationSource
from penstock.samplers.live import EVAL_T
from penstock.samplers.runners.agent_bytes import together
from penstock.samplers.runners.columns import log_of, side_by_side
from penstock.samplers.runners.runner import unpack_fragment
from penstock.samplers.runners.runners import Runners
from penstock.workers.shares import columns, even_split


class EvaluationRunners(EvaluationSource):
    """B evaluation slots, dealt among the runners that are alive when an evaluation begins."""

    def __init__(self, runners: Runners, config: EnvConfig, B: int) -> None:
        seating, self.info_keys = config.seated(runners.spec), config.all_info_keys
        self._runners, self._B = runners, B
        self.specs, self.seats, self.takes_turns = seating.specs, seating.seats, seating.turns
        self.groups, self.log = side_by_side(seating, B), log_of(seating, B, EVAL_T, self.info_keys)
        self._slots: dict[int, slice] = {}
        self._limit: int | None = None
        self._synced = False
        self._calls = [list[CallRecord]()]

    def limit(self, max_steps: int) -> None:
        self._limit = max_steps

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        self._calls = [list(calls[0])]

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        self._deal()
        answers = [Answer("absent")] * self._B
        for i, found in self._all(
            {
                i: self._runners.call(
                    i, "call_evaluation", tuple(call), s.stop - s.start, s.start, plain(self._calls)[0]
                )
                for i, s in self._slots.items()
            }
        ).items():
            answers[self._slots[i]] = [Answer(*x) for x in found]
        if all(x.counts and x.status != "raised" for x in answers):
            recorded(self._calls, call, [0], [Answer("done")])
        return answers

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        self._deal()
        left = [1] * self._B if episodes is None else list(episodes)
        self._synced, calls = False, plain(self._calls)[0]
        self._all(
            {
                i: self._runners.call(
                    i, "open_evaluation", s.stop - s.start, s.start, seed, left[s], self._limit, calls
                )
                for i, s in self._slots.items()
            }
        )

    def _deal(self) -> None:
        """Deals the slots among the runners that are alive."""
        self._runners.restore()
        alive, start, fixed = self._runners.alive, 0, self._runners.evaluation_slots
        if fixed > 1:  # native batched environments have a fixed number each, and one more runner may have come up
            alive = alive[: self._B // fixed]
            self.broken = len(alive) * fixed < self._B
        self._slots.clear()
        for i, n in zip(alive, even_split(self._B, len(alive))):
            if n:
                self._slots[i] = slice(start, start + n)
                start += n

    def fill(self, agents: Sequence[Agent], batches: Sequence[SampleBatch], noise: Noise | None) -> None:
        """The next rows of every slot; none once a runner is lost."""
        if self.broken:
            return
        weights = None if self._synced else self._runners.publish(together(agents))
        self._synced = True
        address = None if noise is None else (noise.seed, int(noise.purpose), noise.batch)
        calls = {i: self._runners.call(i, "fill_evaluation", address, weights) for i in self._slots}
        for i, rows in self._all(calls).items():
            self.broken = self.broken or rows is None  # it has lost workers of its own
            if rows is None:
                continue
            slots = self._slots[i]
            unpack_fragment(rows, batches, [columns(slots, n) for n in self.seats], self.log, slots)

    def _all(self, calls: dict[int, Any]) -> dict[int, Any]:
        found = self._runners.collect(calls, self._runners.start_timeout_s)
        self.broken = self.broken or len(found) < len(calls)
        return found

    def close(self) -> None:
        """Does nothing: runners close their environments when they end."""
