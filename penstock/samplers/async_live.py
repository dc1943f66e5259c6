"""The learner's side of an AsyncSampler: publishes parameters, releases batches, and takes what is ready."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import copy_parameters, parameters_of
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.slab import places, share, view
from penstock.core.spec import EnvSpec, allocate
from penstock.core.tree import tree_leaves, tree_map
from penstock.core.wire import decode
from penstock.envs.make import EnvConfig
from penstock.samplers.async_process import (
    BATCHES,
    FIRST,
    NEWEST,
    PARAMETERS,
    RESULTS,
    STOP,
    AttachInner,
    Evaluate,
    GetInner,
    MakeInner,
    SetInner,
    plain_episodes,
)
from penstock.samplers.episodes import Episodes, EpisodeStats, Journal
from penstock.samplers.stage import examples
from penstock.workers import control
from penstock.workers.supervisor import Workers

_RESULT_BYTES_PER_ROW = 64


class AsyncLive:
    """A live sampler whose batches come from a process of its own; used like a `LiveSampler`.

    `obtain_samples(k)` publishes the agent's parameters as version k, releases batch k - 1, and waits for batch k.
    """

    def __init__(self, inner: Any, depth: int, weights: str, config: EnvConfig, seed: int, workers: Workers) -> None:
        self.batch_spec, self._depth, self._exact = inner.spec, depth, weights == "exact"
        self._inner, self._config, self._seed, self._workers = inner, config, seed, workers
        self._block = workers.control.blocks[0]
        self._agent: Agent | None = None
        self._attached: AttachInner | None = None
        self._continues: SetInner | None = None
        self._closed = False
        self._next = self._first = 0
        self._released = 0
        self._results: dict[int, Episodes] = {}
        self._metrics: dict[str, float] = {}
        self._opened = np.zeros(inner.spec.B, np.int64)
        self._batches: list[SampleBatch] = []
        self.cut_slots: list[int] = []
        """Slots whose open episode could not be restored by the last `load_state_dict`."""
        made = workers.start(self)[0][0]
        self.spec = EnvSpec.from_plain(made["spec"])
        self._info_keys = made["info_keys"]

    # What the supervisor asks: see `Owner`.

    def messages(self, w: int, replaces: bool) -> list[Any]:
        out: list[Any] = [MakeInner(self._inner, self._config, self._seed)]
        if self._attached is not None:
            out += [self._attached, *([self._continues] if self._continues is not None else [])]
        return out

    def whereabouts(self, w: int, block: Any) -> str:
        return f"the process of {type(self._inner).__name__} on {self._config.name}, in batch {block[control.DONE]}"

    def lost(self, w: int) -> None:
        """The tree is started anew: it goes on after the last whole batch, every slot with an episode of its own."""
        done = self._block[control.DONE]
        if self._attached is None or not self._batches:
            return
        B, T = self.batch_spec.B, self.batch_spec.T
        row = self._batches[(done - 1) % len(self._batches)]
        # More episodes than these cannot have begun in the batch that was lost.
        episode = (self._opened + T + 1).tolist()
        agent = self._agent_or_raise()
        stats, journal = EpisodeStats(B, 0.0), Journal(B, 0)
        pool = {
            "episode": episode,
            "ended": [True] * B,
            "idle": [False] * B,
            "left": [None] * B,
            "tick": 0,
            "began": [0] * B,
            "snapshot": [None] * B,
            "restarts": done,
        }
        state = {
            "collected": done > 0,
            "pool": pool,
            "faults": {},
            "row": {
                "obs": tree_map(lambda x: x[-1].copy(), row.obs),
                "first": row.first[-1].copy(),
                "prev_action": tree_map(lambda x: x[-1].copy(), row.prev_action),
                "prev_reward": row.prev_reward[-1].copy(),
            },
            "agent_states": tree_map(lambda x: x.cpu().numpy(), agent.initial_state(B)),
            "stats": stats.state_dict(),
            "journal": journal.state_dict(),
        }
        self._opened += T + 1
        self._continues = SetInner(state, done)

    # The live sampler.

    def initialize(self, agent: Agent) -> dict[str, Any]:
        """Takes the agent whose parameters are published; gives examples of one step, as `LiveSampler.initialize`."""
        if agent.spec != self.spec:
            raise ConfigError(f"the agent was built for {agent.spec}; this sampler's environment has {self.spec}")
        self._agent = agent
        agent.set_slots(self.batch_spec.B)
        info, state = examples(agent, self.spec)
        n = self._depth + 2
        example = [allocate_batch(self.spec, self.batch_spec, info, state, self._info_keys) for _ in range(n)]
        arrays = {name: x.detach().cpu().numpy() for name, x in parameters_of(agent).items()}
        where, there = share(self._workers.slabs[PARAMETERS], [arrays] * (n + 1), f"{n + 1} copies of the parameters")
        self._published = [{name: torch.from_numpy(x) for name, x in version.items()} for version in there]
        size = 1 << 16
        size += self.batch_spec.size * _RESULT_BYTES_PER_ROW * (1 + len(self._info_keys))
        self._attached = AttachInner(copy.deepcopy(agent).cpu(), where, n, self._depth, self._exact, size)
        self._workers.call([[self._attached]])
        self._batches = view(self._workers.slabs[BATCHES], places(example)[0])
        one = tree_map(lambda x: x[0], allocate(self.spec.obs, 1)), tree_map(lambda leaf: leaf.null(), self.spec.action)
        return {"obs": one[0], "action": one[1], "info": info, "state": state}

    def obtain_samples(self, itr: int) -> tuple[SampleBatch, Episodes]:
        """Batch `itr`, which is valid until the next call, and the episodes that ended in it.

        Raises:
            EnvWorkerError: an environment raised or broke its contract. ConfigError: `itr` is not the next one.
        """
        agent = self._agent_or_raise()
        if itr != self._next and self._released:
            raise ConfigError(
                f"obtain_samples({itr}) where batch {self._next} is next: an AsyncSampler works ahead, so batches "
                "are numbered one after the other"
            )
        if not self._released:
            self._block[control.DONE] = self._next = self._first = itr  # before anything was asked for
        self._publish(agent, itr)
        self._release(itr)
        self._workers.wait(lambda: self._ready(itr))
        self._take_results()
        batch = self._batches[itr % len(self._batches)]
        self._next = itr + 1
        self._opened += batch.first[1:].sum(0)
        lag = itr - batch.version[batch.valid]
        if len(lag):
            self._metrics |= {
                "sampler/lag": float(lag.mean()),
                "sampler/lag_min": float(lag.min()),
                "sampler/lag_max": float(lag.max()),
            }
        return batch, self._results.pop(itr)

    def evaluate_agent(
        self, itr: int, episodes: int = 20, deterministic: bool = True, give_up: Callable[[], bool] | None = None
    ) -> Episodes:
        """As `LiveSampler.evaluate_agent`, with the agent's parameters as they are now, after the batch in the making."""
        agent = self._agent_or_raise()
        self._write(agent, -1)
        self._block[STOP] = 0

        def watch() -> None:
            if give_up is not None and give_up():
                self._block[STOP] = 1

        answer = self._workers.call([[Evaluate(itr, episodes, deterministic)]], watch)[0]
        while answer is None:  # the process died of it and was started anew
            answer = self._workers.call([[Evaluate(itr, episodes, deterministic)]], watch)[0]
        return Episodes(**answer[0])

    def metrics(self) -> dict[str, float]:
        """`sampler/lag` of the last batch in training steps, the inner sampler's metrics, and faults."""
        return {**self._metrics, **self._workers.faults.metrics()}

    @property
    def last_batch(self) -> SampleBatch:
        """The buffer that the last `obtain_samples` gave."""
        return self._batches[(self._next - 1) % len(self._batches)]

    def blank_batch(self) -> SampleBatch:
        """A batch of zeros in which every row is valid, for timing."""
        batch = allocate_batch(self.spec, self.batch_spec, *examples(self._agent_or_raise(), self.spec))
        batch.valid[...] = True
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches: the inner sampler's state after the batches ahead, and those batches."""
        if not self._released:
            return {"released": 0}
        self._workers.wait(lambda: self._ready(self._released - 1))
        self._take_results()
        inner = self._workers.call([[GetInner()]])[0][0]
        waiting = {
            str(itr): {
                "rows": [x.copy() for x in tree_leaves(self._batches[itr % len(self._batches)])],
                "episodes": plain_episodes(e),
            }
            for itr, e in sorted(self._results.items())
        }
        return {
            "released": self._released,
            "next": self._next,
            "inner": inner,
            "waiting": waiting,
            "opened": self._opened.copy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, after `initialize`; `cut_slots` then names what could not be restored."""
        if not state["released"]:
            return
        if state["released"] - state["next"] != self._depth:
            raise CheckpointError(
                f"the checkpoint holds {state['released'] - state['next']} batches ahead; this sampler has depth="
                f"{self._depth}"
            )
        self._released, self._next, self._opened = state["released"], state["next"], state["opened"].copy()
        for name, kept in state["waiting"].items():
            batch = self._batches[int(name) % len(self._batches)]
            for x, y in zip(tree_leaves(batch), kept["rows"]):
                x[...] = y
            self._results[int(name)] = Episodes(**kept["episodes"])
        self._block[control.SENT] = 0
        cut = self._workers.call([[SetInner(state["inner"], self._released)]])[0]
        self.cut_slots = [] if cut is None else cut[0]
        self._block[control.SENT] = self._released

    def shutdown(self) -> None:
        """Ends the process tree. A second call does nothing."""
        self._agent, self._closed = None, True
        self._workers.close()

    def _publish(self, agent: Agent, version: int) -> None:
        self._write(agent, version % (self._depth + 2))
        self._block[NEWEST] = version

    def _write(self, agent: Agent, place: int) -> None:
        copy_parameters(agent, self._published[place])

    def _release(self, itr: int) -> None:
        self._released = itr + self._depth + 1
        self._block[FIRST] = self._first
        self._block[control.SENT] = self._released
        control.fence()
        if self._block[control.SLEEPS]:
            self._workers.ring(0)

    def _ready(self, itr: int) -> bool:
        if (
            self._block[control.SENT] < self._released and self._workers.workers[0].up
        ):  # a new process knows nothing of it
            self._block[NEWEST] = (
                self._next if self._next < self._released - self._depth else self._released - self._depth - 1
            )
            self._release(self._released - self._depth - 1)
        return self._block[control.DONE] > itr

    def _take_results(self) -> None:
        """Reads the episodes of every batch that is ready and has not been read."""
        assert self._attached is not None
        for itr in range(self._next, self._block[control.DONE]):
            if itr not in self._results:
                at = (itr % len(self._batches)) * self._attached.result_size
                fd = self._workers.slabs[RESULTS]
                found = decode(os.pread(fd, int.from_bytes(os.pread(fd, 8, at), "little"), at + 8))
                self._results[itr] = Episodes(**found["episodes"])
                self._metrics |= found["metrics"]

    def _agent_or_raise(self) -> Agent:
        if self._agent is None:
            raise ConfigError(
                "the sampler was shut down; build another"
                if self._closed
                else "the sampler has no agent yet; call sampler.initialize(policy.agent) first"
            )
        return self._agent
