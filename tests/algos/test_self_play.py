"""Self-play: who is met and how often by hand, members that act as they would alone, matches counted from the log."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.self_play import PastSelves, SelfPlay, Sides, count, matchmake, metrics, results, snapshot
from penstock.core.batch import Inputs, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.envs.agent_observations import read_agents
from penstock.envs.make import EnvConfig
from penstock.envs.toy import Nim, TwoStep
from penstock.learn.policy_set import PolicySet
from penstock.learn.rows.postprocess import as_tensors
from penstock.run.playing.sides import playing
from penstock.samplers.episodes import AgentEpisodes, Episodes
from penstock.testing import check_agent
from tests.connect3 import share_right

SPEC = EnvSpec(LeafSpec("box", (3,), "float32", -1.0, 1.0), LeafSpec("discrete", (), "int64", sizes=(4,)))
CFG = SelfPlay(ps.PPO(lr=3e-3, epochs=4, minibatch=128, entropy_coef=0.01), pool=3, interval=2)


def selves(cfg: SelfPlay = CFG, spec: EnvSpec = SPEC) -> tuple[PolicySet, PastSelves, Any]:
    policies = cfg.build({"main": spec, "opponent": spec}, 0)
    agent = policies["opponent"].agent
    assert isinstance(agent, PastSelves)
    return policies, agent, policies["main"].agent


def known(agent: PastSelves, games: list[float], score: list[float]) -> None:
    agent.serial[:-1] = torch.tensor([1 + i if g >= 0 else 0 for i, g in enumerate(games)])
    agent.games.copy_(torch.tensor(games).clamp(min=0))
    agent.score.copy_(torch.tensor(score))


@pytest.mark.parametrize(
    ("matchmaking", "weights"),
    [("hard", [(1 - 0.8) ** 2, (1 - 0.25) ** 2, 0.0]), ("even", [0.8 * 0.2, 0.25 * 0.75, 0.0]), ("uniform", [1, 1, 0])],
)
def test_past_selves_are_met_by_their_win_rates(matchmaking: Any, weights: list[float]) -> None:
    """Win rates (7 + 1) / (8 + 2) = 0.8 and (0 + 1) / (2 + 2) = 0.25; the third place is free."""
    _, agent, _ = selves()
    cfg = replace(CFG, matchmaking=matchmaking, latest=0.3)
    matchmake(agent, cfg)
    assert agent.chance.tolist() == [0, 0, 0, 1]  # nobody yet but main itself
    known(agent, [8, 2, -1], [7, 0, 0])
    matchmake(agent, cfg)
    expected = [*(0.7 * w / sum(weights) for w in weights), 0.3]
    np.testing.assert_allclose(agent.chance, expected, rtol=1e-6)
    said = metrics(agent)
    assert said["self_play/win_rate"] == pytest.approx((0.8 + 0.25) / 2)
    assert said["self_play/lowest_win_rate"] == pytest.approx(0.25)
    assert said["self_play/pool"] == 2


def test_ratings_and_fading_memory_by_hand() -> None:
    _, agent, _ = selves()
    known(agent, [8, 2, -1], [7, 0, 0])
    agent.rating.copy_(torch.tensor([1000.0, 1200.0, 0.0, 1200.0]))
    count(agent, torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.5, 0.0, 0.0]), replace(CFG, elo_k=10.0, memory=8))
    first = 1 / (1 + 10 ** (-200 / 400))  # 0.7597 a game against the weaker self, 0.5 against the equal one
    assert float(agent.rating[-1]) == pytest.approx(1200 + 10 * (1.5 - 2 * first + 0 - 0.5))
    np.testing.assert_allclose(agent.games, [8 * 6 / 8 + 2, 2 * 7 / 8 + 1, 0])
    np.testing.assert_allclose(agent.score, [7 * 6 / 8 + 1.5, 0, 0])
    assert agent.rating[:-1].tolist() == [1000, 1200, 0]
    assert int(agent.played[0]) == 3


def test_a_snapshot_is_taken_when_due_and_the_easiest_or_oldest_makes_room() -> None:
    _, agent, main = selves()
    for place in range(3):
        snapshot(agent, main, CFG)
        assert int(agent.played[1]) == place  # due with the second batch
        with torch.no_grad():
            main.value_head.bias.fill_(place)
        snapshot(agent, main, CFG)
        assert agent.serial.tolist() == [*range(1, place + 2), *[0] * (2 - place), -1]
        assert agent.members[place].value_head.bias.item() == place  # pyright: ignore
    known(agent, [8, 2, 8], [4, 2, 7])  # win rates 0.5, 0.75, 0.8
    agent.rating[-1] = 1234.0
    easiest, oldest = (replace(CFG, replace=how, interval=1) for how in ("easiest", "oldest"))  # pyright: ignore
    snapshot(agent, main, replace(easiest, threshold=0.6))
    assert agent.serial.tolist() == [1, 2, 3, -1]  # one self is beaten too seldom
    snapshot(agent, main, replace(easiest, threshold=0.5))
    assert agent.serial.tolist() == [1, 2, 4, -1]
    assert agent.rating[2] == 1234.0
    assert agent.games.tolist() == [8, 2, 0]
    snapshot(agent, main, oldest)
    assert agent.serial.tolist() == [5, 2, 4, -1]


def test_matches_are_counted_game_by_game() -> None:
    """Two environments. Env 0: won against self 2; no match, as main had no turn; a draw against self 1. Env 1: no
    match, as the opponent had no turn; lost against self 2; a win against one that is in the pool no more.
    """
    _, agent, _ = selves()
    known(agent, [0, 0, -1], [0, 0, 0])
    batch = allocate_batch(SPEC, BatchSpec(6, 2), {"serial": np.int64(0)})
    batch.valid[...] = True
    batch.info["serial"][...] = -7
    for row, column, serial in ((1, 0, 2), (2, 0, 1), (5, 0, 1), (3, 1, 2), (4, 1, 9)):
        batch.terminated[row, column], batch.info["serial"][row, column] = True, serial
    batch.valid[0, 1], batch.terminated[0, 1] = False, True  # a fault's row is no end
    main = np.array([0, 1, 1, 0, 0, 1])
    return_ = np.array([[1, -1], [1, -1], [0, 0], [1, -1], [-1, 1], [-1, 1.0]])
    length = np.array([[3, 2], [1, 0], [2, 3], [1, 0], [4, 4], [2, 2]])
    slot = np.array([0, 0, 0, 1, 1, 1])

    def listed(order: list[int]) -> Episodes:
        policy, total = np.stack([main, 1 - main], 1), return_.sum(1)
        names, both = ("x", "y"), ("main", "opponent")
        parts = AgentEpisodes(names, both, policy, return_, length, return_, return_ > 9).at(order)
        return Episodes(total[order], length.sum(1)[order], total[order], slot[order], total > 9, {}, parts)

    episodes = listed([0, 1, 2, 3, 4, 5])
    for each in (episodes, listed([0, 3, 1, 4, 2, 5])):
        games, score = results(agent, batch, each)
        assert games.tolist() == [1, 2, 0]
        assert score.tolist() == [0.5, 1, 0]
    batch.terminated[5, 0] = False  # ends and episodes that do not tally are left out
    assert results(agent, batch, episodes)[0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("recurrent", ["none", "gru"])
def test_every_row_acts_as_its_own_member_would_alone(recurrent: Any) -> None:
    net = ps.Net(hidden=(6,), recurrent=recurrent, recurrent_size=4)
    _, agent, _ = selves(replace(CFG, algo=replace(CFG.algo, net=net)))
    with torch.no_grad():
        for i, member in enumerate(agent.members):
            for p in member.parameters():
                p += 0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    known(agent, [1, 1, 1], [0, 0, 0])
    agent.chance.copy_(torch.tensor([0.0, 0.25, 0.5, 0.25]))
    check_agent(agent, SPEC)
    torch.manual_seed(0)
    B, state, met = 8, agent.initial_state(8), set[int]()
    member, drawn = torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.int64)
    inputs, noise = Inputs(None, None, None, None), torch.zeros(0)
    for t in range(30):
        first = torch.ones(B, dtype=torch.bool) if t == 0 else torch.rand(B) < 0.2
        inputs = Inputs(torch.rand(B, 3) * 2 - 1, torch.zeros(B, dtype=torch.int64), torch.zeros(B), first)
        noise = torch.cat((torch.rand(B, agent.noise_size - 1), torch.arange(B).unsqueeze(1).float()), 1)
        memory = state.get("inner")
        action, info, state = agent.act(inputs, state, noise)
        u = noise[:, -2]
        drawn = torch.where(u < 0.25, 1, torch.where(u < 0.75, 2, 3))
        member = torch.where(first, drawn, member)
        assert state["member"].tolist() == member.tolist()
        assert info["serial"].tolist() == agent.serial[member].tolist()
        for m, each in enumerate(agent.members):
            expected, _, after = each.act(inputs, memory, noise[:, :-2])  # pyright: ignore
            rows = member == m
            assert torch.equal(action[rows], expected[rows])
            assert after is None or torch.equal(state["inner"]["h"][rows], after["h"][rows])
        met |= set(member.tolist())
    assert met == {1, 2, 3}
    greedy, _, _ = agent.act(inputs, state, noise.index_fill(1, torch.tensor([noise.shape[1] - 1]), -1.0))
    for m, each in enumerate(agent.members):
        rows = torch.where(inputs.first, drawn, state["member"]) == m
        assert torch.equal(greedy[rows], each.act(inputs, state.get("inner"), None)[0][rows])  # pyright: ignore


def test_who_loses_a_place_in_mid_episode_is_credited_no_more() -> None:
    _, agent, _ = selves()
    known(agent, [1, -1, -1], [0, 0, 0])
    agent.chance.copy_(torch.tensor([1.0, 0, 0, 0]))
    first = torch.ones(4, dtype=torch.bool)
    inputs = Inputs(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64), torch.zeros(4), first)
    noise = torch.full((4, agent.noise_size), 0.5)
    _, info, state = agent.act(inputs, agent.initial_state(4), noise)
    assert info["serial"].tolist() == [1] * 4
    agent.serial[0] = 2
    _, info, state = agent.act(inputs._replace(first=~first), state, noise)
    assert info["serial"].tolist() == [0] * 4
    _, info, _ = agent.act(inputs, state, noise)
    assert info["serial"].tolist() == [2] * 4


class Game:
    """A user's own loop of self-play in Nim."""

    def __init__(self, cfg: SelfPlay, stones: int, sampler: Any, seed: int = 0) -> None:
        self.config = EnvConfig(Nim, kwargs={"stones": stones})
        config = cfg.seat(self.config, read_agents(self.config))
        self.cfg, self.sampler = cfg, sampler.build(config, seed)
        self.policies = cfg.build(self.sampler.specs, seed)
        self.sampler.initialize(self.policies.agents)

    def play(self, start: int, stop: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for itr in range(start, stop):
            found = self.cfg.training_step(self.policies, self.sampler, itr).metrics
        return found


def test_every_move_of_a_game_is_credited_with_how_it_ended() -> None:
    """With lambda and discount 1 the return of each of main's turns is 1 in a game that it won and -1 in another.

    Who took the last stone is read off the board that main saw; T is long enough for whole games.
    """
    cfg = replace(CFG, algo=replace(CFG.algo, gae_lambda=1.0, discount=1.0))
    game = Game(cfg, 9, ps.SerialSampler(T=24, B=16))
    game.play(0, 3)
    batch = game.sampler.obtain_samples(3)[0]["main"]
    main = game.policies["main"]
    found = main.postprocess_fn(main.agent, as_tensors(batch, main.device), main.settings)["return"].numpy()
    game.sampler.shutdown()
    ends, checked = batch.valid & batch.terminated, {1.0: 0, -1.0: 0}
    for b in range(16):
        begun = 0
        for t in np.flatnonzero(ends[:, b]):
            left = int(batch.obs["observation"][t, b].argmax())
            won = 1.0 if left == int(batch.action[t, b]) + 1 else -1.0
            for row in range(begun, t + 1):
                if batch.valid[row, b]:
                    assert found[row, b] == pytest.approx(won, abs=1e-5)
                    checked[won] += 1
            begun = t + 1
    assert min(checked.values()) > 30


def test_nim_is_solved_against_past_selves() -> None:
    game = Game(CFG, 5, ps.SerialSampler(T=16, B=16))
    found = game.play(0, 20)
    game.sampler.shutdown()
    assert found["self_play/pool"] == 3
    env = Nim(5)
    for env.left in (1, 2, 3, 5):
        assert game.policies["main"].predict(env.observe("")) == env.left % 4 - 1
    assert game.policies["opponent"].updates == 0


def test_a_resumed_game_goes_on_bit_for_bit() -> None:
    game, again = (Game(CFG, 5, ps.SerialSampler(T=5, B=4)) for _ in range(2))
    game.play(0, 7)
    state, sampler = copy.deepcopy((game.policies.state_dict(), game.sampler.state_dict()))
    expected = game.play(7, 14)
    again.policies.load_state_dict(state)
    again.sampler.load_state_dict(sampler)
    assert again.play(7, 14) == expected
    for name, x in game.policies.parameters().items():
        assert not isinstance(x, torch.Tensor) or torch.equal(x, again.policies.parameters()[name]), name


@pytest.mark.parametrize("agent", ["player_1", "player_2", None])
def test_main_answers_for_any_agent(agent: str | None) -> None:
    policies, _, _ = selves()
    assert policies.playing(agent) is policies["main"]
    obs = np.ones(3, np.float32)
    assert policies.predict(obs, agent=agent) == policies["main"].predict(obs)


def test_an_intrinsic_reward_is_mains_alone() -> None:
    _, agent, main = selves(SelfPlay(ps.PPO(rnd=ps.RND(features=4, net=ps.Net(hidden=(8,)))), pool=1))
    assert hasattr(main, "rnd") and not any("rnd" in name for name in agent.state_dict())


def test_main_plays_both_sides_and_what_is_no_game_of_two_is_refused() -> None:
    sides = Sides(("x", "y"))
    dealt = [(sides("x", 0, seed), sides("y", 0, seed)) for seed in range(4)]
    assert set(dealt) == {("main", "opponent"), ("opponent", "main")}
    with pytest.raises(ConfigError, match="an environment of one agent; expected one of two"):
        CFG.seat(TwoStep)
    with pytest.raises(ConfigError, match=r"expected the settings of one algorithm, e.g. ps.SelfPlay\(ps.PPO\(\)\)"):
        SelfPlay(ps.Policies({"a": ps.PPO()}))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="expected specs of 'main' and 'opponent'"):
        CFG.build({"main": SPEC})
    with pytest.raises(ConfigError, match="for one agent use PPO alone"):
        CFG.build(SPEC)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [
        pytest.param(ps.CpuSampler(T=5, B=4, workers=2), id="cpu"),
        pytest.param(ps.AlternatingSampler(T=5, B=4, workers=2), id="alternating"),
    ],
)
def test_opponents_are_the_same_wherever_they_play(sampler: Any) -> None:
    games = [Game(CFG, 5, x) for x in (ps.SerialSampler(T=5, B=4), sampler)]
    try:
        found = [game.play(0, 6) for game in games]
    finally:
        for game in games:
            game.sampler.shutdown()
    assert found[0] == found[1]
    assert found[0]["self_play/games"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["self-play", "ppo"])
def test_the_presets_of_connect3_near_the_game_value(algo: str) -> None:
    """After 20,000 moves; benchmarks/connect3.py measures whole runs."""
    exp = ps.preset(algo, "penstock.envs.toy:Connect3")
    trainer = ps.Trainer(ps.override(exp, {"run.steps": 20_000, "run.eval_episodes": 0}))
    while trainer.env_steps < trainer.exp.run.steps:
        trainer.train()
    trainer.stop()
    assert share_right(playing(trainer.policy, "agent_0")[1].agent) > 0.8
