"""Options of reset reach every reset, and slots every factory that asks, wherever environments are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from penstock.envs.toy.agents import EchoAgents
from penstock.run.trainer import Trainer

PAIR = gym.spaces.Box(-99, 99, (2,), np.float32)


class Told(gym.Env[Any, Any]):
    """Shows the option `level` and its slot, and pays its slot; an episode has three steps."""

    observation_space, action_space = PAIR, gym.spaces.Discrete(2)

    def __init__(self, slot: int = 50) -> None:
        self.slot = slot

    def seen(self) -> Any:
        return np.array([self.level, self.slot], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.level = 0, (options or {}).pop("level", -1)  # it may keep what it is given
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return (
            self.seen(),
            float(self.slot) * (self.t == 1) + self.level * 1000.0 * (self.t == 2),
            self.t == 3,
            False,
            {},
        )


class ToldAgents(EchoAgents):
    """Two agents that remember what their environment was told."""

    told: ClassVar[list[Any]] = []

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.told.append(options)
        return super().reset(seed)


def several() -> Any:
    return SyncVectorEnv([Told] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)


def several_apart() -> Any:
    return AsyncVectorEnv([Told] * 2, autoreset_mode=AutoresetMode.NEXT_STEP)


def batch_and_returns(sampler: Any, config: EnvConfig) -> tuple[Any, list[float]]:
    live = sampler.build(config, seed=0)
    try:
        live.initialize(ps.PPO().build(live.spec).agent)
        return live.obtain_samples(0)[0].copy(), live.evaluate_agent(0, 4).return_.tolist()
    finally:
        live.shutdown()


@pytest.mark.parametrize(
    "sampler",
    [
        ps.SerialSampler(T=9, B=3),
        pytest.param(ps.CpuSampler(T=9, B=3, workers=2), marks=pytest.mark.slow),
        pytest.param(ps.GpuSampler(T=9, B=3, workers=2), marks=pytest.mark.slow),
        pytest.param(ps.AsyncSampler(ps.SerialSampler(T=9, B=3)), marks=pytest.mark.slow),
        pytest.param(ps.RunnerSampler(inner=ps.SerialSampler(T=9, B=1), runners=3, backend="processes"), marks=pytest.mark.slow),
    ],
    ids=lambda sampler: type(sampler).__name__,
)  # fmt: skip
def test_every_reset_has_the_options_and_every_factory_its_slot(sampler: Any) -> None:
    batch, returns = batch_and_returns(sampler, EnvConfig(Told, options={"level": 3}))
    assert (batch.obs[..., 0] == 3).all()
    assert (batch.obs[..., 1] == [0, 1, 2]).all()
    assert sorted(returns) == [2996, 2997, 2998, 2999]  # evaluation slots are -1 to -4


def test_a_slot_that_is_given_stays_and_ids_and_partials_are_asked_too() -> None:
    entry: Any = Told
    gym.register("Told-v3", entry_point=entry)
    try:
        assert EnvConfig("Told-v3").make(7).unwrapped.slot == 7  # pyright: ignore
        assert EnvConfig(f"{__name__}:Told").make(7).slot == 7  # pyright: ignore
        assert EnvConfig(Told, {"slot": 4}).make(7).slot == 4  # pyright: ignore
        assert EnvConfig("CartPole-v1").make(7).spec is not None
    finally:
        del gym.registry["Told-v3"]


def test_options_reach_many_agents_and_batches() -> None:
    ToldAgents.told.clear()
    algo = ps.Policies({"x": ps.PPO()})
    live = ps.SerialSampler(T=8, B=1).build(algo.seat(EnvConfig(ToldAgents, options={"level": 3})), seed=0)
    live.initialize(algo.build(live.specs).agents)
    live.obtain_samples(0)
    live.evaluate_agent(0, 1)
    live.shutdown()
    assert len(ToldAgents.told) >= 4 and all(options == {"level": 3} for options in ToldAgents.told)
    live = ps.SerialSampler(T=9, B=3).build(EnvConfig(several, options={"level": 3}), seed=0)
    live.initialize(ps.PPO().build(live.spec).agent)
    assert (live.obtain_samples(0)[0].obs[..., 0] == 3).all()
    live.shutdown()


@pytest.mark.slow
def test_a_batch_of_processes_cannot_be_given_options() -> None:
    with pytest.raises(
        ConfigError, match="AsyncVectorEnv, which resets its environments without options; use vectorized=sync"
    ):
        EnvConfig(several_apart, options={"level": 3}).make()


def test_options_of_a_caller_come_on_top_and_what_is_no_dict_is_refused() -> None:
    env: Any = EnvConfig(Told, options={"level": 3}).make()
    assert env.reset(seed=1, options={"level": 5})[0].tolist() == [5, 0]
    assert env.reset(seed=1)[0].tolist() == [3, 0]
    with pytest.raises(ConfigError, match="expected a dict for reset"):
        EnvConfig(Told, options=[3])  # pyright: ignore[reportArgumentType]


def test_a_run_keeps_its_options(tmp_path: Path) -> None:
    run = ps.RunConfig(steps=32, dir=tmp_path / "a", progress="off", eval_episodes=4)
    exp = ps.Experiment(Told, ps.PPO(), ps.SerialSampler(T=8, B=2), run, env_options={"level": 3})
    assert ps.train(exp).metrics["eval/mean_reward"] == 2997.5
    stored = json.loads((tmp_path / "a" / "config.json").read_text())
    assert stored["experiment"]["env_options"] == {"level": 3}
    assert sorted(ps.evaluate(tmp_path / "a", episodes=4).return_) == [2996, 2997, 2998, 2999]
    found = ps.evaluate(tmp_path / "a", episodes=1, env_options={"level": 5})
    assert found.return_ == ps.evaluate(ps.load(tmp_path / "a"), Told, 1, env_options={"level": 5}).return_ == 4999


class Ports(Told):
    """Holds its slot as one would hold a port: two that live at a time must not have the same."""

    held: ClassVar[set[int]] = set()
    seen_slots: ClassVar[set[int]] = set()

    def __init__(self, slot: int) -> None:
        assert slot not in self.held, f"slot {slot} is taken"
        super().__init__(slot)
        self.held.add(slot)
        self.seen_slots.add(slot)

    def close(self) -> None:
        self.held.discard(self.slot)


def test_no_two_instances_that_live_at_a_time_have_the_same_slot() -> None:
    run = ps.RunConfig(steps=64, progress="off", eval_episodes=3, eval_interval=32)
    exp = ps.Experiment(Ports, ps.PPO(), ps.SerialSampler(T=8, B=2), run, eval_env=lambda slot: Ports(slot))
    trainer = Trainer(exp)
    while trainer.env_steps < 64:
        trainer.train()
        trainer.evaluate()
    trainer.stop()
    trainer.evaluate()
    assert Ports.seen_slots == {0, 1, 2, -1, -2, -3} and not Ports.held
