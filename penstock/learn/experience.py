"""Training from replay: a batch is appended, and as many gradient steps follow as the ratio asks for."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from fractions import Fraction
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError, LearnerError
from penstock.core.noise import Purpose, generator
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.learn.algorithm import ResultDict
from penstock.learn.minibatch import TrainBatch

_LARGE_BYTES = 1 << 20
_MOST_UPDATES = 1_000
_READ_TIMEOUT_S = 300.0


class ReplayLike(Protocol):
    """What is needed of a `penstock.replay.Replay`."""

    spec: Any
    settings: Any
    view: Any

    def prepare(self, T: int, B: int, info: Tree = None) -> None: ...
    def append(self, batch: SampleBatch, terminated: Any = None) -> None: ...
    def draw(self, n: int, rng: np.random.Generator, progress: float = 0.0) -> Any: ...
    def read(self, drawing: Any) -> Any: ...
    def update_priorities(self, drawing: Any, priority: Any) -> None: ...
    def describe(self) -> str: ...
    def state_dict(self) -> dict[str, Any]: ...
    def arrays(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None: ...
    def __len__(self) -> int: ...


class Experience:
    """The replay of a policy and how much of it is trained on.

    Args:
        batch_size: samples of a gradient step. sample_rows: rows that each of them trains on, more than 1 for sequences.
        replay_ratio: rows trained on for each row collected, after the first `learning_starts` rows.
        noise_size: uniforms for each sample that `postprocess_fn` and `loss_fn` find as `x["noise"]`.
        after_update: called with (agent, settings, number of gradient steps) after each: target networks.
    """

    def __init__(
        self,
        replay: ReplayLike,
        batch_size: int,
        replay_ratio: float,
        learning_starts: int,
        *,
        sample_rows: int = 1,
        noise_size: int = 0,
        after_update: Callable[[Any, Any, int], None] | None = None,
    ) -> None:
        capacity = replay.settings.capacity
        if batch_size < 1 or replay_ratio <= 0.0 or learning_starts < 0:
            raise ConfigError(
                f"batch_size={batch_size}, replay_ratio={replay_ratio}, learning_starts={learning_starts}; expected "
                "positive numbers (learning_starts may be 0)"
            )
        if not replay_ratio <= _MOST_UPDATES * batch_size * sample_rows:
            one = batch_size * sample_rows
            raise ConfigError(
                f"replay_ratio={replay_ratio:g} is {replay_ratio / one:,.3g} gradient steps for each environment step; "
                f"expected at most {_MOST_UPDATES:,} ({one} is one a step)"
            )
        if batch_size * sample_rows > capacity or learning_starts > capacity:
            raise ConfigError(
                f"replay.capacity={capacity} holds less than batch_size={batch_size} samples of {sample_rows} rows, or than "
                f"learning_starts={learning_starts}; use replay.capacity >= "
                f"{max(batch_size * sample_rows, learning_starts)}"
            )
        if replay.settings.index == "fifo" and replay_ratio > (most := sample_rows / replay.view.stride):
            raise ConfigError(
                f"replay_ratio={replay_ratio} with replay.index='fifo', which gives each sample once; use a ratio of at "
                f"most {most:g}, or another index"
            )
        self.replay, self.batch_size, self.sample_rows = replay, batch_size, sample_rows
        self.replay_ratio, self.learning_starts, self.noise_size = replay_ratio, learning_starts, noise_size
        self.after_update = after_update
        self.collected = 0
        """Rows collected since the run began."""
        self.trained = 0
        """Gradient steps asked of the policy, skipped ones included."""

    def due(self) -> int:
        """Gradient steps that the ratio asks for by now: exact, since it is counted from the start of the run.

        What cannot be drawn yet stays due.
        """
        steps = self._asked() - self.trained
        if self.replay.settings.index == "fifo":  # the newest rows may not be samples yet
            return min(steps, len(self.replay) // self.batch_size)
        return steps if len(self.replay) else 0

    def describe(self) -> str:
        """What is trained on and how often, for people: the gradient steps that `replay_ratio` comes to."""
        exact = Fraction(repr(self.replay_ratio)) / (self.batch_size * self.sample_rows)
        of = f"{self.batch_size:,}" + (f" sequences of {self.sample_rows:,} rows" if self.sample_rows > 1 else "")
        if exact.denominator > 100_000:  # a ratio such as 1 / 3
            rate = f"one update of {of} every {1 / float(exact):,.6g} steps"
        else:
            rate = f"{exact.numerator:,} updates" if exact.numerator > 1 else "one update"
            rate += f" of {of} every " + ("step" if exact.denominator == 1 else f"{exact.denominator:,} steps")
        after = f" after the first {self.learning_starts:,}" if self.learning_starts else ""
        return f"{self.replay.describe()}; {rate}{after} (replay ratio {self.replay_ratio:g})"

    def metrics(self) -> ResultDict:
        """`replay/ratio` as it is, and `replay/size` in samples."""
        counted = max(0, self.collected - self.learning_starts)
        ratio = self.trained * self.batch_size * self.sample_rows / counted if counted else 0.0
        return {"replay/ratio": ratio, "replay/size": float(len(self.replay))}

    def state_dict(self) -> dict[str, Any]:
        """Counters and the replay's state, without its arrays."""
        return {
            "collected": self.collected,
            "trained": self.trained,
            "rate": self._rate,
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """The inverse of `state_dict` and the replay's `arrays`. Another ratio than the stored one holds from here on."""
        self.replay.load_state_dict(state["replay"], arrays)
        self.collected, self.trained = int(state["collected"]), int(state["trained"])
        if list(state.get("rate", self._rate)) != self._rate:
            self.trained = self._asked()

    @property
    def _rate(self) -> list[float]:
        return [self.replay_ratio, self.batch_size, self.sample_rows, self.learning_starts]

    def _asked(self) -> int:
        rows = max(0, self.collected - self.learning_starts) * self.replay_ratio
        return math.floor(rows / (self.batch_size * self.sample_rows) + 1e-9)


def train_on_replay(policy: Any, batch: SampleBatch) -> ResultDict:
    """Appends a batch of numpy arrays, then takes the gradient steps that are due.

    `postprocess_fn` and `loss_fn` are given the view's arrays, and `weight` [N] where replay is prioritized, `noise`
    [N, k] uniforms in (0, 1) where asked for, and `update`, the number of gradient steps before this one.

    Returns:
        `train/...` metrics, each the mean over the gradient steps, and `replay/...`.

    Raises:
        NonFiniteError: see `Policy.learn_on_batch`.
    """
    own: Experience = policy.experience
    tensors = tree_map(torch.from_numpy, batch)
    own.replay.append(batch, policy.agent.terminal(tensors).numpy())
    own.collected += batch.env_steps
    policy.agent.observe(tree_map(lambda x: x.to(policy.device), tensors))
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = defaultdict(int)
    rng = generator(policy.seed, Purpose.REPLAY, policy.version)
    for drawing, x in samples(policy, own.due(), rng):
        x = TrainBatch(x.inputs, {**x.rows, "update": policy.updates}, x.valid, x.state)
        policy.agent.renew_noise(rng)
        with torch.no_grad():
            x = policy.postprocess(x)
        loss = policy.update(x)
        own.trained += 1
        if loss is None:
            continue
        if loss.priorities is not None:
            own.replay.update_priorities(drawing, loss.priorities.cpu().numpy())
        if own.after_update is not None:
            own.after_update(policy.agent, policy.settings, policy.updates)
        for name, value in loss.metrics.items():
            sums[name] = sums[name] + value if name in sums else value
            counts[name] += 1
    policy.version += 1
    policy.agent.renew_noise(rng)  # what the next batch is collected with
    policy.set_progress(policy.progress)
    return {**{f"train/{name}": float(total) / counts[name] for name, total in sums.items()}, **own.metrics()}


def samples(policy: Any, count: int, rng: np.random.Generator) -> Iterator[tuple[Any, TrainBatch]]:
    """`count` samples with what is needed to give them new priorities.

    Each is drawn before the one before it is trained on, in this thread; reading it, which takes long where samples are
    large, then goes on in another. So a run has the same bits whichever thread reads.
    """
    own, device = policy.experience, policy.device

    def draw() -> tuple[Any, Any]:
        noise = rng.random((own.batch_size, own.noise_size), np.float32) if own.noise_size else None
        return own.replay.draw(own.batch_size, rng, policy.progress), noise

    def read(drawing: Any, noise: Any) -> TrainBatch:
        shown = own.replay.read(drawing)
        rows = dict(shown.rows)
        if drawing.weight is not None:
            rows["weight"] = drawing.weight
        if noise is not None:
            rows["noise"] = np.maximum(noise, np.float32(2.0**-25))

        def to(x: Any) -> Tensor:
            tensor = torch.from_numpy(x)
            return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)

        inputs, rows, valid, state = tree_map(to, (shown.inputs, rows, shown.valid, shown.state))
        return TrainBatch(inputs, rows, valid, state)

    if count < 2 or not _threaded(own, device):
        ahead = draw() if count else None
        for left in range(count, 0, -1):
            assert ahead is not None
            present, ahead = ahead, (draw() if left > 1 else None)
            yield present[0], read(*present)
        return

    def begin(drawing: Any, noise: Any) -> Future[TrainBatch]:
        future: Future[TrainBatch] = Future()

        def work() -> None:
            try:
                future.set_result(read(drawing, noise))
            except BaseException as error:  # raised where the sample is asked for
                future.set_exception(error)

        # A daemon, unlike the threads of an executor, keeps no process alive whose disk does not answer any more.
        threading.Thread(target=work, name="replay", daemon=True).start()
        return future

    drawn = draw()
    future = begin(*drawn)
    try:
        for left in range(count, 0, -1):
            if not wait([future], _READ_TIMEOUT_S).done:
                where = own.replay.settings.dir or "memory"
                raise LearnerError(
                    f"a batch of {own.batch_size:,} samples of replay in {where} was not read within {_READ_TIMEOUT_S:g} s; "
                    "resume from the last checkpoint, with replay.dir on a disk that answers"
                )
            present, x = drawn, future.result(0)
            if left > 1:
                drawn = draw()
                future = begin(*drawn)
            yield present[0], x
    except GeneratorExit:
        wait([future], _READ_TIMEOUT_S)  # replay may change from here on
        raise


def _threaded(own: Experience, device: torch.device) -> bool:
    wish = own.replay.settings.prefetch
    if wish != "auto":
        return bool(wish)
    return device.type != "cpu" or _sample_bytes(own) >= _LARGE_BYTES


def _sample_bytes(own: Experience) -> int:
    """Of the observations that a batch shows, next ones included, which are most of it where it is large."""
    rows = own.replay.view.span + 1 if own.sample_rows > 1 else 2
    row = sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in tree_leaves(own.replay.spec.obs))
    return own.batch_size * rows * row
