"""Self-play: one policy learns against a pool of its own frozen past selves, the ones it loses to most of all.

Fictitious self-play (Heinrich et al. 2015) with matchmaking by win rate, "prioritized fictitious self-play" (Vinyals et
al. 2019, Nature 575, Methods, "Multi-agent learning"): a past self that main beats with probability x is met in
proportion to f(x) = (1 - x)^p ("hard"), x (1 - x) ("even") or 1 ("uniform"). Ratings are Elo's (1978), a step for each
batch: R <- R + k sum_games (score - 1 / (1 + 10^((R_opponent - R) / 400))); a past self keeps the rating it froze with.

Two policies play: "main" learns, "opponent" acts only. Its agent holds the frozen parameters, and those of main as they
are now, and draws one of them where an episode opens, by the noise of that row: a function of seed, batch and slot, so
placement changes nothing. An episode's opponent is carried as recurrent state and recorded as `info["serial"]`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_of
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs, MultiAgentBatch, SampleBatch
from penstock.core.config import known_names
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, NotNegative, Number, Positive, Unit, check_settings
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree, tree_map
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.seats import AgentSpecs
from penstock.learn.algorithm import Optimizers, ResultDict, TrainingStep
from penstock.learn.policies import Policies
from penstock.learn.policy_set import PolicySet
from penstock.learn.settings import Settings
from penstock.learn.train_ops import train_one_step

if TYPE_CHECKING:
    from penstock.samplers.sampler import Sampler

MAIN, OPPONENT = "main", "opponent"


class PastSelves(Agent):
    """Acts by one of `members`, the frozen selves of the pool and last the current main, drawn at an episode's start.

    Noise of a step is that of a member, a number that draws the member, and the slot's number. In deterministic
    evaluations members act without noise; the draw stays.

    Args:
        make: makes one member. size: places in the pool.
    """

    games: Tensor
    """[S] decayed number of matches against each place; 0 in a free place."""
    score: Tensor
    """[S] the part of `games` that main won; a draw counts half."""
    rating: Tensor
    """[S + 1] Elo of each place; the last is main's."""
    serial: Tensor
    """[S + 1] int64 number of the self in each place, from 1; 0: free. The current main, in the last place, is -1."""
    chance: Tensor
    """[S + 1] float32 probability that each member is drawn."""
    played: Tensor
    """[3] int64: matches counted, snapshots taken, batches since the last snapshot."""

    env_ranks, evaluates_with_noise = True, True

    def __init__(self, make: Callable[[], Agent], size: int, rating: float) -> None:
        super().__init__()
        self.members = nn.ModuleList(make() for _ in range(size + 1)).requires_grad_(False)
        self.anchor = nn.Parameter(torch.zeros(1))  # no gradient reaches it: a Policy has an optimizer
        inner = self._member(-1)
        self.spec, self.fed, self.unseen = inner.spec, inner.fed | {"first"}, inner.unseen
        self._inner_noise = inner.noise_size - int(inner.env_ranks)
        self._ranked, self._evaluated = inner.env_ranks, inner.evaluates_with_noise
        self.noise_size, self.held_noise = self._inner_noise + 2, inner.held_noise
        self.preparation = inner.preparation
        self.register_buffer("games", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("score", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("rating", torch.full((size + 1,), rating, dtype=torch.float64))
        self.register_buffer("serial", torch.tensor([0] * size + [-1]))
        self.register_buffer("chance", torch.tensor([0.0] * size + [1.0]))
        self.register_buffer("played", torch.zeros(3, dtype=torch.int64))

    @property
    def size(self) -> int:
        """Places in the pool."""
        return len(self.games)

    def initial_state(self, B: int) -> Tree:
        inner, at = self._member(-1).initial_state(B), self.chance.device
        zeros = torch.zeros(B, dtype=torch.int64, device=at)
        return {"member": zeros, "serial": zeros.clone(), **({} if inner is None else {"inner": inner})}

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        first = inputs.first
        if noise is None:
            drawn = torch.full_like(state["member"], self.size)
        else:
            total = self.chance.cumsum(0)
            drawn = torch.searchsorted(total / total[-1], noise[:, -2].contiguous(), right=True)
        member = torch.where(first, drawn, state["member"])
        serial = torch.where(first, self.serial[member], state["serial"])
        action, inner = None, None
        for m in member.unique().tolist():
            chosen, _, after = self._member(m).act(inputs, state.get("inner"), self._noise_of(noise))
            rows = member == m
            action = chosen if action is None else tree_map(lambda x, y, at=rows: _where(at, x, y), chosen, action)
            inner = after if inner is None else tree_map(lambda x, y, at=rows: _where(at, x, y), after, inner)
        # The place of a self may be taken before its last episode is over: then nobody is credited.
        info = {"serial": torch.where(self.serial[member] == serial, serial, torch.zeros_like(serial))}
        return action, info, {"member": member, "serial": serial, **({} if inner is None else {"inner": inner})}

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        inner = None if state is None else state.get("inner")
        return self._member(-1)(inputs.flat() if state is not None and inner is None else inputs, inner)

    def exported(self) -> Agent:
        return self._member(-1)

    def values(self, batch: SampleBatch) -> Tensor:
        inner = None if batch.state is None else batch.state.get("inner")
        return self._member(-1).values(replace(batch, state=inner))

    def set_slots(self, B: int) -> None:
        for member in self.members:
            member.set_slots(B)  # pyright: ignore[reportCallIssue]

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        for member in self.members:
            member.set_exploration(settings, env_steps)  # pyright: ignore[reportCallIssue]

    def copy_main(self, main: Agent, place: int = -1) -> None:
        """Makes the member in a place equal to main; numbers that are by slot stay its own."""
        theirs = parameters_of(main)
        with torch.no_grad():
            for name, x in parameters_of(self._member(place)).items():
                if x.shape == theirs[name].shape:
                    x.copy_(theirs[name])

    def _member(self, place: int) -> Agent:
        return self.members[place]  # pyright: ignore[reportReturnType]

    def _noise_of(self, noise: Tensor | None) -> Tensor | None:
        """A member's part of the noise; None in an evaluation in which it is to act without."""
        if noise is None or (not self._evaluated and bool(noise[0, -1] < 0.0)):
            return None
        inner = noise[:, : self._inner_noise]
        return torch.cat((inner, noise[:, -1:]), 1) if self._ranked else inner


def _where(rows: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.where(rows.reshape(-1, *[1] * (x.ndim - 1)), x, y)


def results(agent: PastSelves, batch: SampleBatch, episodes: Any) -> tuple[Tensor, Tensor]:
    """[S] matches against each place of the pool that ended in a batch, and [S] main's score in them.

    Main wins if its undiscounted return is larger; equal returns are a draw. Games that ended before both agents had
    moved, that a fault cut, or with an opponent that has left the pool do not count.

    Args:
        batch: of numpy arrays, the opponent's. episodes: `penstock.Episodes` that ended in it.
    """
    games, score = np.zeros(agent.size), np.zeros(agent.size)
    parts, serials = episodes.parts, agent.serial[:-1].tolist()
    ended = batch.valid & (batch.terminated | batch.truncated)
    for e in np.unique(episodes.slot):
        mine = np.flatnonzero(episodes.slot == e)
        policy, length, return_ = (getattr(parts, name)[mine] for name in ("policy", "length", "return_"))
        at = [np.argmax(policy == parts.policies.index(name), -1) for name in (MAIN, OPPONENT)]
        every = np.arange(len(mine))
        (moves, won), (replies, lost) = ((length[every, k], return_[every, k]) for k in at)
        rows = np.flatnonzero(ended[:, e])
        if len(rows) != np.count_nonzero(replies):
            continue
        met = np.zeros(len(mine), np.int64)
        met[replies > 0] = batch.info["serial"][rows, e]
        for serial, ours, theirs in zip(met[moves > 0], won[moves > 0], lost[moves > 0]):
            if serial > 0 and serial in serials:
                games[serials.index(serial)] += 1.0
                score[serials.index(serial)] += 0.5 + 0.5 * np.sign(ours - theirs)
    return torch.from_numpy(games), torch.from_numpy(score)


def count(agent: PastSelves, games: Tensor, score: Tensor, cfg: SelfPlay) -> None:
    """Adds matches [S] and main's score in them [S] to the records, and updates main's rating."""
    expected = 1.0 / (1.0 + 10.0 ** ((agent.rating[:-1] - agent.rating[-1]) / 400.0))
    agent.rating[-1] += cfg.elo_k * (score - games * expected).sum()
    kept = (1.0 - games / cfg.memory).clamp(min=0.0)
    agent.games.mul_(kept).add_(games)
    agent.score.mul_(kept).add_(score)
    agent.played[0] += int(games.sum())


def win_rate(agent: PastSelves) -> Tensor:
    """[S] main's chance to beat each place, with one win and one loss added to the record; NaN in a free place."""
    return torch.where(agent.serial[:-1] > 0, (agent.score + 1.0) / (agent.games + 2.0), torch.nan)


def matchmake(agent: PastSelves, cfg: SelfPlay) -> None:
    """Sets the chance of each member to be met."""
    x = win_rate(agent).nan_to_num(1.0)
    wanted = {"hard": (1.0 - x) ** cfg.hardness, "even": x * (1.0 - x), "uniform": torch.ones_like(x)}[cfg.matchmaking]
    wanted = torch.where(agent.serial[:-1] > 0, wanted, 0.0)
    present = bool(wanted.sum() > 0)
    pool = wanted / wanted.sum() * (1.0 - cfg.latest) if present else wanted
    agent.chance.copy_(torch.cat((pool, torch.tensor([cfg.latest if present else 1.0], device=pool.device))).float())


def snapshot(agent: PastSelves, main: Agent, cfg: SelfPlay) -> None:
    """Freezes main into the pool if a snapshot is due: into a free place, or over the oldest or the easiest self."""
    agent.played[2] += 1
    x, taken = win_rate(agent), agent.serial[:-1] > 0
    strong = bool((x[taken] >= cfg.threshold).all())
    if int(agent.played[2]) < cfg.interval or not strong:
        return
    if not bool(taken.all()):
        place = int((~taken).long().argmax())
    elif cfg.replace == "oldest":
        place = int(agent.serial[:-1].argmin())
    else:
        place = int(x.argmax())
    agent.copy_main(main, place)
    agent.played[1] += 1
    agent.played[2] = 0
    agent.serial[place], agent.rating[place] = agent.played[1], agent.rating[-1]
    agent.games[place] = agent.score[place] = 0.0


def metrics(agent: PastSelves) -> ResultDict:
    """`self_play/...`: main's Elo, the selves in the pool, matches counted, and main's mean and lowest win rate."""
    x = win_rate(agent)
    x = x[~x.isnan()]
    rates = {"win_rate": float(x.mean()), "lowest_win_rate": float(x.min())} if len(x) else {}
    numbers = {"elo": float(agent.rating[-1]), "pool": float(len(x)), "games": float(agent.played[0])}
    return {f"self_play/{name}": value for name, value in (numbers | rates).items()}


def _no_optimizer(agent: PastSelves, settings: Any) -> Optimizers:
    return {"all": torch.optim.SGD([agent.anchor], lr=0.0)}


@dataclass(frozen=True)
class Sides:
    """A `policy_mapping_fn`: main plays one agent and the opponent the other; which one, the episode's seed decides."""

    agents: tuple[str, ...]

    def __call__(self, agent: str, episode: int, seed: int) -> str:
        return MAIN if agent == self.agents[seed % len(self.agents)] else OPPONENT


@dataclass(frozen=True)
class SelfPlay:
    """Settings of self-play: an Algorithm, so that it stands where the algorithm that it plays with would."""

    __new__ = known_names
    fixed: ClassVar[frozenset[str]] = frozenset(("pool", "elo"))

    algo: Settings = field(default_factory=PPO)
    """The algorithm that main learns by, e.g. `ps.PPO(lr=1e-3)`."""
    pool: Count = 10
    """Past selves that are kept, usually 5 to 50."""
    interval: Count = 10
    """Batches from one snapshot to the next, usually 5 to 100."""
    threshold: Unit = 0.0
    """Take a snapshot only if main's win rate against every self in the pool is at least this. 0: always; 0.55 to 0.7
    makes each self beat those before it."""
    replace: Literal["easiest", "oldest"] = "easiest"
    """Self that a snapshot replaces in a full pool: the one that main beats most, or the oldest."""
    matchmaking: Literal["hard", "even", "uniform"] = "hard"
    """Weight by which a past self is drawn: (1 - x)^hardness, x (1 - x) or 1, where x is main's win rate against it."""
    hardness: Positive = 2.0
    """Power of "hard" matchmaking, usually 1 to 4."""
    latest: Unit = 0.2
    """Share of episodes against the current main, usually 0.2 to 0.8; all episodes until the first snapshot."""
    memory: Count = 200
    """Matches against each self that its win rate is computed over; older ones are forgotten."""
    elo_k: NotNegative = 8.0
    """How far a match moves the rating, usually 4 to 32."""
    elo: Number = 1000.0
    """Initial Elo rating."""

    def __post_init__(self) -> None:
        if not isinstance(self.algo, Settings):
            raise ConfigError(
                f"SelfPlay(algo={self.algo!r:.80}); expected the settings of one algorithm, e.g. ps.SelfPlay(ps.PPO())"
            )
        if hasattr(self.algo, "training_step"):
            raise ConfigError(f"SelfPlay with {type(self.algo).__name__}, which brings a training_step of its own")
        check_settings(self)

    @property
    def batch(self) -> BatchSpec:
        """T and B of the algorithm."""
        return self.algo.batch

    @property
    def discount(self) -> float:
        """The algorithm's, for logged discounted returns."""
        return self.algo.discount

    @property
    def takes_stale(self) -> bool:
        """True if the algorithm does."""
        return bool(getattr(self.algo, "takes_stale", False))

    def seat(self, env: EnvConfig | str | Callable[..., Any], agents: AgentSpecs | None = None) -> EnvConfig:
        """The environment with a seat for main and one for the opponent, as `Policies.seat`."""
        config = as_env_config(env)
        agents = check_env(config, steps=1).agents if agents is None else agents
        if agents is None or len(agents.specs) != 2:
            seen = "one agent" if agents is None else f"the agents {list(agents.specs)}"
            raise ConfigError(
                f"SelfPlay in {config.name}, an environment of {seen}; expected one of two that play each other, e.g. "
                "pettingzoo:classic/tictactoe_v3"
            )
        return self._policies(tuple(agents.specs)).seat(config, agents)

    def build(
        self, spec: Mapping[str, EnvSpec], seed: int = 0, device: str = "cpu", total_steps: int | None = None
    ) -> PolicySet:
        """The live policies "main" and "opponent".

        Args:
            spec: {"main": EnvSpec, "opponent": EnvSpec}, as in `sampler.specs`. total_steps: as in `Settings.build`.
        """
        if isinstance(spec, EnvSpec):
            raise ConfigError(
                "SelfPlay in an environment of one agent; expected one of two that play each other, e.g. "
                f"pettingzoo:classic/tictactoe_v3; for one agent use {type(self.algo).__name__} alone"
            )
        if not isinstance(spec, Mapping) or set(spec) != {MAIN, OPPONENT}:
            raise ConfigError(
                f"SelfPlay.build got {spec!r:.200}; expected specs of {MAIN!r} and {OPPONENT!r}: "
                "sampler.build(self_play.seat(env)).specs"
            )
        functions = self.algo.functions

        def past_selves(opponent_spec: EnvSpec, settings: Any) -> Agent:
            return PastSelves(lambda: functions.agent(opponent_spec, settings), self.pool, self.elo)

        frozen = functions._replace(agent=past_selves, replay=None, optimizer=_no_optimizer)
        main = self.algo.build(spec[MAIN], seed, device, total_steps)
        opponent = self.algo.policy(frozen, spec[OPPONENT], seed, device)
        policies = PolicySet({MAIN: main, OPPONENT: opponent}, [MAIN], settings=self)
        self.copy_main(policies)
        return policies

    def copy_main(self, policies: PolicySet) -> None:
        """Copies main to the opponent's last member, the current main."""
        agent = policies[OPPONENT].agent
        assert isinstance(agent, PastSelves)
        agent.copy_main(policies[MAIN].agent)

    def training_step(self, policies: PolicySet, sampler: Sampler, itr: int) -> TrainingStep:
        """An iteration: main trains on a batch, and the opponents' results decide who is met next."""
        started = time.perf_counter()
        batch, episodes = sampler.obtain_samples(itr)
        sampled = time.perf_counter()
        assert isinstance(batch, MultiAgentBatch)
        metrics = {**train_one_step(policies, batch), **self.after_batch(policies, batch, episodes)}
        return TrainingStep(metrics, episodes, batch.env_steps, sampled - started, time.perf_counter() - sampled)

    def after_batch(self, policies: PolicySet, batch: MultiAgentBatch, episodes: Any) -> ResultDict:
        """Counts the matches that ended in a batch that main has trained on, and sets the members and their chances.

        Args:
            episodes: those of the batch, as `obtain_samples` returned them.
        """
        main, agent = policies[MAIN].agent, policies[OPPONENT].agent
        assert isinstance(agent, PastSelves)
        with torch.no_grad():
            matches = torch.stack(results(agent, batch[OPPONENT], episodes))
            games, score = policies.comm.all_reduce(matches).to(agent.games.device)
            count(agent, games, score, self)
            snapshot(agent, main, self)
            agent.copy_main(main)
            matchmake(agent, self)
        return metrics(agent)

    def _policies(self, agents: tuple[str, ...]) -> Policies:
        algos: Any = {MAIN: self.algo, OPPONENT: self.algo}
        return Policies(algos, Sides(agents), {MAIN: 1, OPPONENT: 1}, (MAIN,))
