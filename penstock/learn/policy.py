"""The live learner of one policy: agent, optimizers, version, and the functions its algorithm is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch, padded_rows
from penstock.core.errors import CheckpointError, ConfigError, NonFiniteError
from penstock.core.noise import Purpose, derived_seed, generator, uniform
from penstock.core.schedule import at_progress, check_schedules
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.learn.algorithm import AgentFn, Loss, LossFn, OptimizerFn, PostprocessFn
from penstock.learn.experience import Experience
from penstock.learn.minibatch import TrainBatch
from penstock.learn.optimizers import set_gradients

_SKIPS_IN_A_ROW = 10


class Policy:
    """Built by an algorithm's `build`; `train_one_step` trains it, samplers act with its `agent`.

    Args:
        settings: the algorithm's frozen settings; its schedules are read at `progress`.
        epochs: passes over each batch. minibatch: rows of a gradient step, None for the whole batch.
        max_grad_norm: gradients are scaled down to this norm; None for no limit.
        experience_fn: makes the replay to train on, if not on the batches themselves; `postprocess_fn` is then given
            a sample of it.
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
        experience_fn: Callable[[Any], Experience] | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        check_schedules(settings)
        self.spec, self.seed = spec, seed
        self.epochs, self.minibatch, self.max_grad_norm = epochs, minibatch, max_grad_norm
        self.postprocess_fn, self.loss_fn = postprocess_fn, loss_fn
        self._settings = settings
        self.settings = at_progress(settings, 0.0)
        """The settings with every schedule at its present value."""
        self._scheduled = self.settings is not settings
        with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
            torch.manual_seed(derived_seed(seed, Purpose.INIT))
            agent = agent_fn(spec, self.settings)
        if not isinstance(agent, Agent) or getattr(agent, "noise_size", None) is None:
            raise ConfigError(
                f"agent_fn gave {type(agent).__name__}; expected a penstock.Agent with spec and noise_size"
            )
        self.agent: Agent = agent.to(device)
        self.optimizers = optimizer_fn(self.agent, self.settings)
        self.experience = None if experience_fn is None else experience_fn(self.agent)
        self.version = 0
        """Training steps finished: the number that samples are stamped with."""
        self.updates = 0
        """Gradient steps taken."""
        self.skipped = 0
        """Gradient steps refused because loss or gradient was not finite."""
        self._skips_in_a_row = 0
        self._predictions = 0
        self.progress = 0.0
        """The fraction of the run that schedules were last set to."""
        self._explores = type(self.agent).set_exploration is not Agent.set_exploration
        self.agent.set_exploration(self.settings, 0)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.agent.parameters()).device

    @property
    def recurrent(self) -> bool:
        """True if `predict` gives a pair with the new state."""
        return self.agent.initial_state(1) is not None

    def set_progress(self, progress: float, env_steps: int = 0) -> None:
        """Sets schedules and exploration to this fraction of the run, and to `env_steps`, which replay counts itself."""
        self.progress = progress
        steps = env_steps if self.experience is None else self.experience.collected
        if self._scheduled:
            self.settings = at_progress(self._settings, progress, steps)
            lr = getattr(self.settings, "lr", None)
            if lr is not None:
                for optimizer in self.optimizers.values():
                    for group in optimizer.param_groups:
                        group["lr"] = lr * group.get("lr_scale", 1.0)
        if self._explores:
            self.agent.set_exploration(self.settings, steps)

    def prepare(self, batch: BatchSpec, info: Tree = None) -> None:
        """Allocates what batches of this shape need, so that bad settings fail before anything is collected.

        Args:
            info: example of the agent's and the environment's info of one row, as `sampler.initialize` gives it.
        """
        if self.experience is not None:
            self.experience.replay.prepare(batch.T, batch.B, info)

    def postprocess(self, batch: SampleBatch) -> TrainBatch:
        """What the loss needs of a batch of tensors [T, B, ...]."""
        return self.postprocess_fn(self.agent, batch, self.settings)

    def learn_on_batch(self, minibatch: TrainBatch) -> dict[str, Tensor]:
        """One gradient step on post-processed data; gives the loss's metrics as scalars without gradient.

        Raises:
            NonFiniteError: loss or gradient was not finite 10 times in a row; each such step is skipped.
        """
        loss = self.update(minibatch)
        return {} if loss is None else loss.metrics

    def update(self, minibatch: TrainBatch) -> Loss | None:
        """As `learn_on_batch`; gives the whole loss, or None if the step was skipped."""
        loss = self.loss_fn(self.agent, minibatch, self.settings)
        norm = set_gradients(loss, self.optimizers, self.max_grad_norm)
        if not math.isfinite(norm):
            self.skipped += 1
            self._skips_in_a_row += 1
            if self._skips_in_a_row >= _SKIPS_IN_A_ROW:
                raise NonFiniteError(
                    f"gradients were not finite in {_SKIPS_IN_A_ROW} updates in a row (norm {norm}); the last update that "
                    f"counted was number {self.updates}; lower lr, or look for huge rewards or observations"
                )
            return None
        self._skips_in_a_row = 0
        for name in loss.total if isinstance(loss.total, dict) else self.optimizers:
            self.optimizers[name].step()
        self.updates += 1
        return loss

    def shuffler(self) -> np.random.Generator:
        """The generator of this version's minibatches: a function of seed and version, so there is no state to save."""
        return generator(self.seed, Purpose.MINIBATCH, self.version)

    def predict(
        self, obs: Tree, state: Tree = None, deterministic: bool = True, prev_reward: float | np.ndarray[Any, Any] = 0.0
    ) -> Any:
        """The action for one observation or a batch of N, as the environment takes it (boxes clipped).

        Args:
            obs: in the environment's form, leaves [*O] or [N, *O].
            state: what the call before returned, None at the start of an episode. Only recurrent policies have one.
            deterministic: the distribution's mode instead of a sample.
            prev_reward: the reward that came with `obs`, for agents that are fed it.

        Returns:
            The action; if the policy is recurrent the pair (action, new state).
        """
        arrays = _obs_arrays(self.spec.obs, obs, "obs")
        leads = {x.shape[: x.ndim - len(leaf.shape)] for x, leaf in zip(arrays, tree_leaves(self.spec.obs))}
        if len(leads) > 1 or len(next(iter(leads))) > 1:
            raise ConfigError(
                f"predict got leading dimensions {sorted(leads)}; expected none, or one [N] on every leaf"
            )
        single = leads == {()}
        n = 1 if single else len(arrays[0])
        rows, device = padded_rows(n), self.device
        index = iter(range(len(arrays)))

        def padded(leaf: Any) -> Tensor:
            x = np.zeros((rows, *leaf.shape), leaf.dtype)
            x[:n] = arrays[next(index)]
            return torch.from_numpy(x).to(device)

        agent_state, prev_action = state if state is not None else (self.agent.initial_state(rows), None)
        if prev_action is None:
            prev_action = tree_map(
                lambda leaf: torch.from_numpy(np.broadcast_to(leaf.null(), (rows, *leaf.shape)).copy()).to(device),
                self.spec.action,
            )
        rewards = torch.zeros(rows, device=device)
        rewards[:n] = torch.as_tensor(np.asarray(prev_reward, np.float32), device=device)
        first = torch.full((rows,), state is None, device=device)
        noise = None
        if not deterministic:
            draws = uniform(self.seed, Purpose.PREDICT, self._predictions, slice(0, rows), 1, self.agent.noise_size)
            noise = torch.from_numpy(draws[0]).to(device)
            self._predictions += 1
        with torch.inference_mode():
            inputs = Inputs(tree_map(padded, self.spec.obs), prev_action, rewards, first)
            chosen, _, agent_state = self.agent.act(inputs, agent_state, noise)
        action = tree_map(lambda leaf, a: _as_env(leaf, a[:n].cpu().numpy(), single), self.spec.action, chosen)
        return action if agent_state is None else (action, (agent_state, chosen))

    def state_dict(self) -> dict[str, Any]:
        """Parameters, optimizers and counters: plain Python and tensors."""
        return {
            "agent": self.agent.state_dict(),
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "counters": {
                "version": self.version,
                "updates": self.updates,
                "skipped": self.skipped,
                "skips_in_a_row": self._skips_in_a_row,
                "predictions": self._predictions,
            },
            **({} if self.experience is None else {"experience": self.experience.state_dict()}),
        }

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """The large arrays that belong to the state, views of live memory: the replay's."""
        return {} if self.experience is None else self.experience.replay.arrays()

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        """The inverse of `state_dict` and `arrays`. Raises CheckpointError if networks or replay differ."""
        self.load_parameters(state["agent"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
        counters = state["counters"]
        self.version, self.updates, self.skipped = counters["version"], counters["updates"], counters["skipped"]
        self._skips_in_a_row, self._predictions = counters["skips_in_a_row"], counters["predictions"]
        if self.experience is not None:
            self.experience.load_state_dict(state["experience"], arrays or {})

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Networks and normalisers only, as a warm start takes them. Raises CheckpointError if they do not fit."""
        try:
            self.agent.load_state_dict(dict(parameters))
        except RuntimeError as error:
            raise CheckpointError(
                f"the stored parameters do not fit this agent, {_misfit(self.agent.state_dict(), parameters)}; were net, spaces or "
                "the algorithm changed?"
            ) from error


def _misfit(own: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """The first difference between two sets of parameters, and how many more there are."""

    def shape(x: Any) -> list[int] | None:
        return list(x.shape) if isinstance(x, Tensor) else None

    found = [
        f"{key} is {shape(stored[key])} there and {shape(own[key])} here"
        for key in own
        if key in stored and shape(own[key]) != shape(stored[key])
    ]
    found += [f"which has {key}" for key in own if key not in stored]
    found += [f"which has no {key}" for key in stored if key not in own]
    more = f", and {len(found) - 1} more such" if len(found) > 1 else ""
    return f"{found[0]}{more}" if found else "in what its modules keep besides"


def _obs_arrays(spec: Tree, obs: Any, where: str) -> list[np.ndarray[Any, Any]]:
    """The leaves of an observation or a batch of them, in the order of the spec's leaves."""
    if isinstance(spec, LeafSpec):
        try:
            x = np.asarray(obs)
        except ValueError as error:
            raise ConfigError(f"predict: {where} is no array: {error}; expected shape {list(spec.shape)}") from error
        if x.dtype == object or x.shape[max(x.ndim - len(spec.shape), 0) :] != spec.shape:
            raise ConfigError(
                f"predict: {where} is {x.dtype}{list(x.shape)}; expected {spec.dtype}{list(spec.shape)}, or a batch "
                f"[N, {', '.join(map(str, spec.shape))}]"
            )
        return [x]
    if isinstance(spec, dict):
        if not isinstance(obs, Mapping) or set(obs) != set(spec):
            seen = sorted(map(str, obs)) if isinstance(obs, Mapping) else type(obs).__name__
            raise ConfigError(f"predict: {where} is {seen}; expected a dict with keys {sorted(spec)}")
        return [x for key in sorted(spec) for x in _obs_arrays(spec[key], obs[key], f"{where}[{key!r}]")]
    if not isinstance(obs, tuple) or len(obs) != len(spec):
        raise ConfigError(f"predict: {where} is {type(obs).__name__}; expected a tuple of {len(spec)}")
    return [x for i, part in enumerate(spec) for x in _obs_arrays(part, obs[i], f"{where}[{i}]")]


def _as_env(leaf: Any, action: np.ndarray[Any, Any], single: bool) -> Any:
    if leaf.kind == "box":
        action = np.clip(action, leaf.bound("low"), leaf.bound("high"))
    action = action.astype(leaf.dtype)
    return (action[0] if leaf.shape else action[0].item() if leaf.kind != "box" else action[0]) if single else action
