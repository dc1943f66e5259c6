"""The live learner of one policy: agent, optimizers, replay, counters, and the functions of its algorithm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent, check_agent_members
from penstock.agents.example_step import check_heads
from penstock.core.batch import SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.noise import Purpose, derived_seed, generator, uniform
from penstock.core.schedule import at_progress
from penstock.core.spec import BatchSpec, EnvSpec, describe
from penstock.core.tree import Tree
from penstock.learn.algorithm import AgentFn, Loss, LossFn, OptimizerFn, PostprocessFn, ReplayFn
from penstock.learn.clock import Clock, KlRate
from penstock.learn.comm import SINGLE, Comm
from penstock.learn.export.files import export_policy
from penstock.learn.generator import OwnGenerator
from penstock.learn.optimizers import changed_rates, set_rates, take_step
from penstock.learn.policy_file import save_policy
from penstock.learn.predict import predict
from penstock.learn.reduction import GradientAllReduce, check_alike, check_built_alike
from penstock.learn.rows.postprocess import postprocessed
from penstock.learn.slot_partition import SlotPartition, watches
from penstock.learn.step.checks import check_newcomers, check_optimizers, check_parts, held_by_none, made_replay
from penstock.learn.step.gradients import NormGroups, UpdateCount, copies, judged, measured, set_gradients, sizes_of
from penstock.learn.step.state import load_parameters, load_state, state_of, taking_settings

_MEASURED_EVERY = 16
"""Gradient steps between measurements of the update's size, which copy the parameters."""


class Policy:
    """Built by an algorithm's `build`; `train_one_step` trains it, samplers act with its `agent`.

    Args:
        settings: the algorithm's frozen settings; its schedules are read at `progress`.
        epochs: passes over each batch. minibatch: rows of a gradient step, None for the whole batch.
        max_grad_norm: gradients are scaled down to this norm, group by group (`Agent.norm_groups`); None: no limit.
        standardize: names of rows standardized over each batch (mean 0, deviation 1) after `postprocess_fn`.
        replay_fn: makes the replay to train on instead of batches; `postprocess_fn` then receives samples of it.

    Raises:
        ConfigError: settings that are no dataclass, an invalid schedule, or a function that returns a wrong type.
    """

    def __init__(
        self,
        settings: Any,
        spec: EnvSpec,
        *,
        agent_fn: AgentFn,
        postprocess_fn: PostprocessFn,
        loss_fn: LossFn,
        optimizer_fn: OptimizerFn,
        epochs: int = 1,
        minibatch: int | None = None,
        max_grad_norm: float | None = None,
        standardize: Sequence[str] = (),
        replay_fn: ReplayFn | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        check_parts(settings, spec, agent_fn, postprocess_fn, loss_fn, optimizer_fn)
        self.spec, self.seed = spec, seed
        self.epochs, self.minibatch, self.max_grad_norm = epochs, minibatch, max_grad_norm
        self.standardize = tuple(standardize)
        self.comm: Comm = SINGLE
        """Communication with other learners; set by `join`."""
        self.partition: SlotPartition | None = None
        """The slots of each learner; None for one."""
        self._compared = False
        self.postprocess_fn, self.loss_fn, self.optimizer_fn = postprocess_fn, loss_fn, optimizer_fn
        self.algorithm = settings
        """The settings as given, with their schedules."""
        self.settings = at_progress(settings, 0.0)
        """The settings with every schedule at its present value."""
        self.scheduled = self.settings is not settings
        """True if some setting is a schedule."""
        with OwnGenerator(derived_seed(seed, Purpose.INIT)):
            agent = agent_fn(spec, self.settings)
        check_agent_members(agent)
        self.agent: Agent = agent.to(device)
        check_heads(self.agent, spec)
        self.optimizers = optimizer_fn(self.agent, self.settings)
        check_optimizers(self.optimizers)
        self._left_out: list[torch.nn.Parameter] | None = held_by_none(self.agent, self.optimizers)
        """Parameters in no optimizer; None once the first loss was checked for newly added ones."""
        self.replay_fn = replay_fn
        self.replay_schedule = None if replay_fn is None else made_replay(replay_fn, self.agent, self.settings)
        """The replay to train on and how much, None for training on the batches themselves."""
        self.rate = KlRate.of(settings, self.device)
        """The step size that adapts to the KL divergence; None for any other."""
        self._rates = set_rates(self.optimizers)  # as last set here
        self.version = 0
        """Training steps finished: the number that samples are stamped with."""
        self.update_count = UpdateCount()
        self.stale_rows = 0
        """Rows left out because they were older than `settings.max_lag`."""
        self.predictions = 0
        """Stochastic calls of `predict`, which number its noise."""
        self._groups = NormGroups()
        self.counts_rows = False  # minibatches are sized by valid rows, see `Policies.min_rows`
        self.teacher, self.teacher_digest = "", ""
        """The dataset or policy that the algorithm imitates, and its digest, which a checkpoint must agree with."""
        self.told_of_rates = False  # warned of a step size changed in `param_groups`
        self.images_looked_at = False  # once training has checked the scale of images
        self.progress, self.env_steps = 0.0, 0
        """The fraction of the run, and its environment steps, that schedules were last set to."""
        self.renews_noise = type(self.agent).renew_noise is not Agent.renew_noise and self.agent.is_noisy
        """True if the agent has noisy layers; each gradient step from replay then draws new noise."""
        self._explores = type(self.agent).set_exploration is not Agent.set_exploration
        self.agent.set_exploration(self.settings, 0)
        self.clock = Clock()
        """Advances schedules if `set_progress` is not called."""

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.optimizers.values())).param_groups[0]["params"][0].device

    @property
    def updates(self) -> int:
        """Gradient steps taken."""
        return self.update_count.taken

    @property
    def skipped(self) -> int:
        """Gradient steps refused because loss or gradient was not finite."""
        return self.update_count.skipped

    @property
    def recurrent(self) -> bool:
        """True if `predict` returns a pair with the new state."""
        return self.agent.initial_state(1) is not None

    def set_progress(self, progress: float, env_steps: int = 0) -> None:
        """Sets schedules and exploration to a fraction of the run and `env_steps`; with replay, its own count is used.

        From now on the caller does this: training on batches no longer advances them."""
        self.clock.kept_outside = True
        self.move_schedules(progress, env_steps)

    def move_schedules(self, progress: float, env_steps: int = 0) -> None:
        """Like `set_progress`, but does not change who counts the steps."""
        self.progress, self.env_steps = progress, env_steps
        steps = env_steps if self.replay_schedule is None else self.replay_schedule.collected
        if self.scheduled:
            self.settings = at_progress(self.algorithm, progress, steps, self.settings)
            lr = getattr(self.settings, "lr", None)
            if lr is not None and self.rate is None:
                self.set_rates(lr)
            if self.replay_schedule is not None and (discount := getattr(self.settings, "discount", None)) is not None:
                self.replay_schedule.replay.set_discount(discount)
        if self._explores:
            self.agent.set_exploration(self.settings, steps)

    def set_rates(self, lr: Any = None) -> None:
        """Sets the step size of every group to `lr` times its scale; None: to the one of the KL divergence, if any."""
        self._rates = set_rates(self.optimizers, lr if self.rate is None else self.rate.value_for(self.optimizers))

    def taking_settings_of(self, twin: Policy) -> Callable[[], None]:
        """A function that gives this policy another one's settings and keeps what it has learned.

        Args:
            twin: built by the changed algorithm for the same spaces.

        Raises:
            ConfigError: the settings would need other networks or optimizers, or a larger replay.
        """
        return taking_settings(self, twin)

    @property
    def rates_changed(self) -> dict[str, tuple[float, float]]:
        """Step sizes changed in `param_groups`, by optimizer: (set by settings, now)."""
        return changed_rates(self.optimizers, self._rates)

    def act_only(self) -> None:
        """Sets exploration to that of a run's end, for a policy that is never trained."""
        ever = 1 << 62  # more environment steps than any run has
        self.agent.set_exploration(at_progress(self.algorithm, 1.0, ever, self.settings), ever)

    def prepare(self, batch: BatchSpec, info: Tree = None) -> None:
        """Allocates what batches of this shape need, so that bad settings fail before collection.

        Args:
            info: example of one row's info, as `sampler.initialize` returns it.
        """
        if self.replay_schedule is not None:
            self.replay_schedule.replay.prepare(batch.T, batch.B, info)

    def postprocess(self, batch: SampleBatch | TrainBatch) -> TrainBatch:
        """The post-processed rows for the loss, from a batch [T, B, ...] or a replay sample.

        Rows of a batch older than `settings.max_lag` training steps are made invalid. One with `final` is given reset
        rows first (`with_reset_rows`), so functions of algorithms see a single form.

        Raises:
            ConfigError: the batch lacks an info key, or the rows would broadcast in a loss.
        """
        return postprocessed(self, batch)

    def learn_on_batch(self, minibatch: TrainBatch) -> Loss | None:
        """One gradient step on post-processed data, unless the loss has `stop`; the loss, None if skipped.

        On a GPU nothing waits to know whether it is skipped: `settle`, which every train operation calls once a batch,
        counts it and raises the error, and the loss is returned. A skipped step changes no parameter and no optimizer.

        With several learners `minibatch` is this one's share, and the returned loss has the metrics of the full
        minibatch.

        Raises:
            NonFiniteError: loss or gradient was not finite 10 times in a row; each such step is skipped.
            ConfigError: `loss_fn` returned no Loss of scalars with gradients.
            LearnerLostError: another learner has ended, or is late.
        """
        if not isinstance(minibatch, TrainBatch):
            raise ConfigError(
                f"learn_on_batch got {type(minibatch).__name__}; expected a TrainBatch, of policy.postprocess(batch): "
                "ps.minibatches parts it, and ps.train_one_step(policy, batch) does both"
            )
        loss_fn = self.loss_fn if self.partition is None else self.partition.known_to(self.loss_fn)
        loss = loss_fn(self.agent, minibatch, self.settings)
        if not isinstance(loss, Loss):
            raise ConfigError(
                f"loss_fn returned {type(loss).__name__}; expected penstock.Loss(total, metrics), e.g. "
                'ps.Loss(total, {"loss": total.detach()})'
            )
        alone = self.comm.size == 1
        if alone and (loss := judged(loss)).stop:
            return loss
        if self._left_out is not None:
            check_newcomers(self.agent, self.optimizers, self._left_out, loss)
            self._left_out = None
        groups = self._groups.of(self.agent, self.optimizers)
        if alone:
            norms = set_gradients(loss, self.optimizers, self.max_grad_norm, None, groups)
        else:
            assert self.partition is not None
            metrics = self.partition.metrics
            reduction = GradientAllReduce(self.comm, self.agent, self.optimizers, loss, minibatch, metrics)
            norms = set_gradients(loss, self.optimizers, self.max_grad_norm, reduction, groups)
            if (loss := judged(reduction.loss)).stop:
                return loss
        refused = norms.refused
        if not isinstance(refused, Tensor) and self.update_count.skips(norms.numbers):
            return None
        stepped = {x: self.optimizers[x] for x in (loss.total if isinstance(loss.total, dict) else ("all",))}
        before = {} if self.updates % _MEASURED_EVERY else copies(stepped)
        if self.rate is not None:
            self.rate.follow(loss.metrics.get("kl", loss.metrics["approx_kl"]), refused)
            self.set_rates()
        for optimizer in stepped.values():
            if isinstance(refused, Tensor):
                take_step(optimizer, refused)
            else:
                optimizer.step()
        if isinstance(loss.metrics, Mapping):
            loss = loss._replace(metrics={**loss.metrics, **measured(norms.of, sizes_of(before, stepped))})
        self.update_count.take(norms, loss.metrics, on_device=isinstance(refused, Tensor))
        if not (alone or self._compared):
            check_alike(self.comm, self.agent)
            self._compared = True
        return loss

    def settle(self, others: Iterable[Any] = ()) -> tuple[list[Any], list[float]]:
        """Counts the updates on a device that were not finite, and so not taken, by one wait for the device.

        Returns:
            the metrics of these updates, and `others`, scalars that are read in the same wait.

        Raises:
            NonFiniteError: as `learn_on_batch`.
        """
        return self.update_count.settle(others)

    def join(self, comm: Comm) -> None:
        """Trains with other ranks from now on: each with its slots, all with equal parameters (checked).

        The policies must have been built alike, and `batch_size` and `minibatch` are of all ranks together.

        Raises:
            ConfigError: rows were trained on or collected already, or another rank's policy is not equal to this one.
        """
        if self.version or (self.replay_schedule is not None and self.replay_schedule.replay.storage is not None):
            raise ConfigError("policy.join(comm) after training has begun; join before the first batch")
        if comm.size == 1:
            return
        check_built_alike(comm, self.agent)
        self.comm, self.partition = comm, SlotPartition(comm)
        if self.replay_schedule is not None:
            self.replay_schedule.replay.join(self.partition)

    def observe(self, batch: SampleBatch) -> None:
        """Updates the agent's running statistics with a batch of tensors of all learners.

        Every learner uses the rows of all, so the statistics equal one learner's bit for bit.
        """
        if self.partition is not None and watches(self.agent):
            self.partition.fit(batch.spec.B)
            batch = self.partition.batch(batch)
        self.agent.observe(batch)

    def of_all(self, count: int) -> int:
        """The sum of a count over all learners."""
        return count if self.partition is None else int(self.partition.totals(count)[0])

    def shuffler(self) -> np.random.Generator:
        """The generator of this version's minibatches: a function of seed and version, so there is no state to save."""
        return generator(self.seed, Purpose.MINIBATCH, self.version)

    def predict(
        self,
        obs: Tree,
        state: Tree = None,
        episode_start: Any = None,
        deterministic: bool = True,
        prev_reward: float | np.ndarray[Any, Any] = 0.0,
    ) -> Any:
        """The action for one observation or a batch of N, as the environment takes it (boxes clipped).

        Args:
            obs: in the environment's form, leaves [*O] or [N, *O].
            state: what the call before returned, None at the start of an episode. Only recurrent policies have one.
            episode_start: bool or [N] bool, rows of `obs` that begin an episode: their state, previous action and
                reward are reset. None: all rows if `state` is None.
            deterministic: the distribution's mode instead of a sample.
            prev_reward: the reward that came with `obs`, for agents that read it.

        Returns:
            The action; if the policy is recurrent the pair (action, new state).
        """

        def noise(rows: int) -> Tensor:
            draws = uniform(self.seed, Purpose.PREDICT, self.predictions, slice(0, rows), 1, self.agent.noise_size)
            self.predictions += 1
            return torch.from_numpy(draws[0])

        how = None if deterministic else noise
        return predict(self.agent, self.spec, obs, state, prev_reward, how, episode_start)

    def save(self, path: str | Path) -> Path:
        """Writes one safetensors file that `ps.load(path)` turns into an acting policy; returns its path.

        It holds networks and normalisers, and in its header the settings and spaces; neither optimizers nor replay.

        Raises:
            ConfigError: another suffix than .safetensors, or settings without `build`. CheckpointError: it cannot be
                written.
        """
        return save_policy(path, self.algorithm, self.spec, self.seed, self.agent.state_dict())

    def export(self, path: str | Path, to: str | None = None, metadata: Mapping[str, Any] | None = None) -> Path:
        """Writes the deterministic policy as a file that acts without penstock, and its contract; returns its path.

        The contract beside it, `PATH.contract.json`, names inputs and outputs with their shapes, dtypes and spaces.
        Nothing is written unless the file acts as `predict` does, over 1,000 observations drawn from the space.

        Args:
            to: "onnx" (extra `export`), "pt2" of `torch.export`, or "safetensors" of `save`; by default the suffix.
            metadata: text, numbers and lists of these by name, which a robot's controller needs: in the contract, as
                `metadata_props` in ONNX (lists joined by commas), in pt2 as the extra file `metadata.json`.

        Raises:
            ConfigError: another format; a module that cannot be traced (named); actions that differ from `predict`.
            MissingExtraError: `onnx`, `onnxscript` or `onnxruntime` is absent. CheckpointError: it cannot be written.
        """
        return export_policy(self, path, to, metadata)

    def __repr__(self) -> str:
        count = sum(p.numel() for p in self.agent.parameters())
        of = f"observation {describe(self.spec.obs)}, action {describe(self.spec.action)}"
        updates = f", {self.updates:,} updates" * (self.updates > 0)  # those of a loaded one are not known
        return f"Policy({type(self.algorithm).__name__}: {of}; {count:,} parameters{updates})"

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizers and counters: plain Python and tensors."""
        return state_of(self)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The state's large arrays (the replay's), as views of live memory."""
        return {} if self.replay_schedule is None else self.replay_schedule.replay.arrays()

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        """Inverse of `state_dict` and `arrays`. Raises CheckpointError if networks or replay differ."""
        load_state(self, state, arrays or {})

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Loads only networks and normalisers, for a warm start. Raises CheckpointError if they do not fit."""
        load_parameters(self.agent, parameters)
