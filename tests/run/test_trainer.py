from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, EnvWorkerError, LearnerError
from penstock.envs.toy import Constant, Counter
from penstock.run.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from penstock.run.plan import Plan
from penstock.run.trainer import Trainer
from penstock.samplers.episodes import Episodes

EXP = ps.Experiment(
    "CartPole-v1",
    ps.PPO(lr="linear(1e-3, 0)", epochs=2, minibatch=32),
    ps.SerialSampler(T=16, B=4),
    ps.RunConfig(steps=640, seed=2),
)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    with Trainer(EXP, tmp_path) as live:
        yield live


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in trainer.policy.agent.state_dict().items()}


def test_one_call_is_one_iteration(trainer: Trainer) -> None:
    before = parameters(trainer)
    metrics = trainer.train()
    assert trainer.itr == trainer.policy.version == 1
    assert trainer.env_steps == metrics["time/total_timesteps"]
    assert 0 < trainer.env_steps <= 64
    assert trainer.policy.updates == 4
    assert any(not torch.equal(before[name], x) for name, x in parameters(trainer).items())
    assert {"rollout/episodes", "train/value_loss", "time/fps", "time/sample_frac"} <= set(metrics)
    assert all(type(value) is float for value in metrics.values())
    assert 0.0 <= metrics["time/sample_frac"] <= 1.0


def test_only_valid_rows_count(trainer: Trainer) -> None:
    counted = 0
    for _ in range(5):
        trainer.train()
        counted += int(trainer.sampler.last_batch.valid.sum())
        assert trainer.env_steps == counted
    assert counted < 5 * 64
    assert trainer.episodes_seen == len(trainer.recent)


def test_the_window_holds_a_hundred_episodes() -> None:
    with Trainer(replace(EXP, env="penstock.envs.toy:Constant")) as trainer:
        for _ in range(6):
            metrics = trainer.train()
    assert len(trainer.recent) == 100
    assert metrics["rollout/episodes"] == trainer.episodes_seen > 100


def test_a_restored_run_is_not_finished(trainer: Trainer) -> None:
    """A gang that loses a rank as it saves its end goes on from an earlier checkpoint; the next is none of an end."""
    trainer.train()
    trainer.save()
    trainer.finished = True
    trainer.restore()
    trainer.train()
    assert load_checkpoint(trainer.save()).state["trainer"]["finished"] is False


def test_schedules_follow_the_steps(trainer: Trainer) -> None:
    trainer.train()
    assert trainer.policy.settings.lr == 1e-3
    steps = trainer.env_steps
    metrics = trainer.train()
    assert metrics["train/learning_rate"] == pytest.approx(1e-3 * (1 - steps / 640))
    assert trainer.policy.optimizers["all"].param_groups[0]["lr"] == metrics["train/learning_rate"]


@pytest.mark.parametrize(
    ("stop", "metrics", "full", "expected"),
    [
        ({}, {"a": 9.0}, True, False),
        ({"a": 1.0}, {"a": 1.0}, False, True),
        ({"a": 1.0}, {"a": 0.9}, False, False),
        ({"a": 1.0}, {}, True, False),
        ({"a": 1.0, "b": 2.0}, {"a": 5.0}, True, False),
        ({"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 2.0}, True, True),
        ({"rollout/ep_rew_mean": 1.0}, {"rollout/ep_rew_mean": 2.0}, False, False),
        ({"rollout/ep_rew_mean": 1.0}, {"rollout/ep_rew_mean": 2.0}, True, True),
        ({"a": 1.0}, {"a": math.nan}, True, False),
    ],
)
def test_stop_rules(stop: dict[str, float], metrics: dict[str, float], full: bool, expected: bool) -> None:
    with Trainer(replace(EXP, run=ps.RunConfig(stop=stop))) as trainer:
        n = 100 if full else 99
        trainer.recent = Episodes(np.ones(n), np.ones(n, np.int64), np.ones(n), np.zeros(n, np.int64), np.ones(n, bool))
        assert trainer.reached(metrics) is expected


def test_sampler_by_default_is_the_algorithms_batch() -> None:
    with Trainer(ps.Experiment("CartPole-v1", ps.A2C())) as trainer:
        assert trainer.sampler.batch_spec == ps.A2C().batch == (5, 16)
        assert trainer.exp.sampler == ps.SerialSampler(T=5, B=16)


def test_save_and_restore_go_on_as_if_nothing_had_happened(trainer: Trainer, tmp_path: Path) -> None:
    for _ in range(3):
        trainer.train()
    trainer.evaluate(2)
    trainer.save()
    with Trainer(EXP, tmp_path) as other:
        checkpoint = other.restore()
        assert checkpoint.step == trainer.env_steps == other.env_steps
        assert other.evaluations.best_score == trainer.evaluations.best_score
        assert other.elapsed_s == trainer.elapsed_s
        assert other.sampler.cut_slots == []
        for _ in range(3):
            a, b = trainer.train(), other.train()
            assert {k: v for k, v in a.items() if k[:5] != "time/"} == {k: v for k, v in b.items() if k[:5] != "time/"}
        (a, plays), (b, again) = trainer.evaluate(2), other.evaluate(2)
        assert a == b
        assert plays.return_.tolist() == again.return_.tolist()
    for name, x in parameters(trainer).items():
        assert torch.equal(x, parameters(other)[name]), name


def test_saving_does_not_disturb(trainer: Trainer, tmp_path: Path) -> None:
    with Trainer(EXP) as other:
        for _ in range(3):
            trainer.train()
            trainer.save()
            other.train()
        for name, x in parameters(trainer).items():
            assert torch.equal(x, parameters(other)[name]), name


def test_restore_into_other_networks(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train()
    trainer.save()
    with (
        Trainer(ps.override(EXP, {"algo.net.hidden": (5,)}), tmp_path) as other,
        pytest.raises(CheckpointError, match="do not fit"),
    ):
        other.restore()


def test_restore_into_another_number_of_slots(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train()
    trainer.save()
    exp = replace(EXP, sampler=ps.SerialSampler(T=16, B=5))
    with Trainer(exp, tmp_path) as other, pytest.raises(CheckpointError, match=r"4 slots.*B=5"):
        other.restore()


def test_restore_of_what_lacks_a_part(trainer: Trainer, tmp_path: Path) -> None:
    trainer.train()
    good = load_checkpoint(trainer.save())
    state = {key: value for key, value in good.state.items() if key != "sampler"}
    save_checkpoint(tmp_path / "other", 1, state, good.policy)
    with pytest.raises(CheckpointError, match=r"'sampler'.*another version"):
        trainer.restore(load_checkpoint(tmp_path / "other" / "checkpoints" / f"{1:012d}"))


def test_without_a_run_directory() -> None:
    with Trainer(EXP) as trainer:
        trainer.train()
        with pytest.raises(ConfigError, match="run_dir="):
            trainer.save()
        with pytest.raises(ConfigError, match="run_dir"):
            trainer.restore()


@pytest.mark.parametrize("device", ["cuda:99", "cuda", "tpu", "mps"])
def test_a_device_that_is_not_here(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(ConfigError, match=rf"run\.device='{device}' is not here"):
        Trainer(replace(EXP, run=ps.RunConfig(device=device)))
    with pytest.raises(ConfigError, match="is not here"):  # before an environment is looked at, which may need it
        Trainer(replace(EXP, env="CartPole-v7", run=ps.RunConfig(device=device)))


def test_init_takes_parameters(trainer: Trainer) -> None:
    trainer.train()
    with Trainer(EXP, init=parameters(trainer)) as other:
        for name, x in parameters(other).items():
            assert torch.equal(x, trainer.policy.agent.state_dict()[name])
    with pytest.raises(CheckpointError, match="do not fit"):
        Trainer(EXP, init={"nothing": torch.zeros(1)})


def test_an_environment_that_breaks_its_contract_is_refused_before_training() -> None:
    with pytest.raises(EnvWorkerError, match="nan"):
        Trainer(replace(EXP, env="penstock.envs.toy:FaultEnv", env_kwargs={"fault": "nan_obs"}))
    with pytest.raises(ConfigError, match="CartPole-v1"):
        Trainer(replace(EXP, env="CartPol-v1"))


def test_environments_are_closed_if_building_fails() -> None:
    made: list[Any] = []

    class Counted(Constant):
        closed = False

        def close(self) -> None:
            self.closed = True

    def make() -> Any:
        made.append(Counted())
        return made[-1]

    def agent(spec: Any, settings: Any) -> Any:
        built = ps.actor_critic(spec, settings)
        built.act = lambda *_: 1 / 0
        return built

    with pytest.raises(ZeroDivisionError):
        Trainer(replace(EXP, env=make, algo=ps.PPO(agent=agent)))
    assert len(made) > 4
    assert all(env.closed for env in made)


def test_evaluation_keeps_the_best_score(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trainer.evaluations.best_score == -math.inf
    metrics, episodes = trainer.evaluate(3)
    assert len(episodes) == 3
    assert metrics["eval/mean_reward"] == trainer.evaluations.best_score == episodes.mean_return
    assert metrics["eval/mean_ep_length"] == episodes.mean_length
    assert metrics["eval/std_reward"] == pytest.approx(float(episodes.return_.std()))
    monkeypatch.setattr(trainer.sampler, "evaluate_agent", lambda *_, **__: Episodes())
    metrics, _ = trainer.evaluate(3)
    assert metrics == {}
    assert trainer.evaluations.best_score == episodes.mean_return


def test_a_stop_metric_that_is_never_reported_is_refused() -> None:
    run = ps.RunConfig(steps=100_000, stop={"rollout/ep_rew_maen": 10.0})
    exp = ps.Experiment("CartPole-v1", ps.A2C(), ps.SerialSampler(T=16, B=4), run)
    with pytest.raises(
        ConfigError, match="'rollout/ep_rew_maen', which this run does not report; did you mean 'rollout/ep_rew_mean'"
    ):
        with ps.Trainer(exp) as trainer:
            while True:
                trainer.train()


@pytest.mark.parametrize(("own", "logged"), [(None, 0.5), (0.9, 0.9)])
def test_the_logged_discount_is_the_algorithms_unless_the_sampler_has_its_own(own: float | None, logged: float) -> None:
    sampler = ps.SerialSampler(T=8, B=1, discount=own)
    env = ps.EnvConfig(Counter, {"terminate_at": 5})
    with Trainer(ps.Experiment(env, ps.PPO(discount=0.5), sampler, ps.RunConfig(steps=99))) as trainer:
        metrics = trainer.train()
        assert trainer.recent.length.tolist() == [5]
        rewards = trainer.sampler.last_batch.reward[:5, 0]
        expected = sum(logged**k * float(r) for k, r in enumerate(rewards))
        assert metrics["rollout/ep_discounted_rew_mean"] == pytest.approx(expected)
        assert trainer.exp.sampler == sampler


def test_a_discount_is_given_to_the_sampler_inside() -> None:
    plan = Plan.of(ps.Experiment("CartPole-v1", ps.PPO(discount=0.5)))
    asynchronous = ps.AsyncSampler(ps.SerialSampler(T=4, B=1), depth=0)
    assert plan.with_sampler(asynchronous).sampler.inner == ps.SerialSampler(T=4, B=1, discount=0.5)
    assert plan.with_sampler(asynchronous).exp.sampler is asynchronous  # which is what a run stores
    own = ps.CpuSampler(discount=0.9)
    assert own.with_discount(0.5) is own
    assert ps.CpuSampler().with_discount(None) == ps.CpuSampler()


def test_rollout_metrics_follow_the_last_episodes(trainer: Trainer, tmp_path: Path) -> None:
    for _ in range(4):
        metrics = trainer.train()
        assert trainer.recent.metrics().items() <= metrics.items()
    assert metrics["rollout/ep_rew_max"] > metrics["rollout/ep_rew_min"] > 0
    trainer.save()
    with Trainer(EXP, tmp_path) as again:
        again.restore()
        assert again._rollout_metrics() == trainer.recent.metrics()


def test_a_device_out_of_memory_is_told_with_what_to_lower(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")

    needs = r"20 GiB\.; lower algo\.minibatch=32, sampler\.T=16, sampler\.B=4, algo\.net\.hidden=\(64, 64\), "
    monkeypatch.setattr(trainer.policy, "loss_fn", full)
    with pytest.raises(LearnerError, match=rf"^run\.device='cpu' has too little memory where the run samples.*{needs}"):
        trainer.train()
    monkeypatch.setattr(ps.PPO, "build", full)
    with pytest.raises(LearnerError, match=rf"where the run makes its networks: .*{needs}or use run\.device='cpu'$"):
        Trainer(EXP)
