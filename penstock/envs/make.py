"""Environments made from settings: a Gymnasium id, import path or callable, with its arguments and wrappers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import gymnasium as gym

from penstock.core.config import import_object, import_path
from penstock.core.errors import ConfigError, EnvWorkerError, MissingExtraError, NativeEnvError, PenstockError, nearest
from penstock.envs.closing import close_env
from penstock.envs.wrappers import ActionMask

AnyEnv: TypeAlias = "gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]"
Checks = Literal["sampled", "always", "finite", "off"]

_EXTRAS = {
    "box2d": "box2d",
    "mujoco": "mujoco",
    "pygame": "classic",
    "ale_py": "atari",
    "cv2": "atari",
    "opencv": "atari",
}


@dataclass(frozen=True)
class EnvConfig:
    """The settings of one environment; `make()` returns a new instance each time."""

    env: str | Callable[..., Any]
    """A Gymnasium id (`CartPole-v1`, `module:Id-v0`), or a callable that makes one, or its `module:qualname`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of `gymnasium.make` or of the callable."""
    wrappers: tuple[str | Callable[..., Any], ...] = ()
    """Applied in order, the first one innermost: `module:qualname` or callables that take the environment."""
    info_keys: tuple[str, ...] = ()
    """Keys of the step `info` that are recorded in every batch; each must hold one number."""
    imports: tuple[str, ...] = ()
    """Modules imported before anything is made, because they register ids on import, such as `ale_py`."""
    checks: Checks = "sampled"
    """Checks of values; shapes and dtypes are always checked, and every batch for NaN and infinity.

    `sampled`: bounds too, in the first episode of a slot and 1 step in 64. `always`: every step. `finite`: bounds are
    not checked, for environments that overstep their own. `off`: neither.
    """
    mask_key: str | None = None
    """Key of the `info` that holds an action mask, moved into the observation by `ActionMask` as outermost wrapper."""

    def __post_init__(self) -> None:
        if not isinstance(self.env, str) and not callable(self.env):
            raise ConfigError(
                f"env={self.env!r}; expected a Gymnasium id, module:qualname, or a callable that makes an environment: "
                "every slot needs its own instance"
            )
        for name in ("wrappers", "info_keys", "imports"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}; expected a tuple: {name}=({getattr(self, name)!r},)"
                )
        if self.checks not in get_args(Checks):
            raise ConfigError(f"checks={self.checks!r}; {nearest(str(self.checks), get_args(Checks))}")

    @property
    def name(self) -> str:
        """The id, or the import path or name of the callable."""
        return self.env if isinstance(self.env, str) else _name(self.env)

    def make(self) -> AnyEnv:
        """A new environment; its owner closes it.

        Raises:
            ConfigError: unknown id, module or name; a missing extra; the factory returned no environment.
            EnvWorkerError: the environment's or a wrapper's own code raised; the original is chained.
        """
        for module in self.imports:
            _import_module(module, "imports")
        env = _expect_env(_call(self._factory(), self.kwargs, f"env factory {self.name}"), f"env factory {self.name}")
        try:
            for wrapper in self.wrappers:
                what = f"env wrapper {_name(wrapper)}"
                wrap = import_object(wrapper) if isinstance(wrapper, str) else wrapper
                env = _expect_env(_call(functools.partial(wrap, env), {}, what), what)
            if self.mask_key is not None:
                if isinstance(env, gym.vector.VectorEnv):
                    raise ConfigError(
                        f"mask_key={self.mask_key!r} with the vector environment {type(env).__name__}; "
                        "show the mask in its observation instead"
                    )
                env = ActionMask(env, self.mask_key)
        except BaseException:
            close_env(env, self.name)
            raise
        return env

    def make_one(self) -> gym.Env[Any, Any]:
        """As `make`, but raises NativeEnvError for a native batched environment."""
        env = self.make()
        if isinstance(env, gym.vector.VectorEnv):
            raise NativeEnvError(
                f"{self.name} made a VectorEnv, a native batched environment, where one environment for a slot was "
                "expected; use SerialSampler, or AlternatingSampler for two groups"
            )
        return env

    def _factory(self) -> Callable[..., Any]:
        if not isinstance(self.env, str):
            return self.env
        module, colon, name = self.env.partition(":")
        if colon:
            _import_module(module, "env")
            # A qualname has no "-" or "/", a registered id nearly always does; a registered name wins over a class.
            if name not in gym.registry and name.replace(".", "").isidentifier():
                found = import_object(self.env)
                if not callable(found):
                    raise ConfigError(
                        f"env={self.env!r} is {type(found).__name__} {found!r}; expected a callable that "
                        "makes an environment"
                    )
                return found
        return functools.partial(_make_registered, name if colon else self.env)


def as_env_config(env: EnvConfig | str | Callable[..., Any]) -> EnvConfig:
    """Settings from an id, an import path or a callable; an `EnvConfig` is returned unchanged."""
    return env if isinstance(env, EnvConfig) else EnvConfig(env)


def _make_registered(id_: str, **kwargs: Any) -> Any:
    try:
        # Gymnasium's own checker looks at the first step only and costs a call on every one; `check_env` replaces it.
        return gym.make(id_, **{"disable_env_checker": True, **kwargs})
    except gym.error.DependencyNotInstalled:
        raise
    except gym.error.DeprecatedEnv as error:
        raise ConfigError(str(error)) from error
    except gym.error.Error as error:
        if id_ in gym.registry:
            raise
        raise ConfigError(
            f"unknown environment id {id_!r}: {nearest(id_, gym.registry)} Packages register their ids when they are "
            "imported: name the package in `imports=` (--import, e.g. --import ale_py)"
        ) from error


def _call(factory: Callable[..., Any], kwargs: Mapping[str, Any], what: str) -> Any:
    try:
        return factory(**kwargs)
    except PenstockError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, (gym.error.DependencyNotInstalled, ModuleNotFoundError)):
            text = f"{error} {getattr(error, 'name', '')}".lower()
            for package, extra in _EXTRAS.items():
                if package in text:
                    raise MissingExtraError(package, extra) from error
        given = f" with kwargs {dict(kwargs)!r}" if kwargs else ""
        raise EnvWorkerError(f"{what} raised {type(error).__name__}: {error}{given}") from error


def _expect_env(made: Any, what: str) -> AnyEnv:
    if isinstance(made, (gym.Env, gym.vector.VectorEnv)):
        return made  # pyright: ignore[reportUnknownVariableType]
    cls = type(made)
    hint = ""
    if made is None:
        hint = "; is a `return` missing?"
    elif any(base.__module__.split(".")[0] == "gym" for base in cls.__mro__):
        hint = "; that is the old `gym`: derive from gymnasium.Env, or convert it with shimmy"
    raise ConfigError(
        f"{what} gave {cls.__module__}.{cls.__qualname__}; expected a gymnasium.Env or gymnasium.vector.VectorEnv{hint}"
    )


def _import_module(module: str, setting: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting}: cannot import {module!r}: {error}; is it installed and on PYTHONPATH?"
        ) from error
    except Exception as error:
        raise EnvWorkerError(f"{setting}: importing {module!r} raised {type(error).__name__}: {error}") from error


def _name(obj: Any) -> str:
    if isinstance(obj, str):
        return obj
    if isinstance(obj, functools.partial):
        return _name(obj.func)
    return import_path(obj) or getattr(obj, "__qualname__", None) or repr(obj)
