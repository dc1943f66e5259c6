"""Checks of what a policy is built of, and of its optimizers, which hold every parameter that a loss trains."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.preparation import ObsNormalizer
from penstock.core.errors import ConfigError
from penstock.core.protocols import require_call
from penstock.core.schedule import check_schedules
from penstock.core.spec import EnvSpec, describe
from penstock.core.tree import tree_leaves
from penstock.learn.algorithm import Loss, Optimizers, ReplayFn
from penstock.learn.rows.torch_memory import TorchMemory
from penstock.replay.replay import ReplaySchedule


def check_parts(
    settings: Any, spec: EnvSpec, agent_fn: Any, postprocess_fn: Any, loss_fn: Any, optimizer_fn: Any
) -> None:
    """Raises ConfigError unless a policy can be built of these: a dataclass, its schedules, and functions."""
    if isinstance(settings, type) or not is_dataclass(settings):
        raise ConfigError(
            f"Policy got settings {settings!r:.80}; expected an instance of a frozen dataclass, as ps.PPO() is one"
        )
    check_schedules(settings)
    require_call("agent_fn", agent_fn, "spec", "settings", returns="a penstock.Agent")
    require_call("postprocess_fn", postprocess_fn, "agent", "batch", "settings", returns="a penstock.TrainBatch")
    require_call("loss_fn", loss_fn, "agent", "minibatch", "settings", returns="a penstock.Loss")
    require_call("optimizer_fn", optimizer_fn, "agent", "settings", returns="optimizers by name")
    if not all(leaf.size for leaf in tree_leaves(spec.action)):
        raise ConfigError(
            f"an action without elements, {describe(spec.action)}; expected at least one in each array: give the "
            "space another shape, or leave the empty part out by a wrapper"
        )


def check_optimizers(found: object) -> None:
    """Raises ConfigError unless this is what `optimizer_fn` must return: optimizers by name."""
    if not isinstance(found, dict):
        hint = ': put it into a dict, {"all": optimizer}' if hasattr(found, "param_groups") else ""
        raise ConfigError(f"optimizer_fn returned {type(found).__name__}; expected {{name: optimizer}}{hint}")
    wrong = {name: type(x).__name__ for name, x in found.items() if not hasattr(x, "param_groups")}
    if wrong or not found:
        raise ConfigError(f"optimizer_fn returned {wrong}; expected a torch.optim.Optimizer for each name")


def made_replay(replay_fn: ReplayFn, agent: Agent, settings: Any) -> ReplaySchedule:
    """The replay that `replay_fn` makes; exact where the agent's statistics go on changing. Raises ConfigError.

    It learns where the agent is, for `replay.device="learner"`.
    """
    schedule = replay_fn(agent, settings)
    if not isinstance(schedule, ReplaySchedule):
        raise ConfigError(f"replay_fn returned {type(schedule).__name__}; expected a penstock.ReplaySchedule")
    schedule.replay.exact |= any(isinstance(m, ObsNormalizer) for m in agent.modules())
    schedule.replay.device_memory = TorchMemory(next(agent.parameters()).device)
    return schedule


def held_by_none(agent: Agent, optimizers: Optimizers) -> list[torch.nn.Parameter]:
    """The parameters of an agent that want gradients and that no optimizer steps."""
    held = {id(p) for x in optimizers.values() for group in x.param_groups for p in group["params"]}
    return [p for p in agent.parameters() if p.requires_grad and id(p) not in held]


def check_newcomers(agent: Agent, optimizers: Optimizers, known: list[torch.nn.Parameter], loss: Loss) -> None:
    """Raises ConfigError if a loss has gradients for parameters that no optimizer holds, those `known` aside."""
    aside = set(map(id, known))
    new = [p for p in held_by_none(agent, optimizers) if id(p) not in aside]
    taking_part: set[int] = set()
    for total in loss.totals().values() if new else ():
        if isinstance(total, Tensor) and total.requires_grad and total.numel() == 1:
            gradients = torch.autograd.grad(total, new, retain_graph=True, allow_unused=True)
            taking_part |= {id(p) for p, gradient in zip(new, gradients) if gradient is not None}
    if names := [name for name, p in agent.named_parameters() if id(p) in taking_part]:
        raise ConfigError(
            f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}: parameters that came after the policy was "
            "built, by load_state_dict(assign=True) or a new layer, act but are in no optimizer: copy values in place, "
            "make the layers in agent_fn, or rebuild the optimizers before the first update, "
            "policy.optimizers = policy.optimizer_fn(policy.agent, policy.settings); requires_grad_(False) for those "
            "that shall not train"
        )
