"""Nothing reads or moves a global generator, so neither a user's own draws nor the order of calls changes a run."""

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch

from penstock.agents.actor_critic import actor_critic
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.envs.toy import ContinuousBandit, RepeatPrevious
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler

NETS = {
    "plain": (ContinuousBandit, Net(hidden=(8,))),
    "lstm": (RepeatPrevious, Net(hidden=(8,), recurrent="lstm", recurrent_size=8)),
}


def run(case: str, disturb: bool = False) -> list[bytes]:
    """Sampling, training, evaluating and predicting; `disturb` moves the global generators all along."""
    env, net = NETS[case]
    found: list[bytes] = []

    def stir() -> None:
        if disturb:
            random.random()
            np.random.rand(3)
            torch.rand(5)

    stir()
    sampler = SerialSampler(T=8, B=3, max_decorrelation_steps=4).build(env, seed=1)
    stir()
    policy = PPO(net=net, epochs=4, minibatch=8).build(sampler.spec, seed=2)
    sampler.initialize(policy.agent)
    for itr in range(3):
        stir()
        batch, _ = sampler.obtain_samples(itr)
        stir()
        train_one_step(policy, batch)
        found += [batch.reward.tobytes(), batch.obs.tobytes()]
        stir()
        found.append(sampler.evaluate_agent(itr, 4, deterministic=False).return_.tobytes())
    found += [p.detach().numpy().tobytes() for p in policy.agent.parameters()]
    answer = policy.predict(batch.obs[0], deterministic=False)
    found.append((answer if case == "plain" else answer[0]).tobytes())
    return found


def states() -> tuple[Any, ...]:
    _, keys, position, *rest = np.random.get_state()
    return random.getstate(), keys.tobytes(), position, rest, torch.random.get_rng_state().numpy().tobytes()


@pytest.mark.parametrize("case", NETS)
def test_no_global_generator_is_moved(case: str):
    before = states()
    run(case)
    assert states() == before


@pytest.mark.parametrize("case", NETS)
def test_no_global_generator_matters(case: str):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    once = run(case)
    random.seed(2)
    np.random.seed(2)
    torch.manual_seed(2)
    assert run(case, disturb=True) == once


@pytest.mark.parametrize("case", NETS)
def test_no_global_generator_is_even_asked(case: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a global generator was asked")

    for name in ("random", "rand", "randn", "randint", "choice", "permutation", "shuffle", "uniform", "normal", "seed"):
        monkeypatch.setattr(np.random, name, refuse)
    for name in (
        "random",
        "randint",
        "randrange",
        "choice",
        "choices",
        "shuffle",
        "sample",
        "uniform",
        "gauss",
        "seed",
    ):
        monkeypatch.setattr(random, name, refuse)
    run(case)


def test_other_threads_neither_move_nor_see_how_networks_start():
    """Where another thread draws, or starts networks of its own, in the middle of a build."""
    spec = SerialSampler(T=1, B=1).build(ContinuousBandit, seed=1).spec
    alone = [p.detach().clone() for p in PPO(net=Net(hidden=(8,))).build(spec, seed=2).agent.parameters()]
    seen: list[torch.Tensor] = []

    def disturbed(spec: Any, settings: Any) -> Agent:
        def others() -> None:
            seen.append(torch.rand(5))
            PPO(net=Net(hidden=(8,))).build(spec, seed=2)
            torch.manual_seed(4)
            seen.append(torch.rand(5))

        torch.nn.init.orthogonal_(torch.empty(3, 3))
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(60.0)
        return actor_critic(spec, settings)

    def quiet(spec: Any, settings: Any) -> Agent:
        torch.nn.init.orthogonal_(torch.empty(3, 3))
        return actor_critic(spec, settings)

    built = [PPO(net=Net(hidden=(8,)), agent=fn).build(spec, seed=2).agent for fn in (quiet, actor_critic)]
    torch.manual_seed(3)
    other = PPO(net=Net(hidden=(8,)), agent=disturbed).build(spec, seed=2).agent
    assert all(torch.equal(a, b) for a, b in zip(built[0].parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(built[1].parameters(), alone, strict=True))
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(4)
    assert torch.equal(seen[0], expected) and torch.equal(seen[1], torch.rand(5))
