"""Search spaces: the range or the choices of each setting, as text such as `loguniform(1e-5, 1e-2)`."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from penstock.core.config import override, split_values, whole
from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.spec import EnvSpec, Specs
from penstock.learn.policies import for_agents
from penstock.learn.policy_set import parameters
from penstock.run.checkpoints.start import Start
from penstock.run.experiment import Experiment

SEED = "run.seed"
"""The setting of a grid that tells the runs of one combination apart."""
Kind = Literal["uniform", "loguniform", "int", "logint", "choice"]
_FORM = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.DOTALL)
_EXAMPLE = "expected loguniform(1e-5, 1e-2), uniform(0.9, 1), int(1, 20), logint(32, 512) or choice(32, 128)"
_SEARCHED = ("algo", "sampler", "env_kwargs")
_KEPT = ("agent", "optimizer", "net", "replay", "learning_starts", "n_step")
"""Settings of the algorithm that the state of a run is made for, or that no longer matter once it has begun."""
_SHARE = 0.6180339887
"""Where between its ends a range is tried: the ends of one may be whole numbers by chance."""
_FACTOR = 1.25
"""PBT multiplies a number by at most this, or divides it."""
_RESAMPLED = 0.25
"""Chance that PBT draws a setting anew (Jaderberg et al. 2017, appendix A.1)."""


@dataclass(frozen=True)
class Dimension:
    """One setting of a search: numbers from `low` to `high`, both included, or `choices`."""

    kind: Kind
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()

    @property
    def log(self) -> bool:
        """True if the logarithm is uniform."""
        return self.kind in ("loguniform", "logint")

    @property
    def width(self) -> float:
        """The distance between the ends."""
        return self.high - self.low

    @property
    def whole(self) -> bool:
        """True for whole numbers."""
        return self.kind in ("int", "logint")

    def holds(self, value: Any) -> bool:
        """True for a value of this dimension."""
        if self.kind == "choice":
            return any(type(value) is type(choice) and value == choice for choice in self.choices)
        right = type(value) is int if self.whole else type(value) is float
        return right and self.low <= value <= self.high

    def ends(self) -> Sequence[Any]:
        """The values that decide if all are within limits: both ends, or every choice."""
        if self.kind == "choice":
            return self.choices
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def drawn(self, rng: np.random.Generator) -> Any:
        """A value drawn as the dimension's name says."""
        if self.kind == "choice":
            return self.choices[int(rng.integers(len(self.choices)))]
        if self.kind == "int":
            return int(rng.integers(int(self.low), int(self.high) + 1))
        if self.kind == "uniform":
            return float(rng.uniform(self.low, self.high))
        value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return self._within(value)

    def explored(self, value: Any, rng: np.random.Generator) -> Any:
        """A value near another, as PBT explores: a number times 0.8 to 1.25, log-uniform, or the choice beside it.

        Jaderberg et al. 2017 (section 4.1.1) multiply by 0.8 or 1.2; of those two, members that copy one another
        would often become equal. With a chance of a quarter the value is drawn anew, as theirs.
        """
        if rng.random() < _RESAMPLED:
            return self.drawn(rng)
        up = rng.random()
        if self.kind == "choice":
            at = self.choices.index(value) + (1 if up < 0.5 else -1)
            return self.choices[min(max(at, 0), len(self.choices) - 1)]
        moved = self._within(value * _FACTOR ** (2 * up - 1))
        if self.whole and moved == value:
            moved = self._within(value + (1 if up > 0.5 else -1))
        return moved

    def _within(self, value: float) -> Any:
        value = min(max(value, self.low), self.high)
        return int(min(max(round(value), self.low), self.high)) if self.whole else float(value)


Space = Mapping[str, Dimension]
"""The dimension of each setting, by its dotted path."""


def read_space(given: Mapping[str, Any], grid: bool = False) -> dict[str, Dimension]:
    """Parses a space from texts by dotted path; a list or tuple gives its choices.

    Args:
        grid: a sweep's space, in which a setting may have a single value.

    Raises ConfigError that names the setting and the forms.
    """
    if grid:
        return {path: _choice(path, tuple(values), values, "--grid", 1) for path, values in given.items()}
    if not given:
        raise ConfigError(f"a search needs settings to vary, e.g. --search algo.lr=loguniform(1e-5,1e-2); {_EXAMPLE}")
    given = read_paths(given, "--search", "'loguniform(1e-5, 1e-2)'")
    return {path: value if isinstance(value, Dimension) else _read(path, value) for path, value in given.items()}


def read_paths(given: Any, option: str, example: str) -> Mapping[str, Any]:
    """Returns what is given, a dict by the paths of settings. Raises ConfigError for something else."""
    if not isinstance(given, Mapping) or not all(isinstance(path, str) for path in given):
        raise ConfigError(f"{option} {given!r:.60}; expected a dict by the path of a setting: {{'algo.lr': {example}}}")
    return given


def grid_values(path: str, given: Any) -> tuple[Any, ...]:
    """The values of a setting of a grid: a list, or text between commas. Raises ConfigError for something else."""
    if isinstance(given, str):
        return split_values(given)
    if not isinstance(given, (list, tuple, range)):
        raise ConfigError(f"--grid {path}={given!r}; expected a list of values, of a single one too: [{given!r}]")
    return as_tuples(list(given))


def grid_names(space: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, Any]]:
    """The points of a grid, seeds fastest, by the names of their runs, such as `lr=1e-3_B=8_s1`. Raises ConfigError."""
    last = [path.split(".")[-1] for path in space]
    found: dict[str, dict[str, Any]] = {}
    for values in itertools.product(*space.values()):
        words = list[str]()
        for path, value in zip(space, values):
            short = path if last.count(path.split(".")[-1]) > 1 else path.split(".")[-1]
            if isinstance(value, float) and value != float(digits := f"{value:.6g}"):
                value = digits  # of a computed one, such as 1 / 3
            text = re.sub(r"[^A-Za-z0-9.+-]+", "-", str(value).strip("[]() \"'")).rstrip("-")
            words.append(f"s{text}" if path == SEED else f"{short}={text}")
        base = "_".join(words)[:200]
        if "/" in base:
            raise ConfigError(
                f"a run would be named {base!r}; expected settings in the grid, such as algo.lr=1e-3,3e-4"
            )
        name = next(name for n in itertools.count(1) if (name := base if n == 1 else f"{base}-{n}") not in found)
        found[name] = dict(zip(space, values))
    return found


def check_space(space: Space, exp: Experiment) -> None:
    """Raises ConfigError if a path is no setting that may vary (names the nearest), or a value leaves its limits."""
    for path, dimension in space.items():
        part = path.partition(".")[0]
        if part == "run":
            raise ConfigError(f"--search {path}: settings of the run are the same for all trials; use --{path}")
        if part not in _SEARCHED or "." not in path:
            known = [f"{p}." for p in _SEARCHED]
            raise ConfigError(
                f"--search {path}: expected a setting of algorithm, sampler or environment, such as algo.lr, sampler.T "
                f"or env_kwargs.gravity; {nearest(path, known)}"
            )
        between = () if dimension.kind == "choice" or dimension.whole else (dimension.low + _SHARE * dimension.width,)
        for value in (*dimension.ends(), *between):
            try:
                override(exp, {path: value})
            except ConfigError as error:
                hint = "; for whole numbers use int or logint" if value in between else ""
                raise ConfigError(f"--search {path}, at {value!r}: {error}{hint}") from error


def check_explored(space: Space, exp: Experiment, spec: Specs) -> None:
    """Raises ConfigError for a setting that PBT cannot change in a run that has begun: it copies the whole state."""
    known = _shapes(exp, spec)
    for path, dimension in space.items():
        part, _, name = path.partition(".")
        if part != "algo" or name.partition(".")[0] in _KEPT:
            raise ConfigError(
                f"--search {path} with --scheduler pbt, which changes settings of runs that have begun: their state is "
                "made for this one; search for it with asha, and for lr, entropy_coef, discount and the like with pbt"
            )
        for value in dimension.ends():
            if _shapes(override(exp, {path: value}), spec) != known:
                raise ConfigError(
                    f"--search {path} with --scheduler pbt, which copies networks: {value!r} gives them other "
                    "shapes; search for it with asha"
                )


def check_init(space: Space, exp: Experiment, spec: Specs, start: Start, init: Sequence[str]) -> None:
    """Raises CheckpointError if the parameters of a run suit some settings of a search not, and says which.

    Args:
        init: the values of --init.
    """
    points = [("", None), *((path, value) for path, x in space.items() for value in x.ends() if path[:5] == "algo.")]
    for path, value in points:
        algo = override(exp, {path: value}).algo if path else exp.algo
        try:
            start.into(for_agents(algo, not isinstance(spec, EnvSpec)).build(spec, seed=exp.run.seed))
        except CheckpointError as error:
            at = f"--search {path}, at {value!r}" if path else "these settings (a preset may have changed net)"
            raise CheckpointError(f"--init {' --init '.join(init)} does not suit {at}: {error}") from error


def _shapes(exp: Experiment, spec: Specs) -> dict[str, list[int]]:
    """The shape of every tensor of the agent."""
    policy = for_agents(exp.algo, not isinstance(spec, EnvSpec)).build(spec, seed=exp.run.seed)
    return {name: list(getattr(x, "shape", ())) for name, x in parameters(policy).items()}


def _read(path: str, given: Any) -> Dimension:
    if isinstance(given, (list, tuple)):
        return _choice(path, tuple(given), given)
    match = _FORM.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        raise ConfigError(f"--search {path}={given!r}; {_EXAMPLE}")
    kind, parts = match[1], split_values(match[2])
    if kind not in get_args(Kind):
        raise ConfigError(
            f"--search {path}={given!r}: {kind!r} is no form; {nearest(kind, get_args(Kind))}; {_EXAMPLE}"
        )
    if kind == "choice":
        return _choice(path, tuple(map(_value, parts)), given)
    try:
        low, high = (float(whole(part)) if kind in ("int", "logint") else float(part) for part in parts)
    except ValueError as error:
        raise ConfigError(f"--search {path}={given!r}: {error}; expected two numbers, lowest and highest") from error
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"--search {path}={given!r}; expected two finite numbers, the lower one first")
    if kind in ("loguniform", "logint") and low <= 0:
        raise ConfigError(f"--search {path}={given!r}: a logarithm begins above 0; use {kind.removeprefix('log')}")
    return Dimension(kind, low, high)  # pyright: ignore[reportArgumentType]


def _choice(path: str, choices: tuple[Any, ...], given: Any, option: str = "--search", least: int = 2) -> Dimension:
    meant = list(map(_meant, choices))  # 1, 1.0 and True are equal
    twice = [f"{choices[k]!r} and {x!r}" for i, x in enumerate(choices) for k in range(i) if meant[k] == meant[i]]
    if len(choices) < least or twice:
        equal = f": {twice[0]} are equal" if twice else ""
        one = f"; for one value use --{path} {choices[0]}" if len(choices) == 1 else ""
        few = "one value or more" if least == 1 else "at least two choices"
        raise ConfigError(f"{option} {path}={given!r}{equal}; expected {few}, each once{one}")
    if strange := [x for x in choices if not _is_plain(x)]:
        raise ConfigError(f"{option} {path}={given!r}: {strange[0]!r} is no number, text or tuple of them")
    return Dimension("choice", choices=choices)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _value(text: str) -> Any:
    """A choice: a number, true, false, none, a tuple in square brackets, else the text itself."""
    if text.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text.lower()]
    try:
        return as_tuples(json.loads(text))
    except ValueError:
        return text


def _meant(choice: Any) -> Any:
    """The number or tuple that a choice is, if it is text of one: a setting takes "1e-3" for 0.001."""
    choice = _value(choice) if isinstance(choice, str) else choice
    if isinstance(choice, str):
        with contextlib.suppress(ValueError):
            return float(choice)
    return choice


def as_tuples(value: Any) -> Any:
    """A value from JSON, with lists turned into tuples."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
