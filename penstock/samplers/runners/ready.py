"""AsyncRunners: a live sampler with one runner's fragment as a batch, in the order in which runners are ready."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from penstock.core.batch import AnyBatch, batches_of
from penstock.core.errors import CheckpointError
from penstock.core.spec import Share
from penstock.core.trace import WAIT, timed
from penstock.envs.make import EnvConfig
from penstock.samplers.episodes import Episodes
from penstock.samplers.runners.live import RunnersLive
from penstock.samplers.runners.runners import late
from penstock.samplers.trackers.batch_queue import waiting_state
from penstock.samplers.trackers.lag import lags

if TYPE_CHECKING:
    from penstock.samplers.runners.settings import RunnerSampler


class AsyncRunners(RunnersLive):
    """A batch is one runner's fragment; among the ready runners, that of the one served longest ago.

    Each runner has `max(depth, 1)` requests; one that has delivered is asked again at once, with the newest weights.
    The order is that of arrival, so two runs are equal only where fragments come in an equal order, as in process.
    """

    _whole = False

    def __init__(self, settings: RunnerSampler, config: EnvConfig, seed: int, share: Share) -> None:
        parts = [range(i, i + 1) for i in range(settings.runners)]
        super().__init__(settings, config, seed, share, parts, max(settings.depth, 1) - 1)
        n = settings.runners
        self._served = [0] * n
        self._since = [0.0] * n  # when each runner got its oldest request, or delivered last
        self._ready: list[int] = []  # runners with a fragment that has arrived, in the order of serving them
        self._waiting: list[tuple[int, AnyBatch, Episodes]] = []
        self._count = 0
        self._round: dict[str, float] = {}
        self._lag: dict[str, float] = {}
        self.runners.on_failed.append(self._lost)

    @property
    def _buffers(self) -> int:
        return max(self._depth, 1) + 2

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """A fragment [T, B] of one runner, valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract, or runners were lost too often.
        """
        agent = self._acting()
        if self._waiting:
            i, batch, episodes = self._waiting.pop(0)
        else:
            weights = self.runners.publish(agent)
            while True:
                self.runners.restore()
                for i in self.runners.alive:
                    if not self._queues[i].versions:  # it has just come up
                        self._request(i, weights, itr)
                begun = time.perf_counter()
                i = self._next_ready()
                batch, episodes = self._collected(i) if i >= 0 else (self.blank_batch(), Episodes())
                if i in self.runners.alive:
                    break
            self._round = {"group/round_ms": (time.perf_counter() - begun) * 1e3}
            self._request(i, weights, itr)
        self._count += 1
        self._served[i], self._last = self._count, batch
        self._lag |= lags([*batches_of(batch).values()], itr)
        return batch, episodes

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches: each runner's, and the fragments that it still owes."""
        self._acting()
        for i, queue in enumerate(self._queues):
            while queue.versions:
                batch, episodes = self._collected(i)
                if i in self.runners.alive:  # else nothing of it came
                    self._waiting.append((i, batch, episodes))
        self._ready.clear()
        return {
            "runners": [live.state_dict() for live in self._lives],
            "numbers": [queue.next for queue in self._queues],
            "faults": dict(self.runners.faults.counts),
            "waiting": [
                {"runner": i, **waiting_state([*batches_of(batch).values()], episodes)}
                for i, batch, episodes in self._waiting
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, with the same numbers of runners and slots."""
        self._acting()
        if len(state.get("runners", ())) != len(self._lives):
            raise CheckpointError(
                f"the checkpoint is of {len(state.get('runners', ())) or 'no'} runners in ready mode; this sampler has "
                f"runners={len(self._lives)}, and mode='ready' goes on with as many"
            )
        self.runners.faults.counts.clear()
        self.runners.faults.counts.update(state["faults"])
        self.cut_slots = []
        self._waiting.clear()
        self._ready.clear()
        for i, (live, queue, kept) in enumerate(zip(self._lives, self._queues, state["runners"])):
            queue.next = queue.released = state["numbers"][i]
            live.load_state_dict(kept, queue.next - 1)
            self.cut_slots += [b + i * self.batch_spec.B for b in live.cut_slots]
        used = list(state["numbers"])  # buffers of the next fragments are free until those that wait are handed out
        for kept in state["waiting"]:
            i = kept["runner"]
            self._queues[i].write(used[i], kept["rows"])
            self._waiting.append((i, self._lives[i].buffer(used[i]), Episodes(**kept["episodes"])))
            used[i] += 1

    def metrics(self) -> dict[str, float]:
        """Metrics of the group; waits of the runners' samplers are averaged over runners."""
        found = [live.metrics() for live in self._lives]
        out = self.runners.faults.metrics()
        for name in dict.fromkeys(name for one in found for name in one):
            values = [one[name] for one in found if name in one]
            counted = name.startswith("faults/") or name in ("group/runners", "env/out_of_bounds", "env/lost_rewards")
            out[name] = out.get(name, 0.0) + sum(values) if counted else sum(values) / len(values)
        return {**out, **self._round, **self._lag}

    def _request(self, i: int, weights: Any, itr: int) -> None:
        """Asks a runner for fragments until it has as many requests as it may."""
        queue = self._queues[i]
        if not queue.versions:
            self._since[i] = time.monotonic()
        begun = time.perf_counter()
        if numbers := queue.release(queue.next, itr):
            for number in numbers:
                self._pools[i].requests[number] = {i: self.runners.call(i, "fill", number, itr, weights)}
            self._pools[i].times["group/send_ms"] = (time.perf_counter() - begun) * 1e3

    def _next_ready(self) -> int:
        """The runner to take the next fragment from; -1 where there was none in time, and runners were lost.

        The backend is asked again once all have been served that were ready the last time: to ask costs more the more
        runners there are.
        """
        if not self._ready:
            heads = {i: self._pools[i].requests[x.next][i] for i, x in enumerate(self._queues) if x.versions}
            limit_s = self.runners.deadline_s
            late_at = min((self._since[i] for i in heads), default=0.0) + limit_s
            come = timed(WAIT, self.runners.backend.wait)(list(heads.values()), max(late_at - time.monotonic(), 0.0))
            ready = set(map(id, come))
            now = time.monotonic()
            self._ready = sorted((i for i in heads if id(heads[i]) in ready), key=lambda i: self._served[i])
            for i in heads:
                if i not in self._ready and now - self._since[i] > limit_s:
                    self.runners.lost(i, late(limit_s))
        return self._ready.pop(0) if self._ready else -1

    def _lost(self, i: int) -> None:
        """Drops the requests to a lost runner."""
        self._queues[i].forget()
        self._ready = [j for j in self._ready if j != i]

    def _collected(self, i: int) -> tuple[AnyBatch, Episodes]:
        queue = self._queues[i]
        number, queue.next = queue.next, queue.next + 1  # before the runner may be lost, with what else it owes
        batch, episodes = self._lives[i].obtain_samples(number, queue.versions.pop(number))
        self._since[i] = time.monotonic()
        return batch, episodes.numbered(i * self.batch_spec.B)
