"""What simulators bring along: logs of their own, ages that can be set, and one simulation in a process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError, EnvContractError
from penstock.envs.make import EnvConfig
from penstock.tensor_envs import CartPole
from penstock.tensor_envs.logs import EnvLog
from penstock.tensor_envs.pool import TensorPool

LIMIT = 12
SMALL = ps.Net(hidden=(16,))


class Simulation(CartPole):
    """A CartPole that cannot fall, of which a process holds one; it logs its count of steps and its ages."""

    alive = 0
    opened: list[int | None] = []  # noqa: RUF012

    def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
        super().__init__(num_envs, device, LIMIT)
        if Simulation.alive:
            raise ConfigError("this process has a simulation")
        Simulation.alive += 1
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        Simulation.opened.append(seed)
        return super().reset(seed=seed)

    def advance(self, state: Any, action: torch.Tensor) -> Any:
        after, reward, _ = super().advance(state, action)
        return after * 0, reward, torch.zeros_like(reward, dtype=torch.bool)

    def step(self, actions: torch.Tensor) -> Any:
        self.steps += 1
        *answer, _ = super().step(actions)
        log = {"/steps": self.steps, "age": self._age, "Episode/none": torch.tensor(0.25)}
        return *answer, {"log": log if self.steps % 2 else {"age": self._age}}

    def set_ages(self, ages: torch.Tensor) -> None:
        self._age[:] = ages

    def close_extras(self, **_: Any) -> None:
        Simulation.alive -= 1


@pytest.fixture(autouse=True)
def none_alive() -> Any:
    Simulation.alive, Simulation.opened = 0, []
    yield
    assert not Simulation.alive


def built(T: int = 4, B: int = 8, env: Any = Simulation, **settings: Any) -> Any:
    sampler = ps.SerialSampler(T, B, **settings).build(EnvConfig(env), 3)
    sampler.initialize(ps.PPO(net=SMALL).build(sampler.spec, 0).agent)
    return sampler


def test_what_a_simulator_logs_is_averaged_over_the_batch() -> None:
    sampler = built()
    assert sampler.metrics() == {}
    sampler.obtain_samples(0)
    expected = {"env/steps": 2.0, "env/age": 2.5, "env/Episode/none": 0.25}
    assert sampler.metrics() == expected
    assert sampler.metrics() == expected
    for itr in (1, 2):
        sampler.obtain_samples(itr)
    assert sampler.metrics() == {"env/steps": 10.0, "env/age": 10.5, "env/Episode/none": 0.25}
    sampler.shutdown()


def test_a_log_leaves_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log, left = EnvLog(), []
    for name in ("tolist", "item", "__float__", "__bool__", "cpu", "numpy"):
        known = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, known=known, name=name: left.append(name) or known(x))
    for k in range(5):
        log.add({"a": torch.full((3,), float(k)), "b": torch.tensor(k), "c": k, "d": torch.tensor(True)}, "here")
    assert not left
    for _ in range(2):
        assert log.metrics() == {"env/a": 2.0, "env/b": 2.0, "env/c": 2.0, "env/d": 1.0}
    assert left == ["tolist"]


@pytest.mark.parametrize(
    ("log", "text"),
    [
        ([1.0], r"info\['log'\]: got list, expected a dict"),
        ({"a": "far"}, r"info\['log'\]\['a'\]: got str, expected a"),
    ],
)
def test_a_log_of_something_else_is_refused(log: Any, text: str) -> None:
    with pytest.raises(EnvContractError, match=f"here: {text}"):
        EnvLog().add(log, "here")


def test_random_ages_take_the_ends_of_episodes_apart() -> None:
    sampler = built(T=LIMIT, B=256, max_decorrelation_steps=LIMIT - 1)
    batch, _ = sampler.obtain_samples(0)
    ends = batch.truncated.int().argmax(0)
    assert {*ends.tolist()} == set(range(LIMIT - 1)) and batch.truncated.any(0).all()
    again = built(T=LIMIT, B=256, env=free(), max_decorrelation_steps=LIMIT - 1)
    assert torch.equal(again.obtain_samples(0)[0].truncated, batch.truncated)
    sampler.shutdown()
    again.shutdown()


def free() -> Any:
    """The same simulation, which does not count."""

    class Free(Simulation):
        def __init__(self, num_envs: int = 1, device: str = "cpu") -> None:
            CartPole.__init__(self, num_envs, device, LIMIT)
            self.steps = 0

        def close_extras(self, **_: Any) -> None:
            pass

    return Free


def test_episodes_of_evaluations_are_whole() -> None:
    sampler = built(B=8, env=free(), max_decorrelation_steps=LIMIT - 1)
    sampler.obtain_samples(0)
    assert (sampler.evaluate_agent(0, 4).length == LIMIT).all()
    sampler.shutdown()


def test_ages_of_an_environment_that_has_none_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_decorrelation_steps=3 with .*CartPole: it has no method set_ages"):
        ps.SerialSampler(4, 4, max_decorrelation_steps=3).build("penstock.tensor_envs:CartPole")


@pytest.mark.parametrize("recurrent", ["none", "lstm"])
def test_one_simulation_is_trained_and_evaluated_in(tmp_path: Any, recurrent: Any) -> None:
    run = ps.RunConfig(
        steps=400,
        eval_interval=128,
        eval_episodes=3,
        eval_slots=4,
        eval_in="training",
        dir=tmp_path / "run",
        progress="off",
    )
    net = ps.Net(hidden=(8,), recurrent=recurrent, recurrent_size=4)
    exp = ps.Experiment(Simulation, ps.PPO(net=net, epochs=1, minibatch=64), ps.SerialSampler(8, 8), run)
    before = False
    with ps.Run(exp) as steps:
        for it in steps:
            batch = it.batch
            if it.evaluation is not None:
                assert it.evaluation.length.tolist() == [LIMIT] * 8
            opened = bool(batch.first[0].all())
            assert opened == (it.itr == 1 or before), "training begins anew after each evaluation, and only then"
            before = it.evaluation is not None
    assert Simulation.alive == 0
    assert len(set(Simulation.opened)) == len(Simulation.opened), "every reset has a seed of its own"
    assert (ps.resume(tmp_path / "run", {"run.steps": 600}).metrics["eval/mean_reward"]) == LIMIT
    assert len(ps.evaluate(tmp_path / "run", episodes=3)) == 3


def test_the_end_of_an_evaluation_in_training_leaves_the_simulation_open() -> None:
    pool = TensorPool(EnvConfig(Simulation, eval_in_training=True), 0, 8)
    pool.for_evaluation(pool.evaluation_slots(2)).close()
    assert Simulation.alive == 1
    pool.close()


def test_evaluations_in_training_need_a_simulator() -> None:
    with pytest.raises(ConfigError, match=r"run\.eval_in='training' with CartPole-v1, whose evaluations have"):
        ps.train(
            ps.Experiment(
                "CartPole-v1", ps.PPO(), ps.SerialSampler(4, 4), ps.RunConfig(eval_in="training", progress="off")
            )
        )
    with pytest.raises(ConfigError, match=r"eval_in='training' with eval_workers=1"):
        ps.RunConfig(eval_in="training", eval_workers=1, eval_interval=100)
    with pytest.raises(ConfigError, match=r"eval_in='training' with an eval_env"):
        ps.Experiment(Simulation, ps.PPO(), run=ps.RunConfig(eval_in="training"), eval_env="CartPole-v1")
