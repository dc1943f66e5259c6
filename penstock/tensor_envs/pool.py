"""TensorPool: one batched environment of torch tensors; its answers stay on their device, in batches that lie there."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import gymnasium as gym
import torch
from torch import Tensor

from penstock.core.batch import SampleBatch, carry_over
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError, words_of
from penstock.core.noise import env_seed
from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.check import check_vector_env, resets_within_step, tensor_device
from penstock.envs.contract import describe_violation, refused_values, value_limits
from penstock.envs.make import EnvConfig, factory_slot
from penstock.envs.pools.native import resized
from penstock.envs.pools.pool import EnvPool, Group, OpenEpisode, PoolState, row_views
from penstock.envs.shutdown import close_env
from penstock.tensor_envs.answers import FINAL, Answers, not_finite
from penstock.tensor_envs.logs import EnvLog

_PAGE = "docs/tensor-environments.md"


class _Row:
    """Views that a step of row t reads and writes, made once for each buffer; leaves instead of trees."""

    def __init__(self, out: SampleBatch, t: int) -> None:
        obs, action, self.reward, self.terminated, self.truncated, self.valid, self.columns = row_views(out, t)
        self.obs: list[Tensor] = tree_leaves(obs)
        self.action: list[Tensor] = tree_leaves(action)
        self.first = out.first[t + 1]
        self.final: list[Tensor] = [x[t] for x in tree_leaves(out.final)]
        self.before: list[Tensor] = [x[t] for x in tree_leaves(out.obs)]


class TensorPool(EnvPool):
    """An `EnvPool` of a VectorEnv with torch tensors on `env.device` as arrays; the batches lie there too.

    A step never waits for the device. Types, shapes, dtypes and devices of answers are checked in every step,
    values once a batch. One that resets in the step of an end (SAME_STEP) fills `SampleBatch.final`, and every row is
    valid. Like every native batched environment it takes one seed for all slots, so placement invariance
    and exact resume do not hold.

    Args:
        first_slot: number of the first slot among those of all samplers of the run.
        env: an unused instance of B environments, if one has been made.
        max_age: where all slots are reset, their episodes begin at random ages of 1 to this many steps.

    Raises:
        ConfigError: the environment does not fit, or there is a `max_age` and it has no `set_ages`.
    """

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        B: int,
        *,
        first_slot: int = 0,
        evaluation: bool = False,
        training_slots: int | None = None,
        env: Any = None,
        max_age: int = 0,
    ) -> None:
        self.groups = (Group(0, slice(0, B)),)
        self.info_keys = config.all_info_keys
        self.evaluation = evaluation
        self._config, self._B, self._first_slot = config, B, first_slot
        self._training_slots = B if training_slots is None else training_slots
        self._env: Any = None
        self._rows: list[_Row] = []
        self._views: dict[int, tuple[SampleBatch, list[_Row]]] = {}
        self._tick, self._max_age, self._log = 0, max_age, EnvLog()
        self.restart(seed)
        self._used = False
        self._take(self._made() if env is None else env)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with a reset of all; environments play on without limit."""
        self._seed, self._restarts = seed, 0
        self._out: SampleBatch | None = None

    def place(self, batches: list[SampleBatch], states: Tree) -> tuple[list[SampleBatch], Tree]:
        """The batches as tensors on the device; on the CPU they are views of the same memory."""
        placed = [tree_map(lambda x: torch.from_numpy(x).to(self.device), batch) for batch in batches]
        if self._answers.same_step:
            placed = [replace(batch, final=tree_map(lambda x: torch.zeros_like(x[1:]), batch.obs)) for batch in placed]
        return placed, states

    def bind(self, outs: Sequence[SampleBatch]) -> None:
        (out,) = outs
        known, self._rows = self._views.get(id(out), (None, []))
        if known is not out:
            self._rows = [_Row(out, t) for t in range(out.spec.T)]
            self._views[id(out)] = out, self._rows
        self._log.clear()
        previous, self._out = self._out, out
        if previous is None:
            self._open(out)
        else:
            carry_over(previous, out)
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []:
            column.fill_(float("nan"))

    def send(self, group: int, row: int) -> None:
        out = self._rows[row]
        result = self._called("step", lambda: self._env.step(self._action(out.action)))
        if message := self._answers.describe_step(result) or self._answers.describe_obs(result[0]):
            raise EnvContractError(f"{self._where('step')}: {message}")
        obs, reward, terminated, truncated, info = result
        again = self._ended
        acted = ~again
        for x, y in zip(out.obs, tree_leaves(obs)):
            x.copy_(y)
        out.valid.copy_(acted)
        out.reward.copy_(reward.masked_fill(again, 0.0))
        out.terminated.copy_(terminated & acted)
        out.truncated.copy_(truncated & acted)
        ended = out.terminated | out.truncated
        if self._answers.same_step:
            out.first.copy_(ended)
            self._put_final(out, obs, ended, info)
        else:
            out.first.copy_(again)
            self._ended = ended
        for key, column in out.columns.items():
            if key in info:
                self._record(key, column, info, acted)
        if "log" in info:
            self._log.add(info["log"], self._where("step"))
        self._tick += 1

    def _put_final(self, out: _Row, obs: Tree, ended: Tensor, info: Any) -> None:
        """Row t of `final`, from the info; an end without is noted, and refused when the batch is full."""
        final = next((info[key] for key in FINAL if key in info), None)
        if final is None:
            self._lacking |= ended
            for x, y in zip(out.final, out.before):  # what `final_obs = "previous"` asks for
                x.copy_(y)
            return
        if message := self._answers.describe_final(final, obs):
            raise EnvContractError(f"{self._where('step')}: {message}")
        for x, y in zip(out.final, tree_leaves(final)):
            x.copy_(y)

    def recv(self) -> int:
        """The one group: it has stepped in `send`, as far as this thread is concerned."""
        assert self._out is not None
        if self._tick % len(self._rows) == 0:
            self._check(self._out)
        return 0

    def evaluation_slots(self, wanted: int) -> int:
        """As many as wanted, if the factory can be asked for a number; else as in training."""
        if self._config.eval_in_training:
            return self._training_slots
        asked = resized(self._config, wanted, self._training_slots) is not self._config
        return wanted if asked else self._training_slots

    def for_evaluation(self, B: int, first_slot: int = 0) -> TensorPool:
        """A pool of its own; it is given the environment of this one if that has not been used, since some libraries
        have one in a process. With `eval_in_training` both have the same, of which one plays at a time."""
        lent = None
        if self._config.eval_in_training:
            if self._env is None:
                self._take(self._made())
            lent = self._env
        elif not self._used:
            lent, self._env = self._env, None
            if B != self._B and lent is not None:  # training makes another when it begins
                close_env(lent, self._config.name)
                lent = None
        return TensorPool(
            self._config,
            self._seed,
            B,
            first_slot=first_slot,
            evaluation=True,
            training_slots=self._training_slots,
            env=lent,
        )

    def metrics(self) -> dict[str, float]:
        """`env/...`: the means of what the environment has logged in the last batch."""
        return self._log.metrics()

    def close(self) -> None:
        """Ends the environments. A second call does nothing."""
        if self._env is not None:
            env, self._env = self._env, None
            if not (self.evaluation and self._config.eval_in_training):  # whose training has lent them
                close_env(env, self._config.name)

    def get_state(self) -> PoolState:
        return PoolState(restarts=self._restarts)

    def set_state(
        self, state: PoolState, outs: Sequence[SampleBatch], journal: Sequence[OpenEpisode | None]
    ) -> list[int]:
        """Its environments cannot be restored: all start anew under another seed, and every slot counts as cut."""
        self._restarts, self._out = state.restarts + 1, None
        return list(range(self._B))

    def _made(self) -> Any:
        slot = factory_slot(self._first_slot, self.evaluation)
        return resized(self._config, self._B, self._training_slots).make(slot)

    def _take(self, env: Any) -> None:
        """Makes this the environment. Raises ConfigError, and closes it, if it does not fit."""
        name = self._config.name
        try:
            if not isinstance(env, gym.vector.VectorEnv) or (device := tensor_device(env)) is None:
                raise ConfigError(
                    f"{name} made {type(env).__name__}; expected a gymnasium.vector.VectorEnv with a `device`, where "
                    f"its tensors are ({_PAGE})"
                )
            self.spec = check_vector_env(env).spec
            if self._max_age and not callable(getattr(env, "set_ages", None)):
                raise ConfigError(
                    f"sampler.max_decorrelation_steps={self._max_age} with {name}: it has no method set_ages(ages), "
                    "which brings the ends of its episodes nearer by [num_envs] steps; leave it out"
                )
            said = _attribute(env, "final_obs")
            if isinstance(said, str) and said != "previous":
                raise ConfigError(f"{name} has final_obs={said!r}; expected 'previous', or no such attribute")
            if env.num_envs != self._B:
                raise ConfigError(
                    f"{name} has num_envs={env.num_envs}; sampler.B={self._B}: make them equal, or let the factory "
                    "accept num_envs"
                )
            try:
                self.device = torch.empty(0, device=device).device
            except (RuntimeError, AssertionError, TypeError) as error:
                raise ConfigError(f"{name} has device={device!r}, which is not here: {words_of(error)}") from error
            self._answers = Answers(self.spec.obs, self._B, self.device, resets_within_step(env))
        except BaseException:
            close_env(env, name)
            raise
        self.specs = (self.spec,)
        self._env = env
        self._action_structure = tree_structure(self.spec.action)
        self._to_env = [self._clipping(leaf) for leaf in tree_leaves(self.spec.action)]
        self._bounds = [self._limits(leaf) for leaf in tree_leaves(self.spec.obs)]
        self._ended = torch.zeros(self._B, dtype=torch.bool, device=self.device)
        self._lacking = torch.zeros_like(self._ended)
        self._previous = self._answers.same_step and said == "previous"
        self._told = self.evaluation

    @torch.no_grad()  # a tensor that requires grad, as of a differentiable simulator, leaves no graph in the batch
    def _open(self, out: SampleBatch) -> None:
        """Row 0 is a reset of every slot, with nothing before it."""
        if self._env is None:
            self._take(self._made())
        self._used, self._tick = True, 0
        # 31 bits with room for a seed for each environment after it, as libraries keep seeds in a C int.
        seed = min(
            env_seed(self._seed, self._first_slot, self._restarts, self.evaluation) >> 1, (1 << 31) - 1 - self._B
        )
        result = self._called("reset", lambda: self._env.reset(seed=seed))
        if not isinstance(result, tuple) or len(result) != 2:
            size = f" of {len(result)}" if isinstance(result, tuple) else ""
            seen = f"{type(result).__name__}{size}"
            raise EnvContractError(f"{self._where('reset')}: got {seen}, expected a tuple (obs, info)")
        if message := self._answers.describe_obs(result[0]):
            raise EnvContractError(f"{self._where('reset')}: {message}")
        if self._max_age:
            ages = torch.randint(1, self._max_age + 1, (self._B,), generator=torch.Generator().manual_seed(seed))
            self._called("set_ages", lambda: self._env.set_ages(ages.to(self.device)))
        for x, y in zip(tree_leaves(out.obs), tree_leaves(result[0])):
            x[0].copy_(y)
        out.first[0], out.prev_reward[0] = True, 0.0
        for x, null in zip(tree_leaves(out.prev_action), tree_leaves(self.spec.null_action)):
            x[0].copy_(torch.from_numpy(null))
        self._ended, self._lacking = torch.zeros_like(self._ended), torch.zeros_like(self._ended)

    def _called(self, phase: str, call: Callable[[], Any]) -> Any:
        """Answer of the environment. It never runs in the loop's inference mode, as it could not change such tensors in
        place afterwards."""
        try:
            with torch.inference_mode(False), torch.no_grad():
                return call()
        except (Exception, SystemExit) as error:
            text = "".join(traceback.format_exception(error))
            raise EnvWorkerError(f"{self._where(phase)}: {words_of(error)}\n{text}") from error

    def _action(self, row: Sequence[Tensor]) -> Tree:
        """The leaves of a row of actions as the environment is given them, in new memory."""
        actions = [to_env(x) for to_env, x in zip(self._to_env, row)]
        return tree_unflatten(self._action_structure, actions)

    def _record(self, key: str, column: Tensor, info: Any, acted: Tensor) -> None:
        known = acted
        for name in (key, f"_{key}"):
            if name in info and (message := self._answers.describe_info(name, info[name])):
                raise EnvContractError(f"{self._where('step')}: {message}")
        if f"_{key}" in info:
            known = acted & info[f"_{key}"].bool()
        column.copy_(info[key].to(column.dtype).masked_fill(~known, float("nan")))

    def _check(self, out: SampleBatch) -> None:
        """Raises EnvContractError for values that are refused; the one place that waits for the device."""
        refused = refused_values(self._config.checks)
        wrong: list[Tensor] = [not_finite(out.reward), self._lacking[None]]
        shown: list[Tree] = [None, None]
        for tree, counts in ((out.obs, None), (out.final, out.resets)):
            for x, (low, high) in zip(tree_leaves(tree), self._bounds):
                bad = [not_finite(x)] if refused != "any" and x.is_floating_point() else []
                if refused == "bounds":
                    outside = (low is not None and x < low, high is not None and x > high)
                    bad += [y.flatten(2).any(-1) if y.ndim > 2 else y for y in outside if isinstance(y, Tensor)]
                wrong += bad if counts is None else [y & counts for y in bad]
                shown += [tree] * len(bad)
        found = torch.stack([x.any() for x in wrong]).tolist()
        if found[1] and self._previous:
            found[1] = False
            self._tell_of_previous()
        if not any(found):
            return
        first = [x.nonzero()[0].tolist() if some else [] for x, some in zip(wrong, found)]
        # The earliest is the cause: networks, physics and rewards carry a NaN on.
        k = min((k for k, at in enumerate(first) if at), key=lambda k: (first[k][0], shown[k] is not out.obs))
        t, b = first[k]
        place = f"slot {self._first_slot + b} of {self._config.name}, row {t} of the batch"
        if k == 1:
            hint = _attribute(self._env, "final_obs_hint") or (
                "have step() return the last observations of episodes there, before the reset, [num_envs, ...]"
            )
            raise EnvContractError(
                f"slot {self._first_slot + b} of {self._config.name}: an episode ended and info['final_obs'] was not "
                f"there, which the value at a time limit is of; {hint}, or set env.final_obs = 'previous' to take the "
                "observation before for it, as rsl_rl does"
            )
        if k == 0:
            raise EnvContractError(
                f"{place}: reward is {float(out.reward[t, b])}; expected a finite number: look for a division by zero"
            )
        name = "obs" if shown[k] is out.obs else "final_obs"
        obs: Tree = tree_map(lambda x: x[t, b].cpu().numpy()[()], shown[k])
        raise EnvContractError(f"{place}: {describe_violation(obs, self.spec.obs, name, refused)}")

    def _tell_of_previous(self) -> None:
        """Warns, once, of an end without its last observation."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"{self._config.name} resets in the step of an end and does not give the last observation of an "
                "episode: at time limits values are bootstrapped from the observation before it, as rsl_rl does",
                stacklevel=2,
            )

    def _limits(self, leaf: LeafSpec) -> tuple[Any, Any]:
        """Lower and upper bound of a leaf on the device; None where none can be broken."""
        _, *bounds = value_limits(leaf)
        low, high = (None if x is None else torch.as_tensor(x, device=self.device) for x in bounds)
        return low, high

    def _clipping(self, leaf: LeafSpec) -> Callable[[Tensor], Tensor]:
        """Converts a row of actions to the environment's form, in new memory."""
        low, high = self._limits(leaf) if leaf.kind == "box" else (None, None)
        return torch.clone if low is None and high is None else lambda x: x.clamp(low, high)

    def _where(self, phase: str) -> str:
        return f"{self._config.name} in {phase}(), {self._tick} steps after the reset of all environments"


def _attribute(env: Any, name: str) -> Any:
    """The attribute of an environment, or else of the one that it wraps; None if neither has it."""
    return getattr(env, name, getattr(env.unwrapped, name, None))
