"""A dataset kept beside the rows collected: its share of each minibatch, the same in every place and after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec
from penstock.envs.toy import ContinuousBandit
from penstock.learn.train_ops import keep_dataset, samples
from penstock.run.trainer import Trainer
from tests.learn.ranks import apart, batches_of, bounds, on_ranks
from tests.params import slow_but

ENV = "Pendulum-v1"
MARK = 1_000.0
"""Reward of every step of the dataset; the environment pays 0 or less."""
NET = ps.Net(hidden=(8,), activation="relu")
SMALL: dict[str, Any] = {"batch_size": 16, "replay_ratio": 8, "learning_starts": 16, "net": NET}


def small(**changes: Any) -> dict[str, Any]:
    return {**SMALL, **changes}


RUN = ps.RunConfig(steps=96, seed=3, eval_interval=0, eval_episodes=1, progress="off", learner_threads=1)


def written(path: Path, lengths: tuple[int, ...] = (5, 9, 3, 20, 7), env: str = ENV, seed: int = 0) -> str:
    """A dataset of random steps that are all paid `MARK`; every second episode is terminated."""
    rng, spec = np.random.default_rng(seed), env_spec(ps.EnvConfig(env).make(0))
    with DatasetWriter(path, spec, env=env) as writer:
        for i, n in enumerate(lengths):
            obs = rng.uniform(-0.2, 0.2, (n + 1, *spec.obs.shape)).astype(np.float32)  # pyright: ignore
            action = rng.uniform(-2, 2, (n, 1)).astype(np.float32)
            action = action if env == ENV else rng.integers(2, size=n)
            writer.append(Episode(obs, action, np.full(n, MARK, np.float32), bool(i % 2), not i % 2))
    return str(path)


def kept(dataset: str, **more: Any) -> ps.ReplaySettings:
    return ps.ReplaySettings(capacity=400, dataset=dataset, **more)


ALGOS: dict[str, Any] = {
    "sac": ps.SAC(**SMALL), "td3": ps.TD3(**SMALL, n_step=3), "rebrac": ps.ReBRAC(**SMALL), "iql": ps.IQL(**SMALL),
    "cql": ps.CQL(**SMALL, sampled_actions=2), "td3-bc": ps.TD3BC(**SMALL),
    "normalised": ps.SAC(**small(net=replace(NET, normalize_obs=True, normalize_reward=True))),
}  # fmt: skip


def experiment(path: Path, algo: Any, sampler: Any = None, env: str = ENV, **replay: Any) -> Any:
    if not path.exists():
        written(path, env=env)
    return ps.Experiment(
        env, replace(algo, replay=kept(str(path), **replay)), sampler or ps.SerialSampler(T=4, B=3), RUN
    )


@pytest.mark.parametrize("share", [0.5, 0.25])
def test_each_minibatch_has_its_share_of_the_dataset(share: float, tmp_path: Path) -> None:
    """Every step of it is drawn, with its own end, and the rows collected fill the rest."""
    with Trainer(experiment(tmp_path / "d", ps.ReBRAC(**SMALL), dataset_share=share)) as trainer:
        for _ in range(3):
            trainer.train()
        seen: dict[float, float] = {}
        for _, x in samples(trainer.policy, 120, np.random.default_rng(0)):
            of_data = x["return"] == MARK
            assert int(of_data.sum()) == int(share * 16)
            assert x["noise"].shape == (16, 1) and x["has_next_action"].shape == (16,)
            seen |= dict(zip(x["action"][of_data, 0].tolist(), x["discount"][of_data].tolist()))
        assert len(seen) == 44  # the steps of the dataset
        assert sum(weight == 0.0 for weight in seen.values()) == 2  # of which two episodes are terminated
        schedule: Any = trainer.policy.replay_schedule
        assert schedule.replay.appended == trainer.env_steps


def test_choices_learn_from_a_dataset_too(tmp_path: Path) -> None:
    for algo in (ps.DQN(**SMALL), ps.DiscreteSAC(**SMALL), ps.CQL(**SMALL), ps.IQL(**SMALL)):
        with Trainer(experiment(tmp_path / "d", algo, env="CartPole-v1")) as trainer:
            metrics = [trainer.train() for _ in range(4)][-1]
            assert trainer.policy.updates > 10 and metrics["replay/size"] > 35


@pytest.mark.parametrize("name", slow_but("normalised rebrac", [*ALGOS]))
def test_a_restored_run_goes_on_in_the_same_bits(name: str, tmp_path: Path) -> None:
    exp: Any = experiment(tmp_path / "d", ALGOS[name])
    with Trainer(exp, tmp_path / "run") as whole, Trainer(exp, tmp_path / "run") as resumed:
        for _ in range(4):
            whole.train()
        whole.save()
        resumed.restore()
        found = [
            [({k: x for k, x in trainer.train().items() if not k.startswith("time/")}) for _ in range(3)]
            for trainer in (whole, resumed)
        ]
        assert found[0] == found[1]
        assert apart(whole.policy, resumed.policy) == 0.0  # pyright: ignore[reportArgumentType]
    assert not any("dataset" in file.name for file in (tmp_path / "run").rglob("*"))  # it is read, not stored
    other = written(tmp_path / "other", seed=1)
    changed = replace(exp, algo=replace(exp.algo, replay=kept(other)))
    with (
        Trainer(changed, tmp_path / "run") as trainer,
        pytest.raises(CheckpointError, match=r"replay.dataset=.*has changed"),
    ):
        trainer.restore()


PLACES: dict[str, Any] = {
    "cpu": ps.CpuSampler(T=4, B=4, workers=2), "gpu": ps.GpuSampler(T=4, B=4, workers=2),
    "alternating": ps.AlternatingSampler(T=4, B=4, workers=2),
    "runners": ps.RunnerSampler(2, ps.SerialSampler(T=4, B=2), "in-process"),
}  # fmt: skip


@pytest.mark.parametrize("place", slow_but("runners", [*PLACES]))
def test_every_sampler_trains_the_same_bits(place: str, tmp_path: Path) -> None:
    policies: list[Any] = []
    for sampler in (ps.SerialSampler(T=4, B=4), PLACES[place]):
        with Trainer(experiment(tmp_path / "d", ALGOS["rebrac"], sampler)) as trainer:
            for _ in range(4):
                trainer.train()
            policies.append(trainer.policy)
    assert policies[0].updates == 24
    assert apart(*policies) == 0.0


@pytest.mark.parametrize("name", slow_but("rebrac", ["rebrac", "normalised", "iql"]))
def test_learners_on_shares_equal_one_on_the_whole(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    algo = replace(ALGOS[name], replay=kept(path))
    spec, batches = batches_of(ENV, replace(algo, replay=ps.ReplaySettings(capacity=400)), 4, 4, 6)

    def trained(widths: tuple[int, ...]) -> list[ps.Policy]:
        def work(comm: Any) -> ps.Policy:
            policy, own = algo.build(spec, seed=5), bounds(widths)[comm.rank]
            policy.join(comm)
            share = ps.Share(own.start, sum(widths))
            live = ps.OfflineSampler(path, B=widths[comm.rank]).build(ENV, 2, share=share)
            live.initialize(policy.agent)
            keep_dataset(policy, live)
            live.shutdown()
            for batch in batches:
                ps.multi_gpu_train_one_step(policy, batch[:, own])
            return policy

        return on_ranks(len(widths), work)

    (one,), (first, second) = trained((4,)), trained((1, 3))
    assert one.updates > 20
    assert apart(first, second) == 0.0
    assert apart(one, first) < 1e-5


@pytest.mark.slow
def test_a_run_of_two_learners_equals_that_of_one(tmp_path: Path) -> None:
    found: list[dict[str, torch.Tensor]] = []
    for learners in (1, 2):
        exp = experiment(tmp_path / "d", ALGOS["rebrac"], ps.SerialSampler(T=4, B=4))
        exp = replace(exp, run=replace(RUN, learners=learners, dir=str(tmp_path / f"run-{learners}")))
        found.append(ps.train(exp).policy.agent.state_dict())
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=1e-4, atol=1e-5)


def test_a_policy_goes_on_online_with_its_data(tmp_path: Path) -> None:
    """ReBRAC's networks are TD3's: the run starts from the parameters of the one before, and at once acts by them."""
    path = written(tmp_path / "d")
    run = replace(RUN, dir=str(tmp_path / "offline"))
    algo = ps.ReBRAC(**small(learning_starts=0))
    ps.train(ps.Experiment(ENV, algo, ps.OfflineSampler(path, T=4, B=3), run))
    online = ps.TD3(**small(learning_starts=0), replay=kept(path))
    exp = ps.Experiment(ENV, online, ps.SerialSampler(T=4, B=3), replace(run, dir=str(tmp_path / "online")))
    result = ps.train(exp, init=str(tmp_path / "offline"))
    assert result.metrics["train/n_updates"] > 40


@pytest.mark.parametrize(("replay", "message"), [
    ({"index": "prioritized"}, r"replay.dataset=.*index='prioritized'.*use index='uniform'"),
    ({"shards": 2}, r"replay.shards=2.*shards=0"), ({"dataset_share": 0.0}, r"dataset_share=0.0"),
])  # fmt: skip
def test_settings_that_do_not_fit_are_refused(replay: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kept("data", **replay)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "d")
    cases: tuple[tuple[Any, str], ...] = (
        (experiment(tmp_path / "d", ALGOS["sac"], dataset_share=0.01), r"makes 0 of batch_size=16 samples"),
        (experiment(tmp_path / "d", ps.SAC(**small(batch_size=100))), r"has 44 steps, fewer than the 50"),
        (ps.Experiment(ENV, ps.SAC(**small(batch_size=60)), ps.OfflineSampler(path), RUN), r"has 44 .* than the 60"),
        (ps.Experiment(ENV, ps.SAC(**SMALL, replay=kept(path + "-")), ps.SerialSampler(T=4, B=3), RUN), f"{path}-"),
        (ps.Experiment(ContinuousBandit, ps.SAC(**SMALL, replay=kept(path)), ps.SerialSampler(T=4, B=3), RUN),
         r"has other spaces than .*ContinuousBandit"),
    )  # fmt: skip
    for exp, message in cases:
        with pytest.raises(ConfigError, match=message):
            Trainer(exp)
    choosing = written(tmp_path / "choices", env="CartPole-v1")
    boot = ps.BootDQN(batch_size=4)
    for algo, sampler in (
        (replace(boot, replay=kept(choosing)), ps.SerialSampler(T=4, B=3)),
        (boot, ps.OfflineSampler(choosing)),
    ):
        with pytest.raises(ConfigError, match=r"keeps info .*mask.* records as it acts.* without replay.dataset"):
            Trainer(ps.Experiment("CartPole-v1", algo, sampler, RUN)).train()
    with pytest.raises(ConfigError, match=r"samples of .* rows; expected an algorithm of single transitions"):
        ps.R2D1(replay=ps.ReplaySettings(dataset=path)).build(env_spec(ps.EnvConfig("CartPole-v1").make(0)))
    spec, batches = batches_of(ENV, ALGOS["sac"], 8, 4, 2)
    policy = ps.SAC(**SMALL, replay=kept(path)).build(spec)
    with pytest.raises(ConfigError, match=r"is read by a run; in a loop of your own call keep_dataset"):
        [ps.train_one_step(policy, batch) for batch in batches]
    with pytest.raises(ConfigError, match="keep_dataset"):
        keep_dataset(ps.PPO().build(spec), None)


def test_an_offline_algorithm_asks_for_data() -> None:
    for algo in (ps.IQL(**SMALL), ps.ReBRAC(**SMALL), ps.TD3BC(**SMALL), ps.CQL(**SMALL)):
        with pytest.raises(
            ConfigError, match=r"use ps.OfflineSampler\(DIR\).*or keep one beside.*algo.replay.dataset DIR"
        ):
            Trainer(ps.Experiment(ENV, algo, ps.SerialSampler(T=4, B=3), RUN))
