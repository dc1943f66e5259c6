"""The learner's side of an AsyncSampler: publishes parameters, releases batches, and takes those that are ready."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from penstock.agents.agent import Agent, Agents
from penstock.agents.parameters import copy_parameters, parameters_of
from penstock.core.batch import AnyBatch, SampleBatch
from penstock.core.shared_memory import places, share, view
from penstock.core.spec import WHOLE, EnvSpec, Share
from penstock.core.tree import tree_leaves, tree_map
from penstock.core.wire import decode
from penstock.envs.ids import entries_to_ship
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, from_plain, recorded
from penstock.envs.pools.pool import TABLE_WORDS, PoolState
from penstock.envs.pools.settings import STEPPING
from penstock.processes.descriptors import read_all
from penstock.samplers.acting_agents import ActingAgents, last_row
from penstock.samplers.async_process import (
    BATCHES,
    FIRST,
    NEWEST,
    PARAMETERS,
    RESULTS,
    STOP,
    TABLES,
    AttachInner,
    CallEnvs,
    GetInner,
    MakeInner,
    SetInner,
)
from penstock.samplers.episodes import Episodes
from penstock.samplers.live import evaluation_seed
from penstock.samplers.trackers.batch_queue import BatchQueue
from penstock.samplers.trackers.evaluation import Evaluates, Evaluation
from penstock.samplers.trackers.states import LiveState, State
from penstock.workers import control
from penstock.workers.shares import at_work
from penstock.workers.supervisor import Workers

if TYPE_CHECKING:
    from penstock.samplers.asynchronous import AsyncSampler

_RESULT_BYTES_PER_ROW = 64


class AsyncLive(Evaluates):
    """A `Sampler` that collects its batches in another process.

    `obtain_samples(k)` publishes the agent's parameters as version k, releases batch k - 1, and waits for batch k.
    """

    def __init__(
        self,
        settings: AsyncSampler,
        config: EnvConfig,
        seed: int,
        workers: Workers,
        share: Share = WHOLE,
    ) -> None:
        inner = settings.inner
        self.batch_spec, self._exact = inner.spec, settings.weights == "exact"
        self._queue = BatchQueue(settings.depth)
        self._workers, self._name, self._env_name = workers, f"{type(inner).__name__} on {config.name}", config.name
        self._seed, self._evaluation_seed = seed, seed
        self._make = MakeInner(inner, config, seed, share, entries_to_ship(config.name, config.for_evaluation.name))
        self._block = workers.control.blocks[0]
        self._attached: AttachInner | None = None
        self._continues: SetInner | None = None
        self._metrics: dict[str, float] = {}
        self._opened = np.zeros(inner.spec.B, np.int64)
        self._calls: list[list[CallRecord]] = [[] for _ in range(inner.spec.B)]
        self._evaluation_calls = [list[CallRecord]()]
        self._kept: dict[int, list[SampleBatch]] = {}  # by number, while a new process makes the buffers anew
        self.cut_slots: list[int] = []
        """Slots with an open episode that the last `load_state_dict` could not restore."""
        made = workers.start(self)[0][0]
        self.spec = EnvSpec.from_plain(made["spec"])
        self.info_keys = tuple(made["info_keys"])
        """Keys of the env info in every batch."""
        self._installed = ActingAgents(config.seated(self.spec), self.batch_spec, self.info_keys, share)
        self.specs: Mapping[str, EnvSpec] = self._installed.seating.by_id
        """By policy id; of environments of one agent one, under `shared`."""

    # Called by the supervisor: see `Supervised`.

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [self._make]
        if self._attached is not None:
            out += [self._attached, *([self._continues] if self._continues is not None else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        activity = block[control.ACTIVITY : control.ACTIVITY + control.ACTIVITY_WORDS].tolist()
        slot, doing, evaluation = activity[0], activity[1], bool(activity[5])
        if not doing:  # an agent acts, or workers of its own step
            phase = f"batch {block[control.DONE]}" if self._attached is not None else "the construction of environments"
            return f"the process of {self._name}, in {phase}"
        fd, size = self._workers.memory_fds[TABLES[evaluation]], 8 * TABLE_WORDS
        episode_table = np.frombuffer(os.pread(fd, size, size * slot), np.int64).tolist()
        action = None
        if doing == STEPPING and self._in_batch(block) and not evaluation and not self._installed.many:
            (batch,), row = self._queue.buffer(block[control.DONE]), self._row(activity)
            action = tree_map(lambda x: x[row, slot].tolist(), batch.action)
        seed = self._evaluation_seed if evaluation else self._seed
        return at_work(self._env_name, seed, activity, episode_table, action)

    def lost(self, w: int) -> None:
        """Prepares the state from which a new process tree continues after the last complete batch, with new episodes.

        Steps that a SerialSampler had made for the next batch are lost, and counted.
        """
        done = self._block[control.DONE]
        if not done and self._continues is not None:
            done = self._continues.done  # it died before it had gone on from there
        ahead = self._queue
        if not ahead.buffers:
            return
        B, T, installed = self.batch_spec.B, self.batch_spec.T, self._installed
        activity = self._block[control.ACTIVITY : control.ACTIVITY + control.ACTIVITY_WORDS].tolist()
        if self._in_batch(self._block) and activity[4] and not installed.seating.turns:
            stepped = self._row(activity) * B + (activity[0] if activity[1] else B)
            self._workers.faults.counts["lost_steps"] += stepped
        if not self._kept:  # else it died before they were put back
            for itr in range(max(min(ahead.next, done) - 1, 0), max(done, 1)):
                self._kept[itr] = [batch.copy() for batch in ahead.buffer(itr)]
        rows = [last_row(batch) for batch in self._kept[max(done - 1, 0)]]
        table = os.pread(self._workers.memory_fds[TABLES[0]], 8 * TABLE_WORDS * B, 0)
        if table:  # it counts also the episodes that workers' deaths have cut, and those that no row shows
            self._opened = np.maximum(self._opened, np.frombuffer(table, np.int64)[::TABLE_WORDS])
        else:  # all that can have begun in the batches that wait and in the one that was lost
            self._opened += (max(done - ahead.next, 0) + 1) * installed.seating.most_episodes(T)
        calls = [list(mine) for mine in self._calls]
        pool = PoolState.resetting(self._opened.tolist(), restarts=done, calls=calls)
        outside, ids = int(self._metrics.get("env/out_of_bounds", 0)), installed.seating.policies
        state = LiveState.resetting(
            pool,
            collected=done > ahead.first,
            row=installed.by_id(rows),
            out_of_bounds={**dict.fromkeys(ids, 0), ids[0]: outside},
            evaluation_calls=self._evaluation_calls[0],
        )
        self._continues = SetInner(state.to_plain(), done)

    # The live sampler.

    def initialize(self, agents: Agents) -> dict[str, Any]:
        """Takes the agents, to publish their parameters; returns examples of one step, like `Sampler.initialize`."""
        answers = self._installed.take(agents)
        taken, seating = self._installed.agents, self._installed.seating
        n = self._queue.depth + 2
        example = [batch for _ in range(n) for batch in self._installed.allocate()]
        arrays = [{name: x.detach().cpu().numpy() for name, x in parameters_of(agent).items()} for agent in taken]
        fd = self._workers.memory_fds[PARAMETERS]
        where, memory = share(fd, [arrays] * (n + 1), f"{n + 1} copies of the parameters")
        self._published = [
            [{name: torch.from_numpy(x) for name, x in mine.items()} for mine in version] for version in memory
        ]
        size = 1 << 16
        size += self.batch_spec.size * _RESULT_BYTES_PER_ROW * (1 + len(self.info_keys)) * (1 + len(seating.agents))
        copies = [copy.deepcopy(agent).cpu() for agent in taken]
        self._attached = AttachInner(self._installed.by_id(copies), where, n, self._queue.depth, self._exact, size)
        self._workers.call([[self._attached]])
        memory = view(self._workers.memory_fds[BATCHES], places(example)[0])
        self._queue.attach([memory[k : k + len(taken)] for k in range(0, len(memory), len(taken))])
        return answers

    def obtain_samples(self, itr: int) -> tuple[AnyBatch, Episodes]:
        """Batch `itr`, which is valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract. ConfigError: `itr` is not the next one.
        """
        agents, ahead = self._installed.agents, self._queue
        if not ahead.released:
            self._block[control.DONE] = itr  # before anything was asked for
        ahead.release(itr, itr)
        self._write(agents, itr % (ahead.depth + 2))
        self._block[NEWEST] = itr
        self._ask_for_released()
        self._workers.wait(lambda: self._ready(itr))
        self._take_results()
        batches, episodes = ahead.buffer(itr), ahead.take()
        if self._installed.many:
            self._opened += np.bincount(episodes.slot, minlength=len(self._opened))
        else:
            self._opened += batches[0].first[1:].sum(0)
        ahead.measure(itr)
        return self._installed.together(batches), episodes

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Plays it with the present parameters, after the batch in the making."""
        self._write(self._installed.agents, -1)
        self._block[STOP] = 0

        def watch() -> None:
            if asked.given_up:
                self._block[STOP] = 1

        self._evaluation_seed = evaluation_seed(self._seed, asked.itr)
        return Episodes(**self._ask(replace(asked, give_up=None), watch))

    @property
    def evaluation_calls(self) -> Sequence[CallRecord]:
        return self._evaluation_calls[0]

    @property
    def calls_of_envs(self) -> Sequence[Sequence[CallRecord]]:
        return self._calls

    def call_envs(self, call: EnvCall, slots: Sequence[int], evaluation: bool = False) -> dict[int, Answer]:
        _ = self._installed.agents
        self._wait_for_released()
        found: dict[int, Any] = self._ask(CallEnvs(call, list(slots), evaluation))
        answers = {b: Answer(*x) for b, x in found.items()}
        if not evaluation:
            recorded(self._calls, call, list(answers), list(answers.values()))
        elif all(x.counts and x.status != "raised" for x in answers.values()):
            recorded(self._evaluation_calls, call, [0], [Answer("done")])
        return answers

    def metrics(self) -> dict[str, float]:
        """`sampler/lag` of the last batch in training steps, the inner sampler's metrics, and faults."""
        return {**self._metrics, **self._queue.lag, **self._workers.faults.metrics()}

    @property
    def last_batch(self) -> AnyBatch:
        """The buffer that the last `obtain_samples` returned."""
        return self._installed.together(self._queue.buffer(self._queue.next - 1))

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        return self._installed.blank_batch()

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches: the inner sampler's state after the batches ahead, and those batches."""
        if not self._queue.released:
            return {"released": 0, "inner": self._ask(GetInner())} if self._was_called else {"released": 0}
        self._wait_for_released()
        return self._queue.state_dict(self._ask(GetInner()), self._opened.copy())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`, after `initialize`; `cut_slots` then lists the slots that it could not restore."""
        inner = state.get("inner", {"pool": {}})
        self._calls = from_plain(inner["pool"].get("calls", ())) or [[] for _ in self._calls]
        self._evaluation_calls = from_plain([inner.get("evaluation_calls", ())])
        if not state["released"]:
            if self._was_called:
                self._ask(SetInner(inner, 0))
            return
        self._queue.check(state)
        self._block[control.SENT] = 0
        self.cut_slots = self._ask(SetInner(state["inner"], state["released"]))
        self._queue.load_state_dict(state)
        self._opened = state["opened"].copy()
        self._block[control.SENT] = self._queue.released

    def join_states(self, states: Sequence[State]) -> State:
        """The state of one sampler of all slots, as `Divisible.join_states`."""
        return self._queue.join_states(states)

    def split_state(self, state: State, slots: Sequence[slice]) -> list[State]:
        """Inverse of `join_states`."""
        return self._queue.split_state(state, slots)

    def shutdown(self) -> None:
        """Ends the process tree. A second call does nothing."""
        self._installed.close()
        self._workers.close()

    @property
    def _was_called(self) -> bool:
        return any(self._calls) or any(self._evaluation_calls)

    def _wait_for_released(self) -> None:
        """Waits until every batch that was released has been collected."""
        if self._queue.released:
            self._workers.wait(lambda: self._ready(self._queue.released - 1))
            self._take_results()

    def _ask(self, message: Any, watch: Callable[[], None] | None = None) -> Any:
        """The answer to a message; a process that died of it is asked again once it was started anew.

        Raises:
            EnvWorkerError: it has died of it too often, or the policy is to raise at once.
        """
        while True:
            answer = self._workers.call([[message]], watch)[0]
            if answer is not None:
                self._put_back()
                return answer[0]

    def _put_back(self) -> None:
        """Writes the batches that were whole when a process died into the buffers, which the new one made anew."""
        for itr, batches in self._kept.items():
            self._queue.write(itr, tree_leaves(batches))
        self._kept = {}

    def _in_batch(self, block: Any) -> bool:
        """True if the process is collecting, and not about a message."""
        owes = block[control.SENT] > block[control.DONE] and self._queue.buffers > 0
        return owes and block[control.COMMAND] == block[control.DONE_COMMAND]

    def _row(self, activity: list[int]) -> int:
        """The row of the batch that a SerialPool steps: its ticks count those of all batches."""
        return (activity[4] - 1) % self.batch_spec.T

    def _write(self, agents: Sequence[Agent], place: int) -> None:
        for agent, arrays in zip(agents, self._published[place]):
            copy_parameters(agent, arrays)

    def _ask_for_released(self) -> None:
        self._block[FIRST] = self._queue.first
        self._block[control.SENT] = self._queue.released
        control.fence()
        if self._block[control.SLEEPS]:
            self._workers.wake(0)

    def _ready(self, itr: int) -> bool:
        if not self._workers.workers[0].up:
            return False  # its counters include the work that it repeated
        self._put_back()
        if self._block[control.SENT] < self._queue.released:  # a new process knows nothing of it
            self._block[NEWEST] = self._queue.released - self._queue.depth - 1
            self._ask_for_released()
        return self._block[control.DONE] > itr

    def _take_results(self) -> None:
        """Reads the episodes of every batch that is ready and has not been read."""
        assert self._attached is not None
        for itr in range(self._queue.next, self._block[control.DONE]):
            if itr not in self._queue.waiting:
                at = (itr % self._queue.buffers) * self._attached.result_size
                fd = self._workers.memory_fds[RESULTS]
                results = decode(read_all(fd, int.from_bytes(os.pread(fd, 8, at), "little"), at + 8))
                self._queue.waiting[itr] = Episodes(**results["episodes"])
                self._metrics |= results["metrics"]
