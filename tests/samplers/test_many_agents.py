"""Environments of many agents in the live sampler: rows, states, episodes, evaluations, resume."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.core.noise import env_seed
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.toy import EchoAgents, EchoTurns
from penstock.samplers.live import evaluation_seed
from penstock.testing.samplers import EchoAgent
from tests.envs.pools.plain_loop import seated
from tests.samplers.many import Rows, agents_of, bits
from tests.slow import slow


def turn_about(agent: str, episode: int, seed: int) -> str:
    return "a" if (int(agent[-1]) + episode) % 2 else "b"


ONE: Any = (1, ("s",), None, None)
IDLE: Any = (2, ("s",), None, {"s": 3})  # a seat that idles for ever
THREE: Any = (5, ("a", "b", "c"), {f"agent_{k}": "abcab"[k] for k in range(5)}, {"c": 2})
DEALT: Any = (3, ("a", "b"), turn_about, {"a": 2, "b": 2})
KINDS = {"parallel": EchoAgents, "turns": EchoTurns}


def echoes(kind: str, who: Any, **config: Any) -> EnvConfig:
    K, policies, mapping, seats = who
    return seated(KINDS[kind], policies, mapping, seats, kwargs={"agents": K}, info_keys=("echo",), **config)


@pytest.mark.parametrize("T", [2, 64, *slow(1, 5)])
@pytest.mark.parametrize("who", [ONE, IDLE, THREE, DEALT], ids=["one", "idle", "three", "dealt"])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_every_row_state_and_episode_is_a_plain_loops(kind: str, who: Any, T: int) -> None:
    config, rows = echoes(kind, who), Rows()
    sampler = ps.SerialSampler(T=T, B=3).build(config, 5, share=ps.Share(4))
    sampler.initialize(agents_of(sampler), buffers=2)
    for k in range(-(-120 // T)):
        rows.take(*sampler.obtain_samples(k), k)
    sampler.shutdown()
    assert rows.agent_steps == rows.compare(config, 5, range(4, 7)) > 60
    assert (rows.moved > 0) == (kind == "turns" and who is not ONE)  # who is alone has its next turn at once
    assert rows.steps <= rows.agent_steps
    if kind == "turns":
        assert rows.steps == rows.agent_steps


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_evaluations_play_exact_numbers_of_episodes_and_leave_training_alone(kind: str) -> None:
    config = echoes(kind, THREE)
    quiet, busy = (ps.SerialSampler(T=7, B=2).build(config, 1) for _ in range(2))
    for sampler in (quiet, busy):
        sampler.initialize(agents_of(sampler))
    for k in range(6):
        found = busy.evaluate_agent(k, episodes=5 + k, deterministic=bool(k % 2), slots=4)
        assert len(found) == 5 + k
        counts = np.bincount(found.slot, minlength=4)
        assert counts.max() - counts.min() <= 1
        same = busy.evaluate_agent(k, episodes=5 + k, deterministic=bool(k % 2), slots=4)
        assert found.return_.tobytes() == same.return_.tobytes()
        assert bits(quiet.obtain_samples(k)[0]) == bits(busy.obtain_samples(k)[0])


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_an_evaluation_may_have_any_number_of_slots(kind: str) -> None:
    sampler = ps.SerialSampler(T=7, B=6).build(echoes(kind, THREE), 1)
    sampler.initialize(agents_of(sampler))
    assert [len(sampler.evaluate_agent(k, episodes=k, slots=k)) for k in (1, 4, 5)] == [1, 4, 5]


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_a_resumed_sampler_goes_on_bit_for_bit(kind: str, T: int) -> None:
    config = echoes(kind, DEALT)
    whole = ps.SerialSampler(T=T, B=3).build(config, 2)
    whole.initialize(agents_of(whole))
    for k in range(9):
        whole.obtain_samples(k)
    state = whole.state_dict()
    resumed = ps.SerialSampler(T=T, B=3).build(config, 2)
    resumed.initialize(agents_of(resumed))
    resumed.load_state_dict(state)
    assert not resumed.cut_slots
    for k in range(9, 20):
        (one, episodes), (other, others) = whole.obtain_samples(k), resumed.obtain_samples(k)
        assert bits(one) == bits(other)
        assert episodes.return_.tobytes() == others.return_.tobytes()
        assert episodes.policies["a"].length.tobytes() == others.policies["a"].length.tobytes()


def test_agents_are_those_of_the_policies_or_an_error_names_them() -> None:
    sampler = ps.SerialSampler(T=4, B=2).build(echoes("parallel", DEALT))
    agents = agents_of(sampler)
    with pytest.raises(ConfigError, match=r"one EchoAgent; expected an agent for each of the policies \['a', 'b'\]"):
        sampler.initialize(agents["a"])
    with pytest.raises(ConfigError, match=r"policies \['a', 'bee'\].*'bee'.*'b' is missing"):
        sampler.initialize({"a": agents["a"], "bee": agents["b"]})
    other = ps.SerialSampler(T=4, B=2).build("CartPole-v1")
    with pytest.raises(ConfigError, match="the agent of policy 'b' was built for"):
        sampler.initialize({"a": agents["a"], "b": EchoAgent(other.spec)})
    shown = sampler.initialize(agents)
    assert {*shown} == {"a", "b"} and shown["b"]["obs"].shape == (6,)
    assert sampler.blank_batch().agent_steps == 4 * 2 * 4


def test_an_agent_alone_is_taken_where_one_policy_plays_all_and_by_name_where_there_is_one_agent() -> None:
    sampler = ps.SerialSampler(T=4, B=2).build(echoes("parallel", IDLE))
    sampler.initialize(EchoAgent(sampler.specs["s"]))
    assert {*sampler.obtain_samples(0)[0]} == {"s"}
    one = ps.SerialSampler(T=4, B=2).build("CartPole-v1")
    assert one.specs == {"shared": one.spec}
    one.initialize({"a": EchoAgent(one.spec)})
    assert one.obtain_samples(0)[0].spec == (4, 2)


def test_a_batch_of_agents_that_act_at_once_falls_into_slices_of_time_and_one_of_turns_does_not() -> None:
    for kind, environments in (("parallel", 3), ("turns", None)):
        sampler = ps.SerialSampler(T=8, B=3).build(echoes(kind, DEALT))
        sampler.initialize(agents_of(sampler))
        batch = sampler.obtain_samples(0)[0]
        assert batch.environments == environments
        if environments:
            slices = ps.timeslices(batch, 3)
            assert [part.environments for part in slices] == [3, 3, 3]
            assert sum(part.env_steps for part in slices) == batch.env_steps
            assert sum(part.agent_steps for part in slices) == batch.agent_steps


def test_metrics_are_the_teams_and_each_policys_and_agents() -> None:
    sampler = ps.SerialSampler(T=64, B=2).build(echoes("parallel", DEALT))
    sampler.initialize(agents_of(sampler))
    episodes = sampler.obtain_samples(0)[1]
    found = episodes.metrics()
    for where, part in (("", episodes), ("b/", episodes.policies["b"]), ("agent/agent_1/", episodes.agents["agent_1"])):
        assert found[f"rollout/{where}ep_rew_mean"] == part.return_.mean()
        assert found[f"rollout/{where}ep_len_mean"] == part.length.mean()
        assert (f"rollout/{where}ep_len_max" in found) == ("agent/" not in where)  # rows of metrics stay short
    assert episodes.return_.sum() == sum(part.return_.sum() for part in episodes.agents.values())
    plain = type(episodes)(**episodes.to_plain())
    assert plain.metrics() == found
    assert plain.last(3).agents["agent_2"].return_.tolist() == episodes.last(3).agents["agent_2"].return_.tolist()


class Scripted(EchoAgent):
    """Plays 2 where its own steps are even, else 0."""

    def act(self, inputs: Any, state: Any, noise: Any) -> Any:
        action, info, after = super().act(inputs, state, None)
        return 2 * (inputs.obs[:, 3].long() % 2 == 0).to(action.dtype), info, after


def cut_parallel(env: Any, seed: int, limit: int) -> tuple[dict[str, list[float]], int]:
    """Rewards of every agent in the first `limit` steps of an episode, and its steps."""
    obs, _ = env.reset(seed=seed)
    paid: dict[str, list[float]] = {}
    steps = 0
    while env.agents and steps < limit:
        obs, rewards, *_ = env.step({a: 2 * (int(obs[a][3]) % 2 == 0) for a in env.agents})
        steps += 1
        for a, reward in rewards.items():
            paid.setdefault(a, []).append(reward)
    return paid, steps


def cut_turns(env: Any, seed: int, limit: int) -> tuple[dict[str, list[float]], int]:
    """The same of turns: what each agent was paid by the move after which the episode is cut, or by its own end."""
    env.reset(seed=seed)
    paid: dict[str, list[float]] = {}
    moves = 0
    while env.agents:
        obs, _, terminated, truncated, _ = env.last()
        over = terminated or truncated
        if not over and moves == limit:
            break
        env.step(None if over else 2 * (int(obs[3]) % 2 == 0))
        moves += not over
        for a, reward in env.rewards.items():
            if not over:
                paid.setdefault(a, []).append(reward)
    return paid, moves


@pytest.mark.parametrize(
    ("kind", "limit", "steady"),
    [(kind, limit, False) for kind in ("parallel", "turns") for limit in (1, 5, 9, 200)] + [("parallel", 9, True)],
)
def test_a_long_episode_of_an_evaluation_is_cut_and_counts_as_far_as_it_went(
    kind: str, limit: int, steady: bool
) -> None:
    """Where the same agents stay (`steady`), rewards are added up for many rows at once."""
    config = echoes(kind, ONE if steady else DEALT)
    config = replace(config, kwargs={**config.kwargs, "length": 70, **({"steady": True} if steady else {})})
    sampler = ps.SerialSampler(T=4, B=1).build(config, 3)
    sampler.initialize({policy: Scripted(spec) for policy, spec in sampler.specs.items()})
    found = sampler.evaluate_agent(0, 6, slots=4, max_steps=limit)
    assert len(found) == 6 and found.parts is not None
    env: Any = config.make()
    lengths = set[int]()
    for i, slot in enumerate(found.slot.tolist()):
        seed = env_seed(evaluation_seed(3, 0), slot, int((found.slot[:i] == slot).sum()), evaluation=True)
        paid, steps = {"parallel": cut_parallel, "turns": cut_turns}[kind](env, seed, limit)
        lengths.add(steps)
        assert found.length[i] == steps
        assert found.return_[i] == sum(map(sum, paid.values()))
        for k, agent in enumerate(config.seating.agents):  # pyright: ignore[reportOptionalMemberAccess]
            assert found.parts.return_[i, k] == sum(paid.get(agent, []))
    assert max(lengths) == limit or limit == 200
    assert found.without_end(limit) == sum(x == limit for x in found.length.tolist() if limit < 70)


@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_an_evaluation_does_not_wait_for_an_episode_without_end(kind: str) -> None:
    config = echoes(kind, ONE)
    endless = replace(config, kwargs={**config.kwargs, "length": 1 << 30, "steady": True})
    sampler = ps.SerialSampler(T=4, B=1).build(endless)
    sampler.initialize(agents_of(sampler))
    found = sampler.evaluate_agent(0, 3, slots=2, max_steps=100)
    assert found.length.tolist() == [100] * 3 and not found.terminated.any()
    assert sampler.evaluate_agent(0, 3, slots=2, max_steps=40).length.tolist() == [40] * 3


@pytest.mark.parametrize("T", [1, 6])
@pytest.mark.parametrize("kind", ["parallel", "turns"])
def test_an_unroll_from_the_stored_state_is_what_the_agent_did(kind: str, T: int) -> None:
    config = echoes(kind, DEALT)
    sampler = ps.SerialSampler(T=T, B=3).build(config, 4)
    nets = {"a": ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True), "b": ps.Net(hidden=(8,))}
    agents = {p: ps.PPO(net=net).build(sampler.specs[p], seed=1).agent for p, net in nets.items()}
    sampler.initialize(agents)
    rows = 0
    for k in range(60 // T):
        batch, _ = sampler.obtain_samples(k)
        for policy, agent in agents.items():
            part = tree_map(torch.from_numpy, batch[policy].copy())
            with torch.no_grad():
                out = agent(agent.needed(part.inputs_t), part.state)
            logp = out.dist.log_prob(part.action)
            assert torch.allclose(logp[part.valid], part.info["logp"][part.valid], atol=1e-5)
            rows += int(part.valid.sum())
    assert rows > 60
