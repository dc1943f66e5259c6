"""DAgger: dataset aggregation; the learner acts, an expert says in every state what it would have done.

Ross, Gordon and Bagnell 2011, "A reduction of imitation learning and structured prediction to no-regret online
learning", arXiv:1011.0686, algorithm 3.1.

The agent acts by the mixture beta pi* + (1 - beta) pi of the paper, step by step, and records the expert's action as
`info["expert"]`; a replay keeps every state visited with it, and BC's loss learns from samples of all of them. Differs
from the paper: the learner goes on from its present parameters instead of being trained anew on each larger dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.agents.networks import Net
from penstock.agents.parameters import parameters_digest
from penstock.algos.bc import loss_fn
from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Bound, Chance, Count, Positive, Rate, Weight, Whole
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.core.tree import Tree, tree_map, tree_paths, tree_structure, tree_unflatten
from penstock.datasets.episode import check_spec
from penstock.learn.optimizers import adam
from penstock.learn.policy import Policy
from penstock.learn.settings import AlgorithmFunctions, OffPolicySettings
from penstock.replay.columns import Array, Rows
from penstock.replay.replay import Replay, ReplaySchedule
from penstock.replay.storage import Storage
from penstock.replay.view import Transitions

_STATE = (
    *("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_state_dict_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Where torch keeps what a module holds, and what it does to it when it is saved or loaded."""


class GuidedAgent(Agent):
    """A learner that an expert guides: one of them acts, and `info["expert"]` is the expert's action.

    Its modules, parameters, buffers and hooks of their state are the learner's own dicts, so that a checkpoint holds
    what one of BC holds: what moves, loads or syncs either does so to both, and copies share theirs. The expert is none
    of them: it never changes, and travels to workers with the agent. Without noise the learner acts alone.

    Args:
        learner: an agent without memory.
    """

    learner: Agent
    """Learns, and acts in evaluations."""
    expert: Agent | None
    """Acts deterministically, with a memory of its own if it has one; None in a policy that is only to act."""
    beta: Tensor
    """Chance that the expert acts."""
    taught: Tensor
    """True once the learner's own process has the expert; a worker is told with the parameters."""

    def __init__(self, learner: Agent) -> None:
        super().__init__()
        own = self.__dict__  # past Module's __setattr__, which would register both as modules of their own
        own["learner"], own["expert"] = learner, None
        own.update({kind: vars(learner)[kind] for kind in _STATE})
        self.register_buffer("beta", torch.zeros(()), persistent=False)
        self.register_buffer("taught", torch.zeros((), dtype=torch.bool), persistent=False)
        self.spec, self.fed, self.unseen = learner.spec, learner.fed, learner.unseen
        self.preparation, self.held_noise, self.env_ranks = learner.preparation, learner.held_noise, learner.env_ranks
        self.is_noisy = type(learner).renew_noise is not Agent.renew_noise and learner.is_noisy
        self._inner_noise = learner.noise_size
        self.noise_size = learner.noise_size + 1

    def initial_state(self, B: int) -> Tree:
        return None if self.expert is None else self.expert.initial_state(B)

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        learner = self.learner
        if noise is None or self.expert is None:
            if noise is not None and self.taught:
                raise ConfigError(
                    "DAgger was taught after sampler.initialize, so that workers have no expert; expected before it: "
                    "algo.teach(policy, expert), then sampler.initialize(policy.agent)"
                )
            inner = None if noise is None else self._noise_of(noise)
            action, info, _ = learner.act(inputs, None, inner)
            return action, {**info, "expert": tree_map(torch.zeros_like, action)}, state
        label, _, state = self.expert.act(inputs, state, None)
        action, info, _ = learner.act(inputs, None, self._noise_of(noise))
        label = tree_map(lambda x, y: x.to(y.dtype), label, action)
        guided = noise[:, self._inner_noise - int(self.env_ranks)] < self.beta

        def chosen(x: Tensor, y: Tensor) -> Tensor:
            return torch.where(guided.reshape(-1, *[1] * (x.ndim - 1)), x, y)

        return tree_map(chosen, label, action), {**info, "expert": label}, state

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        return self.learner(inputs, None)

    def _noise_of(self, noise: Tensor) -> Tensor:
        """The learner's part of the noise: all but the number that says who acts."""
        at = self._inner_noise - int(self.env_ranks)
        return torch.cat((noise[:, :at], noise[:, at + 1 :]), 1)

    def needed(self, inputs: Inputs) -> Inputs:
        return self.learner.needed(inputs)

    def observe(self, batch: SampleBatch) -> None:
        self.learner.observe(batch)

    def terminal(self, batch: SampleBatch) -> Tensor:
        return self.learner.terminal(batch)

    def norm_groups(self) -> Mapping[str, Sequence[nn.Module]]:
        return self.learner.norm_groups()

    def exported(self) -> Agent:
        return self.learner.exported()

    def set_slots(self, B: int) -> None:
        self.learner.set_slots(B)
        if self.expert is not None:
            self.expert.set_slots(B)

    def renew_noise(self, rng: np.random.Generator) -> None:
        self.learner.renew_noise(rng)

    def set_exploration(self, settings: DAgger, env_steps: int) -> None:
        self.beta.fill_(settings.beta)
        self.learner.set_exploration(settings, env_steps)

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> GuidedAgent:
        if self.expert is not None:
            self.expert._apply(fn)  # pyright: ignore[reportPrivateUsage]  # as Module does with modules
        return super()._apply(fn, recurse)


class Labels(Transitions):
    """Single rows: the observation, and as `action` what the expert would have done there."""

    def __init__(self, spec: EnvSpec, fed: frozenset[str]) -> None:
        super().__init__(fed=fed)
        self.structure = tree_structure(spec.action)
        self.paths = tuple(tree_paths({"expert": spec.action}))

    def read(self, storage: Storage, t: Rows, b: Rows, noise: Array | None = None) -> TrainBatch:
        labels = [storage.info(path, t, b) for path in self.paths]
        return TrainBatch(
            storage.inputs(storage.places(t, b), self.fed), {"action": tree_unflatten(self.structure, labels)}
        )


def postprocess_fn(agent: GuidedAgent, x: TrainBatch, cfg: DAgger) -> TrainBatch:
    """The sample as it is: the expert's actions are in it already."""
    if agent.expert is None:
        raise ConfigError(
            "DAgger has no expert; name a run, --algo.expert DIR, or in a loop of your own, before "
            "sampler.initialize: algo.teach(policy, ps.load(DIR))"
        )
    return x


optimizer_fn = adam


def replay_fn(agent: GuidedAgent, cfg: DAgger) -> ReplaySchedule:
    """The dataset: every state visited, up to `replay.capacity`, with the expert's action."""
    view = Labels(agent.spec, agent.fed)
    replay = Replay(agent.spec, cfg.replay, view, info=view.paths)
    return ReplaySchedule(replay, cfg.batch_size, cfg.replay_ratio, cfg.learning_starts)


def _guided_agent(spec: EnvSpec, cfg: DAgger) -> Agent:
    return GuidedAgent(cfg.agent(spec, cfg))


@dataclass(frozen=True)
class DAgger(OffPolicySettings):
    """Settings of DAgger."""

    functions = AlgorithmFunctions(postprocess_fn, loss_fn, optimizer_fn, replay_fn, _guided_agent)
    usual_batch = BatchSpec(T=64, B=8)
    taught_by: ClassVar[str] = "expert"
    """Setting that names what a run opens for `teach`."""
    fixed = OffPolicySettings.fixed | {"expert"}

    expert: str = ""
    """Run directory, or file of `policy.save`, of the policy to imitate, whatever its algorithm."""
    beta: Chance = "linear(1.0, 0.0, 0.2)"
    """Chance that the expert acts in a step: 1 in the first batch and 0 after, or falling, in the paper."""
    lr: Rate = 1e-3
    """Adam's step size, usually 1e-4 to 1e-3."""
    adam_eps: float = 1e-5
    """Added to Adam's divisor, usually 1e-8 to 1e-4."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus per nat, usually 0."""
    batch_size: Count = 64
    """Rows of a gradient step, usually 32 to 256."""
    replay_ratio: Positive = 16.0
    """Rows trained on for each row collected, usually 4 to 64."""
    learning_starts: Whole = 0
    """Rows collected before the first gradient step."""
    max_grad_norm: Bound = 10.0
    """Gradients are scaled down to this norm."""
    net: Net = Net()
    """Networks of the default agent; its critic is not trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.net.is_recurrent:
            raise ConfigError(
                f"DAgger with net.recurrent={self.net.recurrent!r}; an expert may have memory, the learner not"
            )
        if self.replay.index != "uniform" or self.replay.hindsight or self.replay.shards:
            raise ConfigError(
                f"DAgger with replay.index={self.replay.index!r}, hindsight={self.replay.hindsight}, shards="
                f"{self.replay.shards}; expected 'uniform', 0 and 0: all labels count alike, and lie with the learner"
            )

    def teach(self, policy: Policy, expert: Any) -> None:
        """Gives the policy its expert; a run does so itself.

        Args:
            expert: a Policy, as `ps.load` returns it. Its agent is used from now on, frozen.

        Raises:
            ConfigError: it has other spaces than the policy, or plays several agents.
        """
        agent, guided = getattr(expert, "agent", None), policy.agent
        if not isinstance(agent, Agent) or not isinstance(guided, GuidedAgent):
            raise ConfigError(
                f"the expert is a {type(expert).__name__}; expected the Policy of one agent, ps.load(DIR), or one of "
                "several policies: ps.load(DIR)['shared']"
            )
        check_spec(agent.spec, policy.spec, "the expert", "the environment")
        guided.__dict__["expert"] = agent.requires_grad_(False).to(policy.device)
        guided.taught.fill_(True)
        policy.teacher, policy.teacher_digest = "the expert", parameters_digest(agent).hex()
