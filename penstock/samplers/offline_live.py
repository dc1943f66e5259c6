"""The live sampler that plays whole episodes of a dataset back, slot by slot, by the rules of the record.

Episodes are numbered over all passes: number n is episode `order(n // E)[n % E]` of E. A slot whose episode has ended
spends a reset row and takes the next number; slots that end in the same row take theirs in order. So every batch is a
function of seed, data and position, and a resumed run needs only the position. A sampler of some of the slots counts
the rows of the others too, by the lengths of their episodes, and reads only its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from penstock.agents.agent import Agents
from penstock.agents.parameters import agent_device
from penstock.core.batch import AnyBatch, Inputs, SampleBatch, carry_over, padded_rows
from penstock.core.errors import CheckpointError
from penstock.core.noise import Purpose, generator
from penstock.core.spec import WHOLE, BatchSpec, EnvSpec, Share
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.datasets.episode import ENV, Episode, EpisodeSource
from penstock.envs.seats import Seating
from penstock.samplers.acting_agents import ActingAgents
from penstock.samplers.episodes import DISCOUNT, Episodes
from penstock.samplers.live import LiveSampler
from penstock.samplers.trackers.evaluation import Evaluates, Evaluation
from penstock.samplers.trackers.slots import EpisodeStats
from penstock.samplers.trackers.states import State, check_slots, columns_of, side_by_side

NO_VERSION = -1
"""`version` of every row: no parameters of this learner chose the action."""


class OfflineLive(Evaluates):
    """A `Sampler` that plays back the episodes of a dataset.

    Args:
        evaluator: plays the evaluations; shut down with this sampler. None: there are none.
        share: its slots among those of several samplers.
    """

    def __init__(
        self,
        batch_spec: BatchSpec,
        source: EpisodeSource,
        spec: EnvSpec,
        evaluator: LiveSampler | None,
        seed: int,
        shuffle: bool,
        discount: float | None,
        share: Share = WHOLE,
    ) -> None:
        B = batch_spec.B
        self.batch_spec, self.spec = batch_spec, spec
        self._source, self._evaluator, self._seed, self._shuffle = source, evaluator, seed, shuffle
        self._stats = EpisodeStats(B, DISCOUNT if discount is None else discount)
        self.info_keys = () if evaluator is None else evaluator.info_keys
        """Keys of the env info in every batch; NaN where the dataset has no such column."""
        self._installed = ActingAgents(Seating.alone(self.spec), batch_spec, self.info_keys, share)
        self.specs = self._installed.seating.by_id
        """By policy id: one, under `shared`."""
        self._first_slot, slots = share.first_slot, self._installed.total_slots
        self._order: tuple[int, Any] = (-1, None)
        self._begun = self._once = False
        self._steps = 0
        self._next = 0  # number of the next episode
        self._number, self._at = [-1] * slots, [0] * slots  # of each slot's episode, and its steps played
        self._length = [0] * slots
        self._playing: dict[int, Episode] = {}  # of the slots of this sampler, by number among all
        self._state: Tree = None
        self.cut_slots: list[int] = []
        """Always empty: a position in a dataset can always be restored."""

    def initialize(self, agents: Agents, buffers: int = 1) -> dict[str, Any]:
        """Takes the agent that learns and will be evaluated, and allocates the batch.

        Returns:
            examples of one step of one slot: obs, action, recorded info and recurrent state.
        """
        if self._evaluator is not None:
            self._evaluator.initialize(agents)
        shown = self._installed.take(agents)
        shown["info"] = {
            key: np.zeros(shape, dtype) for key, (dtype, shape) in self._source.info.items() if not key.startswith(ENV)
        }
        self._installed.infos = [shown["info"]]
        (self._batch,) = self._installed.allocate()
        self._state = tree_map(lambda x: x.clone(), self._installed.agent.initial_state(self.batch_spec.B))
        return shown

    def obtain_samples(self, itr: int, version: int | None = None) -> tuple[SampleBatch, Episodes]:
        """The next T rows of every slot, and the episodes of the data that ended in them.

        Args:
            itr, version: have no influence: the position alone decides.

        Raises:
            ConfigError: a file of the dataset is damaged.
        """
        batch = self._played()
        self._steps += batch.env_steps
        return batch, self._stats.update(batch)

    @property
    def dataset(self) -> OfflineLive:
        """This sampler, from which a replay is filled before a run."""
        return self

    @property
    def steps(self) -> int:
        """Steps of all episodes of the dataset."""
        return int(self._source.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """Text that changes with the data."""
        return self._source.fingerprint

    @property
    def rows_once(self) -> int:
        """Rows of a slot in which `each_once` plays every episode, a multiple of T."""
        free = [(0, slot) for slot in range(self._installed.total_slots)]
        for i in self._order_of(0):
            row, slot = heapq.heappop(free)
            heapq.heappush(free, (row + (row > 0) + int(self._source.lengths[i]), slot))
        T = self.batch_spec.T
        return -(-max(free)[0] // T) * T

    def each_once(self) -> Iterator[SampleBatch]:
        """Batches that hold every episode once; a slot for which none is left idles. Then playing begins anew.

        They are neither steps nor episodes of the run: a replay is filled with them before it.
        """
        self._once = True
        for _ in range(self.rows_once // self.batch_spec.T):
            yield self._played()
        self._once = self._begun = False
        self._next = 0
        tree_map(lambda x, y: x.copy_(y), self._state, self._installed.agent.initial_state(self.batch_spec.B))

    def _played(self) -> SampleBatch:
        """The next T rows of every slot."""
        _ = self._installed.agent
        T, _ = self.batch_spec
        batch, slots = self._batch, range(self._installed.total_slots)
        if self._begun:
            carry_over(batch, batch)
        else:
            self._begun = True
            for slot in slots:
                if self._take(slot):
                    self._show(slot, 0)
        self._blank()
        due = [(0, slot) for slot in slots]
        while due:
            t, slot = heapq.heappop(due)
            if t == T:
                continue
            if self._at[slot] < self._length[slot]:
                heapq.heappush(due, (t + self._play(slot, t), slot))
            elif self._take(slot):  # row t is the reset row of the next episode
                self._show(slot, t + 1)
                heapq.heappush(due, (t + 1, slot))
            elif self._is_own(slot):
                b = slot - self._first_slot
                for x in tree_leaves(batch.obs):
                    x[t + 1 :, b] = x[t, b]
        self._remember()
        return batch

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Plays it in real environments."""
        assert self._evaluator is not None
        return self._evaluator.evaluate(asked)

    @property
    def last_batch(self) -> SampleBatch:
        """The live buffer, as the last `obtain_samples` left it."""
        return self._batch

    def blank_batch(self) -> AnyBatch:
        """A batch of zeros in which every row is valid, for timing."""
        return self._installed.blank_batch()

    def metrics(self) -> dict[str, float]:
        """`sampler/passes`: how often the steps of the dataset have been played."""
        return {"sampler/passes": self._steps / float(self._source.lengths.sum())}

    def shutdown(self) -> None:
        """Closes environments and files. A second call does nothing."""
        self._installed.close()
        if self._evaluator is not None:
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
        """Inverse of `state_dict`, after `initialize`. Raises CheckpointError if the dataset has changed."""
        if not state["begun"]:
            return
        if state["dataset"] != self._source.fingerprint:
            raise CheckpointError(
                f"dataset {self._source.name} has changed since the checkpoint was written, so the run cannot go "
                "on as if it had not stopped; put the old one back, or start anew with --init"
            )
        if len(state["number"]) != len(self._number):
            raise CheckpointError(
                f"the checkpoint holds {len(state['number'])} slots; this sampler has B={self.batch_spec.B} of "
                f"{len(self._number)}"
            )
        self._begun, self._next, self._steps = True, state["next"], state["steps"]
        self._number, self._at = list(state["number"]), list(state["at"])
        for slot in range(len(self._number)):
            self._load(slot)
            self._show(slot, -1)
        tree_map(lambda x, y: x.copy_(torch.from_numpy(y)), self._state, state["agent_state"])
        self._stats.load_state_dict(state["stats"])

    @staticmethod
    def join_states(states: Sequence[State]) -> State:
        """The state of one sampler of all slots, as `Divisible.join_states`: each knows the positions of all."""
        agent_state = side_by_side([x["agent_state"] for x in states])
        stats = EpisodeStats.join_states([x["stats"] for x in states])
        return {**states[0], "steps": sum(x["steps"] for x in states), "agent_state": agent_state, "stats": stats}

    @staticmethod
    def split_state(state: State, slots: Sequence[slice]) -> list[State]:
        """Inverse of `join_states`; the first state gets the number of steps played."""
        total = len(state["number"])
        if state["begun"]:
            check_slots(total, slots)
        trees = {name: state[name] for name in ("agent_state", "stats")}
        steps = [0 if at.start else state["steps"] for at in slots]
        return [{**state, "steps": n, **columns_of(trees, at, total)} for n, at in zip(steps, slots)]

    def _blank(self) -> None:
        """Makes every row a reset row, until a step is written to it."""
        batch = self._batch
        batch.first[1:] = False
        tree_assign(batch.action, slice(None), self.spec.null_action)
        for x in (batch.reward, batch.terminated, batch.truncated, batch.valid):
            x[...] = 0
        for key, columns in batch.info.items():
            for x in tree_leaves(columns):
                x[...] = np.nan if key == "env" else 0
        batch.version[...] = NO_VERSION

    def _take(self, slot: int) -> bool:
        """Deals the next episode to a slot; False if each was dealt once and that is all that was wanted."""
        if self._once and self._next >= len(self._source.lengths):
            self._at[slot] = self._length[slot] = 0
            return False
        self._number[slot], self._at[slot] = self._next, 0
        self._next += 1
        self._load(slot)
        return True

    def _load(self, slot: int) -> None:
        """Looks up the episode of the slot's number; reads it if the slot is this sampler's."""
        pass_, i = divmod(self._number[slot], len(self._source.lengths))
        i = int(self._order_of(pass_)[i])
        self._length[slot] = int(self._source.lengths[i])
        if self._is_own(slot):
            self._playing[slot] = self._source.episode(i)

    def _order_of(self, pass_: int) -> Any:
        """The episodes in the order in which a pass plays them."""
        if self._order[0] != pass_:
            count = len(self._source.lengths)
            shuffled = generator(self._seed, Purpose.DATASET, pass_).permutation(count) if self._shuffle else None
            self._order = pass_, range(count) if shuffled is None else shuffled
        return self._order[1]

    def _is_own(self, slot: int) -> bool:
        return self._first_slot <= slot < self._first_slot + self.batch_spec.B

    def _show(self, slot: int, row: int) -> None:
        """Writes the inputs of the slot's agent before its next step."""
        if not self._is_own(slot):
            return
        batch, episode, at, b = self._batch, self._playing[slot], self._at[slot], slot - self._first_slot
        tree_assign(batch.obs, (row, b), episode.obs, at)
        batch.first[row, b] = at == 0
        if at == 0:
            tree_assign(batch.prev_action, (row, b), self.spec.null_action)
            batch.prev_reward[row, b] = 0.0
        else:
            tree_assign(batch.prev_action, (row, b), episode.action, at - 1)
            batch.prev_reward[row, b] = episode.reward[at - 1]

    def _play(self, slot: int, t: int) -> int:
        """Writes the slot's steps from row t to the end of its episode or of the batch; returns their number."""
        at = self._at[slot]
        n = min(self._length[slot] - at, self.batch_spec.T - t)
        self._at[slot] += n
        if not self._is_own(slot):
            return n
        batch, episode, b = self._batch, self._playing[slot], slot - self._first_slot
        rows, steps = slice(t, t + n), slice(at, at + n)
        tree_assign(batch.obs, (slice(t + 1, t + n + 1), b), episode.obs, slice(at + 1, at + n + 1))
        tree_assign(batch.action, (rows, b), episode.action, steps)
        batch.reward[rows, b], batch.valid[rows, b] = episode.reward[steps], True
        for key, column in episode.info.items():
            name = key.removeprefix(ENV)
            columns = batch.info if name == key else batch.info.get("env", {})
            if name in columns:
                columns[name][rows, b] = column[steps]
        if at + n == len(episode):
            batch.terminated[t + n - 1, b], batch.truncated[t + n - 1, b] = episode.terminated, episode.truncated
        return n

    def _remember(self) -> None:
        """Unrolls the recurrent state from row 0 to after the batch, each batch by the parameters of its time."""
        if self._state is None:
            return
        agent, state = self._installed.agent, self._state
        tree_map(lambda x, y: np.copyto(x, y.cpu().numpy()), self._batch.state, state)
        T, B = self.batch_spec
        missing = padded_rows(B) - B  # as where agents act, so that a slot's state has the same bits among any others
        inputs = tree_map(
            lambda x: torch.from_numpy(np.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))).to(
                agent_device(agent)
            ),
            tuple(self._batch.inputs_t),
        )
        state = tree_map(lambda x: torch.cat([x, x.new_zeros(missing, *x.shape[1:])]), state)
        with torch.inference_mode():
            for t in range(T):
                _, _, state = agent.act(Inputs(*tree_map(lambda x, t=t: x[t], inputs)), state, None)
        self._state = tree_map(lambda x: x[:B].clone(), state)
