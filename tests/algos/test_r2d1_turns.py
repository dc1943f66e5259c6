"""R2D1 where agents take turns: rows without a turn reach neither the memory nor the priority of a sequence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.r2d1 import between, loss_fn, postprocess_fn
from penstock.core.tree import tree_map
from penstock.envs.toy import EchoTurns, Nim, RepeatPrevious
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler
from tests.algos.r2d1_slow import BY_AGENT, NET, SMALL, drawn, replay_of, trained


def played(env: Any, T: int, kind: str, moves: int = 400, **changes: Any) -> Policy:
    """R2D1 after so many moves of 4 environments, never trained."""
    net = replace(NET, recurrent=kind)
    replay = replace(BY_AGENT, capacity=100_000)
    cfg = replace(SMALL, learning_starts=100_000, batch_size=48, state_interval=T, net=net, replay=replay, **changes)
    algo = ps.Policies({"x": cfg})
    sampler = SerialSampler(T=T, B=4).build(algo.seat(env), seed=3)
    policies = algo.build(sampler.specs, seed=5)
    sampler.initialize(policies.agents)
    collected = itr = 0
    while collected < moves:
        batch, _ = sampler.obtain_samples(itr)
        itr, collected = itr + 1, collected + len(batch)
        train_one_step(policies, batch)
    sampler.shutdown()
    return policies["x"]


def own_turns(agent: Any, x: Any, n: int, network: Any) -> dict[int, np.ndarray[Any, Any]]:
    """Q [A] of the valid rows of sample n: the agent's turns one after the other, and nothing between them.

    A row without a turn before the end of an episode is none; one that opens an episode, and the last, start anew.
    """
    found: dict[int, np.ndarray[Any, Any]] = {}
    state = tree_map(lambda s: s[n : n + 1], x.state)
    for t in np.flatnonzero(x.valid[:, n].numpy()).tolist():
        row = between(x.inputs, t, t + 1)._replace(idle=None)
        row = type(row)(*(tree_map(lambda part: part[:, n : n + 1], part) for part in row))
        q, state = network(row, agent.prepared(row.obs), state)
        found[t] = q[0, 0].numpy()
    return found


def check(policy: Policy, T: int) -> int:
    """Holds samples against the record of acting and a slow loop; returns how many rows memory passed over."""
    agent: Any = policy.agent
    drawing, x = drawn(policy)
    storage = replay_of(policy).storage
    rows = drawing.unit * T + np.arange(len(x.valid))[:, None]
    recorded = storage.info("['q']", rows, np.broadcast_to(drawing.slot, rows.shape))
    with torch.no_grad():
        q, target = agent(x.inputs, x.state), agent.bootstrap(x.inputs, x.state)
        chosen = q[:-1].gather(-1, x["action"].long().unsqueeze(-1)).squeeze(-1).numpy()
        valid = x.valid.numpy()
        np.testing.assert_allclose(chosen[valid], recorded[valid], atol=1e-5)
        for n in range(0, len(drawing.unit), 5):
            for network, seen in ((agent.online, q), (agent.target, target)):
                for t, slow in own_turns(agent, x, n, network).items():
                    np.testing.assert_allclose(seen[t, n].numpy(), slow, atol=1e-5)
    assert valid.any()
    return int(x.inputs.idle.sum())


@pytest.mark.parametrize(("T", "agents", "kind"), [(1, 2, "lstm"), (3, 3, "gru"), (7, 4, "lstm"), (12, 2, "gru")])
def test_memory_is_that_of_an_agents_own_turns(T: int, agents: int, kind: str) -> None:
    assert check(played(lambda: EchoTurns(agents, 40), T, kind), T) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("agents", "kind"), list(itertools.product((2, 3, 4), ("lstm", "gru"))))
def test_memory_is_that_of_an_agents_own_turns_whatever_the_batch(agents: int, kind: str) -> None:
    for T in range(1, 41):
        env = [lambda: EchoTurns(agents, 60), lambda: EchoTurns(agents, 90, True)][T % 2]
        check(played(env, T, kind, 40 * T + 400), T)


def test_what_is_burnt_in_passes_over_rows_without_a_turn() -> None:
    """The split by `burn_in` changes no value behind it."""
    policy = played(lambda: EchoTurns(3, 40), 4, "lstm", 200)
    agent: Any = policy.agent
    _, x = drawn(policy)
    with torch.no_grad():
        parted = postprocess_fn(agent, x, policy.settings)
        after, _ = agent.online(parted.inputs, agent.prepared(parted.inputs.obs), parted.state)
        whole = agent(x.inputs, x.state)
    assert bool(x.inputs.idle[:4].any())
    torch.testing.assert_close(after, whole[4 : 4 + len(after)])


def test_a_fresh_sequence_has_the_priority_of_its_loss() -> None:
    """Also where a target stops before a turn that was open when its batch ended: the agent's value there is known."""
    policy = played(lambda: Nim(20), 4, "gru", burn_in=0)
    agent: Any = policy.agent
    drawing, x = drawn(policy)
    with torch.no_grad():
        loss = loss_fn(agent, postprocess_fn(agent, x, policy.settings), policy.settings)
    assert loss.priorities is not None and bool(x.inputs.idle.any())
    mass = replay_of(policy).index.arrays()["mass"][drawing.unit, drawing.slot]
    np.testing.assert_allclose(mass, (loss.priorities.numpy() + 1e-6) ** 0.7, rtol=1e-4)


def test_memory_of_one_agent_passes_over_nothing() -> None:
    policy, _ = trained(lambda: RepeatPrevious(length=5), replace(SMALL, learning_starts=3_000), 30)
    _, x = drawn(policy)
    assert not x.valid.all() and not x.inputs.idle.any()
