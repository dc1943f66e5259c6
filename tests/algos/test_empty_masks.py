"""A mask may allow nothing at the observation at which an episode was truncated: no choice there enters a target."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos import cql, discrete_sac, dqn, qmix, r2d1
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.spec import EnvSpec, LeafSpec

N, A = 5, 4
MASK = LeafSpec("box", (A,), "int8", 0.0, 1.0)
SPEC = EnvSpec(
    {"o": LeafSpec("box", (2,), "float32"), "action_mask": MASK}, LeafSpec("discrete", (), "int64", sizes=(A,))
)
NET = ps.Net(hidden=(8,))
CASES: dict[str, tuple[Any, Any]] = {
    "dqn": (ps.DQN(net=NET), dqn.postprocess_fn),
    "dqn, not double": (ps.DQN(net=NET, double=False), dqn.postprocess_fn),
    "c51": (ps.DQN(net=NET, distributional="c51"), dqn.postprocess_fn),
    "quantile": (ps.DQN(net=NET, distributional="quantile", n_atoms=5), dqn.postprocess_fn),
    "discrete sac": (ps.DiscreteSAC(net=NET), discrete_sac.postprocess_fn),
    "cql": (ps.CQL(net=NET), cql.postprocess_choices),
}


def inputs(mask: torch.Tensor) -> Inputs:
    lead = mask.shape[:-1]
    obs = {"o": torch.randn(*lead, 2), "action_mask": mask}
    return Inputs(obs, torch.zeros(lead, dtype=torch.long), torch.zeros(lead), torch.zeros(lead, dtype=torch.bool))


def sample(following: torch.Tensor, discount: float) -> TrainBatch:
    rows = {"action": torch.zeros(N, dtype=torch.long), "return": torch.arange(N) * 0.5}
    rows |= {"discount": torch.full((N,), discount), "next": inputs(following)}
    return TrainBatch(inputs(torch.ones(N, A, dtype=torch.int8)), rows)


@pytest.mark.parametrize("name", CASES)
def test_an_empty_mask_leads_to_the_target_of_a_terminal_state_and_others_to_their_own(name: str):
    algo, postprocess = CASES[name]
    agent: Any = algo.build(SPEC, seed=0).agent
    mask = torch.ones(N, A, dtype=torch.int8)
    mask[1:3] = 0
    torch.manual_seed(0)
    with torch.no_grad():
        x = sample(mask, 0.9)
        found = postprocess(agent, x, algo)["target"]
        over = {**x.rows, "discount": x["discount"].masked_fill(torch.tensor([False, True, True, False, False]), 0.0)}
        x["next"].obs["action_mask"][1:3] = 1
        expected = postprocess(agent, TrainBatch(x.inputs, over), algo)["target"]
    torch.testing.assert_close(found, expected)


def test_r2d1_learns_the_same_of_an_empty_mask_after_a_cut_as_of_a_terminal_state():
    algo = ps.R2D1(net=ps.Net(hidden=(8,), recurrent="gru", recurrent_size=8), burn_in=0, train_length=3, n_step=1)
    agent: Any = algo.build(SPEC, seed=0).agent
    torch.manual_seed(0)
    x, cut, none = inputs(torch.ones(4, 2, A, dtype=torch.int8)), torch.zeros(3, 2, dtype=torch.bool), torch.zeros(3, 2)
    cut[1, 0] = True
    rows = {"action": torch.zeros(3, 2, dtype=torch.long), "reward": none + 0.5, "q_target": torch.randn(4, 2, A)}

    def loss(terminated: torch.Tensor, truncated: torch.Tensor) -> float:
        ends = {"terminated": terminated, "truncated": truncated}
        sample = TrainBatch(x, {**rows, **ends}, torch.ones(3, 2, dtype=torch.bool), agent.initial_state(2))
        return r2d1.loss_fn(agent, sample, algo).total.item()  # pyright: ignore

    terminal, legal = loss(cut, cut & False), loss(cut & False, cut)
    x.obs["action_mask"][2, 0] = 0
    assert loss(cut & False, cut) == terminal != legal


def test_qmix_counts_an_agent_with_an_empty_mask_as_one_that_is_not_there():
    spec = EnvSpec(SPEC.obs, SPEC.action, agents=2)
    algo = ps.QMIX(net=NET, mixer="vdn")
    agent: Any = algo.build(spec, seed=0).agent
    torch.manual_seed(0)
    mask, there = torch.ones(N, 2, A, dtype=torch.int8), torch.ones(N, 2, dtype=torch.bool)
    rows = {"return": torch.zeros(N), "discount": torch.ones(N), "next": inputs(mask), "next_valid": there}
    present = inputs(torch.ones(N, 2, A, dtype=torch.int8))

    def target(**changes: Any) -> torch.Tensor:
        with torch.no_grad():
            return qmix.postprocess_fn(agent, TrainBatch(present, {**rows, **changes}), algo)["target"]

    gone = there.clone()
    gone[1, 0] = gone[3] = False
    expected = target(next_valid=gone)
    mask[~gone] = 0
    assert torch.equal(target(), expected) and expected[3] == 0.0


def test_priorities_by_the_agent_s_record_know_no_illegal_value():
    policy = ps.DQN(net=NET, replay=ps.ReplaySettings(index="prioritized", fresh_priority="agent")).build(SPEC, seed=0)
    mask = torch.tensor([[0] * A, [1, 0, 0, 0]], dtype=torch.int8).repeat(2, 1)
    with torch.inference_mode():
        _, info, _ = policy.agent.act(inputs(mask), None, None)
    assert info["q_max"][0] == 0.0 and abs(float(info["q_max"][1])) < 10.0


@pytest.mark.parametrize("algo", [ps.DiscreteSAC(alpha=1.0, lr=1e-2, tau=0.05), ps.DQN(lr=1e-2, target_interval=5)])
@pytest.mark.slow
def test_values_are_those_of_the_one_legal_choice(algo: Any, tmp_path: Path):
    """All rewards are 0 and one choice is legal, so every value is 0, whatever the entropy of the others."""
    import gymnasium as gym

    class Stuck(gym.Env[Any, Any]):
        action_space = gym.spaces.Discrete(10)
        observation_space = gym.spaces.Dict(
            o=gym.spaces.Box(-1, 1, (2,), np.float32), action_mask=gym.spaces.Box(0, 1, (10,), np.int8)
        )

        def seen(self) -> Any:
            mask = np.zeros(10, np.int8)
            mask[0] = self.t < 3
            return {"o": np.zeros(2, np.float32), "action_mask": mask}

        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.t = 0
            return self.seen(), {}

        def step(self, action: Any) -> Any:
            self.t += 1
            return self.seen(), 0.0, False, self.t >= 3, {}

    algo = ps.override(algo, {"learning_starts": 16, "discount": 0.9})
    run = ps.RunConfig(steps=1_200, dir=str(tmp_path / "run"), progress="off", seed=1, eval_episodes=0)
    result = ps.train(ps.Experiment(Stuck, algo, ps.SerialSampler(T=8, B=2), run))
    assert abs(result.metrics["train/q"]) < 0.1
