"""`net.actor_keys` and `net.critic_keys`: what each reads of a Dict observation, with memory, masks and normalisers."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.agents.actor_critic import ActorCritic
from penstock.agents.example_step import examples
from penstock.core.batch import Inputs, SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_map
from penstock.learn.rows.postprocess import as_tensors
from penstock.testing import check_agent

VECTOR = LeafSpec("box", (3,), "float32", -1.0, 1.0)
BOX = LeafSpec("box", (2,), "float32", -1.0, 1.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,))
OBS = {"policy": VECTOR, "height": BOX, "critic": LeafSpec("box", (5,), "float32", -1.0, 1.0)}
SPEC = EnvSpec(OBS, BOX)
MASKED = EnvSpec({**OBS, "action_mask": LeafSpec("multi_binary", (4,), "int8")}, CHOICE)
KEYS: Any = {"hidden": (6,), "actor_keys": ("policy", "height"), "critic_keys": ("policy", "critic")}
NETS = {
    "plain": ps.Net(**KEYS),
    "normalised": ps.Net(**KEYS, normalize_obs=True, normalize_reward=True),
    "memory": ps.Net(**KEYS, recurrent="gru", recurrent_size=5, critic_recurrent="own", normalize_obs=True),
    "actor's memory": ps.Net(**KEYS, recurrent="lstm", recurrent_size=5, critic_recurrent="none"),
    "gsde": ps.Net(**KEYS, use_sde=True),
}


class Groups(gym.Env[Any, Any]):
    """The critic's key tells how the reward of the episode turns out; the actor's is a constant."""

    observation_space = gym.spaces.Dict(
        {"policy": gym.spaces.Box(-1, 1, (3,), np.float32), "critic": gym.spaces.Box(-1, 1, (1,), np.float32)}
    )
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t, self.sign = 0, float(self.np_random.choice([-1.0, 1.0]))
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.shown(), self.sign, self.t == 3, False, {}

    def shown(self) -> Any:
        return {"policy": np.ones(3, np.float32), "critic": np.full(1, self.sign, np.float32)}


def batch_of(policy: ps.Policy) -> SampleBatch:
    """[4, 6] rows by chance."""
    rng = np.random.default_rng(0)
    info, state = examples(policy.agent, policy.spec)
    batch = allocate_batch(policy.spec, BatchSpec(4, 6), info, state)
    for name, x in batch.obs.items():
        x[...] = 1 if name == "action_mask" else rng.uniform(-1, 1, x.shape)
    batch.valid[...], batch.info["logp"][...] = True, -1.3
    return batch


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("spec", [SPEC, MASKED], ids=["box", "masked"])
def test_each_reads_its_keys_alone(name: str, spec: EnvSpec) -> None:
    if name == "gsde" and spec is MASKED:
        return
    policy = ps.PPO(net=NETS[name], normalize_value=False).build(spec, 0)
    agent: Any = policy.agent
    check_agent(agent, spec)
    batch = batch_of(policy)
    agent.observe(as_tensors(batch, policy.device))

    def outputs(changed: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        other = batch.copy()
        if changed:
            other.obs[changed][...] += 0.5
        x = as_tensors(other, policy.device)
        found = agent(x.inputs if x.state is not None else x.inputs.flat(), x.state)
        torch.testing.assert_close(found.value.reshape(5, 6), agent.values(x))
        inputs = tree_map(lambda t: t[0], x.inputs)
        action, _, _ = agent.act(inputs, None if x.state is None else x.state, None)
        dist = found.dist
        return agent.values(x), dist.logp if spec is MASKED else getattr(dist, "box", dist).mean, action

    value, mean, action = outputs("")
    for key, (by_critic, by_actor) in {"policy": (1, 1), "height": (0, 1), "critic": (1, 0)}.items():
        v, m, a = outputs(key)
        assert torch.isclose(v, value).all() != by_critic
        assert torch.equal(m, mean) != by_actor
        assert by_actor or torch.equal(a, action)
    before = {n: p.clone() for n, p in agent.named_parameters()}
    for _ in range(2):
        ps.train_one_step(policy, batch)
    assert all(not torch.equal(p, before[n]) for n, p in agent.named_parameters() if "log_std" not in n)


@pytest.mark.parametrize("name", NETS)
def test_prediction_needs_the_actors_keys_alone(name: str, tmp_path: Path) -> None:
    policy = ps.PPO(net=NETS[name]).build(SPEC, 0)
    full = {key: np.full((1, *leaf.shape), 0.3, np.float32) for key, leaf in OBS.items()}
    seen = {key: full[key] for key in ("policy", "height")}
    state: Any = None

    def answer(obs: Any) -> Any:
        return policy.predict(obs, state) if policy.recurrent else (policy.predict(obs), None)

    for _ in range(3):
        found = [answer(obs) for obs in (full, seen)]
        assert np.array_equal(found[0][0], found[1][0])
        state = found[1][1]
    again, first = (x.predict(seen) for x in (ps.load(policy.save(tmp_path / "p.safetensors")), policy))
    assert np.array_equal(*((again[0], first[0]) if policy.recurrent else (again, first)))
    with pytest.raises(ConfigError, match="height"):
        policy.predict({"policy": full["policy"]})


@pytest.mark.parametrize("algo", [ps.PPO(epochs=2), ps.A2C(), ps.IMPALA(), ps.APPO()])
def test_the_critic_learns_from_what_only_it_sees(algo: Any) -> None:
    """Values of the last step of an episode are its sign, which the actor cannot see."""
    net = ps.Net(hidden=(16,), actor_keys=("policy",), critic_keys=("critic",))
    policy = replace(algo, net=net, lr=1e-2).build(
        EnvSpec({"policy": VECTOR, "critic": LeafSpec("box", (1,), "float32", -1.0, 1.0)}, BOX)
    )
    sampler = ps.SerialSampler(T=32, B=8).build(Groups, 3)
    sampler.initialize(policy.agent)
    try:
        found: Any = None
        for itr in range(15):
            found = ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
    finally:
        sampler.shutdown()
    assert found["train/explained_variance"] > 0.5
    first = dict(policy.agent.named_parameters())
    assert first["actor.mlp.layers.0.weight"].shape == (16, 3) and first["critic.mlp.layers.0.weight"].shape == (16, 1)


FROM_REPLAY: Any = {"batch_size": 32, "replay_ratio": 8, "learning_starts": 8}
OFF_POLICY: dict[str, Any] = {
    "sac": ps.SAC(**FROM_REPLAY),
    "tqc": ps.TQC(**FROM_REPLAY, quantiles=5),
    "crossq": ps.CrossQ(**FROM_REPLAY),
    "td3": ps.TD3(**FROM_REPLAY, distributional="c51"),
    "ddpg": ps.DDPG(**FROM_REPLAY),
    "cql": ps.CQL(**FROM_REPLAY, sampled_actions=2),
    "discrete-sac": ps.DiscreteSAC(**FROM_REPLAY),
}
PARTED: Any = {"actor_keys": ("policy", "height"), "critic_keys": ("policy", "critic"), "normalize_obs": True}


@pytest.mark.parametrize("name", OFF_POLICY)
def test_critics_from_replay_read_their_keys_alone(name: str, tmp_path: Path) -> None:
    """And keep a normaliser of their own; acting, `predict` and a file need the actor's keys alone."""
    spec = MASKED if name == "discrete-sac" else SPEC
    net = ps.Net(hidden=(6,), activation="relu", **PARTED)
    policy = replace(OFF_POLICY[name], net=net).build(spec, 0)
    agent: Any = policy.agent
    check_agent(agent, spec)
    rng = np.random.default_rng(0)
    policy.prepare(BatchSpec(4, 6))
    before = {n: p.clone() for n, p in agent.named_parameters() if "target" not in n and n != "log_multiplier"}
    batch = allocate_batch(spec, BatchSpec(4, 6), *examples(agent, spec))
    for _ in range(3):
        for key, x in batch.obs.items():
            x[...] = 1 if key == "action_mask" else rng.normal(0.3, 2.0, x.shape)
        batch.valid[...] = True
        batch.reward[...] = rng.normal(size=(4, 6))
        ps.train_one_step(policy, batch)
    unmoved = [n for n, p in agent.named_parameters() if n in before and torch.equal(p, before[n])]
    assert not unmoved
    assert len(agent.central_normalizer.moments) == len(agent.normalizer.moments) == 2
    assert float(agent.central_normalizer.moments[0].count) == 72.0
    x = as_tensors(batch, policy.device).inputs.flat()
    action = torch.zeros(30, 2)

    def outputs(changed: str) -> tuple[torch.Tensor, torch.Tensor]:
        seen = x._replace(obs={k: v + 0.5 if k == changed else v for k, v in x.obs.items()})
        return (agent.q(seen) if spec is MASKED else agent.q(seen, action)), agent(seen)

    value, out = outputs("")
    for key, (by_critic, by_actor) in {"policy": (1, 1), "height": (0, 1), "critic": (1, 0)}.items():
        v, o = outputs(key)
        assert torch.equal(v, value) != by_critic and torch.equal(o, out) != by_actor, key
    shown = {key: np.full((1, *leaf.shape), 1, leaf.dtype) for key, leaf in spec.obs.items() if key != "critic"}
    again = ps.load(policy.save(tmp_path / "p.safetensors"), trust=True)
    assert np.array_equal(again.predict(shown), policy.predict(shown))
    with pytest.raises(ConfigError, match="height"):
        policy.predict({key: x for key, x in shown.items() if key != "height"})


def test_an_observation_with_a_privileged_key_is_told_once() -> None:
    with pytest.warns(UserWarning, match=r"key 'critic'.*net.actor_keys=\('policy', 'height'\)"):
        ps.PPO().build(SPEC)
    with pytest.warns(UserWarning, match="key 'critic', and the actor reads it"):
        ps.PPO(net=ps.Net(critic_keys=("critic",))).build(SPEC)
    for name, algo in OFF_POLICY.items():
        with pytest.warns(UserWarning, match="key 'critic', and the actor reads it: name"):
            algo.build(MASKED if name == "discrete-sac" else SPEC)
    with pytest.warns(UserWarning, match="key 'critic', and the actor reads it: leave it out"):
        ps.DQN().build(EnvSpec(OBS, CHOICE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.PPO(net=NETS["plain"]).build(SPEC)
        ps.PPO(net=ps.Net(actor_keys=("policy", "height", "critic"))).build(SPEC)
        ps.PPO().build(EnvSpec({"a": VECTOR, "b": BOX}, BOX))


def test_what_it_cannot_be_is_refused() -> None:
    def refused(match: str, algo: Any = None, spec: EnvSpec = SPEC, **net: Any) -> None:
        with pytest.raises(ConfigError, match=match):
            (algo or ps.PPO)(net=ps.Net(**net)).build(spec)

    refused(r"net.critic_keys=\('critics',\); expected .*\['critic', 'height', 'policy'\]", critic_keys=("critics",))
    refused(r"net.actor_keys=\(\); expected one or more", actor_keys=())
    refused(r"net.actor_keys=\('action_mask',\)", spec=MASKED, actor_keys=("action_mask",))
    refused("expected one that is a Dict", spec=EnvSpec(VECTOR, BOX), actor_keys=("policy",))
    refused(r"net.critic_keys=\('policy',\) with.*is a Dict", spec=EnvSpec(VECTOR, BOX), critic_keys=("policy",))
    refused("net.shared=None or False", actor_keys=("policy",), shared=True)
    refused("critic_recurrent='own' or 'none'", actor_keys=("policy",), recurrent="lstm")
    refused(r"net.critic_keys=\('critics',\); expected", ps.SAC, critic_keys=("critics",))
    for algo in (ps.DQN, ps.PQN, ps.CQL):
        refused("expected PPO, A2C, APPO, IMPALA, MAPPO.*TD3", algo, EnvSpec(OBS, CHOICE), critic_keys=("policy",))


def test_an_encoder_of_a_key_goes_to_those_that_read_it() -> None:
    encoder = {"critic": "tests.agents.own.encoders:Wide"}
    agent: Any = ActorCritic(SPEC, ps.Net(**KEYS, encoder=encoder))  # pyright: ignore
    assert not len(agent.actor.encoder.own) and "critic" in agent.critic.encoder.own
    inputs = Inputs({k: torch.zeros(2, *leaf.shape) for k, leaf in OBS.items()}, *[None] * 3)  # pyright: ignore
    assert agent(inputs).value.shape == (2,)
