"""RunnerSampler: the slots of a run spread over runners, in this process, in local processes or on Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.actors.backend import Backend
from penstock.actors.make import BackendName, make_backend
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, NotNegative, Positive, Whole, check_settings
from penstock.core.machine import counted
from penstock.core.spec import WHOLE, BatchSpec, EnvSpec, Share
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig, as_env_config
from penstock.samplers.runners.live import SyncRunners
from penstock.samplers.runners.ready import AsyncRunners
from penstock.samplers.runners.share import refuse_tensors
from penstock.samplers.sampler import SamplerSettings
from penstock.samplers.serial import SerialSampler
from penstock.workers.env_check import check_apart
from penstock.workers.faults import FaultPolicy
from penstock.workers.shares import even_split


@dataclass(frozen=True)
class RunnerSampler(SamplerSettings):
    """Settings of a sampler with its slots in `runners` actors, each with `inner` for its own."""

    kept = ("depth",)

    runners: Count = 2
    """Number of runners, usually one for each machine or for each few cores."""
    inner: Any = SerialSampler()
    """Settings of the sampler in each runner: T, and the B of one runner."""
    backend: BackendName = "ray"
    """Where runners live: `ray`; `processes` of this machine, without Ray; `in-process`, to step through them."""
    mode: Literal["rounds", "ready"] = "rounds"
    """`rounds`: a batch has one fragment of every runner and is reproducible. `ready`: a batch is the first fragment
    that arrives; for IMPALA and APPO, which compute targets within a fragment."""
    depth: Whole = 0
    """Rounds that the runners may be ahead of the learner, as `depth` of an AsyncSampler; in ready mode: requests that
    a runner has in flight, at least one."""
    deadline_s: Positive = 60.0
    """Seconds without an answer after which a runner counts as hung, and is killed and replaced."""
    start_timeout_s: Positive = 300.0
    """The same limit while a runner starts, makes its environments, or resumes from a checkpoint."""
    fault_policy: FaultPolicy = "auto"
    """If a runner fails: `auto` raises an environment's exception and replaces a runner that died; `raise` always
    raises, `restart` always replaces it, `drop` continues without it."""
    restarts: Whole = 5
    """Replacements of one runner within ten minutes, after which the run ends."""
    min_runners: Count = 1
    """With fewer runners than this, the run waits for replacements."""
    address: str = "local"
    """Ray cluster: `local` starts one for this run, `auto` joins the one of this machine, host:port another one."""
    num_cpus: NotNegative = 1.0
    """CPUs that Ray reserves for each runner; a runner that has workers needs more."""
    object_store_mb: Whole = 0
    """Object store of a local cluster in MB; 0: sized for the batches."""

    def __post_init__(self) -> None:
        check_settings(self, "sampler.")
        inner = self.inner
        if not isinstance(inner, SamplerSettings) or inner.inner is not None or "journal_steps" not in inner.kept:
            raise ConfigError(
                f"sampler.inner={inner!r}; expected a synchronous sampler's settings, e.g. ps.CpuSampler(T=128, B=16, "
                "workers=2): rounds ahead are sampler.depth"
            )
        if self.min_runners > self.runners:
            raise ConfigError(
                f"sampler.min_runners={self.min_runners} with sampler.runners={self.runners}; expected at most as many"
            )

    @property
    def spec(self) -> BatchSpec:
        """T, and the slots of a batch: of all runners, in ready mode of one."""
        T, B = self.inner.spec
        return BatchSpec(T, B if self.mode == "ready" else B * self.runners)

    @property
    def described(self) -> str:
        slots, mode = counted(self.inner.spec.B, "slot"), ", ready mode" if self.mode == "ready" else ""
        inside = f"{slots} each, {self.inner.described}{mode}" + (f", depth {self.depth}" if self.depth else "")
        return f"{super().described}: {self.runners} on {self.backend}, {inside}"

    @property
    def cores(self) -> int:
        """Cores for all runners, and one for the learner that trains meanwhile."""
        return 1 + self.runners * self.inner.cores

    def sized(self, spec: BatchSpec) -> RunnerSampler:
        parts = self.spec.B // self.inner.spec.B
        if spec.B % parts:
            each = -(-spec.B // parts)
            fit = f"a number that divides {spec.B}"
            if parts > spec.B:
                fit = f"at most {spec.B}, since more runners than slots make no sense"
            raise ConfigError(
                f"sampler.runners={parts} for the B={spec.B} of a batch; expected {fit}; or set the slots of "
                f"each runner, e.g. sampler.inner.B={each} (--sampler.inner.B {each}) for {each * parts} in all"
            )
        return replace(self, inner=self.inner.sized(spec._replace(B=spec.B // parts)))

    def shares(self, learners: int) -> list[RunnerSampler]:
        if self.mode == "ready":
            raise ConfigError(
                f"run.learners={learners} with sampler.mode='ready', whose batches are of any runner; use "
                "mode='rounds', by which each learner is fed by runners of its own"
            )
        if learners > self.runners:
            raise ConfigError(
                f"run.learners={learners} with sampler.runners={self.runners}; each learner is fed by runners of its "
                f"own: use run.learners<={self.runners}, or more runners"
            )
        counts = even_split(self.runners, learners)
        return [replace(self, runners=n, min_runners=min(self.min_runners, n)) for n in counts]

    def build(
        self,
        env: EnvConfig | str | Callable[..., Any],
        seed: int = 0,
        *,
        share: Share = WHOLE,
    ) -> SyncRunners | AsyncRunners:
        """The live sampler, its runners started. `env` is an id, `module:qualname`, a callable or an EnvConfig.

        Args:
            share: its slots among those of several samplers; by default they are all there are.

        Raises:
            ConfigError: the environment cannot be made or sent, does not fit these settings, or the cluster cannot be
                reached or has too little. EnvWorkerError: the environment's own code raised while it was made.
        """
        kind = AsyncRunners if self.mode == "ready" else SyncRunners
        return kind(self, as_env_config(env), seed, share)

    def made_backend(self, config: EnvConfig, seed: int) -> Backend:
        """The backend, started; a local cluster has shared memory for the fragments of this environment."""
        return make_backend(
            self.backend,
            self.runners,
            address=self.address,
            num_cpus=self.num_cpus,
            object_store_mb=self.object_store_mb if self._has_store else self._store_mb(self._specs(config, seed)),
        )

    def fitted(self, specs: Iterable[EnvSpec]) -> RunnerSampler:
        """The settings with the shared memory that fragments need, by the specs of an environment's policies."""
        return self if self._has_store else replace(self, object_store_mb=self._store_mb(specs))

    @property
    def _has_store(self) -> bool:
        """The cluster's memory is another's, or given."""
        return self.backend != "ray" or self.address != "local" or self.object_store_mb > 0

    def _store_mb(self, specs: Iterable[EnvSpec]) -> int:
        row = sum(leaf.null().nbytes * max(spec.agents, 1) for spec in specs for leaf in tree_leaves(spec.obs))
        rounds = 2 * (self.depth + 2)
        return 128 + (rounds * self.runners * self.inner.spec.size * (row + 64) >> 20)

    def _specs(self, config: EnvConfig, seed: int) -> Iterable[EnvSpec]:
        """Specs of an environment that no `Plan` has checked yet."""
        if config.seating:
            return config.seating.specs
        report = check_apart(config, seed, self.inner)
        refuse_tensors(config, report.device)
        return [report.spec]
