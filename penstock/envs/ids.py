"""Environment ids that penstock itself knows: `ALE/*`, `MinAtar/*-v1`, the toys as `penstock/*-v0`, and simulators'.

An Atari or MinAtar id means the game as published agents see it. `raw=True` among its keyword arguments means what
Gymnasium makes of the id instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym

from penstock.core.config import import_object
from penstock.core.errors import ConfigError, MissingExtraError, nearest, nearest_words
from penstock.envs.atari import atari, atari_vector
from penstock.envs.pettingzoo import installed_ids

_ALE, _MINATAR, _TOY = "ALE/", "MinAtar/", "penstock/"
VECTORIZED = "vectorized"
"""Keyword argument of an id that makes one batched environment instead of one for each slot."""
_MODES = (True, False, "vector_entry_point", "sync", "async")
_MINATAR_GAMES = {
    f"{_MINATAR}{name}-v1": f"penstock.envs.minatar:{function}"
    for name, function in {
        "Asterix": "asterix",
        "Breakout": "breakout",
        "Freeway": "freeway",
        "Seaquest": "seaquest",
        "SpaceInvaders": "space_invaders",
    }.items()
}
_TOYS = {  # not FaultEnv, which may kill its process: a stored run could name it by its id
    f"{_TOY}{name}-v0": f"penstock.envs.toy:{name}"
    for name in (
        "Bandit", "BitFlip", "BoundedBandit", "Chain", "Coin", "Connect3", "Constant", "ContinuousBandit", "Counter",
        "DeepSea", "Echo", "EchoAgents", "EchoTurns", "Endless", "HugeScale", "LatePay", "Masked", "Match", "Nim",
        "Overshoot", "PixelCatch", "RepeatPrevious", "ScaledBandit", "SeedEcho", "Sign", "TMaze", "TeamBits",
        "ThreeStep", "TwoStep", "TwoStepMatrix",
    )
}  # fmt: skip


_SIMULATORS = {
    "brax": "penstock.tensor_envs.sims.functional:brax",
    "isaaclab": "penstock.tensor_envs.sims.isaaclab:IsaacLab",
    "maniskill": "penstock.tensor_envs.sims.maniskill:ManiSkill",
    "mjlab": "penstock.tensor_envs.sims.mjlab:Mjlab",
    "playground": "penstock.tensor_envs.sims.functional:playground",
}


OLD_GYM = (
    "that is the old `gym`, which Gymnasium has replaced: `import gymnasium as gym` and derive from gymnasium.Env, or "
    "convert it by --wrappers GymV26CompatibilityV0 or GymV21CompatibilityV0 (wrappers=) of shimmy (pip install "
    "'shimmy[gym-v26]' or 'shimmy[gym-v21]')"
)
_CLOSE = 0.8
"""Similarity from which an id is a slip of another one; a package's ids resemble those of others."""
_OLD_ATARI = re.compile(r"([A-Z]\w+?)(?:-ram)?(NoFrameskip|Deterministic)-v\d")


class UnknownIdError(ConfigError):
    """An id that neither Gymnasium nor penstock knows."""

    def __init__(self, id_: str) -> None:
        super().__init__(unknown_id(id_))
        self.id_ = id_

    def __reduce__(self) -> Any:
        return UnknownIdError, (self.id_,)


def unknown_id(id_: str, imports: Sequence[str] = ()) -> str:
    """The message for an unknown id: its name here, or the package that may register it.

    Args:
        imports: modules that were imported and might have registered it.
    """
    said = f"unknown environment id {id_!r}"
    if atari := _OLD_ATARI.fullmatch(id_):
        return (
            f"{said}: Atari games are ALE/{atari[1]}-v5 here, preprocessed as published agents see them, 4 frames a "
            "step and stacked, with sticky actions unless env_kwargs have sticky=0, as in NoFrameskip-v4 "
            "(docs/atari.md); they come with an extra: pip install 'penstock[atari]'"
        )
    if _old_gym_has(id_):
        return f"{said}: a package has registered it with another library; {OLD_GYM}"
    known = [*known_ids(), *installed_ids()]
    close = [name for name in known if name.endswith(f"/{id_}")] or nearest_words(id_, known, cutoff=_CLOSE)
    said += f": did you mean {' or '.join(map(repr, close))}?" if close else "."
    if imports:
        names = ", ".join(imports)
        lists = f"penstock envs --import {imports[-1]} lists ids"
        return f"{said} Importing {names} has not registered it with Gymnasium; {lists}"
    return (
        f"{said} Packages register their ids when they are imported: name the package, or the module of yours that "
        "calls gymnasium.register, in `imports=` (--import, e.g. --import minigrid)"
    )


def _old_gym_has(id_: str) -> bool:
    """True if the old `gym` is loaded and has an environment of this id."""
    registry = getattr(sys.modules.get("gym.envs.registration"), "registry", ())
    return id_ in getattr(registry, "env_specs", registry)


def own_factory(env: str) -> Callable[..., Any] | None:
    """The callable that makes the environment of an id; None if that is Gymnasium's business."""
    if env in _TOYS:
        return import_object(_TOYS[env])
    if env in _MINATAR_GAMES:
        return functools.partial(_published, env, import_object(_MINATAR_GAMES[env]))
    if env.startswith(_ALE):
        game, sticky = _ale_game(env)
        return functools.partial(_published, env, functools.partial(atari, game, sticky=sticky))
    return None


_shipped: dict[str, Any] = {}
"""Entries of ids that another process knows, where nothing in this one registers them."""


def entries_to_ship(*ids: str) -> tuple[Any, ...]:
    """The ids' entries in Gymnasium's registry; a class of the script itself stands in one, not its name.

    In another process that name would mean something else. `take_shipped` is for that process.
    """
    found: list[Any] = []
    for id_ in dict.fromkeys(ids):
        entry = gym.registry.get(id_, _shipped.get(id_))
        if entry is not None and str(entry.entry_point).startswith("__main__:"):
            entry = copy.copy(entry)
            entry.entry_point = import_object(str(entry.entry_point))
        found += [] if entry is None else [entry]
    return tuple(found)


def take_shipped(entries: Iterable[Any]) -> None:
    """Registers ids here with the entries of another process, unless an imported module registers them."""
    for entry in entries:
        _shipped[entry.id] = entry


def entry_point(id_: str) -> Callable[..., Any] | None:
    """The class or function behind a registered id; None for an id or a module that is not there."""
    entry = gym.registry.get(id_, _shipped.get(id_))
    if entry is None:  # Gymnasium takes an id without its version for the newest
        with contextlib.suppress(gym.error.Error):
            entry = gym.spec(id_)
    found: Any = getattr(entry, "entry_point", None)
    if isinstance(found, str):
        try:
            return import_object(found)
        except (ConfigError, ImportError):
            return None  # `make_registered` raises the error
    return found


def make_registered(id_: str, **kwargs: Any) -> Any:
    """Calls Gymnasium's `make` or `make_vec` for an id. Raises ConfigError with the nearest for an unknown one."""
    if id_ in _shipped:
        gym.registry.setdefault(id_, _shipped[id_])
    try:
        # Gymnasium's own checker looks at the first step only and costs a call on every one; `check_env` replaces it.
        unchecked: dict[str, Any] = {"disable_env_checker": True, **kwargs}
        if "vectorization_mode" not in kwargs:
            return gym.make(id_, **unchecked)
        mode = kwargs["vectorization_mode"] or gym.spec(id_).vector_entry_point
        return gym.make_vec(id_, **(unchecked if mode in (None, "sync", "async") else kwargs))
    except gym.error.DependencyNotInstalled:
        raise
    except gym.error.DeprecatedEnv as error:
        raise ConfigError(str(error)) from error
    except gym.error.Error as error:
        if id_ in gym.registry:
            raise
        raise UnknownIdError(id_) from error


def require_known(id_: str) -> None:
    """Raises ConfigError for an id that nothing registers; no environment is made."""
    if own_factory(id_) is not None or id_ in _shipped:
        return
    try:
        gym.spec(id_)
    except gym.error.DeprecatedEnv as error:
        raise ConfigError(str(error)) from error
    except gym.error.Error as error:
        raise UnknownIdError(id_) from error


def make_vectorized(
    id_: str, *, vectorized: bool | str = True, num_envs: int = 1, raw: bool = False, **kwargs: Any
) -> Any:
    """`num_envs` environments of an id as one batched environment, by the id's own if it has one, else one by one.

    Args:
        vectorized: True, or as in `gymnasium.make_vec` `vector_entry_point`, `sync` or `async`.
        raw: an Atari or MinAtar id is made as Gymnasium makes it.
    """
    if vectorized not in _MODES:
        raise ConfigError(f"{id_} with env_kwargs {VECTORIZED}={vectorized!r}; expected one of {list(_MODES)}")
    own = None if raw else own_factory(id_)
    if not vectorized:
        return own(**kwargs) if own is not None else make_registered(id_, **kwargs)
    if own is None:
        mode = None if vectorized is True else vectorized
        return make_registered(id_, num_envs=num_envs, vectorization_mode=mode, **kwargs)
    if id_.startswith(_ALE) and vectorized in (True, "vector_entry_point"):
        game, sticky = _ale_game(id_)
        return _published(id_, functools.partial(atari_vector, game, num_envs, sticky=sticky), **kwargs)
    if vectorized == "vector_entry_point":
        raise ConfigError(f"{id_} has no batched environment of its own; use {VECTORIZED}=True, which steps one by one")
    kind = gym.vector.AsyncVectorEnv if vectorized == "async" else gym.vector.SyncVectorEnv
    return kind([functools.partial(own, **kwargs)] * num_envs)


def import_path_of(env: str) -> str:
    """The `module:qualname` of an id's entry point, which shares the id's presets; other texts unchanged."""
    env = env.partition(":")[2] if f":{_ALE}" in env else env
    return {**_TOYS, **_MINATAR_GAMES}.get(env, env)


def note_on(env: str, kwargs: Mapping[str, Any]) -> str:
    """A line on the preprocessing of an Atari game, for the head of a run; "" for any other environment."""
    env = import_path_of(env)
    if not env.startswith(_ALE) or is_raw(env, kwargs):
        return ""
    changed = "".join(f", {key}={value}" for key, value in kwargs.items())
    return (
        f"{env} with the preprocessing of published agents: 4 frames a step, 84 x 84 grey, stacks of 4, sticky "
        f"actions 0.25{changed}. --env-kwargs raw=true (env_kwargs={{'raw': True}}) switches it off"
    )


def is_raw(env: str, kwargs: Mapping[str, Any]) -> bool:
    """True if an Atari or MinAtar id is to be made by Gymnasium."""
    return bool(kwargs.get("raw")) and import_path_of(env).startswith((_ALE, "penstock.envs.minatar:"))


def known_ids() -> list[str]:
    """Every id that can be made as far as its package is installed: Gymnasium's and our own, sorted."""
    registered = list(gym.registry)
    games = [name for name in _ale_ids() if name not in registered]
    minatar = _MINATAR_GAMES if importlib.util.find_spec("minatar") is not None else ()
    return sorted({*registered, *games, *minatar, *_TOYS})


def _published(id_: str, make: Callable[..., Any], *, raw: bool = False, **kwargs: Any) -> Any:
    """The game by `make`, or by Gymnasium if `raw`."""
    if raw:
        return make_registered(id_, **kwargs)
    known = [name for name in inspect.signature(make).parameters if name != "game"]
    for name in kwargs:
        if name not in known:
            raise ConfigError(
                f"{id_} with env_kwargs {name}={kwargs[name]!r}; it is made as published agents see it, by {known}: "
                "leave it out, or have the game as Gymnasium makes it with raw=True (--env-kwargs raw=true)"
            )
    return make(**kwargs)


def _ale_game(id_: str) -> tuple[str, float]:
    """Game, as ale-py spells it, and probability of sticky actions of an id."""
    known = _ale_ids()
    if not known:
        raise MissingExtraError("ale_py", "atari")
    if id_ not in known:
        raise ConfigError(f"unknown environment id {id_!r}; {nearest(id_, known)}")
    kwargs = gym.registry[id_].kwargs
    return kwargs["game"], kwargs["repeat_action_probability"]


def _ale_ids() -> list[str]:
    """The ids that ale-py registers when it is imported; none if it is not installed."""
    if importlib.util.find_spec("ale_py") is None:
        return []
    importlib.import_module("ale_py")
    return [name for name in gym.registry if name.startswith(_ALE)]


def is_simulator_id(env: str) -> bool:
    """True for `SIMULATOR:TASK`."""
    return env.partition(":")[0] in _SIMULATORS and ":" in env


def simulator_factory(env: str) -> Callable[..., Any]:
    """The callable that makes the environment of such an id; imported now, since it loads torch."""
    simulator, _, task = env.partition(":")
    if not task or ":" in task:
        raise ConfigError(f"env={env!r}; expected {simulator}:TASK, the name of one of its tasks")
    return functools.partial(import_object(_SIMULATORS[simulator]), env)
