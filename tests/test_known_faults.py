"""Faults that are known and not mended yet, each by its number in the record of what the outside found.

A test that passes fails here (`strict`): then the fault is mended, and the test moves to the part that mended it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.envs.toy import TeamBits
from penstock.envs.toy.agents import TurnToy
from penstock.envs.toy.base import box, vector

PPO = ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(4,)))
TWO = ps.Policies({"a": PPO, "b": PPO}, {"agent_0": "a", "agent_1": "b"})
BITS = "penstock.envs.toy:TeamBits"


def fault(number: str, text: str) -> Any:
    return pytest.mark.xfail(strict=True, reason=f"{number}: {text}")


def run_of(folder: Path, name: str, **run: Any) -> ps.RunConfig:
    return ps.RunConfig(
        dir=str(folder / name), progress="off", tensorboard=False, eval_episodes=0, **{"steps": 32, **run}
    )


class Boss(TurnToy):
    """agent_0 moves once in 20 moves."""

    def __init__(self) -> None:
        super().__init__(2, box(-1, 999), 2)

    def begin(self) -> None:
        for agent in self.possible_agents:
            self.enter(agent)
        self.select("agent_0")

    def observe(self, agent: str) -> Any:
        return vector(self.t)

    def play(self, agent: str, action: Any) -> None:
        self.rewards[agent] = 1.0
        self.select("agent_0" if self.t % 20 == 0 else "agent_1")
        if self.t >= 200:
            for other in self.agents:
                self.end(other, truncated=True)


@fault("M17", "a policy that acts rarely trains on the 0 to 4 rows of a batch")
def test_a_policy_that_acts_rarely_waits_until_it_has_rows_enough() -> None:
    more: dict[str, Any] = {"min_rows": {"boss": 32}}
    algo = ps.Policies({"boss": PPO, "hand": PPO}, {"agent_0": "boss", "agent_1": "hand"}, **more)
    sampler = ps.SerialSampler(T=16, B=4).build(algo.seat(Boss), seed=0)
    policies = algo.build(sampler.specs)
    sampler.initialize(policies.agents)
    rows = 0
    for itr in range(40):
        batch, _ = sampler.obtain_samples(itr)
        rows += batch["boss"].env_steps
        ps.train_one_step(policies, batch)
    assert 1 <= policies["boss"].updates <= rows / 32
    sampler.shutdown()


@fault("M18", "one policy of several cannot be the start of one of another run")
def test_each_policy_may_start_from_another_run(tmp_path: Path) -> None:
    sampler = ps.SerialSampler(T=8, B=4)
    old = ps.train(ps.Experiment(BITS, TWO, sampler, run_of(tmp_path, "old", seed=1)))
    algo = ps.Policies({"a": PPO, "c": PPO}, {"agent_0": "a", "agent_1": "c"}, policies_to_train=("a",))
    init: Any = {"c": (str(old.run_dir), "b")}
    new = ps.train(ps.Experiment(BITS, algo, sampler, run_of(tmp_path, "new", seed=2)), init=init)
    was, now = (ps.load(x.run_dir)[name].agent.state_dict() for x, name in ((old, "b"), (new, "c")))
    assert all(torch.equal(was[key], now[key]) for key in was)


@fault("M19", "resume replaces a stored mapping of agents without a word")
def test_resume_refuses_another_mapping_than_the_stored_one(tmp_path: Path) -> None:
    result = ps.train(ps.Experiment(BITS, TWO, ps.SerialSampler(T=8, B=4), run_of(tmp_path, "run")))
    with pytest.raises(ConfigError, match="policy_mapping_fn"):
        ps.resume(result.run_dir, {"run.steps": 64}, policy_mapping_fn={"agent_0": "b", "agent_1": "a"})


def test_the_environments_above_play() -> None:
    """So that no fault above is one of its own environment."""
    for env in (Boss,):
        assert ps.check_env(env).agents is not None
    assert np.isfinite(ps.check_env(TeamBits).step_s)
