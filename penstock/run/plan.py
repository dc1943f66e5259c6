"""Plan: an experiment resolved on this machine, of which policy, sampler and evaluator are made."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.agents.parameters import require_device
from penstock.agents.preparation import RewardScaler
from penstock.core import VERSION
from penstock.core.errors import ConfigError
from penstock.core.schedule import Schedule, schedule_value
from penstock.core.spec import SHARED, WHOLE, BatchSpec, Share, Specs
from penstock.core.tree import Tree
from penstock.datasets.reader import open_dataset
from penstock.envs.check import EnvReport
from penstock.envs.make import EnvConfig
from penstock.envs.seats import Seating
from penstock.learn.policies import for_agents
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, LoadedPolicy, agents_of, by_id, trained_policies
from penstock.learn.train_ops import keep_dataset
from penstock.processes.fork_client import end_ahead
from penstock.replay.hindsight import HindsightTransitions
from penstock.run.bench.cache import auto_sampler
from penstock.run.checkpoints.load import load
from penstock.run.experiment import Experiment
from penstock.run.playing.evaluator import Evaluator, check_fits
from penstock.samplers.acting_agents import ActingAgents
from penstock.samplers.live import LiveSampler
from penstock.samplers.offline import OfflineSampler, check_teacher
from penstock.samplers.runners.settings import RunnerSampler
from penstock.samplers.runners.share import SamplerShare, refuse_tensors
from penstock.samplers.sampler import Sampler, SamplerSettings
from penstock.workers.env_check import check_apart

_MADE_BY = "made by"


@dataclass(frozen=True)
class Plan:
    """An experiment with its sampler chosen and its environments checked and seated; it can be pickled.

    A Trainer, learner or runner that is given a plan does not check the environments again. A runner makes its sampler
    from it, like from any `Maker`.
    """

    exp: Experiment
    """Its `sampler` holds settings; it is neither None nor "auto"."""
    report: EnvReport
    """Report of `ps.check_env` on the environment of training."""
    algo: Any
    """The experiment's algorithm; in an environment of many agents one that knows who plays whom."""
    env: EnvConfig
    """The environment of training, with a seat for every agent where there are many.

    Its `evaluation` is `eval_env` if the sampler can play that environment itself.
    """
    seating: Seating
    """Who plays in `env`."""
    sampler: SamplerSettings
    """Sampler settings of the experiment, with defaults that depend on algorithm and environment filled in."""
    held_out: EnvReport | None
    """The report of `ps.check_env` on the environment of evaluations; None: evaluations play the one of training."""
    eval_env: EnvConfig
    """The environment of evaluations."""
    eval_seating: Seating
    share: Share = WHOLE
    """The sampler's slots among those of the whole run."""

    @classmethod
    def of(cls, made_from: Experiment | Plan, ahead: bool = False) -> Plan:
        """The plan of an experiment; a plan stays as it is.

        Args:
            ahead: the fork server of workers is started meanwhile, for a sampler that is made next.

        Raises:
            ConfigError, EnvContractError, EnvWorkerError: as `ps.check_env`; or the settings contradict each other.
        """
        if isinstance(made_from, Plan):
            return made_from
        if not isinstance(made_from, Experiment):
            raise ConfigError(
                f"made_from={made_from!r:.60} ({type(made_from).__name__}); expected an Experiment, such as "
                'ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=64, B=8))'
            )
        settings = made_from.sampler_settings
        if ahead and made_from.run.learners == 1:
            settings.start_ahead()
        try:
            plan = cls.with_usual_sampler(made_from)
            if made_from.sampler == "auto":
                plan = plan.with_sampler(auto_sampler(plan))
            return plan
        except BaseException:
            end_ahead()
            raise

    @classmethod
    def with_usual_sampler(cls, exp: Experiment) -> Plan:
        """The plan with the sampler that the experiment names, or a SerialSampler for "auto"; raises as `of`."""
        require_device(exp.run.device, "run.device")
        settings, seed = exp.sampler_settings, exp.run.seed
        report = check_apart(exp.env_config, seed, settings)
        if isinstance(settings, RunnerSampler):
            refuse_tensors(exp.env_config, report.device)
        algo = for_agents(exp.algo, report.agents)
        env, seating = _seated(algo, exp.env_config, report)
        held_out, eval_env, eval_seating = None, env, seating
        if exp.eval_env is not None or exp.eval_env_kwargs:
            held_out = check_apart(exp.eval_env_config, seed, settings)
            eval_env, eval_seating = _seated(algo, exp.eval_env_config, held_out)
            if (settings.inner or settings).hosts_eval_env and _alike(report, seating, held_out, eval_seating):
                env = replace(env, evaluation=eval_env)
        sampler = _fitted(settings, getattr(exp.algo, "discount", None), seating)
        exp = exp if exp.sampler is settings else replace(exp, sampler=settings)
        return cls(exp, report, algo, env, seating, sampler, held_out, eval_env, eval_seating)

    def with_sampler(self, settings: SamplerSettings) -> Plan:
        """The plan with another sampler."""
        sampler = _fitted(settings, getattr(self.exp.algo, "discount", None), self.seating)
        return replace(self, exp=replace(self.exp, sampler=settings), sampler=sampler)

    def among(self, runners: int) -> list[Plan]:
        """One plan for each runner, all with this plan's sampler; their slots begin where this plan's do."""
        B = self.fragment.B
        return [replace(self, share=self.share.part(i * B, runners * B)) for i in range(runners)]

    def build_policy(self, device: str | None = None) -> LoadedPolicy:
        """A new policy on a device, by default the run's, taught by what its algorithm imitates, if anything."""
        device = device or self.exp.run.device
        policy: LoadedPolicy = self.algo.build(self.specs, seed=self.seed, device=device)
        for name, trained in trained_policies(policy).items():
            _teach(name, _algo_of(self.exp.algo, name), trained, self.env, device)
        return policy

    def make_policy(self, device: str | None = None) -> LoadedPolicy:
        """`build_policy` at the start of the run's schedules.

        Raises:
            ConfigError: it does not learn from what the sampler collects, or the environment of evaluations has other
                spaces.
        """
        policy = self.build_policy(device)
        policy.set_progress(0.0)
        if self.held_out is not None:
            check_fits(self.eval_env, self.eval_seating, policy)
        for trained in trained_policies(policy).values():  # in slot B + 1, as slot B is the evaluator's
            view = None if trained.replay_schedule is None else trained.replay_schedule.replay.view
            if isinstance(view, HindsightTransitions):
                view.play_in(partial(self.env.make, self.sampler.spec.B + 1))
        _check_sources(self.exp.algo, self.sampler, policy)
        return policy

    def make_sampler(self) -> Sampler:
        """A live sampler of the plan's slots."""
        return self.sampler.build(self.env, self.seed, share=self.share)

    def keep_datasets(self, policy: LoadedPolicy, sampler: Any) -> None:
        """Reads the dataset of `replay.dataset` into a prepared policy, dealt to the slots of the live sampler.

        Raises:
            ConfigError: as `OfflineSampler.build`; or there are many agents, whose rows no dataset has.
        """
        for trained in trained_policies(policy).values():
            if trained.replay_schedule is None or not (path := trained.replay_schedule.replay.settings.dataset):
                continue
            if self.seating.many:
                raise ConfigError(f"replay.dataset={path!r} with many agents; a dataset has the record of one")
            read = OfflineSampler(path, B=sampler.batch_spec.B).replayed(
                self.env, trained.spec, self.seed, getattr(sampler, "share", self.share)
            )
            try:
                read.initialize(trained.agent)
                keep_dataset(trained, read)
            finally:
                read.shutdown()

    def make_evaluator(self, settings: SamplerSettings | None = None, **how: Any) -> Evaluator:
        """Environments of evaluations; arguments as in `Evaluator`."""
        return Evaluator(self.eval_env, self.seed, self.sampler.spec.B, settings, **how)

    def make(self) -> LiveSampler:
        """The live sampler of one runner, whose activity another process can read."""
        return SamplerShare(self.sampler, self.env, self.seed, self.share).make()

    def acting(self, batch: BatchSpec, policy: AnyPolicy) -> tuple[ActingAgents, dict[str, Any]]:
        """The policy's agents, ready to act for batches of this T and B, and the examples that `take` returned."""
        acting = ActingAgents(self.seating, batch, self.env.all_info_keys, self.share)
        return acting, acting.take(agents_of(policy))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), _MADE_BY: VERSION}

    def __setstate__(self, state: dict[str, Any]) -> None:
        made_by = state.pop(_MADE_BY, "an earlier version")
        if made_by != VERSION:
            raise ConfigError(
                f"a plan that was made by penstock {made_by} came to penstock {VERSION}; install one version "
                "everywhere, or make it here: Plan.of(experiment)"
            )
        vars(self).update(state)

    def infos(self, examples: dict[str, Any]) -> Tree:
        """Example of a row's info for `Policy.prepare`, from the examples that `Sampler.initialize` returned.

        With many agents {policy id: example}.
        """
        return {name: example["info"] for name, example in examples.items()} if self.seating.many else examples["info"]

    @property
    def specs(self) -> Specs:
        """Argument of `Algorithm.build`: an EnvSpec, or {policy id: EnvSpec}."""
        return self.seating.for_build

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.exp.run.seed

    @property
    def fragment(self) -> BatchSpec:
        """T and B of one batch of the sampler."""
        return self.sampler.spec


def _algo_of(algo: Any, name: str) -> Any:
    """The algorithm of one policy of a run."""
    algos: Mapping[str, Any] = getattr(algo, "algos", {})
    return algos.get(name, algo)


def _teach(policy_id: str, algo: Any, policy: Policy, env: EnvConfig, device: str) -> None:
    """Opens the dataset or run that an algorithm names as its teacher (`taught_by`), if it does.

    Raises:
        ConfigError, CheckpointError: it names none, or one that is missing, damaged or of other spaces.
    """
    kind: str = getattr(algo, "taught_by", "")
    if not kind:
        return
    name = type(algo).__name__
    if not (path := getattr(algo, kind)):
        of = "a dataset's folder" if kind == "dataset" else "a run's directory, or a file of policy.save"
        raise ConfigError(f"{name} with {kind}='', so there is nothing to imitate; expected {of}: --algo.{kind} PATH")
    if kind == "expert":
        experts = by_id(load(Path(path).expanduser(), device=device))
        if (who := policy_id or SHARED) not in experts and len(experts) > 1:
            raise ConfigError(
                f"expert {path} has the policies {', '.join(experts)}; expected {who!r} among them, or a file of one: "
                f"penstock export {path} --policy ID --out expert.safetensors"
            )
        algo.teach(policy, experts[who] if who in experts else next(iter(experts.values())))
        return
    with contextlib.closing(open_dataset(Path(path).expanduser(), env.drop, env.text)) as source:
        source.verify(env.checks)
        algo.teach(policy, source)


def _seated(algo: Any, config: EnvConfig, report: EnvReport) -> tuple[EnvConfig, Seating]:
    """The environment with a seat for every agent where there are many, and who plays in it."""
    if report.agents is not None and config.seating is None:
        config = algo.seat(config, report.agents)
    return config, config.seated(report.spec)


def _alike(report: EnvReport, seating: Seating, held_out: EnvReport, eval_seating: Seating) -> bool:
    """True if one kind of pool plays both: neither is batched, and agents move at once in both, or by turns in both."""
    return report.steps > 0 and held_out.steps > 0 and seating.turns == eval_seating.turns


def _fitted(settings: SamplerSettings, discount: Schedule | None, seating: Seating) -> SamplerSettings:
    """The settings with defaults from the experiment: discount of logged returns, object store of a cluster."""
    fitted = settings.with_discount(None if discount is None else schedule_value(discount, 0.0))
    return fitted.fitted(seating.specs) if isinstance(fitted, RunnerSampler) else fitted


def _check_sources(algo: Any, settings: SamplerSettings, policy: AnyPolicy) -> None:
    """Raises ConfigError for an algorithm that does not learn from the batches of its sampler.

    Checks every policy that learns; with several, the message names the one that does not fit.
    """
    for name, trained in trained_policies(policy).items():
        try:
            schedule = trained.replay_schedule
            kept = None if schedule is None else schedule.replay.settings.dataset
            check_teacher(_algo_of(algo, name), settings, kept)
            _check_stale(_algo_of(algo, name), settings, trained)
            if name in getattr(algo, "min_rows", ()):
                _check_whole(settings)
        except ConfigError as error:
            raise ConfigError(f"policy {name!r}: {error}" if name else str(error)) from None


def _check_stale(algo: Any, settings: SamplerSettings, policy: Policy) -> None:
    """Raises ConfigError for an algorithm that does not learn from the stale batches or fragments of its sampler."""
    depth, name = settings.depth, type(algo).__name__
    if settings.mode == "ready":
        why, instead = "", "mode='rounds', or IMPALA or APPO"
        if not getattr(algo, "takes_fragments", False):
            why = f"{name} needs the same slots in every batch"
        elif policy.replay_schedule is not None:
            why = f"{name} keeps a replay, which needs the same slots in every batch"
            instead = "mode='rounds'"
        elif any(isinstance(module, RewardScaler) for module in policy.agent.modules()):
            why = "net.normalize_reward keeps a running return of each slot, which needs the same slots in every batch"
            instead = "mode='rounds', or net.normalize_reward=False"
        if why:
            raise ConfigError(
                f"sampler.mode='ready' takes each batch from the runner that has one first, so its slots change from "
                f"batch to batch, and {why}; use {instead}"
            )
    elif depth and not getattr(algo, "takes_stale", False):
        raise ConfigError(
            f"sampler.depth={depth} collects batches with older parameters, and {name} learns only from batches of its "
            "present ones; use depth=0, a synchronous sampler, or PPO, APPO or IMPALA"
        )


def _check_whole(settings: SamplerSettings) -> None:
    """Raises ConfigError for a sampler whose batches do not continue each other."""
    if settings.mode == "ready":
        raise ConfigError(
            "min_rows joins the rows of several batches, which needs the same slots in each, and sampler.mode='ready' "
            "takes each batch from the runner that has one first; use mode='rounds'"
        )
