"""Training from a replay on the learner's device: the bits of training from one in the host's memory, for every kind of batch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves
from penstock.learn.train_ops import samples
from penstock.run.trainer import Trainer
from tests.learn.ranks import batches_of, bounds, on_ranks
from tests.learn.test_keep_dataset import written
from tests.params import slow_but
from tests.tensor_envs.same_step import Counting

NET = ps.Net(hidden=(8,), activation="relu")
SMALL: dict[str, Any] = {"batch_size": 16, "replay_ratio": 8, "learning_starts": 24, "net": NET}
KEPT = ps.ReplaySettings(capacity=77)  # comes round, and is no multiple of anything
PRIORITIZED = replace(KEPT, index="prioritized")
TENSORS = "penstock.tensor_envs:Pendulum"
FAST: dict[str, Any] = {**SMALL, "distributional": "c51", "clipped_double": False}
CASES: dict[str, tuple[Any, Any, int, int]] = {
    "sac": ("Pendulum-v1", ps.SAC(**SMALL, replay=KEPT), 4, 3),
    "sac, tensors": (TENSORS, ps.SAC(**SMALL, n_step=3, replay=PRIORITIZED), 1, 5),
    "fast td3": (TENSORS, ps.TD3(**FAST, target_actor=False, exploration_noise_low=0.01, replay=KEPT), 4, 5),
    "fast td3, three steps": (TENSORS, ps.TD3(**FAST, n_step=3, replay=PRIORITIZED), 3, 5),
    "fast sac, normalised": (
        TENSORS,
        ps.SAC(**{**FAST, "net": replace(NET, normalize_obs=True, normalize_reward=True)}, replay=KEPT), 2, 7,
    ),
    "dqn, values": (
        "CartPole-v1",
        ps.DQN(**SMALL, n_step=3, target_interval=5, replay=replace(PRIORITIZED, fresh_priority="agent")), 4, 3,
    ),
    "dqn, resets within the step": (partial(Counting, groups=True), ps.DQN(**SMALL, replay=KEPT), 3, 5),
    "dqn, those with priorities": (Counting, ps.DQN(**SMALL, n_step=3, replay=PRIORITIZED), 1, 5),
    "boot dqn": ("CartPole-v1", ps.BootDQN(**SMALL, heads=3, replay=KEPT), 4, 3),
    "fifo": (TENSORS, ps.SAC(**{**SMALL, "replay_ratio": 1}, replay=replace(KEPT, index="fifo")), 4, 5),
    "crossq": (TENSORS, ps.CrossQ(**SMALL, replay=KEPT), 4, 5),
}  # fmt: skip


def there(algo: Any, device: Any = "learner") -> Any:
    return replace(algo, replay=replace(algo.replay, device=device))


def begun(env: Any, algo: Any, T: int, B: int) -> tuple[Any, ps.Policy]:
    sampler = ps.SerialSampler(T=T, B=B).build(env, 3)
    policy = algo.build(sampler.spec, 1, total_steps=1_000)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    return sampler, policy


def bits(policy: ps.Policy) -> list[Any]:
    """Parameters, and all that replay holds."""
    tensors = {k: x for k, x in policy.agent.state_dict().items() if isinstance(x, torch.Tensor)}
    kept = {name: np.asarray(x) for name, x in policy.arrays().items()}
    return [(k, str(x.dtype), np.asarray(x).tobytes()) for k, x in (*tensors.items(), *kept.items())]


@pytest.mark.parametrize(
    ("env", "algo", "T", "B"),
    slow_but(["sac", "sac, tensors", "fast td3", "dqn, values", "dqn, resets within the step"], CASES),
)
def test_training_takes_the_same_bits(env: Any, algo: Any, T: int, B: int) -> None:
    found = []
    for device in ("cpu", "learner"):
        sampler, policy = begun(env, there(algo, device), T, B)
        metrics = [ps.train_one_step(policy, sampler.obtain_samples(i)[0]) for i in range(120 // (T * B))]
        assert policy.updates > 20 or algo.replay_ratio < 8
        found.append((bits(policy), metrics))
        held: Any = policy.replay_schedule
        assert held.replay.storage.head > held.replay.storage.rows
        storage = held.replay.storage.arrays
        assert all(isinstance(x, torch.Tensor) is (device == "learner") for k, x in storage.items() if k[:3] in ("obs", "pre")
                   and k != "prev_reward")  # fmt: skip
        sampler.shutdown()
    assert found[0] == found[1]


def experiment(algo: Any, env: Any = TENSORS, sampler: Any = None) -> Any:
    run = ps.RunConfig(steps=400, seed=3, eval_interval=0, eval_episodes=1, progress="off", learner_threads=1)
    return ps.Experiment(env, algo, sampler or ps.SerialSampler(T=2, B=5), run)


def trained(exp: Any, folder: Path | None = None, batches: int = 12) -> list[Any]:
    with Trainer(exp, folder) as trainer:
        for _ in range(batches):
            trainer.train()
        if folder is not None:
            trainer.save()
        return bits(trainer.policy)


@pytest.mark.parametrize("algo", [ps.SAC(**SMALL), ps.ReBRAC(**SMALL)], ids=["sac", "rebrac"])
def test_a_dataset_lies_there_too(algo: Any, tmp_path: Path) -> None:
    """ReBRAC reads the action of the next row as well."""
    path = written(tmp_path / "d")
    algo = replace(algo, replay=replace(KEPT, dataset=path, dataset_share=0.25))
    assert trained(experiment(algo, "Pendulum-v1")) == trained(experiment(there(algo), "Pendulum-v1"))
    with Trainer(experiment(there(algo), "Pendulum-v1")) as trainer:
        own: Any = trainer.policy.replay_schedule
        assert isinstance(own.replay.dataset.storage.arrays["obs"], torch.Tensor)


def test_a_whole_dataset_is_put_there(tmp_path: Path) -> None:
    algo = ps.ReBRAC(**SMALL, replay=replace(KEPT, capacity=60))
    sampler = ps.OfflineSampler(written(tmp_path / "d"), T=4, B=2)
    assert trained(experiment(algo, "Pendulum-v1", sampler)) == trained(experiment(there(algo), "Pendulum-v1", sampler))


@pytest.mark.parametrize(("before", "after"), [("learner", "learner"), ("cpu", "learner"), ("learner", "cpu")])
def test_a_run_goes_on_in_the_same_bits_wherever_its_rows_lay(before: str, after: str, tmp_path: Path) -> None:
    """Batched environments open new episodes after a resume: what went before is in the replay, apart from the rest."""
    algo = ps.SAC(**SMALL, replay=PRIORITIZED)
    exp = partial(experiment, env="Pendulum-v1")
    whole = trained(exp(algo), batches=17)
    trained(exp(there(algo, before)), tmp_path, 9)
    with Trainer(exp(there(algo, after)), tmp_path) as again:
        again.restore()
        for _ in range(8):
            again.train()
        assert bits(again.policy) == whole


def test_learners_share_one() -> None:
    """Each keeps the rows of its own slots on its own device; a checkpoint has them all."""
    algo, (T, B) = ps.SAC(**SMALL, replay=PRIORITIZED), (4, 5)
    spec, batches = batches_of("Pendulum-v1", algo, T, B, 8)

    def rank(comm: Any, device: str, widths: tuple[int, ...]) -> Any:
        policy = there(algo, device).build(spec, 1)
        policy.join(comm)
        at = bounds(widths)[comm.rank]
        for batch in batches:
            ps.multi_gpu_train_one_step(policy, batch[:, at])
        kept: Any = policy.replay_schedule
        own = {name: np.asarray(x) for name, x in kept.replay.storage.written()}
        return [x.tobytes() for x in own.values()], [
            x.tobytes() for x in map(np.asarray, policy.agent.state_dict().values())
        ]

    here, away = (on_ranks(2, partial(rank, device=device, widths=(2, 3))) for device in ("cpu", "learner"))
    assert here == away
    assert here[0][1] == here[1][1]


def test_samples_are_tensors_of_their_own() -> None:
    """One that is kept does not change as the ring comes round."""
    sampler, policy = begun(TENSORS, there(ps.SAC(**SMALL, replay=KEPT)), 4, 5)
    for itr in range(3):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    x = next(samples(policy, 1, np.random.default_rng(0)))[1]
    assert all(isinstance(y, torch.Tensor) for y in tree_leaves((tuple(x.inputs), dict(x.rows))))
    before = [y.clone() for y in tree_leaves((tuple(x.inputs), dict(x.rows)))]
    for itr in range(3, 9):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert all(map(torch.equal, before, tree_leaves((tuple(x.inputs), dict(x.rows)))))
    sampler.shutdown()


def test_where_the_rows_lie_is_settled_when_a_run_begins() -> None:
    exp = experiment(ps.SAC(**SMALL, replay=KEPT))
    with ps.Run(exp) as run, pytest.raises(ConfigError, match=r"algo\.replay\.device cannot change"):
        next(iter(run))
        run.set({"algo.replay.device": "learner"})
