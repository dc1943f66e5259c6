"""MAPPO: the critic sees the state and the actor does not; targets are PPO's by these values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock import ops
from penstock.agents.example_step import examples
from penstock.algos.mappo import MAPPO
from penstock.algos.qmix import QMIX
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.envs.agent_observations import read_agents
from penstock.envs.make import EnvConfig
from penstock.envs.toy import Nim, TeamBits, TwoStepMatrix
from penstock.learn.policies import Policies
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.testing import check_agent

VECTOR = LeafSpec("box", (3,), "float32", -1.0, 1.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
OBS = {"obs": VECTOR, "state": LeafSpec("box", (5,), "float32", -1.0, 1.0)}
SPEC = EnvSpec(OBS, CHOICE, 2)
MASKED = EnvSpec({**OBS, "action_mask": LeafSpec("multi_binary", (4,), "int8")}, CHOICE, 2)
NETS = {
    "plain": ps.Net(hidden=(6,)),
    "normalised": ps.Net(hidden=(6,), normalize_obs=True, normalize_reward=True),
    "memory": ps.Net(hidden=(6,), recurrent="gru", recurrent_size=5, prev_action=True, prev_reward=True),
    "critic's memory": ps.Net(hidden=(6,), recurrent="lstm", recurrent_size=5, critic_recurrent="own"),
}


def batch_of(policy: Policy, seed: int = 0) -> SampleBatch:
    """[4, 6] rows by chance, three environments; the third one's second agent is never there."""
    rng = np.random.default_rng(seed)
    info, state = examples(policy.agent, policy.spec)
    batch = allocate_batch(policy.spec, BatchSpec(4, 6), info, state)
    for name, x in batch.obs.items():
        x[...] = 1 if name == "action_mask" else rng.uniform(-1, 1, x.shape)
    batch.prev_action[...] = rng.integers(2, 6, batch.prev_action.shape)
    batch.prev_reward[...], batch.valid[...] = rng.normal(size=batch.prev_reward.shape), rng.random((4, 6)) < 0.8
    batch.valid[:, 5] = False
    batch.terminated[...] = batch.valid & (rng.random((4, 6)) < 0.2)
    batch.info["logp"][...] = -1.3
    return batch


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("spec", [SPEC, MASKED], ids=["open", "masked"])
def test_only_values_depend_on_the_state(net: str, spec: EnvSpec) -> None:
    check_agent(MAPPO(net=NETS[net]).build(spec).agent, spec)
    policy = MAPPO(net=NETS[net], normalize_value=False).build(spec, 0)
    agent: Any = policy.agent
    batch = batch_of(policy)
    agent.observe(as_tensors(batch, policy.device))
    other = batch.copy()
    other.obs["state"][...] += 0.5
    seen = [as_tensors(x, policy.device) for x in (batch, other)]
    assert not torch.isclose(agent.values(seen[0]), agent.values(seen[1])).any()
    outs = [agent(x.inputs if x.state is not None else x.inputs.flat(), x.state) for x in seen]
    assert torch.equal(outs[0].dist.logp, outs[1].dist.logp)
    torch.testing.assert_close(outs[0].value.reshape(5, 6), agent.values(seen[0]))


@pytest.mark.parametrize("net", ["plain", "normalised"])
def test_advantages_are_those_of_the_central_values(net: str) -> None:
    policy = MAPPO(net=NETS[net], normalize_advantage=False, normalize_value=False, discount=0.9, gae_lambda=0.8).build(
        SPEC, 0
    )
    agent: Any = policy.agent
    batch = as_tensors(batch_of(policy), policy.device)
    agent.observe(batch)
    data = policy.postprocess(batch)
    obs = agent.central.prepared(batch.obs)  # in the order of the keys: obs, then state
    flat = torch.cat((obs["obs"], obs["state"]), -1).float()
    value = agent.value_head(agent.critic.mlp(flat)).squeeze(-1).detach()
    reward = agent.scaled_reward(batch.reward)
    advantage, return_ = ops.gae(
        reward, value, batch.terminated, batch.truncated, batch.valid, discount=0.9, gae_lambda=0.8
    )
    torch.testing.assert_close(data["advantage"], advantage)
    torch.testing.assert_close(data["return"], return_)


@pytest.mark.parametrize("net", NETS)
def test_a_step_moves_actor_and_critic_and_the_absent_count_for_nothing(net: str) -> None:
    cfg = MAPPO(net=NETS[net], epochs=2, minibatch=8)
    policies = [cfg.build(SPEC, 0) for _ in range(2)]
    batch = batch_of(policies[0])
    other = batch.copy()
    other.obs["state"][:, 5] = other.obs["obs"][:, 5] = other.prev_reward[:, 5] = 0.9
    before = {name: p.clone() for name, p in policies[0].agent.named_parameters()}
    for _ in range(2):
        for policy, x in zip(policies, (batch, other)):
            ps.train_one_step(policy, x)
    moved = {name for name, p in policies[0].agent.named_parameters() if not torch.equal(p, before[name])}
    assert moved == before.keys()
    for (name, p), q in zip(policies[0].agent.named_parameters(), policies[1].agent.parameters()):
        torch.testing.assert_close(p, q, msg=name)


def test_prediction_does_without_the_state() -> None:
    policy = MAPPO().build(SPEC, 0)
    x = np.array([0.1, 0.2, 0.3], np.float32)
    action = policy.predict({"obs": x, "state": np.zeros(5, np.float32)})
    assert action == policy.predict({"obs": x}) == policy.predict(x)
    with pytest.raises(ConfigError, match="expected a dict with keys"):
        ps.PPO().build(SPEC, 0).predict({"obs": x})  # sees every key, this one too


def test_what_it_cannot_do_is_said() -> None:
    for obs in (VECTOR, {"obs": VECTOR}, {"state": VECTOR}):
        with pytest.raises(ConfigError, match="expected a Dict with the key 'state'"):
            MAPPO().build(EnvSpec(obs, CHOICE, 2), 0)
    for net in (ps.Net(shared=True), ps.Net(use_sde=True)):
        with pytest.raises(ConfigError, match="with a critic that sees more than the actor"):
            replace(MAPPO(), net=net).build(SPEC, 0)
    assert MAPPO.observes_state


def test_agents_are_shown_the_joint_observation_where_it_is_asked_for() -> None:
    def of(algo: Any) -> Policies:
        return Policies({"a": algo})

    many = of(MAPPO())
    given = many.seat(TeamBits)
    assert given.state == "joint"
    assert given.seating is not None
    (spec,) = given.seating.specs
    assert spec == replace(read_agents(replace(given, seating=None)).specs["agent_0"], agents=2)
    assert spec.obs["state"].shape == (2,)
    assert many.seat(EnvConfig(TwoStepMatrix, state="env")).seating.specs[0].obs["state"].shape == (3,)  # pyright: ignore
    assert of(ps.PPO()).seat(TeamBits).state == ""
    assert of(QMIX(mixer="vdn")).seat(TeamBits).state == ""
    with pytest.raises(ConfigError, match=r"policy 'a': QMIX in .*Nim, whose agents take turns"):
        of(QMIX()).seat(Nim)


def test_a_team_of_two_learns_its_bits() -> None:
    """At random a step pays 1/4 to each; 2 agents, 8 steps."""
    sampler = ps.SerialSampler(T=32, B=8)
    team: Any = MAPPO(lr=5e-3, epochs=4, minibatch=128)
    algo = Policies({"team": team})
    live = sampler.build(algo.seat(TeamBits), seed=0)
    policies = algo.build(live.specs)
    live.initialize(policies.agents)
    found = [0.0]
    for itr in range(16):
        batch, episodes = live.obtain_samples(itr)
        ps.train_one_step(policies, batch)
        found.append(episodes.mean_return)
    live.shutdown()
    assert found[-1] > 14.0
