"""PolicySet: the live policies of a run by id, with the members by which a Trainer drives one Policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.agents.agent import Agent
from penstock.core.batch import AnyBatch, MultiAgentBatch, SampleBatch
from penstock.core.errors import CheckpointError, ConfigError, nearest
from penstock.core.machine import counted
from penstock.core.spec import SHARED, BatchSpec, EnvSpec, Specs
from penstock.core.tree import Tree
from penstock.envs.make import EnvConfig
from penstock.envs.seats import AgentSpecs, PolicyMap
from penstock.learn.comm import SINGLE, Comm
from penstock.learn.export.files import folder_form
from penstock.learn.policy import Policy
from penstock.learn.policy_file import save_policy
from penstock.learn.rows.kept import KeptRows
from penstock.learn.slot_partition import SlotPartition


class PolicySet(Mapping[str, Policy]):
    """The policies of a run by id, each with its own agent, optimizers and replay.

    Built by `penstock.Policies.build`; `train_one_step` trains those of `trained` on a MultiAgentBatch. With one policy
    states and parameters have the names of a plain Policy's; with several they begin with `id/`.

    Args:
        trained: ids of the policies that learn; the others act as at the end of their schedules.
        one_agent: the environment has a single agent, so its sampler fills a SampleBatch.
        settings: the settings that assign policies to agents, with `seat` and `policy_mapping_fn` as
            `penstock.Policies` has them; None if unknown.
    """

    def __init__(
        self,
        policies: Mapping[str, Policy],
        trained: Sequence[str],
        *,
        one_agent: bool = False,
        settings: Any = None,
    ) -> None:
        self._policies = dict(policies)
        self.trained: dict[str, Policy] = {name: self._policies[name] for name in policies if name in trained}
        """Those that learn, in their order."""
        self._one_agent, self.settings = one_agent, settings
        self._mapping: PolicyMap | None = getattr(settings, "policy_mapping_fn", None)
        least: Mapping[str, int] = getattr(settings, "min_rows", {})
        self.kept = {name: KeptRows(rows) for name, rows in least.items()}
        """The rows that policies with `min_rows` have not trained on yet."""
        self._told_of_rows: set[str] = set()
        self.comm: Comm = SINGLE
        """The learners that train them together; `join` sets it."""
        for name, policy in self.items():
            policy.counts_rows = name in self.kept
            if name not in self.trained:
                policy.act_only()

    def __getitem__(self, name: str) -> Policy:
        if name not in self._policies:
            raise ConfigError(f"no policy {name!r} in this PolicySet; {nearest(str(name), self._policies)}")
        return self._policies[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._policies)

    def __contains__(self, name: object) -> bool:
        return name in self._policies

    def __len__(self) -> int:
        return len(self._policies)

    def __repr__(self) -> str:
        said = (f"{name!r}: {type(policy.settings).__name__}" for name, policy in self.items())
        idle = [name for name in self if name not in self.trained]
        return f"PolicySet({', '.join(said)}{f'; not trained: {idle}' if idle else ''})"

    @property
    def agents(self) -> Any:
        """{id: Agent} for `sampler.initialize`; of an environment of one agent its Agent."""
        return self.agent if self._one_agent else {name: policy.agent for name, policy in self.items()}

    @property
    def specs(self) -> Specs:
        """{id: EnvSpec} that the policies were built for; of an environment of one agent its EnvSpec."""
        return self.spec if self._one_agent else {name: policy.spec for name, policy in self.items()}

    @property
    def agent(self) -> Agent:
        """The agent of the one policy. Raises ConfigError if there are several."""
        return self._only("agent").agent

    @property
    def spec(self) -> EnvSpec:
        """The spec of the one policy. Raises ConfigError if there are several."""
        return self._only("spec").spec

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self._first.device

    @property
    def recurrent(self) -> bool:
        """True if `predict` of some policy returns a pair with the new state."""
        return any(policy.recurrent for policy in self.values())

    @property
    def partition(self) -> SlotPartition | None:
        """Columns of the first policy, None for one learner."""
        return self._first.partition

    @property
    def version(self) -> int:
        """Training steps finished."""
        return next(iter(self.trained.values())).version

    @property
    def updates(self) -> int:
        """Gradient steps taken, of all policies."""
        return sum(policy.updates for policy in self.values())

    @property
    def skipped(self) -> int:
        """Gradient steps refused, of all policies."""
        return sum(policy.skipped for policy in self.values())

    def predict(self, obs: Tree, state: Tree = None, *, agent: str | None = None, **how: Any) -> Any:
        """The action of an agent: `Policy.predict` of the policy that plays it in episode 0; in self-play, of main.

        Args:
            obs, state, how: as in `Policy.predict`.
            agent: its name in the environment; None where one policy plays all, or in self-play.

        Raises:
            ConfigError: several policies and no agent, or one that the mapping does not name.
        """
        return self.playing(agent).predict(obs, state, **how)

    def playing(self, agent: str | None, episode: int = 0, seed: int = 0) -> Policy:
        """The policy that plays an agent in an episode. Raises ConfigError as `predict`."""
        if len(self) == 1:
            return self._first
        if self._deals_itself:
            return self._main
        if agent is None or self._mapping is None:
            how = (
                "the run's policy_mapping_fn could not be stored (a lambda, or of a script); give it again, "
                "ps.load(run, policy_mapping_fn=...)"
                if self._mapping is None
                else "name the agent, predict(obs, agent='player_0')"
            )
            raise ConfigError(f"there are the policies {list(self)}: {how}, or take one, policies[id].predict(obs)")
        if not isinstance(self._mapping, Mapping):
            return self[self._mapping(agent, episode, seed)]
        if agent not in self._mapping:
            raise ConfigError(f"no agent {agent!r} in policy_mapping_fn; {nearest(agent, self._mapping)}")
        return self[self._mapping[agent]]

    @property
    def _deals_itself(self) -> bool:
        """True if the settings deal agents out to policies themselves, as those of self-play."""
        return self.settings is not None and not hasattr(self.settings, "policy_mapping_fn")

    @property
    def _main(self) -> Policy:
        return next(iter(self.trained.values()))

    def seat(self, env: Any, agents: AgentSpecs | None = None) -> EnvConfig:
        """The environment with a seat for every agent, as in `penstock.Policies.seat`."""
        if self.settings is None:
            raise ConfigError("a PolicySet without settings, which say who plays whom; build it by ps.Policies")
        return self.settings.seat(env, agents)

    def set_progress(self, progress: float, env_steps: int = 0) -> None:
        """Like `Policy.set_progress`; a policy that is not trained explores as at the end of a run."""
        for name, policy in self.items():
            if name in self.trained:
                policy.set_progress(progress, env_steps)
            else:
                policy.act_only()

    def taking_settings_of(self, twin: PolicySet) -> Callable[[], None]:
        """Like `Policy.taking_settings_of`, for each policy."""
        each = [policy.taking_settings_of(twin[name]) for name, policy in self.items()]

        def take() -> None:
            self.settings = twin.settings
            for of_one in each:
                of_one()

        return take

    def prepare(self, batch: BatchSpec, info: Tree = None) -> None:
        """Like `Policy.prepare`, for batches of `batch.B` environments.

        Args:
            info: {id: example of the info of a row}; for an environment of one agent the example itself.
        """
        for name, policy in self.trained.items():
            info_of_policy = info if self._one_agent or info is None else info[name]
            slots = batch.B * policy.spec.agents
            policy.prepare(BatchSpec(batch.T, slots), info_of_policy)
            if name in self.kept:
                self.kept[name].slots = slots

    def batches(self, batch: AnyBatch) -> dict[str, SampleBatch]:
        """The batch of each policy that is trained. Raises ConfigError if there is none."""
        if isinstance(batch, MultiAgentBatch):
            return {name: batch[name] for name in self.trained}
        if len(self) > 1 or not isinstance(batch, SampleBatch):
            raise ConfigError(
                f"train_one_step got {type(batch).__name__} for the policies {list(self)}; expected the "
                "MultiAgentBatch of a sampler that was built for Policies.seat(env)"
            )
        return dict.fromkeys(self.trained, batch)

    def rows_due(self, name: str, batch: SampleBatch) -> SampleBatch | None:
        """The rows that a policy is to train on after its own batch; None while it keeps them, as `min_rows` asks."""
        if name in self.kept:
            return self.kept[name].whole(self[name], batch)
        self._look_at_rows(name, batch)
        return batch

    def _look_at_rows(self, name: str, batch: SampleBatch) -> None:
        """Warns, once a policy, of a batch of which less than a quarter is valid, fewer rows than a minibatch."""
        policy = self[name]
        size = policy.minibatch
        if len(self) == 1 or name in self._told_of_rows or size is None or policy.replay_schedule is not None:
            return
        rows, places = policy.of_all(batch.env_steps), policy.of_all(batch.valid.size)
        if rows >= size or 4 * rows >= places:
            return
        self._told_of_rows.add(name)
        if policy.comm.rank == 0:
            cure = "use a larger sampler.T or sampler.B"
            if hasattr(self.settings, "min_rows"):
                wait = (
                    f"min_rows={{{name!r}: {size}}} (--algo.min-rows.{name} {size}) has it wait until there are so many"
                )
                cure = f"{wait}; or {cure}"
            warnings.warn(
                f"policy {name!r} has {counted(rows, 'row')} in a batch with room for {places}, and its minibatch is "
                f"{size}: its gradients are means over few rows; {cure}",
                stacklevel=5,
            )

    def join(self, comm: Comm) -> None:
        """Like `Policy.join`, for each policy."""
        for name, policy in self.items():
            try:
                policy.join(comm)
            except ConfigError as error:
                raise ConfigError(f"policy {name!r}: {error}") from error
        self.comm = comm

    def save(self, path: str | Path) -> Path:
        """Like `Policy.save`, for all policies. Raises ConfigError for a PolicySet without settings, too."""
        if self.settings is None:
            raise ConfigError("policies.save of a PolicySet without settings; save each one: policies[id].save(path)")
        return save_policy(path, self.settings, self.specs, self._first.seed, self.parameters())

    def export(self, path: str | Path, to: str | None = None, metadata: Mapping[str, Any] | None = None) -> Path:
        """Like `Policy.export`, in self-play of main; of several policies each as `ID.onnx` in the folder `path`.

        Raises:
            ConfigError: as of `Policy.export`, with the policy's id; several policies, and a file or no format.
        """
        if len(self) == 1 or self._deals_itself:
            return (self._first if len(self) == 1 else self._main).export(path, to, metadata)
        form = folder_form(Path(path), to, list(self))
        for name, policy in self.items():
            try:
                policy.export(Path(path) / f"{name}.{form}", form, metadata)
            except ConfigError as error:
                raise ConfigError(f"policy {name!r}: {error}") from error
        return Path(path)

    def parameters(self) -> dict[str, Tensor]:
        """Networks and normalisers of all, for `load_parameters`."""
        return self._joined({name: policy.agent.state_dict() for name, policy in self.items()})

    def state_dict(self) -> dict[str, Any]:
        """Like `Policy.state_dict`."""
        states = {name: policy.state_dict() for name, policy in self.items()}
        for name, kept in self.kept.items():
            states[name]["kept"] = kept.state_dict(self[name])
        agents = self._joined({name: state.pop("agent") for name, state in states.items()})
        return {"agent": agents, **self._joined(states)}

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Like `Policy.arrays`."""
        return self._joined({name: policy.arrays() for name, policy in self.trained.items()})

    def load_state_dict(self, state: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        """Inverse of `state_dict` and `arrays`. Raises CheckpointError if the policies differ."""
        self._require_ids(state["agent"])
        rest = {key: value for key, value in state.items() if key != "agent"}
        agents, states, arrays_of = self._parted(state["agent"]), self._parted(rest), self._parted(arrays or {})
        for name, policy in self.items():
            policy.load_state_dict({**states[name], "agent": agents[name]}, arrays_of[name])
            if name in self.kept and "kept" in states[name]:
                self.kept[name].load_state_dict(states[name]["kept"], policy)

    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Like `Policy.load_parameters`, for all policies. Raises CheckpointError if they do not fit."""
        self._require_ids(parameters)
        for name, tensors in self._parted(parameters).items():
            self[name].load_parameters(tensors)

    @property
    def _first(self) -> Policy:
        return next(iter(self.values()))

    def _only(self, what: str) -> Policy:
        if len(self) > 1:
            raise ConfigError(f"there are the policies {list(self)}, each with its own: policies[id].{what}")
        return self._first

    def _require_ids(self, parameters: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError unless the parameters are of policies with the ids of these."""
        states = {name: policy.agent.state_dict() for name, policy in self.items()}
        ids = {name for name, state in states.items() if state}
        if len(self) == 1 and (not ids or parameters.keys() & states[next(iter(ids))].keys()):
            return
        stored = {key.partition("/")[0] for key in parameters if "/" in key}
        if (len(self) == 1 and not stored) or (len(self) > 1 and stored == ids):
            return
        theirs = f"parameters of the policies {sorted(stored)}" if stored else "parameters of one policy, without ids,"
        raise CheckpointError(
            f"{theirs} are stored, and here are the policies {list(self)}; with other policies start anew, each "
            "from one of another run: init={'a': 'runs/x', 'c': ('runs/y', 'b')} (--init a=runs/x --init c=runs/y:b)"
        )

    def _joined(self, parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The parts of the policies in one; of several policies under `id/key`."""
        if len(self) == 1:
            return dict(next(iter(parts.values()), {}))
        return {f"{name}/{key}": value for name, part in parts.items() for key, value in part.items()}

    def _parted(self, joined: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Inverse of `_joined`."""
        if len(self) == 1:
            return {name: dict(joined) for name in self}
        parts: dict[str, dict[str, Any]] = {name: {} for name in self}
        for key, value in joined.items():
            name, slash, rest = key.partition("/")
            if not slash or name not in parts:
                raise CheckpointError(
                    f"{key!r} is stored, which belongs to none of the policies {list(self)}; is it of a run with "
                    "other policies?"
                )
            parts[name][rest] = value
        return parts


AnyPolicy: TypeAlias = Policy | PolicySet
"""The result of `Algorithm.build`: one Policy, or several by id."""

if TYPE_CHECKING:

    class LoadedPolicy(Policy, Mapping[str, Policy]):
        """Static type of `ps.load`: a Policy, or a PolicySet for many agents; only the user knows which."""

        trained: dict[str, Policy]

        def predict(self, obs: Tree, state: Tree = None, *args: Any, agent: str | None = None, **how: Any) -> Any: ...

else:
    LoadedPolicy = AnyPolicy


def by_id(policy: AnyPolicy) -> Mapping[str, Policy]:
    """All policies by id; a Policy alone is "shared"."""
    return policy if isinstance(policy, PolicySet) else {SHARED: policy}


def trained_policies(policy: AnyPolicy) -> Mapping[str, Policy]:
    """Those that learn, by id; a Policy alone has the id ""."""
    return policy.trained if isinstance(policy, PolicySet) else {"": policy}


def parameters(policy: AnyPolicy) -> dict[str, Tensor]:
    """Networks and normalisers, as `load_parameters` takes them."""
    return policy.parameters() if isinstance(policy, PolicySet) else policy.agent.state_dict()


def agents_of(policy: AnyPolicy) -> Any:
    """Argument of `sampler.initialize`: an Agent, or {id: Agent} for environments of many agents."""
    return policy.agents if isinstance(policy, PolicySet) else policy.agent


def specs_of(policy: AnyPolicy) -> Specs:
    """The spec that a policy was built for, or {id: EnvSpec} for environments of many agents."""
    return policy.specs if isinstance(policy, PolicySet) else policy.spec
