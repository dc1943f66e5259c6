"""Matches: exact numbers of episodes, both ways round, between runs, random and scripted sides."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.make import as_env_config
from penstock.envs.toy import EchoAgents
from penstock.run.playing.evaluation import record_video
from penstock.run.playing.matches import Match, match_runs, open_side, play, play_all
from penstock.run.playing.matrix import draw_matrix, points_of
from penstock.run.playing.sides import Side

NIM, BITS = "penstock.envs.toy:Nim", "penstock.envs.toy:TeamBits"
NET = ps.Net(hidden=(8,))
QUIET: dict[str, Any] = {"steps": 64, "progress": "off", "eval_episodes": 0}


def perfect(obs: Any) -> int:
    """Leaves a multiple of 4 where it can."""
    return max(int(obs["observation"].argmax()) % 4 - 1, 0)


def broken(obs: Any) -> int:
    raise KeyError("stones")


def sides(*given: Side) -> tuple[Any, Any]:
    config = as_env_config(NIM)
    return config, ps.check_env(config).agents


def test_perfect_play_loses_only_where_nobody_could_win() -> None:
    config, agents = sides()
    one, other = Side("perfect", script=perfect), Side("also perfect", script=perfect)
    match = play((one, other), config, agents, 41, seed=3)
    assert match.episodes == 41 and match.drawn == 0
    # Of the same seeds both ways round: whoever begins wins unless the heap is a multiple of 4.
    assert match.points_by_seat[0] == pytest.approx(1.0 - match.points_by_seat[1], abs=0.05)
    against = play((one, Side("random")), config, agents, 60, seed=3)
    assert against.won > 50 and against.returns[0] == -against.returns[1] > 0.6
    again = play((Side("random"), one), config, agents, 60, seed=3).turned()
    assert (again.won, again.lost, again.points_by_seat) == (against.won, against.lost, against.points_by_seat)


def test_seats_of_the_first_side_by_name() -> None:
    config, agents = sides()
    pair = Side("perfect", script=perfect), Side("also perfect", script=perfect)
    by_turns, named = (play(pair, config, agents, 20, seed=3, first=first) for first in ((), ("agent_1",)))
    assert by_turns.points_by_seat[0] != by_turns.points_by_seat[1]
    assert named.points_by_seat == by_turns.points_by_seat[::-1]
    assert play(pair, config, agents, 20, seed=3, first=("agent_0",)) == by_turns
    with pytest.raises(ConfigError, match=r"name 'agent_2'; the agents are \['agent_0', 'agent_1'\]"):
        play(pair, config, agents, 20, first=("agent_2",))
    with pytest.raises(ConfigError, match="all agents"):
        play(pair, config, agents, 20, first=("agent_1", "agent_0"))


def legal(obs: Any) -> int:
    return int(np.flatnonzero(obs["action_mask"])[0])


def test_a_script_is_asked_only_where_its_mask_allows_something() -> None:
    config, agents = sides()
    assert play((Side("legal", script=legal), Side("random")), config, agents, 5, seed=3).episodes == 5


def test_all_play_all_and_the_picture_shows_it(tmp_path: Path) -> None:
    config, agents = sides()
    everyone = [Side("perfect", script=perfect), Side("random"), Side("zero", script=lambda obs: 0)]
    matches = play_all(everyone, config, agents, 10)
    assert [match.sides for match in matches] == [("perfect", "random"), ("perfect", "zero"), ("random", "zero")]
    assert points_of(matches, "zero", "perfect") == 1.0 - matches[1].points
    assert draw_matrix(matches, tmp_path / "plots" / "m.png", "10 each").stat().st_size > 5_000


def test_runs_meet_in_the_seats_of_each_agent(tmp_path: Path) -> None:
    shared, two = tmp_path / "shared", tmp_path / "two"
    algo = ps.Policies({"a": ps.PPO(net=NET), "b": ps.DQN(net=NET)}, {"agent_0": "a", "agent_1": "b"})
    for run, each in ((shared, ps.PPO(net=NET)), (two, algo)):
        ps.train(ps.Experiment(NIM, each, ps.SerialSampler(T=8, B=4), ps.RunConfig(dir=run, **QUIET)))
    found = match_runs(shared, [str(two), "random", "tests.run.playing.test_matches:perfect"], episodes=9)
    assert len(found) == 6 and {match.episodes for match in found} == {9}
    assert found[0].sides == (str(shared), str(two))
    assert match_runs(shared, ["random"], episodes=9) == [found[1]]
    side = open_side(str(two))
    agents = ps.check_env(NIM).agents
    assert agents is not None
    assert [side.agent(name, spec)[0] for name, spec in agents.specs.items()] == ["a", "b"]
    with pytest.raises(ConfigError, match="twice"):
        match_runs(shared, ["random", "random"])


@pytest.mark.parametrize("algo", [ps.MAPPO(net=NET), ps.QMIX(net=NET)], ids=["mappo", "qmix"])
def test_teams_that_were_trained_with_a_state_play_without_it(algo: Any, tmp_path: Path) -> None:
    run = tmp_path / "team"
    config = ps.RunConfig(dir=run, seed=1, **QUIET)
    policy = ps.train(ps.Experiment(BITS, algo, ps.SerialSampler(T=8, B=4), config)).policy
    (found,) = match_runs(run, ["random"], episodes=6)
    (expected,) = play_all([Side(str(run), script=policy.predict), Side("random")], as_env_config(BITS),
                           ps.check_env(BITS).agents, 6, seed=1)  # pyright: ignore  # fmt: skip
    assert found == expected
    assert found.returns[0] > 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda agents: play((Side("random"), Side("r")), as_env_config(NIM), agents, 1), "2 or more of both"),
        (lambda agents: open_side("tests.run.playing.test_matches:NIM"), "expected a function of one observation"),
        (lambda agents: play((Side("b", script=broken), Side("r")), as_env_config(NIM), agents, 4), r"b\(obs\) raised"),
    ],
)
def test_what_cannot_be_played_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(ps.check_env(NIM).agents)


def test_a_side_of_other_spaces_is_refused() -> None:
    agents, other = ps.check_env(NIM).agents, ps.check_env(BITS).agents
    assert agents is not None and other is not None
    spec = next(iter(other.specs.values()))
    side = Side("bits", ps.PPO(net=NET).build(spec))
    with pytest.raises(ConfigError, match="bits was built for observation"):
        play((side, Side("random")), as_env_config(NIM), agents, 4)
    several = ps.Policies({"a": ps.PPO(net=NET), "b": ps.PPO(net=NET)}, lambda agent, *_: "a", {"a": 1, "b": 1})
    side = Side("bits", several.build({"a": spec, "b": spec}))
    with pytest.raises(ConfigError, match=r"is a dict says here which of \['a', 'b'\] plays an agent"):
        play((side, Side("random")), as_env_config(NIM), agents, 4)


def test_points_of_a_draw() -> None:
    match = Match(("a", "b"), 2, 4, 2, (0.0, 0.0), (0.75, 0.25))
    assert match.points == 0.5 and match.turned().points_by_seat == (0.75, 0.25)


class Filmed:
    """Stands for a video: it counts frames."""

    made: list[Filmed] = []  # noqa: RUF012

    def __init__(self, path: Path, fps: int, size: tuple[int, int]) -> None:
        self.path, self.frames, self.size = path, 0, size
        Filmed.made.append(self)

    def write(self, frame: np.ndarray[Any, Any]) -> None:
        self.frames += 1

    def close(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(str(self.frames))


def test_a_video_has_a_frame_for_every_reset_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.run.playing.show.VideoWriter", Filmed)
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    run = tmp_path / "run"
    env = "pettingzoo:mpe2/simple_speaker_listener_v4"
    algo = ps.Policies(
        {"speaker": ps.PPO(net=NET), "listener": ps.PPO(net=NET)}, {"speaker_0": "speaker", "listener_0": "listener"}
    )
    ps.train(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=2), ps.RunConfig(dir=run, **QUIET)))
    path = record_video(run, episodes=2)
    assert path.read_text() == "52" and len(Filmed.made) == 1  # 25 steps and a reset, twice


class Tag(EchoAgents):
    """Three chasers, and one who sees something else."""

    def __init__(self) -> None:
        super().__init__(4, steady=True)

    def observation_space(self, agent: str) -> Any:
        wide = spaces.Box(-1, 1e9, (7,), np.float32)
        return wide if agent == "agent_3" else super().observation_space(agent)

    def observe(self, agent: str) -> Any:
        seen = super().observe(agent)
        return np.append(seen, np.float32(0)) if agent == "agent_3" else seen


@pytest.mark.parametrize(("env", "team"), [(Tag, ["agent_3"]), (EchoAgents, ["agent_1"])], ids=["roles", "odd number"])
def test_unequal_roles_are_told_unless_somebody_chose_them(env: Any, team: list[str]) -> None:
    agents = ps.check_env(env).agents
    assert agents is not None
    pair = Side("random"), Side("other", script=lambda obs: 0)
    with pytest.warns(
        UserWarning, match=re.escape("the sides play unequal roles: one ['agent_0', 'agent_2'], ")
    ) as said:
        play(pair, as_env_config(env), agents, 2)
    assert f"--seats {team[0]})" in str(said[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(pair, as_env_config(env), agents, 2, first=team)
