"""The experiment that the options of `penstock train` describe, for `train` and for each run of `launch`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import (
    Parser,
    early_id,
    import_modules,
    key_values,
    number_from_0,
    require_modules,
    require_run,
)
from penstock.cli.values import located, part_at, split_options, typed
from penstock.core.errors import ConfigError, nearest
from penstock.run.files.inits import of_words, runs_of
from penstock.run.files.modules import modules_named, search_here

if TYPE_CHECKING:
    from penstock.run.experiment import Experiment
    from penstock.run.presets import Preset

_PARTS = ("algo", "sampler", "run")
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
        help="Gymnasium id, envpool:TASK, pettingzoo:FAMILY/NAME, a simulator's TASK (mjlab:TASK, playground:, brax:, "
        "isaaclab:, maniskill:), or module:qualname of what makes an environment",
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
    parser.rare(
        "--info-keys", "--env-checks", "--env-state", "--preset-file", "--eval-env", "--eval-env-kwargs",
        "--algo.agent", "--trust",
    )  # fmt: skip
    return parser


def experiment(algo: str | None, args: Any, rest: Sequence[str]) -> tuple[Experiment, Preset | None]:
    """The experiment, and the preset that it is based on or None.

    With `--sampler auto` its sampler is a SerialSampler with T, B and all else that concerns the batches, until the
    fastest is chosen.

    Args:
        algo: None with --config, which may name it.
        args, rest: the result of `train_parser().parse_known_args`.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
        SystemExit: after a message about a wrong option.
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
    settings = _changed({name: getattr(exp, name) for name in _PARTS}, rest)
    exp = replace(
        exp,
        **settings,
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


def check_early(algo: str | None, args: Any, rest: Sequence[str]) -> None:
    """Finds slips of the pen in a command line before torch is loaded, in settings as they are declared.

    Algorithms and samplers of others, and options of a sampler that a preset may choose, are left to `experiment`.

    Raises:
        ConfigError, CheckpointError, SystemExit: as `experiment`.
    """
    for option, path in (("--config", args.config), ("--preset-file", args.preset_file)):
        if path is not None and not os.path.exists(path):
            raise ConfigError(f"{option} {path}: there is no such file")
    for run in runs_of(of_words(args.init)):
        require_run(Path(run))
    for option in ("--env-kwargs", "--env-options", "--eval-env-kwargs"):
        key_values(getattr(args, option[2:].replace("-", "_")), option)
    require_modules(args.imports, [word for word in (algo, args.sampler, args.agent, *args.wrappers) if word])
    if args.config is not None or algo is None:
        return
    settings = declared_settings(algo, args.sampler, args.inner)
    words: list[str] = []
    for option, values in split_options(rest):
        if args.sampler is not None or not _of_another_sampler(option, settings):
            words += [option, *values] if option else values
    _changed(settings, words)
    early_id(args.env, args.imports)
    from penstock.run.experiment import RunConfig
    from penstock.run.presets import is_full_name, named_preset

    _changed({"run": RunConfig()}, words)
    if args.preset not in (None, "none") and args.preset_file is None:
        named_preset(args.preset if is_full_name(args.preset) else f"{algo}/{args.preset}")


def _of_another_sampler(option: str, settings: Mapping[str, Any]) -> bool:
    """True for a setting of a sampler or of several policies that only a preset can have chosen."""
    from penstock.samplers import samplers_with

    parts = option.removeprefix("--").replace("-", "_").split(".")
    if located(settings, option) is not None or len(parts) < 2:
        return False
    return parts[:2] == ["algo", "algos"] or (parts[0] == "sampler" and bool(samplers_with(parts[1])))


def declared_settings(algo: str, sampler: str | None, inner: str | None) -> dict[str, Any]:
    """The default settings algo, sampler and run as they are declared; those of other packages are left out.

    Raises ConfigError for an unknown name.
    """
    from penstock.algos import ALGOS, require_algo_name
    from penstock.core.names.declared import declared
    from penstock.samplers import INNER, SAMPLERS

    require_algo_name(algo)
    settings: dict[str, Any] = {}
    if algo in ALGOS:
        settings["algo"] = declared(ALGOS[algo])()
    name = "serial" if sampler in (None, "auto") else sampler
    for what, given, known in (("unknown sampler ", name, SAMPLERS), ("sampler.inner=", inner, INNER)):
        if given is not None and ":" not in given and given not in known:
            raise ConfigError(f"{what}{given!r}; {nearest(given, known)}")
    if name in SAMPLERS:
        settings["sampler"] = declared(SAMPLERS[name])()
        if inner in INNER and hasattr(settings["sampler"], "inner"):
            settings["sampler"] = replace(settings["sampler"], inner=declared(SAMPLERS[inner])())
    return {**settings, "run": declared("penstock.run.experiment:RunConfig")()}


def _changed(settings: Mapping[str, Any], rest: Sequence[str]) -> Mapping[str, Any]:
    """Settings algo, sampler and run, real or declared, with changes by `--algo.X`, `--sampler.X` and `--run.X`.

    Raises:
        ConfigError: a value that does not fit. SystemExit: after a message about an option that is none of them.
    """
    from penstock.core.config import override

    changes: dict[str, Any] = {}
    for option, words in split_options(rest):
        part = option.removeprefix("--").split(".")[0]
        if part in _PARTS and part not in settings:
            continue  # of another package, and not loaded yet
        found = located(settings, option)
        if found is None or found[0] in settings:
            known = [path for name in settings for path in options(settings[name], f"--{name}")]
            train_parser().refuse(option or words[0], known, [type(value) for value in settings.values()])
        if option == "--run.seed" and "," in (seeds := "".join(words)):
            raise ConfigError(f"--run.seed {seeds}: one run has one seed; for a run with each of them, --seeds {seeds}")
        changes[found[0]] = typed(words, found[1], option)
    return override(settings, changes)


def _of_sampler(rest: Sequence[str]) -> dict[str, str]:
    """The values of `--sampler.X`, as text by path."""
    words = [part for word in rest for part in word.split("=", 1)]
    pairs = zip(words, words[1:])
    return {option[2:].replace("-", "_"): value for option, value in pairs if option.startswith("--sampler.")}


def options(settings: Any, path: str) -> list[str]:
    """The options of a settings dataclass and of those within it, each as `--algo.net.hidden`."""
    found: list[str] = []
    for f in fields(settings):
        value, name = part_at(settings, f.name), f"{path}.{f.name}"
        if isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
            for key, below in value.items():
                found += options(below, f"{name}.{key}")
        else:
            found += [name] if not is_dataclass(value) or getattr(settings, f.name) is None else []
            found += options(value, name) if is_dataclass(value) else []
    return found
