"""GAIL: rewards, losses and the optimum of D by hand, a demonstrated arm is pulled, and datasets that do not fit."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos import gail
from penstock.algos.gail import Demonstrations, reward_of, with_discriminator
from penstock.core.batch import Inputs
from penstock.core.spec import LeafSpec
from penstock.datasets.episode import Episode
from penstock.datasets.writer import DatasetWriter
from penstock.envs.spaces import env_spec
from penstock.envs.toy import Bandit, Match
from penstock.learn.algorithm import Loss
from penstock.learn.settings import AlgorithmFunctions
from tests.algos.taught import SMALL, Shown, TaughtGAIL

SPEC = ps.EnvSpec(LeafSpec("box", (1,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
W, BIAS = [2.0, -1.0, 1.0], 0.5  # of the observation, of actions 0 and 1
QUIET: dict[str, Any] = {"progress": "off", "eval_episodes": 1}


class Alone(ps.GAIL):
    """GAIL around a loss that is nothing, so that the discriminator's can be read."""

    functions = with_discriminator(AlgorithmFunctions(None, lambda agent, x, cfg: Loss({}, {}), ps.adam))  # pyright: ignore


loss_fn = Alone.functions.loss


def linear(**settings: Any) -> tuple[Any, ps.GAIL]:
    """An agent whose discriminator is W x + BIAS."""
    cfg = Alone(discriminator_hidden=(), net=SMALL, **settings)
    agent: Any = cfg.build(SPEC).agent
    with torch.no_grad():
        agent.discriminator.head[0].weight.copy_(torch.tensor([W]))
        agent.discriminator.head[0].bias.fill_(BIAS)
    return agent, cfg


def minibatch(valid: Any = None, lead: tuple[int, ...] = (2,)) -> ps.TrainBatch:
    """The policy did (1, action 0) and (0, action 1); shown are (-1, 1) and (2, 1). Logits: 1.5, 1.5; -0.5, 5.5."""
    obs, shown = torch.tensor([[1.0], [0.0]]).reshape(*lead, 1), torch.tensor([[-1.0], [2.0]]).reshape(*lead, 1)
    rows = {
        "action": torch.tensor([0, 1]).reshape(lead),
        "shown": {"obs": shown, "action": torch.tensor([1, 1]).reshape(lead)},
        "mix": torch.tensor([0.25, 0.5]).reshape(lead),
    }
    return ps.TrainBatch(Inputs(obs, None, None, None), rows, valid)  # pyright: ignore[reportArgumentType]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("lead", [(2,), (2, 1)])
def test_the_loss_by_hand(lead: tuple[int, ...]) -> None:
    """-log(1 - D) = softplus(logit), -log D = softplus(-logit); the slope of a linear D is its weights."""
    agent, cfg = linear(gradient_penalty=3.0)
    loss = loss_fn(agent, minibatch(torch.ones(lead, dtype=torch.bool) if len(lead) > 1 else None, lead), cfg)
    judged, penalty = softplus(1.5) + (softplus(0.5) + softplus(-5.5)) / 2, (math.sqrt(6.0) - 1.0) ** 2
    assert {name: m.item() for name, m in loss.metrics.items()} == {
        "discriminator_loss": pytest.approx(judged),
        "accuracy_policy": 0.0,
        "accuracy_expert": 0.5,
        "gradient_penalty": pytest.approx(penalty, rel=1e-5),
    }
    totals: Any = loss.total
    assert totals["discriminator"].item() == pytest.approx(judged + 3.0 * penalty, rel=1e-5)


def test_the_gradient_by_hand_and_rows_that_are_not_valid() -> None:
    """Of row 0 alone: sigmoid(1.5) x - sigmoid(0.5) x_shown + 2 c (|w| - 1) w / |w|."""
    agent, cfg = linear(gradient_penalty=3.0)
    totals: Any = loss_fn(agent, minibatch(torch.tensor([True, False])), cfg).total
    layer = agent.discriminator.head[0]
    (slope,) = torch.autograd.grad(totals["discriminator"], layer.weight)

    def sigmoid(x: float) -> float:
        return 1.0 / (1.0 + math.exp(-x))

    norm = math.sqrt(6.0)
    ours, shown = np.array([1.0, 1.0, 0.0]), np.array([-1.0, 0.0, 1.0])
    expected = sigmoid(1.5) * ours - sigmoid(0.5) * shown + 6.0 * (norm - 1.0) / norm * np.array(W)
    np.testing.assert_allclose(slope[0].numpy(), expected, rtol=1e-5)


def test_the_penalty_is_of_features_and_leaves_their_encoder_alone() -> None:
    spec = ps.EnvSpec(LeafSpec("box", (8, 8, 3), "uint8", 0.0, 255.0), SPEC.action)
    image, none = torch.arange(4 * 192).reshape(4, 8, 8, 3).remainder(256).to(torch.uint8), None
    rows = {**minibatch().rows, "shown": {"obs": image[:2], "action": torch.tensor([1, 1])}}
    slopes: list[Any] = []
    for penalty in (0.0, 3.0):
        cfg = Alone(net=SMALL, gradient_penalty=penalty)
        agent: Any = cfg.build(spec, seed=1).agent
        totals: Any = loss_fn(agent, ps.TrainBatch(Inputs(image[2:], none, none, none), rows), cfg).total  # pyright: ignore
        judge = agent.discriminator
        slopes.append(
            torch.autograd.grad(totals["discriminator"], [*judge.encoder.parameters(), *judge.head.parameters()])
        )
    *encoder, first = (torch.equal(x, y) for x, y in list(zip(*slopes))[: len([*judge.encoder.parameters()]) + 1])
    assert encoder and all(encoder) and not first


def test_no_penalty_is_off() -> None:
    agent, cfg = linear(gradient_penalty=0.0)
    loss = loss_fn(agent, minibatch(), cfg)
    assert "gradient_penalty" not in loss.metrics
    assert loss.total["discriminator"].item() == loss.metrics["discriminator_loss"].item()  # pyright: ignore


def test_rewards_by_hand() -> None:
    """D = 3/4: -log(1 - D) = log 4, log D = log 3/4, and log 3 together."""
    logit = torch.tensor(math.log(3.0), dtype=torch.float64)
    forms = {form: reward_of(logit, form).item() for form in ("positive", "negative", "logit")}
    assert forms == pytest.approx({"positive": math.log(4.0), "negative": math.log(0.75), "logit": math.log(3.0)})


def test_actions_count_as_the_environment_takes_them() -> None:
    spec = ps.EnvSpec(
        LeafSpec("box", (1,), "float32"), LeafSpec("box", (2,), "float32", low=-1.0, high=(0.5, math.inf))
    )
    judge: Any = ps.GAIL(net=SMALL).build(spec).agent.get_submodule("discriminator")
    found = judge.features(torch.zeros(1, 1), torch.tensor([[3.0, -9.0]]))
    assert found.tolist() == [[0.0, 0.5, -1.0]]


def test_draws_follow_from_seed_and_batch() -> None:
    valid = torch.ones(3, 4, dtype=torch.bool)
    obs = torch.arange(100.0).unsqueeze(1)

    def drawn(seed: int, batch: int) -> list[float]:
        found: Any = Demonstrations(obs, obs.squeeze(1), seed).draw(batch, valid)
        assert found["shown"]["obs"].squeeze(2).equal(found["shown"]["action"])
        return found["shown"]["action"].flatten().tolist()

    assert drawn(1, 0) == drawn(1, 0)
    assert drawn(1, 0) != drawn(1, 1) and drawn(1, 0) != drawn(2, 0)


def test_demonstrations_stay_with_the_learner() -> None:
    agent: Any = TaughtGAIL(net=SMALL).build(SPEC).agent
    held = agent.discriminator.demonstrations
    assert copy.deepcopy(agent).discriminator.demonstrations is held is not None
    assert cloudpickle.loads(cloudpickle.dumps(agent)).discriminator.demonstrations is None


def test_the_environments_reward_plays_no_part() -> None:
    algo = TaughtGAIL(minibatch=16, epochs=1, net=SMALL)
    sampler = ps.SerialSampler(T=8, B=4).build("CartPole-v1", 3)
    policies = [algo.build(sampler.spec, seed=1) for _ in range(2)]
    sampler.initialize(policies[0].agent)
    batch = sampler.obtain_samples(0)[0].copy()
    ps.train_one_step(policies[0], batch)
    batch.prev_reward[...] = -7.0
    ps.train_one_step(policies[1], batch)
    for x, y in zip(*(policy.agent.state_dict().values() for policy in policies)):
        assert torch.equal(x, y)
    assert policies[0].agent.state_dict()["discriminator.batches"] == 1


def pulls(spec: ps.EnvSpec, actions: list[int]) -> Shown:
    """Demonstrations of these arms of a Bandit, at observation 0."""
    return Shown(spec, np.zeros((len(actions) + 1, 1), np.float32), np.array(actions), len(actions))


def test_the_discriminator_finds_its_optimum() -> None:
    """D* = p_shown / (p_shown + p_policy) (Goodfellow et al. 2014, proposition 1), so its logit is log p_shown / p_policy:
    of a policy that pulls each arm half the time and demonstrations that pull arm 0 three times in four, log 3/2, log 1/2.
    """
    sampler = ps.SerialSampler(T=128, B=16).build(Bandit, 0)
    algo = ps.GAIL(lr="linear(1e-9, 0)", discriminator_lr=0.1, gradient_penalty=0.0, discriminator_hidden=(), epochs=4,
                   minibatch=1024, net=SMALL)  # fmt: skip
    policy = algo.build(sampler.spec, seed=0)
    algo.teach(policy, pulls(sampler.spec, [0, 0, 0, 1]))
    sampler.initialize(policy.agent)
    for itr in range(10):
        policy.set_progress(itr / 10)
        metrics = ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    judge: Any = policy.agent.get_submodule("discriminator")
    with torch.no_grad():
        logit = judge.logit(judge.features(torch.zeros(2, 1), torch.arange(2)))
    assert logit.tolist() == pytest.approx([math.log(1.5), math.log(0.5)], abs=0.1)
    assert metrics["train/imitation_reward"] == pytest.approx(0.5 * (math.log(2.5) + math.log(1.5)), abs=0.06)


@pytest.mark.parametrize("inner", [ps.PPO, ps.A2C])
def test_the_demonstrated_arm_is_pulled_though_it_pays_less(inner: Any) -> None:
    class Imitating(ps.GAIL):
        functions = with_discriminator(inner.functions)

    sampler = ps.SerialSampler(T=16, B=8).build(Bandit, 0)
    algo = Imitating(lr=1e-2, discriminator_lr=1e-2, epochs=2, minibatch=64, net=SMALL)
    policy = algo.build(sampler.spec, seed=0)
    algo.teach(policy, pulls(sampler.spec, [0]))
    sampler.initialize(policy.agent)
    for itr in range(20):
        ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(0, 16, deterministic=False).mean_return < -0.8  # arm 0 pays -1


def test_a_bc_run_is_a_start() -> None:
    bc, policy = ps.BC(net=SMALL).build(SPEC, seed=3), ps.GAIL(net=SMALL).build(SPEC, seed=4)
    opening = {name: x.clone() for name, x in policy.agent.state_dict().items()}
    policy.load_parameters(bc.agent.state_dict() | ps.PPO(net=SMALL).build(SPEC).agent.state_dict())
    for name, x in policy.agent.state_dict().items():
        assert torch.equal(x, opening[name]) or not name.startswith("discriminator"), name


def recorded(path: Path, env: Any = Match) -> str:
    """One episode of `Match`: action 1 at observation 1."""
    obs = np.ones((2, 1), np.float32)
    with DatasetWriter(path, env_spec(env())) as writer:
        writer.append(Episode(obs, np.array([1]), np.ones(1, np.float32), terminated=True, truncated=False))
    return str(path)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_and_plays_without_its_dataset(tmp_path: Path) -> None:
    algo = ps.GAIL(dataset=recorded(tmp_path / "d"), epochs=1, minibatch=32, net=SMALL)

    def run(name: str, steps: int) -> ps.Experiment:
        return ps.Experiment(Match, algo, ps.SerialSampler(T=8, B=4), ps.RunConfig(steps, dir=tmp_path / name, **QUIET))

    whole = ps.train(run("whole", 64)).policy
    ps.train(run("halves", 32))
    halves = ps.resume(str(tmp_path / "halves"), {"run.steps": 64}).policy
    for x, y in zip(whole.agent.state_dict().values(), halves.agent.state_dict().values()):  # pyright: ignore
        assert torch.equal(x, y)
    (tmp_path / "d" / "dataset.json").rename(tmp_path / "elsewhere.json")
    assert ps.load(tmp_path / "whole").predict(np.ones(1, np.float32)) in (0, 1)
    with pytest.raises(ps.ConfigError, match="is no dataset"):
        ps.resume(str(tmp_path / "halves"), {"run.steps": 96})
    index = json.loads((tmp_path / "elsewhere.json").read_text())
    for file in (tmp_path / "d").rglob("*"):
        if file.is_file():
            file.unlink()
    for folder in (tmp_path / "d").iterdir():
        folder.rmdir()
    (tmp_path / "d").rmdir()
    other = DatasetWriter(tmp_path / "d", env_spec(Match()))
    with other as writer:
        obs = np.full((2, 1), -1.0, np.float32)
        writer.append(Episode(obs, np.array([0]), np.ones(1, np.float32), terminated=True, truncated=False))
    assert json.loads((tmp_path / "d" / "dataset.json").read_text())["shards"] != index["shards"]
    with pytest.raises(
        ps.CheckpointError, match=r"dataset .*d is .* and the checkpoint was written with .* has changed"
    ):
        ps.resume(str(tmp_path / "halves"), {"run.steps": 96})


def refused(algo: Any, env: Any = "CartPole-v1") -> None:
    ps.train(ps.Experiment(env, algo, ps.SerialSampler(T=8, B=2), ps.RunConfig(16, **QUIET)))


def test_what_does_not_fit_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ps.ConfigError, match=r"GAIL with dataset='', so there is nothing to imitate.*--algo.dataset PATH"
    ):
        refused(ps.GAIL())
    with pytest.raises(ps.ConfigError, match=r"no dataset at .*missing"):
        refused(ps.GAIL(dataset=str(tmp_path / "missing")))
    with pytest.raises(
        ps.ConfigError, match=r"dataset .*d has other spaces than the environment: shape of obs is \(1,\)"
    ):
        refused(ps.GAIL(dataset=recorded(tmp_path / "d")))
    with pytest.raises(ps.ConfigError, match="holds no episode"):
        with DatasetWriter(tmp_path / "empty", env_spec(Match())):
            pass
        refused(ps.GAIL(dataset=str(tmp_path / "empty")), Match)
    for net in (ps.Net(prev_reward=True), ps.Net(normalize_reward=True), ps.Net(clip_reward=True)):
        with pytest.raises(ps.ConfigError, match="which are of the environment's reward"):
            ps.GAIL(net=net)
    with pytest.raises(ps.ConfigError, match=r"agent_fn returned Linear; expected a penstock\.Agent"):
        ps.GAIL(agent=lambda spec, cfg: torch.nn.Linear(1, 1)).build(SPEC)  # pyright: ignore
    with pytest.raises(ps.ConfigError, match="whose reward is of what is new"):
        ps.GAIL(rnd=ps.RND())
    with pytest.raises(ps.ConfigError, match="expected one observation for actor, critic and discriminator"):
        ps.GAIL(net=ps.Net(actor_keys=("a",), critic_keys=("a", "b")))
    with (
        monkeypatch.context() as patched,
        pytest.raises(ps.ConfigError, match=r"takes 0.0 GB, twice that .* fewer episodes"),
    ):
        patched.setattr(gail, "free_memory", lambda: 10)
        refused(ps.GAIL(dataset=recorded(tmp_path / "large")), Match)
    sampler = ps.SerialSampler(T=4, B=2).build(Match, 0)
    policy = ps.GAIL(net=SMALL).build(sampler.spec)
    sampler.initialize(policy.agent)
    with pytest.raises(ps.ConfigError, match=r"GAIL has no demonstrations.*algo.teach\(policy"):
        ps.train_one_step(policy, sampler.obtain_samples(0)[0])
