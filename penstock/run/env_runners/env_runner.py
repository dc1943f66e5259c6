"""EnvRunner: a sampler and the policy or policies of an experiment, for loops of one's own. A plain class."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.agents.parameters import parameters_of
from penstock.core.batch import AnyBatch
from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree
from penstock.envs.pools.calls import from_plain
from penstock.envs.pools.pool import Ints, PoolState
from penstock.learn.algorithm import ResultDict
from penstock.learn.policy import Policy
from penstock.learn.policy_set import LoadedPolicy, by_id, trained_policies
from penstock.learn.train_ops import train_one_step
from penstock.run.checkpoints.state_codec import decode, encode
from penstock.run.experiment import Experiment
from penstock.run.plan import Plan
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.runners.agent_bytes import together
from penstock.samplers.runners.runner import Runner
from penstock.samplers.runners.share import received
from penstock.samplers.trackers.envs import Envs
from penstock.samplers.trackers.evaluation import EVAL_MAX_STEPS, EVAL_SLOTS

Weights = Mapping[str, np.ndarray[Any, Any]] | Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
"""Arrays by name of one policy, or of several by policy id."""


class EnvRunner:
    """A live sampler for the slots of one runner, and the experiment's policies, which act there and can be trained.

    Environments of many agents are seated as `ps.Trainer` does.

    Args:
        made_from: an experiment, or its plan. index: of this runner among `runners` that have its sampler each.
        trains_on: T and B of the batches that its policies are to be trained on, where they are other runners'; it then
            makes environments of its own only if it is asked to sample or to evaluate.

    Raises:
        ConfigError, EnvWorkerError: the environment cannot be made, or does not fit the settings.
    """

    def __init__(
        self,
        made_from: Experiment | Plan | bytes,
        index: int = 0,
        runners: int = 1,
        *,
        trains_on: BatchSpec | None = None,
    ) -> None:
        if isinstance(made_from, bytes):
            plan: Plan = received(made_from)
        else:
            if not all(isinstance(x, int) for x in (index, runners)) or not 0 <= index < runners:
                raise ConfigError(f"EnvRunner index={index!r} of runners={runners!r}; expected 0 <= index < runners")
            plan = Plan.of(made_from).among(runners)[index]
        self._plan = plan
        self._trains_on = plan.fragment if trains_on is None else trains_on
        self._runner: Runner | None = None
        self._closed = False
        self._policy: LoadedPolicy | None = None
        self._itr = 0
        self._version = -1
        self._episodes = Episodes()
        if trains_on is None:
            _ = self._playing

    @property
    def policy(self) -> LoadedPolicy:
        """The algorithm's policy, of many agents the PolicySet; built when it is first asked for."""
        if self._policy is None:
            plan = self._plan
            policy: LoadedPolicy = plan.build_policy("cpu")
            for one in by_id(policy).values():
                one.clock.begin(plan.exp.run.steps)
                if one not in trained_policies(policy).values():
                    one.act_only()
            policy.prepare(self._trains_on, plan.infos(plan.acting(self._trains_on, policy)[1]))
            self._policy = policy
        return self._policy

    @property
    def agent(self) -> Agent:
        """The policy's agent; of several a module list, in the order of the environment's seats."""
        policies = by_id(self.policy)
        return together([policies[name].agent for name in self._plan.seating.policies])

    @property
    def envs(self) -> Envs:
        """This runner's environments, to call their methods and read or set their attributes; see `Envs`."""
        return self._acting.live.envs

    def call_envs(self, call: tuple[Any, ...], slots: list[int]) -> list[tuple[Any, ...]]:
        """Executes a call in these of its slots; see `Runner.call_envs`."""
        return self._acting.call_envs(call, slots)

    def recall(self, calls: Sequence[Sequence[Sequence[Any]]]) -> None:
        """Repeats the calls of each slot in environments that have had none yet."""
        self._acting.recall(calls)

    def sample(self) -> AnyBatch:
        """Returns the next fragment: a batch [T, B] of this runner's slots, which the caller may keep."""
        batch, episodes = self._acting.live.obtain_samples(self._itr, max(self._version, 0))
        self._itr += 1
        self._episodes = join_episodes([self._episodes, episodes])
        return batch.copy()

    def sample_counted(self, weights: Any = None, version: int = -1) -> tuple[AnyBatch, Ints]:
        """`sample`, after `take_weights` if any are given, and the newest episodes as `Source.newest_episodes`."""
        if weights is not None:
            self.take_weights(weights, version)
        return self.sample(), self._acting.live.pool.newest_episodes()

    def learn_on_batch(self, batch: AnyBatch) -> ResultDict:
        """Trains this runner's policies on a batch of fragments: `ps.train_one_step`. Returns the metrics."""
        result = train_one_step(self.policy, batch)
        self._version += 1
        return result

    def get_metrics(self) -> ResultDict:
        """Returns the statistics of the episodes that ended since the last call, and the sampler's own metrics."""
        episodes, self._episodes = self._episodes, Episodes()
        return {**episodes.metrics(), **self._playing.live.metrics()}

    def get_weights(self, policies: str | Sequence[str] | None = None) -> dict[str, Any]:
        """Returns copies of all parameters and buffers of the agents.

        Args:
            policies: ids of some of several policies. One id, or a runner that has one policy: arrays by name; else
                such by policy id.

        Raises:
            ConfigError: there is no policy of this id.
        """
        if isinstance(policies, str):
            return _arrays(self._one(policies).agent)
        if policies is None:
            policies = list(by_id(self.policy))
            if len(policies) == 1:
                return _arrays(self.policy.agent)
        return {name: _arrays(self._one(name).agent) for name in policies}

    def set_weights(self, weights: Weights, version: int | None = None) -> None:
        """Sets parameters and buffers, as `get_weights` of another runner returned them; policies left out stay.

        Raises:
            ConfigError: a name or shape differs, or a value is no array of real numbers; nothing is set then.
        """
        if not isinstance(weights, Mapping) or not (version is None or isinstance(version, int)):
            raise ConfigError(
                f"set_weights got {type(weights).__name__}, version={version!r}; expected the arrays by name that "
                "get_weights() returns, and a whole number or None"
            )
        by_policy = any(isinstance(x, Mapping) for x in weights.values())
        given: Mapping[str, Any] = weights if by_policy else {"": weights}
        if not by_policy and len(ids := list(by_id(self.policy))) > 1:
            raise ConfigError(
                f"set_weights got arrays by name for the policies {ids}; expected them by policy id, "
                "{id: {name: array}}, as get_weights() returns them"
            )
        pairs = [(self._one(name).agent if name else self.policy.agent, arrays) for name, arrays in given.items()]
        fitting = [(agent, _fitting(agent, arrays)) for agent, arrays in pairs]
        with torch.no_grad():
            for agent, tensors in fitting:
                for name, x in parameters_of(agent).items():
                    x.copy_(tensors[name])
        self._version = self._version + 1 if version is None else version

    def get_state(self) -> dict[str, Any]:
        """Returns everything between two fragments: counters, and [n] uint8 with the rest, replay included."""
        held: dict[str, Any] = {"policy": None, "arrays": {}, "sampler": None}
        if self._policy is not None:
            arrays = {name: np.asarray(x) for name, x in self._policy.arrays().items()}  # some lie elsewhere
            held |= {"policy": self._policy.state_dict(), "arrays": arrays}
            if self._runner is not None:
                held["sampler"] = self._acting.live.state_dict()
        return {"itr": self._itr, "version": self._version, "state": np.frombuffer(encode(held), np.uint8)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what `get_state` of a runner of the same experiment and place returned.

        Raises:
            CheckpointError: it is of another experiment, or damaged.
        """
        try:
            itr, version, held = int(state["itr"]), int(state["version"]), decode(bytes(state["state"]))
        except (LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"this is no state of an EnvRunner's get_state(), or is damaged: {error}") from error
        if held["policy"] is not None:
            self.policy.load_state_dict(held["policy"], held["arrays"])
        if held["sampler"] is not None:
            self._acting.live.load_state_dict(held["sampler"])
        self._itr, self._version = itr, version

    def evaluate(
        self,
        itr: int = 0,
        episodes: int = 20,
        deterministic: bool = True,
        slots: int = EVAL_SLOTS,
        max_steps: int = EVAL_MAX_STEPS,
    ) -> dict[str, Any]:
        """Plays episodes in environments of their own: `Sampler.evaluate_agent`. Returns `Episodes.to_plain()`."""
        live = self._acting.live
        return live.evaluate_agent(itr, episodes, deterministic, slots=slots, max_steps=max_steps).to_plain()

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Returns `function(self, *args)`."""
        return function(self, *args)

    def ping(self) -> int:
        """Returns the process number."""
        return os.getpid()

    def close(self) -> None:
        """Closes the environments. A second call does nothing."""
        self._closed = True
        if self._runner is not None:
            self._runner.close()

    def describe(self) -> dict[str, Any]:
        """Returns the spaces, and what must be equal on a group and its workers; see `Runner.describe`."""
        return self._playing.describe()

    def take_weights(self, weights: Any, version: int) -> None:
        """Takes weights as `pack_parameters` returned them, by way of `Backend.put`."""
        self._acting.take_weights(weights, version)
        self._version = version

    def follow(
        self,
        rows: Mapping[str, dict[str, Tree]],
        itr: int,
        episodes: list[int],
        calls: Sequence[Sequence[Sequence[Any]]] = (),
    ) -> None:
        """Makes the next fragment follow these last rows of a lost runner: every slot resets into a new episode.

        Args:
            rows: as `last_row` returns them, by policy id. itr: number of the fragment. episodes: of each slot the
                newest that may have begun; the next one has the number after. calls: that its environment has had.
        """
        state = PoolState.resetting(episodes, calls=from_plain(calls))
        self._acting.live.resume(rows, None, state, [None] * len(episodes))
        self._itr = itr

    @property
    def _playing(self) -> Runner:
        """The sampler, made when it is first asked for."""
        if self._closed:
            raise ConfigError("the runner was closed; make another")
        if self._runner is None:
            self._runner = Runner(self._plan)
        return self._runner

    @property
    def _acting(self) -> Runner:
        """The sampler with this runner's agents in it."""
        if not (runner := self._playing).acts:
            runner.initialize(self.agent)
        return runner

    def _one(self, name: str) -> Policy:
        """The policy of an id. Raises ConfigError for an unknown id."""
        known = by_id(self.policy)
        if name not in known:
            raise ConfigError(f"no policy {name!r} here; {nearest(str(name), known)}")
        return known[name]


def _arrays(agent: Agent) -> dict[str, np.ndarray[Any, Any]]:
    return {name: x.detach().cpu().numpy().copy() for name, x in parameters_of(agent).items()}


def _fitting(agent: Agent, weights: Any) -> dict[str, Tensor]:
    """The weights as tensors. Raises ConfigError where names, shapes or kinds differ from the agent's."""
    if not isinstance(weights, Mapping):
        raise ConfigError(f"set_weights got {type(weights).__name__} for an agent; expected arrays by name")
    own = parameters_of(agent)
    if set(own) != set(weights):
        odd = sorted(map(str, set(own) ^ set(weights)))[0]
        raise ConfigError(
            f"set_weights got {len(weights)} arrays, this agent has {len(own)}; {odd!r} is not in both: build "
            "driver and runners from the same settings"
        )
    tensors: dict[str, Tensor] = {}
    for name, x in own.items():
        array = np.asarray(weights[name])
        if array.shape != tuple(x.shape) or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"set_weights got {name} of shape {array.shape}, dtype {array.dtype}; this agent's has "
                f"{tuple(x.shape)}, real numbers"
            )
        tensors[name] = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    return tensors
