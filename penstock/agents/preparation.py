"""Preparation of inputs and rewards: the mask split off, observations normalised, rewards scaled for targets.

Running statistics are updated after training, then frozen until the next batch. They are module buffers, so they travel
with the parameters' version and lie in every checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock.agents.images import image_of
from penstock.agents.mlp import is_plain
from penstock.agents.networks import Net
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import MASK_KEY, EnvSpec, LeafSpec, choices, describe
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_structure, tree_unflatten

_TINY = 1e-8
"""Added to variances before their roots are taken."""
_NORMALIZED = Net(normalize_obs=True)
_PRIVILEGED = {"critic", "privileged_state"}
"""Keys by which simulators name what the actor shall not see: Isaac Lab's and MuJoCo Playground's."""


class Preparation:
    """Observations and rewards of an agent as its networks and targets take them, as its `net` asks.

    `Agent`'s methods use the one that an agent sets: `self.preparation = Preparation(spec, net, discount)`. It is no
    module, so the agent registers `normalizer` and `reward_scaler` under these names for its checkpoints.

    Args:
        keys: the keys of a Dict observation that are read, the mask among them; None: all.

    Raises:
        ConfigError: the mask has not one element for each choice, or `net` parts the observation.
    """

    def __init__(self, spec: EnvSpec, net: Net, discount: float = 1.0, keys: Sequence[str] | None = None) -> None:
        if net.actor_keys is not None or net.critic_keys is not None:
            raise ConfigError(
                f"net.actor_keys={net.actor_keys}, net.critic_keys={net.critic_keys} with an agent that has no critic "
                "of its own observations; expected PPO, A2C, APPO, IMPALA, MAPPO, BC, MARWIL, SAC, TQC, CrossQ, TD3, "
                "DDPG, ReBRAC, TD3BC, DiscreteSAC or CQL on boxes, with their own agent"
            )
        self.net, self.keys = net, keys
        self.unread = frozenset[str]() if keys is None else frozenset[str](spec.obs) - {*keys}
        """Keys of the observation that are not read."""
        self.masked = isinstance(spec.obs, dict) and MASK_KEY in (spec.obs if keys is None else keys)
        self._read = None if keys is None and not self.masked else [k for k in keys or spec.obs if k != MASK_KEY]
        if self.masked:
            size = spec.obs[MASK_KEY].size
            expected = sum(map(sum, choices(spec.action, size)))
            if size != expected or not size:
                raise ConfigError(
                    f"obs[{MASK_KEY!r}] has {size} elements for {expected} discrete choices of "
                    f"{describe(spec.action)}; expected one for each, leaf by leaf: of MultiBinary off and on for each "
                    "element, of boxes none"
                )
        self.obs = self.unmasked(spec.obs)
        """Spec of what is read of the observation, without its mask, a tree of `LeafSpec`."""
        self.normalizer = ObsNormalizer(self.obs, net) if net.normalize_obs else None
        self.reward_scaler = RewardScaler(discount) if net.normalize_reward else None
        changed = net.normalize_obs or net.normalize_reward or net.reward_scale != 1.0
        self.active = self._read is not None or changed
        """False: observations and rewards pass unchanged."""

    def unmasked(self, obs: Tree) -> Tree:
        """The keys that are read, of the observation or of its spec, without the mask."""
        return obs if self._read is None else {key: obs[key] for key in self._read}

    def prepared(self, obs: Tree) -> Tree:
        """The observation as networks see it."""
        obs = self.unmasked(obs)
        return obs if self.normalizer is None else self.normalizer(obs)

    def for_kernel(self) -> dict[str, Any] | None:
        """The normaliser of a flat observation for the native kernel, empty without one; None if it is another's."""
        normalizer = self.normalizer
        if type(self) is not Preparation or (normalizer is not None and not is_plain(normalizer, ObsNormalizer)):
            return None
        if normalizer is None:
            return {}
        moments = normalizer.moments[0]
        if moments.mean.dtype is not torch.float64 or moments.var.dtype is not torch.float64:
            return None
        return {"mean": moments.mean, "scale": torch.rsqrt(moments.var + _TINY), "clip": normalizer.clip}

    def mask(self, obs: Tree) -> Tensor | None:
        """[N, choices] bool, True for legal choices, leaf by leaf (`spec.choices`); None if nothing is masked."""
        return obs[MASK_KEY].flatten(1).bool() if self.masked else None

    def observe(self, batch: SampleBatch) -> None:
        """Updates the running statistics with the valid rows of a batch of tensors."""
        if self.normalizer is not None:
            self.normalizer.update(tree_map(lambda x: x[:-1], self.unmasked(batch.obs)), batch.valid)
        if self.reward_scaler is not None:
            ended = batch.terminated.logical_or(batch.truncated)
            self.reward_scaler.update(batch.reward, ended, batch.valid, batch.first[:-1])

    def scaled(self, reward: Tensor) -> Tensor:
        """The reward that targets are made of: in units of its running deviation, times `net.reward_scale`."""
        if self.reward_scaler is not None:
            reward = self.reward_scaler(reward)
        return reward if self.net.reward_scale == 1.0 else reward * self.net.reward_scale

    @property
    def empty(self) -> bool:
        """True if some statistic is wanted that has seen nothing yet."""
        counts = [] if self.normalizer is None else self.normalizer.counts
        if self.reward_scaler is not None:
            counts = [*counts, self.reward_scaler.moments.count]
        return _unseen(counts)


def parted(spec: EnvSpec, net: Net, discount: float) -> tuple[Preparation, Preparation | None]:
    """Preparations for the actor, and for the critic where `net.actor_keys` or `net.critic_keys` part the observation.

    Warns of a key that simulators have for critics, if the actor reads it by default.

    Raises:
        ConfigError: the observation lacks a key, or has none.
    """
    if net.actor_keys is None:
        others = tuple(key for key in spec.obs if key not in _PRIVILEGED) if isinstance(spec.obs, dict) else ()
        example = f"net.actor_keys={others or ('policy',)}"
        tell_of_privileged(spec.obs, f"name what it shall read, such as {example}, or all keys if it may")
        if net.critic_keys is None:
            return Preparation(spec, net, discount), None
    whole = replace(net, actor_keys=None, critic_keys=None)
    valued = Preparation(spec, replace(whole, normalize_reward=False), discount, _keys(spec.obs, net, "critic"))
    return Preparation(spec, whole, discount, _keys(spec.obs, net, "actor")), valued


def tell_of_privileged(obs: Tree, remedy: str) -> None:
    """Warns, with a remedy, of an observation with a key that simulators have for critics."""
    if found := sorted(_PRIVILEGED & obs.keys()) if isinstance(obs, dict) else []:
        warnings.warn(f"the observation has a key {found[0]!r}, and the actor reads it: {remedy}", stacklevel=1)


def _keys(obs: Tree, net: Net, part: Literal["actor", "critic"]) -> tuple[str, ...]:
    """Keys that actor or critic gets, the mask among them. Raises ConfigError unless the observation has them."""
    name, keys = (f"net.{part}_keys", net.actor_keys if part == "actor" else net.critic_keys)
    if not isinstance(obs, dict):
        given = f"net.actor_keys={net.actor_keys}, net.critic_keys={net.critic_keys}"
        raise ConfigError(f"{given} with the observation {describe(obs)}; expected one that is a Dict")
    if keys is not None and (not keys or not set(keys) <= obs.keys() - {MASK_KEY}):
        raise ConfigError(
            f"{name}={keys}; expected one or more of the observation's keys {sorted(obs.keys() - {MASK_KEY})}"
        )
    return tuple(key for key in obs if keys is None or key in keys or key == MASK_KEY)


class RunningMoments(nn.Module):
    """Mean and population variance of a stream of vectors in float64, merged chunk by chunk.

    The merge is that of Chan, Golub and LeVeque 1983, eq. 2.1, so any chunking gives the same numbers.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def update(self, x: Tensor) -> None:
        """Merges the rows of x [N, size]; N = 0 changes nothing."""
        n = len(x)
        if not n:
            return
        x = x.double()
        var, mean = torch.var_mean(x, 0, correction=0)
        total = self.count + n
        delta = mean - self.mean
        squares = (
            torch.where(self.count > 0, self.var * self.count, 0.0) + var * n + delta**2 * (self.count * n / total)
        )
        self.mean += delta * (n / total)
        self.var.copy_(squares / total)
        self.count.copy_(total)


class ObsNormalizer(nn.Module):
    """Shifts and scales box leaves of an observation to mean 0 and variance 1, clipped; other leaves pass.

    Images that their encoder scales pass as well. A constant column becomes 0.

    Args:
        net: decides which leaves are images.
    """

    def __init__(self, obs: Tree, net: Net = _NORMALIZED, clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        leaves: list[LeafSpec] = tree_leaves(obs)
        self.structure = tree_structure(obs)
        images = [image_of(leaf, net) for leaf in leaves]
        self._ranks = [len(leaf.shape) for leaf in leaves]
        self._applies = [
            leaf.kind == "box" and leaf.size > 0 and (image is None or image.normalized)
            for leaf, image in zip(leaves, images)
        ]
        self.moments: Any = nn.ModuleList(
            RunningMoments(leaf.size if on else 0) for leaf, on in zip(leaves, self._applies)
        )

    def forward(self, obs: Tree) -> Tree:
        """Normalised float32 observations [N, ...] or [T, N, ...] in the same tree."""
        out: list[Tensor] = []
        for on, rank, m, x in zip(self._applies, self._ranks, self.moments, tree_leaves(obs)):
            if on:
                scale = torch.rsqrt(m.var + _TINY)
                flat = (x.reshape(*x.shape[: x.ndim - rank], len(m.mean)).double() - m.mean) * scale
                x = flat.clamp(-self.clip, self.clip).float().reshape(x.shape)
            out.append(x)
        return tree_unflatten(self.structure, out)

    def update(self, obs: Tree, valid: Tensor) -> None:
        """Merges the observations [T, B, ...] that were acted on, where `valid` [T, B]."""
        for on, rank, m, x in zip(self._applies, self._ranks, self.moments, tree_leaves(obs)):
            if on:
                m.update(x[valid].flatten(1) if rank else x[valid].unsqueeze(1))

    @property
    def empty(self) -> bool:
        """True before the first update of a normaliser that has something to normalise."""
        return _unseen(self.counts)

    @property
    def counts(self) -> list[Tensor]:
        """The number of rows seen of each leaf that is normalised."""
        return [m.count for on, m in zip(self._applies, self.moments) if on]


def _unseen(counts: list[Tensor]) -> bool:
    """True if some statistic has seen no row; waits for a device once."""
    return bool(counts) and bool((torch.stack(counts) == 0.0).any())


class RewardScaler(nn.Module):
    """Divides rewards by the standard deviation of a running discounted return, clipped at 10.

    The statistic of Engstrom et al. 2020 ("Implementation matters", section 3, reward scaling). Rewards are not
    shifted, since that would change which policy is best.
    """

    def __init__(self, discount: float, clip: float = 10.0) -> None:
        super().__init__()
        self.discount, self.clip = discount, clip
        self.moments = RunningMoments(1)
        self.carry = torch.zeros(0)

    def forward(self, reward: Tensor) -> Tensor:
        """Scaled rewards in the shape given."""
        return (reward * torch.rsqrt(self.moments.var + _TINY).float()).clamp(-self.clip, self.clip)

    def update(self, reward: Tensor, ended: Tensor, valid: Tensor, first: Tensor) -> None:
        """Merges the running returns of [T, B] rewards; the return of an open episode goes on in the next batch.

        Rows that are not valid are passed over: an agent that awaits its turn idles in an open episode. A return begins
        anew after `ended` and at `first`.
        """
        carry = self.carry.to(reward.device) if self.carry.shape == reward.shape[1:] else torch.zeros_like(reward[0])
        returns: list[Tensor] = []
        for r, closed, acted, begins in zip(reward, ended, valid, first):
            carry = carry.masked_fill(begins, 0.0)
            carry = torch.where(acted, carry * self.discount + r, carry)
            returns.append(carry)
            carry = carry.masked_fill(closed, 0.0)
        self.carry = carry.clone()
        self.moments.update(torch.stack(returns)[valid].unsqueeze(-1))

    def get_extra_state(self) -> Tensor:
        """The open returns [B], so that a resumed run goes on exactly."""
        return self.carry

    def set_extra_state(self, state: Tensor) -> None:
        self.carry = state.clone()
