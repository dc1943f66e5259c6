"""Train operations: they take a batch from the sampler to the optimizer, directly or through replay."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.images import dark_range
from penstock.agents.networks import Encoder
from penstock.core.batch import AnyBatch, Inputs, SampleBatch, TrainBatch, as_arrays
from penstock.core.errors import ConfigError, NonFiniteError
from penstock.core.machine import keep_freed_memory
from penstock.core.noise import Purpose, at_address
from penstock.core.tree import tree_leaves, tree_map, tree_paths
from penstock.learn.algorithm import ResultDict, TrainingStep
from penstock.learn.given import check_given
from penstock.learn.policy import Policy
from penstock.learn.policy_set import AnyPolicy, PolicySet
from penstock.learn.rows.minibatch import minibatches, to_device
from penstock.learn.rows.postprocess import as_tensors
from penstock.learn.rows.torch_memory import batch_on_device
from penstock.learn.step.gradients import read, wide
from penstock.replay.replay import Replay, SampledUnits

if TYPE_CHECKING:
    from penstock.samplers.sampler import Sampler

_CPU = torch.device("cpu")


def training_step(policy: AnyPolicy, sampler: Sampler, itr: int) -> TrainingStep:
    """Samples a batch and trains on it: one iteration of every algorithm without a `training_step` of its own."""
    started = time.perf_counter()
    if itr == 0:
        fill(policy, sampler)
    batch, episodes = sampler.obtain_samples(itr)
    sampled = time.perf_counter()
    env_steps = batch.env_steps
    metrics = train_one_step(policy, batch, env_steps)
    return TrainingStep(metrics, episodes, env_steps, sampled - started, time.perf_counter() - sampled)


def train_one_step(policy: AnyPolicy, batch: AnyBatch, env_steps: int | None = None) -> ResultDict:
    """Post-processes a batch and takes epochs x minibatches gradient steps on it, or trains from replay.

    A PolicySet trains policy by policy, each on its own batch of a MultiAgentBatch; a policy with `min_rows` keeps
    the rows of several batches until it has that many.

    Running statistics (normalisers) are updated after training, so a batch is trained with the statistics that it was
    collected with. The first batch of a policy that has statistics only sets them. With replay statistics are updated
    before training, as samples come from many batches.

    Args:
        env_steps: environment steps by which schedules advance in your own loop; None: those of the batch. To train
            one of several policies, pass the steps of the full MultiAgentBatch.

    Returns:
        `train/...` metrics, each the mean over the gradient steps, and `replay/...` ones; with several policies
        `train/ID/...` and `replay/ID/...`.

    Raises:
        NonFiniteError: see `Policy.learn_on_batch`; with several policies the message names the policy.
        ConfigError: `batch` is not a batch of the policy, or a function of the algorithm returns a wrong type.
    """
    keep_freed_memory()
    if not (isinstance(policy, Policy) and isinstance(batch, SampleBatch) and 0 not in batch.valid.shape):
        check_given(policy, batch)
        assert isinstance(policy, PolicySet)
        return _train_each(policy, batch)
    if policy.replay_schedule is not None:
        return train_on_replay(policy, batch, env_steps)
    if env_steps is None:
        env_steps = batch.env_steps
    tensors = as_tensors(batch, policy.device)
    _look_at_images(policy, tensors)
    results: ResultDict = {}
    if not policy.agent.needs_statistics:
        data = policy.postprocess(tensors)
        steps: list[Mapping[str, Tensor]] = []
        size = policy.minibatch
        if size is not None and data.valid is not None and len(data.valid) > len(batch.valid):
            size = size * len(data.valid) / len(batch.valid)  # reset rows were added: as many parts as without
        how = size, policy.shuffler(), policy.epochs, policy.partition, policy.counts_rows
        for minibatch in minibatches(data, *how):
            if (loss := policy.learn_on_batch(minibatch)) is not None:
                steps.append(loss.metrics)
                if loss.stop:
                    results = {"train/stopped_after": len(steps) - 1.0}
                    break
        # Counting arrays costs nothing; a count of tensors waits for the device, and there is no empty policy's batch.
        holds = batch.env_steps if isinstance(batch.valid, np.ndarray) else env_steps
        results |= _read(policy, steps, [data.metrics or {}] if holds or policy.partition is not None else [])
    policy.observe(tensors)
    policy.version += 1
    return _counted(policy, results, env_steps)


def _train_each(policies: PolicySet, batch: AnyBatch) -> ResultDict:
    results: ResultDict = {}
    for name, part in policies.batches(batch).items():
        policy = policies[name]
        try:
            rows = policies.rows_due(name, part)
            if rows is not None:
                metrics = train_one_step(policy, rows, batch.env_steps)
            else:
                policy.version += 1
                metrics = _counted(policy, {}, batch.env_steps)
        except (NonFiniteError, ConfigError) as error:
            if len(policies) == 1:
                raise
            kind = NonFiniteError if isinstance(error, NonFiniteError) else ConfigError
            raise kind(f"policy {name!r}: {error}") from error
        if name in policies.kept:
            metrics["train/kept_rows"] = float(policy.of_all(policies.kept[name].rows))
        if len(policies) == 1:
            return metrics
        results |= {_of_policy(key, name): x for key, x in metrics.items()}
    return results


def _of_policy(key: str, name: str) -> str:
    """`train/loss` as `train/ID/loss`."""
    kind, _, rest = key.partition("/")
    return f"{kind}/{name}/{rest}"


def multi_gpu_train_one_step(policy: AnyPolicy, batch: AnyBatch) -> ResultDict:
    """`train_one_step` where several learners train a policy: every rank calls it with the batch of its own slots.

    Call `policy.join(comm)` before the first batch. All ranks take the same gradient steps and are equal afterwards.
    One learner with the slots of all ranks would take these steps too. Ranks run on CUDA, on several machines, or on
    the CPUs of one.

    Returns:
        The metrics of all ranks together, the same on each.

    Raises:
        LearnerLostError: another rank has ended, or does not come in time.
        NonFiniteError, ConfigError: as `train_one_step`.
    """
    return train_one_step(policy, batch)


def train_on_replay(policy: Policy, batch: SampleBatch, env_steps: int | None = None) -> ResultDict:
    """Appends a batch to the policy's replay, on the host or on the device, then takes the gradient steps that are due.

    `postprocess_fn` and `loss_fn` receive the arrays of the replay's view, `weight` [N] if replay is prioritized,
    `noise` [N, k] uniforms in (0, 1) if the algorithm needs them, and `update`, the number of gradient steps before
    this one.

    Args:
        env_steps: as in `train_one_step`.

    Returns:
        `train/...` metrics, each the mean over the gradient steps, and `replay/...` ones.

    Raises:
        NonFiniteError: see `Policy.learn_on_batch`. ConfigError: the policy has no replay, or see `train_one_step`.
    """
    schedule = getattr(policy, "replay_schedule", None)
    if schedule is None or not isinstance(batch, SampleBatch) or 0 in batch.valid.shape:
        check_given(policy, batch, "train_on_replay")
    assert schedule is not None
    agent, replay = policy.agent, schedule.replay
    arrays, tensors = _as_kept(policy, replay, batch)
    _look_at_images(policy, tensors)
    if schedule.whole:
        schedule.collected += policy.of_all(batch.env_steps)
    else:
        schedule.collected += _append(policy, replay, batch, arrays, tensors)
    steps: list[Mapping[str, Tensor]] = []
    due, rng = schedule.due(), schedule.rng
    if due or policy.renews_noise:
        at_address(rng, policy.seed, Purpose.REPLAY, policy.version)
    for drawing, x in samples(policy, due, rng):
        if policy.renews_noise:
            agent.renew_noise(rng)
        with torch.no_grad():
            x = policy.postprocess(TrainBatch(x.inputs, {**x.rows, "update": policy.updates}, x.valid, x.state))
        if policy.renews_noise and getattr(policy.settings, "double", False):
            agent.renew_noise(rng)  # the target's actions were chosen with other noise than is learned with
        skipped = policy.skipped
        loss = policy.learn_on_batch(x)
        schedule.trained += 1
        if loss is None:
            continue
        if loss.priorities is not None and replay.settings.index == "prioritized":
            if policy.update_count.settled() > skipped:  # the priorities are waited for anyway
                continue
            replay.update_priorities(drawing, loss.priorities.cpu().numpy())
        if schedule.after_update is not None and not loss.stop:
            schedule.after_update(agent, policy.settings, policy.updates)
        steps.append(loss.metrics)
    policy.version += 1
    if policy.renews_noise:
        agent.renew_noise(rng)  # the next batch is collected with it
    policy.move_schedules(policy.progress)
    results = _read(policy, steps) | schedule.metrics()
    return _counted(policy, results, batch.env_steps if env_steps is None else env_steps)


def plan_whole(policy: Any, sampler: Any) -> None:
    """Makes room in the policy's replay for the sampler's dataset, before `policy.prepare`; warns if that is too small.

    Does nothing for a sampler without a dataset, or with a replay that draws each sample only once.
    """
    schedule, dataset = getattr(policy, "replay_schedule", None), getattr(sampler, "dataset", None)
    if schedule is None or dataset is None or schedule.replay.settings.index == "fifo":
        return
    capacity = schedule.replay.settings.capacity
    _require_minibatch(dataset.steps, schedule.batch_size, schedule.batch_size)
    if dataset.steps <= capacity:
        schedule.replay.least = dataset.rows_once
    else:
        warnings.warn(
            f"replay.capacity={capacity:,} for a dataset of {dataset.steps:,} steps: gradient steps draw from the "
            f"steps played last; use --algo.replay.capacity {dataset.steps} to draw from all of them",
            stacklevel=3,
        )


def fill(policy: Any, sampler: Any) -> None:
    """Puts every episode of the dataset into replay before the run's first step, if `plan_whole` made room there."""
    schedule = getattr(policy, "replay_schedule", None)
    if schedule is None or not schedule.replay.least or schedule.whole or schedule.collected:
        return
    assert isinstance(policy, Policy)
    _append_each(policy, schedule.replay, sampler)
    schedule.whole = True


def keep_dataset(policy: Policy, sampler: Any) -> None:
    """Puts every episode of a dataset beside the policy's replay, for `replay.dataset_share` of each minibatch.

    Args:
        sampler: a live one of `ps.OfflineSampler`, initialized, with as many slots as the one that collects.

    Raises:
        ConfigError: the policy has no replay, or the dataset fewer steps than a minibatch takes of it, or not what the
            algorithm's own agent records.
    """
    schedule = policy.replay_schedule
    if schedule is None:
        check_given(policy, sampler, "keep_dataset")
    assert schedule is not None
    own, dataset = schedule.replay, sampler.dataset
    _require_minibatch(dataset.steps, own.of_dataset(schedule.batch_size), schedule.batch_size)
    info = () if own.priority_fn else own.info  # priorities of fresh rows are not for those of a dataset
    kept = Replay(own.spec, replace(own.settings, capacity=1, dataset=""), own.view, info=info, exact=own.exact)
    kept.device_memory = own.device_memory
    kept.least = dataset.rows_once + 2 * sampler.batch_spec.T + own.view.span
    if own.partition is not None:
        kept.join(own.partition)
    _append_each(policy, kept, sampler)
    own.dataset, own.fingerprint = kept, dataset.fingerprint


def _require_minibatch(steps: int, needed: int, batch_size: int) -> None:
    if steps < needed:
        raise ConfigError(
            f"the dataset has {steps:,} steps, fewer than the {needed:,} that a minibatch of batch_size={batch_size} "
            "takes of it; record more, or use a smaller batch_size"
        )


def _append_each(policy: Policy, replay: Replay, sampler: Any) -> None:
    """Appends every episode of the sampler's dataset, each once; the agent's statistics see them too."""
    for batch in sampler.dataset.each_once():
        _append(policy, replay, batch, *_as_kept(policy, replay, batch))


def _as_kept(policy: Policy, replay: Replay, batch: SampleBatch) -> tuple[SampleBatch, SampleBatch]:
    """A batch as the replay keeps it, on the host or on the learner's device, and as tensors there."""
    if replay.settings.device == "learner":
        return batch_on_device(batch, replay.device_memory, policy.device)
    arrays = batch if isinstance(batch.valid, np.ndarray) else as_arrays(batch)
    return arrays, as_tensors(arrays, _CPU)


def _append(policy: Policy, replay: Replay, batch: SampleBatch, arrays: SampleBatch, tensors: SampleBatch) -> int:
    """Appends a batch in both forms of `_as_kept`; the agent's statistics see it, too. Returns its valid rows."""
    added = replay.append(arrays, policy.agent.terminal(tensors).cpu().numpy())
    policy.observe(tensors if tensors.valid.device == policy.device else as_tensors(batch, policy.device))
    return added


def _look_at_images(policy: Policy, batch: SampleBatch) -> None:
    """Warns once if the images of the first batch, scaled by their bounds, are almost 0."""
    if policy.images_looked_at:
        return
    policy.images_looked_at = True
    seen = dict(zip(tree_paths(batch.obs), tree_leaves(batch.obs)))
    images = {
        path: image
        for module in policy.agent.modules()
        if isinstance(module, Encoder)
        for path, image in zip(module.paths, module.shown)
        if image is not None and path in seen
    }
    for path, image in images.items() if policy.comm.rank == 0 else ():
        dark = dark_range(image, seen[path])
        if dark is None:
            policy.images_looked_at = False
        if dark:
            warnings.warn(
                f"obs{path} never leaves {dark} in its first batch, and as an image it is scaled by 1/{image.scale:g}, "
                "so that a network sees next to nothing: use net.image_scale=1 (--algo.net.image-scale 1), or give the "
                "space the bounds that its values have",
                stacklevel=4,
            )


def samples(policy: Policy, count: int, rng: np.random.Generator) -> Iterator[tuple[SampledUnits, TrainBatch]]:
    """`count` samples of a policy's replay as tensors on its device, each with its drawing; see `Replay.samples`."""
    schedule, device = policy.replay_schedule, policy.device
    assert schedule is not None
    if not count:
        return iter(())
    away = device.type != "cpu"
    ready = functools.partial(to_device, device=device) if away else torch.from_numpy
    if (memory := schedule.replay.device_memory) is not None and schedule.replay.settings.device == "learner":
        ready = memory.send  # of the parts that are no tensors there yet
    return schedule.replay.samples(
        count,
        schedule.batch_size,
        rng,
        policy.progress,
        noise_size=schedule.noise_size,
        prefetch=count > 1 and schedule.reads_ahead(to_gpu=away),
        ready=functools.partial(_mapped, ready),
    )


def _mapped(fn: Callable[[Any], Any], x: TrainBatch) -> TrainBatch:
    """`tree_map` of a sample of replay in a third of its time: most of its parts are single arrays or None."""

    def mapped(part: Any) -> Any:
        if type(part) is Inputs:
            return Inputs(*map(mapped, part))
        return fn(part) if type(part) is np.ndarray else None if part is None else tree_map(fn, part)

    rows = {name: mapped(part) for name, part in x.rows.items()}
    return TrainBatch(mapped(x.inputs), rows, mapped(x.valid), mapped(x.state))


def _read(policy: Policy, steps: list[Mapping[str, Tensor]], more: Sequence[Mapping[str, Tensor]] = ()) -> ResultDict:
    """The mean of each metric over the gradient steps that were taken and report it, as `train/NAME`, and `more`.

    With the flags of these steps, all are read by one wait for the device; by a second where some was not taken.
    """
    means = averaged(steps) | averaged(more)
    refused, found = policy.settle(means.values())
    if refused:
        left_out = set(map(id, refused))
        means = averaged([x for x in steps if id(x) not in left_out]) | averaged(more)
        found = read(means.values())
    return dict(zip(means, found))


def averaged(steps: Iterable[Mapping[str, Tensor]]) -> dict[str, Any]:
    """The mean of each metric over the gradient steps that report it, as `train/NAME`, on its device."""
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    for metrics in steps:
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"the metrics of a loss are a {type(metrics).__name__}; expected a dict of numbers by name"
            )
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ConfigError(
                    f"metric {name!r} is a tensor of shape {list(value.shape)}; expected one number, such as its mean()"
                )
            sums[name] = sums[name] + value if name in sums else value
            counts[name] = counts.get(name, 0) + 1
    return {f"train/{name}": _mean(total, counts[name]) for name, total in sums.items()}


def _mean(total: Any, count: int) -> Any:
    """In float64, which no float32 sum overflows; of a tensor elsewhere without a wait."""
    return float(total) / count if not isinstance(total, Tensor) or total.is_cpu else wide(total) / count


def _tell_of_rates(policy: Policy, changed: Mapping[str, tuple[float, float]]) -> None:
    """Warns, once, of a step size that somebody changed in an optimizer's `param_groups`."""
    if policy.told_of_rates:
        return
    policy.told_of_rates = True
    name, (asked, seen) = next(iter(changed.items()))
    warnings.warn(
        f"the optimizer {name!r} has lr {seen:g} in its param_groups, and the settings say {asked:g}: it acts, but a "
        f"schedule or a resumed run sets {asked:g} again; to change it for good: run.set({{'algo.lr': {seen:g}}})",
        stacklevel=4,
    )


def _counted(policy: Policy, results: ResultDict, env_steps: int) -> ResultDict:
    """Adds the policy's running totals. A clock that the policy keeps then advances by the steps of all learners."""
    results["train/n_updates"] = float(policy.updates)
    if policy.skipped:
        results["train/skipped_updates"] = float(policy.skipped)
    if policy.stale_rows:
        results["train/stale_rows"] = float(policy.stale_rows)
    if (group := next(iter(policy.optimizers.values())).param_groups[0]).get("lr") is not None:
        results["train/learning_rate"] = float(group["lr"])
    if changed := policy.rates_changed:
        _tell_of_rates(policy, changed)
    if not (clock := policy.clock).kept_outside:
        clock.env_steps += policy.of_all(env_steps)
        clock.remark(policy.algorithm)
        policy.move_schedules(clock.progress, clock.env_steps)
    return results
