"""EnvRunnerGroup: a local worker that trains and remote workers that sample, for loops of one's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.actors.backend import Backend, RunnerError
from penstock.actors.make import BackendName, make_backend
from penstock.core.batch import AnyBatch
from penstock.core.errors import ConfigError, EnvWorkerError, nearest
from penstock.core.spec import BatchSpec
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, plain
from penstock.learn.policy_set import trained_policies
from penstock.run.env_runners.env_runner import EnvRunner
from penstock.run.experiment import Experiment
from penstock.run.plan import Plan
from penstock.samplers.runners.fragments import Fragments
from penstock.samplers.runners.runners import Runners, late
from penstock.samplers.trackers.envs import Envs
from penstock.workers.faults import FaultPolicy, Faults

_OPTIONS = ("address", "num_cpus", "object_store_mb")
_KEYWORDS = ("num_env_runners", "backend", "deadline_s", "start_timeout_s", "fault_policy", "restarts", "min_runners")


class EnvRunnerGroup:
    """`num_env_runners` remote workers, each with the experiment's sampler for its own slots, and a local worker.

    Without remote workers nothing is started, no backend either, and the local worker samples.

    Args:
        made_from: an experiment, or its plan. backend: a name, or a Backend.
        deadline_s: within which a runner must answer. start_timeout_s: the same while it starts.
        fault_policy: as in workers; see `CpuSampler`. restarts: replacements of one runner within ten minutes.
        min_runners: with fewer the group waits for a replacement.
        options: of `make_backend`.

    Raises:
        ConfigError: the settings, the environment or the versions on a node do not fit. EnvWorkerError: the
            environment's own code raised, or a runner did not come up.
    """

    def __init__(
        self,
        made_from: Experiment | Plan,
        num_env_runners: int = 2,
        backend: BackendName | Backend = "ray",
        *,
        deadline_s: float = 60.0,
        start_timeout_s: float = 300.0,
        fault_policy: FaultPolicy = "auto",
        restarts: int = 5,
        min_runners: int = 1,
        **options: Any,
    ) -> None:
        if unknown := sorted(options.keys() - set(_OPTIONS)):
            raise ConfigError(f"EnvRunnerGroup has no {unknown[0]!r}; {nearest(unknown[0], (*_KEYWORDS, *_OPTIONS))}")
        if num_env_runners < 0 or min_runners > max(num_env_runners, 1):
            raise ConfigError(
                f"num_env_runners={num_env_runners} with min_runners={min_runners}; expected 0 or more runners, and "
                "min_runners of at most as many"
            )
        self._plans = Plan.of(made_from).among(max(num_env_runners, 1))
        self.fragment: BatchSpec = self._plans[0].fragment
        """T and B of one runner."""
        self._local: EnvRunner | None = None
        self._in_flight: dict[Any, int] = {}
        self._pushes: dict[int, Any] = {}
        self._follows: dict[int, Any] = {}
        """Calls by which replacements take over, until their first fragment comes."""
        self._asked = [0] * num_env_runners
        """Fragments that each runner was asked for, by all that had its place."""
        self._newest_episodes = np.zeros((num_env_runners, self.fragment.B), np.int64)
        """Number of the newest episode that may have begun in each slot of each runner."""
        self._version = 0
        self._synced: tuple[Any, int] | None = None
        """Weights and version of the last `sync_weights`, with which a replacement begins."""
        self._fragments: Fragments | None = None
        self._calls: list[list[CallRecord]] = [[] for _ in range(num_env_runners * self.fragment.B)]
        self._runners: Runners | None = None
        if num_env_runners:
            self._runners = Runners(
                self._plans,
                make_backend(backend, num_env_runners, **options) if isinstance(backend, str) else backend,
                EnvRunner,
                deadline_s=deadline_s,
                start_timeout_s=start_timeout_s,
                fault_policy=fault_policy,
                restarts=restarts,
                min_runners=min_runners,
            )
            self._runners.on_failed.append(self._lost)
            self._runners.on_restored.append(self._replaced)

    @property
    def local_worker(self) -> EnvRunner:
        """The runner of this process, which trains; it has environments of its own only where it samples itself."""
        if self._local is None:
            T, B = self.fragment
            many = len(self.remote_workers)
            self._local = EnvRunner(self._plans[0], trains_on=BatchSpec(T, B * many) if many else None)
        return self._local

    @property
    def remote_workers(self) -> list[Any]:
        """Handles of those that sample: `worker.sample.remote()`; on Ray they are actors."""
        return [] if self._runners is None else list(self._runners.handles)

    @property
    def alive(self) -> list[int]:
        """Numbers of the remote workers that take part."""
        return [] if self._runners is None else self._runners.alive

    @property
    def runners(self) -> Runners:
        """The supervised remote workers. Raises ConfigError if the group has none."""
        if self._runners is None:
            raise ConfigError("this group has no remote workers: num_env_runners=0")
        return self._runners

    @property
    def backend(self) -> Backend:
        """The backend of the remote workers. Raises ConfigError if the group has none."""
        return self.runners.backend

    @property
    def faults(self) -> Faults:
        """The lost runners by cause, `faults.counts`, and the replacements. Raises ConfigError without runners."""
        return self.runners.faults

    def get(self, calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The results of calls to remote workers, in their order, as `ray.get`.

        Raises:
            RunnerError: one of them failed, or is late (`deadline_s` if none is given).
        """
        if not calls:
            return []
        until = time.monotonic() + (self.runners.deadline_s if timeout_s is None else timeout_s)
        try:
            return [self.backend.result(call, max(until - time.monotonic(), 0.0)) for call in calls]
        except RunnerError as error:
            error.add_note(error.trace)
            raise

    def foreach(self, function: Callable[..., Any], *args: Any, local: bool = False) -> list[Any]:
        """`function(runner, *args)` of every remote worker that is alive, and with `local` of the local one first.

        Raises:
            RunnerError: the function raised, or its result cannot travel; the runner goes on.
        """
        found = [function(self.local_worker, *args)] if local else []
        return found if self._runners is None else found + self._open(self._runners).foreach(function, *args)

    @property
    def envs(self) -> Envs:
        """The environments of all remote workers, by slot one worker after the other; without these the local one's."""
        return Envs(self) if self._runners is not None else self.local_worker.envs

    @property
    def calls_of_envs(self) -> Sequence[Sequence[CallRecord]]:
        """By slot the calls that its environment has had."""
        return self._calls

    def call_envs(self, call: EnvCall, slots: Sequence[int], evaluation: bool = False) -> dict[int, Answer]:
        """Executes a call in environments, after every fragment that was asked for; see `Envs`."""
        if evaluation:
            text = "a group has no evaluation environments; call those of the EnvRunner that evaluates: runner.envs"
            return {0: Answer("refused", text)}
        runners = self._open(self.runners)
        of = dict(enumerate(runners.slots))
        return dict(zip(slots, runners.call_envs(call, slots, of, self._calls)))

    def sample(self) -> AnyBatch:
        """One fragment of every remote worker, side by side; without remote workers one of the local worker.

        The batch always has the columns of all slots. A runner that is lost or late is named in a warning and counted
        in `faults`; its columns are `valid=False` until its successor is up, which begins with a reset of all slots.
        """
        if self._runners is None:
            return self.local_worker.sample()
        runners = self._open(self._runners)
        runners.restore()
        self._take_in_pushes(runners)
        found = dict[int, Any]()

        def take(i: int, answer: Any) -> None:
            found[i] = self._arrived(runners, i, answer)

        runners.collect({i: self._ask(runners, i) for i in runners.alive}, then=take)
        if not found:
            raise EnvWorkerError(f"none of {len(self._asked)} runners returned a fragment; the warnings say why")
        return self._whole.joined(found)

    def sample_async(self, max_in_flight: int = 1, whole: bool | None = None) -> Iterator[AnyBatch]:
        """Yields fragments as they come, for ever; a runner is asked again at once, with the local worker's weights.

        Args:
            max_in_flight: requests that wait at a runner, at most.
            whole: batches have the columns of all slots, `valid=False` where no fragment has come, of the others the
                oldest one; False: each is one fragment. None: whole where the local worker's policy keeps a replay,
                in which slots follow each other from one batch to the next.

        Raises:
            ConfigError: `max_in_flight` is below 1.
        """
        if max_in_flight < 1:
            raise ConfigError(f"sample_async(max_in_flight={max_in_flight}); expected at least 1 request of a runner")
        while self._runners is None:
            yield self.local_worker.sample()
        runners, local = self._open(self._runners), self.local_worker
        if whole is None:
            whole = any(policy.replay_schedule is not None for policy in trained_policies(local.policy).values())
        weights, sent, since = None, (-1, -1), dict[int, float]()  # when a runner was asked first, or answered last
        while True:
            runners.restore()
            if sent != (now_at := (self._version, local.policy.version)):
                weights, sent = runners.publish(local.agent), now_at
            for i in runners.alive:
                busy = sum(j == i for j in self._in_flight.values())
                if not busy or i not in since:
                    since[i] = time.monotonic()
                for _ in range(max_in_flight - busy):
                    self._in_flight[self._ask(runners, i, weights, max(sent))] = i
            late_at = min((since[i] for i in self._in_flight.values()), default=0.0) + runners.deadline_s
            ready = runners.backend.wait(list(self._in_flight), max(late_at - time.monotonic(), 0.0))
            answered, now = {self._in_flight[call] for call in ready}, time.monotonic()
            for i in set(self._in_flight.values()) - answered:
                if now - since[i] >= runners.deadline_s:
                    runners.lost(i, late(runners.deadline_s))
            found = dict[int, Any]()
            for call in ready if whole else ready[:1]:
                if (i := self._in_flight.get(call, -1)) in found or i < 0:
                    continue
                del self._in_flight[call]
                try:
                    found[i] = self._arrived(runners, i, runners.backend.result(call, runners.deadline_s))
                except RunnerError as error:
                    runners.lost(i, error)
                else:
                    since[i] = now
            if found:
                yield self._whole.joined(found) if whole else next(iter(found.values()))

    def sync_weights(self) -> None:
        """Sends the local worker's weights to every remote one: one versioned copy, with which it samples next.

        Does not wait for them; a runner that has not taken the copy before is waited for first.
        """
        if self._runners is None:
            return
        runners = self._open(self._runners)
        self._take_in_pushes(runners)
        self._version += 1
        synced = self._synced = runners.publish(self.local_worker.agent), self._version
        runners.greet("take_weights", lambda: synced, range(len(runners.handles)))
        self._pushes = {i: runners.call(i, "take_weights", *synced) for i in runners.alive}

    def stop(self) -> None:
        """Ends the runners, and all that the backend started. A second call does nothing."""
        if self._local is not None:
            self._local.close()
        if self._runners is not None:
            self._runners.close()

    def __enter__(self) -> EnvRunnerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _open(self, runners: Runners) -> Runners:
        """Raises ConfigError once the group was stopped."""
        runners.require_open()
        return runners

    def _ask(self, runners: Runners, i: int, *args: Any) -> Any:
        self._asked[i] += 1
        return runners.call(i, "sample_counted", *args)

    def _arrived(self, runners: Runners, i: int, answer: Any) -> AnyBatch:
        """The fragment. Raises RunnerError where a replacement did not take over its predecessor's slots."""
        if i in self._follows:
            runners.backend.result(self._follows.pop(i), runners.deadline_s)
        fragment, newest = answer
        self._newest_episodes[i] = np.maximum(self._newest_episodes[i], newest)
        return fragment

    def _take_in_pushes(self, runners: Runners) -> None:
        """Waits until the weights of the last `sync_weights` have been taken; runners that refuse them are lost."""
        pushed, self._pushes = self._pushes, {}
        runners.collect(pushed)

    def _lost(self, i: int) -> None:
        """Drops the requests to a lost runner."""
        owed = [call for call, j in self._in_flight.items() if j == i]
        for call in owed:
            del self._in_flight[call]
        self._newest_episodes[i] += (len(owed) + 1) * self._plans[i].seating.most_episodes(self.fragment.T)
        self._pushes.pop(i, None)
        self._follows.pop(i, None)

    def _replaced(self, i: int) -> None:
        """Has a replacement go on from the last row of its columns, in episodes that were not begun before."""
        rows = None if self._fragments is None else self._fragments.last_rows(i)
        calls = self._calls[self.runners.slots[i]]
        if rows is not None:
            most = self._plans[i].seating.most_episodes(self.fragment.T)
            newest = np.maximum(self._newest_episodes[i], self._asked[i] * most)
            had = plain(calls) if any(calls) else []
            self._follows[i] = self.runners.call(i, "follow", rows, self._asked[i], newest.tolist(), had)
        elif any(calls):
            self._follows[i] = self.runners.call(i, "recall", plain(calls))

    @property
    def _whole(self) -> Fragments:
        """Joins fragments; made with the local worker's agents."""
        if self._fragments is None:
            acting, _ = self._plans[0].acting(self.fragment, self.local_worker.policy)
            self._fragments = Fragments(acting, len(self._asked))
        return self._fragments
