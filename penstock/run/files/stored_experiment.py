"""The stored experiment of a run: read with care, compared with its own sha256, and judged before any of it is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.core.config import from_plain, override, unstorable
from penstock.core.errors import CheckpointError, ConfigError, PenstockError, legible
from penstock.core.files import has_controls, read_stored, require_plain_tree
from penstock.core.spec import EnvSpec, Specs, specs_from_plain
from penstock.envs.make import EnvConfig
from penstock.run.experiment import Experiment
from penstock.run.files import RUN_EXPECTED
from penstock.run.files.foreign import foreign, refusal
from penstock.run.files.modules import modules_named
from penstock.run.files.supplied_arguments import Supplied
from penstock.run.files.trust import VARIABLE, below_trusted, is_listed, remember
from penstock.run.tracking.tracker import is_installed

CONFIG, META = "config.json", "meta.json"
FORMAT = 2
"""Format number of a run directory, in config.json and in each checkpoint; runs of format 1 had pickles, or no
number."""
_GOES_ON_WITH_OLDER = "6849b51"
"""The last commit that reads format 1."""
OTHERS = "or it is not of these settings, or of another version"
"""Advice of `as_checkpoint_error` for a checkpoint."""
_OURS = (
    CONFIG, META, "metrics.jsonl", "changes.jsonl", "progress.csv", "checkpoints", "eval", "plots", "videos", "crash",
    "trackers",
)  # fmt: skip
"""Files of a run directory that penstock reads and writes, besides its lock and what trackers write."""
_DROPPED = (
    "env_kwargs", "wrappers", "info_keys", "imports", "env_checks", "env_drop", "env_text", "env_mask", "env_state",
    "env_options",
)  # fmt: skip
_PLAYED = ("class", "seed", "eval_max_steps", "eval_slots")
"""Settings of the run that playing episodes needs."""


NONE_SUPPLIED = Supplied()
"""Everything is as it was stored."""


@dataclass(frozen=True)
class StoredConfig:
    """The content of a run's config.json, of which nothing was imported yet."""

    path: Path
    plain: dict[str, Any]
    """The experiment as `to_plain` returned it."""
    spec: Specs
    """EnvSpec of one policy, or of each of several by id."""
    digest: str
    """sha256 of the file."""
    trusted: bool
    """True: code that the run names may be imported and called."""

    def algorithm(self, again: Supplied = NONE_SUPPLIED) -> Any:
        """The algorithm's settings, with the arguments given again. Raises CheckpointError unless trusted.

        Leaves out the mapping of agents to policies if it was not stored, as policies have their ids anyway. Raises
        ConfigError for an argument that differs from the stored one.
        """
        from penstock.learn.policies import for_agents  # loads torch, which a picture of curves does without

        of_algo = again.of_algo()
        with as_checkpoint_error(self.path), prefix_errors(self.path):
            again.require_same_algo(self.plain)
        with as_checkpoint_error(self.path):
            plain = _without_weights(_unmapped(_without(self.plain, of_algo))["algo"])
            self._require_trust({"algo": plain}, files=False)
            algo = self._made(plain)
            if not hasattr(algo, "build"):
                raise TypeError("no algorithm in it")
            algo = replace(algo, **of_algo) if of_algo else algo
            return for_agents(algo, not isinstance(self.spec, EnvSpec))

    def to_play(self, env: Any = None) -> Experiment:
        """The experiment to play episodes of: with T, B and the seed, but without the rest of sampler and run."""
        with as_checkpoint_error(self.path):
            run, sampler = self.plain["run"], self.plain["sampler"]
            plain = _unmapped({**self.plain, "run": {key: run[key] for key in _PLAYED if key in run}})
            plain["algo"] = _without_weights(plain["algo"])
            if not self.trusted and foreign(sampler, files=False):
                inmost, runners = sampler.get("inner", sampler), sampler.get("runners", 1)
                plain["sampler"] = {
                    "class": "penstock.samplers.serial:SerialSampler",
                    **{key: inmost[key] * (runners if key == "B" else 1) for key in ("T", "B") if key in inmost},
                }
            return self._experiment(plain, Supplied(env, eval_env=env), files=False)

    def to_resume(self, again: Supplied = NONE_SUPPLIED) -> Experiment:
        """The full experiment, with the arguments given again for those that could not be stored.

        An EnvConfig replaces wrappers and keyword arguments as well. Raises ConfigError for an argument that differs
        from the stored one.
        """
        with as_checkpoint_error(self.path), prefix_errors(self.path):
            again.require_same(self.plain)
        with as_checkpoint_error(self.path):
            plain = {**self.plain, "algo": _without_weights(self.plain["algo"])}  # they are in the checkpoint
            return self._experiment(plain, again, files=True)

    def trackers(self) -> tuple[str, ...]:
        """The `run.trackers` of the run. Raises CheckpointError for code of others unless trusted."""
        with as_checkpoint_error(self.path):
            names = tuple(self.plain["run"].get("trackers", ()))
            self._require_trust({"run": {"trackers": names}}, files=False)
            return names

    def _experiment(self, plain: Mapping[str, Any], again: Supplied, files: bool) -> Experiment:
        env, eval_env, of_algo = again.env, again.eval_env, again.of_algo()
        dropped = _DROPPED if isinstance(env, EnvConfig) else ()
        plain = _without({key: item for key, item in plain.items() if key not in dropped}, of_algo)
        plain = {**plain, "env": ""} if env is not None else plain
        if eval_env is not None:
            own = files and not isinstance(eval_env, EnvConfig)  # a run that goes on keeps those that were stored
            kwargs = plain.get("eval_env_kwargs", {}) if own else {}
            plain = {**plain, "eval_env": None, "eval_env_kwargs": kwargs}
        self._require_trust(plain, files)
        exp = self._made(plain)
        if not isinstance(exp, Experiment):
            raise TypeError("no Experiment in it")
        exp = exp if env is None else replace(exp, env=env)
        exp = exp if eval_env is None else replace(exp, eval_env=eval_env)
        return override(exp, {f"algo.{name}": value for name, value in of_algo.items()})

    def _made(self, plain: Any) -> Any:
        try:
            return from_plain(plain)
        except ConfigError as error:
            call = (
                " to ps.resume(run_dir, env=..., agent=..., eval_env=..., policy_mapping_fn=...), or the environment "
                "to ps.evaluate(run_dir, env); what none of these takes, as net.encoder, belongs into a module before "
                "it is trained with"
            )
            raise ConfigError(f"{legible(self.path)}: {error}{call if 'again' in str(error) else ''}") from error

    def _require_trust(self, plain: Mapping[str, Any], files: bool) -> None:
        found = [] if self.trusted else foreign(plain, files=files)
        if found:
            why, option = "It is no run that you trained here, or it was changed since. If", "--trust (trust=True)"
            if self.path.name != CONFIG:
                why, option = "Files of policy.save are trusted one by one. If it is yours, or", "trust=True"
            raise CheckpointError(
                f"{refusal(self.path, found)}{why} you know who wrote it: {option}, which is needed once, or "
                f"{VARIABLE}={legible(self.path.parent.absolute())}; see docs/security.md"
            )


def read_config(run_dir: Path, trust: bool = False) -> StoredConfig:
    """Reads a run's config.json; with `trust` its user vouches for it, from now on.

    Raises:
        CheckpointError: it is not there, damaged, or was edited and is not trusted; or something in the run directory
            is no plain file, or a link out of it. Names the file.
    """
    path = run_dir / CONFIG
    if "\0" in str(run_dir):
        raise CheckpointError(f"{str(run_dir)!r} can be no name of a folder; expected the directory of a run")
    if os.path.isfile(run_dir):
        inside = (run_dir.parent / CONFIG).exists()
        cure = f"expected the directory of the run, {run_dir.parent}" if inside else RUN_EXPECTED
        raise CheckpointError(f"{run_dir} is no run directory: it is a file; {cure}")
    require_plain_run(run_dir)
    text = _read(path)
    digest = hashlib.sha256(text).hexdigest()
    vouched = trust or is_listed(digest)
    with as_checkpoint_error(path):
        content = json.loads(text)
        require_format(path, content.get("format"))
        if not vouched:
            _compare(content, path)
        with prefix_errors(path):
            spec = specs_from_plain(content["spec"])
        found = StoredConfig(path, _with_trackers(content["experiment"]), spec, digest, vouched)
        if not isinstance(found.plain, dict):
            raise TypeError("experiment is no object")
    if trust:
        remember(path, digest)
    return found if vouched else replace(found, trusted=below_trusted(path))


def require_plain_run(run_dir: Path, parts: Sequence[str] = _OURS) -> None:
    """Raises CheckpointError, before anything is opened, if a part of a run is no plain file, or a link out of it.

    A folder name with terminal control characters is refused too, since results show it.
    """
    if has_controls(run_dir):
        raise CheckpointError(f"{str(run_dir)!r} has control characters in its name; rename that folder")
    try:
        require_plain_tree(run_dir, parts)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename}: {error.strerror}; nothing was read: it must be folders and plain files, of "
            "which only the first may be a link"
        ) from error


def require_format(file: Path, found: object) -> None:
    """Raises CheckpointError if a file of a run is not of the format that this version reads.

    Args:
        found: the number in it, None without one.
    """
    if type(found) is int and found > FORMAT:
        raise CheckpointError(f"{file} has format {found}; this penstock reads format {FORMAT}: install a newer one")
    if found != FORMAT:
        raise CheckpointError(
            f"{file} is of a run of format {1 if found is None else found}; this penstock reads format {FORMAT}: go on "
            f"with penstock at commit {_GOES_ON_WITH_OLDER}"
        )


def config_bytes(experiment: Mapping[str, Any], spec: Mapping[str, Any]) -> bytes:
    """The text of config.json, which holds a sha256 of its content."""
    content = {"format": FORMAT, "experiment": experiment, "spec": spec}
    return (json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n").encode()


def stored_modules(run_dir: Path, trust: bool = False) -> set[str]:
    """The modules that a run names, if it can be read and is trusted; see `read_config`."""
    try:
        stored = read_config(run_dir, trust)
    except PenstockError:
        return set()  # the command that opens it says why
    return modules_named(stored.plain) if stored.trusted else set()


@contextlib.contextmanager
def as_checkpoint_error(path: Path, advice: str = "copy it from another run of the same settings") -> Generator[None]:
    """Turns every error that a damaged file causes in the block into a CheckpointError that names the file."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error):
            raise
        raise CheckpointError(f"{path}: {error}") from error
    except PenstockError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}); {advice}") from error


@contextlib.contextmanager
def prefix_errors(path: Path) -> Generator[None]:
    """Has every ConfigError of the block name the file that the settings are from."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{legible(path)}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The content of one of a run's JSON files. Raises CheckpointError that names it."""
    text = _read(path)
    with as_checkpoint_error(path):
        content = json.loads(text)
        if not isinstance(content, dict):
            raise TypeError("no object in it")
        return content


def _read(path: Path) -> bytes:
    try:
        return read_stored(path, path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path.parent} is no run directory: cannot read {path.name} ({error.strerror}); {RUN_EXPECTED}"
        ) from error


def _compare(content: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError if config.json is not as it was written."""
    kept = {key: content[key] for key in ("format", "experiment", "spec")}
    if content != {**kept, "sha256": _digest(kept)}:
        raise CheckpointError(
            f"{path} is not as penstock wrote it, as its own sha256 says: damaged, or edited by hand. If you edited "
            "it, --trust (trust=True) accepts it, which is needed once; if not, copy it again"
        )


def _digest(content: Mapping[str, Any]) -> str:
    """Digest of the content, independent of the layout of the text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _with_trackers(plain: Any) -> Any:
    """The plain experiment of a run from before `run.trackers`, in which `run.tensorboard` was on or off."""
    run = plain.get("run") if isinstance(plain, dict) else None
    if not isinstance(run, dict) or "tensorboard" not in run:
        return plain
    on = run["tensorboard"] is True and is_installed("tensorboard")
    rest = {key: item for key, item in run.items() if key != "tensorboard"}
    return {**plain, "run": {**rest, "trackers": ["tensorboard"] if on else []}}


def _unmapped(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The plain experiment without a policy_mapping_fn that could not be stored."""
    lost = unstorable(plain["algo"].get("policy_mapping_fn"))
    return {**plain, "algo": {**plain["algo"], "policy_mapping_fn": None}} if lost else dict(plain)


def _without_weights(plain: Any) -> Any:
    """Plain settings without files that encoders started from: the run's own parameters take their place."""
    if not isinstance(plain, Mapping):
        return plain
    return {key: None if key == "encoder_weights" else _without_weights(item) for key, item in plain.items()}


def _without(plain: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The plain experiment without these settings of its algorithm."""
    return {**plain, "algo": {key: item for key, item in plain["algo"].items() if key not in names}}
