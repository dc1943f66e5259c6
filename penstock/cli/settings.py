"""The experiment that the options of `penstock train` describe, for `train` and for each run of `launch`."""

from __future__ import annotations

import argparse
import collections.abc
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Parser, dotted, import_modules, key_values, number_from_0
from penstock.core.errors import ConfigError
from penstock.run.files.inits import of_words, runs_of
from penstock.run.files.modules import modules_named, search_here

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.presets import Preset

_DESCRIPTION = """Trains an algorithm on an environment and leaves everything in a run directory.

ALGO comes first: ppo, a2c, ... (penstock algos), or module:NAME of your own: a class, or ps.Policies({...}).

  penstock train ppo --env CartPole-v1
  penstock train ppo --env Pendulum-v1 --algo.lr "linear(1e-3, 0)" --run.steps 200000 --run.seed 1 --run.dir runs/a
  penstock train dqn --env ALE/Pong-v5 --sampler cpu --sampler.workers 3
  penstock train ppo --env CartPole-v1 --sampler runners --sampler.runners 4 --sampler.inner cpu --sampler.backend ray
  penstock train ppo --env pettingzoo:mpe2/simple_spread_v3
  penstock train my_module:MyAlgo --env MiniGrid-Empty-5x5-v0 --import minigrid --env-drop mission --seeds 1,2,3

  penstock train --config my_settings.toml --run.seed 2

Settings of the algorithm (--algo.X), the sampler (--sampler.X) and the run (--run.X):
  penstock train ppo --help
"""


def train_parser() -> Parser:
    """A parser of the options of `penstock train` that are not settings of algorithm, sampler and run."""
    parser = Parser("train", _DESCRIPTION, add_help=False, usage="penstock train ALGO --env ID [OPTIONS]")
    parser.add_argument(
        "--env",
        metavar="ID",
        help="Gymnasium id, pettingzoo:FAMILY/NAME, or module:qualname of something that makes an environment",
    )
    parser.add_environment()
    parser.add_argument("--info-keys", nargs="+", default=[], metavar="KEY", help="numeric info keys to record and log")
    parser.add_argument(
        "--env-checks",
        choices=("sampled", "always", "finite", "off"),
        help="how often observations are checked for NaN and bounds (default sampled)",
    )
    parser.add_argument(
        "--env-state",
        choices=("env", "joint"),
        help="of many agents: show critics the environment's state, or what all agents see, under `state`",
    )
    parser.add_argument(
        "--sampler",
        metavar="NAME",
        help="serial, cpu, gpu, alternating, no-overlap-alternating, async, async-serial, async-cpu, async-gpu, "
        "async-alternating, runners, offline, module:NAME, or auto: the fastest here, measured once in 20 s",
    )
    parser.add_argument(
        "--sampler.inner",
        dest="inner",
        metavar="NAME",
        help="the sampler inside that of --sampler async or runners: serial, cpu, gpu, alternating, "
        "no-overlap-alternating; its settings are --sampler.inner.X",
    )
    parser.add_argument("--preset", metavar="NAME", help="another preset, or none (default: the environment's)")
    parser.add_argument(
        "--preset-file",
        metavar="FILE",
        help="presets of your own: a TOML file as in penstock/presets, for this algorithm",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="settings from a TOML file or a run's config.json, in place of a preset"
    )
    parser.add_argument("--eval-env", metavar="ID", help="environment of evaluations (default: as in training)")
    parser.add_argument(
        "--eval-env-kwargs",
        nargs="+",
        default=[],
        metavar="K=V",
        help="its keyword arguments, or changes to those of --env",
    )
    parser.add_argument("--algo.agent", dest="agent", metavar="M:N", help="your own agent function as module:name")
    parser.add_argument("--seeds", type=seed_list, metavar="1,2,3", help="one run for each seed")
    parser.add_argument(
        "--init",
        action="append",
        default=[],
        metavar="RUN",
        help="start from the networks and normalisers of another run; of several policies each from its own, once a "
        "policy: --init a=RUN, or --init c=RUN:b from that run's policy b",
    )
    parser.add_trust("the run of --init, or the file of --config or --preset-file,")
    return parser


def experiment(algo: str | None, args: Any, rest: Sequence[str]) -> tuple[Experiment, Preset | None]:
    """The experiment, and the preset that it is based on or None.

    With `--sampler auto` its sampler is a SerialSampler with T, B and all else that concerns the batches, until the
    fastest is chosen.

    Args:
        algo: None with --config, which may name it.
        args, rest: the result of `train_parser().parse_known_args`. For help alone, --env may be missing.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
        SystemExit: after help, or after a message about a wrong option.
    """
    import_modules(args.imports, [algo or "", vars(args), list(rest)], runs_of(of_words(args.init)), args.trust)
    # Torch is imported from here on: everything above must stay quick.
    from penstock.cli.config import experiment_from
    from penstock.core.config import import_object, override
    from penstock.run.bench.search import base_sampler
    from penstock.run.presets import find_preset, is_full_name, named_preset, preset_of_file, with_preset
    from penstock.samplers import placed

    found, kwargs = None, key_values(args.env_kwargs, "--env-kwargs")
    if args.config is not None:
        if args.preset is not None or args.preset_file is not None:
            raise ConfigError("--config is the whole of the settings; leave out --preset and --preset-file")
        exp = experiment_from(args.config, algo, args.env, args.trust)
    else:
        assert algo is not None
        if args.preset_file is not None:
            found = preset_of_file(args.preset_file, algo, args.env or "", args.preset, args.trust)
            search_here(modules_named(found.changes if found else {}))
        elif args.preset is None:
            found = find_preset(algo, args.env, kwargs, args.wrappers) if args.env else None
        elif args.preset != "none":
            found = named_preset(args.preset if is_full_name(args.preset) else f"{algo}/{args.preset}")
            found.require_fit(args.env or "", kwargs)
        exp = with_preset(algo, args.env or "", found)
    if args.sampler == "auto":
        exp = replace(exp, sampler=base_sampler(exp))
    names = {"sampler": None if args.sampler == "auto" else args.sampler, "sampler.inner": args.inner}
    if changes := {**_of_sampler(rest), **{path: name for path, name in names.items() if name is not None}}:
        exp = replace(exp, sampler=placed(exp.sampler_settings, changes)[0])
    settings = _settings(exp, list(rest))
    exp = replace(
        exp,
        algo=settings.algo,
        sampler=settings.sampler,
        run=settings.run,
        env_kwargs={**exp.env_kwargs, **kwargs},
        env_options={**exp.env_options, **key_values(args.env_options, "--env-options")},
        wrappers=(*exp.wrappers, *args.wrappers),
        info_keys=(*exp.info_keys, *args.info_keys),
        imports=(*exp.imports, *args.imports),
        env_checks=args.env_checks or exp.env_checks,
        env_drop=(*exp.env_drop, *args.env_drop),
        env_text=args.env_text or exp.env_text,
        env_mask=exp.env_mask if args.env_mask is None else args.env_mask,
        env_state=args.env_state or exp.env_state,
        eval_env=args.eval_env or exp.eval_env,
        eval_env_kwargs={**exp.eval_env_kwargs, **key_values(args.eval_env_kwargs, "--eval-env-kwargs")},
    )
    return exp if args.agent is None else override(exp, {"algo.agent": import_object(args.agent)}), found


def seed_list(text: str) -> list[int]:
    """The seeds in a text such as 1,2,3, none of them twice."""
    try:
        seeds = [number_from_0(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}; expected whole numbers between commas, e.g. 1,2,3") from error
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names a seed twice")
    return seeds


def _settings(exp: Experiment, rest: list[str]) -> Any:
    """Settings algo, sampler and run with changes by `--algo.X`, `--sampler.X` and `--run.X`."""
    import tyro

    from penstock.core.config import override

    parts = ("algo", "sampler", "run")
    by_path: dict[str, Any] = {}
    known = [option for name in parts for option in _options(getattr(exp, name), f"--{name}")]
    classes = [type(getattr(exp, name)) for name in parts]
    words = [part for word in rest for part in word.split("=", 1)]
    for option, value in zip(words, words[1:]):
        if option == "--run.seed" and "," in value:
            raise ConfigError(f"--run.seed {value}: one run has one seed; for a run with each of them, --seeds {value}")
    for option in rest:
        if option.startswith("--") and option != "--help" and option[2:].split(".")[0] not in parts:
            train_parser().refuse(option, known, classes)
    if any(option in ("-h", "--help") for option in rest):
        train_parser().print_help()
    if hasattr(exp.algo, "algos"):  # several policies, whose settings lie in a dict: tyro has no form for that
        by_path, rest = _of_policies(rest)
        parts = ("sampler", "run")
    nested, rest = _nested(rest)
    cls = make_dataclass("Settings", [(name, type(getattr(exp, name))) for name in parts], frozen=True)
    default = cls(**{name: getattr(exp, name) for name in parts})
    config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff, tyro.conf.SuppressFixed)
    numbers = tyro.constructors.ConstructorRegistry()
    numbers.primitive_rule(_whole_numbers)
    numbers.primitive_rule(_importables)
    given, unknown = tyro.cli(
        cls,
        args=rest,
        default=default,
        prog="penstock train ALGO",
        config=config,
        description="Settings:",
        registry=numbers,
        return_unknown_args=True,
    )
    if unknown:
        train_parser().refuse(next((word for word in unknown if word.startswith("--")), unknown[0]), known, classes)
    return override(replace(exp, **{name: getattr(given, name) for name in parts}), {**nested, **by_path})


def _of_policies(rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The values of `--algo.algos.ID.X` and other settings of several policies by path; and the other words."""
    own, others = list[str](), list[str]()
    mine = False
    for word in rest:
        mine = word.startswith("--algo.") if word.startswith("--") else mine
        (own if mine else others).append(word)
    return dotted(own, train_parser()), others


def _of_sampler(rest: Sequence[str]) -> dict[str, str]:
    """The values of `--sampler.X`, as text by path."""
    words = [part for word in rest for part in word.split("=", 1)]
    pairs = zip(words, words[1:])
    return {option[2:].replace("-", "_"): value for option, value in pairs if option.startswith("--sampler.")}


def _options(settings: Any, path: str) -> list[str]:
    """The options of a settings dataclass and of those within it, each as `--algo.net.hidden`."""
    found: list[str] = []
    for f in fields(settings):
        value, name = getattr(settings, f.name), f"{path}.{f.name}"
        if isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
            for key, below in value.items():
                found += _options(below, f"{name}.{key}")
        else:
            found += _options(value, name) if is_dataclass(value) else [name]
    return found


def _whole_numbers(info: Any) -> Any:
    """Tyro's rule for `int`: 100000, 1e5 and 100_000 are one number; None for another type."""
    from tyro.constructors import PrimitiveConstructorSpec

    from penstock.core.config import whole

    if info.type is not int:
        return None

    def number(words: list[str]) -> int:
        try:
            return whole(words[0])
        except ValueError:
            raise ValueError(f"{words[0]!r}; expected a whole number, such as 100000, 1e5 or 100_000") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=number,
        is_instance=lambda value: isinstance(value, int) and not isinstance(value, bool),
        str_from_instance=lambda value: [str(value)],
    )


def _importables(info: Any) -> Any:
    """Tyro's rule for settings that may be a callable: a name or `module:NAME`, or JSON of several by key."""
    from tyro.constructors import PrimitiveConstructorSpec

    inner = typing.get_args(info.type) if typing.get_origin(info.type) in (typing.Union, types.UnionType) else ()
    if not any(typing.get_origin(hint) is collections.abc.Callable for hint in inner):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME",
        instance_from_str=lambda words: json.loads(words[0]) if words[0].startswith("{") else words[0],
        is_instance=lambda value: True,
        str_from_instance=lambda value: [value if isinstance(value, str) else getattr(value, "__name__", str(value))],
    )


def _nested(rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings by path that are lists in one word, for which tyro has no form, `64,64` or JSON; and the other words."""
    nested: dict[str, Any] = {}
    others: list[str] = []
    in_one = re.compile(r"--([^=]+=)?(\[.*|\d[\d_]*(,\d[\d_]*)+)")
    words = [part for word in rest for part in (word.split("=", 1) if in_one.fullmatch(word) else (word,))]
    for word in words:
        if not in_one.fullmatch(f"--{word}"):
            others.append(word)
            continue
        option = others.pop() if others else "a list"
        if not word.startswith("["):
            word = f"[{word.replace('_', '')}]"
        try:
            nested[option.removeprefix("--").replace("-", "_")] = json.loads(word)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{option} {word!r:.200} is no JSON: {error}; expected e.g. '[[32, 8, 4], [64, 4, 2]]'"
            ) from error
    return nested, others
