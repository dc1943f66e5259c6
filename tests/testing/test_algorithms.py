"""The suite for algorithms: every built-in one that samples passes, and each broken one fails by its promise."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.batch import SampleBatch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.envs.toy import ContinuousBandit
from penstock.learn.policy import Policy
from penstock.testing.algorithms import check_algorithm
from tests.params import slow_but

ROOT = Path(__file__).parent.parent.parent
NET = ps.Net(hidden=(8,))
LSTM = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=4, prev_action=True, prev_reward=True)
NORMALIZED = ps.Net(hidden=(8,), normalize_obs=True, normalize_reward=True)
UNIFORM = ps.ReplaySettings(capacity=400)
PRIORITIZED = ps.ReplaySettings(capacity=400, index="prioritized")
SMALL: dict[str, Any] = {"batch_size": 8, "learning_starts": 16, "replay_ratio": 2.0, "net": NET}
ON_POLICY = {
    "ppo": ps.PPO(minibatch=16, epochs=2, net=NET),
    "ppo-lstm": ps.PPO(minibatch=16, epochs=2, net=LSTM),
    "ppo-normalized": ps.PPO(minibatch=16, epochs=2, net=NORMALIZED, lr="linear(1e-3, 0)"),
    "a2c": ps.A2C(net=NET),
    "impala": ps.IMPALA(net=NET, max_lag=3, optimizer="rmsprop"),
    "impala-lstm": ps.IMPALA(net=LSTM),
    "appo": ps.APPO(minibatch=16, epochs=2, net=NORMALIZED, target_interval=2),
    "pqn": ps.PQN(minibatch=16, epochs=2, net=ps.Net(hidden=(8,), norm="layer", normalize_obs=True)),
    "pqn-lstm": ps.PQN(minibatch=16, epochs=2, optimizer="adam", net=LSTM),
    "appo-lstm": ps.APPO(minibatch=16, epochs=2, net=LSTM, target_interval=3),
    "ppo-rnd": ps.PPO(minibatch=16, epochs=2, net=NET, rnd=ps.RND(share=0.5, net=NET)),
    "appo-rnd-lstm": ps.APPO(minibatch=16, epochs=2, net=LSTM, rnd=ps.RND(net=NET)),
}
OFF_POLICY = {
    "dqn": ps.DQN(replay=UNIFORM, **SMALL),
    "dqn-per": ps.DQN(replay=PRIORITIZED, **SMALL),
    "rainbow": ps.DQN(replay=PRIORITIZED, distributional="c51", noisy=True, dueling=True, n_step=3, **SMALL),
    "quantile": ps.DQN(replay=UNIFORM, distributional="quantile", n_atoms=5, **SMALL),
    "boot-dqn": ps.BootDQN(replay=UNIFORM, heads=3, **SMALL),
    "discrete-sac": ps.DiscreteSAC(replay=UNIFORM, **SMALL),
    "r2d1": ps.R2D1(train_length=4, burn_in=2, state_interval=8, n_step=2, batch_size=4, learning_starts=24, net=LSTM,
                    replay=ps.ReplaySettings(capacity=400, index="prioritized")),
}  # fmt: skip
BOXES = {
    "sac": ps.SAC(replay=UNIFORM, **SMALL),
    "crossq": ps.CrossQ(replay=UNIFORM, policy_delay=2, warmup_updates=3, **SMALL),
    "tqc": ps.TQC(replay=UNIFORM, quantiles=5, **SMALL),
    "tqc-per": ps.TQC(replay=PRIORITIZED, quantiles=5, critics=3, drop=1, **SMALL),
    "td3": ps.TD3(replay=UNIFORM, **SMALL),
    "ddpg": ps.DDPG(replay=UNIFORM, **SMALL),
}
BATCH = ps.BatchSpec(T=8, B=4)


@pytest.mark.parametrize(
    "name",
    slow_but("ppo-lstm ppo-rnd impala appo rainbow boot-dqn discrete-sac r2d1", [*ON_POLICY, *OFF_POLICY]),
)
def test_every_built_in_algorithm_of_choices_keeps_its_promises(name: str) -> None:
    check_algorithm({**ON_POLICY, **OFF_POLICY}[name], batch=BATCH)


@pytest.mark.parametrize("name", slow_but("sac td3 ppo", [*BOXES, "ppo", "impala", "appo"]))
def test_every_built_in_algorithm_of_boxes_keeps_its_promises(name: str) -> None:
    check_algorithm({**ON_POLICY, **BOXES}[name], ContinuousBandit, batch=BATCH, iterations=5)


def test_an_algorithm_from_outside_keeps_its_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import reinforce  # pyright: ignore[reportMissingImports]

    check_algorithm(reinforce.Reinforce(net=NET))
    monkeypatch.delitem(sys.modules, "reinforce")


@dataclass(frozen=True)
class Plain:
    """A2C's functions around a loss that a broken algorithm spoils."""

    lr: ps.Schedule = 1e-2
    net: ps.Net = NET
    discount: float = 0.9
    batch = BATCH

    def build(self, spec: ps.EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        return Policy(
            self,
            spec,
            agent_fn=ps.actor_critic,
            postprocess_fn=self.postprocess,
            loss_fn=self.loss,
            optimizer_fn=ps.adam,
            seed=seed,
            device=device,
        )

    def postprocess(self, agent: Any, batch: SampleBatch, cfg: Any) -> ps.TrainBatch:
        rows = {"reward": batch.reward, "action": batch.action}
        return ps.TrainBatch(batch.inputs_t, rows, batch.valid, batch.state)

    def loss(self, agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
        dist, value = agent(x.inputs, x.state)
        total = (value - x["reward"]).square().mean() - dist.log_prob(x["action"]).mean()
        return self.spoil(ps.Loss(total, {"loss": total.detach()}))

    def spoil(self, loss: ps.Loss) -> ps.Loss:
        return loss


class IgnoresItsSeed(Plain):
    def build(self, spec: ps.EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        return super().build(spec, 7, device)


class HasASecretSeed(Plain):
    def build(self, spec: ps.EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        return super().build(spec, int(torch.randint(1 << 30, ())), device)


class DrawsFromTorch(Plain):
    def spoil(self, loss: ps.Loss) -> ps.Loss:
        return loss._replace(total=loss.total * torch.rand(()))


class Decays(Plain):
    """Counts its updates where no checkpoint sees it."""

    def build(self, spec: ps.EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
        policy = super().build(spec, seed, device)
        calls = [0]

        def decaying(agent: Any, x: ps.TrainBatch, cfg: Any) -> ps.Loss:
            calls[0] += 1
            loss: Any = self.loss(agent, x, cfg)
            return loss._replace(total=loss.total * (1 + calls[0]))

        policy.loss_fn = decaying
        return policy


class NeverLearns(Plain):
    def spoil(self, loss: ps.Loss) -> ps.Loss:
        total: Any = loss.total
        return loss._replace(total=total * 0.0)


class ReportsNothingFinite(Plain):
    def spoil(self, loss: ps.Loss) -> ps.Loss:
        return loss._replace(metrics={"share": torch.tensor(float("nan"))})


PROMISES: dict[type[Plain], str] = {
    IgnoresItsSeed: "build: seeds 0 and 1 built the same parameters",
    HasASecretSeed: "build: two builds of one seed differ: actor.",
    DrawsFromTorch: "itr 0: two runs of one seed differ: ",
    Decays: "itr 2: a policy that was stored and loaded goes on otherwise: ",
    NeverLearns: "training: no parameter changed in 4 iterations of 32 rows",
    ReportsNothingFinite: "itr 0: train/share is nan",
}


def test_the_unbroken_algorithm_passes() -> None:
    check_algorithm(Plain())


@pytest.mark.parametrize("algo", PROMISES, ids=lambda x: x.__name__)
def test_each_broken_promise_is_named(algo: type[Plain]) -> None:
    with pytest.raises(AssertionError) as caught:
        check_algorithm(algo())
    assert PROMISES[algo] in str(caught.value)


def test_replay_that_never_starts_is_told_from_learning() -> None:
    with pytest.raises(AssertionError, match="is learning_starts below that"):
        check_algorithm(replace(OFF_POLICY["dqn"], learning_starts=400), batch=BATCH)


def test_a_state_that_no_checkpoint_holds_is_found_at_its_place() -> None:
    class KeepsASet(Plain):
        def build(self, spec: ps.EnvSpec, seed: int = 0, device: str = "cpu") -> Policy:
            policy: Any = super().build(spec, seed, device)
            plain = policy.state_dict
            policy.state_dict = lambda: {**plain(), "seen": {1}}
            return policy

    with pytest.raises(CheckpointError, match=r"state\['policy'\]\['seen'\] is builtins.set"):
        check_algorithm(KeepsASet())


def test_a_missing_member_is_named_with_its_signature_and_a_page() -> None:
    @dataclass(frozen=True)
    class NoBuild:
        batch = BATCH

    with pytest.raises(ConfigError, match=r"NoBuild has no build\(spec: Any.*docs/writing-an-algorithm.md"):
        check_algorithm(NoBuild())  # pyright: ignore[reportArgumentType]
