"""GAIL: an on-policy algorithm, here PPO, that a discriminator rewards for acting as demonstrations do.

Ho and Ermon 2016, "Generative adversarial imitation learning", arXiv:1606.03476, algorithm 1. D(s, a) is the chance
that a pair is of the demonstrations, 1 - D in the paper.

Differs from the paper: PPO in place of TRPO; the discriminator takes its steps on the policy's minibatches, so rewards
are those of D before the batch; a gradient penalty (Gulrajani et al. 2017, arXiv:1704.00028, eq. 3); by `reward` other
forms of the reward, as the paper's favours long episodes (Kostrikov et al. 2019, arXiv:1809.02925, section 4.1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from penstock import ops
from penstock.agents.agent import Agent
from penstock.agents.networks import Encoder
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs, SampleBatch, TrainBatch
from penstock.core.errors import ConfigError
from penstock.core.limits import Count, Positive, Weight
from penstock.core.machine import free_memory
from penstock.core.noise import Purpose, generator
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import Tree, tree_leaves, tree_map
from penstock.datasets.episode import EpisodeSource, check_spec
from penstock.learn.algorithm import Loss, LossFn, Optimizers, PostprocessFn
from penstock.learn.optimizers import make_optimizer, trainable
from penstock.learn.policy import Policy
from penstock.learn.settings import AlgorithmFunctions
from penstock.learn.slot_partition import drawn


class Discriminator(nn.Module):
    """Logit of D(s, a) = 1 / (1 + e^-logit).

    It sees observations as the agent prepares them, and reads images as its networks do.
    """

    demonstrations: Demonstrations | None = None
    """Set by `teach`; None in a policy that is only to act."""
    batches: Tensor
    """Number of batches for which demonstrations were drawn, int64."""

    def __init__(self, agent: Agent, spec: EnvSpec, cfg: GAIL) -> None:
        super().__init__()
        self._action, hidden = spec.action, cfg.discriminator_hidden
        obs = agent.preparation.obs if agent.preparation.active else spec.obs
        self.encoder = Encoder(obs, spec.action, replace(cfg.net, prev_action=True, prev_reward=False))
        self.head = nn.Sequential()  # of plain layers, whose gradients the penalty differentiates again
        for inputs, outputs in zip((self.encoder.size, *hidden), hidden):
            self.head.extend((nn.Linear(inputs, outputs), nn.Tanh()))
        self.head.append(nn.Linear((self.encoder.size, *hidden)[-1], 1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def features(self, obs: Tree, action: Tree) -> Tensor:
        """[N, size] of flat pairs; boxes of actions count as the environment takes them, clipped to their bounds."""
        action = tree_map(_bounded, self._action, action)
        first = torch.zeros(len(tree_leaves(action)[0]), dtype=torch.bool, device=self.batches.device)
        return self.encoder(Inputs(obs, action, None, first), obs)

    def logit(self, features: Tensor) -> Tensor:
        """[N] of features [N, size]."""
        return self.head(features).squeeze(-1)


def _bounded(leaf: LeafSpec, x: Tensor) -> Tensor:
    if leaf.kind != "box":
        return x
    return x.clamp(
        *(torch.as_tensor(leaf.bound(name).copy(), dtype=x.dtype, device=x.device) for name in ("low", "high"))
    )


class Demonstrations:
    """Pairs of demonstrations in memory, and which of them a batch is compared with.

    They stay with the learner: a copy of its agent shares them, and one that travels to a worker has None.

    Args:
        obs, action: leaves [N, ...] of tensors on the CPU. seed: of the draws.
    """

    def __init__(self, obs: Tree, action: Tree, seed: int) -> None:
        self.obs, self.action, self._seed = obs, action, seed
        self._count = len(tree_leaves(action)[0])

    @classmethod
    def read(cls, source: EpisodeSource, seed: int) -> Demonstrations:
        """All steps of a dataset. Raises ConfigError if they do not fit into memory."""
        leaves: list[LeafSpec] = tree_leaves((source.spec.obs, source.spec.action))
        needed = int(source.lengths.sum()) * sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves)
        if 2 * needed > (free := free_memory()):
            raise ConfigError(
                f"dataset {source.name} takes {needed / 1e9:,.1f} GB, twice that while it is read; free is "
                f"{free / 1e9:,.1f} GB of memory: use fewer episodes"
            )
        episodes = [source.episode(i) for i in range(len(source.lengths))]

        def joined(*parts: Any) -> Tensor:
            return torch.from_numpy(np.concatenate(parts))

        obs = tree_map(joined, *(tree_map(lambda x: x[:-1], episode.obs) for episode in episodes))
        return cls(obs, tree_map(joined, *(episode.action for episode in episodes)), seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> Demonstrations:
        return self

    def __reduce__(self) -> Any:
        return type(None), ()

    def draw(self, batch: int, valid: Tensor) -> dict[str, Tree]:
        """Rows [T, B] for batch number `batch`: `shown`, a pair of the demonstrations each, and `mix`, a uniform."""
        rng = generator(self._seed, Purpose.DEMONSTRATE, batch)
        index = drawn(lambda T, B: rng.integers(self._count, size=(T, B)), valid)
        mix = drawn(lambda T, B: rng.random((T, B), np.float32), valid)
        shown = tree_map(lambda x: x[index.to(x.device)].to(valid.device), {"obs": self.obs, "action": self.action})
        return {"shown": shown, "mix": mix}


def reward_of(logit: Tensor, form: str) -> Tensor:
    """-log(1 - D), log D, or their sum, of logits of D."""
    if form == "positive":
        return softplus(logit)
    return -softplus(-logit) if form == "negative" else logit


def postprocess_fn(inner: PostprocessFn, agent: Agent, batch: SampleBatch, cfg: GAIL) -> TrainBatch:
    """The algorithm's own rows for a batch [T, B] with D's rewards, and beside each row one of the demonstrations."""
    judge = _discriminator(agent)
    if judge.demonstrations is None:
        raise ConfigError(
            "GAIL has no demonstrations; name a dataset, --algo.dataset DIR, or in a loop of your own: "
            "algo.teach(policy, open_dataset(DIR)) of penstock.datasets.reader"
        )
    flat: Any = tree_map(lambda x: x.flatten(0, 1), (batch.inputs_t.obs, batch.action))
    with torch.no_grad():
        logit = judge.logit(judge.features(agent.prepared(flat[0]), flat[1])).reshape(batch.valid.shape)
    reward = torch.where(batch.valid, reward_of(logit, cfg.reward), 0.0)
    data = inner(agent, replace(batch, prev_reward=torch.cat([batch.prev_reward[:1], reward])), cfg)
    shown = judge.demonstrations.draw(int(judge.batches), batch.valid)
    judge.batches += 1
    metrics = {**(data.metrics or {}), "imitation_reward": ops.masked_mean(reward, batch.valid)}
    return replace(data, rows={**data.rows, **shown}, metrics=metrics)


def loss_fn(inner: LossFn, agent: Agent, x: TrainBatch, cfg: GAIL) -> Loss:
    """The algorithm's own loss; E_policy[-log(1 - D)] + E_shown[-log D] (eq. 17) + c (|grad D| - 1)^2."""
    loss, judge, valid = inner(agent, x, cfg), _discriminator(agent), x.valid
    lead = x["mix"].shape

    def beside(ours: Tensor, shown: Tensor) -> Tensor:
        return torch.cat([leaf.flatten(0, len(lead) - 1) for leaf in (ours, shown)])

    obs = agent.prepared(tree_map(beside, x.inputs.obs, x["shown"]["obs"]))
    features = judge.features(obs, tree_map(beside, x["action"], x["shown"]["action"]))
    logits = judge.logit(features).reshape(2, *lead)
    judged = ops.masked_mean(softplus(logits[0]), valid) + ops.masked_mean(softplus(-logits[1]), valid)
    metrics = {
        "discriminator_loss": judged,
        "accuracy_policy": ops.masked_mean((logits[0] < 0.0).float(), valid),
        "accuracy_expert": ops.masked_mean((logits[1] > 0.0).float(), valid),
    }
    if cfg.gradient_penalty:
        ours, shown = features.detach().chunk(2)
        mix: Any = x["mix"]
        between = torch.lerp(ours, shown, mix.reshape(-1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(judge.logit(between).sum(), between, create_graph=True)
        penalty = ops.masked_mean((slope.square().sum(-1) + 1e-12).sqrt().sub(1.0).square().reshape(lead), valid)
        judged, metrics["gradient_penalty"] = judged + cfg.gradient_penalty * penalty, penalty
    totals = {**loss.totals(), "discriminator": judged}
    return loss._replace(total=totals, metrics={**loss.metrics, **{name: m.detach() for name, m in metrics.items()}})


def optimizer_fn(agent: Agent, cfg: GAIL) -> Optimizers:
    """One for the policy, and one for the discriminator with its own step size."""
    judged = list(_discriminator(agent).parameters())
    others = [p for p in trainable(agent) if all(p is not x for x in judged)]
    return {
        "all": make_optimizer(others, cfg),
        "discriminator": make_optimizer(judged, cfg, cfg.discriminator_lr),
    }


def _discriminator(agent: Agent) -> Discriminator:
    return agent.get_submodule("discriminator")  # pyright: ignore[reportReturnType]


def with_discriminator(functions: AlgorithmFunctions) -> AlgorithmFunctions:
    """The functions of an on-policy algorithm that D rewards."""
    parted = functions.with_part("discriminator", Discriminator, postprocess_fn, loss_fn)
    return parted._replace(optimizer=optimizer_fn)


@dataclass(frozen=True)
class GAIL(PPO):
    """Settings of GAIL, besides those of PPO."""

    functions = with_discriminator(PPO.functions)
    taught_by: ClassVar[str] = "dataset"
    """Setting that names what a run opens for `teach`."""
    fixed = PPO.fixed | {"dataset", "discriminator_hidden"}

    dataset: str = ""
    """Folder of the demonstrations, as `penstock record RUN --dataset DIR` or Minari (HDF5) writes it."""
    reward: Literal["positive", "negative", "logit"] = "positive"
    """Reward of a step: `positive`, -log(1 - D), of the paper, for tasks in which an expert's episodes are long;
    `negative`, log D, where they are short, as it wants them to end; `logit`, log D - log(1 - D) (Fu et al. 2018)."""
    discriminator_hidden: tuple[Count, ...] = (64, 64)
    """Widths of the discriminator's layers, usually (64, 64) to (256, 256); 100 and 100 in the paper."""
    discriminator_lr: Positive = 1e-4
    """The discriminator's step size, usually 3e-5 to 3e-4; it follows the schedule of `lr` in proportion."""
    gradient_penalty: Weight = 1.0
    """Weight of the gradient penalty of the discriminator, between features of policy and demonstrations, usually 0.1
    to 10; 0 leaves it out, as the paper."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rnd is not None:
            raise ConfigError("GAIL with rnd, whose reward is of what is new, not of what was shown; use rnd=None")
        net = self.net
        if net.prev_reward or net.normalize_reward or net.clip_reward:
            raise ConfigError(
                f"GAIL with net.prev_reward={net.prev_reward}, net.normalize_reward={net.normalize_reward}, "
                f"net.clip_reward={net.clip_reward}, which are of the environment's reward; leave them out: rewards "
                "are the discriminator's, and normalize_value=True makes their size not matter"
            )
        if net.actor_keys is not None or net.critic_keys is not None:
            raise ConfigError(
                f"GAIL with net.actor_keys={net.actor_keys}, net.critic_keys={net.critic_keys}; expected one "
                "observation for actor, critic and discriminator: leave them out, env_drop leaves keys out"
            )

    def teach(self, policy: Policy, source: EpisodeSource) -> None:
        """Gives the policy the demonstrations; a run does so itself.

        Raises:
            ConfigError: they are of other spaces than the policy, or do not fit into memory.
        """
        check_spec(source.spec, policy.spec, f"dataset {source.name}", "the environment")
        _discriminator(policy.agent).demonstrations = Demonstrations.read(source, policy.seed)
        policy.teacher, policy.teacher_digest = f"dataset {source.name}", source.fingerprint
