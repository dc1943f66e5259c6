"""The live sampler that plays whole episodes of a dataset back, slot by slot, by the rules of the record.

Episodes are numbered over all passes: number n is episode `order(n // E)[n % E]` of E. A slot whose episode has ended
spends a reset row and takes the next number; slots that end in the same row take theirs in order. So every batch is a
function of seed, data and the position, and the position is all that a resumed run needs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agent
from penstock.agents.parameters import agent_device
from penstock.core.batch import Inputs, SampleBatch, allocate_batch, carry_over
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.noise import Purpose, generator
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.datasets.episode import ENV, Episode, EpisodeSource
from penstock.samplers.episodes import Episodes, EpisodeStats
from penstock.samplers.live import LiveSampler

NO_VERSION = -1
"""`version` of every row: no parameters of this learner chose the action."""


class OfflineLive:
    """Used like a `LiveSampler`; the episodes that `obtain_samples` gives are those of the data.

    Args:
        evaluator: plays the evaluations, and knows the environment; shut down with this sampler.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        source: EpisodeSource,
        evaluator: LiveSampler,
        seed: int,
        shuffle: bool,
        discount: float,
    ) -> None:
        B = batch_spec.B
        self.batch_spec, self.spec = batch_spec, evaluator.spec
        self._source, self._evaluator, self._seed, self._shuffle = source, evaluator, seed, shuffle
        self._stats = EpisodeStats(B, discount)
        self._agent: Agent | None = None
        self._order: tuple[int, Any] = (-1, None)
        self._begun = self._closed = False
        self._steps = 0
        self._next = 0  # number of the next episode
        self._number, self._at = [-1] * B, [0] * B  # of each slot's episode, and its steps played
        self._playing: list[Episode] = []
        self._state: Tree = None
        self.cut_slots: list[int] = []
        """Always empty: a position in a dataset can be restored whatever the environment is."""

    def initialize(self, agent: Agent, buffers: int = 1) -> dict[str, Any]:
        """Takes the agent that learns and will be evaluated, and allocates the batch.

        Returns:
            examples of one step of one slot: obs, action, recorded info and recurrent state.
        """
        examples = self._evaluator.initialize(agent)
        agent.set_slots(self.batch_spec.B)
        examples["info"] = {
            key: np.zeros(shape, dtype) for key, (dtype, shape) in self._source.info.items() if not key.startswith(ENV)
        }
        self._agent, self._examples = agent, examples
        self._batch = self._allocate()
        self._state = tree_map(lambda x: x.clone(), agent.initial_state(self.batch_spec.B))
        return examples

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[SampleBatch, Episodes]:
        """The next T rows of every slot, and the episodes of the data that ended in them.

        Args:
            itr, version: have no influence: what comes next depends on the position alone.

        Raises:
            ConfigError: a file of the dataset is damaged.
        """
        self._agent_or_raise()
        T, B = self.batch_spec
        batch = self._batch
        if self._begun:
            carry_over(batch, batch)
        else:
            self._begun = True
            self._playing = [self._take(b) for b in range(B)]
            for b in range(B):
                self._show(b, 0)
        self._blank()
        due = [(0, b) for b in range(B)]
        while due:
            t, b = heapq.heappop(due)
            if t == T:
                continue
            if self._at[b] < len(self._playing[b]):
                heapq.heappush(due, (t + self._play(b, t), b))
            else:  # row t is the reset row of the next episode
                self._playing[b] = self._take(b)
                self._show(b, t + 1)
                heapq.heappush(due, (t + 1, b))
        self._steps += batch.env_steps
        self._remember()
        return batch, self._stats.update(batch)

    def evaluate_agent(
        self, itr: int, episodes: int = 20, deterministic: bool = True, give_up: Callable[[], bool] | None = None
    ) -> Episodes:
        """Exactly `episodes` finished episodes in real environments: see `LiveSampler.evaluate_agent`."""
        self._agent_or_raise()
        return self._evaluator.evaluate_agent(itr, episodes, deterministic, give_up)

    @property
    def last_batch(self) -> SampleBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._batch

    @property
    def info_keys(self) -> tuple[str, ...]:
        """Keys of the env info in every batch; NaN where the dataset has no such column."""
        return self._evaluator.info_keys

    def blank_batch(self) -> SampleBatch:
        """A batch of zeros in which every row is valid, for timing."""
        self._agent_or_raise()
        batch = self._allocate()
        batch.valid[...] = True
        return batch

    def metrics(self) -> dict[str, float]:
        """`sampler/passes`: how often the steps of the dataset have been played."""
        return {"sampler/passes": self._steps / float(self._source.lengths.sum())}

    def shutdown(self) -> None:
        """Closes environments and files. A second call does nothing."""
        self._agent, self._closed = None, True
        self._evaluator.shutdown()
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything between two batches, as plain data and arrays: the position, not the data."""
        return {
            "begun": self._begun,
            "next": self._next,
            "steps": self._steps,
            "number": list(self._number),
            "at": list(self._at),
            "agent_state": tree_map(lambda x: x.cpu().numpy().copy(), self._state),
            "stats": self._stats.state_dict(),
            "dataset": self._source.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, after `initialize`. Raises CheckpointError if the dataset is another one by now."""
        if not state["begun"]:
            return
        if state["dataset"] != self._source.fingerprint:
            raise CheckpointError(
                f"dataset {self._source.name} has changed since the checkpoint was written, so the run cannot go "
                "on as if it had not stopped; put the old one back, or start anew with --init"
            )
        if len(state["number"]) != self.batch_spec.B:
            raise CheckpointError(
                f"the checkpoint holds {len(state['number'])} slots; this sampler has B={self.batch_spec.B}"
            )
        self._begun, self._next, self._steps = True, state["next"], state["steps"]
        self._number, self._at = list(state["number"]), list(state["at"])
        self._playing = [self._load(number) for number in self._number]
        for b in range(self.batch_spec.B):
            self._show(b, -1)
        tree_map(lambda x, y: x.copy_(torch.from_numpy(y)), self._state, state["agent_state"])
        self._stats.load_state_dict(state["stats"])

    def _allocate(self) -> SampleBatch:
        return allocate_batch(
            self.spec, self.batch_spec, self._examples["info"], self._examples["state"], self.info_keys
        )

    def _blank(self) -> None:
        """Every row that is to be written as a reset row has it."""
        batch = self._batch
        batch.first[1:] = False
        tree_assign(batch.action, slice(None), self.spec.null_action)
        for x in (batch.reward, batch.terminated, batch.truncated, batch.valid):
            x[...] = 0
        for key, columns in batch.info.items():
            for x in tree_leaves(columns):
                x[...] = np.nan if key == "env" else 0
        batch.version[...] = NO_VERSION

    def _take(self, b: int) -> Episode:
        """Gives slot b the next episode."""
        self._number[b], self._at[b] = self._next, 0
        self._next += 1
        return self._load(self._number[b])

    def _load(self, number: int) -> Episode:
        count = len(self._source.lengths)
        pass_, i = divmod(number, count)
        if not self._shuffle:
            return self._source.episode(i)
        if self._order[0] != pass_:
            self._order = pass_, generator(self._seed, Purpose.DATASET, pass_).permutation(count)
        return self._source.episode(int(self._order[1][i]))

    def _show(self, b: int, row: int) -> None:
        """Writes what slot b's agent would see before its next step."""
        batch, episode, at = self._batch, self._playing[b], self._at[b]
        tree_assign(batch.obs, (row, b), episode.obs, at)
        batch.first[row, b] = at == 0
        if at == 0:
            tree_assign(batch.prev_action, (row, b), self.spec.null_action)
            batch.prev_reward[row, b] = 0.0
        else:
            tree_assign(batch.prev_action, (row, b), episode.action, at - 1)
            batch.prev_reward[row, b] = episode.reward[at - 1]

    def _play(self, b: int, t: int) -> int:
        """Writes slot b's steps from row t to the end of its episode or of the batch; gives how many."""
        batch, episode, at = self._batch, self._playing[b], self._at[b]
        n = min(len(episode) - at, self.batch_spec.T - t)
        rows, steps = slice(t, t + n), slice(at, at + n)
        tree_assign(batch.obs, (slice(t + 1, t + n + 1), b), episode.obs, slice(at + 1, at + n + 1))
        tree_assign(batch.action, (rows, b), episode.action, steps)
        batch.reward[rows, b], batch.valid[rows, b] = episode.reward[steps], True
        for key, column in episode.info.items():
            name = key.removeprefix(ENV)
            columns = batch.info if name == key else batch.info.get("env", {})
            if name in columns:
                columns[name][rows, b] = column[steps]
        self._at[b] += n
        if self._at[b] == len(episode):
            batch.terminated[t + n - 1, b], batch.truncated[t + n - 1, b] = episode.terminated, episode.truncated
        return n

    def _remember(self) -> None:
        """What a recurrent agent remembers before row 0 and after the batch, each batch by the parameters of its time."""
        if self._state is None:
            return
        agent, state = self._agent_or_raise(), self._state
        tree_map(lambda x, y: np.copyto(x, y.cpu().numpy()), self._batch.state, state)
        inputs = tree_map(lambda x: torch.from_numpy(x).to(agent_device(agent)), tuple(self._batch.inputs_t))
        with torch.inference_mode():
            for t in range(self.batch_spec.T):
                _, _, state = agent.act(Inputs(*tree_map(lambda x, t=t: x[t], inputs)), state, None)
        self._state = tree_map(lambda x: x.clone(), state)

    def _agent_or_raise(self) -> Agent:
        if self._agent is None:
            raise ConfigError(
                "the sampler was shut down; build another"
                if self._closed
                else "the sampler has no agent yet; call sampler.initialize(policy.agent) first"
            )
        return self._agent
