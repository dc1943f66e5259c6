"""Environments of PettingZoo through the pools: each column's rows are a plain loop's, of the agent who sits there."""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import allocate_batch
from penstock.core.noise import env_seed
from penstock.core.spec import MASK_KEY, BatchSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.pools.factory import pool_for
from tests.envs.pools.plain_loop import seated

pytest.importorskip("pettingzoo")
GAMES = ["classic/tictactoe_v3", "classic/connect_four_v3", "classic/leduc_holdem_v4", "classic/rps_v2"]
PARALLEL = ["mpe2/simple_spread_v3", "mpe2/simple_speaker_listener_v4"]


def digest(obs: Any) -> int:
    n = 0
    for x in tree_leaves(obs):
        n = zlib.crc32(np.ascontiguousarray(x).tobytes(), n)
    return n


def draw(obs: Any, n: int) -> int:
    """A legal action, chosen by the observation."""
    legal = np.flatnonzero(obs[MASK_KEY]) if isinstance(obs, dict) and MASK_KEY in obs else np.arange(n)
    return int(legal[digest(obs) % len(legal)])


def plain_rows(config: EnvConfig, slot: int, count: int) -> tuple[dict[str, list[Any]], list[float]]:
    """So many env episodes: the rows of every agent, one episode after the other, and the return of the team."""
    env: Any = config.make()
    rows: dict[str, list[Any]] = defaultdict(list)
    returns: list[float] = []
    for n in range(count):
        total = 0.0
        found = env.reset(seed=env_seed(0, slot, n))
        if hasattr(env, "last"):
            open_: dict[str, tuple[int, int]] = {}
            for agent in env.agent_iter():
                obs, reward, terminated, truncated, _ = env.last()
                total += float(reward)
                if agent in open_:
                    rows[agent].append((*open_.pop(agent), float(np.float32(reward)), terminated, truncated))
                action = None
                if not (terminated or truncated):
                    action = draw(obs, env.action_space(agent).n)
                    open_[agent] = digest(obs), action
                env.step(action)
        else:
            obs = found[0]
            while env.agents:
                agents = list(env.agents)
                actions = {a: draw(obs[a], env.action_space(a).n) for a in agents}
                after, rewards, ends, cuts, _ = env.step(actions)
                for a in agents:
                    rows[a].append((digest(obs[a]), actions[a], float(np.float32(rewards[a])), ends[a], cuts[a]))
                    total += float(np.float32(rewards[a]))
                obs = after
        returns.append(total)
    env.close()
    return rows, returns


@pytest.mark.parametrize(("name", "T"), [(name, T) for name in (*GAMES, *PARALLEL) for T in (3, 32)])
def test_real_environments(name: str, T: int) -> None:
    id_ = f"pettingzoo:{name}"
    agents = tuple(EnvConfig(id_).make().possible_agents)
    config = seated(id_, agents, {agent: agent for agent in agents})
    E, batches = 2, max(90 // T, 1)
    pool: Any = pool_for(config, 0, slice(0, E))
    outs = [allocate_batch(spec, BatchSpec(T, E), {}, None, pool.info_keys) for spec in pool.specs]
    rows: dict[tuple[int, str], list[Any]] = defaultdict(list)
    returns: dict[int, list[float]] = defaultdict(list)
    for _ in range(batches):
        pool.bind(outs)
        for t in range(T if not pool.takes_turns else 10**6):
            if pool.takes_turns and pool.finished(0):
                break
            for p, out in enumerate(outs):
                slots, at = pool.pending(p) if pool.takes_turns else (np.arange(E), np.full(E, t))
                for b, c in zip(slots.tolist(), at.tolist()):
                    out.action[c, b] = draw(
                        tree_map(lambda x, c=c, b=b: x[c, b], out.obs), int(pool.specs[p].action.sizes[0])
                    )
            for p in range(len(outs)):
                pool.send(p, t)
            for _ in outs:
                pool.recv()
        for p, out in enumerate(outs):
            for t, b in np.argwhere(out.valid).tolist():
                seen = digest(tree_map(lambda x, t=t, b=b: x[t, b], out.obs))
                ends = bool(out.terminated[t, b]), bool(out.truncated[t, b])
                rows[b, agents[p]].append((seen, int(out.action[t, b]), float(out.reward[t, b]), *ends))
        for e in range(E):
            returns[e] += pool.log.return_[e, : int(pool.log.count[e])].sum(-1).tolist()
    pool.close()
    for e in range(E):
        assert returns[e], "too short to say anything"
        expected, totals = plain_rows(config, e, len(returns[e]) + 1)
        np.testing.assert_allclose(returns[e], totals[: len(returns[e])], rtol=1e-12)
        for agent in agents:
            mine = rows.pop((e, agent), [])
            assert mine == expected[agent][: len(mine)], (e, agent)
            assert mine
    assert not rows


@pytest.mark.slow
def test_chess() -> None:
    test_real_environments("classic/chess_v6", 200)
