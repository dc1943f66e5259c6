"""Environments made from settings: a Gymnasium id, import path or callable, with its arguments and wrappers."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

import gymnasium as gym

from penstock.core.config import import_object, import_path, known_names
from penstock.core.errors import (
    ConfigError,
    EnvWorkerError,
    MissingExtraError,
    NativeEnvError,
    PenstockError,
    nearest,
    words_of,
)
from penstock.core.names.calls import Call, call_text, read_call
from penstock.core.spec import EnvSpec
from penstock.envs.agents_wrappers import shown_agents
from penstock.envs.builtin import is_attribute, public_path, wrapper_path
from penstock.envs.contract import Checks
from penstock.envs.envpool import EnvPoolVectorEnv, is_envpool_id
from penstock.envs.ids import (
    OLD_GYM,
    VECTORIZED,
    UnknownIdError,
    entry_point,
    is_simulator_id,
    make_registered,
    make_vectorized,
    note_on,
    own_factory,
    simulator_factory,
    unknown_id,
)
from penstock.envs.pettingzoo import factory_of, is_agents_env, is_pettingzoo_id, lacks_for_agents
from penstock.envs.seats import Seating
from penstock.envs.shutdown import close_env
from penstock.envs.wrappers import ActionMask, DropKeys, TextBytes, give_options, masks_itself, why_unmasked

AnyEnv: TypeAlias = "gym.Env[Any, Any] | gym.vector.VectorEnv[Any, Any, Any]"
Wrapper: TypeAlias = "str | Callable[..., Any] | tuple[str | Callable[..., Any], Mapping[str, Any]]"
StateOf: TypeAlias = Literal["", "env", "joint"]
"""A state in every observation: none, the environment's own, or the observations of all agents side by side."""

_EXTRAS = {
    "box2d": "box2d",
    "mujoco": "mujoco",
    "pygame": "classic",
    "ale_py": "atari",
    "cv2": "atari",
    "opencv": "atari",
    "pettingzoo": "pettingzoo",
    "mpe2": "pettingzoo",
    "envpool": "envpool",
}
_DERIVE = (
    "derive from gymnasium.Env, a batched one from gymnasium.vector.VectorEnv, or from PettingZoo's ParallelEnv or "
    "AECEnv, or convert it with a wrapper of yours or of shimmy (wrappers=, --wrappers)"
)


@dataclass(frozen=True)
class EnvConfig:
    """The settings of one environment; `make()` returns a new instance each time."""

    __new__ = known_names

    env: str | Callable[..., Any]
    """A Gymnasium id (`CartPole-v1`, `module:Id-v0`), or a callable that makes one, or its `module:qualname`.

    `envpool:TASK` is one batched environment of all slots, and so is a simulator's, `mjlab:TASK`. For many agents:
    `pettingzoo:FAMILY/NAME`, or a callable that makes one with PettingZoo's Parallel or AEC API.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments of `gymnasium.make` or of the callable."""
    wrappers: tuple[Wrapper, ...] = ()
    """Wrappers, applied in order, the first one innermost: callables that take the environment, `module:qualname`, or
    a short name of Gymnasium's, Shimmy's or penstock's; with arguments `"FrameStackObservation(stack_size=4)"`,
    `("FrameStackObservation", {"stack_size": 4})` or a `functools.partial`."""
    info_keys: tuple[str, ...] = ()
    """Keys of the step `info` that are recorded in every batch; each must hold one number."""
    imports: tuple[str, ...] = ()
    """Modules imported before anything is made, because they register ids on import, such as `ale_py`."""
    checks: Checks = "sampled"
    """Checks of values; structure, shapes and dtypes are always checked.

    `sampled`: NaN and infinity are errors, looked for in the first episode of a slot, in 1 step of 64 and in every
    batch; a value outside its space is a warning, once, and counted. `always`: every step, and all are errors.
    `finite`: as `sampled`, but bounds are not checked. `off`: values are not checked.
    """
    drop: tuple[str, ...] = ()
    """Keys of Dict observations (of all agents) to leave out, such as `mission`, a text."""
    text: int = 0
    """Length in bytes of the array that `TextBytes` makes of each text in the observation; 0: text is refused."""
    mask_key: str | None = None
    """Key of the `info` that holds an action mask, moved into the observation by `ActionMask` as outermost wrapper.

    None: calls the method `action_masks()` if the environment has it and its observation holds no mask. "": no mask.
    """
    state: StateOf = ""
    """State for critics that see more than an agent does; added under `state` to every agent's observation.

    `env`: what the environment's `state()` returns. `joint`: the observations of all agents side by side as float32,
    choices as one-hot vectors, masks left out, zeros for an absent agent. Needs many agents.
    """
    seating: Seating | None = None
    """Which policy plays which agent of an environment of many; `Policies.seat(env)` fills it in. None for one
    agent."""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed to every `reset(options=...)`, in evaluations too; plain data, which is stored with the run."""
    evaluation: EnvConfig | None = None
    """Environment of a sampler's evaluations, with the same spaces and policies; a run fills it in. None: this one."""
    eval_in_training: bool = False
    """Evaluations play in the training environments, which all reset afterwards; a run fills it in."""

    def __post_init__(self) -> None:
        refuse_made(self.env)
        if not isinstance(self.env, str) and not callable(self.env):
            raise ConfigError(
                f"env={self.env!r}; expected a Gymnasium id, module:qualname, or a callable that makes an environment: "
                "every slot needs its own instance"
            )
        object.__setattr__(self, "wrappers", as_wrappers(self.wrappers))
        for name in ("info_keys", "imports", "drop"):
            if isinstance(getattr(self, name), str):
                raise ConfigError(
                    f"{name}={getattr(self, name)!r}; expected a tuple: {name}=({getattr(self, name)!r},)"
                )
            object.__setattr__(self, name, tuple(getattr(self, name)))
        given: Any = self.options
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ConfigError(f"options={given!r}; expected a dict for reset(options=...), e.g. {{'level': 3}}")
        if not isinstance(self.text, int) or self.text < 0:
            raise ConfigError(f"text={self.text!r}; expected the bytes of the longest text, e.g. 64, or 0")
        if self.state not in get_args(StateOf):
            raise ConfigError(f"state={self.state!r}; expected one of {list(get_args(StateOf))}")
        if self.checks not in get_args(Checks):
            raise ConfigError(f"checks={self.checks!r}; {nearest(str(self.checks), get_args(Checks))}")

    @property
    def name(self) -> str:
        """The id, or the import path or name of the callable."""
        return self.env if isinstance(self.env, str) else _name(self.env)

    def make(self, slot: int = 0) -> AnyEnv:
        """A new environment, as the run plays it: wrapped, and reset with `options`. Its owner closes it.

        With many agents the result is a PettingZoo environment, despite the annotation.

        Args:
            slot: given to a factory that names a parameter `slot`: the number among all slots of the run, below 0 for
                an evaluation's (-1 is its first); of a batched environment that of its first slot.

        Raises:
            ConfigError: unknown id, module or name; a missing extra; the factory returned no environment.
            EnvWorkerError: the environment's or a wrapper's own code raised; the original is chained.
        """
        for module in self.imports:
            _import_module(module, "imports")
        what = f"env factory {self.name}"
        try:
            factory = self._factory()
            kwargs = {**self.kwargs, "slot": slot} if _asks_slot(factory) and "slot" not in self.kwargs else self.kwargs
            env = _call(_own(factory), _own(kwargs), what)
            if not any(map(_is_of_shimmy, self.wrappers[:1])):
                env = _expect_env(env, what)
        except UnknownIdError as error:
            module = self.name.partition(":")[0] if ":" in self.name else ""
            raise ConfigError(unknown_id(error.id_, tuple(filter(None, (*self.imports, module))))) from error
        try:
            for wrapper in self.wrappers:
                env = _wrapped(env, wrapper)
            env = self._shown(env)
            if self.options:
                give_options(env, self.options)
        except BaseException:
            close_env(env, self.name)
            raise
        return env

    def make_one(self, slot: int = 0) -> gym.Env[Any, Any]:
        """Like `make`, but raises NativeEnvError for a native batched environment."""
        env = self.make(slot)
        if is_agents_env(env):
            close_env(env, self.name)
            raise ConfigError(
                f"{self.name} made {type(env).__name__}, of many agents, where one of a single agent was "
                "expected; seat policies in it: ps.Policies({...}).seat(env), or a run with algo=ps.Policies({...})"
            )
        if isinstance(env, gym.vector.VectorEnv):
            others = "" if hasattr(env, "device") else " or GpuSampler, or AlternatingSampler for two groups"
            raise NativeEnvError(
                f"{self.name} made a VectorEnv, a native batched environment, where one environment for a slot was "
                f"expected; use SerialSampler (--sampler serial){others}"
            )
        return env

    @property
    def seats(self) -> tuple[int, ...]:
        """Slots of each policy in one environment."""
        return (1,) if self.seating is None else self.seating.seats

    @property
    def takes_turns(self) -> bool:
        """Agents act one after the other."""
        return self.seating is not None and self.seating.turns

    def seated(self, spec: EnvSpec) -> Seating:
        """The seating; where one agent acts, which sees and does what `spec` says, its one seat."""
        return Seating.alone(spec) if self.seating is None else self.seating

    @property
    def all_info_keys(self) -> tuple[str, ...]:
        """`info_keys`, and `is_success`, which always is recorded where an environment gives it."""
        return tuple(dict.fromkeys((*self.info_keys, "is_success")))

    @property
    def for_evaluation(self) -> EnvConfig:
        """The settings of environments of evaluations."""
        return self if self.evaluation is None else self.evaluation

    @property
    def note(self) -> str:
        """Describes in a line how the environment is changed by default; "" if it is not."""
        return note_on(self.env, self.kwargs) if isinstance(self.env, str) else ""

    def _shown(self, env: AnyEnv) -> AnyEnv:
        """The environment with the observation that `drop`, `text` and `mask_key` ask for."""
        asked = {name: given for name in ("drop", "text", "mask_key") if (given := getattr(self, name))}
        if asked and isinstance(env, gym.vector.VectorEnv):
            raise ConfigError(
                f"{asked} with the vector environment {type(env).__name__}; show such an observation in it instead"
            )
        changed: Any = env
        if is_agents_env(env):
            if self.text:
                raise ConfigError(
                    f"text={self.text} with {type(env).__name__}, an environment of many agents; show texts as arrays "
                    "by a wrapper of yours (wrappers=, --wrappers), or leave them out (drop=, --env-drop)"
                )
            return shown_agents(env, self.drop)  # `mask_key` and `state` are the pools' business
        if self.state:
            raise ConfigError(
                f"state={self.state!r} with {type(env).__name__}, an environment of one agent; leave it out"
            )
        if self.drop:
            changed = DropKeys(changed, self.drop)
        if self.text:
            changed = TextBytes(changed, self.text)
        if self.mask_key is None:
            ask = isinstance(changed, gym.Env) and masks_itself(changed) and not why_unmasked(changed)
            return ActionMask(changed, None) if ask else changed
        return ActionMask(changed, self.mask_key) if self.mask_key else changed

    def _factory(self) -> Callable[..., Any]:
        if not isinstance(self.env, str):
            return self.env
        if is_pettingzoo_id(self.env):
            return functools.partial(_made_by_id, self.env)
        if is_envpool_id(self.env):
            return functools.partial(EnvPoolVectorEnv, self.env)
        if is_simulator_id(self.env):
            return simulator_factory(self.env)
        module, colon, name = self.env.partition(":")
        if colon:
            _import_module(module, "env")
            if is_attribute(name):  # a registered name wins over a class
                found = import_object(self.env)
                if not callable(found):
                    raise ConfigError(
                        f"env={self.env!r} is {type(found).__name__} {found!r}; expected a callable that "
                        "makes an environment"
                    )
                return found
        id_ = name if colon else self.env
        if VECTORIZED in self.kwargs:
            return functools.partial(make_vectorized, id_)
        return own_factory(id_) or functools.partial(make_registered, id_)


def as_wrappers(given: Any) -> tuple[str | Callable[..., Any], ...]:
    """Wrappers as settings hold them: `module:NAME`, `module:NAME(arguments)`, or callables.

    A pair or partial becomes a text if its arguments are literals and what it calls can be imported, so that equal
    settings are equal and any file can hold them.

    Raises:
        ConfigError: no tuple or list, an unknown short name, or arguments that are no literals.
    """
    if not isinstance(given, (tuple, list)):
        raise ConfigError(f"wrappers={given!r}; expected a tuple: wrappers=({given!r},)")
    return tuple(map(_as_wrapper, given))


def _as_wrapper(given: Any) -> str | Callable[..., Any]:
    if isinstance(given, str):
        call = read_call(given)
        return call_text(call._replace(name=wrapper_path(call.name))) or given
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], Mapping):
        wrap, kwargs = given[0], {str(key): value for key, value in given[1].items()}
        if isinstance(wrap, str):
            path = wrapper_path(wrap)
            return call_text(Call(path, (), kwargs)) or functools.partial(import_object(path), **kwargs)
        given = functools.partial(wrap, **kwargs) if callable(wrap) else given
    if not callable(given):
        raise ConfigError(
            f"wrappers has {given!r:.200}; expected a callable, module:NAME, a short name such as "
            "'FrameStackObservation(stack_size=4)', or a pair ('FrameStackObservation', {'stack_size': 4})"
        )
    bound: Any = given
    if type(bound) is functools.partial and not bound.args and (path := public_path(bound.func)):
        return call_text(Call(path, (), bound.keywords)) or given
    return given


def as_env_config(env: EnvConfig | str | Callable[..., Any]) -> EnvConfig:
    """Settings from an id, an import path or a callable; an `EnvConfig` is returned unchanged."""
    return env if isinstance(env, EnvConfig) else EnvConfig(env)


def factory_slot(number: int, evaluation: bool) -> int:
    """The slot that a factory is told: an evaluation's are below 0, as they live beside those that train."""
    return -1 - number if evaluation else number


def _asks_slot(factory: Callable[..., Any]) -> bool:
    """True for a factory, or the class of an id, with a parameter `slot` that is not bound yet."""
    bound: dict[str, Any] = {}
    while isinstance(factory, functools.partial):
        if factory.func is make_registered:
            found = entry_point(factory.args[0])
            return found is not None and _asks_slot(found)
        bound, factory = {**factory.keywords, **bound}, factory.func
    named = _parameters(factory).get("slot")
    return named is not None and named.kind is not named.VAR_KEYWORD and "slot" not in bound


def with_added(
    config: EnvConfig, kwargs: Mapping[str, Any] | None, options: Mapping[str, Any] | None = None
) -> EnvConfig:
    """The settings with more keyword arguments and options of resets, which win over those that are there."""
    return replace(config, kwargs={**config.kwargs, **(kwargs or {})}, options={**config.options, **(options or {})})


def _own(given: Any) -> Any:
    """A copy for one instance of an argument, or of those in a partial, since the instance may consume or change it.

    Uncopied, slots of one process would share the change, those of two workers not. Callables, and what cannot be
    copied (a lock, a connection), are shared.
    """
    if type(given) is functools.partial:
        return functools.partial(given.func, *map(_own, given.args), **_each_own(given.keywords))
    if callable(given):
        return given
    try:
        return copy.deepcopy(given)
    except Exception:  # of any `__deepcopy__` or `__reduce__`
        return given


def _each_own(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _own(given) for name, given in kwargs.items()}


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
        if isinstance(error, TypeError) and "render_mode" in kwargs and "'render_mode'" in str(error):
            raise ConfigError(
                f"{what} takes no render_mode, so it can be neither shown nor filmed; give it an argument "
                "render_mode=None and a render() that returns an array [height, width, 3] of bytes"
            ) from error
        given = f" with kwargs {dict(kwargs)!r}" if kwargs else ""
        where = "".join(traceback.format_exception(error))
        said = f"{what} raised {words_of(error)}{given}{_old_gym(error)}{_one_config(error, factory, kwargs)}"
        raise EnvWorkerError(f"{said}\n{where}") from error


def _wrapped(env: Any, wrapper: Any) -> AnyEnv:
    what = f"env wrapper {_name(wrapper)}"
    call = Call("")
    wrap = wrapper
    if isinstance(wrap, str):
        call = read_call(wrap)
        wrap = _call(functools.partial(import_object, call.name), {}, what)
    args, kwargs = ((), {"env": env}) if _is_of_shimmy(wrapper) else ((env,), {})
    args, kwargs = (*args, *call.args), {**kwargs, **call.kwargs}
    _check_arguments(wrap, args, kwargs, what)
    return _expect_env(_call(functools.partial(_own(wrap), *args, **kwargs), {}, what), what)


def _is_of_shimmy(wrapper: Any) -> bool:
    """True for a wrapper of Shimmy: it wraps no environment of ours, and takes it as `env=`."""
    return _name(wrapper).startswith(("shimmy:", "shimmy."))


def _check_arguments(wrap: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Raises ConfigError for arguments that a wrapper's signature does not take."""
    if isinstance(wrap, functools.partial):
        wrap, args, kwargs = wrap.func, (*wrap.args, *args), {**wrap.keywords, **kwargs}
    try:
        signature = inspect.signature(wrap, follow_wrapped=False)
    except (TypeError, ValueError):  # of builtins without a signature
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [*signature.parameters][1:]
        odd = next((name for name in kwargs if name not in names), None)
        said = f"it takes no {odd!r}; {nearest(odd, names)}" if odd and names else f"{error}"
        raise ConfigError(f"{what}: {said}; after the environment it takes ({', '.join(names)})") from error


def _made_by_id(id_: str, **kwargs: Any) -> Any:
    return factory_of(id_)(**kwargs)


def _expect_env(made: Any, what: str) -> AnyEnv:
    if isinstance(made, (gym.Env, gym.vector.VectorEnv)) or is_agents_env(made):
        return made  # pyright: ignore[reportUnknownVariableType]
    cls = type(made)
    hint = ""
    if made is None:
        hint = "; is a `return` missing?"
    elif any(base.__module__.split(".")[0] == "gym" for base in cls.__mro__):
        hint = f"; {OLD_GYM}"
    elif callable(getattr(made, "step", None)) and callable(getattr(made, "get_observations", None)):
        hint = "; a VecEnv of rsl_rl becomes one in penstock.tensor_envs.from_rsl_rl(env)"
    elif callable(getattr(made, "step", None)) and callable(getattr(made, "reset", None)):
        lacking = lacks_for_agents(made)
        hint = f"; for PettingZoo's API it lacks {lacking}" if lacking else f"; {_DERIVE}"
    raise ConfigError(
        f"{what} gave {cls.__module__}.{cls.__qualname__}; expected a gymnasium.Env or gymnasium.vector.VectorEnv{hint}"
    )


def refuse_made(env: Any) -> None:
    """Raises ConfigError for an environment where what makes one is expected."""
    if not isinstance(env, type) and callable(getattr(env, "step", None)) and callable(getattr(env, "reset", None)):
        id_ = getattr(getattr(env, "spec", None), "id", None)
        raise ConfigError(
            f"env is {type(env).__name__}, an environment made already; every slot needs its own instance: pass "
            f"{f'its id, {id_!r}, with env_kwargs= and wrappers=' if id_ else 'its class'}, or a function that makes it"
        )


def _import_module(module: str, setting: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        hint = _old_gym(error) or "; is it installed and on PYTHONPATH?"
        raise ConfigError(f"{setting}: cannot import {module!r}: {error}{hint}") from error
    except Exception as error:
        said = f"{setting}: importing {module!r} raised {words_of(error)}"
        raise EnvWorkerError(f"{said}\n{''.join(traceback.format_exception(error))}") from error


def _old_gym(error: BaseException) -> str:
    """A hint where the package that is missing is `gym`, which Gymnasium has replaced."""
    return f"; {OLD_GYM}" if isinstance(error, ModuleNotFoundError) and error.name == "gym" else ""


def _one_config(error: BaseException, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> str:
    """A hint where an environment of RLlib's form, `__init__(self, config)`, lacks its one dict of settings."""
    refused = isinstance(error, TypeError) and "argument" in str(error) and "config" not in kwargs
    if not refused or list(_parameters(factory)) != ["config"]:
        return ""
    return f"; RLlib's env_config is one argument here, env_kwargs={ {'config': dict(kwargs)} }"


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a factory by name; {} of builtins without a signature."""
    with contextlib.suppress(TypeError, ValueError):
        return inspect.signature(factory).parameters
    return {}


def _name(obj: Any) -> str:
    if isinstance(obj, str):
        return obj
    if isinstance(obj, functools.partial):
        return _name(obj.func)
    return import_path(obj) or getattr(obj, "__qualname__", None) or repr(obj)
