"""TurnPool: environments whose agents take turns (PettingZoo's AEC), stepped here into a batch a policy.

Row c of a column is the c-th turn on that seat, of any agent. A row closes at the agent's next turn, or at its end:
with the reward since its action, and the observation that it then sees. A turn that is open when the batch ends moves,
action and info included, to row 0 of the next; its place and the rest of the column idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import MASK_KEY
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.contract import LARGEST_REWARD
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many.base import AgentsPool
from penstock.envs.pools.many.contract import NO_CHOICE
from penstock.envs.pools.many.rows import turns_writer
from penstock.envs.pools.many.turn_columns import Player, SeatColumn, idle_rest
from penstock.envs.pools.many.turn_envs import TurnEnvs
from penstock.envs.pools.many.turn_journal import replay_turns
from penstock.envs.pools.many.turn_source import last_turn
from penstock.envs.pools.messages import fail
from penstock.envs.pools.pool import Ints, OpenEpisode, PoolState
from penstock.envs.pools.settings import CHECK_EVERY, DEFAULTS, FLAGS, NUMBERS, STEPPING, PoolSettings
from penstock.envs.pools.slot_envs import offers_state
from penstock.envs.pools.values import obs_writer, write_tree


class TurnPool(AgentsPool):
    """In a sweep every environment that is not out of room takes one turn.

    An environment is out of room if the agent to act has no row left; it goes on in the next batch.

    Raises:
        ConfigError: `reset="batch_end"` or random first steps, which are of lockstep.
    """

    takes_turns = True

    def __init__(self, config: EnvConfig, seed: int, slots: slice, settings: PoolSettings = DEFAULTS) -> None:
        if settings.reset != "next_step":
            raise ConfigError(
                f"sampler.reset={settings.reset!r} with {config.name}, whose agents take turns: its environments are "
                "out of step anyway; use reset='next_step'"
            )
        if settings.max_decorrelation_steps:
            raise ConfigError(
                f"sampler.max_decorrelation_steps={settings.max_decorrelation_steps} with {config.name}, whose agents "
                "take turns: random first moves would belong to agents that have not moved; use 0"
            )
        super().__init__(config, slots, settings)
        self._writers = [obs_writer(spec.obs) for spec in self.specs]
        self._turns_writers = [turns_writer(spec.obs) for spec in self.specs]
        self._nulls = [tree_leaves(spec.null_action) for spec in self.specs]
        self._tell = self.host.showing.anything
        self.restart(seed, settings.episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        E = len(self.host.envs)
        self.host.restart(seed, episodes)
        self.recorder.restart()
        self._columns = [[SeatColumn(p, b, b // n) for b in range(E * n)] for p, n in enumerate(self.seats)]
        self.turns = turns = TurnEnvs(self.host, self.recorder, self.settings.journal_steps)
        self.host.step_of = lambda e: turns.moves[e]
        self._waiting: list[SeatColumn | None] = [None] * E
        """Column with a turn that waits for an action; None if the environment is out of room or has no episode
        left."""
        self._pending: list[tuple[Ints, Ints] | None] = [None] * len(self.seats)
        """By policy what `pending` returns, once it has been asked since the last sweep."""
        self._turn: list[tuple[str, Player, Any] | None] = [None] * E
        """The agent to act, and its observation; None while no agent is to act."""
        self._closing: list[list[tuple[SeatColumn, str, Any, Any]]] = [[] for _ in self.seats]
        """Rows that close at the end of this sweep, by policy: agent, observation and reward.

        Rows of an environment that runs on are written immediately, because it may reuse the observation array."""
        self._ends: list[tuple[int, int, int]] = []
        """Policy, row and column of the last turns of agents that have ended since the move of an environment.

        They are valid once the environment has gone on, or its episode stands in the log.
        """
        self._held: list[tuple[SeatColumn, list[Any]]] = []
        self._sent, self._given = 0, -1
        self._first_batch, self._whole, self._look = True, False, False

    def resume(self, previous: Sequence[SampleBatch] | None) -> None:
        """Takes the place of a pool whose worker died, from the episode table and the earlier batches, if any.

        Every environment resets into its next episode; open episodes are lost.
        """
        self.host.resume()
        self._outs, self._first_batch = previous or (), previous is None

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        T = self._T = outs[0].spec.T
        self.open_batch(outs, not self._outs or self._first_batch)
        self._obs = [[tree_map(lambda x, t=t: x[t], out.obs) for t in range(T + 1)] for out in outs]
        self._info: list[dict[str, Any]] = [
            out.info.get("env", {}) if isinstance(out.info, dict) else {} for out in outs
        ]
        self._prev_actions = [tree_leaves(out.prev_action) for out in outs]
        self._agent_info = [tree_leaves({key: x for key, x in out.info.items() if key != "env"}) for out in outs]
        self._written = [[*tree_leaves(out.action), *x, out.version] for out, x in zip(outs, self._agent_info)]
        self._reward = [out.reward for out in outs]
        self._valid = [out.valid for out in outs]
        for columns in self._columns:
            for column in columns:
                column.cursor = 0
        for column, leaves in self._held:
            for x, y in zip(self._written[column.policy], leaves):
                x[0, column.index] = y
            column.cursor = 1
        self._held = []
        self._whole = False
        for e in range(len(self._waiting)):
            self._advance(e)
        self._finish_sweep()

    def pending(self, group: int) -> tuple[Ints, Ints]:
        ready = self._pending[group]
        if ready is None:
            waiting = [x for x in self._waiting if x is not None and x.policy == group]
            slots = np.array([x.index for x in waiting], np.int64)
            self._pending[group] = ready = slots, np.array([x.cursor for x in waiting], np.int64)
        return ready

    def send(self, group: int, row: int) -> None:
        self._sent += 1
        if self._sent == len(self.groups):
            self._sent = 0
            self._sweep()

    def finished(self, group: int) -> bool:
        return self._whole

    def get_state(self) -> PoolState:
        return self.host.get_state([self._snapshot(e) for e in range(len(self._waiting))])

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        self._outs, self._first_batch, self._held = outs, False, []
        return self.restored(state, self._restore)

    def _snapshot(self, e: int) -> dict[str, Any]:
        """An environment between two batches, its open turns, and the seats that wait, as plain data."""
        env = self.host.envs[e]
        env_state = env.get_state() if offers_state(env) and not self.host.over[e] else None
        mine = [column for columns in self._columns for column in columns if column.e == e]
        return {
            "columns": [[x.open, x.closed] for x in mine],
            "held": [[mine.index(x), *leaves] for x, leaves in self._held if x.e == e],
            **self.turns.snapshot(e, mine),
            "account": self.recorder.snapshot(e),
            "journal": None if env_state is not None else self.turns.journals[e].to_plain(),
            "env": env_state,
        }

    def _restore(self, e: int, state: dict[str, Any]) -> bool:
        """Restores the stored episode; returns False if the environment does not reach the same state."""
        host, env = self.host, self.host.envs[e]
        mine = [column for columns in self._columns for column in columns if column.e == e]
        for column in mine:
            column.open, column.closed = False, True
        self._turn[e] = self._waiting[e] = None
        self.turns.forget(e)
        if host.over[e]:
            return True
        self.turns.open(e, again=True)
        if state["env"] is not None and offers_state(env):
            host.repeat(e)
            env.set_state(state["env"])
        elif state["journal"] is None or not replay_turns(
            env,
            self.turns.journals[e],
            state["journal"],
            self.turns.action_of,
            host.seating.agents,
            lambda moves: host.repeat(e, moves),
        ):
            self.turns.forget(e)
            return False
        self.recorder.restore(e, state["account"])
        for column, (open_, closed) in zip(mine, state["columns"]):
            column.open, column.closed = open_, closed
        self._held += [(mine[i], leaves) for i, *leaves in state["held"]]
        self.turns.restore(e, state, mine, self.seats)
        agent = env.agent_selection
        obs, _, _, _, info = env.last()
        if self._tell:
            obs = host.show(e, "step", agent, obs, info, self.turns.state(e, env))
        self._turn[e] = agent, self.turns.players[e][agent], obs
        return True

    def _sweep(self) -> None:
        """Plays the turns that wait, and lets each of their environments run to its next one."""
        host, activity = self.host, self.host.activity
        host.tick += 1
        self._look = host.tick % CHECK_EVERY == 0 or host.config.checks == "always"
        chosen: list[Any] = [None] * len(self._waiting)
        for p, out in enumerate(self._outs):
            slots, rows = self.pending(p)
            if len(slots):
                actions = self._to_env[p](tree_map(lambda x, at=(rows, slots): x[at], out.action))
                for e, action in zip((slots // self.seats[p]).tolist(), actions):
                    chosen[e] = action
        activity[1], activity[3], activity[5] = STEPPING, host.slots.start, self.evaluation
        for e, column in enumerate(self._waiting):
            if column is None:
                continue
            activity[0], activity[4] = e, self.turns.moves[e] + 1
            self._move(e, column, chosen[e])
            self._advance(e)
        activity[1] = 0
        self._finish_sweep()

    def _move(self, e: int, column: SeatColumn, action: Any) -> None:
        """The agent whose turn it is acts."""
        turn = self._turn[e]
        assert turn is not None
        agent, player, _ = turn
        column.cursor += 1
        column.open = True
        player.turns += 1
        self.turns.moves[e] += 1
        self.turns.journals[e].add(self.host.index[agent], action)
        self._turn[e] = self._waiting[e] = None
        try:
            self.host.steps[e](action)
        except (Exception, SystemExit) as error:
            fail(self.host.where(e, "step", agent), error, action)
        if self.turns.gone[e] or self._look or not self.host.episode[e]:
            self.turns.look_at_lost(e, agent)

    def _advance(self, e: int) -> None:
        """Lets an environment run to the next turn that waits for an action, or to where there is no room for it."""
        host, turns, env, players = self.host, self.turns, self.host.envs[e], self.turns.players[e]
        while True:
            if (turn := self._turn[e]) is not None:  # it found no room in the batch before
                self._place(e, *turn)
                return
            if host.over[e]:
                if host.left[e] <= 0:
                    return
                turns.open(e)
            result, source = None, turns.sources[e]
            try:
                agents = source.agents
                if agents != turns.agents[e]:
                    turns.changed(e, agents)
                if not agents:
                    self._close(e)
                    continue
                agent = source.agent_selection
                result = env.last() if source is env else last_turn(env, source, agent)
                player = players[agent]
                obs, reward, terminated, truncated, info = result
            except (Exception, SystemExit) as error:
                turns.fail(e, error, result)
            if (
                (reward.__class__ is not float and reward.__class__ not in NUMBERS)
                or (terminated.__class__ is not bool and terminated.__class__ not in FLAGS)
                or (truncated.__class__ is not bool and truncated.__class__ not in FLAGS)
                or not -LARGEST_REWARD < reward < LARGEST_REWARD
                or info.__class__ is not dict
            ):
                reward = turns.real(e, agent, result)
            over = terminated or truncated
            if not over and host.limit and turns.moves[e] >= host.limit:
                self._cut_long(e)
                continue
            turns.journals[e].look(obs, reward)
            if self._tell:
                obs = host.show(e, "step", agent, obs, info, turns.state(e, env), over)
            column = player.column
            if column is not None and column.open:
                self._close_row(column, player, agent, obs, reward, terminated, truncated, info)
            else:
                player.return_ += reward  # earned before its first turn: no row to credit
                player.discounted += reward
            if over:
                self.recorder.report(e, agent, info)
                turns.end(e, agent, player, terminated)
                try:
                    env.step(None)
                except (Exception, SystemExit) as error:
                    fail(host.where(e, "step", agent), error, None)
                continue
            if column is None:
                policy, index = host.sit(e, agent, "step")
                player.column = column = self._columns[policy][index]
            if self._masked[column.policy] and b"\1" not in obs[MASK_KEY].tobytes() and not obs[MASK_KEY].any():
                host.refuse(e, "step", agent, NO_CHOICE)
            if self._ends:
                self._mark_ends()
            self._turn[e] = agent, player, obs
            if column.closed:
                self._place(e, agent, player, obs)
            elif column.cursor < self._T:
                self._waiting[e] = column
            return

    def _cut_long(self, e: int) -> None:
        """Ends an episode that has as many moves as an evaluation plays: who is there is truncated, unless it ended."""
        host, turns, env = self.host, self.turns, self.host.envs[e]
        state = turns.state(e, env) if self._tell else None
        for agent in list(turns.agents[e]):
            player, info = turns.players[e][agent], env.infos[agent]
            reward, terminated = turns.earned(e, agent), bool(env.terminations[agent])
            if player.column is not None and player.column.open:
                obs = env.observe(agent)
                obs = host.show(e, "step", agent, obs, info, state, True) if self._tell else obs
                self._close_row(player.column, player, agent, obs, reward, terminated, not terminated, info)
            else:
                player.return_ += reward
                player.discounted += reward
                self.recorder.report(e, agent, info)
            turns.end(e, agent, player, terminated)
        self._close(e)

    def _close(self, e: int) -> None:
        """The episode of an environment is over. A worker that dies leaves it in the log with all rows, or neither."""
        self.turns.close(e)
        self._mark_ends()
        self.recorder.log.marked[e] = self.recorder.log.count[e]

    def _mark_ends(self) -> None:
        for p, c, b in self._ends:
            self._valid[p][c, b] = True
        self._ends.clear()

    def _place(self, e: int, agent: str, player: Player, obs: Any) -> None:
        """Finds a row for the turn of environment e: it waits for an action there, or for the next batch."""
        column = player.column
        assert column is not None
        if column.closed:
            p, b, out = column.policy, column.index, self._outs[column.policy]
            if self._first_batch and not column.seen:
                self._write(e, agent, p, b, 0, obs)
                out.first[0, b] = True
            elif column.cursor >= self._T:
                return
            else:
                column.cursor = c = column.cursor + 1  # the row before is its reset row
                self._write(e, agent, p, b, c, obs)
                out.first[c, b] = True
                for x, null in zip(self._prev_actions[p], self._nulls[p]):
                    x[c, b] = null
                for x in self._agent_info[p]:
                    x[c - 1, b] = 0
            column.closed = False
        column.seen = True
        if column.cursor < self._T:
            self._waiting[e] = column

    def _close_row(
        self, column: SeatColumn, player: Player, agent: str, obs: Any, reward: Any, terminated: Any, truncated: Any,
        info: Any,
    ) -> None:  # fmt: skip
        """The turn that was open is a row."""
        p, b, c = column.policy, column.index, column.cursor - 1
        column.open = False
        player.return_ += reward
        player.discounted += player.weight * reward
        player.weight *= self.recorder.discount
        if info:
            for key, value in self.recorder.report(column.e, agent, info).items():
                if key in self._info[p]:
                    self._info[p][key][c, b] = value
        over = terminated or truncated
        if over or self._look or self.host.episode[column.e] == 0:
            self._write(column.e, agent, p, b, c + 1, obs)
            self._reward[p][c, b] = reward
            if over:
                out = self._outs[p]
                out.terminated[c, b], out.truncated[c, b] = terminated, truncated
                self._ends.append((p, c, b))
            else:
                self._valid[p][c, b] = True  # last: of a worker that dies, rows that are valid stay
        else:
            self._closing[p].append((column, agent, obs, reward))

    def _write(self, e: int, agent: str, p: int, b: int, c: int, obs: Any) -> None:
        """Writes an observation into row c, and looks at its values if it is their turn."""
        host = self.host
        if not self._writers[p](self._obs[p][c], b, obs):
            host.check_obs(e, "step", agent, p, obs)
            write_tree(self._obs[p][c], b, obs)
        elif self._look or host.episode[e] == 0:
            host.check_obs(e, "step", agent, p, obs)

    def _write_closing(self, p: int) -> None:
        """Writes the rows of a policy that close at the end of this sweep."""
        closing, self._closing[p] = self._closing[p], []
        columns, agents, observations, rewards = zip(*closing)
        rows, slots = np.array([x.cursor for x in columns]), np.array([x.index for x in columns])
        if not self._turns_writers[p](self._outs[p].obs, (rows, slots), observations):
            for column, agent, obs in zip(columns, agents, observations):
                self._write(column.e, agent, p, column.index, column.cursor, obs)
        rows -= 1
        self._reward[p][rows, slots] = rewards
        self._valid[p][rows, slots] = True

    def _finish_sweep(self) -> None:
        """Writes the remaining rows; once no environment has room, removes open turns and idles the rest of columns."""
        self._pending = [None] * len(self._pending)
        for p, closing in enumerate(self._closing):
            if closing:
                self._write_closing(p)
        if any(column is not None for column in self._waiting):
            return
        self._whole, self._first_batch = True, False
        for p, out in enumerate(self._outs):
            self._held += idle_rest(out, self._columns[p], self._written[p], self._nulls[p])
