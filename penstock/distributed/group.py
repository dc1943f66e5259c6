"""EnvRunnerGroup: a local worker that trains and remote workers that sample, replaced when they are lost.

Every call to a runner has a deadline. A runner that dies, or does not answer in time, is killed; its successor is
started in the background, with a time limit of its own, and takes part as soon as it has come up.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from penstock.actors.backend import Backend, RunnerError
from penstock.actors.make import BackendName, make_backend
from penstock.agents.agent import Agent
from penstock.core.batch import MultiAgentBatch, SampleBatch
from penstock.core.errors import ConfigError, EnvWorkerError, nearest
from penstock.core.joining import concat_samples
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.distributed.env_runner import (
    EnvRunner,
    Recipe,
    ShippedRunner,
    TrainsFor,
    shipped,
    versions,
)
from penstock.distributed.packing import pack_agent, pack_parameters
from penstock.run.experiment import Experiment
from penstock.workers.faults import Fault, FaultPolicy, Faults

_KEYWORDS = ("num_env_runners", "backend", "deadline_s", "start_timeout_s", "fault_policy", "restarts", "min_runners")


class EnvRunnerGroup:
    """`num_env_runners` remote workers, each with the experiment's sampler for its own slots, and a local worker.

    Args:
        made_from: an experiment, or the recipe of its first runner. backend: a name, or a Backend.
        deadline_s: within which a runner must answer. start_timeout_s: the same while it starts.
        fault_policy: as of workers; see `CpuSampler`. restarts: replacements of one runner within ten minutes.
        min_runners: below so many the group waits for a replacement.
        options: of `make_backend`.

    Raises:
        ConfigError: the settings, the environment or the versions on a node do not fit. EnvWorkerError: the
            environment's own code raised, or a runner did not come up.
    """

    def __init__(
        self,
        made_from: Experiment | Recipe,
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
        recipe = Recipe.of(made_from)
        if unknown := sorted(options.keys() - {"address", "num_cpus", "object_store_mb"}):
            hint = nearest(unknown[0], (*_KEYWORDS, "address", "num_cpus", "object_store_mb"))
            raise ConfigError(f"EnvRunnerGroup has no {unknown[0]!r}; {hint}")
        if num_env_runners < 0 or min_runners > max(num_env_runners, 1):
            raise ConfigError(
                f"num_env_runners={num_env_runners} with min_runners={min_runners}; expected 0 or more runners, and "
                "min_runners of at most as many"
            )
        self.fragment: BatchSpec = recipe.sampler.spec
        """T and B of one runner."""
        B = self.fragment.B
        samplers, first = max(num_env_runners, 1), recipe.first_slot
        total = max(recipe.total_slots or 0, first + samplers * B)
        self._recipes = [recipe._replace(first_slot=first + i * B, total_slots=total) for i in range(samplers)]
        self.slots = [slice(i * B, (i + 1) * B) for i in range(num_env_runners)]
        """Columns of each runner in a batch of the whole group."""
        self.deadline_s, self.start_timeout_s, self.min_runners = deadline_s, start_timeout_s, min_runners
        self.faults = Faults(fault_policy, restarts, "runner")
        self.losses: list[Callable[[int], None]] = []
        """Called with the number of a runner that was lost."""
        self.arrivals: list[Callable[[int], None]] = []
        """Called with the number of one that has come up in its place."""
        self.backend = make_backend(backend, num_env_runners, **options) if isinstance(backend, str) else backend
        self._local: EnvRunner | None = None
        self._agent: Any = None
        self._where: list[str] = [""] * num_env_runners
        self._starting: dict[int, tuple[float, list[Any]]] = {}  # since when, and the first calls of those that start
        self._later: dict[int, float] = {}  # runners that wait out their delay, and until when
        self._in_flight: dict[Any, int] = {}
        self._pushes: dict[int, Any] = {}
        self._version = 0
        self._synced: tuple[Any, int] | None = None
        """Weights and version of the last `sync_weights`, with which a replacement begins."""
        self._closed = False
        self._remote: list[Any] = []
        try:
            self._remote = [self._start(i) for i in range(num_env_runners)]
            self._describe()
        except BaseException:
            self.close()
            raise

    # What users of RLlib's groups know.

    @property
    def local_worker(self) -> EnvRunner:
        """The runner of this process, which trains; it has environments of its own only where it samples itself."""
        if self._local is None:
            T, B = self.fragment
            batch = BatchSpec(T, B * len(self._remote))
            group = TrainsFor(self.spec, self.info_keys, batch) if self._remote else None
            self._local = EnvRunner(self._recipes[0], group=group)
        return self._local

    @property
    def remote_workers(self) -> list[Any]:
        """Handles of those that sample: `worker.sample.remote()`; on Ray they are actors."""
        return list(self._remote)

    @property
    def alive(self) -> list[int]:
        """Numbers of the runners that take part."""
        return [i for i in range(len(self._remote)) if i not in self._starting and i not in self._later]

    def get(self, calls: Sequence[Any], timeout_s: float | None = None) -> list[Any]:
        """The results of calls to remote workers, in their order, as `ray.get`.

        Raises:
            RunnerError: one of them failed, or is late (`deadline_s` if none is given).
        """
        until = time.monotonic() + (self.deadline_s if timeout_s is None else timeout_s)
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
        self._open()
        found = [function(self.local_worker, *args)] if local else []
        calls = {i: self.call(i, "apply", function, *args) for i in self.alive}
        done = self.collect(calls, harmless=True)
        return found + [done[i] for i in sorted(done)]

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """One fragment of every remote worker, side by side; without remote workers one of the local worker.

        A runner that is lost or late is named in a warning and counted in `faults`; its slots are missing from the
        batch.
        """
        if not self._remote:
            return self.local_worker.sample()
        self._open()
        self.welcome()
        self._take_in_pushes()
        done = self.collect({i: self.call(i, "sample") for i in self.alive})
        if not done:
            raise EnvWorkerError(f"none of {len(self._remote)} runners returned a fragment; the warnings say why")
        return concat_samples([done[i] for i in sorted(done)])

    def sample_async(self, max_in_flight: int = 1) -> Iterator[SampleBatch | MultiAgentBatch]:
        """Yields fragments as they come, for ever; a runner is asked again at once, with the local worker's weights.

        Args:
            max_in_flight: requests that wait at a runner, at most.

        Raises:
            ConfigError: `max_in_flight` is below 1.
        """
        if max_in_flight < 1:
            raise ConfigError(f"sample_async(max_in_flight={max_in_flight}); expected at least 1 request of a runner")
        while not self._remote:
            yield self.local_worker.sample()
        self._open()
        weights, sent, since = None, (-1, -1), dict[int, float]()  # when a runner was asked first, or answered last
        while True:
            self.welcome()
            if sent != (now_at := (self._version, self.local_worker.policy.version)):
                weights, sent = self.publish(self.local_worker.policy.agent), now_at
            for i in self.alive:
                busy = sum(j == i for j in self._in_flight.values())
                if not busy or i not in since:
                    since[i] = time.monotonic()
                for _ in range(max_in_flight - busy):
                    self._in_flight[self.call(i, "sample_with", weights, max(sent))] = i
            late_at = min((since[i] for i in self._in_flight.values()), default=0.0) + self.deadline_s
            ready = self.backend.wait(list(self._in_flight), max(late_at - time.monotonic(), 0.0))
            answered, now = {self._in_flight[call] for call in ready}, time.monotonic()
            for i in set(self._in_flight.values()) - answered:
                if now - since[i] >= self.deadline_s:
                    self.lost(i, late(self.deadline_s))
            for call in ready[:1]:
                i = self._in_flight.pop(call)
                try:
                    fragment = self.backend.result(call, self.deadline_s)
                except RunnerError as error:
                    self.lost(i, error)
                else:
                    since[i] = now
                    yield fragment

    def sync_weights(self) -> None:
        """Sends the local worker's weights to every remote one: one versioned copy, with which it samples next.

        Does not wait for them; a runner that has not taken the copy before is waited for first.
        """
        self._open()
        self._take_in_pushes()
        self._version += 1
        self._synced = self.publish(self.local_worker.policy.agent), self._version
        self._pushes = {i: self.call(i, "take_weights", *self._synced) for i in self.alive}

    def stop(self) -> None:
        """Ends the runners. A second call does nothing."""
        self.close()

    def __enter__(self) -> EnvRunnerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # What a RunnerSampler asks.

    def install(self, agent: Agent, runners: Sequence[int]) -> None:
        """Gives these runners a copy of the agent, and their replacements too."""
        self._agent = pack_agent(agent)
        blob = self.backend.put([self._agent])
        alive = [i for i in runners if i in self.alive]
        self.collect({i: self.call(i, "install", blob) for i in alive}, self.start_timeout_s)

    def publish(self, agent: Agent) -> Any:
        """One copy of the agent's weights, as an argument of any number of calls."""
        return self.backend.put(pack_parameters(agent))

    def call(self, i: int, method: str, *args: Any) -> Any:
        """Sends a call to runner i."""
        return self.backend.call(self._remote[i], method, *args)

    def collect(
        self,
        calls: dict[int, Any],
        timeout_s: float | None = None,
        then: Callable[[int, Any], None] | None = None,
        harmless: bool = False,
    ) -> dict[int, Any]:
        """The results of calls by runner; runners that fail or are late are lost, and missing from them.

        Args:
            then: called with each result as it comes, in the place of keeping it; its RunnerError is the runner's.
            harmless: an exception of a call is raised here, and its runner goes on.
        """
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        until, waiting, found = time.monotonic() + limit_s, dict(calls), dict[int, Any]()
        while waiting:
            left_s = max(until - time.monotonic(), 0.0)
            last = len(waiting) == 1  # its result can be waited for itself, which takes one call less
            ready = list(waiting.values()) if last else self.backend.wait(list(waiting.values()), left_s)
            for i, call in [(i, call) for i, call in waiting.items() if any(call is x for x in ready)]:
                del waiting[i]
                try:
                    result = self.backend.result(call, left_s if last else self.deadline_s)
                    found[i] = result if then is None else then(i, result)
                except RunnerError as error:
                    if last and error.kind == "timeout":
                        error = self._late(i, limit_s)
                    if harmless and error.kind == "exception":
                        error.add_note(error.trace)
                        raise
                    self.lost(i, error)
            if not ready and time.monotonic() >= until:
                for i in list(waiting):
                    del waiting[i]
                    self.lost(i, self._late(i, limit_s))
        return found

    def lost(self, i: int, error: RunnerError) -> None:
        """Kills a runner that failed, and has it replaced as the policy says.

        Raises:
            EnvWorkerError, ConfigError: the policy or the budget says so; the message has the runner's traceback.
        """
        here = self.backend.stacks(self._remote[i]) if error.kind == "timeout" else ""
        self.backend.kill(self._remote[i])
        where, self._where[i] = self._where[i], ""
        for call in [call for call, j in self._in_flight.items() if j == i]:
            del self._in_flight[call]
        self._starting.pop(i, None)
        self._pushes.pop(i, None)
        first = self._recipes[i].first_slot
        place = f"runner {i}{where}, slots {first} to {first + self._recipes[i].sampler.spec.B - 1}"
        trace = f"\n{error.trace}" if error.trace else f"\nIt was here:\n{here}" if here else ""
        kind: Any = "exit" if error.kind == "node" else error.kind
        if error.error_type in ("ConfigError", "NativeEnvError", "MissingExtraError"):
            kind = "config"
        if error.error_type == "EnvContractError":
            kind = "contract"
        wait_s = self.faults.decide(i, Fault(kind, f"{place}: {error}{trace}"))
        for told in self.losses:
            told(i)
        self._later[i] = float("inf") if wait_s is None else time.monotonic() + wait_s

    def welcome(self) -> list[int]:
        """Starts replacements that are due, and returns those that have come up; waits below `min_runners`."""
        up: list[int] = []
        until = time.monotonic() + self.start_timeout_s
        while True:
            now = time.monotonic()
            for i in [i for i, due in self._later.items() if due <= now]:
                del self._later[i]
                self._remote[i] = self._start(i)
                self._starting[i] = (now, self._first_calls(i))
            short = len(self.alive) < self.min_runners
            if not self._starting and not short:
                return up
            if not self._starting and all(due == float("inf") for due in self._later.values()):
                raise EnvWorkerError(
                    f"{len(self.alive)} of {len(self._remote)} runners are left and min_runners={self.min_runners}; "
                    "fault_policy='restart' replaces those that are lost"
                )
            calls = [first[-1] for _, first in self._starting.values()]
            ready = self.backend.wait(calls, 0.2 if short else 0.0) if calls else []
            if not calls:  # nothing to wait for but the delay of a replacement, in rounds of this loop
                time.sleep(0.02)
            for i in [i for i, (_, first) in self._starting.items() if any(first[-1] is x for x in ready)]:
                _, first = self._starting.pop(i)
                try:
                    self._check(i, [self.backend.result(call, self.deadline_s) for call in first][-1])
                except RunnerError as error:
                    self.lost(i, error)
                else:
                    up.append(i)
                    for told in self.arrivals:
                        told(i)
            for i in [i for i, (since, _) in self._starting.items() if now - since > self.start_timeout_s]:
                self.lost(i, self._not_up(self.start_timeout_s))
            if not short:
                return up
            if now > until:
                raise EnvWorkerError(
                    f"{len(self.alive)} of {len(self._remote)} runners are up and min_runners={self.min_runners}, "
                    f"for {self.start_timeout_s:g} s; look at the cluster, or lower min_runners{self.backend.crowded()}"
                )

    def warn(self, i: int, texts: Sequence[str]) -> None:
        """Shows warnings of a runner."""
        for text in texts:
            warnings.warn(f"runner {i}{self._where[i]}: {text}", stacklevel=3)

    def close(self) -> None:
        """Ends the runners and what the backend started. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._local is not None:
            self._local.close()
        self.backend.close()

    def _late(self, i: int, limit_s: float) -> RunnerError:
        """The error of a runner that has not answered in time, or never at all."""
        return late(limit_s) if self._where[i] else self._not_up(limit_s)

    def _not_up(self, limit_s: float) -> RunnerError:
        """The error of a runner that has never answered."""
        return RunnerError("timeout", f"it has not come up within {limit_s:g} s{self.backend.crowded()}")

    def _take_in_pushes(self) -> None:
        """Waits until the weights of the last `sync_weights` have been taken; runners that refuse them are lost."""
        pushed, self._pushes = self._pushes, {}
        self.collect(pushed)

    def _start(self, i: int) -> Any:
        if self.backend.name == "in-process":  # nothing need be pickled, and threads are this process's
            return self.backend.start(EnvRunner, (self._recipes[i],), f"runner {i}")
        path, payload = shipped(self._recipes[i])
        return self.backend.start(ShippedRunner, (path, payload), f"runner {i}")

    def _first_calls(self, i: int) -> list[Any]:
        """Sends what a runner must answer before it takes part: `describe` is the last of these calls."""
        copy = [] if self._agent is None else [self.call(i, "install", self.backend.put([self._agent]))]
        newest = [] if self._synced is None else [self.call(i, "take_weights", *self._synced)]
        return [*copy, *newest, self.call(i, "describe")]

    def _open(self) -> None:
        """Raises ConfigError once the group was closed."""
        if self._closed:
            raise ConfigError("this group of runners was closed; make another EnvRunnerGroup")

    def _describe(self) -> None:
        """Waits for all runners, and takes the spaces from them."""
        if not self._remote:
            return
        calls = {i: self.call(i, "describe") for i in range(len(self._remote))}
        self._starting = {i: (time.monotonic(), [call]) for i, call in calls.items()}
        found = dict[int, Any]()

        def up(i: int, made: dict[str, Any]) -> None:
            self._check(i, made)
            found[i] = made
            del self._starting[i]

        self.collect(calls, self.start_timeout_s, up)
        while not found:
            for i in self.welcome():
                found[i] = self.get([self.call(i, "describe")], self.start_timeout_s)[0]
        made = found[min(found)]
        self.spec = EnvSpec.from_plain(made["spec"])
        self.info_keys = tuple(made["info_keys"])
        self.evaluation_slots: int = made["evaluation_slots"]
        """1, or the slots that a runner of native batched environments evaluates with, whatever is asked for."""

    def _check(self, i: int, made: dict[str, Any]) -> None:
        """Raises ConfigError if a runner has other versions than this process."""
        own, theirs = versions(), made["versions"]
        odd = [f"{name} {theirs.get(name)} (here {own[name]})" for name in own if theirs.get(name) != own[name]]
        if odd:
            raise ConfigError(
                f"runner {i} on {made['host']} has {', '.join(odd)}; install the same versions on every node, e.g. "
                "with the same constraints.txt or image"
            )
        self._where[i] = f" ({made['host']}, pid {made['pid']})"


def late(limit_s: float) -> RunnerError:
    """The error of a runner that has not answered in time."""
    return RunnerError(
        "timeout",
        f"no answer within {limit_s:g} s; if its work takes that long, use a longer deadline_s or a smaller T",
    )
