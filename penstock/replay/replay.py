"""Replay: storage x index x view behind one door, and the schedule by which samples of it are trained on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.machine import counted
from penstock.core.noise import Purpose, generator
from penstock.core.schedule import schedule_value
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.replay.columns import Array, DeviceMemory, Rows
from penstock.replay.hindsight import HindsightTransitions
from penstock.replay.index import Index, PrioritizedIndex, SampledUnits, make_index
from penstock.replay.lockstep import TeamPartition, check_teams
from penstock.replay.partition import Partition, PartitionedStore, local_units, priority_of_all
from penstock.replay.prefetch import PendingRead
from penstock.replay.room import gigabytes
from penstock.replay.settings import ReplaySettings, check_rate, make_view, rate_in_words
from penstock.replay.storage import Storage, is_large
from penstock.replay.store import Store, chosen_info, copied, make_store, planned, require_alike
from penstock.replay.view import Sequences, View

__all__ = ["PriorityFn", "Replay", "ReplaySchedule", "ReplaySettings", "SampledUnits", "make_view"]

PriorityFn = Callable[[Storage, Rows], Array]
"""(storage, first rows [n] of fresh units) -> [n, B] priorities, from the info that the agent recorded."""
AfterUpdate: TypeAlias = Callable[[Any, Any, int], None]
"""(agent, settings, number of gradient steps) -> None."""


class Replay:
    """The live replay of one policy.

    Nothing is allocated before `prepare`, which the first batch calls at the latest. `prepare` refuses arrays that do
    not fit, then makes them all. Those in memory take it page by page as the ring is first written, so `describe` can
    be read before any is taken; those in files take their space at once. The index takes its memory in `prepare`.

    One thread writes: `append`, `draw` and `update_priorities` are called in one order, that of the training step, so a
    run repeats itself. `read` may run in another thread meanwhile, as nothing is appended until all samples are read.

    Args:
        priority_fn: for `fresh_priority="agent"`.
        info: paths of the recorded info leaves to keep, e.g. "['q']".
        exact: float64 observations stay so, as a normaliser needs them; else they are kept as float32. A policy whose
            agent has one sets it.
    """

    def __init__(
        self,
        spec: EnvSpec,
        settings: ReplaySettings,
        view: View,
        *,
        info: tuple[str, ...] = (),
        priority_fn: PriorityFn | None = None,
        state: Tree = None,
        exact: bool = False,
    ) -> None:
        self.spec, self.settings, self.view, self.exact = spec, settings, view, exact
        self.info, self.priority_fn, self.state = info, priority_fn, state
        if settings.index == "prioritized" and settings.fresh_priority == "agent" and priority_fn is None:
            raise ConfigError("replay.fresh_priority='agent' with an algorithm that records no values; use 'max'")
        if settings.hindsight and not isinstance(view, HindsightTransitions):
            raise ConfigError(
                f"replay.hindsight={settings.hindsight} with an algorithm that reads {type(view).__name__}, whose "
                "goals stay as they were; use hindsight=0, or an algorithm of single transitions"
            )
        if settings.device == "learner" and (isinstance(view, Sequences) or view.seats > 1):
            raise ConfigError(
                f"replay.device='learner' with an algorithm that reads {type(view).__name__}; expected one of single "
                "transitions, such as SAC, TD3 or DQN: use replay.device='cpu'"
            )
        self.device_memory: DeviceMemory | None = None
        """Memory of the learner's device, set by the policy; used with `settings.device="learner"`."""
        self._store: Store | None = None
        self.partition: Partition | None = None
        self._drawn_among: Partition | None = None
        """`partition` as the index counts slots: as columns, or as environments."""
        self.index: Index | None = None
        """Index over the slots of all learners; the storage holds those of this one."""
        self.least = 0
        """Least number of rows kept for each slot, even beyond the capacity; set before `prepare`."""
        self.prepared: tuple[int, int, Tree] | None = None
        """Arguments of `prepare`."""
        self.appended = 0
        """Valid rows appended since the run began."""
        self.dataset: Replay | None = None
        """Rows of `settings.dataset`, which a run puts there (`keep_dataset`); of these are the first samples drawn."""
        self.fingerprint = ""
        """Text that changes with the data of `dataset`."""

    def join(self, partition: Partition) -> None:
        """Shares the slots with other learners from now on: each keeps the rows of its own, and all draw alike.

        Raises:
            ConfigError: rows are kept already, or in shards.
        """
        if self._store is not None or self.settings.shards:
            raise ConfigError(
                f"a replay joins other learners before it holds anything, and without replay.shards="
                f"{self.settings.shards}: each learner keeps the rows of its own slots"
            )
        self.partition = partition
        self._drawn_among = partition if self.view.seats == 1 else TeamPartition(partition, self.view.seats)

    def prepare(self, T: int, B: int, info: Tree = None) -> None:
        """Plans and allocates for batches [T, B]. A second call does nothing.

        Args:
            info: example of a batch's info, leaves without the leading dimensions.

        Raises:
            ConfigError: it does not fit into memory, or is too short for a batch or a sample.
        """
        if self.storage is not None:
            return
        self.prepared = T, B, info
        settings, slots = self.settings, B
        check_teams(settings, B, self.view.seats)
        if self.partition is not None:
            self.partition.fit(B)
            slots = self.partition.total
        memory = self.device_memory if settings.device == "learner" else None
        if memory is None and settings.device == "learner":
            raise ConfigError(
                "replay.device='learner' in a replay without a policy; expected `policy.replay_schedule.replay`, whose "
                "`device_memory` the policy sets, or device='cpu'"
            )
        kept = chosen_info(info, self.info)
        plan = planned(settings, self.spec, self.view, T, slots, kept, self.state, self.exact, self.least, memory)
        if self.partition is None:
            self._store = make_store(settings, plan, self.view, B)
        else:
            self._store = PartitionedStore(plan.made(B), self.view, self.partition)
        units, self._slots, drawn = plan.rows // self.view.stride, slots, slots // self.view.seats
        self.index = make_index(settings.index, units, drawn, settings.priority_alpha)

    @property
    def storage(self) -> Storage | None:
        """Data of the rows that the learner keeps: all, or all but observations and states kept in shards."""
        return None if self._store is None else self._store.storage

    def describe(self) -> str:
        """Rows, bytes and place of the full replay, index included, for people."""
        if self.storage is None or self.index is None:
            return f"replay of {self.settings.capacity:,} rows"
        storage, total = self.storage, self.bytes * self._slots // self.storage.slots
        rows, where = (storage.rows - 1) * self._slots, self.settings.dir or "memory"
        if self.settings.shards:
            where += f" of {counted(self.settings.shards, 'shard')} ({self.settings.shard_backend})"
        if self.settings.device == "learner" and self.device_memory is not None:
            where += f", observations and actions on {self.device_memory.device}"
        return (
            f"replay of {rows:,} rows x {total / (storage.rows * self._slots):,.0f} B = {gigabytes(total)} in "
            f"{where}, {self.settings.index}"
        )

    @property
    def bytes(self) -> int:
        """Bytes of storage and index once every row is written; 0 before `prepare`."""
        return 0 if self._store is None or self.index is None else self._store.bytes + self.index.bytes

    def __len__(self) -> int:
        """Samples that can be drawn."""
        return 0 if self.index is None else len(self.index)

    def append(self, batch: SampleBatch, terminated: Array | None = None) -> int:
        """Adds the rows of a batch of numpy arrays, which may be overwritten afterwards.

        On the learner's device observations and actions may be tensors.

        Args:
            terminated: [T, B] ends that targets see, if other than the environment's.

        Returns:
            The number of valid rows, over the batches of all learners.
        """
        if batch.final is not None and (self.settings.shards or self.partition is not None or self.priority_fn):
            what = f"replay.shards={self.settings.shards}" if self.settings.shards else "several learners"
            if self.partition is None and not self.settings.shards:
                what = "replay.fresh_priority='agent', which reads the row after an end"
            raise ConfigError(
                f"an environment that resets in the step of an end, with {what}; expected replay.shards=0, one learner "
                "and replay.fresh_priority='max' there"
            )
        if self.storage is None:
            T, B = batch.spec
            self.prepare(T, B, tree_map(lambda x: x[0, 0].copy(), batch.info))
        store, index = self._live()
        storage, partition = store.storage, self._drawn_among
        store.write(batch, terminated)
        added = int(np.count_nonzero(batch.valid))
        if partition is not None:
            added = int(partition.sum_array(np.array(added)))
        self.appended += added
        stride = self.view.stride
        index.drop(-(-storage.oldest // stride))
        t = np.arange(index.head * stride, storage.head - self.view.span + 1, stride)
        if len(t):
            usable = self.view.usable(storage, t)
            by_agent = self.priority_fn if self.settings.fresh_priority == "agent" else None
            priority = None if by_agent is None else by_agent(storage, t)
            if partition is not None:
                usable = partition.gather_array(usable)
                priority = None if priority is None else partition.gather_array(priority)
            index.extend(usable, priority)
        return added

    def draw(self, n: int, rng: np.random.Generator, progress: float = 0.0) -> SampledUnits:
        """N units with their weights; `read` then fetches them.

        Args:
            progress: fraction of the run, at which `priority_beta` is read; steps of its schedule are `appended`.
        """
        _, index = self._live()
        unit, slot, probability = index.draw(n, rng)
        weight = None
        if probability is not None:
            # w = (1 / (count * P))^beta, over the largest of the batch (Schaul et al. 2016, section 3.4).
            beta = schedule_value(self.settings.priority_beta, progress, self.appended)
            weight = ((probability.item(probability.argmin()) / probability) ** beta).astype(np.float32)
        return SampledUnits(unit, slot, weight, rng.random((n, self.view.noise)))

    def read(self, drawing: SampledUnits) -> TrainBatch:
        """The drawn samples, gathered into memory of their own."""
        return self._live()[0].read(drawing.unit * self.view.stride, drawing.slot, drawing.noise)

    def sample(self, n: int, rng: np.random.Generator, progress: float = 0.0) -> tuple[SampledUnits, TrainBatch]:
        """`draw`, then `read`."""
        drawing = self.draw(n, rng, progress)
        return drawing, self.read(drawing)

    def samples(
        self,
        count: int,
        n: int,
        rng: np.random.Generator,
        progress: float = 0.0,
        *,
        noise_size: int = 0,
        prefetch: bool = False,
        ready: Callable[[TrainBatch], TrainBatch] = lambda x: x,
    ) -> Iterator[tuple[SampledUnits, TrainBatch]]:
        """`count` samples of n units, each with the drawing that new priorities are addressed to.

        Each is drawn before the one before it is used, in this thread; `prefetch` reads it meanwhile in another. So the
        bits are the same whichever thread reads.

        Args:
            noise_size: k uniforms in (0, 1) for each unit, as row `noise` [n, k]. ready: applied to each sample read.

        Raises:
            LearnerError: a read did not end in time.
        """

        if self.settings.dataset and self.dataset is None:
            raise ConfigError(
                f"replay.dataset={self.settings.dataset!r} is read by a run; in a loop of your own call "
                "keep_dataset(policy, sampler) of penstock.learn.train_ops with the live sampler of a ps.OfflineSampler"
            )
        kept, own = self.dataset, n if self.dataset is None else n - self.of_dataset(n)

        def draw() -> tuple[SampledUnits, Callable[[], TrainBatch]]:
            noise = rng.random((n, noise_size), np.float32) if noise_size else None
            drawing = self.draw(own, rng, progress)
            if kept is None:
                read = functools.partial(self._read_rows, drawing, noise, ready)
            else:
                read = functools.partial(self._read_both, drawing, kept, kept.draw(n - own, rng), noise, ready)
            if not prefetch or count < 2:
                return drawing, read
            nonlocal reading
            reading = PendingRead(read, f"a batch of {n:,} samples of replay in {self.settings.dir or 'memory'}")
            return drawing, reading.result

        reading: PendingRead[TrainBatch] | None = None
        following = draw() if count else None
        try:
            for left in range(count, 0, -1):
                assert following is not None
                drawing, result = following
                x = result()
                following = draw() if left > 1 else None
                yield drawing, x
        except GeneratorExit:
            if reading is not None:
                reading.settle()  # replay may change from here on
            raise

    def of_dataset(self, n: int) -> int:
        """Number of samples of n that are of the dataset. Raises ConfigError if that is none or all."""
        count = round(self.settings.dataset_share * n)
        if not 0 < count < n:
            raise ConfigError(
                f"replay.dataset_share={self.settings.dataset_share:g} makes {count} of batch_size={n} samples; "
                "expected at least one of the dataset and one of the rows collected"
            )
        return count

    def _read_rows(
        self, drawing: SampledUnits, noise: Array | None, ready: Callable[[TrainBatch], TrainBatch]
    ) -> TrainBatch:
        held = True
        if self._drawn_among is not None:
            drawing, noise, held = local_units(drawing, noise, self._drawn_among, self._live()[1].tail)
        x = self.read(drawing)
        if drawing.weight is None and noise is None and held:
            return ready(x)
        rows = dict(x.rows)
        if drawing.weight is not None:
            rows["weight"] = drawing.weight
        if noise is not None:
            rows["noise"] = np.maximum(noise, np.float32(2.0**-25))
        valid = x.valid if held else np.zeros(1 if x.valid is None else x.valid.shape, bool)
        return ready(TrainBatch(x.inputs, rows, valid, x.state))

    def _read_both(
        self,
        drawing: SampledUnits,
        kept: Replay,
        of_kept: SampledUnits,
        noise: Array | None,
        ready: Callable[[TrainBatch], TrainBatch],
    ) -> TrainBatch:
        """One sample of own units and of the dataset's, without the dummy of a learner that holds none of either."""
        n = len(drawing.unit)
        first, second = (None, None) if noise is None else (noise[:n], noise[n:])
        parts = self._read_rows(drawing, first, lambda x: x), kept._read_rows(of_kept, second, lambda x: x)
        held = [x for x in parts if x.valid is None]
        if len(held) < 2:
            return ready(held[0] if held else parts[0])
        inputs, rows = tree_map(self._joined, *((tuple(x.inputs), x.rows) for x in held))
        return ready(TrainBatch(Inputs(*inputs), rows))

    def _joined(self, *parts: Any) -> Any:
        """Arrays, or tensors on the device, one after the other."""
        if isinstance(parts[0], np.ndarray):
            return np.concatenate(parts)
        assert self.device_memory is not None
        return self.device_memory.joined(parts)

    def update_priorities(self, drawing: SampledUnits, priority: Array) -> None:
        """New priorities [N] of drawn units, such as absolute TD errors; a learner passes those of its slots."""
        index = self._live()[1]
        if self._drawn_among is not None:
            if self.settings.index != "prioritized":
                return
            priority = priority_of_all(drawing, priority, self._drawn_among)
        index.update(drawing.unit, drawing.slot, priority)

    def state_dict(self) -> dict[str, Any]:
        """All of the state but the large arrays."""
        if self._store is None or self.index is None:
            return {"prepared": None}
        return {
            "prepared": [self._store.storage.rows, self._slots],
            "index_kind": self.settings.index,
            "appended": self.appended,
            "storage": self._store.state_dict(),
            "index": self.index.state_dict(),
            **({"dataset": self.fingerprint} if self.fingerprint else {}),
        }

    def arrays(self) -> dict[str, Array]:
        """The written part of every array, and the index's, views of live memory; see `Store.written`."""
        if self._store is None or self.index is None:
            return {}
        return {**dict(self._store.written()), **{f"index.{name}": x for name, x in self.index.arrays().items()}}

    def give(self, name: str, start: int, stop: int) -> None:
        """Takes part where another learner reads these rows of one of its `arrays`."""
        store = self._live()[0]
        assert isinstance(store, PartitionedStore)
        store.give(name, start, stop)

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """Inverse of `state_dict` and `arrays`, after `prepare`.

        Raises:
            CheckpointError: shapes or index differ.
        """
        if state["prepared"] is None:
            return
        if state.get("dataset", self.fingerprint) != self.fingerprint:
            raise CheckpointError(
                f"replay.dataset={self.settings.dataset!r} has changed since the checkpoint was written, so the run "
                "cannot go on as if it had not stopped; put the old one back, or start anew with --init"
            )
        store, index = self._live()
        require_alike(state, arrays, [store.storage.rows, self._slots], self.settings.index, index)
        store.load(state["storage"], arrays)
        index.load_state_dict(state["index"], {name: arrays[f"index.{name}"] for name in index.arrays()})
        self.appended = int(state["appended"])

    def take_settings_of(self, fresh: Replay) -> None:
        """Goes on with the discount and the priorities' settings of another one, which holds nothing."""
        if isinstance(self.index, PrioritizedIndex):
            self.index.set_alpha(fresh.settings.priority_alpha)
        self.settings = fresh.settings
        self.set_discount(fresh.view.discount)

    def set_discount(self, discount: float) -> None:
        """Has samples be discounted so from now on."""
        if discount != self.view.discount:
            (self.view if self._store is None else self._store).set_discount(discount)

    def close(self) -> None:
        """Ends the shards, if there are any; they end with the last reference to the replay anyway."""
        if self._store is not None:
            self._store.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Replay:
        return copied(self)

    def _live(self) -> tuple[Store, Index]:
        if self._store is None or self.index is None:
            raise ConfigError("the replay is empty; append a batch first")
        return self._store, self.index


class ReplaySchedule:
    """The replay of a policy, and how much of it is trained on.

    Args:
        batch_size: samples of a gradient step.
        sample_rows: rows that each of them trains on, more than 1 for sequences and teams.
        replay_ratio: rows trained on for each row collected, after the first `learning_starts` rows.
        noise_size: uniforms for each sample, which `postprocess_fn` and `loss_fn` find as `x["noise"]`.
        after_update: called with (agent, settings, number of gradient steps) after each step; moves target networks.

    Raises:
        ConfigError: a number out of range, or more than the replay can hold or give.
    """

    def __init__(
        self,
        replay: Replay,
        batch_size: int,
        replay_ratio: float,
        learning_starts: int,
        *,
        sample_rows: int = 1,
        noise_size: int = 0,
        after_update: AfterUpdate | None = None,
    ) -> None:
        check_rate(replay.settings, batch_size, replay_ratio, learning_starts, sample_rows)
        if replay.settings.index == "fifo" and replay_ratio > (most := sample_rows / replay.view.stride):
            raise ConfigError(
                f"replay_ratio={replay_ratio} with replay.index='fifo', which gives each sample once; use a ratio of "
                f"at most {most:g}, or another index"
            )
        if replay.settings.dataset and sample_rows > 1:
            raise ConfigError(
                f"replay.dataset={replay.settings.dataset!r} with samples of {sample_rows} rows; expected an algorithm "
                "of single transitions, such as SAC, TD3, DQN, CQL, IQL or ReBRAC"
            )
        self.replay, self.batch_size, self.sample_rows = replay, batch_size, sample_rows
        self.replay_ratio, self.learning_starts, self.noise_size = replay_ratio, learning_starts, noise_size
        self.after_update = after_update
        if isinstance(replay.view, HindsightTransitions):
            replay.view.compares = True  # from here on its rows are an environment's
        self.rng = generator(0, Purpose.REPLAY)
        """Draws samples; moved to an address of its own by each training step."""
        self.collected = 0
        """Rows collected since the run began."""
        self.trained = 0
        """Gradient steps asked of the policy, skipped ones included; as if the present rate had always held."""
        self._other_rows = 0
        """Rows trained on beyond those that `trained` counts, as they were at another rate; may be below 0."""
        self.whole = False
        """True: the replay holds a full dataset; rows played back are counted and not added."""

    def due(self) -> int:
        """Gradient steps due by the replay ratio: exact, counted from the start of the run.

        Steps whose samples cannot be drawn yet stay due.
        """
        steps = self._asked() - self.trained
        if self.replay.settings.index == "fifo":  # the newest rows may not be samples yet
            return min(steps, len(self.replay) // self.batch_size)
        return steps if len(self.replay) else 0

    def reads_ahead(self, to_gpu: bool) -> bool:
        """True if samples are read in a thread: `replay.prefetch`; "auto": large ones, those of shards or to a GPU."""
        wish = self.replay.settings.prefetch
        if wish != "auto" or self.replay.settings.device == "learner":
            return wish is True
        # Observations are most of a sample where it is large; of a transition it holds two.
        rows = self.batch_size * (self.replay.view.span + 1 if self.sample_rows > 1 else 2)
        return to_gpu or bool(self.replay.settings.shards) or is_large(rows, self.replay.spec.obs)

    def describe(self, unit: str = "step") -> str:
        """Replay and rate of training for people, in gradient steps: `one update of 32 every 4 steps`."""
        kind = "sequences" if self.replay.view.seats == 1 else "teams"
        rate = rate_in_words(self.batch_size, self.replay_ratio, self.learning_starts, self.sample_rows, kind, unit)
        return f"{self.replay.describe()}; {rate}"

    def take_settings_of(self, fresh: ReplaySchedule) -> None:
        """Goes on with the batch size, rate, discount and priorities of another one, which holds nothing."""
        rate, rows = self._rate, self._rows_trained
        self.batch_size, self.replay_ratio, self.learning_starts = (
            fresh.batch_size,
            fresh.replay_ratio,
            fresh.learning_starts,
        )
        self.after_update = fresh.after_update
        self.replay.take_settings_of(fresh.replay)
        if self._rate != rate:
            self._begin_rate(rows)

    def metrics(self) -> dict[str, float]:
        """`replay/ratio`, the rows trained on for each row collected so far, and `replay/size` in samples."""
        counted = max(0, self.collected - self.learning_starts)
        ratio = self._rows_trained / counted if counted else 0.0
        return {"replay/ratio": ratio, "replay/size": float(len(self.replay))}

    def state_dict(self) -> dict[str, Any]:
        """Counters and the replay's state, without its arrays."""
        return {
            "collected": self.collected,
            "trained": self.trained,
            "other_rows": self._other_rows,
            "rate": self._rate,
            "whole": self.whole,
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Inverse of `state_dict` and the replay's `arrays`; a ratio that has changed holds from now on."""
        self.replay.load_state_dict(state["replay"], arrays)
        self.collected, self.trained = int(state["collected"]), int(state["trained"])
        self.whole = bool(state.get("whole", False))
        self._other_rows = int(state.get("other_rows", 0))
        rate = list(state.get("rate", self._rate))
        if rate != self._rate:
            self._begin_rate(int(self.trained * rate[1] * rate[2]) + self._other_rows)

    def _begin_rate(self, rows: int) -> None:
        """A rate that has changed holds from now on, after so many rows were trained on."""
        self.trained = self._asked()
        self._other_rows = rows - self.trained * self.batch_size * self.sample_rows

    @property
    def _rows_trained(self) -> int:
        return self.trained * self.batch_size * self.sample_rows + self._other_rows

    @property
    def _rate(self) -> list[float]:
        return [self.replay_ratio, self.batch_size, self.sample_rows, self.learning_starts]

    def _asked(self) -> int:
        rows = max(0, self.collected - self.learning_starts) * self.replay_ratio
        return math.floor(rows / (self.batch_size * self.sample_rows) + 1e-9)
