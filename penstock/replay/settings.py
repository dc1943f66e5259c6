"""Settings of a replay, and the view of transitions that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from penstock.core.config import known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Chance, Count, Positive, Share, Unit, Whole, check_settings
from penstock.core.spec import EnvSpec
from penstock.replay.hindsight import HindsightTransitions, find_reward_fn
from penstock.replay.view import ALL_INPUTS, Transitions

_MOST_UPDATES = 1_000


@dataclass(frozen=True)
class ReplaySettings:
    """Size, place and drawing of a replay."""

    __new__ = known_names
    fixed: ClassVar[frozenset[str]] = frozenset((
        "capacity", "index", "fresh_priority", "deduplicate_frames", "dir", "hindsight", "reward_fn", "prefetch",
        "shards", "shard_backend", "shard_deadline_s", "dataset", "device",
    ))  # fmt: skip
    """Settings that `run.set` does not change."""

    capacity: Count = 1_000_000
    """Rows kept over all slots, usually 1e5 to 1e6."""
    index: Literal["uniform", "prioritized", "fifo"] = "uniform"
    """How rows are drawn: uniformly, by their last error (Schaul et al. 2016), or each once in order of arrival."""
    priority_alpha: Unit = 0.6
    """How much priorities count: 0 is uniform, 1 proportional."""
    priority_beta: Chance = "linear(0.4, 1.0)"
    """How far importance weights correct the bias of priorities, usually rising to 1 over the run."""
    fresh_priority: Literal["max", "agent"] = "max"
    """Priority of new rows: the largest so far, or the error computed from the agent's values when it acted."""
    deduplicate_frames: bool = False
    """Store stacks of images [C, H, W] frame by frame: 1/C of the memory, the same samples."""
    dir: str | None = None
    """Keep the arrays in unnamed files in this directory, for a replay larger than memory. None: in memory."""
    device: Literal["cpu", "learner"] = "cpu"
    """Where observations and actions lie: in the host's memory, or on the device of the networks. `learner`: for tensor
    environments on a GPU, whose observations then never leave it."""
    hindsight: Whole = 0
    """Hindsight samples (with a goal reached later in the episode) for each sample with its original goal; usually 4
    (Andrychowicz et al. 2017), 0: none. For Dict observations with goals."""
    reward_fn: str = ""
    """`module:function` that computes the rewards of hindsight samples, or `module:Env` whose `compute_reward` does;
    "": that of the run's own environment."""
    prefetch: bool | Literal["auto"] = "auto"
    """Read the next samples in a thread during training. "auto": if samples are large, go to a GPU, or lie in
    shards; never with `device="learner"`."""
    dataset: str = ""
    """Folder of a dataset that is kept beside the rows collected, as a whole and for good; "": none. Each minibatch
    draws `dataset_share` of its samples from it (Ball et al. 2023)."""
    dataset_share: Share = 0.5
    """Share of a minibatch from `dataset`, usually 0.25 to 0.5."""
    shards: Whole = 0
    """Actors that keep the rows, each for some slots; usually one for each machine. 0: the learner keeps them. The
    samples do not depend on it."""
    shard_backend: Literal["in-process", "processes", "ray"] = "ray"
    """Where shards live: `ray`; `processes` of this machine, without Ray; `in-process`, to step through them."""
    shard_deadline_s: Positive = 60.0
    """Seconds without an answer after which a shard counts as hung; the run then ends, as its rows are lost."""

    def __post_init__(self) -> None:
        check_settings(self, "replay.")
        if self.dataset and (self.index != "uniform" or self.shards):
            raise ConfigError(
                f"replay.dataset={self.dataset!r} with replay.index={self.index!r}, replay.shards={self.shards}; a "
                "fixed share of a minibatch is drawn uniformly, by the learner: use index='uniform' and shards=0"
            )
        others = {name: getattr(self, name) for name in ("deduplicate_frames", "dir", "hindsight", "shards")}
        if self.device == "learner" and (clash := ", ".join(f"{name}={x!r}" for name, x in others.items() if x)):
            raise ConfigError(
                f"replay.device='learner' with replay.{clash}; the device keeps whole rows in its own memory: use "
                "device='cpu', or leave the other out"
            )


def make_view(
    settings: ReplaySettings,
    spec: EnvSpec,
    n_step: int = 1,
    discount: float = 0.99,
    clip_reward: bool = False,
    fed: frozenset[str] = ALL_INPUTS,
    acted_next: bool = False,
    next_action: bool = False,
) -> Transitions | HindsightTransitions:
    """`Transitions`, or `HindsightTransitions` if the settings ask for them. Arguments as there.

    Raises:
        ConfigError: hindsight without goals in the observation.
    """
    plain = Transitions(n_step, discount, clip_reward, fed, acted_next, next_action)
    if not settings.hindsight:
        return plain
    return HindsightTransitions(plain, spec, find_reward_fn(settings.reward_fn), settings.hindsight)


def check_rate(
    settings: ReplaySettings, batch_size: int, replay_ratio: float, learning_starts: int, sample_rows: int
) -> None:
    """Raises ConfigError for numbers out of range, and for more than a replay can hold."""
    capacity = settings.capacity
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
            f"replay.capacity={capacity} holds less than batch_size={batch_size} samples of {sample_rows} rows, or "
            f"than learning_starts={learning_starts}; use replay.capacity >= "
            f"{max(batch_size * sample_rows, learning_starts)}"
        )


def rate_in_words(
    batch_size: int, replay_ratio: float, learning_starts: int, sample_rows: int, kind: str, unit: str
) -> str:
    """The rate of training in gradient steps, `one update of 32 every 4 steps`.

    Args:
        kind: name of samples of several rows. unit: name of a row that is collected.
    """
    exact = Fraction(repr(replay_ratio)) / (batch_size * sample_rows)
    of = f"{batch_size:,}" + (f" {kind} of {sample_rows:,} rows" if sample_rows > 1 else "")
    if exact.denominator > 100_000:  # a ratio such as 1 / 3
        rate = f"one update of {of} every {1 / float(exact):,.6g} {unit}s"
    else:
        rate = f"{exact.numerator:,} updates" if exact.numerator > 1 else "one update"
        rate += f" of {of} every " + (unit if exact.denominator == 1 else f"{exact.denominator:,} {unit}s")
    after = f" after the first {learning_starts:,}" if learning_starts else ""
    return f"{rate}{after} (replay ratio {replay_ratio:g})"
