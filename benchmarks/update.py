"""Cost of one gradient step on 512 rows, part by part.

PPO's loss for CartPole (4 inputs, 2 choices, actor and critic of two layers of 64 tanh units) on one torch thread, stage by
stage inside whole updates, since a stage that runs alone finds its data in the cache and takes half as long. penstock's
way (a whole MLP as one graph node, large products by oneDNN, fused Adam) and the usual one (nn.Sequential, torch.tanh,
clip_grad_norm_, torch's default Adam) take turns; the table gives medians of CPU time.

    python benchmarks/update.py [--rows 512] [--updates 600]
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
from penstock.agents.mlp import linear, mlp_chain
from penstock.algos import ppo
from penstock.core.batch import TrainBatch
from penstock.envs.spaces import space_to_spec

SETTINGS = ps.PPO(lr=1e-12, entropy_coef=0.01)  # or hundreds of steps on the same rows would drive the policy far off
BOX, CHOICE = spaces.Box(-np.inf, np.inf, (4,), np.float32), spaces.Discrete(2)
SPEC = ps.EnvSpec(space_to_spec(BOX, "obs"), space_to_spec(CHOICE, "action"))
STAGES = ("forward of both networks", "loss and metrics", "backward", "norm and clip", "optimizer")


class Layers(nn.Module):
    """An agent's actor and critic as `nn.Sequential` with `torch.tanh`; the parameters are the agent's own."""

    def __init__(self, agent: Any) -> None:
        super().__init__()
        self.head = agent.head
        self.actor = nn.Sequential(*_with_tanh(agent.actor.mlp.layers), agent.head.linear)
        self.critic = nn.Sequential(*_with_tanh(agent.critic.mlp.layers), agent.value_head)

    def forward(self, inputs: ps.Inputs, state: Any = None) -> Any:
        return self.head(self.actor(inputs.obs)), self.critic(inputs.obs).squeeze(-1)


def _with_tanh(layers: nn.ModuleList) -> list[nn.Module]:
    return [module for layer in layers for module in (layer, nn.Tanh())]


def minibatch(rows: int, agent: Any) -> TrainBatch:
    """Random rows with the agent's own actions and log-probabilities."""
    generator = torch.Generator().manual_seed(0)
    inputs = ps.Inputs(torch.randn(rows, 4, generator=generator), None, None, None)
    with torch.no_grad():
        dist, value = agent(inputs)
        action = dist.sample(torch.rand(rows, 1, generator=generator))
        advantage = torch.randn(rows, generator=generator)
        values = {"action": action, "logp": dist.log_prob(action), "return": value + 1.0, "advantage": advantage}
    return TrainBatch(inputs, values, None)


def update(
    model: nn.Module, x: TrainBatch, clip: Callable[[list[Tensor]], Any], optimizer: torch.optim.Optimizer
) -> list[float]:
    """One gradient step; seconds of CPU time after each stage."""
    parameters = optimizer.param_groups[0]["params"]
    at = [time.process_time()]
    outputs = model(x.inputs)
    at.append(time.process_time())
    loss = ppo.loss_fn(lambda *_: outputs, x, SETTINGS)  # pyright: ignore[reportArgumentType]
    at.append(time.process_time())
    gradients = torch.autograd.grad(loss.total, parameters)  # pyright: ignore[reportArgumentType]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient
    at.append(time.process_time())
    clip(parameters)
    at.append(time.process_time())
    optimizer.step()
    at.append(time.process_time())
    return [after - before for before, after in zip(at, at[1:])]


def clip_as_penstock(parameters: list[Tensor], limit: float = 1e-3) -> None:
    """What `set_gradients` does after autograd."""
    gradients = [p.grad for p in parameters]
    norm = float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))))
    for p, scaled in zip(parameters, torch._foreach_mul(gradients, limit / norm)):
        p.grad = scaled


def clip_as_torch(parameters: list[Tensor], limit: float = 1e-3) -> None:
    """What most libraries do."""
    nn.utils.clip_grad_norm_(parameters, limit)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--updates", type=int, default=600)
    args = parser.parse_args()
    torch.set_num_threads(1)
    agents = [SETTINGS.build(SPEC, seed=0).agent for _ in range(2)]
    x = minibatch(args.rows, agents[0])
    ours = (agents[0], x, clip_as_penstock, ps.adam(agents[0], SETTINGS)["all"])
    usual = (Layers(agents[1]), x, clip_as_torch, torch.optim.Adam(agents[1].parameters(), lr=0.0, eps=1e-5))
    hidden = torch.randn(args.rows, 64)
    eye, nothing = torch.eye(64), torch.zeros(64)
    wide = torch.randn(256, 256)
    times: tuple[list[list[float]], ...] = ([], [], [], [])
    for _ in range(args.updates):
        times[0].append(update(*ours))
        times[1].append(update(*usual))
        times[2].append(tanh(hidden, eye, nothing))
        times[3].append(product(wide))
    columns = [[statistics.median(column) * 1e6 for column in zip(*found[len(found) // 10 :])] for found in times]
    table = Table(
        "CPU us", "penstock", "", "usual", "", title=f"An update of {args.rows} rows, torch {torch.__version__}"
    )
    for i, stage in enumerate((*STAGES, "all")):
        cells = [(sum(c) if stage == "all" else c[i], sum(c)) for c in columns[:2]]
        table.add_row(stage, *(text for us, whole in cells for text in (f"{us:,.0f}", f"{us / whole:.0%}")))
    table.add_section()
    table.add_row(f"linear and tanh, {args.rows} x 64", f"{columns[2][0]:,.0f}", "", f"{columns[2][1]:,.0f}", "")
    table.add_row("relu layer, 256 x 256 x 256", f"{columns[3][0]:,.0f}", "", f"{columns[3][1]:,.0f}", "")
    Console().print(table)


def tanh(x: Tensor, weight: Tensor, bias: Tensor) -> list[float]:
    """Seconds of CPU time of one layer without gradient: penstock's tanh by numpy, and torch's."""
    with torch.no_grad():
        started = time.process_time()
        mlp_chain(x, "tanh", (weight, bias))
        between = time.process_time()
        torch.tanh(nn.functional.linear(x, weight, bias))
        return [between - started, time.process_time() - between]


def product(x: Tensor) -> list[float]:
    """Seconds of CPU time of one layer without gradient: by oneDNN, as penstock trains, and by torch's own choice."""
    with torch.no_grad():
        started = time.process_time()
        linear(x, x, x[0], "relu")
        between = time.process_time()
        torch.relu_(nn.functional.linear(x, x, x[0]))
        return [between - started, time.process_time() - between]


if __name__ == "__main__":
    main()
