"""Policies: who plays whom, seats, what is refused; and a PolicySet that trains policy by policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import MultiAgentBatch, SampleBatch, allocate_batch
from penstock.core.config import from_plain, override, to_plain
from penstock.core.errors import CheckpointError, ConfigError, NonFiniteError
from penstock.core.noise import policy_seed
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec, specs_from_plain, specs_to_plain
from penstock.envs.seats import AgentSpecs
from penstock.learn.policies import for_agents
from penstock.learn.train_ops import train_one_step

NET = ps.Net(hidden=(8,))
SPEC = EnvSpec(LeafSpec("box", (3,), "float32", -np.inf, np.inf), LeafSpec("discrete", (), "int64", sizes=(4,)))
WIDE = replace(SPEC, obs=LeafSpec("box", (5,), "float32", -np.inf, np.inf))
PPO = ps.PPO(net=NET, epochs=2, minibatch=8)
DQN = ps.DQN(net=NET, batch_size=4, replay_ratio=4.0, learning_starts=20, replay=ps.ReplaySettings(capacity=400))
TWO = AgentSpecs({"red": SPEC, "blue": SPEC}, turns=False)
ODD = AgentSpecs({"red": SPEC, "blue": WIDE, "green": SPEC}, turns=True)


def wrong(value: Any) -> Any:
    """A value of another type than is asked for."""
    return value


def by_episode(agent: str, episode: int, seed: int) -> str:
    return "ab"[(episode + (agent == "red")) % 2]


def rows(policy: ps.Policy, T: int, B: int, seed: int = 0, invalid: int = 0) -> SampleBatch:
    """A batch of random rows as a policy's sampler would fill it; the last rows of slot 0 are not valid."""
    rng = np.random.default_rng(seed)
    agent = policy.agent
    noise = torch.rand(B, agent.noise_size)
    first = allocate_batch(policy.spec, BatchSpec(1, B))
    _, info, _ = agent.act(ps.Inputs(*map(_row_0, first.inputs)), agent.initial_state(B), noise)
    example = {name: x[0].detach().numpy() for name, x in info.items()}
    batch = allocate_batch(policy.spec, BatchSpec(T, B), example)
    batch.obs[...] = rng.normal(size=batch.obs.shape)
    batch.prev_action[...] = rng.integers(0, 4, batch.prev_action.shape)
    batch.prev_reward[...] = rng.normal(size=batch.prev_reward.shape)
    batch.valid[...] = True
    batch.valid[T - invalid :, 0] = False
    batch.first[0] = True
    for x in batch.info.values():
        x[...] = -1.0
    return batch


def _row_0(x: Any) -> Any:
    return None if x is None else torch.from_numpy(x[0])


def built(algo: ps.Policies, seed: int = 7) -> ps.PolicySet:
    return algo.build(dict.fromkeys(algo.algos, SPEC), seed=seed)


def test_a_dict_is_counted_and_a_function_has_its_seats() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, {"blue": "b", "red": "a", "green": "a"})
    config = algo.seat("CartPole-v1", AgentSpecs(dict.fromkeys(("red", "blue", "green"), SPEC), turns=True))
    seating = config.seating
    assert seating is not None and config.env == "CartPole-v1"
    assert (seating.policies, seating.seats, seating.agents, seating.turns) == (
        ("a", "b"),
        (2, 1),
        ("red", "blue", "green"),
        True,
    )
    assert [spec.agents for spec in seating.specs] == [2, 1]
    assert seating.mapping == {"red": "a", "blue": "b", "green": "a"}
    own = ps.Policies({"a": PPO, "b": PPO}, by_episode, seats={"a": 1, "b": 2}).seat("x", TWO).seating
    assert own is not None and own.seats == (1, 2) and own.mapping is by_episode
    alone = ps.Policies({"a": PPO}).seat("x", TWO).seating
    assert alone is not None and alone.seats == (2,) and alone.mapping == {"red": "a", "blue": "a"}


def test_each_policy_has_the_spec_of_the_agents_that_it_plays() -> None:
    algo = ps.Policies({"a": PPO, "b": PPO}, {"red": "a", "green": "a", "blue": "b"})
    seating = algo.seat("x", ODD).seating
    assert seating is not None
    assert seating.specs == (replace(SPEC, agents=2), WIDE)
    sorted_out = ps.Policies({"a": PPO, "b": PPO}, lambda agent, *_: "b" if agent == "blue" else "a", {"a": 2, "b": 1})
    assert sorted_out.seat("x", ODD).seating.specs == seating.specs  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ps.Policies({}), "expected algorithms by policy id"),
        (lambda: ps.Policies({"a/b": PPO}), "without '/'"),
        (lambda: ps.Policies({"a": ps.PPO}), r"did you mean PPO\(\)"),
        (lambda: ps.Policies({"a": "ppo"}), "policy 'a' is 'ppo'; expected settings"),  # pyright: ignore
        (lambda: ps.Policies({"a": PPO}, {"red": "b"}), "policy_mapping_fn names the policy 'b'"),
        (lambda: ps.Policies({"a": PPO}, seats={"b": 1}), "seats names the policy 'b'"),
        (lambda: ps.Policies({"a": PPO}, seats={"a": 0}), "expected 1 or more agents"),
        (lambda: ps.Policies({"a": PPO}, seats=wrong({"a": 2.0})), r"seats\['a'\]=2.0; expected 1 or more agents"),
        (lambda: ps.Policies({"a": PPO}, seats=wrong({"a": "2"})), r"seats\['a'\]='2'; expected 1 or more agents"),
        (lambda: ps.Policies({"a": PPO}, policies_to_train=("b",)), "policies_to_train names the policy 'b'"),
        (lambda: ps.Policies({"a": PPO}, policies_to_train=()), "at least one policy id"),
        (lambda: ps.Policies({"a": PPO}, lambda agent: "a"), "policy_mapping_fn"),
        (lambda: ps.Policies({"a": Own()}), "training_step of its own"),
        (lambda: for_agents(Own(), True), "training_step of its own"),
        (lambda: ps.Policies({"a": PPO, "b": PPO}).seat("x", TWO), "without a policy_mapping_fn"),
        (lambda: ps.Policies({"a": PPO, "b": PPO}).seat("x", ODD), "{'red': 'a', 'blue': 'b', 'green': 'a'}"),
        (lambda: ps.Policies({"a": PPO}, {"red": "a"}).seat("x", TWO), "names no policy for agent 'blue'"),
        (lambda: ps.Policies({"a": PPO}, {"red": "a", "blau": "a"}).seat("x", TWO), "names agent 'blau'.*blue"),
        (
            lambda: ps.Policies({"a": PPO, "b": PPO}, {"red": "a", "blue": "a"}).seat("x", TWO),
            "policy 'b' plays no agent",
        ),
        (lambda: ps.Policies({"a": PPO}, seats={"a": 1}).seat("x", TWO), "expected 2"),
        (lambda: ps.Policies({"a": PPO, "b": PPO}, by_episode).seat("x", TWO), "policy 'a' has 0 seats"),
        (lambda: ps.Policies({"a": PPO}, lambda *_: "c", {"a": 2}).seat("x", TWO), "names 'c'"),
        (lambda: for_agents(PPO, True).seat("x", ODD), "'shared' plays 'red'.*equal spaces"),
        (lambda: ps.Policies({"a": PPO, "b": PPO}).build(SPEC), "environment of one agent"),
        (lambda: ps.Policies({"a": PPO}).build({"b": SPEC}), "expected those of"),
    ],
)
def test_what_contradicts_itself_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@dataclass(frozen=True)
class Own:
    @property
    def batch(self) -> BatchSpec:
        return BatchSpec(1, 1)

    def build(self, spec: EnvSpec, seed: int = 0, device: str = "cpu") -> ps.Policy:
        return PPO.build(spec, seed, device)

    def training_step(self, policy: Any, sampler: Any, itr: int) -> Any:
        raise AssertionError


def test_the_first_policy_is_the_plain_algorithms() -> None:
    policies, plain = built(ps.Policies({"a": PPO, "b": PPO}, by_episode, {"a": 1, "b": 1})), PPO.build(SPEC, seed=7)
    own = plain.agent.state_dict()
    assert all(torch.equal(x, own[name]) for name, x in policies["a"].agent.state_dict().items())
    assert not all(torch.equal(x, own[name]) for name, x in policies["b"].agent.state_dict().items())
    assert policy_seed(7, 0) == 7 and len({policy_seed(seed, i) for seed in range(20) for i in range(20)}) == 400


def test_each_learns_from_its_own_batch_as_if_alone() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, by_episode, {"a": 1, "b": 1})
    policies = built(algo)
    alone = {"a": PPO.build(SPEC, seed=7), "b": DQN.build(SPEC, seed=policy_seed(7, 1))}
    metrics: dict[str, float] = {}
    for itr in range(3):
        parts = {name: rows(policies[name], 8, 3, seed=itr, invalid=2) for name in policies}
        metrics = train_one_step(policies, MultiAgentBatch(parts, env_steps=24))
        own = {name: train_one_step(policy, parts[name]) for name, policy in alone.items()}
        for name, found in own.items():
            assert found == {key.replace(f"/{name}/", "/"): x for key, x in metrics.items() if f"/{name}/" in key}
    assert metrics["train/a/n_updates"] == policies["a"].updates > 0
    assert policies["b"].replay_schedule.collected == 3 * 22 and policies["b"].updates > 0  # pyright: ignore
    for name, policy in alone.items():
        for key, x in policy.agent.state_dict().items():
            assert torch.equal(x, policies[name].agent.state_dict()[key])


def test_those_not_trained_act_only() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, by_episode, {"a": 1, "b": 1}, policies_to_train=("a",))
    assert algo.batch == PPO.batch and not hasattr(algo, "training_step")
    policies = built(algo)
    before = {name: x.clone() for name, x in policies["b"].agent.state_dict().items()}
    policies.set_progress(0.0)
    policies.prepare(BatchSpec(8, 3))
    assert float(policies["b"].agent.epsilon.max()) == pytest.approx(0.05)  # of the end, not of random first steps
    parts = {name: rows(policies[name], 8, 3) for name in policies}
    metrics = train_one_step(policies, MultiAgentBatch(parts, env_steps=24))
    assert metrics and not [name for name in metrics if "/b/" in name]
    assert all(torch.equal(x, before[name]) for name, x in policies["b"].agent.state_dict().items())
    assert policies["b"].replay_schedule.replay.storage is None  # pyright: ignore[reportOptionalMemberAccess]


def test_what_is_stored_is_prefixed_and_comes_back() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, by_episode, {"a": 1, "b": 1})
    policies, other = built(algo), built(algo, seed=8)
    for itr in range(3):
        parts = {name: rows(policies[name], 8, 3, seed=itr) for name in policies}
        train_one_step(policies, MultiAgentBatch(parts, env_steps=24))
    state, arrays = policies.state_dict(), policies.arrays()
    assert {key.partition("/")[0] for key in (*state["agent"], *arrays, *state)} == {"a", "b", "agent"}
    other.prepare(BatchSpec(8, 3), {name: {k: v[0, 0] for k, v in parts[name].info.items()} for name in parts})
    other.load_state_dict(state, arrays)
    again = other.state_dict()
    assert all(torch.equal(x, again["agent"][name]) for name, x in state["agent"].items())
    assert again["b/experience"]["collected"] == state["b/experience"]["collected"] == 72
    parts = {name: rows(policies[name], 8, 3, seed=9) for name in policies}
    for name, policy in policies.items():  # of the generators' seeds the checkpoint says nothing
        other[name].seed = policy.seed
    results = [train_one_step(each, MultiAgentBatch(parts, env_steps=24)) for each in (policies, other)]
    assert results[0] == results[1]


@pytest.mark.parametrize(("before", "after"), [("ab", "ac"), ("ab", "abc"), ("abc", "ab"), ("ab", "a"), ("a", "ab")])
def test_policies_of_other_ids_are_named(before: str, after: str) -> None:
    stored, here = (
        built(ps.Policies(dict.fromkeys(ids, PPO), by_name(ids), dict.fromkeys(ids, 2))) for ids in (before, after)
    )
    theirs = "one policy" if len(before) == 1 else f"policies {list(before)}"
    for load in (lambda: here.load_parameters(stored.parameters()), lambda: here.load_state_dict(stored.state_dict())):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert theirs in str(caught.value) and str(list(after)) in str(caught.value)


def by_name(ids: str) -> Any:
    def mapping(agent: str, episode: int, seed: int) -> str:
        return ids[episode % len(ids)]

    return mapping


def test_one_policy_is_stored_as_a_plain_one() -> None:
    policies = ps.Policies({"a": PPO}).build(SPEC, seed=7)
    assert policies.state_dict()["agent"].keys() == PPO.build(SPEC).agent.state_dict().keys()
    assert policies.state_dict().keys() == PPO.build(SPEC).state_dict().keys()
    assert policies.agents is policies["a"].agent and policies.specs == SPEC


def test_predict_by_agent() -> None:
    policies = built(ps.Policies({"a": PPO, "b": PPO}, {"red": "b", "blue": "a"}))
    obs = np.linspace(-1, 1, 3 * 5, dtype=np.float32).reshape(5, 3)
    assert np.array_equal(policies.predict(obs, agent="red"), policies["b"].predict(obs))
    assert policies.playing("blue") is policies["a"]
    with pytest.raises(ConfigError, match="name the agent"):
        policies.predict(obs)
    with pytest.raises(ConfigError, match="no agent 'rot'"):
        policies.predict(obs, agent="rot")
    with pytest.raises(ConfigError, match="no policy 'c'"):
        policies["c"]


def test_a_loss_that_is_not_finite_names_the_policy() -> None:
    policies = built(ps.Policies({"a": PPO, "b": PPO}, {"red": "b", "blue": "a"}))
    parts = {name: rows(policies[name], 8, 3) for name in policies}
    parts["b"].prev_reward[...] = np.inf
    with pytest.raises(NonFiniteError, match="policy 'b'"):
        for _ in range(10):
            train_one_step(policies, MultiAgentBatch(parts, env_steps=24))


def test_settings_are_stored_and_changed_by_path() -> None:
    algo = ps.Policies({"a": PPO, "b": DQN}, by_episode, {"a": 1, "b": 1}, ("a",))
    assert from_plain(to_plain(algo)) == algo
    exp = ps.Experiment("CartPole-v1", algo)
    assert override(exp, {"algo.algos.b.lr": 0.5}).algo.algos["b"].lr == 0.5  # pyright: ignore
    specs = {"a": SPEC, "b": replace(WIDE, agents=2)}
    assert specs_from_plain(specs_to_plain(specs)) == specs and specs_from_plain(specs_to_plain(SPEC)) == SPEC


def test_a_mapping_by_its_name() -> None:
    algo = ps.Policies({"a": PPO, "b": PPO}, "tests.learn.test_policies:by_episode", {"a": 1, "b": 1})
    assert algo.policy_mapping_fn is by_episode


def test_a_replay_is_as_wide_as_the_seats_of_all_environments() -> None:
    algo = ps.Policies({"a": DQN}, lambda *_: "a", {"a": 2})
    policies = algo.build({"a": replace(SPEC, agents=2)}, seed=7)
    parts = {"a": rows(policies["a"], 8, 6)}
    policies.prepare(BatchSpec(8, 3), {"a": {key: x[0, 0] for key, x in parts["a"].info.items()}})
    assert train_one_step(policies, MultiAgentBatch(parts, env_steps=24))["train/n_updates"] > 0
    assert policies.arrays()["valid"].shape[1] == 6
