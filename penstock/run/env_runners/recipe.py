"""Recipe: the parts of an experiment that an EnvRunner is made from, as they travel to where it lives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, Specs
from penstock.envs.make import EnvConfig
from penstock.learn.policies import for_agents
from penstock.learn.policy_set import AnyPolicy, agents_of
from penstock.run.experiment import Experiment
from penstock.run.suited import suited
from penstock.samplers.installed import Installed
from penstock.samplers.live import LiveSampler
from penstock.samplers.runners.share import SamplerShare
from penstock.workers.checking import check_apart


@dataclass(frozen=True)
class Recipe:
    """A sampler for some slots, and the algorithm that plays in them; a `Maker`."""

    share: SamplerShare
    algo: Any
    """Settings; of environments of many agents those that seat them, as `ps.Policies`."""
    specs: Specs
    """Spaces that its policies are built for."""
    total_steps: int | None = None
    """Environment steps that schedules run over, in a loop of one's own."""

    @classmethod
    def of(cls, exp: Experiment | Recipe, index: int = 0, runners: int = 1) -> Recipe:
        """Runner `index` of several that have the experiment's sampler each: its slots follow those of the others.

        An experiment's environment is checked in a process of its own, and many agents are seated. A recipe stays as
        it is. Raises ConfigError for anything else, and as `ps.check_env`.
        """
        if isinstance(exp, Recipe):
            return exp
        if not isinstance(exp, Experiment):
            raise ConfigError(
                f"runners are made from {exp!r}; expected an experiment, e.g. "
                'ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=64, B=8))'
            )
        settings, env, seed = exp.sampler_settings, exp.env_config, exp.run.seed
        if env.seating is None:
            algo, env, specs = suited(exp, check_apart(env, seed, settings))
        else:
            algo = for_agents(exp.algo, True)
            specs = dict(zip(env.seating.policies, env.seating.specs))
        B = settings.spec.B
        return cls(SamplerShare(settings, env, seed, index * B, runners * B), algo, specs, exp.run.steps)

    def among(self, runners: int) -> list[Recipe]:
        """This recipe for each of so many runners, whose slots begin where its own do."""
        first, B = self.share.first_slot, self.fragment.B
        total = max(self.share.total_slots or 0, first + runners * B)
        shares = [replace(self.share, first_slot=first + i * B, total_slots=total) for i in range(runners)]
        return [replace(self, share=share) for share in shares]

    def acting(self, batch: BatchSpec, policy: AnyPolicy) -> tuple[Installed, dict[str, Any]]:
        """The policy's agents as they act for batches of this T and B; and what `Installed.take` returned of them."""
        seating, specs = self.env.seating, self.specs
        spec = specs if isinstance(specs, EnvSpec) else next(iter(specs.values()))
        keys = tuple(dict.fromkeys((*self.env.info_keys, "is_success")))
        acting = Installed(spec, batch, keys, self.share.first_slot, self.share.total_slots, seating)
        return acting, acting.take(agents_of(policy))

    @property
    def env(self) -> EnvConfig:
        """The environment's settings."""
        return self.share.env

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.share.seed

    @property
    def fragment(self) -> BatchSpec:
        """T and B of one batch."""
        return self.share.fragment

    @property
    def first_slot(self) -> int:
        """Number of its first slot among those of all runners."""
        return self.share.first_slot

    def make(self) -> LiveSampler:
        """Returns the live sampler."""
        return self.share.make()
