"""APPO's ratios by hand, and its target policy: when it moves, that it is stored, that nothing trains it."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations

import penstock as ps
from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.agents.networks import Net
from penstock.algos.appo import APPO, postprocess_fn
from penstock.algos.ppo import PPO, postprocess_fn as ppo_postprocess_fn
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_map
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from tests.algos.by_hand import KNOWN, SPEC, Known, four_rows
from tests.algos.test_impala import LSTM, collected

NET = Net(hidden=(8,))


class Pair(Known):
    """An agent and its target policy, one batch old, with given probabilities; values are the agent's."""

    def __init__(self, p: torch.Tensor, target_p: torch.Tensor, value: torch.Tensor) -> None:
        super().__init__(value, p)
        self.target = Known(value + 100, target_p)
        self.batches = torch.ones((), dtype=torch.int64)

    def get_submodule(self, name: str) -> Known:
        return {"target_policy": self.target}[name]

    def get_buffer(self, name: str) -> torch.Tensor:
        return {"target_batches": self.batches}[name]


def test_postprocess_by_hand():
    """As IMPALA's, with ratios of the target policy, 1/2, 3, -, 1/5, and values of the online one."""
    batch = four_rows(np.log([0.5, 0.2, 0.1, 0.5]))
    target_p = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2], [0.7, 0.1, 0.2], [0.1, 0.1, 0.8]])
    agent: Any = Pair(target_p.flip(-1).unsqueeze(1), target_p.unsqueeze(1), KNOWN)
    cfg = APPO(discount=0.5, vtrace_lambda=0.5, rho_bar=2.0, c_bar=1.0, normalize_advantage=False, target_interval=9)
    data = postprocess_fn(agent, tree_map(torch.from_numpy, batch), cfg)
    assert data["target"][:, 0].tolist() == pytest.approx([1 + 1 + 0.25 * 0.5 * 4, 2 + 4, 50, 4 + 0.2 * 6])
    assert data["advantage"][:, 0].tolist() == pytest.approx([0.5 * (2 + 0.25 * 4), 4, 0, 0.2 * 6])
    # pi / mu * min(mu / pi_target, 2): over pi_target, but over mu / 2 = 0.25 where mu / pi_target is 5
    assert data["logp"].exp()[[0, 1, 3], 0].tolist() == pytest.approx([0.25, 0.6, 0.25])
    free = postprocess_fn(agent, tree_map(torch.from_numpy, batch), replace(cfg, target_ratio_bar=math.inf))
    assert free["logp"].exp()[[0, 1, 3], 0].tolist() == pytest.approx([0.25, 0.6, 0.1])
    assert data.metrics is not None
    assert float(data.metrics["rho_mean"]) == pytest.approx((0.5 + 2 + 0.2) / 3)
    assert float(data.metrics["rho_clipped"]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("net", [NET, LSTM], ids=["mlp", "lstm"])
def test_in_step_and_with_interval_1_its_rows_are_those_of_ppo(net: Net):
    algo = APPO(net=net, lr=1e-2, target_interval=1, minibatch=32, normalize_value=False)
    policy, batch = collected(algo, "CartPole-v1", batches=3)
    tensors = as_tensors(batch, torch.device("cpu"))
    data: Any = policy.postprocess_fn(policy.agent, tensors, policy.settings)
    plain: Any = ppo_postprocess_fn(policy.agent, tensors, PPO())  # pyright: ignore
    valid = tensors.valid
    for name, other in (("advantage", "advantage"), ("logp", "logp"), ("target", "return")):
        torch.testing.assert_close(data[name][valid], plain[other][valid], rtol=1e-3, atol=1e-3)


def bits(policy: Policy, prefix: str) -> dict[str, bytes]:
    """Parameters and buffers of the target policy, or of all else; what scales rewards carries is the online one's."""
    state = policy.agent.state_dict()
    return {
        name.removeprefix("target_policy."): x.numpy().tobytes()
        for name, x in state.items()
        if name.startswith("target_policy.") == (prefix == "target")
        and name != "target_batches"
        and "_extra_state" not in name
    }


@pytest.mark.parametrize("net", [LSTM, Net(hidden=(8,), normalize_obs=True, normalize_reward=True)])
@pytest.mark.parametrize("interval", [1, 3])
def test_the_target_policy_is_that_of_the_last_interval_normalisers_included(net: Net, interval: int):
    sampler = ps.SerialSampler(T=8, B=4).build("CartPole-v1", 0)
    policy = APPO(net=net, target_interval=interval, minibatch=16, epochs=2).build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    assert bits(policy, "target") == bits(policy, "policy")
    first = 1 if policy.agent.needs_statistics else 0  # a batch that only sets the normalisers is no batch here
    before: list[dict[str, bytes]] = []
    for itr in range(9):
        before.append(bits(policy, "policy"))
        train_one_step(policy, sampler.obtain_samples(itr)[0])
        if itr >= first:
            assert bits(policy, "target") == before[first + (itr - first) // interval * interval]
    assert len({tuple(x.values()) for x in before}) == 9
    sampler.shutdown()


def test_ratios_of_every_pass_are_to_one_policy():
    """Whatever the passes have changed: `logp`, targets and advantages of a batch are computed once."""
    policy, batch = collected(
        APPO(net=NET, lr=0.05, minibatch=1000, epochs=3, target_ratio_bar=math.inf), "CartPole-v1"
    )
    target = [x.clone() for x in policy.agent.get_submodule("target_policy").parameters()]
    seen: list[TrainBatch] = []
    inner = policy.loss_fn

    def watched(agent: Any, x: TrainBatch, cfg: Any) -> Any:
        seen.append(x)
        assert all(map(torch.equal, target, agent.target_policy.parameters()))
        with torch.no_grad():
            dist, _ = agent.target_policy(x.inputs, None)
            torch.testing.assert_close(x["logp"], dist.log_prob(x["action"]))
        return inner(agent, x, cfg)

    policy.loss_fn = watched
    train_one_step(policy, batch)
    assert len(seen) == policy.updates == 3
    assert all(not p.requires_grad for p in policy.agent.get_submodule("target_policy").parameters())


def test_a_target_policy_of_other_layers_is_named():
    policy, batch = collected(APPO(net=NET), "CartPole-v1")
    parametrizations.weight_norm(policy.agent.value_head)
    with pytest.raises(ConfigError, match=r"the target policy has \['value_head\.weight'\], which the policy lacks"):
        policy.postprocess(batch)


def test_the_agent_of_the_settings_gets_a_target_policy():
    made: list[Any] = []

    def my_agent(spec: ps.EnvSpec, cfg: APPO) -> ps.Agent:
        made.append(cfg)
        return ps.actor_critic(spec, cfg)

    algo = APPO(agent=my_agent, lr="linear(0.5, 0)")
    agent = algo.build(SPEC).agent
    assert made == [replace(algo, lr=0.5)]
    assert isinstance(agent.target_policy, ps.ActorCritic)
    assert not hasattr(agent.target_policy, "target_policy")
    with pytest.raises(ConfigError, match="agent_fn returned str; expected"):
        APPO(agent=lambda spec, settings: "agent").build(SPEC)  # pyright: ignore


@pytest.mark.timeout(120)
def test_the_target_policy_is_in_checkpoints_and_a_run_goes_on_with_it(tmp_path: Path):
    run = ps.RunConfig(steps=512, seed=3, eval_episodes=0, progress="off")
    algo = APPO(net=replace(NET, normalize_obs=True), target_interval=3, minibatch=16, epochs=2, max_lag=5)
    exp = ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=8, B=8), run)
    whole = ps.train(ps.override(exp, {"run.dir": str(tmp_path / "whole")}))
    ps.train(ps.override(exp, {"run.dir": str(tmp_path / "cut"), "run.steps": 256}))
    stored = ps.load(tmp_path / "cut")
    assert bits(stored, "target") != bits(stored, "policy")
    assert int(stored.agent.target_batches) > 0
    resumed = ps.resume(tmp_path / "cut", {"run.steps": 512})
    for name, x in whole.policy.agent.state_dict().items():
        assert torch.equal(x, resumed.policy.agent.state_dict()[name]), name


def test_distributions_of_the_target_are_not_sampled_from():
    """Acting is the online policy's: the target's parameters have no influence."""
    policy, batch = collected(APPO(net=NET), "CartPole-v1")
    obs = batch.obs[0]
    before = policy.predict(obs, deterministic=False), policy.agent(Inputs(torch.from_numpy(obs), None, None, None))
    with torch.no_grad():
        for x in policy.agent.get_submodule("target_policy").parameters():
            x.fill_(7.0)
    policy.predictions = 0
    assert (policy.predict(obs, deterministic=False) == before[0]).all()
    after: Output = policy.agent(Inputs(torch.from_numpy(obs), None, None, None))
    assert isinstance(after.dist, Categorical)
    assert torch.equal(after.value, before[1].value)
