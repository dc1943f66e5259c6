"""Functions and settings of a user's own: what they get wrong is one clear error, before or in the first batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.algos.ppo import PPO
from penstock.core.batch import MultiAgentBatch, SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.envs.toy import BoundedBandit, Chain
from penstock.learn.algorithm import Loss, LossFn, PostprocessFn
from penstock.learn.policy import Policy
from penstock.learn.rows.minibatch import minibatches
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler

PLAIN = PPO(net=Net(hidden=(4,)), minibatch=16, epochs=1)


def own(env: Any = Chain, **functions: Any) -> tuple[Policy, SampleBatch]:
    """PPO with some functions of another's, and a batch."""
    sampler = SerialSampler(T=8, B=2).build(env, seed=1)
    policy = PLAIN.policy(PPO.functions._replace(**functions), sampler.spec, 0, "cpu")
    sampler.initialize(policy.agent)
    return policy, sampler.obtain_samples(0)[0]


def with_rows(**changes: Callable[[Tensor], Tensor]) -> PostprocessFn:
    """PPO's post-processing with rows made otherwise."""

    def postprocess(agent: Any, batch: Any, cfg: Any) -> TrainBatch:
        data = PPO.functions.postprocess(agent, batch, cfg)
        return replace(data, rows={**data.rows, **{name: fn(data[name]) for name, fn in changes.items()}})

    return postprocess


def with_loss(fn: Callable[[Loss, TrainBatch], Any]) -> LossFn:
    """PPO's loss made into something else."""
    return lambda agent, x, cfg: fn(PPO.functions.loss(agent, x, cfg), x)


class OfSpec(ActorCritic):
    """An agent whose class takes the spec alone."""

    def __init__(self, spec: Any) -> None:
        super().__init__(spec, PLAIN.net)


class PairAgent(ActorCritic):
    """An agent whose outputs have no names."""

    values = Agent.values

    def __init__(self, spec: Any, settings: Any) -> None:
        super().__init__(spec, settings.net)

    def forward(self, inputs: Any, state: Any = None) -> Any:
        return tuple(super().forward(inputs, state))


MISTAKES = {
    "transposed": (
        {"postprocess": with_rows(advantage=lambda x: x.T)},
        r"rows\['advantage'\] of shape \[2, 8\]; expected \[T, B, ...\] with T=8, B=2",
    ),
    "too long": ({"postprocess": with_rows(advantage=lambda x: torch.cat([x, x[:1]]))}, r"of shape \[9, 2\]"),
    "one element": (
        {"postprocess": with_rows(**{"return": lambda x: x.unsqueeze(-1)})},
        r"rows\['return'\] of shape \[8, 2, 1\]; expected \[8, 2\]",
    ),
    "no batch": ({"postprocess": lambda *_: None}, "postprocess_fn returned NoneType; expected a penstock.TrainBatch"),
    "key": (
        {"postprocess": lambda agent, batch, cfg: batch.info["lopg"]},
        r"asked for 'lopg'.*holds \['env', 'logp'\]",
    ),
    "row": ({"loss": lambda agent, x, cfg: x["advantge"]}, "no row 'advantge'.*did you mean 'advantage'"),
    "bare loss": (
        {"loss": with_loss(lambda loss, x: loss.total)},
        r"loss_fn returned Tensor; expected penstock.Loss\(",
    ),
    "pair": ({"loss": with_loss(lambda loss, x: (loss.total, loss.metrics))}, "loss_fn returned tuple"),
    "rows of loss": (
        {"loss": with_loss(lambda loss, x: Loss(loss.total * x["return"], {}))},
        r"a total for 'all' of shape \[\d+\]; expected a scalar",
    ),
    "number": ({"loss": with_loss(lambda loss, x: Loss(loss.total.item(), {}))}, "of type float"),  # pyright: ignore
    "detached": ({"loss": with_loss(lambda loss, x: Loss(loss.total.detach(), {}))}, "without a gradient"),  # pyright: ignore
    "metrics": (
        {"loss": with_loss(lambda loss, x: Loss(loss.total, None))},  # pyright: ignore
        "the metrics of a loss are a NoneType; expected a dict of numbers",
    ),
    "rows of metric": (
        {"loss": with_loss(lambda loss, x: Loss(loss.total, {"r": x["return"]}))},
        r"metric 'r' is a tensor of shape \[\d+\]; expected one number, such as its mean",
    ),
    "no optimizers": ({"optimizer": lambda agent, cfg: None}, "optimizer_fn returned NoneType"),
    "bare optimizer": (
        {"optimizer": lambda agent, cfg: torch.optim.SGD(agent.parameters(), 0.1)},
        r'optimizer_fn returned SGD; expected .name: optimizer.: put it into a dict, ."all": optimizer.',
    ),
    "no optimizer": (
        {"optimizer": lambda agent, cfg: {"all": agent}},
        "{'all': 'ActorCritic'}; expected a torch.optim",
    ),
    "agent of one argument": (
        {"agent": lambda spec: None},
        r"agent_fn=<lambda> cannot take spec and settings \(too many pos.*; expected agent_fn\(spec, settings\)",
    ),
    "agent's class": ({"agent": OfSpec}, r"agent_fn=OfSpec .*a function that returns a penstock\.Agent"),
    "loss of two": ({"loss": lambda agent, x: None}, r"expected loss_fn\(agent, minibatch, settings\)"),
    "no function": (
        {"optimizer": None},
        r"optimizer_fn=None cannot be called; expected optimizer_fn\(agent, settings\)",
    ),
    "bare pair": (
        {"agent": PairAgent},
        r"forward\(\) of PairAgent returned tuple without 'value'; expected penstock.Output\(dist, value\)",
    ),
    "no schedule": ({"replay": lambda agent, cfg: 3}, "replay_fn returned int; expected a penstock.ReplaySchedule"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_functions_of_ones_own_get_wrong_is_one_clear_error(mistake: str):
    functions, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=message):
        train_one_step(*own(**functions))


def test_an_agent_function_takes_spec_and_settings():
    with pytest.raises(ConfigError, match=r"agent=OfSpec cannot take .*; expected agent\(spec, settings\)"):
        replace(PLAIN, agent=OfSpec).build(own()[0].spec)


def test_an_error_in_a_function_of_ones_own_stays_what_it_is():
    with pytest.raises(TypeError, match="unexpected keyword"):
        own(agent=lambda spec, settings: PairAgent(spec, setings=settings))  # pyright: ignore
    with pytest.raises(KeyError, match="'env'"):  # a key that the batch has
        train_one_step(*own(postprocess=lambda agent, batch, cfg: {}["env"]))


def test_rows_of_one_element_are_taken_where_the_environment_has_some():
    fine = with_rows(action=lambda x: x * 1.0)
    assert own(BoundedBandit, postprocess=fine)[1].action.shape == (8, 2, 1)
    train_one_step(*own(BoundedBandit, postprocess=fine))


def test_a_policy_says_what_settings_and_batches_it_takes():
    policy, batch = own()
    for settings in ({"lr": 0.1}, PPO, None):
        with pytest.raises(ConfigError, match="expected an instance of a frozen dataclass"):
            Policy(
                settings,
                policy.spec,
                agent_fn=PPO.functions.agent,
                postprocess_fn=PPO.functions.postprocess,
                loss_fn=PPO.functions.loss,
                optimizer_fn=PPO.functions.optimizer,
            )
    for given, message in (
        (
            MultiAgentBatch({"a": batch, "b": batch}, 16),
            r"MultiAgentBatch of the policies \['a', 'b'\] for one Policy, which",
        ),
        ((batch, None), r"got tuple.*obtain_samples returns \(batch, episodes\)"),
        (None, "got NoneType; expected the SampleBatch of a sampler"),
    ):
        with pytest.raises(ConfigError, match=message):
            train_one_step(policy, given)  # pyright: ignore


def test_a_samplers_batch_is_post_processed_as_it_is():
    policy, batch = own()
    data = policy.postprocess(batch)
    assert isinstance(batch.valid, np.ndarray)
    assert torch.equal(data["advantage"], policy.postprocess(as_tensors(batch, policy.device))["advantage"])
    assert sum(len(x["return"]) for x in minibatches(data, 8, policy.shuffler())) == batch.env_steps


def shifted(by: float) -> Any:
    """A part's postprocess and loss: one weight, drawn to a number."""

    def loss(inner: LossFn, agent: Any, x: TrainBatch, cfg: Any) -> Loss:
        found = inner(agent, x, cfg)
        extra = (agent.get_submodule(f"part{by:g}").weight - by).square().sum()
        return found._replace(total={"all": found.totals()["all"] + extra}, metrics={**found.metrics, f"{by:g}": extra})

    return lambda inner, agent, batch, cfg: inner(agent, batch, cfg), loss


def test_parts_stand_around_each_other() -> None:
    functions = PPO.functions
    for by in (2.0, 3.0):
        functions = functions.with_part(f"part{by:g}", lambda *_: torch.nn.Linear(1, 1, bias=False), *shifted(by))
    policy, batch = own(**functions._asdict())
    assert policy.agent.outer_parts == ("part2", "part3")
    before = [policy.agent.get_submodule(name).weight.item() for name in policy.agent.outer_parts]
    metrics = train_one_step(policy, batch)
    after = [policy.agent.get_submodule(name).weight.item() for name in policy.agent.outer_parts]
    assert metrics["train/2"] > 0 < metrics["train/3"] and all(x < y for x, y in zip(before, after))


@pytest.mark.parametrize("name", ["actor", "central", "part2"])
def test_a_part_takes_no_others_place(name: str) -> None:
    part = lambda *_: torch.nn.Linear(1, 1)  # noqa: E731
    functions = PPO.functions.with_part("part2", part, *shifted(2.0)).with_part(name, part, *shifted(2.0))
    with pytest.raises(ConfigError, match=rf"ActorCritic has '{name}' already, and a part of that name"):
        own(**functions._asdict())
