"""Groups of parameters: step sizes by pattern, weights alone that decay, and state that moves between groupings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.errors import ConfigError
from penstock.learn.algorithm import OptimizerFn, Optimizers
from penstock.learn.optimizers import Adam
from penstock.learn.step.checks import check_optimizers

_OF_THE_SETTINGS = ("lr", "lr_scale", "betas", "eps", "weight_decay")
"""Options of parameter groups that come from the settings, not a stored state."""


def scaled_groups(optimizer_fn: OptimizerFn) -> OptimizerFn:
    """An `optimizer_fn` whose optimizers have a group for each pattern in `settings.lr_scales`.

    A pattern is one of `fnmatch`, of a parameter's whole name in the agent or of its end after a dot, so that
    `encoder.*` is `actor.encoder.*` too. The first that matches counts.
    """

    def scaled(agent: Agent, settings: Any) -> Optimizers:
        optimizers = optimizer_fn(agent, settings)
        scales: Mapping[str, float] = settings.lr_scales
        if not scales:
            return optimizers
        check_optimizers(optimizers)
        names = {id(p): name for name, p in agent.named_parameters()}
        held = [p for x in optimizers.values() for group in x.param_groups for p in group["params"]]
        by_pattern = {pattern: [id(p) for p in held if _matches(names.get(id(p), ""), pattern)] for pattern in scales}
        for pattern, matched in by_pattern.items():
            if not matched:
                ends = {names[id(p)].rpartition(".")[0] for p in held if id(p) in names}
                raise ConfigError(
                    f"lr_scales[{pattern!r}] matches no parameter that an optimizer holds; expected a pattern of their "
                    f"names or of the ends of these, such as {', '.join(f'{x}.*' for x in sorted(ends)[:4])}"
                )
        pattern_of = {x: pattern for pattern in reversed(list(scales)) for x in by_pattern[pattern]}

        def own(pattern: str | None, group: Mapping[str, Any]) -> dict[str, Any]:
            x = 1.0 if pattern is None else scales[pattern]
            return {"lr": x * group["lr"], "lr_scale": x * group.get("lr_scale", 1.0)}

        _part(optimizers, lambda p: pattern_of.get(id(p)), own)
        return optimizers

    return scaled


def decayed_weights(optimizer_fn: OptimizerFn) -> OptimizerFn:
    """An `optimizer_fn` whose optimizers decay weight matrices alone (Loshchilov and Hutter 2019 decay all parameters).

    These are parameters of two axes or more with `weight` in the last part of their name, numbers in a list aside, and
    not a LayerNorm's. So biases, norms, deviations of noise and temperatures are left as they are.
    """

    def decayed(agent: Agent, settings: Any) -> Optimizers:
        optimizers = optimizer_fn(agent, settings)
        if no_decay(settings):
            return optimizers
        check_optimizers(optimizers)
        last = {id(p): name.rstrip(".0123456789").rpartition(".")[2] for name, p in agent.named_parameters()}
        norms = {id(p) for m in agent.modules() if isinstance(m, torch.nn.LayerNorm) for p in m.parameters()}

        def is_weight(p: Tensor) -> bool:
            name = last.get(id(p), "")
            return p.dim() > 1 and "weight" in name and not name.endswith("sigma") and id(p) not in norms

        _part(optimizers, is_weight, lambda yes, group: {"weight_decay": group["weight_decay"] if yes else 0.0})
        return optimizers

    return decayed


def no_decay(settings: Any) -> bool:
    """True where no parameter decays, so that weights need no group of their own."""
    given: float | None = getattr(settings, "weight_decay", None)
    return not given and not (given is None and getattr(settings, "optimizer", "") == "adamw")


def taking_groups_of(optimizers: Optimizers, made: Optimizers, regrouped: bool) -> Callable[[], None]:
    """A function that gives optimizers the settings of the groups of others, and keeps their state.

    Args:
        made: of the same parameters. regrouped: they may be in other groups; then `made` takes the place of its own.

    Raises:
        ConfigError: `made` has other parameters, or other groups.
    """
    held, wanted = ({name: _group_sizes(x) for name, x in each.items()} for each in (optimizers, made))
    if not (held == wanted or regrouped) or _totals(held) != _totals(wanted):
        raise ConfigError(
            f"the change needs other optimizers, for {wanted} parameters where there are {held}; start anew with "
            "it, init=RUN (--init)"
        )

    def take() -> None:
        for name, optimizer in made.items():
            if held[name] != wanted[name]:  # weights decay now, or no longer
                _take_over(optimizer, optimizers[name])
                optimizers[name] = optimizer
            for group, asked in zip(optimizers[name].param_groups, optimizer.param_groups):
                group.update(_of_the_settings(asked))

    return take


def load_optimizers(
    optimizers: Optimizers, stored: Mapping[str, Mapping[str, Any]], regrouped: Callable[[], Optimizers | None]
) -> None:
    """Loads the state of each optimizer, but keeps the options of its groups that come from the settings.

    Args:
        regrouped: makes optimizers of the same parameters in the groups that they have where `weight_decay` was
            switched on or off since, which parts them anew; it returns None where there are no such groups.
    """
    for name, optimizer in optimizers.items():
        kept = [_of_the_settings(group) for group in optimizer.param_groups]
        groups = [len(group["params"]) for group in stored[name].get("param_groups", ())]
        if groups and groups != _group_sizes(optimizer) and (others := regrouped()) is not None:
            others[name].load_state_dict(dict(stored[name]))
            _take_over(optimizer, others[name])
        else:
            optimizer.load_state_dict(stored[name])
        for group, settings in zip(optimizer.param_groups, kept):
            group.update(settings)  # which may differ from those stored


def _of_the_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _OF_THE_SETTINGS if key in group}


def _totals(sizes: Mapping[str, list[int]]) -> dict[str, int]:
    return {name: sum(x) for name, x in sizes.items()}


def _group_sizes(optimizer: Any) -> list[int]:
    """How many parameters each group has."""
    return [len(group["params"]) for group in optimizer.param_groups]


def _take_over(optimizer: Any, source: Any) -> None:
    """Takes the state of an optimizer of its kind and of the same parameters, in whatever groups it has them."""
    if isinstance(optimizer, Adam):
        optimizer.load_state_dict(source.state_dict())
        return
    held = [p for group in optimizer.param_groups for p in group["params"]]
    state = {i: source.state[p] for i, p in enumerate(held) if p in source.state}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _part(
    optimizers: Optimizers, key: Callable[[Tensor], Any], own: Callable[[Any, Mapping[str, Any]], dict[str, Any]]
) -> None:
    """Parts every group of parameters by `key`, each part with settings `own(key, group)`."""
    for optimizer in optimizers.values():
        groups = list(optimizer.param_groups)
        optimizer.param_groups.clear()
        for group in groups:
            parts: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                parts.setdefault(key(p), []).append(p)
            for of, parameters in parts.items():
                optimizer.param_groups.append({**group, "params": parameters, **own(of, group)})


def _matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a dotted name, or its end after some dot."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")
