"""Settings of every algorithm: each number has a limit, declared once, and is checked at construction."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from dataclasses import dataclass
from typing import Any

import pytest

import penstock as ps
from penstock.algos import ALGOS, find_algo
from penstock.algos.self_play import SelfPlay
from penstock.core.errors import ConfigError
from penstock.core.limits import _limits  # pyright: ignore[reportPrivateUsage]
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.learn.settings import MinibatchSettings, OffPolicySettings, Settings

CLASSES = {**{name: find_algo(name) for name in ALGOS}, "replay": ps.ReplaySettings, "net": ps.Net}
SPEC = EnvSpec(LeafSpec("box", (3,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))


def holds_numbers(hint: Any) -> bool:
    parts = (hint, *typing.get_args(hint))
    return any(part is int or part is float for part in parts) and bool not in parts


NUMBERS = {
    name: [field.name for field in dataclasses.fields(cls) if holds_numbers(typing.get_type_hints(cls)[field.name])]
    for name, cls in CLASSES.items()
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_of_every_algorithm_has_a_limit(name: str) -> None:
    assert sum(map(len, NUMBERS.values())) > 120
    cls, limits = CLASSES[name], _limits(CLASSES[name])
    for field in NUMBERS[name]:
        limit, wide = limits[field], typing.get_type_hints(cls)[field]
        bad: Any = limit.low - 1.0 if limit.low > -1e300 else float("inf")
        if int in {wide, *typing.get_args(wide)} and float not in {wide, *typing.get_args(wide)}:
            bad = int(bad)
        bad = (bad,) if typing.get_origin(wide) is tuple else bad
        prefix = f"{name}." if name in ("replay", "net") else ""
        with pytest.raises(ConfigError) as error:
            cls(**{field: bad})
        assert str(error.value) == f"{prefix}{field}={bad}; expected {limit}"


@pytest.mark.parametrize("name", ALGOS)
def test_defaults_lie_inside_and_the_class_says_what_it_is(name: str) -> None:
    cls = CLASSES[name]
    made = cls()
    assert isinstance(made, SelfPlay if name == "self-play" else Settings) and made == cls()
    assert inspect.getdoc(cls) and "functions" not in {f.name for f in dataclasses.fields(cls)}
    for base in (Settings, MinibatchSettings, OffPolicySettings):
        if issubclass(cls, base):
            assert {f.name for f in dataclasses.fields(base)} <= {f.name for f in dataclasses.fields(cls)}


def test_a_subclass_of_a_users_own_changes_what_it_names() -> None:
    seen: list[Any] = []

    def loss(agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
        seen.append(cfg)
        return plain(agent, x, cfg)

    plain = ps.DQN.functions.loss

    @dataclass(frozen=True)
    class Mine(ps.DQN):
        functions = ps.DQN.functions._replace(loss=loss)
        learning_starts: int = 0
        omega: float = 2.0

    cfg = Mine(batch_size=4, replay=ps.ReplaySettings(capacity=100))
    sampler = ps.SerialSampler(T=8, B=2).build("CartPole-v1", 0)
    policy = cfg.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    ps.train_one_step(policy, sampler.obtain_samples(0)[0])
    sampler.shutdown()
    assert seen and seen[0].omega == 2.0
    with pytest.raises(ConfigError, match=r"^learning_starts=-1; expected 0 or more$"):
        Mine(learning_starts=-1)


@pytest.mark.parametrize("name", ["dqn", "sac", "discrete-sac", "td3", "ddpg"])
def test_updates_follow_each_step_where_there_is_one_slot(name: str) -> None:
    cls: Any = CLASSES[name]
    assert cls().batch == (1, 1)


def test_passes_and_minibatches_reach_the_policy() -> None:
    for cfg, expected in ((ps.PPO(epochs=3, minibatch=7), (3, 7)), (ps.A2C(), (1, None)), (ps.BC(), (1, 256))):
        policy = cfg.build(SPEC)
        assert (policy.epochs, policy.minibatch) == expected
        assert policy.replay_schedule is None
