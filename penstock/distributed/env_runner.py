"""EnvRunner: a sampler and its agent for some of the slots of a group. A plain class; Ray only wraps it."""

from __future__ import annotations

import io
import os
import platform
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle
import gymnasium as gym
import numpy as np
import torch
from torch import nn

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_of
from penstock.core import VERSION, trace
from penstock.core.batch import MultiAgentBatch, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.noise import Noise, Purpose
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree
from penstock.distributed.packing import pack_rows, unpack_parameters
from penstock.envs.ids import entry_to_ship, take_shipped
from penstock.envs.make import EnvConfig, as_env_config
from penstock.envs.pools.pool import EnvPool, OpenEpisode, PoolState
from penstock.learn.algorithm import Algorithm, ResultDict
from penstock.learn.policy import Policy
from penstock.learn.train_ops import train_one_step
from penstock.run.checkpoints.encoding import decode, encode
from penstock.run.experiment import Experiment
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.installed import Installed
from penstock.samplers.live import EVAL_MAX_STEPS, EVAL_SLOTS, LiveSampler


class Recipe(NamedTuple):
    """The parts of an experiment that a runner is made from, and its place among all slots."""

    sampler: Any
    """Settings of a synchronous sampler of this library, for the slots of one runner."""
    env: EnvConfig
    seed: int
    algo: Algorithm | None = None
    first_slot: int = 0
    total_slots: int | None = None
    total_steps: int | None = None
    """Environment steps that schedules run over, in a loop of one's own."""

    @classmethod
    def of(cls, exp: Experiment | Recipe, index: int = 0, runners: int = 1) -> Recipe:
        """Runner `index` of several that have the experiment's sampler each: its slots follow those of the others.

        A recipe stays as it is. Raises ConfigError for anything else.
        """
        if isinstance(exp, Recipe):
            return exp
        if not isinstance(exp, Experiment):
            raise ConfigError(
                f"runners are made from {exp!r}; expected an experiment, e.g. "
                'ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=64, B=8))'
            )
        B = exp.sampler_settings.spec.B
        return cls(exp.sampler_settings, exp.env_config, exp.run.seed, exp.algo, index * B, runners * B, exp.run.steps)


class TrainsFor(NamedTuple):
    """The batches of the other runners that a policy is to train on."""

    spec: EnvSpec
    info_keys: tuple[str, ...]
    batch: BatchSpec


class EnvRunner:
    """A live sampler for the slots of one runner, with an agent whose weights are set from outside.

    `sample()` and `learn_on_batch()` serve loops of one's own; a group calls `fill`, and its driver accounts for the
    rows.

    Args:
        made_from: an experiment, or its parts. index: of this runner among `runners` that have the experiment's
            sampler each.
        group: the batches that its policy is to train on, if they are of others; it then makes environments of its own
            only if it is asked to sample or to evaluate.

    Raises:
        ConfigError, EnvWorkerError: the environment cannot be made, or does not fit the settings.
    """

    def __init__(
        self, made_from: Experiment | Recipe, index: int = 0, runners: int = 1, *, group: TrainsFor | None = None
    ) -> None:
        self._recipe = Recipe.of(made_from, index, runners)
        self._group = group
        self._made: LiveSampler | None = None
        self._closed = False
        self._policy: Policy | None = None
        self._agent: Agent | None = None
        self._version = -1
        self._itr = 0
        self._episodes = Episodes()
        self._warned: dict[tuple[str, str, int], tuple[int, str]] = {}  # count and last text of each line of code
        self._fresh = True
        if group is None:
            _ = self._live

    # A loop of one's own.

    @property
    def policy(self) -> Policy:
        """The algorithm's policy, built when it is first asked for."""
        if self._policy is None:
            if self._recipe.algo is None:
                raise ConfigError("this runner samples for a learner elsewhere and has no policy of its own")
            group = self._group
            spec = self._live.spec if group is None else group.spec
            policy: Policy = self._recipe.algo.build(spec, seed=self._recipe.seed)
            policy.clock.begin(self._recipe.total_steps)
            if group is None:
                policy.prepare(self._live.batch_spec, self.initialize(policy.agent)["info"])
            else:
                slots = Installed(spec, group.batch, group.info_keys, self._recipe.first_slot, self._recipe.total_slots)
                policy.prepare(group.batch, slots.take(policy.agent)["info"])
                self._agent = policy.agent
            self._policy = policy
        return self._policy

    def sample(self) -> SampleBatch | MultiAgentBatch:
        """Returns the next fragment: a batch [T, B] of this runner's slots, which the caller may keep."""
        if self._agent is None:
            _ = self.policy
        batch, episodes = self._live.obtain_samples(self._itr, max(self._version, 0))
        self._itr += 1
        self._episodes = join_episodes([self._episodes, episodes])
        return batch.copy()

    def learn_on_batch(self, batch: SampleBatch) -> ResultDict:
        """Trains this runner's policy on a batch of fragments: `ps.train_one_step`. Returns its metrics."""
        result = train_one_step(self.policy, batch)
        self._version += 1
        return result

    def get_metrics(self) -> ResultDict:
        """Returns the statistics of the episodes that ended since the last call, and the sampler's own metrics."""
        episodes, self._episodes = self._episodes, Episodes()
        return {**episodes.metrics(), **self._live.metrics()}

    def get_weights(self) -> dict[str, np.ndarray[Any, Any]]:
        """Returns copies of all parameters and buffers of the agent, by name."""
        return {name: x.detach().cpu().numpy().copy() for name, x in parameters_of(self._acting).items()}

    def set_weights(self, weights: Mapping[str, np.ndarray[Any, Any]], version: int | None = None) -> None:
        """Sets parameters and buffers by name, as `get_weights` of another runner returned them.

        Raises:
            ConfigError: a name or shape differs.
        """
        own = parameters_of(self._acting)
        if set(own) != set(weights):
            odd = sorted(set(own) ^ set(weights))[0]
            raise ConfigError(
                f"set_weights got {len(weights)} arrays, this agent has {len(own)}; {odd!r} is not in both: build "
                "driver and runners from the same settings"
            )
        for name, x in own.items():
            if tuple(x.shape) != tuple(weights[name].shape):
                raise ConfigError(
                    f"set_weights got {name} of shape {tuple(weights[name].shape)}; this agent's has {tuple(x.shape)}"
                )
        with torch.no_grad():
            for name, x in own.items():
                x.copy_(torch.from_numpy(np.array(weights[name])))
        self._version = self._version + 1 if version is None else version

    def get_state(self) -> dict[str, Any]:
        """Returns everything between two fragments: counters, and [n] uint8 with the rest, replay included."""
        held: dict[str, Any] = {"policy": None, "arrays": {}, "sampler": None}
        if self._policy is not None:
            held |= {"policy": self._policy.state_dict(), "arrays": dict(self._policy.arrays())}
        if self._agent is not None:
            held["sampler"] = self._live.state_dict()
        file = io.BytesIO()
        torch.save(encode(held), file)
        return {"itr": self._itr, "version": self._version, "state": np.frombuffer(file.getvalue(), np.uint8)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `get_state`, for a runner of the same experiment and place.

        Raises:
            CheckpointError: it is of another experiment.
        """
        held = decode(torch.load(io.BytesIO(bytes(state["state"])), weights_only=True))
        self._itr, self._version = state["itr"], state["version"]
        if held["policy"] is not None:
            self.policy.load_state_dict(held["policy"], held["arrays"])
        if held["sampler"] is not None:
            _ = self._acting
            self._live.load_state_dict(held["sampler"])

    def evaluate(
        self,
        itr: int = 0,
        episodes: int = 20,
        deterministic: bool = True,
        slots: int = EVAL_SLOTS,
        max_steps: int = EVAL_MAX_STEPS,
    ) -> dict[str, Any]:
        """Plays episodes in environments of their own: `Sampler.evaluate_agent`. Returns `Episodes.to_plain()`."""
        _ = self._acting
        return self._live.evaluate_agent(itr, episodes, deterministic, slots=slots, max_steps=max_steps).to_plain()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(self, *args)`."""
        return function(self, *args)

    def ping(self) -> int:
        """Returns the process number."""
        return os.getpid()

    def close(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._closed = True
        if self._made is not None:
            self._made.shutdown()

    # What a group calls.

    def describe(self) -> dict[str, Any]:
        """Returns the spaces, and what must be equal on driver and runners."""
        return {
            "spec": self._live.spec.to_plain(),
            "info_keys": list(self._live.info_keys),
            "evaluation_slots": self._live.pool.evaluation_slots(1),
            "versions": versions(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }

    def initialize(self, agent: Agent) -> dict[str, Any]:
        """Takes the agent that will act; returns examples of one step, as `Sampler.initialize`."""
        live, self._agent = self._live, agent
        given: Any = agent
        if isinstance(agent, nn.ModuleList):  # those of all policies
            given = dict(zip(live.specs, given))
        return live.initialize(given)

    def install(self, agent: Any) -> None:
        """Takes a copy of the driver's agent as `pack_agent` returned it."""
        self.initialize(cloudpickle.loads(b"".join(agent) if isinstance(agent, list) else agent))

    def take_weights(self, weights: Any, version: int) -> None:
        """Takes weights as `pack_parameters` returned them, by way of `Backend.put`."""
        unpack_parameters(weights, self._acting)
        self._version = version

    def sample_with(self, weights: Any, version: int) -> SampleBatch | MultiAgentBatch:
        """`take_weights`, then `sample`."""
        self.take_weights(weights, version)
        return self.sample()

    def fill(self, itr: int, version: int, weights: Any) -> dict[str, Any]:
        """Collects fragment `itr` with the weights of a version, which are taken over unless they are here already.

        Returns:
            rows: the leaves of the batch. warmup: of the first fragment, the random steps before it. metrics, sample_s:
            of the sampler, and seconds of work. warnings: of the environment's, as `_new` chooses them. span:
            begin and end in ns of this machine's clock, or None if this process notes what it does in a trace.
        """
        begun = time.perf_counter_ns()
        if version != self._version:
            unpack_parameters(weights, self._acting)
            self._version = version
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            batch = self._live.fill(itr, version)
        warmup, self._fresh = self._live.pool.warmup() if self._fresh else None, False
        rows, now = self._packed(batch, self._live.pool), time.perf_counter_ns()
        return {
            "rows": rows,
            "warmup": warmup,
            "metrics": self._live.metrics(),
            "warnings": self._new(caught),
            "sample_s": (now - begun) / 1e9,
            "span": [begun, now] if trace.ring is None else None,
        }

    def pool_state(self) -> dict[str, Any]:
        """Returns the state of every slot between two fragments, and the agent's recurrent states [B, ...]."""
        return {"pool": self._live.pool.get_state().to_plain(), "agent_states": self._live.agent_states()}

    def go_on(
        self,
        row: dict[str, Tree],
        agent_states: Tree,
        pool: dict[str, Any],
        episodes: Sequence[Sequence[Any] | None],
    ) -> list[int]:
        """Makes the next fragment follow this row; returns the slots, counted from the runner's, that were cut.

        Args:
            agent_states: [B, ...], None for those before an episode. pool: `PoolState.to_plain()`.
        """
        self._fresh, self._version = False, -1  # weights of an equal version may be others in what goes on
        known = [None if x is None else OpenEpisode(*x) for x in episodes]
        return self._live.go_on(row, agent_states, PoolState.from_plain(pool), known)

    def open_evaluation(
        self, B: int, first_slot: int, seed: int, episodes: list[int], max_steps: int | None = None
    ) -> None:
        """Begins an evaluation with B of its slots: each plays so many episodes.

        Args:
            max_steps: after which an episode of many agents is cut; those of one agent the driver cuts.
        """
        own = self._live.evaluation_buffers(B, first_slot)
        if max_steps is not None:
            own.pool.limit(max_steps)
        own.pool.restart(seed, episodes)
        own.set_states(None)
        self._evaluated = first_slot

    def fill_evaluation(self, noise: Sequence[int] | None, weights: Any) -> bytes | list[np.ndarray[Any, Any]]:
        """Collects the next rows of the evaluation that was opened; returns the leaves of the batch.

        Args:
            noise: seed, purpose and batch; None acts without. weights: of the agent to evaluate, None: as before.
        """
        if weights is not None:
            unpack_parameters(weights, self._acting)
            self._version = -1  # the next fragment brings its own
        address = None if noise is None else Noise(noise[0], Purpose(noise[1]), noise[2], self._evaluated)
        batch = self._live.fill_evaluation(address)
        return self._packed(batch, self._live.evaluation_pool)

    def _packed(self, batch: Any, pool: EnvPool) -> bytes | list[np.ndarray[Any, Any]]:
        """The leaves of a batch, of many agents of every policy's, and then of the log."""
        return pack_rows([*batch.values(), pool.log] if isinstance(batch, MultiAgentBatch) else batch)

    @property
    def _live(self) -> LiveSampler:
        """The sampler, made when it is first asked for."""
        if self._closed:
            raise ConfigError("the runner was closed; make another")
        if self._made is None:
            recipe = self._recipe
            live = recipe.sampler.build(
                as_env_config(recipe.env), recipe.seed, first_slot=recipe.first_slot, total_slots=recipe.total_slots
            )
            if not isinstance(live, LiveSampler):
                live.shutdown()
                raise ConfigError(
                    f"a runner with sampler {type(recipe.sampler).__name__}; expected a synchronous one, e.g. "
                    "ps.CpuSampler(T=128, B=16, workers=2): rounds ahead are the group's `depth`"
                )
            if live.pool.device is not None:
                live.shutdown()
                raise ConfigError(
                    f"{recipe.env.name} answers with tensors on {live.pool.device}, which do not leave their process; "
                    "use ps.SerialSampler in place of runners"
                )
            self._made = live
            if self._agent is not None:
                self._made = live
                self.initialize(self._agent)
        return self._made

    @property
    def _acting(self) -> Agent:
        """The agent; that of the runner's own policy if none was given."""
        if self._agent is None:
            _ = self.policy
        assert self._agent is not None
        return self._agent

    def _new(self, caught: list[warnings.WarningMessage]) -> list[str]:
        """The warnings to show: of each line of code the first, and of other texts of it the 10th, 100th and so on."""
        shown: list[str] = []
        for w in caught:
            place, text = (w.category.__name__, w.filename, w.lineno), str(w.message)
            count, before = self._warned.get(place, (0, ""))
            if count and text == before:
                continue
            count += 1
            self._warned[place] = count, text
            if count == 1:
                shown.append(text)
            elif str(count).rstrip("0") == "1":
                shown.append(f"{text} (number {count:,} of {w.category.__name__}s from {w.filename}:{w.lineno})")
        return shown


class ShippedRunner(EnvRunner):
    """An EnvRunner of another process, made from what `shipped` returned.

    Args:
        path: the driver's import path, of which the parts that exist here are added: unpickling may need them.
        payload: pickled Recipe, and the environment's entry in Gymnasium's registry.
    """

    def __init__(self, path: list[str], payload: bytes) -> None:
        sys.path += [entry for entry in path if entry not in sys.path and os.path.exists(entry)]
        torch.set_num_threads(1)
        recipe, entry = cloudpickle.loads(payload)
        take_shipped(entry)
        trace.enter(f"runner {recipe.first_slot // recipe.sampler.spec.B}")
        super().__init__(recipe)


def shipped(recipe: Recipe) -> tuple[list[str], bytes]:
    """The arguments of a ShippedRunner.

    Raises:
        ConfigError: the environment or the algorithm cannot be pickled.
    """
    try:
        return list(sys.path), cloudpickle.dumps((recipe, entry_to_ship(recipe.env.name)))
    except Exception as error:
        raise ConfigError(
            f"{recipe.env.name} or its settings cannot be sent to a runner ({type(error).__name__}: {error}); give the "
            "environment as 'module:function', or make what it holds open inside that function"
        ) from error


def versions() -> dict[str, str]:
    """The versions of what a driver and its runners must share for equal batches."""
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "penstock": VERSION,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "gymnasium": str(gym.__version__),
    }
