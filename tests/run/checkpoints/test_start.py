"""A new run's policies start from those of others, each from its own; what does not fit is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import TeamBits
from penstock.envs.toy.base import box
from penstock.learn.policy_set import parameters as all_parameters

NET = ps.Net(hidden=(4,))
PPO = ps.PPO(minibatch=32, epochs=1, net=NET)
BITS, NIM = "penstock.envs.toy:TeamBits", "penstock.envs.toy:Nim"
SAMPLER = ps.SerialSampler(T=8, B=4)


class WideBits(TeamBits):
    def __init__(self) -> None:
        super().__init__()
        self._seen = box(-1, 1, 3)

    def observe(self, agent: str) -> Any:
        return super().observe(agent).repeat(3)


class MoreMoves(TeamBits):
    def __init__(self) -> None:
        super().__init__()
        self._moves = spaces.Discrete(3)


def policies(first: str, second: str, algo: Any = PPO, **more: Any) -> ps.Policies:
    return ps.Policies({first: algo, second: algo}, {"agent_0": first, "agent_1": second}, **more)


AC = policies("a", "c", policies_to_train=("a",))
"""So that what "c" starts from is what it ends with."""


def experiment(run: Path, algo: Any, env: Any = BITS, sampler: Any = SAMPLER, seed: int = 2, **run_: Any) -> Any:
    given: dict[str, Any] = {"steps": 32, "eval_episodes": 0, **run_}
    config = ps.RunConfig(dir=str(run), seed=seed, progress="off", **given)
    return ps.Experiment(env, algo, sampler, config)


def parameters(run: Path, policy: str) -> dict[str, torch.Tensor]:
    return dict(ps.load(run)[policy].agent.state_dict())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two policies, of a plain algorithm, of one agent, and of a game."""
    folder = tmp_path_factory.mktemp("runs")
    ps.train(experiment(folder / "two", policies("a", "b"), seed=1))
    ps.train(experiment(folder / "plain", PPO, seed=3))
    ps.train(experiment(folder / "alone", PPO, "CartPole-v1", seed=4))
    ps.train(experiment(folder / "game", PPO, NIM, seed=5))
    ps.train(experiment(folder / "selves", ps.SelfPlay(PPO), NIM, seed=6))
    return folder


def test_each_policy_starts_from_its_own_and_others_fresh(runs: Path, tmp_path: Path) -> None:
    fresh = ps.train(experiment(tmp_path / "fresh", AC)).run_dir
    ps.train(experiment(tmp_path / "c", AC), init={"c": (runs / "two", "b")})
    ps.train(experiment(tmp_path / "both", AC), init={"c": str(runs / "plain"), "a": str(runs / "two")})
    assert same(parameters(tmp_path / "c", "c"), parameters(runs / "two", "b"))
    assert same(parameters(tmp_path / "c", "a"), parameters(fresh, "a"))
    assert same(parameters(tmp_path / "both", "c"), parameters(runs / "plain", "shared"))
    frozen = policies("a", "c", policies_to_train=("c",))
    ps.train(experiment(tmp_path / "frozen", frozen), init={"a": runs / "two"})
    assert same(parameters(tmp_path / "frozen", "a"), parameters(runs / "two", "a"))
    assert not same(parameters(tmp_path / "both", "a"), parameters(fresh, "a"))


@pytest.mark.parametrize("algo", [PPO, ps.Policies({"x": PPO})], ids=["plain", "one"])
def test_the_only_policy_starts_from_one_of_several(algo: Any, runs: Path, tmp_path: Path) -> None:
    with ps.Trainer(experiment(tmp_path / "run", algo), init=None) as fresh:
        name = next(iter(fresh.policy))
    for n, init in enumerate([(runs / "two", "b"), {name: (str(runs / "two"), "b")}]):
        with ps.Run(experiment(tmp_path / str(n), algo), init=init) as run:
            assert same(dict(run.policy[name].agent.state_dict()), parameters(runs / "two", "b"))
            run.stop()


def test_a_run_of_one_agent_starts_one_policy_of_several_and_the_other_way_round(runs: Path, tmp_path: Path) -> None:
    many = ps.Policies({"x": PPO})
    ps.train(experiment(tmp_path / "many", many, "CartPole-v1"), init={"x": str(runs / "alone")})
    with ps.Run(experiment(tmp_path / "one", PPO, "CartPole-v1"), init=(tmp_path / "many", "x")) as run:
        assert same(dict(run.policy.agent.state_dict()), dict(ps.load(tmp_path / "many").agent.state_dict()))
        run.stop()


@pytest.mark.parametrize("init", ["game", ("game", "shared"), {"main": "game"}, {"main": ("selves", "main")}])
def test_self_play_starts_from_a_run_of_one_policy(init: Any, runs: Path, tmp_path: Path) -> None:
    def located(x: Any) -> Any:
        return (str(runs / x[0]), x[1]) if isinstance(x, tuple) else str(runs / x)

    given = {name: located(x) for name, x in init.items()} if isinstance(init, dict) else located(init)
    with ps.Run(experiment(tmp_path / "run", ps.SelfPlay(PPO), NIM), init=given) as run:
        source = parameters(runs / "selves", "main") if "selves" in str(init) else parameters(runs / "game", "shared")
        assert same(dict(run.policy["main"].agent.state_dict()), source)
        opponent: Any = run.policy["opponent"].agent
        assert same(dict(opponent.members[-1].state_dict()), source)  # whom it plays until a self is frozen
        assert int(opponent.played[1]) == 0
        run.stop()


def test_self_play_goes_on_from_self_play_with_its_pool(runs: Path, tmp_path: Path) -> None:
    with ps.Run(experiment(tmp_path / "run", ps.SelfPlay(PPO), NIM), init=runs / "selves") as run:
        for name in ("main", "opponent"):
            assert same(dict(run.policy[name].agent.state_dict()), parameters(runs / "selves", name))
        run.stop()


def begun(exp: Any, init: Any) -> dict[str, torch.Tensor]:
    """Parameters of the policies of a run that has just started."""
    with ps.Run(exp, init=init) as run:
        run.stop()
        return {name: x.clone() for name, x in all_parameters(run.policy).items()}


def test_parts_around_an_algorithm_begin_anew_or_are_left_out(runs: Path, tmp_path: Path) -> None:
    """RND here; GAIL's discriminator is another."""
    novel = replace(PPO, rnd=ps.RND(features=4, net=NET))
    ps.train(experiment(tmp_path / "novel", novel, "CartPole-v1"))
    found = dict(ps.load(tmp_path / "novel").agent.state_dict())
    plain = {name: x for name, x in found.items() if not name.startswith("rnd.")}
    assert same(begun(experiment(tmp_path / "again", novel, "CartPole-v1"), tmp_path / "novel"), found)
    by_name: Any = {"x": str(tmp_path / "novel")}
    for n, (algo, init) in enumerate([(PPO, tmp_path / "novel"), (ps.Policies({"x": PPO}), by_name)]):
        with pytest.warns(UserWarning, match=r"init=.*novel.* leaves out rnd, which is of that run alone"):
            state = begun(experiment(tmp_path / str(n), algo, "CartPole-v1"), init)
        assert same(state, plain)
    state = begun(experiment(tmp_path / "begun", novel, "CartPole-v1"), runs / "alone")
    fresh = novel.build(ps.load(tmp_path / "novel").spec, seed=2).agent.state_dict()
    fresh |= ps.load(runs / "alone").agent.state_dict()
    assert same(state, dict(fresh))


def test_of_two_policies_each_leaves_out_the_parts_that_it_does_not_have(tmp_path: Path) -> None:
    novel = replace(PPO, rnd=ps.RND(features=4, net=NET))
    both, one = (replace(policies("a", "b"), algos={"a": algo, "b": novel}) for algo in (novel, PPO))
    ps.train(experiment(tmp_path / "both", both))
    with pytest.warns(UserWarning, match=r" leaves out a/rnd, which is of that run alone"):
        state = begun(experiment(tmp_path / "one", one), tmp_path / "both")
    found = all_parameters(ps.load(tmp_path / "both"))
    assert same(state, {name: x for name, x in found.items() if not name.startswith("a/rnd.")})


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["cpu", "async", "learners"])
def test_wherever_it_samples_and_learns_it_starts_there(place: str, runs: Path, tmp_path: Path) -> None:
    sampler: Any = {"cpu": ps.CpuSampler(T=8, B=4, workers=2), "async": ps.AsyncSerialSampler(SAMPLER, 0)}
    algo, init = policies("a", "c"), {"c": (runs / "two", "b")}
    ps.train(experiment(tmp_path / "serial", algo), init=init)
    more = {"learners": 2} if place == "learners" else {}
    ps.train(experiment(tmp_path / "other", algo, sampler=sampler.get(place, SAMPLER), **more), init=init)
    for name in "ac":
        one, other = parameters(tmp_path / "serial", name), parameters(tmp_path / "other", name)
        for key, x in one.items():
            torch.testing.assert_close(other[key], x, rtol=0, atol=1e-6 if more else 0)


def test_what_does_not_fit_is_one_line_that_names_the_policy(runs: Path, tmp_path: Path) -> None:
    two = str(runs / "two")

    def refused(init: Any, algo: Any = AC, env: Any = BITS) -> str:
        with pytest.raises((CheckpointError, ConfigError)) as caught:
            ps.train(experiment(tmp_path / "run", algo, env), init=init)
        assert not (tmp_path / "run").exists()
        assert "\n" not in str(caught.value)
        return f"{type(caught.value).__name__}: {caught.value}"

    said = refused({"c": (two, "b")}, env=WideBits)
    assert said == (
        f"CheckpointError: init: policy 'c' cannot start from 'b' of {two}, whose observations are box[1] float32; "
        "expected box[3] float32"
    )
    assert "policy 'a' cannot start from" in refused({"a": str(runs / "alone")})
    said = refused({"a": two}, env=MoreMoves)
    assert "whose actions are discrete(2) int64; expected discrete(3) int64" in said
    wide = policies("a", "c", ps.PPO(net=ps.Net(hidden=(5,))))
    said = refused({"c": (two, "b")}, wide)
    assert said.startswith(f"CheckpointError: init: policy 'c', PPO, cannot start from 'b' of {two}, PPO (a preset")
    assert "[4, 1] there and [5, 1] here" in said
    assert "init names the policy 'd', which is none here; " in refused({"d": two})
    assert "has no policy 'c'; it has ['a', 'b']: name one" in refused({"c": two}) and "--init c=" in refused(
        {"c": two}
    )
    assert "has no policy 'z'; it has ['a', 'b']" in refused((two, "z"), PPO)
    assert "is one policy, and here are ['a', 'c']" in refused((two, "b"))
    assert "stored, and here are the policies ['a', 'c']" in refused(two) and "--init c=runs/y:b" in refused(two)
    assert "no run directory" in refused({"c": str(tmp_path / "nothing")})
    assert "expected a run, 'runs/a'" in refused({"c": 3})


def test_the_command_line(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["train", "tests.run.checkpoints.test_start:AC", "--env", BITS, "--sampler.T", "8", "--sampler.B", "4"]
    line += ["--run.steps", "32", "--run.progress", "off", "--run.eval-episodes", "0"]
    init = ["--init", f"c={runs / 'two'}:b", "--init", f"a={runs / 'plain'}"]
    assert main([*line, "--run.dir", str(tmp_path / "run"), *init]) == 0
    assert same(parameters(tmp_path / "run", "c"), parameters(runs / "two", "b"))
    capsys.readouterr()
    assert main([*line, "--run.dir", str(tmp_path / "bad"), "--init", f"d={runs / 'two'}:b"]) == 2
    assert "init names the policy 'd'" in capsys.readouterr().err
    assert main([*line, "--run.dir", str(tmp_path / "bad"), "--init", f"c={runs / 'two'}"]) == 2
    assert not (tmp_path / "bad").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_trials_and_sweeps_start_from_them_too(runs: Path, tmp_path: Path) -> None:
    init = {"c": (runs / "two", "b"), "a": runs / "plain"}
    exp = experiment(tmp_path / "none", AC)
    exp = ps.override(exp, {"run.dir": None})
    found = ps.tune(
        exp, {"algo.algos.a.lr": [1e-3, 1e-2]}, trials=2, scheduler="none", metric="time/total_timesteps",
        dir=tmp_path / "search", init=init,
    )  # fmt: skip
    assert [t.state for t in found.trials] == ["finished"] * 2
    for trial in found.trials:
        assert same(parameters(trial.run_dir, "c"), parameters(runs / "two", "b"))
    stored = json.loads((tmp_path / "search" / "study.json").read_text())["settings"]["init"]
    assert stored == {"c": [str(runs / "two"), "b"], "a": [str(runs / "plain"), ""]}
    again = ps.tune(
        exp, {"algo.algos.a.lr": [1e-3, 1e-2]}, trials=2, scheduler="none", metric="time/total_timesteps",
        dir=tmp_path / "search", init=init,
    )  # fmt: skip
    assert len(again.trials) == 2
    wide = policies("a", "c", ps.PPO(net=ps.Net(hidden=(5,))))
    with pytest.raises(CheckpointError, match=r"--init c=.*two:b --init a=.*does not suit these settings.*policy 'c'"):
        ps.tune(
            ps.override(exp, {"algo": wide}), {"algo.algos.a.lr": [1e-3, 1e-2]}, trials=2, scheduler="none",
            metric="time/total_timesteps", dir=tmp_path / "other", init=init,
        )  # fmt: skip
    line = ["launch", "tests.run.checkpoints.test_start:AC", "--env", BITS, "--sampler.T", "8", "--sampler.B", "4"]
    line += ["--run.steps", "32", "--run.eval-episodes", "0", "--seeds", "1", "--dir", str(tmp_path / "sweep")]
    assert main([*line, "--init", f"c={runs / 'two'}:b", "--init", f"a={runs / 'plain'}"]) == 0
    assert same(parameters(tmp_path / "sweep" / "s1", "c"), parameters(runs / "two", "b"))
