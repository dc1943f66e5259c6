"""The process of an AsyncSampler's inner sampler.

It collects batch DONE while DONE is below SENT, and obeys messages in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.agents.agent import Agents
from penstock.agents.parameters import parameters_of
from penstock.core.shared_memory import view
from penstock.core.spec import Share
from penstock.core.tree import Tree
from penstock.core.wire import encode
from penstock.envs.ids import take_shipped
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import EnvCall
from penstock.processes.descriptors import write_all
from penstock.samplers.trackers.evaluation import Evaluation
from penstock.workers import control
from penstock.workers.control import fence
from penstock.workers.host import Host, run_process
from penstock.workers.messages import SpawnArgs, WorkerSettings
from penstock.workers.shares import SharedMemory

BATCHES, RESULTS, PARAMETERS = 0, 1, 4
TABLES = (2, 3)
"""Shared files; the episode tables are those of the pool, and of a SerialPool's evaluations."""
NEWEST, STOP, FIRST = control.ITR, control.MODE, control.T
"""Words of the learner: the newest version, whether an evaluation is to give up, and the number of the first batch."""


@dataclass(frozen=True)
class MakeInner:
    """Message: build the inner sampler."""

    inner: Any
    config: EnvConfig
    seed: int
    share: Share
    entries: tuple[Any, ...] = ()
    """The environment's entry in Gymnasium's registry, for an id that only the learner's script registers."""


@dataclass(frozen=True)
class AttachInner:
    """Message: the agents, the places of their parameters' versions (the last is for evaluations), and the depth."""

    agents: Agents
    parameters: list[Tree]
    """Arrays of each agent, for every version."""
    buffers: int
    depth: int
    exact: bool
    result_size: int


@dataclass(frozen=True)
class GetInner:
    """Message: the inner sampler's `state_dict`."""


@dataclass(frozen=True)
class SetInner:
    """Message: load the inner sampler's state, `done` batches having been collected."""

    state: dict[str, Any]
    done: int


@dataclass(frozen=True)
class CallEnvs:
    """Message: `Evaluates.call_envs` of the inner sampler; its answers are plain data."""

    call: EnvCall
    slots: list[int]
    evaluation: bool


class AsyncHost(Host):
    """Obeys the messages of an AsyncLive."""

    def __init__(self, spawn_args: SpawnArgs, start: WorkerSettings) -> None:
        super().__init__(spawn_args, start)
        self.spin.limit_s = 0.0  # batches are far apart
        self.inner: Any = None

    def serve(self) -> None:
        block = self.block

        def called() -> bool:
            return block[control.COMMAND] != block[control.DONE_COMMAND] or block[control.SENT] > block[control.DONE]

        while True:
            self.sleep_until(called)
            if block[control.COMMAND] == block[control.DONE_COMMAND]:
                self.collect(block[control.DONE])
            elif self.taken() == control.QUIT:
                with warnings.catch_warnings(record=True) as caught:
                    self.inner.shutdown()
                self.answer([], caught)
                return
            else:
                self.respond(self.mailbox())

    def collect(self, itr: int) -> None:
        """Batch `itr`, collected with the version that depth and `exact` choose; episodes and metrics go beside it."""
        block, rules = self.block, self.rules
        version = max(itr - rules.depth, block[FIRST]) if rules.exact else block[NEWEST]
        self.load(version % (rules.depth + 2))
        _, episodes = self.inner.obtain_samples(itr, version)
        result = encode({"episodes": episodes.to_plain(), "metrics": self.inner.metrics()})
        at = (itr % rules.buffers) * rules.result_size
        write_all(self.spawn_args.memory_fds[RESULTS], len(result).to_bytes(8, "little") + result, at)
        block[control.DONE] = itr + 1
        fence()
        if self.learner[0]:
            self.learner_event.set()

    def load(self, place: int) -> None:
        with torch.no_grad():
            for agent, version in zip(self.agents, self.versions[place]):
                for name, x in parameters_of(agent).items():
                    x.copy_(version[name])

    def read(self, message: Any) -> Any:
        if isinstance(message, MakeInner):
            activity = self.block[control.ACTIVITY : control.ACTIVITY + control.ACTIVITY_WORDS]
            fds = self.spawn_args.memory_fds
            take_shipped(message.entries)
            shared = SharedMemory(fds[BATCHES], activity, (fds[TABLES[0]], fds[TABLES[1]]))
            self.inner = message.inner.build(
                message.config,
                message.seed,
                share=message.share,
                shared=shared,
            )
            return {"spec": self.inner.spec.to_plain(), "info_keys": list(self.inner.info_keys)}
        if isinstance(message, AttachInner):
            torch.set_num_threads(1)
            given, self.rules = message.agents, message
            self.agents = list(given.values()) if isinstance(given, Mapping) else [given]
            fd = self.spawn_args.memory_fds[PARAMETERS]
            self.versions: list[list[dict[str, torch.Tensor]]] = [
                [{name: torch.from_numpy(x) for name, x in mine.items()} for mine in view(fd, where)]
                for where in message.parameters
            ]
            self.inner.initialize(given, message.buffers)
            return None
        if isinstance(message, Evaluation):
            self.load(-1)
            return replace(message, give_up=lambda: bool(self.block[STOP])).by(self.inner).to_plain()
        if isinstance(message, GetInner):
            return self.inner.state_dict()
        if isinstance(message, CallEnvs):
            answers = self.inner.call_envs(message.call, message.slots, message.evaluation)
            return {b: tuple(x) for b, x in answers.items()}
        assert isinstance(message, SetInner)
        self.inner.load_state_dict(message.state, message.done - 1)
        self.block[control.DONE] = message.done
        return self.inner.cut_slots


def main() -> None:
    """Entry point of the process."""
    run_process(AsyncHost)
