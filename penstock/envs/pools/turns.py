"""TurnPool: environments whose agents take turns (PettingZoo's AEC), stepped here into a batch a policy.

Row c of a column is the c-th turn there of whoever sits on that seat. A row closes when the agent's next turn, or its
end, has come: with the reward since its action, and the observation that it then sees. A turn that is open when the
batch ends moves, action and info included, to row 0 of the next; its place and the rest of the column idle.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.core.batch import ROWS_AND_NEXT, SampleBatch
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.spec import MASK_KEY
from penstock.core.tree import tree_assign, tree_leaves, tree_map
from penstock.envs.agents_contract import NO_CHOICE, agents_violation, turn_violation
from penstock.envs.contract import LARGEST_REWARD
from penstock.envs.make import EnvConfig
from penstock.envs.pools.many import Account, AgentEnvs
from penstock.envs.pools.messages import fail
from penstock.envs.pools.pool import EnvPool, Group, Ints, OpenEpisode, PoolState
from penstock.envs.pools.restoring import write_tree
from penstock.envs.pools.serial import STEPPING, Reset, action_reader, obs_writer

_CHECK_EVERY = 64
_NUMBERS = frozenset([float, int, np.float32, np.float64, np.int64, np.int32])
_FLAGS = frozenset([bool, np.bool_])


class _Column:
    """One seat of one environment: a column of a policy's batch."""

    __slots__ = ("closed", "cursor", "e", "index", "open", "policy", "seen")

    def __init__(self, policy: int, index: int, e: int) -> None:
        self.policy, self.index, self.e = policy, index, e
        self.cursor = 0
        """The row of its next turn."""
        self.open = False
        """The turn in the row before `cursor` has not closed."""
        self.closed = True
        """No episode goes on here: the next turn is the first of one."""
        self.seen = False
        """Something stands in row 0 of the first batch, or that is past."""


class _Player:
    """An agent in the open episode of its environment."""

    __slots__ = ("column", "discounted", "return_", "turns", "weight")

    def __init__(self) -> None:
        self.column: _Column | None = None
        """Where it sits, from its first turn on."""
        self.return_ = self.discounted = 0.0
        self.weight = 1.0
        """Of the next reward in `discounted`."""
        self.turns = 0


class TurnPool(EnvPool):
    """An `EnvPool` of one group for each policy. In a sweep every environment that is not out of room takes one turn.

    An environment is out of room where the agent whose turn it is has no row left; it goes on in the next batch.

    Args:
        config: with its seating. slots: numbers of the environments among those of all samplers of the run. The others
            are `SerialPool`'s, where a slot is an environment.
        discount: of the logged episodes. journal_steps: moves kept to replay an open episode on resume.

    Raises:
        ConfigError: `reset="batch_end"` or random first steps, which are of lockstep.
    """

    takes_turns = True

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        slots: slice,
        *,
        reset: Reset = "next_step",
        max_decorrelation_steps: int = 0,
        episodes: Sequence[int] | None = None,
        evaluation: bool = False,
        mark: MutableSequence[int] | None = None,
        ledger: Any = None,
        evaluation_ledger: Callable[[int], Any] | None = None,
        discount: float = 0.99,
        journal_steps: int = 100_000,
    ) -> None:
        if reset != "next_step":
            raise ConfigError(
                f"sampler.reset={reset!r} with {config.name}, whose agents take turns: its environments are out of "
                "step anyway; use reset='next_step'"
            )
        if max_decorrelation_steps:
            raise ConfigError(
                f"sampler.max_decorrelation_steps={max_decorrelation_steps} with {config.name}, whose agents take "
                "turns: random first moves would belong to agents that have not moved; use 0"
            )
        self.host = host = AgentEnvs(config, slots, evaluation, mark, ledger, turns=True)
        seating, E = host.seating, len(host.envs)
        self.evaluation, self._evaluation_ledger, self._journal_steps = evaluation, evaluation_ledger, journal_steps
        self.specs, self.seats, self.info_keys = seating.specs, seating.seats, host.info_keys
        self.groups = tuple(Group(p, slice(0, E * n)) for p, n in enumerate(seating.seats))
        self.account = Account(E, seating.agents, self.info_keys, discount)
        self._to_env = [action_reader(spec.action, dtypes) for spec, dtypes in zip(self.specs, host.action_dtypes())]
        self._writers = [obs_writer(spec.obs) for spec in self.specs]
        self._masked = [host.refused != "any" and isinstance(x.obs, dict) and MASK_KEY in x.obs for x in self.specs]
        self._nulls = [tree_leaves(spec.null_action) for spec in self.specs]
        self._tell = host.showing.anything
        self._steps = [env.step for env in host.envs]
        host.step_of = lambda e: self._moves[e]
        self._outs: Sequence[SampleBatch] = ()
        self.restart(seed, episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        E = len(self.host.envs)
        self.host.restart(seed, episodes)
        self.account.restart()
        self._columns = [[_Column(p, b, b // n) for b in range(E * n)] for p, n in enumerate(self.seats)]
        self._players: list[dict[str, _Player]] = [{} for _ in range(E)]
        """Of each environment those that are in `env.agents`."""
        self._agents: list[list[str]] = [[] for _ in range(E)]
        self._gone: list[set[str]] = [set() for _ in range(E)]
        self._moves = [0] * E
        self._waiting: list[_Column | None] = [None] * E
        """Column whose turn waits for an action, None of an environment that is out of room or has no episode left."""
        self._turn: list[tuple[str, Any] | None] = [None] * E
        """Agent whose turn it is, and what it sees; None while nobody's is."""
        self._held: list[tuple[_Column, list[Any]]] = []
        self._sent, self._given = 0, -1
        self._first_batch, self._whole, self._look = True, False, False

    def take_over(self, previous: Sequence[SampleBatch] | None) -> None:
        """Takes the place of a pool whose worker died, from the ledger and the batches before (None: there are none).

        Every environment resets into its next episode; what was open is lost.
        """
        self.host.take_over()
        self._outs, self._first_batch = previous or (), previous is None

    def prepare(self) -> None:
        """Nothing: an environment that is out of room has reset already."""

    @property
    def first_slot(self) -> int:
        """Number of the first environment among those of all samplers of the run."""
        return self.host.slots.start

    def for_evaluation(self, B: int, first_slot: int = 0) -> TurnPool:
        return TurnPool(
            self.host.config,
            self.host.seed,
            slice(first_slot, first_slot + B),
            evaluation=True,
            mark=self.host.mark,
            ledger=None if self._evaluation_ledger is None else self._evaluation_ledger(B),
            discount=self.account.discount,
        )

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        previous, self._outs = self._outs, outs
        T = self._T = outs[0].spec.T
        self.log = self.account.bind(T * sum(self.seats) + 1)
        for p, out in enumerate(outs):
            self._clear(p, out, previous[p] if previous and not self._first_batch else None)
        self._obs = [[tree_map(lambda x, t=t: x[t], out.obs) for t in range(T + 1)] for out in outs]
        self._info: list[dict[str, Any]] = [
            out.info.get("env", {}) if isinstance(out.info, dict) else {} for out in outs
        ]
        self._prev_actions = [tree_leaves(out.prev_action) for out in outs]
        self._agent_info = [tree_leaves({key: x for key, x in out.info.items() if key != "env"}) for out in outs]
        self._agent_leaves = [[*tree_leaves(out.action), *x, out.version] for out, x in zip(outs, self._agent_info)]
        self._reward = [out.reward for out in outs]
        self._valid = [out.valid for out in outs]
        for columns in self._columns:
            for column in columns:
                column.cursor = 0
        for column, leaves in self._held:
            for x, y in zip(self._own(column, 0), leaves):
                x[...] = y
            column.cursor = 1
        self._held = []
        self._whole = False
        for e in range(len(self._waiting)):
            self._advance(e)
        self._finish_if_whole()

    def pending(self, group: int) -> tuple[Ints, Ints]:
        waiting = [x for x in self._waiting if x is not None and x.policy == group]
        slots = np.array([x.index for x in waiting], np.int64)
        return slots, np.array([x.cursor for x in waiting], np.int64)

    def send(self, group: int, row: int) -> None:
        self._sent += 1
        if self._sent == len(self.groups):
            self._sent = 0
            self._sweep()

    def recv(self) -> int:
        self._given = (self._given + 1) % len(self.groups)
        return self._given

    def finished(self, group: int) -> bool:
        return self._whole

    def moved(self, group: int) -> Ints:
        """Slots whose open turn moves to row 0 of the next batch; known once the group is `finished`."""
        return np.array([x.index for x, _ in self._held if x.policy == group], np.int64)

    def get_state(self) -> PoolState:
        raise NotImplementedError

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        raise NotImplementedError

    def close(self) -> None:
        self.host.close()

    def _clear(self, p: int, out: SampleBatch, previous: SampleBatch | None) -> None:
        """Row 0 from row T of the batch before, and no turn in the others."""
        if previous is None:
            tree_map(lambda x: x[0].fill(0), out.obs)
            out.first[0], out.prev_reward[0] = False, 0.0
            tree_assign(out.prev_action, 0, self.specs[p].null_action)
        else:
            for name in ROWS_AND_NEXT:
                tree_assign(getattr(out, name), 0, getattr(previous, name), -1)
        out.first[1:] = False
        for x in (out.reward, out.terminated, out.truncated, out.valid):
            x.fill(0)
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else ():
            column.fill(np.nan)

    def _sweep(self) -> None:
        """Plays the turns that wait, and lets each of their environments run to its next one."""
        host, mark = self.host, self.host.mark
        host.tick += 1
        self._look = host.tick % _CHECK_EVERY == 0 or host.config.checks == "always"
        chosen: list[Any] = [None] * len(self._waiting)
        for p, out in enumerate(self._outs):
            slots, rows = self.pending(p)
            if len(slots):
                envs = (slots // self.seats[p]).tolist()
                at = rows, slots
                for e, action in zip(envs, self._to_env[p](tree_map(lambda x, at=at: x[at], out.action))):
                    chosen[e] = action
        mark[1], mark[3], mark[5] = STEPPING, host.slots.start, self.evaluation
        for e, column in enumerate(self._waiting):
            if column is None:
                continue
            mark[0], mark[4] = e, self._moves[e] + 1
            self._move(e, column, chosen[e])
            self._advance(e)
        mark[1] = 0
        self._finish_if_whole()

    def _move(self, e: int, column: _Column, action: Any) -> None:
        """The agent whose turn it is acts."""
        turn = self._turn[e]
        assert turn is not None
        agent = turn[0]
        column.cursor += 1
        column.open = True
        self._players[e][agent].turns += 1
        self._moves[e] += 1
        self._turn[e] = self._waiting[e] = None
        try:
            self._steps[e](action)
        except (Exception, SystemExit) as error:
            fail(self.host.where(e, "step", agent), error, action)

    def _advance(self, e: int) -> None:
        """Lets an environment run to the next turn that waits for an action, or to where there is no room for it."""
        host, env, players = self.host, self.host.envs[e], self._players[e]
        while True:
            if self._turn[e] is not None:  # it found no room in the batch before
                self._place(e)
                return
            if host.over[e]:
                if host.left[e] <= 0:
                    return
                self._open(e)
            result = None
            try:
                agents = env.agents
                if agents != self._agents[e]:
                    self._changed(e, agents)
                if not agents:
                    self._close(e)
                    continue
                agent = env.agent_selection
                result = env.last()
                player = players[agent]
                obs, reward, terminated, truncated, info = result
            except EnvWorkerError:
                raise
            except (Exception, SystemExit) as error:
                self._fail(e, error, result)
            if (
                (reward.__class__ is not float and reward.__class__ not in _NUMBERS)
                or (terminated.__class__ is not bool and terminated.__class__ not in _FLAGS)
                or (truncated.__class__ is not bool and truncated.__class__ not in _FLAGS)
                or not -LARGEST_REWARD < reward < LARGEST_REWARD
                or info.__class__ is not dict
            ):
                reward = self._real(e, agent, result)
            over = terminated or truncated
            if self._tell:
                obs = host.show(e, "step", agent, obs, info, self._state(e, env))
            column = player.column
            if column is not None and column.open:
                self._close_row(column, player, agent, obs, reward, terminated, truncated, info)
            else:
                player.return_ += reward  # earned before its first turn: no row to credit
                player.discounted += reward
            if over:
                self._end(e, agent, player, terminated)
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
            self._turn[e] = agent, obs
            self._place(e)
            return

    def _place(self, e: int) -> None:
        """Finds a row for the turn of environment e: it waits for an action there, or for the next batch."""
        turn = self._turn[e]
        assert turn is not None
        agent, obs = turn
        column = self._players[e][agent].column
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
        self,
        column: _Column,
        player: _Player,
        agent: str,
        obs: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        info: Any,
    ) -> None:
        """The turn that was open is a row."""
        p, b, c = column.policy, column.index, column.cursor
        self._write(column.e, agent, p, b, c, obs)
        c -= 1
        self._reward[p][c, b] = reward
        self._valid[p][c, b] = True
        column.open = False
        player.return_ += reward
        player.discounted += player.weight * reward
        player.weight *= self.account.discount
        if terminated or truncated:
            out = self._outs[p]
            out.terminated[c, b], out.truncated[c, b] = terminated, truncated
        if info:
            for key, value in self.account.report(column.e, agent, info).items():
                if key in self._info[p]:
                    self._info[p][key][c, b] = value

    def _write(self, e: int, agent: str, p: int, b: int, c: int, obs: Any) -> None:
        """Writes an observation into row c, and looks at its values if it is their turn."""
        host = self.host
        if not self._writers[p](self._obs[p][c], b, obs):
            host.check_obs(e, "step", agent, p, obs)
            write_tree(self._obs[p][c], b, obs)
        elif self._look or host.episode[e] == 0:
            host.check_obs(e, "step", agent, p, obs)

    def _end(self, e: int, agent: str, player: _Player, terminated: Any) -> None:
        """An agent's episode is over, with a turn or without one."""
        policy = self.host.seats[e].policy[agent]
        if player.column is not None:
            player.column.closed = True
        self.account.end(
            e, agent, policy, float(player.return_), float(player.discounted), player.turns, bool(terminated)
        )
        self.host.seats[e].leave(agent)
        del self._players[e][agent]
        self._gone[e].add(agent)
        self._agents[e] = [other for other in self._agents[e] if other != agent]

    def _open(self, e: int) -> None:
        """The next episode of an environment."""
        self.host.reset(e)
        self.host.ledger[e, 2] = 0
        self._moves[e], self._agents[e], self._gone[e] = 0, [], set()
        self._players[e].clear()

    def _close(self, e: int) -> None:
        """The episode of an environment is over."""
        if not self._moves[e]:
            self.host.refuse(e, "reset", None, "the episode is over before any agent took a turn; let one act first")
        self.account.close(e, self._moves[e])
        self.host.finish(e)

    def _changed(self, e: int, now: Sequence[str]) -> None:
        """Agents have come, which is well, or gone without their last step."""
        before = self._agents[e]
        if found := agents_violation(before, (), now, self._gone[e], self.host.index):
            self.host.refuse(e, "step", *found)
        for agent in now:
            if agent not in before:
                self._players[e][agent] = _Player()
        self._agents[e] = list(now)

    def _state(self, e: int, env: Any) -> Any:
        """The state that stands in every observation; None if none does."""
        showing = self.host.showing
        joint = {agent: env.observe(agent) for agent in env.agents} if showing.state == "joint" else {}
        return self.host.state_of(e, "step", joint)

    def _real(self, e: int, agent: str, result: Any) -> float:
        """The reward as a float. Raises if the turn breaks the contract."""
        if found := turn_violation(result, agent, self._agents[e], self.host.index):
            self.host.refuse(e, "step", *found)
        return float(result[1])

    def _fail(self, e: int, error: BaseException, result: Any) -> NoReturn:
        """Raises for an exception on the way to a turn."""
        env = self.host.envs[e]
        selected = getattr(env, "agent_selection", None)
        if found := turn_violation(result, selected, self._agents[e], self.host.index, look=result is not None):
            self.host.refuse(e, "step", *found)
        fail(self.host.where(e, "step", selected), error, None)

    def _finish_if_whole(self) -> None:
        """Once no environment has room: takes out the open turns, and makes the rest of each column idle."""
        if any(column is not None for column in self._waiting):
            return
        self._whole, self._first_batch, T = True, False, self._T
        for p, out in enumerate(self._outs):
            obs = tree_leaves(out.obs)
            for column in self._columns[p]:
                b, c = column.index, column.cursor - column.open
                if column.open:
                    self._held.append((column, [x.copy() for x in self._own(column, c)]))
                if c >= T:
                    continue
                for x in obs:
                    x[c + 1 :, b] = x[c, b]
                for x in self._agent_info[p]:
                    x[c:, b] = 0
                for x, null in zip(self._prev_actions[p], self._nulls[p]):
                    x[c + 1 : T, b] = null
                    x[T, b] = x[c, b] if column.open else null
                out.prev_reward[T, b] = out.prev_reward[c, b] if column.open else 0.0
                out.first[T, b] = out.first[c, b] and column.open

    def _own(self, column: _Column, t: int) -> list[Any]:
        """Views of what the agent wrote for a turn: action, info and version."""
        return [x[t, column.index : column.index + 1] for x in self._agent_leaves[column.policy]]
