"""Steps gymnasium environments one after the other in this process, straight into a sample buffer."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

import gymnasium as gym
import numpy as np

from penstock.core.batch import SampleBatch, carry_over
from penstock.core.errors import ConfigError, EnvWorkerError
from penstock.core.noise import Purpose, env_seed, uniform
from penstock.core.spec import LeafSpec
from penstock.core.tree import Tree, is_leaf, tree_leaves, tree_map, tree_structure, tree_unflatten
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.check import EnvContractError
from penstock.envs.contract import describe_reset_violation, describe_step_violation, describe_violation
from penstock.envs.make import EnvConfig
from penstock.envs.spaces import env_spec
from penstock.envs.wrappers import MASK

Reset = Literal["next_step", "batch_end"]

_CHECK_EVERY = 64
_LARGEST_REWARD = float(np.finfo(np.float32).max)
_NUMBERS = frozenset([float, int, np.float32, np.float64, np.int64, np.int32])
_FLAGS = frozenset([bool, np.bool_])


class SerialPool:
    """An `EnvPool` of one group whose `send` steps the environments at once.

    Args:
        config: makes each slot's environment. seed: of the run; every episode gets `env_seed(seed, slot, episode)`.
        slots: global numbers of the slots.
        reset: `next_step` resets in the row after an end. `batch_end` lets a finished slot idle to the end of the
            batch and resets in row 0 of the next.
        max_decorrelation_steps: each slot takes 1 to this many random steps before the first batch; 0 for none.
        episodes: for each slot how many episodes it plays before it idles for good; None for no limit.
        evaluation: use the evaluation seeds, which no training episode uses.
    """

    def __init__(
        self,
        config: EnvConfig,
        seed: int,
        slots: slice,
        *,
        reset: Reset = "next_step",
        max_decorrelation_steps: int = 0,
        episodes: Sequence[int] | None = None,
        evaluation: bool = False,
    ) -> None:
        B = slots.stop - slots.start
        self.groups = (slice(0, B),)
        self._config, self._slots, self._evaluation = config, slots, evaluation
        self._batch_end = reset == "batch_end"
        self._decorrelate = max_decorrelation_steps
        self._envs: list[gym.Env[Any, Any]] = []
        try:
            for _ in range(B):
                self._envs.append(self._made())
        except BaseException:
            self.close()
            raise
        self.spec = env_spec(self._envs[0])
        self._steps = [env.step for env in self._envs]
        self._write = _obs_writer(self.spec.obs)
        self._actions = _action_reader(self.spec.action)
        self._info_keys = tuple(dict.fromkeys((*config.info_keys, "is_success")))
        self._out: SampleBatch | None = None
        self._row_views: list[tuple[Any, ...]] = []
        self.restart(seed, episodes)

    def restart(self, seed: int, episodes: Sequence[int] | None = None) -> None:
        """Forgets every episode: the next batch begins with the first episodes of `seed`."""
        B = len(self._envs)
        self._seed = seed
        self._episode = [-1] * B  # the number of each slot's current episode; -1 before its first
        self._began = [0] * B  # the tick of its reset, for messages
        self._left = [math.inf if episodes is None else episodes[b] for b in range(B)]
        self._ended = [True] * B  # the slot resets in the next row it takes part in
        self._idle = [left <= 0 for left in self._left]
        self._tick = 0
        self._unstarted = True
        self._warmup_actions: list[list[Tree]] = [[] for _ in range(B)]
        self._warmup_rewards: list[list[float]] = [[] for _ in range(B)]

    def bind(self, out: SampleBatch) -> None:
        previous, self._out = self._out, out
        if previous is not out or not self._row_views:
            env_info = out.info.get("env", {}) if isinstance(out.info, dict) else {}
            self._row_views = [
                (
                    tree_map(lambda x, t=t: x[t + 1], out.obs),
                    tree_map(lambda x, t=t: x[t], out.action),
                    out.reward[t],
                    out.terminated[t],
                    out.truncated[t],
                    out.valid[t],
                    {key: column[t] for key, column in env_info.items()},
                )
                for t in range(len(out.valid))
            ]
        if self._unstarted:
            self._unstarted = False
            self._start(out)
        else:
            assert previous is not None
            carry_over(previous, out)
        out.first[1:] = False  # only now, since row T of `previous` may be a row of `out`
        for column in tree_leaves(out.info.get("env")) if isinstance(out.info, dict) else []:
            column[...] = np.nan
        if self._batch_end:
            self._idle = [left <= 0 for left in self._left]

    def send(self, group: int, row: int) -> None:
        obs_row, action_row, reward_row, terminated_row, truncated_row, valid_row, info_rows = self._row_views[row]
        B = len(self._steps)
        rewards: list[Any] = [0.0] * B
        ends: list[tuple[int, Any, Any]] | None = None
        invalid: list[int] | None = None
        actions = self._actions(action_row)
        write = self._write
        self._tick += 1
        b, result = 0, None
        try:
            for b, step, action, ended in zip(range(B), self._steps, actions, self._ended):
                if ended:
                    invalid = [b] if invalid is None else [*invalid, b]
                    self._reset_or_idle(b, row, obs_row)
                    continue
                result = step(action)
                obs, reward, terminated, truncated, info = result
                if not (write(obs_row, b, obs) and reward.__class__ in _NUMBERS and terminated.__class__ in _FLAGS
                        and truncated.__class__ in _FLAGS):  # fmt: skip
                    reward = self._violation(b, result, action, obs_row)
                rewards[b] = reward
                if terminated or truncated:
                    ends = [(b, terminated, truncated)] if ends is None else [*ends, (b, terminated, truncated)]
                if info:
                    for key, column in info_rows.items():
                        if key in info:
                            column[b] = info[key]
                elif info is None:
                    self._violation(b, result, action, obs_row)
        except EnvWorkerError:
            raise
        except (Exception, SystemExit) as error:
            self._fail(b, "step", error, actions[b], result)
        reward_row[:] = rewards
        terminated_row.fill(False)
        truncated_row.fill(False)
        valid_row.fill(True)
        if invalid is not None:
            valid_row[invalid] = False
        for b, terminated, truncated in ends or ():
            terminated_row[b], truncated_row[b] = terminated, truncated
            self._finish(b)
        if not -_LARGEST_REWARD < sum(rewards) < _LARGEST_REWARD or self._tick % _CHECK_EVERY == 0 \
                or self._config.checks == "always" or 0 in self._episode:  # fmt: skip
            self._check_values(obs_row, rewards, actions)

    def recv(self) -> int:
        return 0

    def close(self) -> None:
        for env in self._envs:
            env.close()
        self._envs = []

    @property
    def info_keys(self) -> tuple[str, ...]:
        """The env info keys that batches have columns for."""
        return self._info_keys

    def get_state(self) -> dict[str, Any]:
        snapshots = [env.get_state() if _has_state(env) else None for env in self._envs]
        return {"episode": list(self._episode), "ended": list(self._ended), "idle": list(self._idle),
                "left": [None if left == math.inf else left for left in self._left], "tick": self._tick,
                "began": list(self._began), "snapshot": snapshots}  # fmt: skip

    def set_state(self, state: dict[str, Any], row: SampleBatch, journal: list[Tree | None]) -> list[int]:
        self._unstarted, self._out = False, row
        self._row_views = []
        self._episode, self._ended, self._idle = list(state["episode"]), list(state["ended"]), list(state["idle"])
        self._left = [math.inf if left is None else left for left in state["left"]]
        self._tick = state["tick"]
        lost: list[int] = []
        for b, env in enumerate(self._envs):
            target = tree_map(lambda x, b=b: x[-1, b], row.obs)
            if state["snapshot"][b] is not None and _has_state(env):
                self._reset_env(b, again=True)
                env.set_state(state["snapshot"][b])
            elif self._ended[b]:
                continue
            elif journal[b] is None or not self._replay(b, journal[b], target):
                lost.append(b)
                self._ended[b] = True  # the next row of this slot resets into its next episode
        self._began = list(state["began"])
        return lost

    def warmup(self) -> list[list[Tree]]:
        """For each slot the random actions of its current episode that were taken before the first batch."""
        return self._warmup_actions

    def warmup_rewards(self) -> list[list[float]]:
        """The rewards that answered `warmup`, which count towards the first episode's return."""
        return self._warmup_rewards

    def _made(self) -> gym.Env[Any, Any]:
        env = self._config.make()
        if isinstance(env, gym.vector.VectorEnv):
            raise ConfigError(f"{self._config.name} made a VectorEnv where one environment was expected")
        return env

    def _start(self, out: SampleBatch) -> None:
        """Row 0 of the first batch: a reset, and random steps where decorrelation asks for them."""
        for b in range(len(self._envs)):
            if self._idle[b]:
                continue
            self._open(out, b)
            if self._decorrelate:
                self._random_steps(out, b)

    def _open(self, out: SampleBatch, b: int) -> None:
        """Row 0 of slot b is a reset, with nothing before it."""
        self._write_unusual(tree_map(lambda x: x[0], out.obs), b, self._reset_env(b), "reset")
        self._ended[b], out.first[0, b], out.prev_reward[0, b] = False, True, 0.0
        tree_map(lambda leaf, x: x[0].__setitem__(b, leaf.null()), self.spec.action, out.prev_action)

    def _random_steps(self, out: SampleBatch, b: int) -> None:
        slot = self._slots.start + b
        n = action_noise_size(self.spec.action)
        u = uniform(self._seed, Purpose.DECORRELATE, 0, slice(slot, slot + 1), self._decorrelate + 1, max(n, 1))[:, 0]
        count = 1 + int(u[0, 0] * self._decorrelate)
        for k in range(count):
            if self._ended[b]:
                self._open(out, b)
                self._warmup_actions[b], self._warmup_rewards[b] = [], []
                continue
            mask = out.obs[MASK][0, b][None] if isinstance(out.obs, dict) and MASK in out.obs else None
            action = sample_action(self.spec.action, u[k + 1][None], mask)
            env_action = self._actions(action)[0]
            self._began[b] -= 1
            obs, reward, terminated, truncated = self._step_checked(b, env_action)
            self._write_unusual(tree_map(lambda x: x[0], out.obs), b, obs, "step", env_action)
            self._warmup_actions[b].append(tree_map(lambda x: x[0], action))
            self._warmup_rewards[b].append(float(reward))
            out.first[0, b] = False
            tree_map(lambda x, a, b=b: x[0].__setitem__(b, a[0]), out.prev_action, action)
            out.prev_reward[0, b] = reward
            if terminated or truncated:
                self._finish(b)

    def _replay(self, b: int, actions: Tree, target: Tree) -> bool:
        """Replays the slot's episode from its seed; True if it arrives at the same observation bit for bit."""
        scratch = tree_map(lambda x: np.zeros_like(x)[None], target)
        try:
            obs = self._reset_env(b, again=True)
            for env_action in self._actions(actions):
                obs, _, terminated, truncated = self._step_checked(b, env_action)
                if terminated or truncated:
                    return False
            self._write_unusual(scratch, 0, obs, "step")
        except EnvWorkerError:  # it took these actions before: one more way in which it is not reproducible
            return False
        pairs = zip(tree_leaves(scratch), tree_leaves(target))
        return all(x[0].tobytes() == np.ascontiguousarray(y).tobytes() for x, y in pairs)

    def _finish(self, b: int) -> None:
        self._ended[b] = True
        self._left[b] -= 1
        if self._left[b] <= 0 or self._batch_end:
            self._idle[b] = True

    def _reset_or_idle(self, b: int, row: int, obs_row: Tree) -> None:
        out = self._out
        assert out is not None
        if self._idle[b]:
            tree_map(lambda x, y: x[row + 1].__setitem__(b, y[row, b]), out.obs, out.obs)
            return
        obs = self._reset_env(b)
        if not self._write(obs_row, b, obs):
            self._write_unusual(obs_row, b, obs, "reset")
        self._ended[b] = False
        out.first[row + 1, b] = True

    def _reset_env(self, b: int, again: bool = False) -> Any:
        self._episode[b] += 0 if again else 1
        self._began[b] = self._tick
        try:
            result = self._envs[b].reset(seed=self._env_seed(b))
        except (Exception, SystemExit) as error:
            self._fail(b, "reset", error, None)
        if message := describe_reset_violation(result):
            raise EnvContractError(f"{self._where(b, 'reset')}: {message}")
        return result[0]

    def _step_checked(self, b: int, action: Any) -> tuple[Any, Any, Any, Any]:
        try:
            result = self._steps[b](action)
        except (Exception, SystemExit) as error:
            self._fail(b, "step", error, action)
        message = describe_step_violation(result)
        if message:
            raise EnvContractError(f"{self._where(b, 'step')}: {message}{_last(action)}")
        return result[:4]

    def _write_unusual(self, obs_row: Tree, b: int, obs: Any, phase: str, action: Any = None) -> None:
        """Raises if the observation broke the contract; writes it if it is only of an unusual but sound type."""
        if message := describe_violation(obs, self.spec.obs, "obs"):
            raise EnvContractError(f"{self._where(b, phase)}: {message}{_last(action)}")
        _write_tree(obs_row, b, obs)

    def _violation(self, b: int, result: Any, action: Any, obs_row: Tree) -> Any:
        """Raises if the step broke the contract; writes and gives what was only of an unusual but sound type."""
        if message := describe_step_violation(result):
            raise EnvContractError(f"{self._where(b, 'step')}: {message}{_last(action)}")
        self._write_unusual(obs_row, b, result[0], "step", action)
        return float(result[1])

    def _check_values(self, obs_row: Tree, rewards: list[Any], actions: Sequence[Any]) -> None:
        for b, reward in enumerate(rewards):
            if not -_LARGEST_REWARD < reward < _LARGEST_REWARD:
                raise EnvContractError(f"{self._where(b, 'step')}: reward: got {reward}, expected a finite number that "
                                       f"fits float32; look for a division by zero{_last(actions[b])}")  # fmt: skip
        if self._config.checks == "off":
            return
        everyone = self._tick % _CHECK_EVERY == 0 or self._config.checks == "always"
        for b, episode in enumerate(self._episode):
            if everyone or episode == 0:
                message = describe_violation(tree_map(lambda x, b=b: x[b], obs_row), self.spec.obs, "obs")
                if message:
                    stepped = self._tick > self._began[b]
                    where, last = self._where(b, "step" if stepped else "reset"), actions[b] if stepped else None
                    raise EnvContractError(f"{where}: {message}{_last(last)}")

    def _env_seed(self, b: int) -> int:
        return env_seed(self._seed, self._slots.start + b, max(self._episode[b], 0), self._evaluation)

    def _where(self, b: int, phase: str) -> str:
        kind = "evaluation slot" if self._evaluation else "slot"
        step = self._tick - self._began[b] - (phase == "step")  # counted from 0
        return (f"{kind} {self._slots.start + b} of {self._config.name} in {phase}() at episode {self._episode[b]}, "
                f"step {step}, seed {self._env_seed(b)}")  # fmt: skip

    def _fail(self, b: int, phase: str, error: BaseException, action: Any, result: Any = None) -> NoReturn:
        """Raises for an exception out of the environment, or out of the handling of its `result`."""
        ours = error.__traceback__ is not None and error.__traceback__.tb_next is None and result is not None
        if ours and (message := describe_step_violation(result) or _describe_info(result[4], self._info_keys)):
            raise EnvContractError(f"{self._where(b, phase)}: {message}{_last(action)}") from error
        text = "".join(traceback.format_exception(error))
        raise EnvWorkerError(
            f"{self._where(b, phase)}: {type(error).__name__}: {error}{_last(action)}\n{text}"
        ) from error


def _has_state(env: gym.Env[Any, Any]) -> bool:
    """Asks the outermost wrapper only: a state from below it would lack the wrapper's own, such as a step count."""
    return callable(getattr(env, "get_state", None)) and callable(getattr(env, "set_state", None))


def _last(action: Any) -> str:
    """The end of a message: which action came before."""
    if action is None:
        return ""
    text = repr(action.item() if isinstance(action, np.generic) else action)
    return f"; last action {text if len(text) <= 200 else text[:200] + '...'}"


def _describe_info(info: dict[str, Any], keys: Sequence[str]) -> str | None:
    for key in keys:
        number = isinstance(info.get(key, 0), (bool, int, float, np.generic, np.ndarray))
        if not number or np.ndim(info.get(key, 0)):
            kind = type(info[key]).__name__
            return f"info[{key!r}]: got {kind}, expected one number; return one, or drop {key!r} from info_keys"
    return None


def _obs_writer(spec: Tree) -> Callable[[Tree, int, Any], bool]:
    """A function that writes one slot's observation into a row [B, *O], or gives False if its form is wrong."""
    if not is_leaf(spec):
        return lambda row, b, obs: describe_violation(obs, spec, "obs") is None and _write_tree(row, b, obs)
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":

        def write_scalar(row: Any, b: int, obs: Any) -> bool:
            if not isinstance(obs, (int, np.integer)):
                return False
            row[b] = obs
            return True

        return write_scalar
    shape, dtype = leaf.shape, np.dtype(leaf.dtype)

    def write(row: Any, b: int, obs: Any) -> bool:
        if obs.__class__ is not np.ndarray or obs.shape != shape or (obs.dtype is not dtype and obs.dtype != dtype):
            return False
        row[b] = obs
        return True

    return write


def _write_tree(row: Tree, b: int, obs: Any) -> bool:
    if isinstance(row, dict):
        for key, below in row.items():
            _write_tree(below, b, obs[key])
    elif isinstance(row, tuple):
        for below, part in zip(row, obs):
            _write_tree(below, b, part)
    else:
        row[b] = obs
    return True


def _action_reader(spec: Tree) -> Callable[[Tree], Sequence[Any]]:
    """A function from a row of actions [B, *A] to what each environment gets: numpy integers, or arrays of its own."""
    if not is_leaf(spec):
        structure = tree_structure(spec)
        readers = [_action_reader(leaf) for leaf in tree_leaves(spec)]
        return lambda row: [
            tree_unflatten(structure, list(parts)) for parts in zip(*(r(x) for r, x in zip(readers, tree_leaves(row))))
        ]
    leaf: LeafSpec = spec
    if leaf.kind == "discrete":
        return list  # numpy integers, as `action_space.sample()` gives; Gymnasium checks Python ints more slowly
    if leaf.kind != "box":
        return lambda row: list(row.copy())
    low, high = leaf.bound("low").astype(leaf.dtype), leaf.bound("high").astype(leaf.dtype)
    if not leaf.shape:
        return lambda row: [np.asarray(x) for x in np.clip(row, low, high)]
    return lambda row: list(np.clip(row, low, high))
