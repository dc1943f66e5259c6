"""Algorithms, one file each: settings, postprocess, loss, optimizer. Importing one loads torch, this does not."""

from __future__ import annotations

import inspect
from typing import Any

from penstock.core.config import import_object
from penstock.core.errors import ConfigError

ALGOS = {
    "a2c": "penstock.algos.a2c:A2C",
    "appo": "penstock.algos.appo:APPO",
    "bc": "penstock.algos.bc:BC",
    "boot-dqn": "penstock.algos.boot_dqn:BootDQN",
    "cql": "penstock.algos.cql:CQL",
    "crossq": "penstock.algos.crossq:CrossQ",
    "ddpg": "penstock.algos.ddpg:DDPG",
    "discrete-sac": "penstock.algos.discrete_sac:DiscreteSAC",
    "dqn": "penstock.algos.dqn:DQN",
    "dagger": "penstock.algos.dagger:DAgger",
    "gail": "penstock.algos.gail:GAIL",
    "impala": "penstock.algos.impala:IMPALA",
    "iql": "penstock.algos.iql:IQL",
    "mappo": "penstock.algos.mappo:MAPPO",
    "marwil": "penstock.algos.marwil:MARWIL",
    "ppo": "penstock.algos.ppo:PPO",
    "pqn": "penstock.algos.pqn:PQN",
    "qmix": "penstock.algos.qmix:QMIX",
    "r2d1": "penstock.algos.r2d1:R2D1",
    "rebrac": "penstock.algos.rebrac:ReBRAC",
    "sac": "penstock.algos.sac:SAC",
    "self-play": "penstock.algos.self_play:SelfPlay",
    "td3": "penstock.algos.td3:TD3",
    "td3-bc": "penstock.algos.rebrac:TD3BC",
    "tqc": "penstock.algos.tqc:TQC",
}
"""Built-in algorithms by the name that the command line knows."""


def make_algo(name: str) -> Any:
    """The default settings of a built-in algorithm, or of `module:NAME`: a class, settings, or a function of none.

    So `my_module:ALGO` may be ps.Policies({...}), and `my_module:make` a function that returns it.

    Raises:
        ConfigError: an unknown name (the message says the nearest), or something that has no `build`.
    """
    target = import_object(name) if ":" in name else None
    if isinstance(target, type) or not callable(target) or not _is_without_arguments(target):
        target = find_algo(name)
        return target() if isinstance(target, type) else target
    made = target()
    if not callable(getattr(made, "build", None)):
        raise ConfigError(
            f"{name}() returned {made!r:.80}; expected settings with build(spec, seed, device), as ps.PPO()"
        )
    return made


def _is_without_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def find_algo(name: str) -> Any:
    """The settings class of a built-in algorithm, or of `module:NAME`.

    Raises:
        ConfigError: an unknown name (the message says the nearest), or something that has no `build`.
    """
    require_algo_name(name)
    algo = import_object(ALGOS.get(name, name))
    if not callable(getattr(algo, "build", None)):
        raise ConfigError(f"{name} is {algo!r}; expected a frozen dataclass with build(spec, seed, device), as ps.PPO")
    return algo


def require_algo_name(name: str) -> None:
    """Raises ConfigError, which says the nearest, for a name that is neither built in nor `module:NAME`."""
    if ":" not in name and name not in ALGOS:
        from penstock.core.names.hints import of_algorithm

        raise ConfigError(f"unknown algorithm {name!r}; {of_algorithm(name, ALGOS)} (one of your own is module:NAME)")
