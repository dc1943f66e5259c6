"""Parts of the pools of many agents: their environments, the sums of their episodes, and messages about them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np

from penstock.core.errors import ConfigError, EnvContractError
from penstock.core.spec import MASK_KEY
from penstock.envs.agent_observations import AgentObservations, check_shown
from penstock.envs.conform.values import NOT_YOURS
from penstock.envs.make import EnvConfig
from penstock.envs.pools.messages import fail, last, refuse_obs
from penstock.envs.pools.pool import EpisodeLog
from penstock.envs.pools.settings import PoolSettings
from penstock.envs.pools.slot_envs import SlotEnvs
from penstock.envs.seats import SeatAssignment, Seating


class AgentEnvs(SlotEnvs):
    """E environments of many agents, with the seats of each; messages name the agent too.

    Args:
        config: with its seating. turns: its agents take turns.
    """

    def __init__(self, config: EnvConfig, slots: slice, settings: PoolSettings, turns: bool) -> None:
        self.seating, self._turns = seating_of(config), turns
        self._fitting = set[tuple[str, int]]()
        self._said_lost = False
        super().__init__(config, slots, settings)
        self.index = {agent: k for k, agent in enumerate(self.seating.agents)}
        self.seats = [SeatAssignment(self.seating) for _ in self.envs]

    def make(self, slot: int) -> Any:
        return self.config.make(slot)

    def examine(self) -> None:
        """Raises ConfigError for environments that the seating does not fit, or that another pool is for."""
        config, seating = self.config, self.seating
        for env in self.envs:
            check_shown(env, seating, config.name)
        if seating.turns != self._turns:
            raise ConfigError(
                f"{config.name}: agents {'take turns' if seating.turns else 'act at once'}, which is not what "
                "this pool is for; `pool_for` makes the right one"
            )
        self.specs, dealt = seating.specs, dict(zip(seating.agents, seating.deal(0, 0)))
        specs = {agent: seating.specs[p] for agent, p in dealt.items()}
        self.showing = AgentObservations(self.envs[0], specs, config.state, config.mask_key or MASK_KEY)
        self._check_fit(dealt)

    def opened(self, e: int, seed: int) -> None:
        """Opens the seats of environment e."""
        try:
            self.seats[e].open(self.episode[e], seed)
        except ConfigError as error:
            raise ConfigError(f"{self.where(e, 'reset')}: {error}") from error
        if not self.seating.fixed:
            self._check_fit(self.seats[e].policy)

    def sit(self, e: int, agent: str, phase: str) -> tuple[int, int]:
        """Policy and column of an agent that comes."""
        found = self.seats[e].sit(agent)
        if found is None:
            raise ConfigError(f"{self.where(e, phase)}: {self.seats[e].why_none(agent)}")
        policy, seat = found
        return policy, e * self.seating.seats[policy] + seat

    def refuse(self, e: int, phase: str, agent: str | None, message: str, action: Any = None) -> NoReturn:
        """Raises for a break of the contract."""
        raise EnvContractError(f"{self.where(e, phase, agent)}: {message}{last(action)}")

    def lose(self, e: int, agent: str, reward: Any, acted: Sequence[str], action: Any = None) -> None:
        """A reward for an agent that did not act reaches nobody: counted, warned of once, refused with `always`."""
        text = (
            f"rewards it with {reward} though it did not act; agents that acted: {list(acted)}: a reward after an "
            "agent's end, or before it is there, reaches nobody: give it with the agent's last step"
        )
        if self.config.checks == "always" or agent not in self.index:
            self.refuse(e, "step", agent, f"{text}{NOT_YOURS}, which leaves such rewards out", action)
        self.episode_table[e, 4] += 1
        if not self._said_lost:
            self._said_lost = True
            warnings.warn(
                f"{self.where(e, 'step', agent)}: {text}. Training goes on without it; env/lost_rewards counts them, "
                "and env_checks='always' makes the next one an error",
                stacklevel=2,
            )

    def check_obs(self, e: int, phase: str, agent: str | None, policy: int, obs: Any, action: Any = None) -> None:
        """Raises if an agent's observation breaks the spec of its policy."""
        refuse_obs(self.where(e, phase, agent), obs, self.seating.specs[policy].obs, action, self.refused)

    def action_dtypes(self) -> list[list[np.dtype[Any]]]:
        """For each policy the dtypes in which its agents take the leaves of an action."""
        agents = self.seating.agents
        players = [next(a for a in agents if self.showing.fits(a, spec)) for spec in self.seating.specs]
        return [self.showing.dtypes[agent] for agent in players]

    def state_of(self, e: int, phase: str, obs: Mapping[str, Any]) -> Any:
        """The state that stands in every agent's observation; None if none does."""
        if not self.showing.state:
            return None
        try:
            return self.showing.state_of(self.envs[e], obs)
        except (Exception, SystemExit) as error:
            fail(self.where(e, phase), error, None)

    def show(self, e: int, phase: str, agent: str, obs: Any, info: Any, state: Any, over: bool = False) -> Any:
        """The agent's observation, mask and state as one tree; `over`: its episode has ended."""
        try:
            return self.showing.show(agent, obs, info, state, over)
        except EnvContractError as error:
            self.refuse(e, phase, agent, str(error))

    def _check_fit(self, policies: Mapping[str, int]) -> None:
        for agent, policy in policies.items():
            if (agent, policy) not in self._fitting:
                if not self.showing.fits(agent, self.seating.specs[policy]):
                    raise ConfigError(
                        f"{self.config.name}: policy {self.seating.policies[policy]!r} plays agent {agent!r}, whose "
                        "spaces it was not made for; give that kind of agent a policy of its own"
                    )
                self._fitting.add((agent, policy))


class EpisodeRecorder:
    """The log of E environments of K agents: what each agent earned, kept until the episode of its environment ends."""

    def __init__(self, E: int, agents: Sequence[str], info_keys: Sequence[str], discount: float) -> None:
        self._shape, self._keys, self.discount = (E, len(agents)), info_keys, discount
        self._index = {agent: k for k, agent in enumerate(agents)}
        self._absent = [(-1, 0.0, 0.0, 0, False)] * len(agents)  # as `ended` of one that was not there
        self.log = EpisodeLog.allocate(E, 0, len(agents), info_keys)
        self.restart()

    def restart(self) -> None:
        """Forgets every open episode."""
        E = self._shape[0]
        self.ended: list[dict[int, tuple[int, float, float, int, bool]]] = [{} for _ in range(E)]
        """By environment and agent, of those that have ended: policy, return, discounted, length, terminated."""
        self.reported: list[dict[int, dict[str, float]]] = [{} for _ in range(E)]
        """By environment and agent: the values of info keys that were last reported."""

    def bind(self, M: int) -> EpisodeLog:
        """An empty log for a batch in which at most M episodes of each environment end."""
        if self.log.steps.shape[1] != M:
            self.log = EpisodeLog.allocate(self._shape[0], M, self._shape[1], self._keys)
        self.log.count.fill(0)
        self.log.marked.fill(0)
        return self.log

    def end(
        self, e: int, agent: str, policy: int, return_: float, discounted: float, length: int, terminated: bool
    ) -> None:
        """An agent's episode is over; it counts once that of its environment is."""
        self.ended[e][self._index[agent]] = (policy, return_, discounted, length, terminated)

    def report(self, e: int, agent: str, info: Mapping[str, Any]) -> dict[str, float]:
        """Takes the info keys that an agent's step reports; returns them as numbers."""
        found = {key: float(np.asarray(info[key]).item()) for key in self._keys if key in info}
        if found:
            self.reported[e].setdefault(self._index[agent], {}).update(found)
        return found

    def close(self, e: int, steps: int, row: int = 0) -> None:
        """The episode of environment e is over, in this row of the batch, of turn-based ones 0."""
        log = self.log
        m = int(log.count[e])
        log.steps[e, m], log.row[e, m] = steps, row
        for column in log.columns.values():
            column[e, m] = np.nan
        ended = [*map(self.ended[e].get, range(self._shape[1]), self._absent)]
        for x, values in zip((log.policy, log.return_, log.discounted, log.length, log.terminated), zip(*ended)):
            x[e, m] = values
        for k, found in self.reported[e].items():
            for key, value in found.items():
                log.columns[key][e, m, k] = value
        log.count[e] = m + 1  # last: a worker may die on the way
        self.forget(e)

    def snapshot(self, e: int) -> dict[str, Any]:
        """Returns and reported info of the agents that have ended in an open episode, as plain data."""
        return {
            "ended": [[k, *found] for k, found in self.ended[e].items()],
            "reported": [[k, dict(found)] for k, found in self.reported[e].items()],
        }

    def restore(self, e: int, found: Mapping[str, Any]) -> None:
        """Inverse of `snapshot`."""
        self.ended[e] = {k: (policy, *sums) for k, policy, *sums in found["ended"]}
        self.reported[e] = {k: dict(values) for k, values in found["reported"]}

    def forget(self, e: int) -> None:
        """The open episode of environment e does not count."""
        self.ended[e], self.reported[e] = {}, {}


def seating_of(config: EnvConfig) -> Seating:
    """The seating of an environment of many agents. Raises ConfigError if there is none."""
    if config.seating is None:
        raise ConfigError(
            f"{config.name} has no seating; seat policies in it: ps.Policies({{...}}).seat(env), or a run with "
            "algo=ps.Policies({...})"
        )
    return config.seating
