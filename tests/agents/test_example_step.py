from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock.agents import distributions as dists
from penstock.agents.actor_critic import Output
from penstock.agents.agent import Agent
from penstock.agents.example_step import check_acting, check_heads
from penstock.agents.networks import Net
from penstock.algos.discrete_sac import DiscreteSAC
from penstock.algos.dqn import DQN
from penstock.algos.ppo import PPO
from penstock.algos.r2d1 import R2D1
from penstock.algos.sac import SAC
from penstock.algos.td3 import TD3
from penstock.core.batch import Inputs
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec, Share
from penstock.envs.seats import Seating
from penstock.samplers.acting_agents import ActingAgents

VECTOR = LeafSpec("box", (3,), "float32")
CHOICE = LeafSpec("discrete", (), "int64", sizes=(4,), start=2)
BOX = LeafSpec("box", (2,), "float32", low=-1.0, high=1.0)
SPEC = EnvSpec(VECTOR, CHOICE)
SMALL = Net(hidden=(8,))


class Own(Agent):
    """A linear policy of one's own, with memory if `remembers`."""

    noise_size = 1

    def __init__(self, spec: EnvSpec = SPEC, choices: int = 4, remembers: bool = False) -> None:
        super().__init__()
        self.spec, self.remembers = spec, remembers
        self.head, self.critic = nn.Linear(3, choices), nn.Linear(3, 1)

    def initial_state(self, B: int) -> Any:
        return torch.zeros(B, 2) if self.remembers else None

    def forward(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(dists.Categorical(self.head(inputs.obs), 2), self.critic(inputs.obs).squeeze(-1))

    def act(self, inputs: Inputs, state: Any, noise: Tensor | None) -> Any:
        dist = self(inputs).dist
        action = dist.mode() if noise is None else dist.sample(noise)
        return self.answer(dist, action, state if state is None else state + 1)

    def answer(self, dist: Any, action: Any, state: Any) -> Any:
        return action, {"logp": dist.log_prob(action)}, state


class Sampling(Own):
    def answer(self, dist: Any, action: Any, state: Any) -> Any:
        return torch.distributions.Categorical(logits=dist.logp).sample() + 2, {}, state


class OwnGenerator(Own):
    def answer(self, dist: Any, action: Any, state: Any) -> Any:
        self.rng = getattr(self, "rng", np.random.default_rng(0))
        return action, {"u": torch.from_numpy(self.rng.random(len(action)))}, state


class Numpy(Own):
    def answer(self, dist: Any, action: Any, state: Any) -> Any:
        return torch.from_numpy(np.random.randint(2, 6, len(action))), {}, state


class RemembersNoise(Own):
    def answer(self, dist: Any, action: Any, state: Any) -> Any:
        return action, {}, state + torch.rand(1)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize(
    ("agent", "seen"),
    [
        (Sampling, "drew from the global generator of torch"),
        (Numpy, "drew from the global generator of numpy"),
        (OwnGenerator, r"returned another info\['u'\]"),
    ],
)
def test_randomness_that_is_no_noise_is_refused_before_training(agent: type[Own], seen: str, remembers: bool):
    before = torch.random.get_rng_state()
    installed = ActingAgents(Seating.alone(SPEC), BatchSpec(4, 2), (), Share())
    with pytest.raises(ConfigError, match=rf"act\(\) of {agent.__name__} {seen}.*Take all randomness from `noise`"):
        installed.take(agent(remembers=remembers))
    torch.random.set_rng_state(before)
    installed.take(Own(remembers=remembers))


def test_randomness_in_the_memory_is_refused():
    with pytest.raises(ConfigError, match="RemembersNoise drew from the global generator of torch"):
        check_acting(RemembersNoise(remembers=True), SPEC)


LSTM = Net(hidden=(8,), recurrent="lstm", recurrent_size=8)
BUILT_IN = {
    "actor-critic": (SPEC, PPO(net=SMALL)),
    "lstm": (SPEC, PPO(net=LSTM)),
    "gaussian": (EnvSpec(VECTOR, BOX), PPO(net=SMALL)),
    "tree": (EnvSpec({"a": VECTOR, "b": CHOICE}, {"x": CHOICE, "y": BOX}), PPO(net=SMALL)),
    "rainbow": (SPEC, DQN(net=SMALL, noisy=True, dueling=True, distributional="c51")),
    "ladder": (SPEC, DQN(net=SMALL, ladder="ape-x")),
    "r2d1": (SPEC, R2D1(net=LSTM)),
    "sac": (EnvSpec(VECTOR, BOX), SAC(net=SMALL)),
    "td3": (EnvSpec(VECTOR, BOX), TD3(net=SMALL)),
    "discrete-sac": (SPEC, DiscreteSAC(net=SMALL)),
}


@pytest.mark.parametrize("case", BUILT_IN)
def test_built_in_agents_pass_and_draw_nothing(case: str):
    spec, algo = BUILT_IN[case]
    agent = algo.build(spec).agent
    agent.set_slots(16)
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].tobytes()  # pyright: ignore
    check_acting(agent, spec)
    check_heads(agent, spec)
    assert torch.equal(before, torch.random.get_rng_state())
    assert numpy_before == np.random.get_state()[1].tobytes()  # pyright: ignore


def answers(fn: Any) -> Own:
    """An agent whose `act` returns something else."""
    agent = Own()
    agent.answer = fn
    return agent


WRONG = {
    "two": (lambda dist, a, s: (a, {}), r"returned 2 values; expected three, \(action, info, state\)"),
    "one": (lambda dist, a, s: a, "returned Tensor; expected three"),
    "no dict": (lambda dist, a, s: (a, dist.log_prob(a), s), "returned an info of type Tensor; expected a dict"),
    "float info": (lambda dist, a, s: (a, {"logp": 0.5}, s), r"returned info\['logp'\] of type float"),
    "mean info": (lambda dist, a, s: (a, {"v": a.double().mean()}, s), r"returned info\['v'\] of shape \[\]"),
    "floats": (lambda dist, a, s: (a.float(), {}, s), r"returned action of torch.float32; expected an integer dtype"),
    "column": (
        lambda dist, a, s: (a.unsqueeze(-1), {}, s),
        r"returned action of shape \[\d+, 1\]; expected \[B\] for discrete",
    ),
    "numpy": (lambda dist, a, s: (a.numpy(), {}, s), "returned action of type ndarray"),
    "pair": (lambda dist, a, s: ((a, a), {}, s), "returned action of the form"),
    "state": (lambda dist, a, s: (a, {}, a), "returned state of the form"),
    "from 0": (lambda dist, a, s: (a - 2, {}, s), r"chose action = \d; expected 2 to 5.*count from the space's start"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_an_answer_of_another_form_is_refused(mistake: str):
    fn, message = WRONG[mistake]
    with pytest.raises(ConfigError, match=rf"act\(\) of Own {message}"):
        check_acting(answers(fn), SPEC)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("choices", [3, 5])
def test_a_head_of_another_size_is_named_when_the_policy_is_built(choices: int, remembers: bool):
    algo = PPO(agent=lambda spec, cfg: Own(spec, choices, remembers))
    with pytest.raises(ConfigError, match=rf"head of Own has {choices} choices for action; .* discrete\(4\)"):
        algo.build(SPEC)
    check_heads(Own(SPEC, 4, remembers), SPEC)


def test_a_distribution_of_a_box_is_as_wide_as_the_box():
    one, two = torch.zeros(1), torch.zeros(2)
    with pytest.raises(ConfigError, match=r"Gaussian got 1 means for an action of 2 elements"):
        dists.Gaussian(torch.zeros(5, 1), one, two, two + 1, (2,))
    with pytest.raises(ConfigError, match=r"SquashedGaussian got 3 means for an action of 2 elements"):
        dists.SquashedGaussian(torch.zeros(5, 3), one, two, two + 1, (2,))
    with pytest.raises(ConfigError, match=r"MultiCategorical got 6 logits for choices of sizes \(2, 3\)"):
        dists.MultiCategorical(torch.zeros(4, 6), (2, 3), (0, 0), (2,))
