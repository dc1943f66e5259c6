"""Start: the parameters that a new run's policies start from, all of one run's or each policy's own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from penstock.algos.self_play import MAIN, SelfPlay
from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.spec import SHARED, EnvSpec, describe
from penstock.core.tree import tree_leaves, tree_paths
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, by_id, parameters
from penstock.run.files.inits import Init, read


@dataclass(frozen=True)
class Origin:
    """A policy of another run."""

    said: str
    """The text by which `init` names it."""
    algorithm: str
    spec: EnvSpec
    parameters: Mapping[str, Tensor]
    parts: frozenset[str]


@dataclass(frozen=True)
class Start:
    """Initial networks and normalisers: of a full run, or of each policy that starts from another one."""

    said: str
    """`init`, as it was given."""
    whole: Mapping[str, Tensor] | None = None
    sources: Mapping[str, Origin] | None = None
    """By the id of the policy that starts from it; "" for the only one."""
    parts: frozenset[str] = frozenset()
    """Parts of the agents of `whole`, which policies without them do not start from."""

    def into(self, policy: AnyPolicy) -> None:
        """Loads the parameters; policies that are not named stay as they were made.

        Raises:
            ConfigError: there is no such policy here. CheckpointError: spaces or networks differ.
        """
        if self.sources is None:
            policy.load_parameters(_without(self.parts - _parts(policy), self.whole or {}, self.said))
            return
        here = by_id(policy)
        game: Any = policy if isinstance(policy.settings, SelfPlay) else None
        only = MAIN if game is not None else next(iter(here))
        for name, source in self.sources.items():
            if not name and len(here) > 1 and game is None:
                raise ConfigError(
                    f"init={self.said} is one policy, and here are {list(here)}; expected by policy, "
                    f"{{{only!r}: {self.said}}} (--init {only}=RUN:POLICY)"
                )
            _require_here(name, here)
            _load(here[name or only], name or only, source)
        if game is not None and {MAIN, ""} & self.sources.keys():
            game.settings.copy_main(game)

    def explained(self, error: CheckpointError, algo: object) -> CheckpointError:
        """Adds the value of `init` to an error of `into`, if it names a full run."""
        if self.whole is None:
            return error
        return CheckpointError(
            f"init={self.said} does not suit {type(algo).__name__} with these settings (a preset may have changed net; "
            f"--preset none): {error}"
        )


def read_start(init: Init, algo: object, load: Callable[[str], AnyPolicy]) -> Start:
    """The parameters that `init` names.

    Args:
        algo: the algorithm that starts from them: self-play has main start from a run of one policy.
        load: opens a run.

    Raises:
        ConfigError: `init` is none, or a run has no policy of that id. CheckpointError: of `load`.
    """
    given = read(init)
    if isinstance(given, str):
        found = load(given)
        if not isinstance(algo, SelfPlay) or MAIN in by_id(found):
            return Start(f"{given!r}, a run of {_algorithm(found)},", parameters(found), parts=_parts(found))
        given = {MAIN: (given, "")}
    for name in _each(given):
        _require_here(name, getattr(algo, "algos", {name: None}))
    runs = {run: load(run) for run in dict.fromkeys(x[0] for x in _each(given).values())}
    sources = {name: _source(runs[run], run, policy, name) for name, (run, policy) in _each(given).items()}
    return Start(repr(init), sources=sources)


def _require_here(name: str, here: Mapping[str, Any]) -> None:
    """Raises ConfigError for the id of a policy that there is not."""
    if name and name not in here:
        raise ConfigError(f"init names the policy {name!r}, which is none here; {nearest(name, here)}")


def _each(given: Any) -> Mapping[str, tuple[str, str]]:
    return given if isinstance(given, dict) else {"": given}


def _source(found: AnyPolicy, run: str, policy: str, name: str) -> Origin:
    """One policy of a run that was loaded: the one named, or its only one, or that of the same id."""
    there = by_id(found)
    if not policy:
        policy = next(iter(there)) if len(there) == 1 else name
    if policy not in there:
        at = f"{name}=" if name else ""
        raise ConfigError(
            f"init: {run} has no policy {policy!r}; it has {list(there)}: name one, ({run!r}, {next(iter(there))!r}) "
            f"(--init {at}{run}:{next(iter(there))})"
        )
    own = there[policy]
    said = run if len(there) == 1 else f"{policy!r} of {run}"
    return Origin(said, type(own.settings).__name__, own.spec, own.agent.state_dict(), _parts(own))


def _algorithm(policy: AnyPolicy) -> str:
    """The class of a run's algorithm."""
    policies = by_id(policy)
    return type((policies[SHARED] if list(policies) == [SHARED] else policy).settings).__name__


def _load(policy: Policy, name: str, source: Origin) -> None:
    for what in ("obs", "action"):
        seen, expected = getattr(source.spec, what), getattr(policy.spec, what)
        if _form(seen) != _form(expected):
            word = "observations" if what == "obs" else "actions"
            raise CheckpointError(
                f"init: policy {name!r} cannot start from {source.said}, whose {word} are {describe(seen)}; expected "
                f"{describe(expected)}"
            )
    try:
        policy.load_parameters(_without(source.parts - _parts(policy), source.parameters, source.said))
    except CheckpointError as error:
        raise CheckpointError(
            f"init: policy {name!r}, {type(policy.settings).__name__}, cannot start from {source.said}, "
            f"{source.algorithm} (a preset may have changed net; --preset none): {error}"
        ) from error


def _parts(policy: AnyPolicy) -> frozenset[str]:
    """Names of the parts of its agents, such as `rnd`; of several policies `policy/rnd`."""
    here = by_id(policy)
    named = [(name, part) for name, one in here.items() for part in one.agent.outer_parts]
    return frozenset(part if len(here) == 1 else f"{name}/{part}" for name, part in named)


def _without(parts: frozenset[str], parameters: Mapping[str, Tensor], said: str) -> dict[str, Tensor]:
    """Parameters without those of parts that are not here, of which it warns."""
    if parts:
        warnings.warn(f"init={said} leaves out {', '.join(sorted(parts))}, which is of that run alone", stacklevel=2)
    begun = tuple(f"{part}." for part in parts)
    return {name: x for name, x in parameters.items() if not name.startswith(begun)}


def _form(space: Any) -> list[Any]:
    """All of a space that decides which networks it has: its leaves without their bounds, by path."""
    leaves = [(leaf.kind, leaf.shape, leaf.dtype, leaf.sizes) for leaf in tree_leaves(space)]
    return list(zip(tree_paths(space), leaves))
