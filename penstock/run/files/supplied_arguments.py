"""Arguments that supply what a run could not store, such as a lambda; stored settings must not differ."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from penstock.core.config import to_plain, unstorable
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from penstock.envs.seats import PolicyMap

if TYPE_CHECKING:
    from penstock.learn.algorithm import AgentFn

Plain: TypeAlias = Mapping[str, Any]
_SETTINGS = {
    "kwargs": "env_kwargs", "wrappers": "wrappers", "info_keys": "info_keys", "imports": "imports",
    "checks": "env_checks", "drop": "env_drop", "text": "env_text", "mask_key": "env_mask", "state": "env_state",
    "options": "env_options",
}  # fmt: skip
"""Settings of an EnvConfig, with their names in an Experiment without an EnvConfig."""
_OF_ENV = {"env", "eval_env", "eval_env_kwargs", *_SETTINGS.values()}
_STORED = (
    "stored are names, numbers, texts, lists, dicts, and functools.partial of what can be imported with such arguments"
)


@dataclass(frozen=True)
class Supplied:
    """Arguments given again because a run could not store them, such as a lambda; None: use the stored one."""

    env: Any = None
    agent: AgentFn | None = None
    eval_env: Any = None
    policy_mapping_fn: PolicyMap | None = None

    def of_algo(self) -> dict[str, Any]:
        """Those that belong to the settings of the algorithm, by name."""
        given = {"agent": self.agent, "policy_mapping_fn": self.policy_mapping_fn}
        return {name: value for name, value in given.items() if value is not None}

    def require_same_algo(self, plain: Plain) -> None:
        """Like `require_same`, for the settings of the algorithm alone."""
        for name, value in self.of_algo().items():
            if name in plain["algo"]:
                stored = plain["algo"][name]
                given = {"import": value} if isinstance(value, str) else _plain(value)
                _require_same(name, stored, stored if _names(stored, value) else given)

    def require_same(self, plain: Plain) -> None:
        """Raises ConfigError for an argument that differs from the stored one.

        Args:
            plain: the stored experiment, as `to_plain` returned it.
        """
        self.require_same_algo(plain)
        if self.env is not None:
            _require_same_env("env", plain, plain["env"], self.env)
        if self.eval_env is not None:
            own = {**plain, "env_kwargs": plain.get("eval_env_kwargs", {})}
            _require_same_env("eval_env", own, plain.get("eval_env"), self.eval_env)


def require_storable(exp: Any, why: str) -> None:
    """Raises ConfigError for an experiment with parts that no file can hold, such as a lambda."""
    if lost := unstorable(to_plain(exp)):
        raise ConfigError(
            f"{_listed(lost)} cannot be stored, and {why}; move it to the top of a module that can be imported, and "
            f"name it module:qualname; {_STORED}"
        )


def warn_of_unstorable(plain: Any) -> None:
    """Warns of the parts of an experiment as plain data that its run does not store, and says what takes them again."""
    if not (lost := unstorable(plain)):
        return
    given = ", ".join(f"{name}={value}" for name, value in _arguments_for(lost).items())
    again = f"Pass it again, ps.resume(run, {given}), or move" if given else "Move"
    warnings.warn(
        f"{_listed(lost)} cannot be stored with the run: penstock eval, record and resume will lack it. {again} it to "
        f"the top of a module that can be imported; {_STORED}",
        stacklevel=2,
    )


def _listed(lost: Mapping[str, str]) -> str:
    return ", ".join(f"{path}={said:.100}" for path, said in lost.items())


def _arguments_for(lost: Mapping[str, str]) -> dict[str, str]:
    """The arguments of `ps.resume` that supply these settings, as code."""
    found: dict[str, str] = {}
    for path in lost:
        first, _, rest = path.partition(".")
        name = rest.partition(".")[0] if first == "algo" else "eval_env" if first.startswith("eval_env") else "env"
        if first == "algo" and name in ("agent", "policy_mapping_fn"):
            found[name] = "..."
        elif first.partition("[")[0] in _OF_ENV:
            found[name] = "..." if path == name else "ps.EnvConfig(...)"
    return found


def _require_same_env(name: str, plain: Plain, stored: Any, given: Any) -> None:
    """Compares an environment, and the settings that come with it where an EnvConfig is given or stored."""
    whole = isinstance(stored, Mapping) and "class" in stored
    was = stored if whole else {"env": stored, **{k: plain[own] for k, own in _SETTINGS.items() if own in plain}}
    if not isinstance(given, EnvConfig):
        was = was if whole else {"env": stored}
        given = EnvConfig(given)
    if isinstance(was["env"], Mapping) and "unstorable" in was["env"]:
        was = {**was, "kwargs": {"unstorable": "of a factory that is not known"}}
    now = _plain(given)
    if _names(was["env"], given.env):
        now["env"] = was["env"]
    for key in ("env", *_SETTINGS):
        if key in was:
            _require_same(name if key == "env" else f"{name}.{key}", was[key], now[key])


def _require_same(name: str, stored: Any, given: Any) -> None:
    if not _same(stored, given):
        raise ConfigError(
            f"{name}={_shown(given)} is given, and {_shown(stored)} was stored; a run is opened with what it was "
            f"trained with, so leave {name.partition('.')[0]} out. For another one start anew from its networks: "
            "ps.train(exp, init=RUN)"
        )


def _same(stored: Any, given: Any) -> bool:
    """True if plain settings are equal, as far as they could be stored; a function is equal to its import path."""
    if isinstance(stored, Mapping):
        if "unstorable" in stored or stored.get("class", "") is None:
            return True
        if not isinstance(given, Mapping):
            return stored == {"import": given}
        known = set(given) & set(stored) if "class" in stored else {*given, *stored}  # versions before had fewer
        return all(key in stored and key in given and _same(stored[key], given[key]) for key in known)
    if isinstance(stored, list):
        return isinstance(given, list) and len(stored) == len(given) and all(map(_same, stored, given))
    return given in (stored, {"import": stored})


def _names(stored: Any, given: Any) -> bool:
    """True if a stored path leads to the given object in an imported module; imports none, as it may be foreign."""
    if isinstance(stored, Mapping):
        stored = None if "args" in stored else stored.get("import")
    module, _, name = str(stored).partition(":")
    found = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)
    return found is not None and found is given


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(to_plain(value)))


def _shown(plain: Any) -> str:
    """A stored value in a message."""
    if isinstance(plain, Mapping) and len(plain) == 1:
        plain = plain.get("import", plain.get("unstorable", plain))
    return f"{plain!r:.120}"
