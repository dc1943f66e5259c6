"""Recording of a dataset: episodes of a run's policy, played in environments of their own."""

from __future__ import annotations

import shutil
import time
import warnings
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.core.batch import as_arrays
from penstock.core.errors import ConfigError
from penstock.core.limits import require_whole
from penstock.core.noise import Noise, Purpose
from penstock.core.spec import SHARED, BatchSpec
from penstock.datasets.cutter import EpisodeCutter
from penstock.datasets.episode import Episode
from penstock.datasets.minari import import_h5py, is_minari, minari_id, write_minari
from penstock.datasets.reader import INDEX, STAGING, Dataset
from penstock.datasets.writer import DatasetWriter, check_vacant
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native import makes_vector_env
from penstock.envs.pools.serial import SerialPool
from penstock.envs.shutdown import close_env
from penstock.learn.policy import Policy
from penstock.learn.policy_set import by_id
from penstock.run.entry import open_policy
from penstock.run.files.stored_experiment import prefix_errors
from penstock.run.signals import die_of, ending_signals, handling
from penstock.samplers.acting_agents import Buffers
from penstock.samplers.collector import collect
from penstock.samplers.tensors.factory import batched_pool
from penstock.workers.env_check import check_apart

Format = Literal["penstock", "minari"]

_FLUSH_S = 30.0
"""Longest time of play that a kill may lose."""
_T = 64
_B = 16
_MAX_STEPS = 200_000


@dataclass(frozen=True)
class Recording:
    """The dataset that `record` wrote, and the episodes it added."""

    path: Path
    env: str
    checkpoint: int
    """Step of the checkpoint that played."""
    returns: np.ndarray[Any, np.dtype[np.float64]]
    """[E] float64, undiscounted returns of the episodes added, in the order in which they ended."""
    steps: int
    """Environment steps added."""
    total: int
    """Episodes in the dataset, earlier ones included."""
    stopped_by: int = 0
    """The number of the signal that ended it early; 0 if none did."""


def record(
    run_dir: str | Path,
    dataset: str | Path,
    episodes: int = 100,
    *,
    which: str = "last",
    deterministic: bool = True,
    seed: int | None = None,
    append: bool = False,
    file_format: Format = "penstock",
    env: Any = None,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
    progress: Callable[[int, int, float], None] = lambda episodes, steps, mean_return: None,
    env_options: Mapping[str, Any] | None = None,
) -> Recording:
    """Plays episodes with the policy of a run and writes them; the first Ctrl-C or SIGTERM keeps the whole ones so far.

    Args:
        which: "last", "best" by evaluation, or a step as text. seed: of the episodes; the run's if None. Neither
            training nor an evaluation of that seed plays the same ones, nor do two calls that append.
        append: add to an existing dataset, complete or half-written.
        file_format: "minari" records as usual first, and writes the HDF5 file when all episodes are recorded.
        env: the environment again, where it could not be stored (a lambda). env_kwargs, env_options: added to the
            run's.
        trust: allow importing and calling code that the run names; not needed for your own runs (docs/security.md).
        progress: called after each episode with the number of episodes and steps so far, and its return.

    Raises:
        ConfigError: `dataset` is not empty, or its spaces are others. EnvWorkerError: the environment
            failed; whole episodes so far are kept in a half-written dataset. CheckpointError: the disk refuses.
        MissingExtraError: file_format="minari" without h5py.
    """
    require_whole(0, episodes=episodes, seed=seed)
    if episodes == 0 and not append:
        raise ConfigError(
            f"episodes={episodes}; expected at least 1 (0 with append only completes a half-written dataset)"
        )
    target = Path(dataset)
    _check_format(target, file_format, append)
    if file_format == "minari":
        import_h5py()  # what would refuse the file, before anything is played
        minari_id(target)
        if not append or target.is_file():
            check_vacant(target)
    folder = target / STAGING if file_format == "minari" else target
    policy, step, exp, config = open_policy(Path(run_dir), which, env, env_kwargs, trust, env_options)
    made_by: dict[str, Any] = {
        "run": str(run_dir),
        "checkpoint": step,
        "algo": exp.algo_name,
        "deterministic": deterministic,
        "seed": exp.run.seed if seed is None else seed,
    }
    returns: list[float] = []
    stopped: list[int] = []
    report = check_apart(config, exp.run.seed, exp.sampler_settings)
    if report.agents is not None:
        raise ConfigError(
            f"{config.name} is an environment of many agents; a dataset holds the episodes of one, so none is made; "
            "keep batches instead, batch.copy() of sampler.obtain_samples(itr) in a loop of your own "
            "(docs/many-agents.md); of a run with replay, penstock replay export"
        )
    (policy,) = by_id(policy).values()
    native = makes_vector_env(config)  # a batch of as many environments as the run was trained with
    B = exp.sampler_settings.spec.B if native else max(min(episodes, _B), 1)
    with prefix_errors(Path(run_dir)):
        played = _Player(config, policy, episodes, B, deterministic)
    try:
        with (
            handling(ending_signals(), lambda number: die_of(number) if stopped else stopped.append(number)),
            DatasetWriter(folder, policy.spec, env=config.name, append=append, made_by=made_by) as writer,
        ):
            before, steps_before, flushed = writer.episodes, writer.steps, time.monotonic()
            for episode in played.episodes(made_by["seed"] + ((before + 1) << 40), stopped):
                writer.append(episode)
                returns.append(float(episode.reward.sum(dtype=np.float64)))
                progress(len(returns), writer.steps - steps_before, returns[-1])
                if time.monotonic() - flushed > _FLUSH_S:
                    writer.flush()
                    flushed = time.monotonic()
            total, steps = writer.episodes, writer.steps - steps_before
            if not total and not stopped:
                raise ConfigError(f"no episode of {config.name} has ended, so {target} is empty; give it a time limit")
    finally:
        played.close()
    if file_format == "minari" and total:
        write_minari(Dataset(folder), target, env=config.name, env_spec=_env_spec(config), algorithm=exp.algo_name)
        shutil.rmtree(folder)
    return Recording(target, config.name, step, np.array(returns), steps, total, stopped[0] if stopped else 0)


def _check_format(target: Path, file_format: Format, append: bool) -> None:
    """Raises ConfigError if the target holds a format that cannot be added to, or another than the one asked for."""
    if is_minari(target):
        raise ConfigError(
            f"{target} holds a Minari dataset, which cannot be added to in any format; choose another directory"
        )
    if append and file_format == "minari" and (target / INDEX).is_file():
        raise ConfigError(
            f"{target} holds a dataset in penstock's format, to which --format minari cannot be added; leave out "
            "--format, or choose another directory"
        )
    if append and file_format == "penstock" and (target / STAGING / INDEX).is_file():
        raise ConfigError(
            f"{target} holds a half-written Minari dataset, to which --format penstock cannot be added; use "
            "--format minari, or choose another directory"
        )


class _Player:
    """Environments that play a share of the episodes each, so that short ones are not favoured."""

    def __init__(self, config: EnvConfig, policy: Policy, episodes: int, B: int, deterministic: bool) -> None:
        self._counts = [episodes // B + (b < episodes % B) for b in range(B)]
        self._agent, self._deterministic, self._name = policy.agent, deterministic, config.name
        self._pool = pool = batched_pool(config, 0, B) or SerialPool(config, 0, slice(0, B))
        if pool.device is not None:
            self._agent.to(pool.device)
        try:
            if pool.spec != policy.spec:
                raise ConfigError(
                    f"the policy was trained on {policy.spec}; {config.name} as it is made now has {pool.spec}"
                )
            self._agent.set_slots(B)
            self._buffers = Buffers(pool, {SHARED: self._agent}, BatchSpec(_T, B))
        except BaseException:
            pool.close()
            raise

    def episodes(self, seed: int, stopped: list[int]) -> Generator[Episode]:
        """Yields episodes as they end, until all have ended or a signal came."""
        buffers, batch = self._buffers, self._buffers.batches[0]
        self._pool.restart(seed, self._counts)
        keys = ["logp"] if hasattr(batch.info.get("logp"), "shape") else []
        cutter = EpisodeCutter(len(self._counts), keys, self._counts)  # a native batched environment plays on
        count, chunk, last = 0, 0, 0
        while count < sum(self._counts) and not stopped:
            noise = None if self._deterministic else Noise(seed, Purpose.ACT, chunk)
            collect(self._pool, [self._agent], [batch], buffers.views[0], buffers.states, noise)
            chunk += 1
            for episode in cutter.add(as_arrays(batch)):
                count, last = count + 1, chunk
                yield episode
            if (chunk - last) * _T >= _MAX_STEPS:
                warnings.warn(
                    f"recording gave up with {count} of {sum(self._counts)} episodes: none has ended in "
                    f"{_MAX_STEPS:,} steps; give {self._name} a time limit",
                    stacklevel=2,
                )
                return

    def close(self) -> None:
        self._pool.close()


def _env_spec(config: EnvConfig) -> str | None:
    """The JSON from which Minari makes the environment again; None if it is not a registered one."""
    env = config.make()
    try:
        return None if env.spec is None else env.spec.to_json()
    except (TypeError, ValueError):  # a callable among the arguments or wrappers
        return None
    finally:
        close_env(env, config.name)
