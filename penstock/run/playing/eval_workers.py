"""EvalWorkers: evaluations beside training, in processes of their own.

One is played at a time. It counts, for the log, `stop` and the best policy, in the iteration in which the next one is
due, or at the end, and training waits for it only there: what a run does is the same however fast it is played.
"""

from __future__ import annotations

import itertools
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import penstock.actors.note as note
from penstock.actors.backend import RunnerError
from penstock.actors.make import make_backend
from penstock.agents.parameters import copies_on_cpu
from penstock.core.errors import ConfigError
from penstock.core.limits import require_whole
from penstock.envs.ids import entries_to_ship, take_shipped
from penstock.envs.pools.calls import CallRecord, from_plain, plain
from penstock.learn.policy_set import AnyPolicy, by_id, parameters
from penstock.processes.serialization import ship, unship
from penstock.run.plan import Plan
from penstock.samplers.cpu import CpuSampler
from penstock.samplers.episodes import Episodes
from penstock.samplers.live import evaluation_seed
from penstock.samplers.runners.activity import Activity, described, note_evaluation
from penstock.samplers.runners.agent_bytes import pack_agent, together, unpack_agent
from penstock.samplers.runners.runners import fault_of_call
from penstock.workers.faults import FaultPolicy, Faults

_LOOK_S = 1.0
"""Least time between two looks at the process while training goes on."""
_WAIT_S = 0.2
_MOST = 1 << 40
"""Most episodes or steps of an evaluation that a checkpoint may ask for."""


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation of the policy of a step, for a checkpoint and for the process that plays it."""

    itr: int
    env_steps: int
    episodes: int
    slots: int
    max_steps: int
    weights: bytes
    """Networks and normalisers, as in a checkpoint's policy.safetensors."""
    calls: Sequence[Sequence[Any]] = ()
    """Calls that every environment of evaluations has had."""
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of that policy that need no episodes."""

    def __post_init__(self) -> None:
        require_whole(0, itr=self.itr, env_steps=self.env_steps)
        require_whole(1, episodes=self.episodes, slots=self.slots, max_steps=self.max_steps)
        if not isinstance(self.weights, bytes):
            raise TypeError(f"weights is {type(self.weights).__name__}; expected bytes")

    @classmethod
    def of(cls, policy: AnyPolicy, calls: Sequence[CallRecord], **rest: Any) -> EvaluationRequest:
        """A request to evaluate the policy as it is now; training may go on with it at once."""
        weights = safetensors.torch.save(copies_on_cpu(parameters(policy)))
        return cls(weights=weights, calls=plain([calls])[0], **rest)

    @classmethod
    def stored(cls, plain: Any, policy: AnyPolicy, itr: int, env_steps: int) -> EvaluationRequest:
        """Inverse of `to_plain`, for a checkpoint of this policy at this iteration and step.

        Raises:
            TypeError, ValueError: `to_plain` did not return it, or for networks of another policy. Says what is odd.
        """
        try:
            asked = cls(**plain)
            stored = asked.parameters
        except (ConfigError, safetensors.SafetensorError) as error:
            raise ValueError(f"the evaluation under way: {error}") from error
        for name, most in {"itr": itr, "env_steps": env_steps, "episodes": _MOST, "max_steps": _MOST}.items():
            if getattr(asked, name) > most:
                raise ValueError(f"the evaluation under way has {name}={getattr(asked, name):,}; expected <= {most:,}")
        if _forms(stored) != _forms(parameters(policy)):
            raise ValueError("the evaluation under way has networks of another policy")
        from_plain([asked.calls])
        for name, value in asked.extra.items():
            if not name.startswith("eval/") or not isinstance(value, float):
                raise TypeError(f"the evaluation under way has {name!r}={value!r:.60}; expected eval/... with a float")
        return asked

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Networks and normalisers by name; of several policies under `id/name`."""
        return safetensors.torch.load(self.weights)

    def to_plain(self) -> dict[str, Any]:
        """The fields by name; `EvaluationRequest(**plain)` is the inverse."""
        return asdict(self)


class EvalWorker:
    """The process that plays: with one worker it steps the environments itself, with more it has processes for them.

    Args:
        data: the plan and Gymnasium's entries, by `ship`. agents: of all policies, by `pack_agent`.
    """

    def __init__(self, data: bytes, agents: Any, ids: Sequence[str], workers: int) -> None:
        torch.set_num_threads(1)
        plan, entries = unship(data)
        take_shipped(entries)
        words, found = note.watched(), unpack_agent(agents)
        self._seed = plan.seed
        self._agents = dict(zip(ids, found if isinstance(found, torch.nn.ModuleList) else [found], strict=True))
        if workers > 1:
            threading.Thread(target=_beat, daemon=True).start()
            self._evaluator = plan.make_evaluator(divided(plan, workers))
        else:
            self._evaluator = plan.make_evaluator(shared=None if words is None else Activity(words))

    def play(self, request: Mapping[str, Any], weights: Any) -> dict[str, Any]:
        """Plays an evaluation with the weights that came by way of `put`; returns episodes and warnings."""
        asked = EvaluationRequest(**request, weights=bytes(weights))
        for name, agent in self._agents.items():
            own = f"{name}/" if len(self._agents) > 1 else ""
            agent.load_state_dict(
                {key.removeprefix(own): x for key, x in asked.parameters.items() if key.startswith(own)}
            )
        self._evaluator.recall(from_plain([asked.calls])[0])
        note_evaluation(evaluation_seed(self._seed, asked.itr))
        how = {"slots": asked.slots, "max_steps": asked.max_steps}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            played = self._evaluator.play_agents(self._agents, asked.itr, asked.episodes, **how)
        said = dict.fromkeys(str(x.message) for x in caught)
        return {"episodes": played.to_plain(), "warnings": list(said)}


class EvalWorkers:
    """Has evaluations played beside training; a process that dies or hangs is replaced, and plays its one again.

    Args:
        policy: whose agents play, after `initialize`. workers: processes that step environments.

    Raises:
        ConfigError: the settings cannot be sent to another process, or the environments are one batch.
    """

    def __init__(self, plan: Plan, policy: AnyPolicy, workers: int) -> None:
        if workers > 1 and (plan.held_out or plan.report).steps == 0:
            raise ConfigError(
                f"run.eval_workers={workers} with {plan.eval_env.name}, a batch of environments, which one process "
                "steps; use run.eval_workers=1"
            )
        data = ship(
            (plan, entries_to_ship(plan.env.name, plan.eval_env.name)),
            f"{plan.eval_env.name} or its settings cannot be sent to the process of run.eval_workers",
            "give the environment as 'module:function', or leave run.eval_workers out",
        )
        agents = pack_agent(together([own.agent for own in by_id(policy).values()]))
        self._args = data, agents, list(by_id(policy)), workers
        self._name, self._seed = plan.eval_env.name, plan.seed
        settings: Any = plan.sampler
        self._limits_s = getattr(settings, "start_timeout_s", 300.0), getattr(settings, "step_timeout_s", 60.0)
        rule: FaultPolicy = getattr(settings, "fault_policy", "auto")
        self._faults = Faults("restart" if rule == "drop" else rule, what="evaluation process")
        self.pending: EvaluationRequest | None = None
        """The evaluation that was begun last, until `forget`."""
        self._call: Any = None
        self._due = self._next = 0.0
        self._backend = make_backend("processes", 1, words=("run.eval_workers", ""))
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def begin(self, request: EvaluationRequest) -> None:
        """Has an evaluation played; the one before was taken."""
        self.pending = request
        self._send()

    def tend(self) -> None:
        """Looks whether the process gets on, once a second at most, and has it replaced if it does not.

        Raises:
            EnvWorkerError: an environment raised, or too many processes were lost.
        """
        if self.pending is not None and (now := time.monotonic()) >= self._next:
            self._next = now + _LOOK_S
            self._look()

    def take(self, give_up: Callable[[], bool] | None = None) -> tuple[EvaluationRequest, Episodes] | None:
        """Waits for the evaluation that was begun; None if `give_up` says so before. Errors as in `tend`."""
        assert self.pending is not None
        while (answer := self._look()) is None:
            if give_up is not None and give_up():
                return None
            if self._call is None:
                time.sleep(_WAIT_S)
            else:
                self._backend.wait([self._call], _WAIT_S)
        self._limit_s = self._limits_s[1]
        for text in answer["warnings"]:
            warnings.warn(f"evaluation of step {self.pending.env_steps:,}: {text}", stacklevel=2)
        return self.pending, Episodes(**answer["episodes"])

    def forget(self) -> None:
        """The evaluation that was begun counts now, if there was one: a checkpoint need not hold it any more."""
        self.pending = None

    def metrics(self) -> dict[str, float]:
        """`faults/eval_...` counts since the run began; empty while there is none."""
        return {f"faults/eval_{name}": float(n) for name, n in self._faults.counts.items()}

    def close(self) -> None:
        """Ends the processes. A second call does nothing."""
        self._backend.close()

    def _start(self) -> None:
        self._actor = self._backend.start(EvalWorker, self._args, "evaluation process")
        self._limit_s = self._limits_s[0]

    def _send(self) -> None:
        assert self.pending is not None
        request = self.pending.to_plain()
        weights = self._backend.put([np.frombuffer(request.pop("weights"), np.uint8)])
        self._call = self._backend.call(self._actor, "play", request, weights)
        self._words, self._moved = (), time.monotonic()

    def _look(self) -> dict[str, Any] | None:
        """The answer of the process if there is one; one that died, or stands still, is replaced."""
        if self._call is None:
            if time.monotonic() >= self._due:
                self._start()
                self._send()
            return None
        try:
            if self._backend.wait([self._call], 0.0):
                return self._backend.result(self._call, 0.0)
            words, now = self._backend.look(self._actor, stacks=False).words, time.monotonic()
            if words != self._words:
                self._words, self._moved = words, now
            elif now - self._moved > self._limit_s:
                raise RunnerError("timeout", f"no progress within {self._limit_s:g} s{self._stuck()}")
        except RunnerError as error:
            self._lose(error)
        return None

    def _lose(self, error: RunnerError) -> None:
        assert self.pending is not None
        self._backend.kill(self._actor)
        text = f"the evaluation of step {self.pending.env_steps:,}, run.eval_workers: {error}"
        wait_s = self._faults.decide(0, fault_of_call(error, text))
        self._call, self._due = None, time.monotonic() + (wait_s or 0.0)

    def _stuck(self) -> str:
        words, stacks = self._backend.look(self._actor)
        at = described(words, self._name, self._seed) if words else ""
        return (f"; at work: {at}" if at else "") + (f"\nIt was here:\n{stacks}" if stacks else "")


def _forms(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (x.shape, x.dtype) for name, x in tensors.items()}


def divided(plan: Plan, workers: int) -> CpuSampler:
    """A sampler whose workers share the slots, with the time limits of the run's sampler."""
    names = "step_timeout_s", "start_timeout_s"
    limits: Any = {name: getattr(plan.sampler, name) for name in names if hasattr(plan.sampler, name)}
    return CpuSampler(T=1, B=workers, workers=workers, **limits)


def _beat() -> None:
    """Notes every second that this process runs; its workers' time limits find environments that hang."""
    for number in itertools.count(1):
        note.write(number)
        time.sleep(1.0)
