"""Finished episodes: returns, lengths and reported info, by agent and policy where there are several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.envs.pools.pool import EpisodeLog

DISCOUNT = 0.99
"""Discount of episode returns if neither sampler nor algorithm names one."""
_MOST_AGENTS = 8
"""Largest number of agents for which each agent's means are logged."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NO_FLOATS, _NO_INTS, _NO_FLAGS = np.empty(0), np.empty(0, np.int64), np.empty(0, bool)


@dataclass(frozen=True)
class AgentEpisodes:
    """The parts of K agents in E episodes of their environment."""

    agents: tuple[str, ...]
    """Their names."""
    policies: tuple[str, ...]
    """Ids of all policies."""
    policy: Ints
    """[E, K] index of the policy that played the agent; -1: the agent was not there."""
    return_: Floats
    """[E, K] undiscounted sum of the agent's rewards."""
    length: Ints
    """[E, K] steps of its own; 0: it had no turn."""
    discounted_return: Floats
    """[E, K] sum of discount^k * reward_k over its own steps."""
    terminated: npt.NDArray[np.bool_]
    """[E, K] its episode ended in a terminal state."""
    columns: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """{key: [E, K]} last reported values; NaN where there were none."""

    def of(self, mask: npt.NDArray[np.bool_], slot: Ints) -> Episodes:
        """The parts [E, K] that the mask names as episodes, by episode, then by agent.

        Args:
            slot: [E] of the environments.
        """
        columns = {key: values[mask] for key, values in self.columns.items()}
        slots = np.broadcast_to(slot[:, None], mask.shape)[mask]
        return Episodes(
            self.return_[mask], self.length[mask], self.discounted_return[mask], slots, self.terminated[mask], columns
        )

    def at(self, index: Any) -> AgentEpisodes:
        """The rows of some of the episodes."""
        columns = {key: values[index] for key, values in self.columns.items()}
        return AgentEpisodes(
            self.agents, self.policies, *(getattr(self, name)[index] for name in _PER_AGENT), columns=columns
        )


_PER_AGENT = ("policy", "return_", "length", "discounted_return", "terminated")


@dataclass(frozen=True, repr=False)
class Episodes:
    """E finished episodes, by the time they ended, then by slot.

    With many agents an episode is the environment's: its return is the team's, the sum over all agents.
    """

    return_: Floats = field(default_factory=lambda: _NO_FLOATS)
    """[E] undiscounted sum of unclipped rewards."""
    length: Ints = field(default_factory=lambda: _NO_INTS)
    """[E] environment steps; of turn-based ones moves."""
    discounted_return: Floats = field(default_factory=lambda: _NO_FLOATS)
    """[E] sum of discount^k * reward_k from the episode's first step."""
    slot: Ints = field(default_factory=lambda: _NO_INTS)
    """[E] which slot played it; of environments of many agents which environment."""
    terminated: npt.NDArray[np.bool_] = field(default_factory=lambda: _NO_FLAGS)
    """[E] ended in a terminal state, rather than cut by a limit."""
    columns: Mapping[str, Floats] = field(default_factory=dict[str, Floats])
    """[E] for each recorded env info key its last reported value in the episode; NaN if it never was. The mean of many
    agents."""
    parts: AgentEpisodes | None = None
    """The episodes agent by agent; None in environments of one. `agents` and `policies` read it."""

    def __post_init__(self) -> None:
        if isinstance(self.parts, Mapping):  # plain, out of a message or a checkpoint
            plain: dict[str, Any] = {**self.parts}
            names = {name: tuple(plain.pop(name)) for name in ("agents", "policies")}
            object.__setattr__(self, "parts", AgentEpisodes(**names, **plain))

    @property
    def agents(self) -> dict[str, Episodes]:
        """The episodes of each agent by its name, in those of the environment where it was there; else empty."""
        parts = self.parts
        if parts is None:
            return {}
        played = parts.policy >= 0
        alone = np.eye(len(parts.agents), dtype=bool)
        return {name: parts.of(played & alone[k], self.slot) for k, name in enumerate(parts.agents)}

    @property
    def policies(self) -> dict[str, Episodes]:
        """The same by policy id: each agent that the policy played counts."""
        parts = self.parts
        return (
            {} if parts is None else {p: parts.of(parts.policy == i, self.slot) for i, p in enumerate(parts.policies)}
        )

    def __len__(self) -> int:
        return len(self.return_)

    def __repr__(self) -> str:
        if not len(self):
            return "Episodes(none)"
        each = f"return {self.mean_return:,.1f} +- {self.return_.std():,.1f}, length {self.mean_length:,.1f}"
        more = "".join(f", {name} {value:,.3g}" for name, value in self.reported().items())
        return f"Episodes({len(self)}: {each}{more})"

    def to_plain(self) -> dict[str, Any]:
        """The fields by name, for a message or a checkpoint; `Episodes(**plain)` is the inverse."""
        plain = {**{name: getattr(self, name) for name in _PER_EPISODE}, "columns": dict(self.columns)}
        if self.parts is not None:
            columns = {f.name: getattr(self.parts, f.name) for f in fields(self.parts)}
            plain["parts"] = columns | {name: list(columns[name]) for name in ("agents", "policies")}
        return plain

    @property
    def mean_return(self) -> float:
        """NaN if there are none."""
        return float(self.return_.mean()) if len(self) else float("nan")

    @property
    def mean_length(self) -> float:
        """NaN if there are none."""
        return float(self.length.mean()) if len(self) else float("nan")

    def last(self, n: int) -> Episodes:
        """Returns the n that ended last."""
        return self.at(slice(max(len(self) - n, 0), None))

    def first_of_each_slot(self, counts: Sequence[int]) -> Episodes:
        """The first `counts[b]` episodes of each slot b."""
        rank = np.zeros(len(self), np.int64)
        for b in range(len(counts)):
            mine = self.slot == b
            rank[mine] = np.arange(mine.sum())
        return self.at(rank < np.asarray(counts, np.int64)[self.slot])

    def without_end(self, steps: int) -> int:
        """How many an evaluation cut at this many steps; an end by a time limit of the same length counts too."""
        return int((~self.terminated & (self.length >= steps)).sum())

    def no_longer_than(self, steps: int) -> Episodes:
        """The episodes of at most this many steps."""
        return self.at(self.length <= steps)

    def metrics(
        self, name: str = "rollout/ep_{key}_{stat}", return_: str = "rew", length: str = "len"
    ) -> dict[str, float]:
        """Statistics under Stable-Baselines3's names; empty without episodes.

        Mean, std, median, min and max of returns and lengths; means of discounted returns and of the reported info.
        Where there are several policies also `rollout/ID/ep_...`, and of 2 to 8 agents the means of return and length,
        `rollout/agent/NAME/ep_rew_mean`.
        """
        if not len(self):
            return {}
        out = self._metrics(name, return_, length)
        head, _, tail = name.rpartition("/")
        if self.parts is None:
            return out
        for id_, part in self.policies.items() if len(self.parts.policies) > 1 else ():
            place = f"{head}/{id_}/".replace("{", "{{").replace("}", "}}")
            out |= part.metrics(f"{place}{tail}", return_, length)
        for agent, part in self.agents.items() if 1 < len(self.parts.agents) <= _MOST_AGENTS else ():
            for key, mean in ((return_, part.mean_return), (length, part.mean_length)) if len(part) else ():
                out[f"{head}/agent/{agent}/{tail.format(key=key, stat='mean')}"] = mean
        return out

    def _metrics(self, name: str, return_: str, length: str) -> dict[str, float]:
        """Statistics of the episodes over all agents."""
        out = {
            name.format(key=key, stat=stat): value
            for key, values in ((return_, self.return_), (length, self.length))
            for stat, value in _spread(values).items()
        }
        out[name.format(key=f"discounted_{return_}", stat="mean")] = float(self.discounted_return.mean())
        for key, value in self.reported().items():
            success = f"{name.rpartition('/')[0]}/success_rate".format()
            title, free = success if key == "success_rate" else name.format(key=key, stat="mean"), key
            while title in out:  # an info key such as `reward` must not stand for the episodes' own
                free = f"info_{free}"
                title = name.format(key=free, stat="mean")
            out[title] = value
        return out

    def reported(self) -> dict[str, float]:
        """Mean of each recorded info key over the episodes that reported it; `is_success` as `success_rate`.

        A key `success_rate` beside it is `info_success_rate`.
        """
        known = {key: values[~np.isnan(values)] for key, values in self.columns.items()}
        means = {key: float(values.mean()) for key, values in known.items() if len(values)}
        if "is_success" not in means:
            return means
        names = {"is_success": "success_rate", "success_rate": "info_success_rate"}
        return {names.get(key, key): mean for key, mean in means.items()}

    def sorted_by(self, ended: Ints) -> Episodes:
        """In the order of `ended` [E], the time at which each ended, then by slot."""
        return self.at(np.lexsort((self.slot, ended)))

    def numbered(self, first: int) -> Episodes:
        """The same, their slots numbered from `first`."""
        return replace(self, slot=self.slot + first)

    def of_slots(self, slots: slice) -> Episodes:
        """The episodes of some of the slots, renumbered from 0."""
        return self.at((self.slot >= slots.start) & (self.slot < slots.stop)).numbered(-slots.start)

    def at(self, index: Any) -> Episodes:
        """The episodes that an index, a slice or a mask [E] selects."""
        columns = {key: values[index] for key, values in self.columns.items()}
        parts = None if self.parts is None else self.parts.at(index)
        return Episodes(*(getattr(self, name)[index] for name in _PER_EPISODE), columns=columns, parts=parts)


def metric_names(name: str, return_: str, length: str, info_keys: Sequence[str]) -> list[str]:
    """The names that `Episodes.metrics` has for episodes of one agent that report these keys and `is_success`."""
    one, columns = np.zeros(1), {key: np.zeros(1) for key in ("is_success", *info_keys)}
    episodes = Episodes(one, one.astype(np.int64), one, one.astype(np.int64), one.astype(bool), columns)
    return list(episodes.metrics(name, return_, length))


def _spread(values: npt.NDArray[Any]) -> dict[str, float]:
    """Mean, population standard deviation, median, smallest and largest of at least one number."""
    ordered = np.sort(values)
    n = len(ordered)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "median": float(ordered[(n - 1) // 2] + ordered[n // 2]) / 2,
        "min": float(ordered[0]),
        "max": float(ordered[-1]),
    }


_PER_EPISODE = ("return_", "length", "discounted_return", "slot", "terminated")


def join_episodes(parts: Sequence[Episodes]) -> Episodes:
    """Joins episodes, one after the other."""
    if len(parts) < 2:
        return parts[0] if parts else Episodes()
    known = [part.parts for part in parts if part.parts is not None]
    if known:
        parts = [part for part in parts if part.parts is not None]  # others hold no episode
    return Episodes(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in _PER_EPISODE),
        columns=_joined_columns([part.columns for part in parts], [part.return_.shape for part in parts]),
        parts=_joined(known) if known else None,
    )


def logged(log: EpisodeLog, agents: tuple[str, ...], policies: tuple[str, ...]) -> Episodes:
    """The episodes of a pool's log: the first of each environment, then the second, and so on."""
    m, e = np.nonzero(np.arange(log.steps.shape[1])[:, None] < log.count)
    policy = log.policy[e, m]
    played = policy >= 0
    names = ("return_", "length", "discounted")
    return_, length, discounted = (np.where(played, getattr(log, name)[e, m], 0) for name in names)
    columns = {key: np.where(played, values[e, m], np.nan) for key, values in log.columns.items()}
    terminated = log.terminated[e, m]
    return Episodes(
        return_.sum(-1),
        log.steps[e, m],
        discounted.sum(-1),
        e,
        (terminated | ~played).all(-1),
        {key: _mean(values) for key, values in columns.items()},
        AgentEpisodes(agents, policies, policy, return_, length, discounted, terminated & played, columns),
    )


def _mean(values: Floats) -> Floats:
    """[E] mean over agents [E, K] of the known values; NaN where there are none."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    return np.where(count, np.where(known, values, 0.0).sum(-1) / np.maximum(count, 1), np.nan)


def _joined(parts: Sequence[AgentEpisodes]) -> AgentEpisodes:
    return AgentEpisodes(
        parts[0].agents,
        parts[0].policies,
        *(np.concatenate([getattr(part, name) for part in parts]) for name in _PER_AGENT),
        columns=_joined_columns([part.columns for part in parts], [part.return_.shape for part in parts]),
    )


def _joined_columns(parts: Sequence[Mapping[str, Floats]], shapes: Sequence[tuple[int, ...]]) -> dict[str, Floats]:
    """Columns one after the other, NaN where a part has none of a key."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {
        key: np.concatenate([part.get(key, np.full(shape, np.nan)) for part, shape in zip(parts, shapes)])
        for key in keys
    }
