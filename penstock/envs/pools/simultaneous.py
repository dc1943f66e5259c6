"""SimultaneousPool: environments whose agents act at once (PettingZoo's Parallel), a batch for each policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import MASK_KEY
from penstock.core.tree import Tree, tree_assign, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.contract import LARGEST_REWARD
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many.base import AgentsPool
from penstock.envs.pools.many.contract import parallel_step_violation
from penstock.envs.pools.many.journal import ParallelJournal, replay_parallel
from penstock.envs.pools.many.lockstep import RowDefaults, RowViews, row_views_of
from penstock.envs.pools.many.parallel import AgentStep, ParallelEnvs
from penstock.envs.pools.many.refusals import check_values, real_rewards, refuse_flags, write_unusual
from penstock.envs.pools.many.rows import row_writer
from penstock.envs.pools.messages import fail
from penstock.envs.pools.pool import OpenEpisode, PoolState
from penstock.envs.pools.settings import CHECK_EVERY, DEFAULTS, FLAGS, NUMBERS, STEPPING, PoolSettings
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.pools.values import row_checker, write_tree


class SimultaneousPool(AgentsPool):
    """Once all groups were sent, every environment steps.

    A row is an environment step. A seat whose agent has ended or is not there idles. The row after the end of an
    environment's episode is the reset row of all its seats.
    """

    def __init__(self, config: EnvConfig, seed: int, slots: slice, settings: PoolSettings = DEFAULTS) -> None:
        super().__init__(config, slots, settings)
        self._columns = [group.slots.stop for group in self.groups]
        self._writers = [row_writer(spec.obs, B) for spec, B in zip(self.specs, self._columns)]
        self._sound = [row_checker(spec.obs, self.host.refused) for spec in self.specs]
        self._rows: list[list[RowViews]] = []
        self.restart(seed, settings.episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        self.host.restart(seed, episodes)
        self.recorder.restart()
        self.parallel = ParallelEnvs(self.host)
        self._sums = [np.zeros((4, B)) for B in self._columns]
        """Return, discounted, weight of the next, tick of opening."""
        self._unsummed = 0
        """Row of the batch from which on rewards are not in the sums yet."""
        self._journal = ParallelJournal(self.seats, len(self.host.envs), self.settings.journal_steps)
        self._sent, self._given = 0, -1
        self._unstarted = True

    def resume(self, previous: Sequence[SampleBatch] | None) -> None:
        """Takes the place of a pool whose worker died, from the episode table and the earlier batches, if any.

        Every environment resets into its next episode in the row that comes next.
        """
        self.host.resume()
        self._unstarted, self._outs, self._rows = previous is None, previous or (), []

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        previous, T = self._outs, outs[0].spec.T
        same = len(previous) == len(outs) and all(x is y for x, y in zip(previous, outs))
        if not same or not self._rows:
            self._rows = [[row_views_of(out, spec.obs, t) for out, spec in zip(outs, self.specs)] for t in range(T)]
        self.open_batch(outs, self._unstarted)
        if self._unstarted:
            self._unstarted = False
            self._start()
        self.host.begin_batch()
        self._sent = self._unsummed = 0

    def send(self, group: int, row: int) -> None:
        self._sent += 1
        if self._sent == len(self.groups):
            self._sent = 0
            self._step(row)
            if row == len(self._rows) - 1:
                self._sum_up(row + 1)
                self._journal.record(self._outs)

    def get_state(self) -> PoolState:
        return self.host.get_state([None if over else self._snapshot(e) for e, over in enumerate(self.host.over)])

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        self._unstarted, self._outs, self._rows = False, outs, []
        return self.restored(state, self._restore)

    def _snapshot(self, e: int) -> dict[str, Any]:
        """The open episode of an environment, as plain data."""
        env, tick = self.host.envs[e], self.host.tick
        sums = {agent: self._sums[p][:, b].tolist() for agent, p, b in self.parallel.where[e]}
        env_state = env.get_state() if offers_state(env) else None
        return {
            "there": self.parallel.snapshot(e),
            "sums": {agent: [*x[:3], tick - int(x[3])] for agent, x in sums.items()},
            "account": self.recorder.snapshot(e),
            "journal": None if env_state is not None else self._journal.episode(e),
            "env": env_state,
        }

    def _restore(self, e: int, state: dict[str, Any]) -> bool:
        """Restores the stored episode; returns False if the environment does not reach the same state."""
        host, parallel, env = self.host, self.parallel, self.host.envs[e]
        if host.over[e]:
            return True
        if state["env"] is not None and offers_state(env):
            host.reset(e, again=True)
            host.repeat(e)
            env.set_state(state["env"])
            parallel.restore(e, state["there"])
        elif not replay_parallel(parallel, e, state, self._outs, self._to_env):
            parallel.clear(e)
            self.recorder.forget(e)
            return False
        self._journal.load(e, state["journal"])
        self.recorder.restore(e, state["account"])
        for agent, p, b in parallel.where[e]:
            *sums, age = state["sums"][agent]
            self._sums[p][:, b] = *sums, host.tick - age
        return True

    def _step(self, at: int) -> None:
        """Steps every environment with the actions of a row, and writes the answers."""
        host, parallel, tell, views = self.host, self.parallel, self.host.showing.anything, self._rows[at]
        activity, row = host.activity, RowDefaults(len(views))
        host.tick += 1
        activity[1], activity[3], activity[4], activity[5] = STEPPING, host.slots.start, host.tick, self.evaluation
        actions = list(chain.from_iterable(to_env(view.action) for to_env, view in zip(self._to_env, views)))
        e, result, chosen = 0, None, dict[str, Any]()
        flags, results = list[Any](), list[Any]([None]) * len(host.steps)
        try:
            for e, env, step, names, own, full in zip(
                range(len(host.steps)), host.envs, host.steps, parallel.alive, parallel.own, parallel.full
            ):
                if not names:
                    row.partly.append(e)
                    row.seat(e, [] if host.idle[e] else self._open(e, at + 1), self.seats, views)
                    continue
                activity[0] = e
                chosen = dict(zip(names, own(actions)))
                result = None
                result = step(chosen)
                obs, reward, terminated, truncated, infos = result
                if any(infos.values()):
                    self._report(e, infos, views)
                K = len(names)
                if full is None or env.agents != names or not K == len(reward) == len(terminated) == len(truncated):
                    row.partly.append(e)
                    row.seat(e, parallel.answer(e, result, chosen), self.seats, views)
                    if host.over[e]:
                        row.over.append(e)
                    continue
                flags += terminated.values()
                flags += truncated.values()
                results[e] = result
                shown = parallel.shown(e, "step", names, obs, infos) if tell else obs
                for seen, paid, read in zip(row.obs, row.rewards, full):
                    seen += read(shown)
                    paid += read(reward)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, EnvWorkerError):
                fail(host.where(e, "step"), error, None)
            if result is not None and (found := parallel_step_violation(result, list(chosen))):
                host.refuse(e, "step", *found, chosen)
            fail(host.where(e, "step"), error, chosen)
        activity[1] = 0
        if any(flags) or not FLAGS.issuperset(map(type, flags)):
            refuse_flags(parallel, {e: x[2:4] for e, x in enumerate(results) if x is not None})
        for p, view in enumerate(views):
            rewards = row.rewards[p]
            if not NUMBERS.issuperset(map(type, rewards)):
                rewards = row.rewards[p] = real_rewards(parallel, p, rewards)
            if not self._writers[p](view.flat, None, row.obs[p]):
                write_unusual(parallel, p, view.obs, row.obs[p])
            view.reward[:] = rewards
            view.terminated.fill(False)
            view.truncated.fill(False)
            view.valid.fill(True)
        if row.partly:
            self._sum_up(at + 1)
            self._change(at, row, views)
        if host.limit:
            self._cut_long(at, views)
        everyone = host.tick % CHECK_EVERY == 0 or host.config.checks == "always"
        look = everyone or 0 in host.episode
        for p, view in enumerate(views):
            sound = not look or self._sound[p](view.obs)
            legal = not self._masked[p] or view.obs[MASK_KEY].any(1).all()
            if not (sound and legal and math.hypot(*row.rewards[p]) < LARGEST_REWARD):
                check_values(parallel, p, view.obs, row.rewards[p], everyone)

    def _sum_up(self, rows: int) -> None:
        """Adds the rewards of the batch before row `rows` to the sums, row by row."""
        start, self._unsummed = self._unsummed, rows
        for sums, out in zip(self._sums, self._outs):
            reward = out.reward[start:rows].astype(np.float64)
            if len(reward) == 0:
                continue
            return_, discounted, weight, _ = sums
            weights = np.full((len(reward) + 1, len(weight)), self.recorder.discount)
            weights[0] = weight
            np.multiply.accumulate(weights, out=weights)
            discounts = weights[:-1] * reward
            reward[0] += return_
            discounts[0] += discounted
            sums[0], sums[1] = np.add.accumulate(reward)[-1], np.add.accumulate(discounts)[-1]
            sums[2] = weights[-1]

    def _open(self, e: int, row: int) -> list[AgentStep]:
        """Opens the next episode of an environment; `row` is its first."""
        self._journal.open(e, row)
        return self.parallel.open(e, self.host.reset(e))

    def _change(self, at: int, row: RowDefaults, views: list[RowViews]) -> None:
        """Writes what differs from row to row `at`: seats that idle, agents that come and end, episodes that end."""
        for p, view in enumerate(views):
            if invalid := [b for q, b in row.invalid if q == p]:
                view.valid[invalid] = False
            if ended := [x for x in row.ended if x[1].policy == p]:
                columns = [step.column for _, step in ended]
                view.terminated[columns] = [step.terminated for _, step in ended]
                view.truncated[columns] = [step.truncated for _, step in ended]
                self._end(p, ended)
        for e in row.over:
            self._close(e, at)
        for p, view in enumerate(views):
            if came := [b for q, b in row.came if q == p]:
                view.first[came] = True
                self._begin(p, came)

    def _cut_long(self, at: int, views: list[RowViews]) -> None:
        """Ends the episodes that have as many steps as an evaluation plays: who is there is truncated."""
        host, parallel = self.host, self.parallel
        for e, names in enumerate(parallel.alive):
            if not names or host.tick - host.began[e] < host.limit:
                continue
            self._sum_up(at + 1)
            for agent, p, b in parallel.where[e]:
                views[p].truncated[b] = views[p].valid[b]
                self._end(p, [(e, AgentStep(agent, p, b, None, truncated=True))])
            parallel.clear(e)
            host.finish(e)
            self._close(e, at)

    def _close(self, e: int, at: int) -> None:
        """The episode of environment e is over, in this row."""
        self.recorder.close(e, self.host.tick - self.host.began[e], at)

    def _begin(self, p: int, columns: list[int]) -> None:
        self._sums[p][:, columns] = [[0.0], [0.0], [1.0], [self.host.tick]]

    def _end(self, p: int, ended: Sequence[tuple[int, AgentStep]]) -> None:
        tick, end = self.host.tick, self.recorder.end
        sums = self._sums[p][:, [step.column for _, step in ended]].T.tolist()
        for (e, step), (return_, discounted, _, since) in zip(ended, sums):
            end(e, step.agent, p, return_, discounted, tick - int(since), bool(step.terminated))

    def _report(self, e: int, infos: Any, views: list[RowViews]) -> None:
        """Records the info keys that agents report."""
        for agent, p, b in self.parallel.where[e]:
            if info := infos.get(agent):
                for key, value in self.recorder.report(e, agent, info).items():
                    if key in views[p].info:
                        views[p].info[key][b] = value

    def _start(self) -> None:
        """Row 0 of the first batch: a reset of every environment that takes part, then random steps if asked for."""
        for e, idle in enumerate(self.host.idle):
            if not idle:
                self._put_row_0(e, self._open(e, 0), {})
                if self.settings.max_decorrelation_steps:
                    self._random_steps(e)

    def _put_row_0(self, e: int, steps: Sequence[AgentStep], actions: dict[str, Tree]) -> None:
        """Writes what came of a reset or a step outside a batch into row 0, and adds up its rewards."""
        host = self.host
        for step in steps:
            p, b, out = step.policy, step.column, self._outs[step.policy]
            host.check_obs(e, "step" if step.valid else "reset", step.agent, p, step.obs)
            write_tree(tree_map(lambda x: x[0], out.obs), b, step.obs)
            out.first[0, b], out.prev_reward[0, b] = not step.valid, step.reward
            null = self.specs[p].null_action
            tree_assign(out.prev_action, (0, b), actions[step.agent] if step.valid else null)
        self.add_up(e, steps)

    def add_up(self, e: int, steps: Sequence[AgentStep]) -> None:
        """Adds to the episode's sums what came of a reset or a step outside a batch."""
        for step in steps:
            sums = self._sums[step.policy][:, step.column]
            if not step.valid:
                self._begin(step.policy, [step.column])
                continue
            sums += step.reward, sums[2] * step.reward, sums[2] * (self.recorder.discount - 1), -1.0
            if step.terminated or step.truncated:
                self._end(step.policy, [(e, step)])

    def _random_steps(self, e: int) -> None:
        """Takes 1 to `max_decorrelation_steps` random steps in environment e, and leaves row 0 where they end."""
        host, limit, slot = self.host, self.settings.max_decorrelation_steps, self.host.slots.start + e
        sizes = [action_noise_size(spec.action) for spec in self.specs]
        names, n = host.seating.agents, max(sizes)
        u = uniform(host.seed, Purpose.DECORRELATE, 0, slice(slot, slot + 1), limit + 1, n * len(names))[:, 0]
        for noise in u[1 : 2 + int(u[0, 0] * limit)]:
            if host.over[e]:
                host.left[e], host.idle[e] = host.left[e] + 1, False
                self.recorder.forget(e)
                self._put_row_0(e, self._open(e, 0), {})
                continue
            drawn: dict[str, Tree] = {}
            for agent, p, b in self.parallel.where[e]:
                at = n * host.index[agent]
                mask = self._outs[p].obs[MASK_KEY][0, b][None] if self._masked[p] else None
                drawn[agent] = sample_action(self.specs[p].action, noise[None, at : at + sizes[p]], mask)
            chosen = {agent: self._to_env[p](drawn[agent])[0] for agent, p, _ in self.parallel.where[e]}
            result, acted = host.step(e, chosen), list(chosen)
            actions = {agent: tree_map(lambda x: x[0], x) for agent, x in drawn.items()}
            self._journal.before_row_0(e, actions, self.parallel.where[e], self._outs)
            self._put_row_0(e, self.parallel.answer(e, result, chosen), actions)
            for agent in acted:
                self.recorder.report(e, agent, result[4].get(agent, {}))
