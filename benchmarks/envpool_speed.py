"""Sampling CartPole-v1 of EnvPool: penstock beside a plain loop over the same EnvPool, by turns on one core (turns.py).

The loop is CleanRL's: a torch policy and a critic of 64 x 64 tanh, `Categorical`, buffers of tensors. Steps of resets count
on neither side. Both take one thread of EnvPool and one of torch.

    python benchmarks/envpool_speed.py [--only 16] [--rounds 9] [--write]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import turns
from speed import _sampled
from turns import Bar, Case, Who

TASK, T = "CartPole-v1", 128


@contextmanager
def sampling(B: int, seed: int) -> Iterator[turns.Unit]:
    """Valid environment steps of `obtain_samples` with a fresh PPO policy."""
    import penstock as ps

    env = ps.EnvConfig(f"envpool:{TASK}", {"num_threads": 1})
    yield from _sampled(ps.SerialSampler(T=T, B=B).build(env, seed), seed)


@contextmanager
def loop(B: int, seed: int) -> Iterator[turns.Unit]:
    """The same of a plain loop."""
    import envpool
    import torch
    from torch import nn
    from torch.distributions import Categorical

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    env = envpool.make_gymnasium(TASK, num_envs=B, num_threads=1, seed=seed)

    def network(outputs: int) -> Any:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    actor, critic = network(2), network(1)
    obs = torch.zeros(T, B, 4)
    action, logp, reward, value, ended = (torch.zeros(T, B) for _ in range(5))
    now, over = torch.from_numpy(env.reset()[0]), torch.zeros(B)

    def unit() -> float:
        nonlocal now, over
        valid = 0.0
        for t in range(T):
            obs[t], ended[t] = now, over
            with torch.no_grad():
                policy = Categorical(logits=actor(now))
                chosen = policy.sample()
                logp[t], value[t] = policy.log_prob(chosen), critic(now).flatten()
            action[t] = chosen
            valid += B - float(over.sum())
            x, r, terminated, truncated, _ = env.step(chosen.numpy())
            now, reward[t] = torch.from_numpy(x), torch.from_numpy(r)
            over = torch.from_numpy(terminated | truncated).float()
        return valid

    yield unit


def _case(B: int) -> Case:
    who = {"penstock": Who("sampling", {"B": B}), "plain loop": Who("loop", {"B": B})}
    return Case(f"sampling, EnvPool {TASK}, B={B}", "steps/s", who, (Bar("penstock", 2.3, ("plain loop",)),))


CASES = {"16": _case(16), "64": _case(64)}
MAKERS = {f.__name__: f for f in (sampling, loop)}

if __name__ == "__main__":
    turns.main(__doc__, CASES, MAKERS, {})
