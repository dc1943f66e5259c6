"""Runners: the actors that host the samplers of a run, as their owner supervises them and replaces those it loses.

Every call to a runner has a deadline. A runner that dies, or does not answer in time, is killed; its successor is
started in the background, with a time limit of its own, and takes part as soon as it has come up.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.actors.backend import Backend, RunnerError
from penstock.agents.agent import Agent
from penstock.agents.parameters import pack_parameters
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.spec import EnvSpec
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, recorded
from penstock.processes.serialization import require_same_versions
from penstock.samplers.runners.activity import described
from penstock.samplers.runners.agent_bytes import pack_agent
from penstock.samplers.runners.runner import PACKAGES, Runner
from penstock.samplers.runners.share import Maker, shipped
from penstock.workers.faults import Fault, FaultPolicy, Faults


class Runners:
    """One actor for each maker, started when this is made.

    Args:
        makers: of the runners, which have consecutive slots.
        kind: class of the actors, made with a maker, or with its bytes from `shipped` where it is sent; it has the
            method `describe` of a Runner.
        deadline_s: within which a runner must answer. start_timeout_s: the same while it starts.
        fault_policy: as in workers; see `CpuSampler`. restarts: replacements of one runner within ten minutes.
        min_runners: with fewer the owner waits for a replacement.

    Raises:
        ConfigError: the environment or the versions on a node do not fit. EnvWorkerError: the environment's own code
            raised, or a runner did not come up.
    """

    def __init__(
        self,
        makers: Sequence[Maker],
        backend: Backend,
        kind: type = Runner,
        *,
        deadline_s: float = 60.0,
        start_timeout_s: float = 300.0,
        fault_policy: FaultPolicy = "auto",
        restarts: int = 5,
        min_runners: int = 1,
    ) -> None:
        self._makers, self._kind, self.backend = makers, kind, backend
        self.fragment = makers[0].fragment
        """T and B of one runner."""
        B, n = self.fragment.B, len(makers)
        self.slots = [slice(i * B, (i + 1) * B) for i in range(n)]
        """Columns of each runner in a batch of all of them."""
        self.deadline_s, self.start_timeout_s, self.min_runners = deadline_s, start_timeout_s, min_runners
        self.faults = Faults(fault_policy, restarts, "runner")
        self.on_failed: list[Callable[[int], None]] = []
        """Called with the number of a runner that was lost."""
        self.on_restored: list[Callable[[int], None]] = []
        """Called with the number of each runner that was replaced."""
        self.greetings: dict[str, Callable[[], tuple[Any, ...]]] = {}
        """Methods that a replacement is called with before all others, and what returns their arguments."""
        self._where = [""] * n
        self._starting: dict[int, tuple[float, list[Any]]] = {}  # since when, and the first calls of those that start
        self._later: dict[int, float] = {}  # runners that wait out their delay, and until when
        self._closed = False
        self.handles: list[Any] = []
        """Handle by which each runner is called; on Ray an actor."""
        try:
            for i in range(n):
                self.handles.append(self._start(i))
            self._describe()
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> list[int]:
        """Numbers of the runners that take part."""
        return [i for i in range(len(self.handles)) if i not in self._starting and i not in self._later]

    def install(self, agent: Agent, runners: Sequence[int]) -> None:
        """Gives these runners a copy of the agent, and replacements too."""
        packed = pack_agent(agent)
        self.greet("install", lambda: (self.backend.put([packed]),), runners)
        blob, alive = self.backend.put([packed]), self.alive
        self.collect({i: self.call(i, "install", blob) for i in runners if i in alive}, self.start_timeout_s)

    def greet(self, method: str, args: Callable[[], tuple[Any, ...]], runners: Sequence[int]) -> None:
        """Has replacements called with this before all else, also those of `runners` that start at the moment."""
        self.greetings[method] = args
        for i in [i for i in self._starting if i in runners]:
            self._starting[i][1].insert(0, self.call(i, method, *args()))

    def publish(self, agent: Agent) -> Any:
        """One copy of the agent's weights, as an argument of any number of calls."""
        return self.backend.put(pack_parameters(agent))

    def call(self, i: int, method: str, *args: Any) -> Any:
        """Sends a call to runner i."""
        return self.backend.call(self.handles[i], method, *args)

    def foreach(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(runner, *args)` of every runner that is alive.

        Raises:
            RunnerError: the function raised, or its result cannot travel; the runner goes on.
        """
        done = self.collect({i: self.call(i, "apply", function, *args) for i in self.alive}, harmless=True)
        return [done[i] for i in sorted(done)]

    def call_envs(
        self, call: EnvCall, slots: Sequence[int], of: Mapping[int, slice], calls: Sequence[list[CallRecord]]
    ) -> list[Answer]:
        """Executes a call in the environments of runners, after all that they were asked for; returns the answers.

        Args:
            slots: to call. of: the slots of each runner. calls: of every slot, where this one is added.
        """
        answers = dict.fromkeys(slots, Answer("absent"))
        own = {i: [b for b in slots if of[i].start <= b < of[i].stop] for i in self.alive if i in of}
        sent = {i: self.call(i, "call_envs", tuple(call), [b - of[i].start for b in x]) for i, x in own.items() if x}
        for i, found in self.collect(sent, self.start_timeout_s).items():
            answers |= zip(own[i], (Answer(*x) for x in found))
        recorded(calls, call, slots, list(answers.values()))
        return list(answers.values())

    def collect(
        self,
        calls: dict[int, Any],
        timeout_s: float | None = None,
        then: Callable[[int, Any], None] | None = None,
        harmless: bool = False,
    ) -> dict[int, Any]:
        """The results of calls by runner; failed or late runners are replaced, and absent from the result.

        Args:
            then: callback for each result, which is then not kept; a RunnerError it raises counts as the runner's
                failure.
            harmless: an exception of a call is raised here, and its runner stays.
        """
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        until, waiting, results = time.monotonic() + limit_s, dict(calls), dict[int, Any]()
        while waiting:
            left_s = max(until - time.monotonic(), 0.0)
            last = len(waiting) == 1  # its result can be waited for itself, which takes one call less
            ready = list(waiting.values()) if last else self.backend.wait(list(waiting.values()), left_s)
            for i, call in [(i, call) for i, call in waiting.items() if any(call is x for x in ready)]:
                del waiting[i]
                try:
                    result = self.backend.result(call, left_s if last else self.deadline_s)
                    results[i] = result if then is None else then(i, result)
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
        return results

    def lost(self, i: int, error: RunnerError) -> None:
        """Kills a runner that failed, and has it replaced as the policy says.

        Raises:
            EnvWorkerError, ConfigError: the policy or the budget says so; the message has the runner's traceback, or
                where it hangs.
        """
        where, self._where[i] = self._where[i], ""
        maker = self._makers[i]
        place = f"runner {i}{where}, slots {maker.share.first_slot} to {maker.share.first_slot + self.fragment.B - 1}"
        text = f"{place}: {error}{self._stuck(i) if error.kind == 'timeout' else ''}"
        self.backend.kill(self.handles[i])
        self._starting.pop(i, None)
        for told in self.on_failed:
            told(i)
        wait_s = self.faults.decide(i, fault_of_call(error, text))
        self._later[i] = float("inf") if wait_s is None else time.monotonic() + wait_s

    def restore(self) -> list[int]:
        """Starts replacements that are due, and returns those that have come up; waits below `min_runners`."""
        up: list[int] = []
        until = time.monotonic() + self.start_timeout_s
        while True:
            now = time.monotonic()
            for i in [i for i, due in self._later.items() if due <= now]:
                del self._later[i]
                self.handles[i] = self._start(i)
                self._starting[i] = (now, self._first_calls(i))
            short = len(self.alive) < self.min_runners
            if not self._starting and not short:
                return up
            if not self._starting and all(due == float("inf") for due in self._later.values()):
                raise EnvWorkerError(
                    f"{len(self.alive)} of {len(self.handles)} runners are left and min_runners={self.min_runners}; "
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
                    for told in self.on_restored:
                        told(i)
            for i in [i for i, (since, _) in self._starting.items() if now - since > self.start_timeout_s]:
                self.lost(i, self._not_up(self.start_timeout_s))
            if not short:
                return up
            if now > until:
                raise EnvWorkerError(
                    f"{len(self.alive)} of {len(self.handles)} runners are up and min_runners={self.min_runners}, "
                    f"for {self.start_timeout_s:g} s; look at the cluster, or lower min_runners{self.backend.crowded()}"
                )

    def warn(self, i: int, texts: Sequence[str]) -> None:
        """Shows warnings of a runner."""
        for text in texts:
            warnings.warn(f"runner {i}{self._where[i]}: {text}", stacklevel=3)

    def close(self) -> None:
        """Ends the runners and all that the backend started. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.backend.close()

    def require_open(self) -> None:
        """Raises ConfigError once this was closed."""
        if self._closed:
            raise ConfigError("this group of runners was closed; make another EnvRunnerGroup")

    def _stuck(self, i: int) -> str:
        """Describes what occupies a runner that does not answer: the environment at work, and its stacks."""
        words, stacks = self.backend.look(self.handles[i])
        maker = self._makers[i]
        at = described(words, maker.env.name, maker.seed) if words else ""
        return (f"; at work: {at}" if at else "") + (f"\nIt was here:\n{stacks}" if stacks else "")

    def _late(self, i: int, limit_s: float) -> RunnerError:
        """The error of a runner that has not answered in time, or never at all."""
        return late(limit_s) if self._where[i] else self._not_up(limit_s)

    def _not_up(self, limit_s: float) -> RunnerError:
        """The error of a runner that has never answered."""
        return RunnerError("timeout", f"it has not come up within {limit_s:g} s{self.backend.crowded()}")

    def _start(self, i: int) -> Any:
        maker: Any = self._makers[i]
        if self.backend.name != "in-process":  # there nothing need be pickled, and threads are this process's
            maker = shipped(maker)
        return self.backend.start(self._kind, (maker,), f"runner {i}")

    def _first_calls(self, i: int) -> list[Any]:
        """Sends the calls that a replacement must answer before it takes part; `describe` is the last."""
        return [*(self.call(i, method, *args()) for method, args in self.greetings.items()), self.call(i, "describe")]

    def _describe(self) -> None:
        """Waits for all runners, and takes the spaces from them."""
        calls = {i: self.call(i, "describe") for i in range(len(self.handles))}
        self._starting = {i: (time.monotonic(), [call]) for i, call in calls.items()}
        known = dict[int, Any]()

        def up(i: int, made: dict[str, Any]) -> None:
            self._check(i, made)
            known[i] = made
            del self._starting[i]

        self.collect(calls, self.start_timeout_s, up)
        while not known:
            for i in self.restore():
                known |= self.collect({i: self.call(i, "describe")}, self.start_timeout_s)
        made = known[min(known)]
        self.spec = EnvSpec.from_plain(made["spec"])
        """EnvSpec of the only policy, or of the first of many."""
        self.info_keys = tuple(made["info_keys"])
        self.evaluation_slots: int = made["evaluation_slots"]
        """1, or the fixed number of slots with which a runner of native batched environments evaluates."""

    def _check(self, i: int, made: dict[str, Any]) -> None:
        """Raises ConfigError if a runner has other versions than this process."""
        require_same_versions(f"runner {i}", made["host"], made["versions"], PACKAGES)
        self._where[i] = f" ({made['host']}, pid {made['pid']})"


def fault_of_call(error: RunnerError, text: str) -> Fault:
    """The fault behind a call without a result; `text` says whose, and the runner's traceback follows it."""
    kind: Any = "exit" if error.kind == "node" else error.kind
    if error.error_type in ("ConfigError", "NativeEnvError", "MissingExtraError"):
        kind = "config"
    if error.error_type == "EnvContractError":
        kind = "contract"
    return Fault(kind, f"{text}\n{error.trace}" if error.trace else text)


def late(limit_s: float) -> RunnerError:
    """The error of a runner that has not answered in time."""
    return RunnerError(
        "timeout",
        f"no answer within {limit_s:g} s; if its work takes that long, use a longer deadline_s or a smaller T",
    )
