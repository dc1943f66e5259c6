"""SlotEnvs: the environments of a pool's slots, with the episode, seed, activity and episode table of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.errors import EnvWorkerError
from penstock.core.noise import EpisodeSeeds
from penstock.core.spec import EnvSpec
from penstock.core.tree import tree_kept
from penstock.envs.contract import Values, refused_values
from penstock.envs.make import EnvConfig, factory_slot
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall, execute, recorded
from penstock.envs.pools.messages import fail, one_spec, slot_at, slot_name
from penstock.envs.pools.pool import TABLE_WORDS, PoolState
from penstock.envs.pools.settings import CALLING, CLOSING, MAKING, RESETTING, STEPPING, PoolSettings
from penstock.envs.shutdown import try_close, warn_of_closing
from penstock.envs.spaces import env_spec


def offers_state(env: Any) -> bool:
    """True if the outermost wrapper itself saves and restores its state; one below it would lack the wrapper's own."""
    return all(callable(getattr(type(env), name, None)) for name in ("get_state", "set_state"))


class SlotEnvs:
    """E environments: made, seeded, reset, stepped and closed; every message names slot and episode.

    Args:
        slots: numbers of the slots among those of all samplers of the run; they address seeds.
    """

    specs: tuple[EnvSpec, ...]
    """One for each policy."""

    def __init__(self, config: EnvConfig, slots: slice, settings: PoolSettings) -> None:
        E = slots.stop - slots.start
        self.config, self.slots, self.settings, self.evaluation = config, slots, settings, settings.evaluation
        self.activity = [0] * 6 if settings.activity is None else settings.activity
        table = settings.episode_table
        self.episode_table = np.zeros((E, TABLE_WORDS), np.int64) if table is None else table
        self.refused: Values = refused_values(config.checks)
        self.info_keys = config.all_info_keys
        self.envs, self.tick, self.seed = list[Any](), 0, 0
        self.calls = [list[CallRecord]() for _ in range(E)]
        """The calls that each environment has had."""
        self._late = [list[CallRecord]() for _ in range(E)]
        """Calls made within an open episode, which the replay of that episode still has to repeat."""
        self.step_of: Callable[[int], int] | None = None
        """Moves that were made in an environment's episode, where `tick` does not count them."""
        try:
            for e in range(E):
                self.note(e, MAKING)
                self.envs.append(self._made(e))
            self.examine()
        except BaseException:
            self.close()
            raise
        self.activity[1] = 0
        self.steps = [env.step for env in self.envs]

    def make(self, slot: int) -> Any:
        """A new environment; `slot` is what its factory is told."""
        return self.config.make_one(slot)

    def examine(self) -> None:
        """Reads the specs of the environments that were made. Raises ConfigError if they differ."""
        self.specs = (one_spec([env_spec(env) for env in self.envs], self.config.name),)

    def restart(self, seed: int, episodes: Sequence[int] | None) -> None:
        """Forgets every episode."""
        E, self.seed, self.tick = len(self.envs), seed, 0
        self.episode = [-1] * E
        """Number of the current episode; -1 before the first."""
        self.began = [0] * E
        """`tick` of its reset, for messages."""
        self.left = [math.inf if episodes is None else episodes[e] for e in range(E)]
        self.over = [True] * E
        """The environment resets in the next row that it takes part in."""
        self.idle = [left <= 0 for left in self.left]
        """Environments that take no part for now."""
        self.ahead: dict[int, Any] = {}
        """Results of resets that `prepare` made; nothing shows them yet."""
        self.limit = int(self.episode_table[0, 3])
        """Steps after which pools of many agents cut an episode; 0: none is."""
        self._seeds = [EpisodeSeeds(seed, self.slots.start + e, self.evaluation) for e in range(E)]
        self._record()

    def get_state(self, snapshot: list[Any]) -> PoolState:
        """The state between two batches. snapshot: of each environment, or None."""
        return PoolState(
            episode=[n - (e in self.ahead) for e, n in enumerate(self.episode)],
            ended=list(self.over),
            idle=list(self.idle),
            left=[None if left == math.inf else int(left) for left in self.left],
            began=list(self.began),
            snapshot=snapshot,
            tick=self.tick,
            calls=[list(mine) for mine in self.calls] if any(self.calls) else [],
        )

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        """Executes a call in these environments. Resets that are due with `batch_end` come first."""
        if max(self.episode) >= 0:
            self.prepare()
        answers: list[Answer] = []
        for e in slots:
            before = self.note(e, CALLING)
            answer = execute(self.envs[e], call)
            self.activity[1] = before
            episode = self.episode[e]
            place = (episode, 0) if e in self.ahead else (episode + 1, -1) if self.over[e] else (episode, self.taken(e))
            answers.append(answer._replace(episode=place[0], step=place[1]))
        if not self.evaluation:
            recorded(self.calls, call, slots, answers)
        return answers

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        """Repeats the calls of each environment, which has had none yet."""
        self._begin_recall(calls, [0] * len(calls))
        self._end_recall()

    def begin_restore(self, state: PoolState) -> None:
        """Resumes from the state of a pool, and repeats the calls made before open episodes.

        Those made within one are left to its replay, by `repeat`; `end_restore` repeats the rest.
        """
        calls = state.calls or [[] for _ in self.envs]
        self._begin_recall(calls, [n + ended for n, ended in zip(state.episode, state.ended)])
        self.set_state(state)

    def end_restore(self, state: PoolState, lost: Sequence[int]) -> None:
        """Resumes from the state of a pool; `lost` environments reset next."""
        self.set_state(state, lost)
        self._end_recall()

    def repeat(self, e: int, step: float = math.inf) -> None:
        """Repeats the calls that were made after at most this many steps of the episode that is replayed."""
        while self._late[e] and self._late[e][0].step <= step:
            self._repeat(e, self._late[e].pop(0))

    def _begin_recall(self, calls: Sequence[Sequence[CallRecord]], episodes: Sequence[int]) -> None:
        for e, (mine, episode) in enumerate(zip(calls, episodes)):
            if self.calls[e]:  # of what another state goes on from
                said = try_close(self.envs[e], self._slot(e))
                self.envs[e] = self._made(e)
                self.steps[e] = self.envs[e].step
                warn_of_closing(said)
            self.calls[e], self._late[e] = list(mine), [x for x in mine if not x.precedes(episode)]
            for record in mine:
                if record.precedes(episode):
                    self._repeat(e, record)

    def _end_recall(self) -> None:
        for e, late in enumerate(self._late):
            if late and late[0].episode > self.episode[e] >= 0:  # its reset was made ahead
                self.prepare()
            self.repeat(e)

    def _repeat(self, e: int, record: CallRecord) -> None:
        before = self.note(e, CALLING)
        answer = execute(self.envs[e], record.call)
        self.activity[1] = before
        if record.raised != (answer.status == "raised") or answer.status == "missing":
            seen = f"raised {answer.value}" if answer.status == "raised" else f"is {answer.status}"
            raise EnvWorkerError(
                f"{self._slot(e)}: {record.kind} {record.name!r}, which it has had before and which a new environment "
                f"repeats, {seen}; it {'raised' if record.raised else 'went well'} the first time: make it depend on "
                "nothing but the environment and its arguments"
            )

    def set_state(self, state: PoolState, lost: Sequence[int] = ()) -> None:
        """Resumes from the state of a pool; `lost` environments reset next."""
        self.episode, self.began, self.idle = list(state.episode), list(state.began), list(state.idle)
        self.over = [ended or e in lost for e, ended in enumerate(state.ended)]
        self.left = [math.inf if left is None else left for left in state.left]
        self.tick = state.tick
        self.ahead.clear()
        self._record()

    def resume(self) -> None:
        """Resumes from the episode table after a worker died: every environment resets into its next episode."""
        self.episode, left = self.episode_table[:, 0].tolist(), self.episode_table[:, 1].tolist()
        self.left = [math.inf if n < 0 else n for n in left]
        self.over = [True] * len(self.envs)
        self.idle = [n <= 0 for n in self.left]
        self.limit = int(self.episode_table[0, 3])

    def _record(self) -> None:
        left = [-1 if n == math.inf else n for n in self.left]
        self.episode_table[:, 0], self.episode_table[:, 1], self.episode_table[:, 2] = self.episode, left, self.began

    def prepare(self) -> None:
        """With `batch_end`: resets ended environments before the next batch is asked for, while others compute."""
        for e, over in enumerate(self.over) if self.settings.reset == "batch_end" else ():
            if over and self.left[e] > 0 and e not in self.ahead:
                result = self.reset(e)
                self.ahead[e] = (tree_kept(result[0]), *result[1:]) if isinstance(result, tuple) and result else result
                self.over[e] = True

    def begin_batch(self) -> None:
        """With `batch_end`: environments that ended in the batch before take part again."""
        if self.settings.reset == "batch_end":
            self.idle = [left <= 0 for left in self.left]

    def reset(self, e: int, again: bool = False) -> Any:
        """Result of the reset into the environment's next episode, maybe made before, or into the same one `again`."""
        prepared = e in self.ahead
        self.episode[e] += 0 if again or prepared else 1
        self.began[e] = self.tick
        self.episode_table[e, 0], self.episode_table[e, 2] = self.episode[e], self.tick
        if prepared:
            self.over[e] = False
            return self.ahead.pop(e)
        before = self.note(e, RESETTING)
        seed = self._seeds[e][self.episode[e]]
        try:
            result = self.envs[e].reset(seed=seed)
        except (Exception, SystemExit) as error:
            fail(self.where(e, "reset"), error, None)
        self.activity[1] = before
        self.opened(e, seed)
        self.over[e] = False
        return result

    def opened(self, e: int, seed: int) -> None:
        """Called after each reset with the seed of its episode."""

    def step(self, e: int, action: Any) -> Any:
        """One step outside a batch."""
        self.began[e] -= 1
        self.episode_table[e, 2] -= 1
        before = self.note(e, STEPPING)
        try:
            result = self.envs[e].step(action)
        except (Exception, SystemExit) as error:
            fail(self.where(e, "step"), error, action)
        self.activity[1] = before
        return result

    def finish(self, e: int) -> None:
        """The environment's episode is over."""
        self.over[e] = True
        self.left[e] -= 1
        if self.left[e] != math.inf:
            self.episode_table[e, 1] = self.left[e]
        self.idle[e] = self.left[e] <= 0 or self.settings.reset == "batch_end"

    def note(self, e: int, doing: int) -> int:
        """Writes the activity of environment e into `activity`; returns the one before."""
        activity, before = self.activity, self.activity[1]
        activity[0], activity[1], activity[2], activity[3] = e, doing, activity[2] + 1, self.slots.start
        activity[4], activity[5] = self.tick, self.evaluation
        return before

    def where(self, e: int, phase: str, agent: str | None = None) -> str:
        """Start of every message: slot, environment, method, episode, step, seed and agent."""
        taken = self.taken(e)
        if phase == "reset" or not taken:  # observations before the first step come from the reset
            phase, taken = "reset", 1
        step = taken - 1  # counted from 0
        episode = self.episode[e]
        slot = self.slots.start + e
        text = slot_at(self.config.name, self.evaluation, slot, phase, episode, step, self._seeds[e][max(episode, 0)])
        return text if agent is None else f"{text}, agent {agent!r}"

    def taken(self, e: int) -> int:
        """Steps taken in the environment's episode."""
        return self.tick - self.began[e] if self.step_of is None else self.step_of(e)

    def close(self) -> None:
        """Ends the environments. A second call does nothing."""
        envs, self.envs = self.envs, []
        said: list[str] = []
        for e, env in enumerate(envs):
            self.note(e, CLOSING)
            said += try_close(env, self._slot(e))
        self.activity[1] = 0
        warn_of_closing(said)

    def _made(self, e: int) -> Any:
        try:
            return self.make(factory_slot(self.slots.start + e, self.evaluation))
        except EnvWorkerError as error:
            raise type(error)(f"{self._slot(e)} in its construction: {error}") from (error.__cause__ or error)

    def _slot(self, e: int) -> str:
        return slot_name(self.config.name, self.evaluation, self.slots.start + e)
