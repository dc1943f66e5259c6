"""Opening of runs: begun from settings, or reopened from a directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.core.config import import_object, override, to_plain
from penstock.core.errors import CheckpointError, ConfigError, PenstockError
from penstock.envs.make import EnvConfig, with_added
from penstock.learn.policy_set import AnyPolicy
from penstock.run.checkpoints.checkpoint import Checkpoint, find_checkpoint, load_checkpoint
from penstock.run.checkpoints.load import load, load_stored, policy_of
from penstock.run.checkpoints.start import read_start
from penstock.run.experiment import Experiment
from penstock.run.files.changes import (
    at,
    changed,
    known_steps,
    plain_changes,
    require_own_journal,
    require_whole_journal,
    with_changes,
    write_change,
)
from penstock.run.files.inits import Init
from penstock.run.files.lock import RunLock
from penstock.run.files.rundir import check_free, free_run_dir, make_run_dir, require_same_kernel, write_config
from penstock.run.files.sizes import check_batch, check_processes
from penstock.run.files.stored_experiment import (
    OTHERS,
    Supplied,
    as_checkpoint_error,
    prefix_errors,
    read_config,
)
from penstock.run.files.supplied_arguments import warn_of_unstorable
from penstock.run.log import CHANGES
from penstock.run.playing.video import require_ffmpeg
from penstock.run.tracking.tracker import check_trackers
from penstock.run.trainer import Trainer
from penstock.samplers import placed

_PLACES = ("algo.replay.shards", "algo.replay.shard_backend", "algo.replay.shard_deadline_s")
"""Settings of the algorithm that say where work is done, and change no bit of it."""


@contextlib.contextmanager
def new_run(exp: Experiment, init: Init | None, trust: bool) -> Generator[Trainer]:
    """The Trainer of a new run, in a directory of its own that is locked meanwhile; arguments as in `ps.train`."""
    if not isinstance(exp, Experiment):
        raise ConfigError(
            f"exp={exp!r:.60} ({type(exp).__name__}); expected an Experiment: ps.Experiment(env, ps.PPO())"
        )
    run_dir = free_run_dir(exp)
    check_code(exp)
    with _built(exp, run_dir, init, trust) as trainer:
        trainer.run_dir = run_dir = make_run_dir(run_dir, exp.run.dir is not None)
        with RunLock(run_dir):
            check_free(run_dir)  # again: another run may have come and gone while this one was being built
            warn_of_unstorable(write_config(trainer))
            if trainer.learners is not None:
                trainer.persist(
                    trainer.save
                )  # what learners begin anew from, if one is lost before the next checkpoint
            yield trainer


def check_code(exp: Experiment) -> None:
    """Raises ConfigError if `run.each` cannot be called, a tracker not be made, or no video be written."""
    if exp.run.video_interval:
        require_ffmpeg()
    if exp.run.each is not None and not callable(found := import_object(exp.run.each)):
        raise ConfigError(f"run.each={exp.run.each!r} is {found!r}; expected a function of an iteration")
    check_trackers(exp.run.trackers)


def _built(exp: Experiment, run_dir: Path, init: Init | None, trust: bool) -> Trainer:
    if init is None:
        return Trainer(exp, run_dir)
    start = read_start(init, exp.algo, functools.partial(load, trust=trust))
    try:
        return Trainer(exp, run_dir, start)
    except CheckpointError as error:
        raise start.explained(error, exp.algo) from error


@contextlib.contextmanager
def resumed_run(run_dir: Path, changes: Mapping[str, Any] | None, again: Supplied, trust: bool) -> Generator[Trainer]:
    """The Trainer of a run at its newest good checkpoint; the directory is locked meanwhile. See `ps.resume`."""
    changes = dict(changes or {})
    own = [key for key in changes if (key.startswith("run.") and key not in ("run.seed", "run.dir")) or key in _PLACES]
    refused = [key for key in changes if key not in own and key.partition(".")[0] != "sampler"]
    if refused:
        raise ConfigError(
            f"resume cannot change {', '.join(refused)}: it goes on with the same experiment. Only run.* "
            "settings may change, not seed or dir, the sampler where it collects the same batches, and replay.shards; "
            f"for anything else start anew: ps.train(exp, init={str(run_dir)!r}) (--init)"
            f"{_by_set(run_dir, {key: changes[key] for key in refused}, again, trust)}"
        )
    config = read_config(run_dir, trust)
    require_same_kernel(run_dir)
    stored = config.to_resume(again)
    exp = override(_placed(stored, changes), {key: changes[key] for key in own})
    exp = replace(exp, run=replace(exp.run, dir=str(run_dir)))
    check_code(exp)
    with RunLock(run_dir):
        checkpoint = load_checkpoint(_newest(run_dir), replay=True)
        with as_checkpoint_error(checkpoint.path, OTHERS):
            known = known_steps(checkpoint)
        with as_checkpoint_error(run_dir / CHANGES), prefix_errors(run_dir / CHANGES):
            require_own_journal(run_dir, trust)
            require_whole_journal(run_dir, checkpoint)
            made = plain_changes(run_dir, known)
            with_changes(exp, made)
        now = {key: changes[key] for key in own if key in made}  # changed in the run, and again by this call
        with as_checkpoint_error(checkpoint.path, OTHERS):
            _refuse_finished(run_dir, checkpoint, override(with_changes(exp, made), now), with_changes(stored, made))
        if not config.trusted:
            with as_checkpoint_error(checkpoint.path, OTHERS):
                check_batch(exp, config, checkpoint.state["trainer"].get("evaluation"))
            check_processes(exp, config)
            policy_of(config, checkpoint.policy, again)  # networks of forged sizes are refused before any is trained
        with prefix_errors(config.path):
            trainer = Trainer(exp, run_dir)
        with trainer:
            if now:
                write_change(run_dir, known, {"set": {key: to_plain(at(exp, key)) for key in now}})
            trainer.persist(lambda: trainer.restore(checkpoint))
            if changes:
                write_config(trainer)
            yield trainer


def _by_set(run_dir: Path, changes: Mapping[str, Any], again: Supplied, trust: bool) -> str:
    """The lines by which `run.set` makes these changes to a stored run; "" if it would refuse them."""
    try:
        changed(read_config(run_dir, trust).to_resume(again), changes)
    except PenstockError:
        return ""
    return (
        ". But run.set changes it while the run goes on (docs/schedules.md; on the command line --run.each "
        f"my_module:function, which calls it.run.set):\n  with ps.Run.resume({str(run_dir)!r}) as run:\n"
        f"      run.set({dict(changes)!r})\n      for it in run: pass"
    )


def _placed(stored: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """The experiment with the sampler that the changes name. Raises ConfigError if that collects other batches."""
    asked = {key: value for key, value in changes.items() if key.partition(".")[0] == "sampler"}
    if not asked:
        return stored
    before = stored.sampler_settings
    found, rest = placed(before, asked)
    exp = override(replace(stored, sampler=found), rest)
    old, new = before.content(), exp.sampler_settings.content()
    odd = [name for name in (*old, *new) if old.get(name) != new.get(name)]
    if odd:
        raise ConfigError(
            f"resume with {type(exp.sampler).__name__} would make other batches: {odd[0]} is {new.get(odd[0])!r}, and "
            f"was {old.get(odd[0])!r} with {type(before).__name__}; the sampler may change where T, B, depth and all "
            "else that decides what is in a batch stay. For another experiment start anew from its networks: "
            f"--init {stored.run.dir}"
        )
    return exp


def _newest(run_dir: Path) -> Path:
    try:
        return find_checkpoint(run_dir, replay=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; there is nothing to go on from: start anew with another run.dir, and "
            f"with init={str(run_dir)!r} (--init) if one of these holds a good policy"
        ) from error


def _refuse_finished(run_dir: Path, checkpoint: Checkpoint, exp: Experiment, stored: Experiment) -> None:
    state = checkpoint.state["trainer"]
    for name in ("itr", "env_steps", "episodes_seen"):
        if type(state[name]) is not int:
            raise TypeError(f"{name} is {state[name]!r}")
    if not state["finished"]:
        if exp.run.steps < min(state["env_steps"], stored.run.steps):
            raise ConfigError(
                f"{run_dir} stands at {state['env_steps']:,} steps, beyond run.steps={exp.run.steps:,}; give it more, "
                "or leave run.steps out to go on to where it was going"
            )
        return
    if state["env_steps"] >= exp.run.steps:
        raise ConfigError(
            f"{run_dir} has finished its {exp.run.steps:,} steps and stands at {state['env_steps']:,}; extend it, e.g. "
            f"--run.steps {2 * state['env_steps']}"
        )
    if exp.run.stop and (exp.run.steps, exp.run.stop) == (stored.run.steps, stored.run.stop):
        raise ConfigError(
            f"{run_dir} has reached its stop rule {dict(exp.run.stop)}; give it another run.stop or run.steps"
        )


def open_policy(
    run_dir: Path,
    which: str,
    env: Any,
    env_kwargs: Mapping[str, Any] | None,
    trust: bool = False,
    env_options: Mapping[str, Any] | None = None,
) -> tuple[AnyPolicy, int, Experiment, EnvConfig]:
    """The policy of a run, the step of its checkpoint, its experiment, and its environment with these added.

    Args:
        env: the environment again, where it could not be stored (a lambda), or another one.
        trust: allow importing and calling code that the run names.
    """
    stored = read_config(run_dir, trust)
    exp = stored.to_play(env)
    if not stored.trusted:
        check_batch(exp, stored)
    config = exp.env_config
    policy, step = load_stored(stored, which)
    return policy, step, exp, with_added(config, env_kwargs, env_options)
