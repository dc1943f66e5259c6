"""`resume` takes again what could not be stored with a run, and refuses anything else than what was stored."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import penstock as ps
from penstock.core.config import to_plain
from penstock.core.errors import ConfigError
from penstock.envs.toy import TeamBits
from penstock.run.entry import new_run
from penstock.run.files.stored_experiment import CONFIG
from penstock.run.files.supplied_arguments import Supplied, require_storable

NET = ps.Net(hidden=(4,))
PPO = ps.PPO(minibatch=16, epochs=1, net=NET)
BITS = "penstock.envs.toy:TeamBits"
MAPPING = {"agent_0": "a", "agent_1": "b"}


def short(length: int = 3) -> TeamBits:
    return TeamBits(length=length)


def other(length: int = 3) -> TeamBits:
    return TeamBits(length=length)


def agent(spec: Any, settings: Any, width: Any = 0) -> Any:
    return ps.actor_critic(spec, settings)


def shifted(agent: str, episode: int, seed: int, unused: Any = None) -> str:
    return "ab"[(int(agent[-1]) + episode) % 2]


def wrapped(env: Any, by: Any = None) -> Any:
    return env


def two(mapping: Any = None) -> ps.Policies:
    return ps.Policies({"a": PPO, "b": PPO}, mapping or MAPPING, {"a": 1, "b": 1})


def experiment(run: Path, algo: Any = PPO, env: Any = BITS, **more: Any) -> Any:
    config = ps.RunConfig(steps=32, dir=str(run), eval_episodes=0, progress="off")
    return ps.Experiment(env, algo, ps.SerialSampler(T=4, B=2), config, **more)


HERE = "tests.run.files.test_supplied_arguments"
CHANGED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"algo": two()}, {"policy_mapping_fn": {"agent_0": "b", "agent_1": "a"}}, "policy_mapping_fn={'agent_0': 'b'"),
    ({"algo": two(shifted)}, {"policy_mapping_fn": MAPPING}, f"and '{HERE}:shifted' was stored"),
    ({"algo": two()}, {"policy_mapping_fn": lambda *asked: "a"}, "and {'agent_0': 'a', 'agent_1': 'b'} was stored"),
    ({"algo": PPO}, {"agent": agent}, "and 'penstock.agents.actor_critic:actor_critic' was stored"),
    ({}, {"env": short}, f"env='{HERE}:short' is given, and '{BITS}' was stored"),
    ({}, {"env": f"{HERE}:short"}, f"env='{HERE}:short' is given"),
    ({}, {"env": lambda: short()}, "env='<lambda>' is given"),
    ({"env": ps.EnvConfig(short, {"length": 3})}, {"env": ps.EnvConfig(short, {"length": 4})}, "env.kwargs="),
    ({"env": short, "env_kwargs": {"length": 4}}, {"env": ps.EnvConfig(short)}, "env.kwargs={} is given, and"),
    ({"env": short}, {"env": ps.EnvConfig(short, wrappers=(wrapped,))}, "env.wrappers="),
    ({"env": ps.EnvConfig(short, wrappers=(lambda e: e,))}, {"env": ps.EnvConfig(other, wrappers=(wrapped,))}, "env="),
    ({"env": ps.EnvConfig(short, wrappers=(wrapped,))}, {"env": short}, "env.wrappers=[] is given"),
    ({}, {"eval_env": short}, "eval_env=.* is given, and None was stored"),
    ({"env": partial(short, length=4)}, {"env": partial(short, length=5)}, r"env=.*5.* is given, and .*4.* was stored"),
    ({"env": partial(short, length=4)}, {"env": short}, f"env='{HERE}:short' is given"),
    ({"algo": ps.override(PPO, {"agent": partial(agent, width=1)})}, {"agent": partial(agent, width=2)}, "agent="),
    ({"env": ps.EnvConfig(short, wrappers=(partial(wrapped, by=1),))},
     {"env": ps.EnvConfig(short, wrappers=(f"{HERE}:wrapped(by=2)",))}, r"env.wrappers=.*by=2.*by=1"),
    ({"eval_env": short}, {"eval_env": other}, f"eval_env='{HERE}:other' is given, and '{HERE}:short' was stored"),
    ({"eval_env": short, "eval_env_kwargs": {"length": 5}}, {"eval_env": ps.EnvConfig(short)}, "eval_env.kwargs={}"),
]  # fmt: skip
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"algo": two()}, {"policy_mapping_fn": dict(MAPPING)}),
    ({"algo": two(shifted)}, {"policy_mapping_fn": shifted}),
    ({"algo": two(shifted)}, {"policy_mapping_fn": f"{HERE}:shifted"}),
    ({"algo": two(lambda *asked: shifted(*asked))}, {"policy_mapping_fn": shifted}),
    ({"algo": ps.override(PPO, {"agent": agent})}, {"agent": agent}),
    ({"algo": ps.override(PPO, {"agent": lambda *given: agent(*given)})}, {"agent": agent}),
    ({}, {"env": BITS}),
    ({}, {"env": TeamBits}),
    ({"env": short}, {"env": f"{HERE}:short"}),
    ({"env": short, "env_kwargs": {"length": 4}}, {"env": short}),
    ({"env": short, "env_kwargs": {"length": 4}}, {"env": ps.EnvConfig(short, {"length": 4})}),
    ({"env": lambda length: short(length), "env_kwargs": {"length": 4}}, {"env": lambda length: short(length)}),
    ({"env": lambda: short(4)}, {"env": ps.EnvConfig(short, {"length": 4})}),
    ({"env": ps.EnvConfig(short, wrappers=(lambda env: env,))}, {"env": ps.EnvConfig(short, wrappers=(wrapped,))}),
    ({"wrappers": (lambda env: env,), "env": short}, {"env": ps.EnvConfig(short, wrappers=(wrapped,))}),
    ({"env": partial(short, length=4)}, {"env": partial(short, length=4)}),
    ({"env": partial(lambda length: short(length), 4)}, {"env": ps.EnvConfig(short, {"length": 4})}),
    ({"algo": ps.override(PPO, {"agent": partial(agent, width=1)})}, {"agent": partial(agent, width=1)}),
    ({"algo": ps.override(PPO, {"agent": partial(agent, width=len)})}, {"agent": partial(agent, width=len)}),
    ({"env": ps.EnvConfig(short, wrappers=(partial(wrapped, by=1),))},
     {"env": ps.EnvConfig(short, wrappers=((f"{HERE}:wrapped", {"by": 1}),))}),
    ({"env": short, "wrappers": (partial(wrapped, by=lambda: 1),)},
     {"env": ps.EnvConfig(short, wrappers=(partial(wrapped, by=lambda: 1),))}),
    ({"eval_env": lambda: short(5)}, {"eval_env": ps.EnvConfig(short, {"length": 5})}),
    ({"eval_env": short, "eval_env_kwargs": {"length": 5}}, {"eval_env": short}),
]  # fmt: skip


def stored(settings: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(to_plain(experiment(Path("run"), **settings))))


@pytest.mark.parametrize(("settings", "again", "said"), CHANGED)
def test_what_was_stored_and_is_given_otherwise_is_refused(settings: Any, again: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("{}", r"\{\}").replace("[]", r"\[\]")) as caught:
        Supplied(**again).require_same(stored(settings))
    assert "leave" in str(caught.value) and "init=RUN" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("settings", "again"), SAME)
def test_what_was_stored_or_could_not_be_may_be_given_again(settings: Any, again: Any) -> None:
    Supplied(**again).require_same(stored(settings))


def test_runs_of_before_had_fewer_settings() -> None:
    plain = stored({"env": ps.EnvConfig(short)})
    del plain["env"]["options"]
    Supplied(env=ps.EnvConfig(short)).require_same(plain)
    plain = stored({"env": short})
    del plain["env_options"]
    Supplied(env=ps.EnvConfig(short)).require_same(plain)


@pytest.mark.parametrize(("settings", "again", "said"), [CHANGED[0], CHANGED[3], CHANGED[4], CHANGED[12]])
def test_a_run_that_is_refused_stays_as_it_was(settings: Any, again: Any, said: str, tmp_path: Path) -> None:
    ps.train(experiment(tmp_path / "run", **settings))
    before = (tmp_path / "run" / CONFIG).read_bytes()
    with pytest.raises(ConfigError, match=rf"config\.json: {next(iter(again))}="):
        ps.resume(tmp_path / "run", {"run.steps": 64}, **again)
    with pytest.raises(ConfigError, match=rf"config\.json: {next(iter(again))}="):
        ps.Run.resume(tmp_path / "run", {"run.steps": 64}, **again).__enter__()
    if again.keys() <= {"agent", "policy_mapping_fn"}:
        with pytest.raises(ConfigError, match=rf"config\.json: {next(iter(again))}=.*was stored.*leave"):
            ps.load(tmp_path / "run", **again)
    assert (tmp_path / "run" / CONFIG).read_bytes() == before
    ps.resume(tmp_path / "run", {"run.steps": 64})


@dataclass(frozen=True)
class Unnamed(ps.PPO):
    """An algorithm of which the test says that it is of a script."""


LOST: list[tuple[dict[str, Any], str, str]] = [
    ({"env": lambda: short()}, "^env=<lambda>", r"ps\.resume\(run, env=\.\.\.\), or move it to the top of a module"),
    ({"env": short, "wrappers": (wrapped, partial(wrapped, by=lambda: 1))}, r"wrappers\[1\]\.kwargs\.by=<lambda>",
     r"env=ps\.EnvConfig\("),
    ({"env": ps.EnvConfig(short, wrappers=(lambda env: env,))}, r"env\.wrappers\[0\]=<lambda>", r"env=ps\.EnvConfig\("),
    ({"eval_env": lambda: short()}, "eval_env=<lambda>", r"\(run, eval_env=\.\.\.\)"),
    ({"algo": ps.override(PPO, {"agent": lambda *given: agent(*given)})}, "algo.agent=<lambda>", r"agent=\.\.\.\)"),
    ({"algo": two(partial(shifted, unused=lambda: 1))}, r"algo\.policy_mapping_fn\.kwargs\.unused=<lambda>",
     r"policy_mapping_fn=\.\.\.\)"),
    ({"algo": Unnamed(minibatch=16, epochs=1, net=NET)}, "algo=a class that no module names", "will lack it. Move it"),
    ({"env": lambda: short(), "wrappers": (lambda env: env,), "eval_env": lambda: short()},
     "^env=<lambda>, wrappers", r"\(run, env=ps\.EnvConfig\(\.\.\.\), eval_env=\.\.\.\)"),
    ({"env": lambda: short(), "eval_env": lambda: short()}, "env=<lambda>, eval_env=<lambda>", r"env=\.\.\., eval_env="),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "said", "cure"), LOST)
def test_a_run_says_before_it_begins_what_it_cannot_store(
    settings: Any, said: str, cure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Unnamed, "__module__", "__main__")
    exp = experiment(tmp_path / "run", **settings)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with new_run(exp, None, False):
            found = [str(w.message) for w in told if "cannot be stored with the run" in str(w.message)]
    assert len(found) == 1
    assert re.search(said, found[0])
    assert re.search(cure, found[0])
    assert "\n" not in found[0]
    with pytest.raises(ConfigError, match=f"{said}.* cannot be stored, and why; move it .*functools.partial"):
        require_storable(exp, "why")


def test_what_can_be_stored_is_no_warning(tmp_path: Path) -> None:
    exp = experiment(tmp_path / "run", env=partial(short, length=4), wrappers=(partial(wrapped, by=(1, len)),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.train(exp)
        ps.resume(tmp_path / "run", {"run.steps": 64})


def test_an_evaluation_environment_given_again_keeps_its_arguments(tmp_path: Path) -> None:
    def make(length: int) -> Any:
        return gym.wrappers.TimeLimit(gym.make("CartPole-v1"), length)

    exp = experiment(tmp_path / "run", env="CartPole-v1", eval_env=lambda length: make(length))
    run = replace(exp.run, eval_episodes=2)
    ps.train(replace(exp, run=run, eval_env_kwargs={"length": 3}))
    found = ps.resume(tmp_path / "run", {"run.steps": 64}, eval_env=lambda length: make(length))
    assert found.metrics["eval/mean_ep_length"] == 3
