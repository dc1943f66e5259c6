"""Evaluations with more agents or fewer than a policy was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.trainer import Trainer
from tests.slow import slow

ECHO = "penstock.envs.toy.agents:EchoAgents"


def trained(algo: Any, folder: Path, agents: int, **run: Any) -> Any:
    config = ps.RunConfig(steps=60, dir=str(folder), progress="off", eval_episodes=3, eval_interval=10**6, **run)
    kwargs: dict[str, Any] = {"steady": True, "length": 6}
    return ps.train(
        ps.Experiment(
            ECHO,
            algo,
            ps.SerialSampler(T=8, B=2),
            config,
            env_kwargs={**kwargs, "agents": 3},
            eval_env_kwargs={**kwargs, "agents": agents},
        )
    )


@pytest.mark.parametrize("agents", [1, *slow(2), 5])
@pytest.mark.parametrize(
    "algo",
    [
        ps.PPO(minibatch=32, epochs=1),
        ps.MAPPO(minibatch=32, epochs=1),
        ps.QMIX(learning_starts=10, batch_size=8, replay_ratio=1),
        ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8)),
    ],
    ids=["ppo", "mappo", "qmix", "recurrent"],
)
def test_agents_that_share_parameters_are_evaluated_in_any_number(algo: Any, agents: int, tmp_path: Path) -> None:
    """Returns of the echo environment are paid for each agent, so a team's grows with their number."""
    result = trained(algo, tmp_path / "run", agents)
    assert result.metrics["eval/mean_reward"] > 0.0
    found = ps.evaluate(tmp_path / "run", episodes=4, env_kwargs={"agents": agents + 1, "steady": True, "length": 6})
    assert found.parts is not None and found.parts.policy.shape == (4, agents + 1)


PLACES: dict[str, Any] = {
    "serial": ps.SerialSampler(T=8, B=4),
    "cpu": ps.CpuSampler(T=8, B=4, workers=2),
    "gpu": ps.GpuSampler(T=8, B=4, workers=2),
    "in-process": ps.RunnerSampler(2, ps.SerialSampler(T=8, B=2), backend="in-process"),
    "runners-cpu": ps.RunnerSampler(2, ps.CpuSampler(T=8, B=2, workers=2), backend="processes"),
}
"""Samplers that play evaluations in their own place."""
ALGOS = {
    "ppo": ps.PPO(minibatch=32, epochs=1),
    "mappo": ps.MAPPO(minibatch=32, epochs=1),
    "qmix": ps.QMIX(learning_starts=10, batch_size=8, replay_ratio=1),
    "gru": ps.PPO(minibatch=32, epochs=1, net=ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8)),
}


@pytest.mark.parametrize("agents", [1, 5])
@pytest.mark.parametrize("algo", ["ppo", *slow("mappo", "qmix", "gru")])
@pytest.mark.parametrize("place", ["serial", "in-process", *slow("cpu", "gpu", "runners-cpu")])
def test_any_number_is_evaluated_in_every_place_as_in_the_process_of_the_run(
    place: str, algo: str, agents: int
) -> None:
    """Five episodes and three agents in training: no array of an evaluation has a size that fits by chance."""
    kwargs: dict[str, Any] = {"steady": True, "length": 6}
    run = ps.RunConfig(steps=60, progress="off", eval_episodes=5)
    exp = ps.Experiment(
        ECHO, ALGOS[algo], PLACES[place], run,
        env_kwargs={**kwargs, "agents": 3}, eval_env_kwargs={**kwargs, "agents": agents},
    )  # fmt: skip
    with Trainer(exp) as trainer:
        trainer.train()
        _, there = trainer.evaluate()
        assert trainer.plan.env.evaluation is not None
        evaluator = trainer.plan.make_evaluator()
        try:
            here = evaluator.play(trainer.policy, trainer.itr, 5)
        finally:
            evaluator.close()
    assert there.parts is not None and there.parts.policy.shape == (5, agents)
    assert sorted(there.return_.tolist()) == sorted(here.return_.tolist())


def test_a_policy_that_reads_the_state_of_all_is_refused_with_the_reason(tmp_path: Path) -> None:
    config = ps.EnvConfig(ECHO, {"agents": 3, "steady": True}, state="joint")
    other = ps.EnvConfig(ECHO, {"agents": 4, "steady": True}, state="joint")
    run = ps.RunConfig(steps=60, dir=str(tmp_path / "run"), progress="off")
    with pytest.raises(ConfigError, match=r"4 agents at once, 3 there.*spaces"):
        ps.train(ps.Experiment(config, ps.PPO(), ps.SerialSampler(T=8, B=2), run, eval_env=other))


def test_policies_by_name_say_who_is_missing(tmp_path: Path) -> None:
    algo = ps.Policies({"a": ps.PPO(), "b": ps.PPO()}, {"agent_0": "a", "agent_1": "b", "agent_2": "b"})
    with pytest.raises(ConfigError, match="names no policy for agent 'agent_3'"):
        trained(algo, tmp_path / "run", 4)
