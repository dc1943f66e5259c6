"""Evaluation: the request to a sampler to play whole episodes, and the method by which users make it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.limits import require_whole
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall
from penstock.samplers.episodes import Episodes
from penstock.samplers.trackers.envs import Envs

EVAL_SLOTS, EVAL_MAX_STEPS = 16, 27_000
"""Defaults of an evaluation. 27,000 steps are the 108,000 frames after which Atari's protocol ends an episode."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation; fields as in `Evaluates.evaluate_agent`."""

    itr: int
    episodes: int
    deterministic: bool = True
    give_up: Callable[[], bool] | None = None
    slots: int = EVAL_SLOTS
    max_steps: int = EVAL_MAX_STEPS

    def __post_init__(self) -> None:
        require_whole(1, episodes=self.episodes, slots=self.slots, max_steps=self.max_steps)

    def by(self, sampler: Any) -> Episodes:
        """Has a `Sampler` play it, which may be a user's own."""
        how = self.deterministic, self.give_up, self.slots, self.max_steps
        return sampler.evaluate_agent(self.itr, self.episodes, *how)

    @property
    def given_up(self) -> bool:
        """Asks whether it is to end before its last episode."""
        return self.give_up is not None and self.give_up()


class Evaluates:
    """A live sampler that plays an `Evaluation`: it writes `evaluate`."""

    @property
    def evaluation_calls(self) -> Sequence[CallRecord]:
        """The calls that every evaluation environment has had."""
        return ()

    def evaluate_agent(
        self,
        itr: int,
        episodes: int = 20,
        deterministic: bool = True,
        give_up: Callable[[], bool] | None = None,
        slots: int = EVAL_SLOTS,
        max_steps: int = EVAL_MAX_STEPS,
    ) -> Episodes:
        """Exactly `episodes` finished episodes in environments of their own: the first k of each slot.

        Counting whichever end first would favour short episodes. Training environments, noise and state are not
        touched, and every evaluation has episodes of its own.

        Args:
            itr: addresses the episodes' seeds and the noise, so that a resumed run evaluates on the same ones.
            give_up: asked every 64 steps; once it is True, the episodes that have ended are all there are.
            slots: environments side by side, at most. Native batched environments have as many as in training.
            max_steps: an episode is cut there, neither terminated nor longer, and counts with its return so far.
        """
        return self.evaluate(Evaluation(itr, episodes, deterministic, give_up, slots, max_steps))

    def evaluate(self, asked: Evaluation) -> Episodes:
        """Plays it."""
        raise NotImplementedError

    @property
    def envs(self) -> Envs:
        """The environments, to call their methods and read or set their attributes between two batches."""
        return Envs(self)

    @property
    def calls_of_envs(self) -> Sequence[Sequence[CallRecord]]:
        """By slot the calls that its training environment has had."""
        return ()

    def call_envs(self, call: EnvCall, slots: Sequence[int], evaluation: bool = False) -> dict[int, Answer]:
        """Executes a call in environments, after every batch that was ordered; returns the answers by slot.

        Args:
            slots: of training environments. evaluation: in all evaluation environments instead, later ones too.
        """
        raise ConfigError(
            f"{type(self).__name__} has no environments that can be reached; expected a sampler of environments in a "
            "run with run.learners=1"
        )
