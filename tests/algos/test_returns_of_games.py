"""Returns with lambda 1 on PettingZoo's games and spread: a loop over the environment alone, agent by agent, over batches."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import Inputs
from penstock.core.noise import env_seed
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig
from penstock.learn.rows.postprocess import as_tensors

pytest.importorskip("pettingzoo")
T, GAMMA = 5, 0.9


class Row(NamedTuple):
    obs: Any
    reward: float
    terminated: bool
    truncated: bool
    after: Any
    """What the agent is shown next."""


def plain_rows(id_: str, actions: dict[str, list[int]]) -> dict[str, list[Row]]:
    """The rows of every agent until one of them has no action left."""
    env: Any = EnvConfig(id_).make()
    rows: dict[str, list[Row]] = defaultdict(list)
    left, n = {agent: iter(taken) for agent, taken in actions.items()}, 0
    try:
        while True:
            found = env.reset(seed=env_seed(0, 0, n))
            n += 1
            if hasattr(env, "last"):
                open_: dict[str, Any] = {}
                for agent in env.agent_iter():
                    obs, reward, terminated, truncated, _ = env.last()
                    obs = tree_map(np.copy, obs)
                    if agent in open_:
                        rows[agent].append(Row(open_.pop(agent), float(reward), terminated, truncated, obs))
                    over = terminated or truncated
                    env.step(None if over else next(left[agent]))
                    if not over:
                        open_[agent] = obs
                continue
            obs = found[0]
            while env.agents:
                agents = list(env.agents)
                after, paid, ends, cuts, _ = env.step({agent: next(left[agent]) for agent in agents})
                for agent in agents:
                    rows[agent].append(Row(obs[agent], float(paid[agent]), ends[agent], cuts[agent], after[agent]))
                obs = after
    except StopIteration:
        env.close()
        return rows


@pytest.mark.parametrize("name", ["classic/tictactoe_v3", "classic/leduc_holdem_v4", "mpe2/simple_spread_v3"])
def test_returns_are_those_of_a_loop_over_the_environment(name: str) -> None:
    id_ = f"pettingzoo:{name}"
    agents = EnvConfig(id_).make().possible_agents
    ppo = ps.PPO(gae_lambda=1.0, discount=GAMMA, net=ps.Net(hidden=(8,)))
    algo = ps.Policies(dict.fromkeys(agents, ppo), {agent: agent for agent in agents})
    sampler = ps.SerialSampler(T=T, B=1).build(algo.seat(id_), 0)
    policies = algo.build(sampler.specs, 0)
    sampler.initialize(policies.agents)
    actions: dict[str, list[int]] = defaultdict(list)
    returns: dict[str, list[list[float]]] = defaultdict(list)
    for itr in range(16):
        batch, _ = sampler.obtain_samples(itr)
        for agent in agents:
            policy, mine = policies[agent], batch[agent]
            there = mine.valid[:, 0]
            actions[agent] += mine.action[there, 0].tolist()
            found = policy.postprocess_fn(policy.agent, as_tensors(mine, policy.device), policy.settings)
            returns[agent].append(found["return"][:, 0].numpy()[there].tolist())
    sampler.shutdown()
    plain = plain_rows(id_, actions)
    bootstrapped = ends = 0
    for agent in agents:

        def value(obs: Any, agent: str = agent) -> float:
            with torch.no_grad():
                x = tree_map(lambda a: torch.from_numpy(np.asarray(a)[None]), obs)
                none = torch.zeros(1)
                return float(policies[agent].agent(Inputs(x, none.long(), none, none.bool())).value)

        rows, at = plain[agent], 0
        for part in returns[agent]:
            if at + len(part) > len(rows):
                break  # the loop's last turn is still open
            expected, total = list[float](), 0.0
            for i, row in reversed([*enumerate(rows)][at : at + len(part)]):
                if row.terminated or row.truncated:
                    total = 0.0 if row.terminated else value(row.after)
                    ends += 1
                elif i == at + len(part) - 1:
                    total = value(row.after)
                    bootstrapped += 1
                total = row.reward + GAMMA * total
                expected.insert(0, total)
            np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-5)
            at += len(part)
    assert min(bootstrapped, ends) >= 3
