"""SerialPool: gymnasium environments stepped one after the other in this process, straight into a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch, carry_over
from penstock.core.errors import EnvContractError
from penstock.core.tree import Tree, is_leaf, tree_assign, tree_leaves, tree_map
from penstock.envs.contract import LARGEST_REWARD, describe_reset_violation
from penstock.envs.make import EnvConfig
from penstock.envs.pools.calls import Answer, CallRecord, EnvCall
from penstock.envs.pools.messages import fail, refuse_obs, refuse_reward, refuse_step
from penstock.envs.pools.pool import EnvPool, Group, Ints, OpenEpisode, PoolState, row_views, small_rows
from penstock.envs.pools.settings import CHECK_EVERY, DEFAULTS, FLAGS, NUMBERS, STEPPING, PoolSettings
from penstock.envs.pools.slot_envs import SlotEnvs, offers_state
from penstock.envs.pools.slot_start import restore, start
from penstock.envs.pools.values import action_reader, obs_writer, row_checker, write_tree
from penstock.envs.spaces import action_dtypes

_Array = np.ndarray


class SerialPool(EnvPool):
    """An `EnvPool` of one group whose `send` steps the environments at once.

    Args:
        config: makes each slot's environment. seed: of the run; every episode gets `env_seed(seed, slot, episode)`.
        slots: numbers of the slots among those of all samplers of the run; they address seeds and noise.
    """

    def __init__(self, config: EnvConfig, seed: int, slots: slice, settings: PoolSettings = DEFAULTS) -> None:
        self.host = host = SlotEnvs(config, slots, settings)
        self.settings, self.evaluation = settings, settings.evaluation
        self.calls = host.calls
        self.specs, self.info_keys = host.specs, host.info_keys
        (self.spec,) = host.specs
        self.groups = (Group(0, slice(0, len(host.envs))),)
        self._write = obs_writer(self.spec.obs)
        self.to_env = action_reader(self.spec.action, action_dtypes(host.envs[0].action_space))
        self._row_is_sound = row_checker(self.spec.obs, host.refused)
        self._out: SampleBatch | None = None
        self._row_views: list[tuple[Any, ...]] = []
        self._memory: list[Any] = []  # of the observations of each of these rows, where they are small
        self._small: tuple[Any, Any] = None, None  # shape and dtype of these
        self._carried: list[tuple[Any, Any]] = []  # rows 0 and T of the same leaf
        self._columns: list[Any] = []
        self.restart(seed, settings.episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        self.host.restart(seed, episodes)
        self._unstarted = True
        self._warmup: list[tuple[list[Tree], list[float]]] = [([], [])] * len(self.host.envs)

    def resume(self, previous: Sequence[SampleBatch] | None) -> None:
        """Takes the place of a pool whose worker died, from the episode table and the batch before, if any.

        Every slot resets into its next episode in the row that comes next.
        """
        self.host.resume()
        self._unstarted, self._out, self._row_views = previous is None, previous[0] if previous else None, []

    def for_evaluation(self, B: int, first_slot: int = 0) -> SerialPool:
        host, slots = self.host, slice(first_slot, first_slot + B)
        return SerialPool(host.config.for_evaluation, host.seed, slots, self.settings.for_evaluation(B, host.activity))

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
            self._warmup = start(self, out, self.settings.max_decorrelation_steps)
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
        self.host.begin_batch()

    def send(self, group: int, row: int) -> None:
        obs_row, action_row, reward_row, terminated_row, truncated_row, valid_row, info_rows = self._row_views[row]
        host = self.host
        B = len(host.steps)
        rewards: list[Any] = [0.0] * B
        (shape, dtype), memory = self._small, self._memory[row]
        copies = [] if memory is None else [b""] * B
        ends: list[tuple[int, Any, Any]] | None = None
        invalid: list[int] | None = None
        actions = self.to_env(action_row)
        write, activity = self._write, host.activity
        host.tick += 1
        activity[1], activity[3], activity[4], activity[5] = STEPPING, host.slots.start, host.tick, self.evaluation
        b, result = 0, None
        try:
            for b, step, action, ended in zip(range(B), host.steps, actions, host.over):
                if ended:
                    invalid = [b] if invalid is None else [*invalid, b]
                    self._reset_or_idle(b, row, obs_row)
                    if copies:
                        copies[b] = obs_row[b].tobytes()
                    continue
                activity[0] = b
                result = step(action)
                obs, reward, terminated, truncated, info = result
                if copies and obs.__class__ is _Array and obs.shape == shape and obs.dtype is dtype:
                    copies[b] = obs.tobytes()  # now, since the environment may write over it; a third of `write`'s time
                else:
                    if not write(obs_row, b, obs):
                        refuse_step(host.where(b, "step"), result, action)
                        self.write_checked(obs_row, b, obs, "step", action)
                    if copies:
                        copies[b] = obs_row[b].tobytes()
                if reward.__class__ is not float and reward.__class__ not in NUMBERS:
                    refuse_step(host.where(b, "step"), result, action)
                    reward = float(reward)
                rewards[b] = reward
                if terminated is not False or truncated is not False:
                    if terminated.__class__ not in FLAGS or truncated.__class__ not in FLAGS:
                        refuse_step(host.where(b, "step"), result, action)
                    if terminated or truncated:
                        ends = [(b, terminated, truncated)] if ends is None else [*ends, (b, terminated, truncated)]
                if info:
                    for key, column in info_rows.items():
                        if key in info:
                            try:
                                column[b] = info[key]
                            except (TypeError, ValueError):  # an array of one element counts as its number
                                column[b] = np.asarray(info[key]).item()
                elif info is None:
                    refuse_step(host.where(b, "step"), result, action)
        except (Exception, SystemExit) as error:
            spec = self.spec.action if is_leaf(self.spec.action) else None
            fail(host.where(b, "step"), error, actions[b], result, self.info_keys, spec)
        activity[1] = 0
        if memory is not None:
            memory[:] = b"".join(copies)
        reward_row[:] = rewards
        for b in invalid or ():
            valid_row[b] = False
        for b, terminated, truncated in ends or ():
            terminated_row[b], truncated_row[b] = terminated, truncated
            host.finish(b)
        everyone = host.tick % CHECK_EVERY == 0 or host.config.checks == "always"
        unsound = (everyone or 0 in host.episode) and not self._row_is_sound(obs_row)
        if unsound or not math.hypot(*rewards) < LARGEST_REWARD:
            self._check_values(obs_row, rewards, actions, everyone)

    def recv(self) -> int:
        return 0

    def metrics(self) -> dict[str, float]:
        """Does nothing: there are no workers whose faults could be counted."""
        return {}

    def close(self) -> None:
        self.host.close()

    def call(self, call: EnvCall, slots: Sequence[int]) -> list[Answer]:
        return self.host.call(call, slots)

    def recall(self, calls: Sequence[Sequence[CallRecord]]) -> None:
        self.host.recall(calls)

    def get_state(self) -> PoolState:
        envs, ahead = self.host.envs, self.host.ahead
        states = [env.get_state() if offers_state(env) and b not in ahead else None for b, env in enumerate(envs)]
        return self.host.get_state(states)

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        self._unstarted, self._out, self._row_views = False, outs[0], []
        return restore(self, state, outs[0], journal)

    def warmup(self) -> list[tuple[list[Tree], list[float]]]:
        """For each slot the random actions of its current episode from before the first batch, and their rewards.

        They count towards that episode's return.
        """
        return self._warmup

    def newest_episodes(self) -> Ints:
        return self.host.episode_table[:, 0].copy()

    def open_row_0(self, out: SampleBatch, b: int) -> None:
        """Row 0 of slot b is a reset, with nothing before it."""
        self.write_checked(tree_map(lambda x: x[0], out.obs), b, self.reset_env(b), "reset")
        out.first[0, b], out.prev_reward[0, b] = True, 0.0
        tree_assign(out.prev_action, (0, b), self.spec.null_action)

    def _reset_or_idle(self, b: int, row: int, obs_row: Tree) -> None:
        out = self._out
        assert out is not None
        if self.host.idle[b]:
            tree_assign(out.obs, (row + 1, b), out.obs, (row, b))
            return
        obs = self._first_obs(b, self.host.reset(b))
        if not self._write(obs_row, b, obs):
            self.write_checked(obs_row, b, obs, "reset")
        out.first[row + 1, b] = True

    def reset_env(self, b: int, again: bool = False) -> Any:
        """The first observation of the slot's next episode, or of the same one `again`."""
        return self._first_obs(b, self.host.reset(b, again))

    def _first_obs(self, b: int, result: Any) -> Any:
        sound = result.__class__ is tuple and len(result) == 2 and result[1].__class__ is dict
        if not sound and (message := describe_reset_violation(result)):
            raise EnvContractError(f"{self.host.where(b, 'reset')}: {message}")
        return result[0]

    def step_checked(self, b: int, action: Any) -> tuple[Any, Any, Any, Any]:
        """One step outside a batch: (obs, reward, terminated, truncated)."""
        result = self.host.step(b, action)
        refuse_step(self.host.where(b, "step"), result, action)
        return result[:4]

    def write_checked(self, obs_row: Tree, b: int, obs: Any, phase: str, action: Any = None) -> None:
        """Raises if the observation breaks the contract; else writes it, maybe of an unusual but sound type."""
        refuse_obs(self.host.where(b, phase), obs, self.spec.obs, action, self.host.refused)
        write_tree(obs_row, b, obs)

    def _check_values(self, obs_row: Tree, rewards: list[Any], actions: Sequence[Any], everyone: bool) -> None:
        """Raises for a reward that is not finite or a refused value in a row, first episodes only unless `everyone`."""
        host = self.host
        if not math.hypot(*rewards) < LARGEST_REWARD:
            for b, reward in enumerate(rewards):
                refuse_reward(host.where(b, "step"), reward, actions[b])
        if self._row_is_sound(obs_row):
            return
        for b, episode in enumerate(host.episode):
            if everyone or episode == 0:
                action = actions[b] if host.tick > host.began[b] else None
                obs = tree_map(lambda x, b=b: x[b], obs_row)
                refuse_obs(host.where(b, "step"), obs, self.spec.obs, action, host.refused)
