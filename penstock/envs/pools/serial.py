"""SerialPool: gymnasium environments stepped one after the other in this process, straight into a batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch, carry_over
from penstock.core.errors import EnvContractError, EnvWorkerError
from penstock.core.noise import EpisodeSeeds
from penstock.core.spec import LeafSpec
from penstock.core.tree import (
    Tree,
    is_leaf,
    tree_assign,
    tree_kept,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)
from penstock.envs.closing import try_close, warn_of_closing
from penstock.envs.contract import Values, describe_reset_violation, refused_values, value_limits
from penstock.envs.make import EnvConfig, factory_slot
from penstock.envs.pools.messages import LARGEST_REWARD, check_values, fail, one_spec, refuse_obs, refuse_step, slot_at
from penstock.envs.pools.pool import LEDGER_WORDS, EnvPool, Group, OpenEpisode, PoolState, row_views, small_rows
from penstock.envs.pools.restoring import restore, snapshot, start, write_tree
from penstock.envs.pools.settings import CHECK_EVERY, DEFAULTS, FLAGS, NUMBERS, PoolSettings
from penstock.envs.spaces import action_dtypes, env_spec

_Array = np.ndarray
MAKING, RESETTING, STEPPING, CLOSING = 1, 2, 3, 4
"""Values of `mark[1]`, the activity of the slot in `mark[0]`; 0: no environment is at work."""


class SerialPool(EnvPool):
    """An `EnvPool` of one group whose `send` steps the environments at once.

    Args:
        config: makes each slot's environment. seed: of the run; every episode gets `env_seed(seed, slot, episode)`.
        slots: numbers of the slots among those of all samplers of the run; they address seeds and noise.
    """

    def __init__(self, config: EnvConfig, seed: int, slots: slice, settings: PoolSettings = DEFAULTS) -> None:
        B = slots.stop - slots.start
        self.mark = [0] * 6 if settings.mark is None else settings.mark
        self.ledger = np.zeros((B, LEDGER_WORDS), np.int64) if settings.ledger is None else settings.ledger
        self.groups = (Group(0, slice(0, B)),)
        self._config, self._slots, self._settings, self.evaluation = config, slots, settings, settings.evaluation
        self._batch_end, self._decorrelate = settings.reset == "batch_end", settings.max_decorrelation_steps
        self.envs, self.tick = list[Any](), 0
        try:
            for b in range(B):
                self._note(b, MAKING)
                self.envs.append(self._made(b))
            self.spec = one_spec([env_spec(env) for env in self.envs], config.name)
        except BaseException:
            self.close()
            raise
        self.mark[1] = 0
        self.specs = (self.spec,)
        self._steps = [env.step for env in self.envs]
        self._write = obs_writer(self.spec.obs)
        self.to_env = action_reader(self.spec.action, action_dtypes(self.envs[0].action_space))
        self.refused: Values = refused_values(config.checks)
        self.row_is_sound = row_checker(self.spec.obs, self.refused)
        self.info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        self._out: SampleBatch | None = None
        self._row_views: list[tuple[Any, ...]] = []
        self._memory: list[Any] = []  # of the observations of each of these rows, where they are small
        self._small: tuple[Any, Any] = None, None  # shape and dtype of these
        self._carried: list[tuple[Any, Any]] = []  # rows 0 and T of the same leaf
        self._columns: list[Any] = []
        self._ahead: dict[int, Any] = {}
        self.restart(seed, settings.episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        B, self.seed = len(self.envs), seed
        self.episode = [-1] * B  # the number of each slot's current episode; -1 before its first
        self.began = [0] * B  # the tick of its reset, for messages
        self.left = [math.inf if episodes is None else episodes[b] for b in range(B)]
        self.ended = [True] * B  # the slot resets in the next row it takes part in
        self.idle = [left <= 0 for left in self.left]
        self.tick = 0
        self._seeds = [EpisodeSeeds(seed, self._slots.start + b, self.evaluation) for b in range(B)]
        self._ahead.clear()
        self.ledger[:, 0], self.ledger[:, 1] = -1, [-1 if left == math.inf else left for left in self.left]
        self._unstarted = True
        self._warmup: list[tuple[list[Tree], list[float]]] = [([], [])] * B

    def take_over(self, previous: Sequence[SampleBatch] | None) -> None:
        """Takes the place of a pool whose worker died, from the ledger and the batch before (None: there is none).

        Every slot resets into its next episode in the row that comes next.
        """
        self.episode, left = self.ledger[:, 0].tolist(), self.ledger[:, 1].tolist()
        self.left = [math.inf if n < 0 else n for n in left]
        self.idle = [n == 0 for n in left]
        self._unstarted, self._out, self._row_views = previous is None, previous[0] if previous else None, []

    def prepare(self) -> None:
        """With `batch_end`: resets ended slots before the next batch is asked for, while others compute."""
        if self._batch_end:
            for b in range(len(self.envs)):
                if self.ended[b] and self.left[b] > 0 and b not in self._ahead:
                    self._ahead[b] = tree_kept(self.reset_env(b))

    @property
    def first_slot(self) -> int:
        """Number of the first slot among those of all samplers of the run."""
        return self._slots.start

    def for_evaluation(self, B: int, first_slot: int = 0) -> SerialPool:
        slots = slice(first_slot, first_slot + B)
        return SerialPool(self._config, self.seed, slots, self._settings.for_evaluation(B, self.mark))

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        (out,) = outs
        previous, self._out = self._out, out
        if previous is not out or not self._row_views:
            self._row_views = [row_views(out, t) for t in range(len(out.valid))]
            self._memory, self._small = small_rows(out)
            self._carried = [(x[0], x[-1]) for name in ROWS_AND_NEXT for x in tree_leaves(getattr(out, name))]
            self._columns = tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []
        if self._unstarted:
            self._unstarted = False
            self._warmup = start(self, out, self.seed, self._slots.start, self._decorrelate)
        elif previous is out:
            for row_0, row_T in self._carried:
                row_0[...] = row_T
        else:
            assert previous is not None
            carry_over(previous, out)
        out.first[1:] = False  # only now, since row T of `previous` may be a row of `out`
        out.terminated[...], out.truncated[...], out.valid[...] = False, False, True
        for column in self._columns:
            column.fill(np.nan)
        if self._batch_end:
            self.idle = [left <= 0 for left in self.left]

    def send(self, group: int, row: int) -> None:
        obs_row, action_row, reward_row, terminated_row, truncated_row, valid_row, info_rows = self._row_views[row]
        B = len(self._steps)
        rewards: list[Any] = [0.0] * B
        (shape, dtype), memory = self._small, self._memory[row]
        copies = [] if memory is None else [b""] * B
        ends: list[tuple[int, Any, Any]] | None = None
        invalid: list[int] | None = None
        actions = self.to_env(action_row)
        write, mark = self._write, self.mark
        self.tick += 1
        mark[1], mark[3], mark[4], mark[5] = STEPPING, self._slots.start, self.tick, self.evaluation
        b, result = 0, None
        try:
            for b, step, action, ended in zip(range(B), self._steps, actions, self.ended):
                if ended:
                    invalid = [b] if invalid is None else [*invalid, b]
                    self._reset_or_idle(b, row, obs_row)
                    if copies:
                        copies[b] = obs_row[b].tobytes()
                    continue
                mark[0] = b
                result = step(action)
                obs, reward, terminated, truncated, info = result
                if copies and obs.__class__ is _Array and obs.shape == shape and obs.dtype is dtype:
                    copies[b] = obs.tobytes()  # now, since the environment may write over it; a third of `write`'s time
                else:
                    if not write(obs_row, b, obs):
                        self._violation(b, result, action, obs_row)
                    if copies:
                        copies[b] = obs_row[b].tobytes()
                if reward.__class__ is not float and reward.__class__ not in NUMBERS:
                    refuse_step(self.where(b, "step"), result, action)
                    reward = float(reward)
                rewards[b] = reward
                if terminated is not False or truncated is not False:
                    if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
                        refuse_step(self.where(b, "step"), result, action)
                    if terminated or truncated:
                        ends = [(b, terminated, truncated)] if ends is None else [*ends, (b, terminated, truncated)]
                if info:
                    for key, column in info_rows.items():
                        if key in info:
                            try:
                                column[b] = info[key]
                            except (TypeError, ValueError):  # an array of one element stands for its number
                                column[b] = np.asarray(info[key]).item()
                elif info is None:
                    refuse_step(self.where(b, "step"), result, action)
        except (Exception, SystemExit) as error:
            spec = self.spec.action if is_leaf(self.spec.action) else None
            fail(self.where(b, "step"), error, actions[b], result, self.info_keys, spec)
        mark[1] = 0
        if memory is not None:
            memory[:] = b"".join(copies)
        reward_row[:] = rewards
        for b in invalid or ():
            valid_row[b] = False
        for b, terminated, truncated in ends or ():
            terminated_row[b], truncated_row[b] = terminated, truncated
            self.finish(b)
        everyone = self.tick % CHECK_EVERY == 0 or self._config.checks == "always"
        unsound = (everyone or 0 in self.episode) and not self.row_is_sound(obs_row)
        if unsound or not math.hypot(*rewards) < LARGEST_REWARD:
            check_values(self, obs_row, rewards, actions, everyone)

    def recv(self) -> int:
        return 0

    def metrics(self) -> dict[str, float]:
        """Nothing: there are no workers whose faults could be counted."""
        return {}

    def close(self) -> None:
        envs, self.envs = self.envs, []
        said: list[str] = []
        for b, env in enumerate(envs):
            self._note(b, CLOSING)
            said += try_close(env, self._slot(b))
        self.mark[1] = 0
        warn_of_closing(said)

    def get_state(self) -> PoolState:
        return snapshot(self)

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        (row,) = outs
        self._unstarted, self._out = False, row
        self._row_views = []
        self._ahead.clear()
        lost = restore(self, state, row, journal)
        self.ledger[:, 0], self.ledger[:, 1] = self.episode, [-1 if n == math.inf else n for n in self.left]
        return lost

    @property
    def reset_ahead(self) -> frozenset[int]:
        """Slots whose next episode has been reset early; nothing shows it yet."""
        return frozenset(self._ahead)

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        """For each slot the random actions of its current episode from before the first batch, and their rewards.

        They count towards that episode's return.
        """
        return self._warmup

    def open_row_0(self, out: SampleBatch, b: int) -> None:
        """Row 0 of slot b is a reset, with nothing before it."""
        self.write_checked(tree_map(lambda x: x[0], out.obs), b, self.reset_env(b), "reset")
        self.ended[b], out.first[0, b], out.prev_reward[0, b] = False, True, 0.0
        tree_assign(out.prev_action, (0, b), self.spec.null_action)

    def finish(self, b: int) -> None:
        """The slot's episode is over."""
        self.ended[b] = True
        self.left[b] -= 1
        if self.left[b] != math.inf:
            self.ledger[b, 1] = self.left[b]
        if self.left[b] <= 0 or self._batch_end:
            self.idle[b] = True

    def _reset_or_idle(self, b: int, row: int, obs_row: Tree) -> None:
        out = self._out
        assert out is not None
        if self.idle[b]:
            tree_assign(out.obs, (row + 1, b), out.obs, (row, b))
            return
        obs = self._ahead.pop(b) if b in self._ahead else self.reset_env(b)
        if not self._write(obs_row, b, obs):
            self.write_unusual(obs_row, b, obs, "reset")
        self.ended[b] = False
        out.first[row + 1, b] = True

    def reset_env(self, b: int, again: bool = False) -> Any:
        """The first observation of the slot's next episode, or of the same one `again`."""
        self.episode[b] += 0 if again else 1
        self.began[b] = self.tick
        self.ledger[b, 0], self.ledger[b, 2] = self.episode[b], self.tick
        before = self._note(b, RESETTING)
        try:
            result = self.envs[b].reset(seed=self._env_seed(b))
        except (Exception, SystemExit) as error:
            fail(self.where(b, "reset"), error, None)
        self.mark[1] = before
        sound = result.__class__ is tuple and len(result) == 2 and result[1].__class__ is dict
        if not sound and (message := describe_reset_violation(result)):
            raise EnvContractError(f"{self.where(b, 'reset')}: {message}")
        return result[0]

    def _made(self, b: int) -> Any:
        """A new environment for slot b; an error names the slot."""
        try:
            return self._config.make_one(factory_slot(self._slots.start + b, self.evaluation))
        except EnvWorkerError as error:
            raise type(error)(f"{self._slot(b)} in its construction: {error}") from (error.__cause__ or error)

    def _slot(self, b: int) -> str:
        return f"{'evaluation slot' if self.evaluation else 'slot'} {self._slots.start + b} of {self._config.name}"

    def _note(self, b: int, doing: int) -> int:
        """Writes the activity of slot b into `mark`; returns the one before."""
        mark, before = self.mark, self.mark[1]
        mark[0], mark[1], mark[2], mark[3] = b, doing, mark[2] + 1, self._slots.start
        mark[4], mark[5] = self.tick, self.evaluation
        return before

    def step_checked(self, b: int, action: Any) -> tuple[Any, Any, Any, Any]:
        """One step outside a batch: (obs, reward, terminated, truncated)."""
        self.began[b] -= 1
        self.ledger[b, 2] -= 1
        before = self._note(b, STEPPING)
        try:
            result = self._steps[b](action)
        except (Exception, SystemExit) as error:
            fail(self.where(b, "step"), error, action)
        self.mark[1] = before
        refuse_step(self.where(b, "step"), result, action)
        return result[:4]

    def write_checked(self, obs_row: Tree, b: int, obs: Any, phase: str, action: Any = None) -> None:
        """Writes an observation from outside a batch, and looks at its values if the settings say so."""
        if not self._write(obs_row, b, obs):
            self.write_unusual(obs_row, b, obs, phase, action)
        elif self.refused != "any":
            refuse_obs(self.where(b, phase), obs, self.spec.obs, action, self.refused)

    def write_unusual(self, obs_row: Tree, b: int, obs: Any, phase: str, action: Any = None) -> None:
        """Raises if the observation broke the contract; writes it if it is only of an unusual but sound type."""
        refuse_obs(self.where(b, phase), obs, self.spec.obs, action, self.refused)
        write_tree(obs_row, b, obs)

    def _violation(self, b: int, result: Any, action: Any, obs_row: Tree) -> None:
        """Raises if the step broke the contract; else writes the unusual observation."""
        refuse_step(self.where(b, "step"), result, action)
        self.write_unusual(obs_row, b, result[0], "step", action)

    def _env_seed(self, b: int) -> int:
        return self._seeds[b][max(self.episode[b], 0)]

    def where(self, b: int, phase: str) -> str:
        """Start of every message: slot, environment, method, episode, step and seed."""
        step = self.tick - self.began[b] - (phase == "step")  # counted from 0
        return slot_at(
            self._config.name, self.evaluation, self._slots.start + b, phase, self.episode[b], step, self._env_seed(b)
        )


def obs_writer(spec: Tree) -> Callable[[Tree, int, Any], bool]:
    """A function that writes one slot's observation into a row [B, *O], or returns False if its form is wrong."""
    if isinstance(spec, dict):
        keys = spec.keys()
        by_key = [(key, obs_writer(below)) for key, below in spec.items()]

        def write_dict(row: Any, b: int, obs: Any) -> bool:
            return isinstance(obs, dict) and obs.keys() == keys and all(w(row[key], b, obs[key]) for key, w in by_key)

        return write_dict
    if isinstance(spec, tuple):
        writers = [obs_writer(below) for below in spec]

        def write_tuple(row: Any, b: int, obs: Any) -> bool:
            if not isinstance(obs, tuple) or len(obs) != len(writers):
                return False
            return all(write(below, b, part) for write, below, part in zip(writers, row, obs))

        return write_tuple
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":

        def write_scalar(row: Any, b: int, obs: Any) -> bool:
            if not isinstance(obs, (int, np.integer)):
                return False
            row[b] = obs
            return True

        return write_scalar
    shape, dtype = leaf.shape, np.dtype(leaf.dtype)

    def write(row: Any, b: int, obs: Any) -> bool:
        if obs.__class__ is not np.ndarray or obs.shape != shape or (obs.dtype is not dtype and obs.dtype != dtype):
            return False
        row[b] = obs
        return True

    return write


def action_reader(spec: Tree, dtypes: Sequence[np.dtype[Any]] = ()) -> Callable[[Tree], Sequence[Any]]:
    """A function from a row of actions [B, *A] to one for each environment, `dtypes` being those of its leaves."""
    if not is_leaf(spec):
        structure = tree_structure(spec)
        readers = [action_reader(leaf, dtypes[i : i + 1]) for i, leaf in enumerate(tree_leaves(spec))]
        return lambda row: [
            tree_unflatten(structure, list(parts)) for parts in zip(*(r(x) for r, x in zip(readers, tree_leaves(row))))
        ]
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":
        if dtypes and dtypes[0] != leaf.dtype:
            return lambda row: list(row.astype(dtypes[0]))
        return list  # numpy integers, as `action_space.sample()` returns; Gymnasium checks Python ints more slowly
    if leaf.kind != "box":
        return lambda row: list(row.copy())
    _, low, high = value_limits(leaf)

    def clipped(row: Any) -> Any:
        return row.copy() if low is None and high is None else row.clip(low, high)

    if not leaf.shape:
        return lambda row: [np.asarray(x) for x in clipped(row)]
    return lambda row: list(clipped(row))


def row_checker(spec: Tree, values: Values = "bounds") -> Callable[[Tree], bool]:
    """A function that is True if no value of a row [B, *O] is one of those refused.

    It looks at all slots at once; `describe_violation` then names the slot and the fault.
    """
    checks = [_leaf_checker(leaf, values) for leaf in tree_leaves(spec)]
    if len(checks) == 1:
        return lambda row: checks[0](row if isinstance(row, np.ndarray) else tree_leaves(row)[0])
    return lambda row: all(check(x) for check, x in zip(checks, tree_leaves(row)))


def _leaf_checker(leaf: LeafSpec, values: Values) -> Callable[[Any], bool]:
    dtype, low, high = value_limits(leaf)
    if values != "bounds":
        low = high = None
    if dtype.kind == "f" and values != "any":  # NaN fails every comparison
        largest = np.finfo(dtype).max
        low = -largest if low is None else np.maximum(low, -largest)
        high = largest if high is None else np.minimum(high, largest)
    if low is None:
        return (lambda row: True) if high is None else (lambda row: bool((row <= high).all()))
    if high is None:
        return lambda row: bool((row >= low).all())
    return lambda row: bool(((row >= low) & (row <= high)).all())
