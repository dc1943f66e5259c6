"""What does one gradient step on 512 rows cost, and what dominates it?

PPO's loss for CartPole (4 inputs, 2 choices, actor and critic of two layers of 64 tanh units) on one torch thread. The
alternatives of each line take turns, and the table gives the median over rounds of the mean of a round.

    python benchmarks/update.py [--rows 512] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import penstock as ps
from penstock.algos import ppo
from penstock.envs.spaces import space_to_spec
from penstock.learn.algorithm import Loss, TrainBatch

REPEATS = 40
SETTINGS = ps.PPO(lr=1e-3, entropy_coef=0.01)
SPEC = ps.EnvSpec(
    space_to_spec(spaces.Box(-np.inf, np.inf, (4,), np.float32), "obs"), space_to_spec(spaces.Discrete(2), "action")
)


class Layers(nn.Module):
    """Actor and critic as `nn.Sequential` with `torch.tanh`, from the same first parameters as penstock's."""

    def __init__(self, agent: ps.ActorCritic) -> None:
        super().__init__()
        self.agent = agent
        assert agent.critic is not None
        self.actor = nn.Sequential(*_with_tanh(agent.actor.mlp.layers), agent.head.linear)
        self.critic = nn.Sequential(*_with_tanh(agent.critic.mlp.layers), agent.value_head)

    def forward(self, inputs: ps.Inputs, state: Any = None) -> Any:
        return self.agent.head(self.actor(inputs.obs)), self.critic(inputs.obs).squeeze(-1)


def _with_tanh(layers: nn.ModuleList) -> list[nn.Module]:
    return [module for layer in layers for module in (layer, nn.Tanh())]


def minibatch(rows: int, agent: ps.ActorCritic) -> TrainBatch:
    """Random rows of which the agent's own actions and log-probabilities are stored."""
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(rows, 4, generator=generator)
    with torch.no_grad():
        inputs = ps.Inputs(obs, None, None, None)
        dist, value = agent(inputs)
        action = dist.sample(torch.rand(rows, 1, generator=generator))
        values = {"action": action, "logp": dist.log_prob(action), "return": value + 1.0,
                  "advantage": torch.randn(rows, generator=generator)}  # fmt: skip
    return TrainBatch(inputs, values, None)


def cases(rows: int) -> dict[str, list[tuple[str, Callable[[], Any]]]]:
    """For each part of an update the alternatives, penstock's own first."""
    policy = SETTINGS.build(SPEC, seed=0)
    agent, learning = (SETTINGS.build(SPEC, seed=0).agent for _ in range(2))
    layers, learning_layers = Layers(agent), Layers(learning)  # pyright: ignore[reportArgumentType]
    x = minibatch(rows, agent)  # pyright: ignore[reportArgumentType]
    parameters = list(agent.parameters())
    losses = {model: ppo.loss_fn(model, x, SETTINGS).total for model in (agent, layers)}  # pyright: ignore[reportArgumentType]
    gradients = [torch.randn_like(p) for p in parameters]
    outputs = agent(x.inputs)

    def loss_alone() -> Loss:
        return ppo.loss_fn(lambda *_: outputs, x, SETTINGS)  # pyright: ignore[reportArgumentType]

    def ready(**how: Any) -> torch.optim.Optimizer:
        copies = [nn.Parameter(p.detach().clone()) for p in parameters]
        for p, g in zip(copies, gradients):
            p.grad = g * 1e-3
        return torch.optim.Adam(copies, lr=1e-3, eps=1e-5, **how)

    default = torch.optim.Adam(learning_layers.parameters(), lr=1e-3, eps=1e-5)

    def plain_update() -> None:
        default.zero_grad()
        ppo.loss_fn(learning_layers, x, SETTINGS).total.backward()  # pyright: ignore[reportArgumentType]
        nn.utils.clip_grad_norm_(learning_layers.parameters(), SETTINGS.max_grad_norm)
        default.step()

    clipped = [nn.Parameter(p.detach().clone()) for p in parameters]
    for p, g in zip(clipped, gradients):
        p.grad = g.clone()
    half = torch.randn(rows, 64)
    return {
        "whole update": [
            ("penstock: learn_on_batch", lambda: policy.learn_on_batch(x)),
            ("nn.Sequential, torch.tanh, default Adam", plain_update),
        ],
        "forward, both networks": [("chain", lambda: agent(x.inputs)), ("nn.Sequential", lambda: layers(x.inputs))],
        "loss and metrics": [("ppo.loss_fn without the networks", loss_alone)],
        "backward": [
            ("chain", lambda: torch.autograd.grad(losses[agent], parameters, retain_graph=True)),
            ("nn.Sequential", lambda: torch.autograd.grad(losses[layers], parameters, retain_graph=True)),
        ],
        "norm, and clipping by it": [
            ("as set_gradients", lambda: clipped_as_penstock(gradients)),
            ("clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(clipped, 1e-3)),
        ],
        "optimizer": [("fused Adam", ready(fused=True).step), ("default Adam", ready().step)],
        f"tanh of {rows} x 64": [
            ("2 sigmoid(2x) - 1", lambda: half.mul_(2.0).sigmoid_().mul_(2.0).sub_(1.0)),
            ("torch.tanh_", half.tanh_),
        ],
    }


def clipped_as_penstock(gradients: list[Tensor]) -> float:
    """What `set_gradients` does after autograd."""
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    torch._foreach_mul_(gradients, 1e-3 / norm)
    return norm


def microseconds(alternatives: list[tuple[str, Callable[[], Any]]], rounds: int) -> list[float]:
    """Median over rounds of each alternative's mean; they take turns."""
    times: list[list[float]] = [[] for _ in alternatives]
    for i in range(rounds + 1):
        for (_, fn), found in zip(alternatives, times):
            started = time.perf_counter()
            for _ in range(REPEATS):
                fn()
            if i:  # the first round warms up
                found.append((time.perf_counter() - started) / REPEATS * 1e6)
    return [statistics.median(found) for found in times]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("part", "how", "us", "of an update", title=f"{args.rows} rows, torch {torch.__version__}")
    whole = 0.0
    for part, alternatives in cases(args.rows).items():
        for i, ((name, _), us) in enumerate(zip(alternatives, microseconds(alternatives, args.rounds))):
            whole = whole or us
            table.add_row(
                part if i == 0 else "", name, f"{us:,.0f}", f"{us / whole:.0%}", end_section=i + 1 == len(alternatives)
            )
    Console().print(table)


if __name__ == "__main__":
    main()
