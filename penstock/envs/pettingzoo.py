"""PettingZoo's Parallel and AEC environments: made by id, told apart by their methods, described agent by agent.

Nothing here needs PettingZoo itself unless an id names it: any class with the methods of its two will do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import gymnasium as gym

from penstock.core.errors import ConfigError, MissingExtraError, nearest_words, words_of

PREFIX = "pettingzoo:"
_FAMILIES = ("atari", "butterfly", "classic", "sisl")
"""Families of PettingZoo's own package; `mpe2` and others are packages of their own."""
_HOMES = {**{family: f"pettingzoo.{family}" for family in _FAMILIES}, "magent2": "magent2.environments"}
_KNOWN = (*_FAMILIES, "mpe2", "magent2")
_IN_EXTRA = ("classic", "mpe2")
"""Families that the extra `pettingzoo` brings."""

_SMALL_SEEDS = ("hanabi_",)
"""Prefix of environments with a `reset` that takes a seed of 31 bits: OpenSpiel passes it to C++ as an int."""


class AgentsEnv(Protocol):
    """The part that PettingZoo's Parallel and AEC environments have in common."""

    possible_agents: list[Any]
    agents: list[Any]

    def observation_space(self, agent: Any, /) -> gym.Space[Any]: ...
    def action_space(self, agent: Any, /) -> gym.Space[Any]: ...
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any: ...
    def close(self) -> None: ...


def is_agents_env(env: Any) -> bool:
    """True for an environment of many agents: it has `possible_agents`, and spaces by agent."""
    if isinstance(env, (gym.Env, gym.vector.VectorEnv)) or not hasattr(env, "possible_agents"):
        return False
    return all(callable(getattr(env, name, None)) for name in ("observation_space", "action_space", "reset", "step"))


def lacks_for_agents(env: Any) -> str:
    """The parts of PettingZoo's API that an environment lacks which seems to be of many agents; "" if none does."""
    spaces = {name: getattr(env, name, None) for name in ("observation_space", "action_space")}
    if not any(isinstance(space, dict) for space in spaces.values()) and not (
        hasattr(env, "possible_agents") or hasattr(env, "agents")
    ):
        return ""
    lacking = [] if hasattr(env, "possible_agents") else ["possible_agents, the list of all names"]
    for name, space in spaces.items():
        if not callable(space):
            seen = f", which is a {type(space).__name__} here" if space is not None else ""
            lacking.append(f"a method {name}(agent){seen}")
    return " and ".join(lacking)


def takes_turns(env: Any) -> bool:
    """True for an AEC environment, where agents act one after the other; False for a Parallel one."""
    return callable(getattr(env, "last", None))


def is_pettingzoo_id(env: str) -> bool:
    """True for `pettingzoo:FAMILY/NAME`."""
    return env.startswith(PREFIX)


def is_known_family(env: str) -> bool:
    """True for an id of PettingZoo's own families or of the packages that its makers keep."""
    family, slash, name = env.removeprefix(PREFIX).partition("/")
    return is_pettingzoo_id(env) and bool(slash) and family in _KNOWN and name.isidentifier()


def factory_of(id_: str) -> Callable[..., Any]:
    """The function that makes the environment of an id: the module's `parallel_env` if it has one, else its `env`.

    `pettingzoo:mpe2/simple_spread_v3` is that of `mpe2.simple_spread_v3`, `pettingzoo:classic/tictactoe_v3` that of
    `pettingzoo.classic.tictactoe_v3`.

    Raises:
        ConfigError: no such module, or it makes no environment. MissingExtraError: the package is not installed.
    """
    family, slash, name = id_.removeprefix(PREFIX).partition("/")
    if not slash or not name.isidentifier() or not all(part.isidentifier() for part in family.split(".")):
        raise ConfigError(
            f"env={id_!r}; expected {PREFIX}FAMILY/NAME, e.g. {PREFIX}mpe2/simple_spread_v3 or "
            f"{PREFIX}classic/tictactoe_v3{_hint(id_)}"
        )
    home = _HOMES.get(family, family)
    try:
        module = importlib.import_module(f"{home}.{name}")
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing in (home, f"{home}.{name}") and missing != home.partition(".")[0]:
            raise ConfigError(
                f"env={id_!r}: {home} has no environment {name!r}{_hint(id_)}; `penstock envs {family}` lists all"
            ) from error
        if missing == family and family not in _KNOWN:
            raise ConfigError(
                f"env={id_!r}: there is no package {family!r} here; families of PettingZoo: {', '.join(_KNOWN)}"
                f"{_hint(id_)}"
            ) from error
        raise _missing(family, missing or home) from error
    except Exception as error:  # PettingZoo raises its own for environments that it has renumbered or moved
        if type(error).__module__.startswith("pettingzoo"):
            raise ConfigError(f"env={id_!r}: {words_of(error)}") from error
        raise
    for maker in ("parallel_env", "env"):
        if callable(make := getattr(module, maker, None)):
            return functools.partial(_small_seeded, make) if name.startswith(_SMALL_SEEDS) else make
    raise ConfigError(f"env={id_!r}: {module.__name__} has neither parallel_env nor env; expected one that makes it")


def _hint(id_: str) -> str:
    """The installed ids closest to one that is not there; "" if none is close."""
    close = nearest_words(id_, installed_ids())
    return f"; did you mean {' or '.join(repr(word) for word in close)}?" if close else ""


def _small_seeded(make: Callable[..., Any], **kwargs: Any) -> Any:
    """An environment that is reset with the upper 31 of a seed's 32 bits."""
    env = make(**kwargs)
    reset = env.reset

    def seeded(seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return reset(seed=None if seed is None else seed >> 1, options=options)

    env.reset = seeded
    return env


def _missing(family: str, package: str) -> ConfigError:
    """The error for a package that is not installed, with what brings it: of most families PettingZoo's own extra."""
    if package == "pettingzoo" or family in _IN_EXTRA:
        return MissingExtraError(package, "pettingzoo")
    bring = f"pettingzoo[{family}]" if family in _FAMILIES else family
    return ConfigError(f"{package} is not installed; {PREFIX}{family} needs it: pip install '{bring}'")


def agents_of(env: AgentsEnv, name: str) -> tuple[str, ...]:
    """`possible_agents`. Raises ConfigError unless they are distinct texts."""
    if isinstance(env.possible_agents, (set, frozenset)):
        raise ConfigError(
            f"{name}: possible_agents is a set, {sorted(map(str, env.possible_agents))} in some order; expected a "
            "list: other processes would seat the agents otherwise"
        )
    agents: Sequence[Any] = list(env.possible_agents)
    if not agents or not all(isinstance(agent, str) for agent in agents) or len({*agents}) != len(agents):
        raise ConfigError(
            f"{name}: possible_agents is {agents!r}; expected one or more distinct names, as text: they name policies, "
            "metrics and seats"
        )
    return tuple(agents)


def installed_ids() -> list[str]:
    """The ids of all environments of the families that are installed; none of their modules is imported."""
    found: list[str] = []
    for family in _KNOWN:
        home = _HOMES.get(family, family)
        try:
            spec = importlib.util.find_spec(home)
        except ModuleNotFoundError:
            continue
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        names = (module.name for module in pkgutil.iter_modules(places))
        found += [f"{PREFIX}{family}/{name}" for name in names if re.fullmatch(r"\w+_v\d+", name)]
    return sorted(found)
