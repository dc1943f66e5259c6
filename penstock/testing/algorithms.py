"""Conformance suite for algorithms: building and training follow the seed, and a stored policy goes on exactly."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from penstock.agents.parameters import parameters_of
from penstock.core.protocols import require_members
from penstock.core.spec import BatchSpec
from penstock.envs.make import EnvConfig
from penstock.envs.toy.probes import Chain
from penstock.learn.algorithm import Algorithm, ResultDict, batch_of
from penstock.learn.train_ops import training_step
from penstock.run.checkpoints.state_codec import decode, encode
from penstock.samplers.serial import SerialSampler
from penstock.testing.records import expect


def check_algorithm(
    algo: Algorithm,
    env: EnvConfig | str | Callable[..., Any] = Chain,
    *,
    batch: BatchSpec | None = None,
    iterations: int = 4,
    seed: int = 0,
) -> None:
    """Raises AssertionError, with the iteration, unless an algorithm builds, trains and resumes by its seed alone.

    Args:
        algo: the settings, such as `PPO(lr=1e-3)`; with replay, of a `learning_starts` that `iterations` exceed.
        env: id, factory or EnvConfig to train on; the default shows 5 floats and takes one of 2 choices.
        batch: T and B of the sampler; None for the algorithm's own.
        iterations: sampled batches, each trained on; the policy is stored and loaded halfway.

    Raises:
        ConfigError: the settings lack `batch` or `build`. CheckpointError: a checkpoint cannot hold the policy's state.
        AssertionError: the algorithm breaks a promise.
    """
    require_members(algo, Algorithm, "docs/writing-an-algorithm.md")
    spec = batch or batch_of(algo)
    one, twin, other, resumed = made = [_Live(algo, env, spec, seed + add, iterations) for add in (0, 0, 1, 0)]
    try:
        opening = one.bits()
        _equal(opening, twin.bits(), "build", "two builds of one seed differ")
        expect(
            opening != other.bits(),
            "build",
            f"seeds {seed} and {seed + 1} built the same parameters; is seed passed on?",
        )
        outcomes: list[tuple[ResultDict, dict[str, bytes]]] = []
        for itr in range(iterations):
            if itr == iterations // 2:
                resumed.load(*one.stored())
            outcomes.append((_checked(one.train(itr), itr), one.bits()))
            _equal(outcomes[itr], (twin.train(itr), twin.bits()), f"itr {itr}", "two runs of one seed differ")
        unmoved = f"no parameter changed in {iterations} iterations of {spec.size} rows; is learning_starts below that?"
        expect(one.bits() != opening, "training", unmoved)
        for itr in range(iterations // 2, iterations):
            outcome = resumed.train(itr), resumed.bits()
            _equal(outcomes[itr], outcome, f"itr {itr}", "a policy that was stored and loaded goes on otherwise")
    finally:
        for live in made:
            live.sampler.shutdown()


class _Live:
    """A policy and its sampler."""

    def __init__(self, algo: Algorithm, env: Any, spec: BatchSpec, seed: int, iterations: int) -> None:
        self.sampler, self._iterations = SerialSampler(*spec).build(env, seed), iterations
        self.policy = algo.build(self.sampler.spec, seed=seed)
        self.policy.prepare(spec, self.sampler.initialize(self.policy.agent)["info"])

    def train(self, itr: int) -> ResultDict:
        """One iteration, as a run does it."""
        self.policy.set_progress(itr / self._iterations, itr * self.sampler.batch_spec.size)
        return training_step(self.policy, self.sampler, itr).metrics

    def bits(self) -> dict[str, bytes]:
        """Parameters and buffers."""
        return {name: x.detach().cpu().numpy().tobytes() for name, x in parameters_of(self.policy.agent).items()}

    def stored(self) -> tuple[Any, ...]:
        """Copies of all that a checkpoint stores. Raises CheckpointError at anything that it cannot hold."""
        states = decode(encode({"policy": self.policy.state_dict(), "sampler": self.sampler.state_dict()}))
        return (*states.values(), copy.deepcopy(self.policy.arrays()))

    def load(self, policy: dict[str, Any], sampler: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Inverse of `stored`."""
        self.policy.load_state_dict(policy, arrays)
        self.sampler.load_state_dict(sampler)


def _checked(metrics: ResultDict, itr: int) -> ResultDict:
    for name, value in metrics.items():
        expect(
            name.startswith(("train/", "replay/")), f"itr {itr}", f"metric {name!r}; expected train/... or replay/..."
        )
        expect(math.isfinite(value), f"itr {itr}", f"{name} is {value}")
    return metrics


def _equal(expected: Any, got: Any, place: str, what: str) -> None:
    """Metrics, parameters or pairs of these, compared bit by bit."""
    if isinstance(expected, tuple):
        for one, other in zip(expected, got):
            _equal(one, other, place, what)
        return
    names = [name for name in {**expected, **got} if expected.get(name) != got.get(name)]
    expect(not names, place, f"{what}: {', '.join(names[:3])}")
