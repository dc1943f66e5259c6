"""Losses of SAC, TD3, DDPG and discrete SAC row by row, for those of the package to equal."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

import penstock as ps
from penstock.core.batch import Inputs
from penstock.replay.replay import ReplaySettings
from tests.algos.filled import BOX, Chance, Record

SHARED: dict[str, Any] = {
    "lr": 1e-3, "discount": 0.9, "batch_size": 12, "learning_starts": 0, "replay_ratio": 12.0,
    "replay": ReplaySettings(capacity=600), "net": ps.Net(hidden=(6, 6), activation="relu"),
}  # fmt: skip


@dataclass(frozen=True)
class Slow:
    """An algorithm's settings and task, and the parts of its losses for one row, whose tensors are [1, ...]."""

    cfg: Any
    env: Callable[..., Any]
    value: Callable[[Any, Inputs, Tensor | None, Any], float]
    """Of (agent, following, noise, cfg): what discount^n weighs in the target."""
    q: Callable[[Any, Inputs, Any], Tensor]
    """Of (agent, inputs, action): [critics]."""
    others: Callable[[Any, Inputs, Tensor | None, Any], dict[str, Tensor]]
    """Of (agent, inputs, noise, cfg): all losses but the critics'."""
    factor: float = 1.0
    """Of the squared error."""


def losses(
    slow: Slow, agent: Any, record: Record, drawing: Any, noise: Tensor | None, cfg: Any
) -> tuple[Any, list[float]]:
    """Means of the losses over the drawn rows, and the rows' priorities."""  # fmt: skip
    each: dict[str, list[Tensor]] = defaultdict(list)
    priorities: list[float] = []
    for i, (t, b) in enumerate(zip(drawing.unit.tolist(), drawing.slot.tolist())):
        total, weight, following = record.transition(t, b, cfg.n_step, cfg.discount)
        row = None if noise is None else noise[i]
        with torch.no_grad():
            target = total + weight * slow.value(agent, following, row, cfg)
        x = record.inputs(t, b)
        error = slow.q(agent, x, record.at(t, "action", b)) - target
        importance = 1.0 if drawing.weight is None else float(drawing.weight[i])
        each["critic"].append(slow.factor * error.square().sum() * importance)
        priorities.append(error.abs().mean().item())
        for name, loss in slow.others(agent, x, row, cfg).items():
            each[name].append(loss)
    return {name: torch.stack(rows).mean() for name, rows in each.items()}, priorities


def q_of_point(agent: Any, x: Inputs, action: Any) -> Tensor:
    """[critics] of an action in the environment's units."""
    unit = (torch.as_tensor(action) - torch.tensor([1.0, 0.25])) / torch.tensor([4.0, 0.25])
    return agent.q(x, unit[None])[:, 0]


def normal(u: Tensor) -> list[float]:
    return [NormalDist().inv_cdf(float(x)) for x in u]


def sampled(agent: Any, x: Inputs, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Action [2] and log-density of one row, by the density's definition: 1 - tanh^2 is 1 / cosh^2."""
    mean, log_std = agent(x)[0].double().chunk(2)
    std = log_std.clamp(-20, 2).exp()
    u = mean + std * torch.tensor(normal(noise), dtype=torch.float64)
    return torch.tanh(u).float(), (torch.distributions.Normal(mean, std).log_prob(u) + 2 * u.cosh().log()).sum().float()


def sac_value(agent: Any, following: Inputs, noise: Any, cfg: ps.SAC) -> float:
    action, logp = sampled(agent, following, noise[2:])
    return float(agent.target_q(following, action[None]).min()) - math.exp(agent.log_alpha.item()) * float(logp)


def sac_others(agent: Any, x: Inputs, noise: Any, cfg: ps.SAC) -> dict[str, Tensor]:
    action, logp = sampled(agent, x, noise[:2])
    actor = math.exp(agent.log_alpha.item()) * logp - agent.q(x, action[None]).min()
    if cfg.alpha != "auto":
        return {"actor": actor}
    wanted = -2.0 if cfg.target_entropy is None else cfg.target_entropy
    return {"actor": actor, "alpha": -agent.log_alpha * (float(logp.detach()) + wanted)}


def td3_value(agent: Any, following: Inputs, noise: Any, cfg: ps.TD3) -> float:
    limit, action = cfg.target_noise_clip, []
    for point, z in zip(agent.target_point(following)[0].tolist(), normal(noise)):
        action.append(min(max(point + min(max(cfg.target_noise * z, -limit), limit), -1.0), 1.0))
    return float(agent.target_q(following, torch.tensor([action])).min())


def ddpg_value(agent: Any, following: Inputs, noise: Any, cfg: ps.DDPG) -> float:
    return float(agent.target_q(following, agent.target_point(following)))


def first_critic_seeks(agent: Any, x: Inputs, noise: Any, cfg: Any) -> dict[str, Tensor]:
    return {"actor": -agent.q(x, agent.point(x))[0, 0]}


def legal_of(x: Inputs) -> list[int]:
    return [a for a in range(4) if not isinstance(x.obs, dict) or x.obs["action_mask"][0, a]]


def chances(agent: Any, x: Inputs) -> Tensor:
    """pi [A] of one row: a softmax over the legal actions, 0 for the others."""
    logits, legal = agent.actor(x, agent.prepared(x.obs))[0], legal_of(x)
    return torch.zeros(4).index_put((torch.tensor(legal),), logits[legal].softmax(0))


def discrete_value(agent: Any, following: Inputs, noise: Any, cfg: ps.DiscreteSAC) -> float:
    alpha, p, q = (
        math.exp(agent.log_alpha.item()),
        chances(agent, following).tolist(),
        agent.target_q(following).amin(0)[0],
    )
    return sum(p[a] * (float(q[a]) - alpha * math.log(p[a])) for a in legal_of(following))  # fmt: skip


def discrete_others(agent: Any, x: Inputs, noise: Any, cfg: ps.DiscreteSAC) -> dict[str, Tensor]:
    alpha, p, q, legal = (
        math.exp(agent.log_alpha.item()),
        chances(agent, x),
        agent.q(x).amin(0)[0].tolist(),
        legal_of(x),
    )
    actor = torch.stack([p[a] * (alpha * p[a].log() - q[a]) for a in legal]).sum()
    if cfg.alpha != "auto":
        return {"actor": actor}
    entropy = -sum(p[a].item() * math.log(p[a].item()) for a in legal)
    return {"actor": actor, "alpha": agent.log_alpha[0] * (entropy - cfg.entropy_share * math.log(len(legal)))}


BOXES = partial(Chance, BOX)
SAC = Slow(ps.SAC(**SHARED), BOXES, sac_value, q_of_point, sac_others, 0.5)
TD3 = Slow(ps.TD3(**SHARED), BOXES, td3_value, q_of_point, first_critic_seeks)
DDPG = Slow(ps.DDPG(**SHARED), BOXES, ddpg_value, q_of_point, first_critic_seeks)
DISCRETE = Slow(
    ps.DiscreteSAC(**SHARED), Chance, discrete_value, lambda agent, x, a: agent.q(x)[:, 0, int(a) - 2], discrete_others, 0.5
)  # fmt: skip
