"""The default agent of policy-gradient algorithms: actor and critic for any observation and action space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from penstock.agents import distributions as dists
from penstock.agents.agent import Agent
from penstock.agents.gsde import StateDependentHead
from penstock.agents.images import image_of
from penstock.agents.mlp import MLP, SimBa, are_plain, chain_by_kernel, is_plain, orthogonal, out_of, through
from penstock.agents.networks import Encoder, Net, refuse_absurd
from penstock.agents.preparation import parted
from penstock.agents.recurrent import Memory
from penstock.core.batch import Inputs, SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.noise import NOTHING_HELD, HeldNoise
from penstock.core.spec import EnvSpec, LeafSpec, choices
from penstock.core.tree import Tree, tree_leaves, tree_structure
from penstock.native.acting import Acting
from penstock.native.dense import takes_all
from penstock.native.elementwise import exp

FIRST_GAIN = 1e-8
"""Gain of a value head before its unit is known: values of about 0 in any unit, which pass gradients all the same."""
_RATE = 0.01
"""Least weight of a batch in the running mean of squared returns."""
_IMAGES = 256
"""Rows of images that `values` are computed of at once."""


class ActorCriticSettings(Protocol):
    """Settings that `actor_critic` reads."""

    @property
    def net(self) -> Net: ...
    @property
    def discount(self) -> float: ...


def actor_critic(spec: EnvSpec, settings: ActorCriticSettings) -> ActorCritic:
    """The default `agent` of an algorithm: an ActorCritic as `settings.net` describes it."""
    return ActorCritic(spec, settings.net, settings.discount, getattr(settings, "normalize_value", False))


class Output(NamedTuple):
    """Outputs of a forward: [N] rows, or [T, B] rows if recurrent."""

    dist: dists.Distribution
    value: Tensor


class ActionHead(nn.Module):
    """A linear layer from features, and a distribution over the action tree from its outputs.

    Discrete leaves become categoricals, bits Bernoullis, boxes Gaussians with a state-independent deviation
    (Schulman et al. 2015, appendix D), squashed by tanh if asked. The output layer starts at gain 0.01, so that the
    first policy is nearly uniform (Andrychowicz et al. 2021, section 3.2).
    """

    def __init__(self, features: int, action: Tree, squash: bool, log_std: float) -> None:
        super().__init__()
        self.leaves: list[LeafSpec] = tree_leaves(action)
        self.structure = tree_structure(action)
        self.widths = [sum(leaf.sizes) or leaf.size for leaf in self.leaves]
        self.noise_sizes = [leaf.size for leaf in self.leaves]
        self.squash = squash
        outputs = sum(self.widths)
        refuse_absurd(features * outputs, f"a head of {outputs:,} outputs", "an action space of fewer choices")
        self.linear = nn.Linear(features, outputs)
        orthogonal(self.linear, 0.01)
        self._boxes = [leaf.size if leaf.kind == "box" else 0 for leaf in self.leaves]
        self.log_std = nn.Parameter(torch.full((sum(self._boxes),), log_std)) if any(self._boxes) else None
        for i, leaf in enumerate(self.leaves):
            if leaf.kind == "box":
                low, high = leaf.bound("low").ravel(), leaf.bound("high").ravel()
                if squash and not leaf.bounded:
                    raise ConfigError(
                        f"net.squash=True needs finite action bounds; got low={low.tolist()}, high={high.tolist()}; "
                        "bound the action space or use net.squash=False"
                    )
                if not leaf.dtype.startswith("float"):
                    raise ConfigError(
                        f"action box of dtype {leaf.dtype}; expected float32 or float64: wrap the "
                        "environment so that it takes a MultiDiscrete or rounds by itself"
                    )
                if not (high > low).all():
                    raise ConfigError(
                        f"action bounds low={low.tolist()}, high={high.tolist()}; expected low < high: leave out what "
                        "cannot move, by a wrapper that fills it in"
                    )
                low, high = (bound.ravel() for bound in leaf.first_range())
                center, half = (torch.as_tensor(x, dtype=torch.float32) for x in ((low + high) / 2, (high - low) / 2))
                self.register_buffer(f"center_{i}", center, persistent=False)
                self.register_buffer(f"half_{i}", half, persistent=False)

    def forward(self, params: Tensor, mask: Tensor | None = None) -> dists.Distribution:
        """The distribution with these parameters [N, ...], the outputs of `linear`.

        `mask` [N, choices] covers the leaves in order, concatenated (`spec.choices`); nonzero means allowed.
        """
        if len(self.leaves) == 1:
            return self._leaf(0, self.leaves[0], params, mask)
        parts: list[dists.Distribution] = []
        at_mask = 0
        sizes = choices(self.leaves, None if mask is None else mask.shape[-1])
        for i, (leaf, chunk) in enumerate(zip(self.leaves, params.split(self.widths, -1))):
            part = mask[..., at_mask : at_mask + sum(sizes[i])] if mask is not None and sizes[i] else None
            at_mask += sum(sizes[i])
            parts.append(self._leaf(i, leaf, chunk, part))
        return dists.Joint(parts, self.noise_sizes, self.structure)

    def for_kernel(self) -> dict[str, Any] | None:
        """The head for the native kernel; None if it has none for this action."""
        leaf = self.leaves[0]
        if len(self.leaves) == 1 and leaf.kind == "discrete":
            return {"head": "categorical", "start": leaf.start}
        if len(self.leaves) > 1 or leaf.kind != "box" or self.log_std is None:
            return None
        given = {"log_std": self.log_std, "center": self.get_buffer("center_0"), "half": self.get_buffer("half_0")}
        sizes = {len(x) for x in given.values()}
        fits = sizes == {leaf.size} and takes_all([*given.values()]) and are_plain(given.values())
        return {"head": "squashed" if self.squash else "gaussian", **given} if fits else None

    def _leaf(self, i: int, leaf: LeafSpec, params: Tensor, mask: Tensor | None) -> dists.Distribution:
        if leaf.kind == "discrete":
            return dists.Categorical(params, int(leaf.start), mask)  # pyright: ignore[reportArgumentType]
        if leaf.kind == "multi_discrete":
            start = leaf.start if isinstance(leaf.start, tuple) else (leaf.start,) * leaf.size
            return dists.MultiCategorical(params, leaf.sizes, start, leaf.shape, mask)
        if leaf.kind == "multi_binary":
            return dists.Bernoulli(params, leaf.shape, mask)
        assert self.log_std is not None
        log_std = self.log_std.split(self._boxes)[i]
        box = dists.SquashedGaussian if self.squash else dists.Gaussian
        return box(params, log_std, getattr(self, f"center_{i}"), getattr(self, f"half_{i}"), leaf.shape)


def _state_dependent(plain: ActionHead, features: int, log_std: float) -> StateDependentHead:
    """The head of gSDE for the same box. Raises ConfigError if the action is anything but one box."""
    if [leaf.kind for leaf in plain.leaves] != ["box"]:
        raise ConfigError(
            f"net.use_sde=True with an action of {', '.join(leaf.kind for leaf in plain.leaves)}; expected one box: "
            "use net.use_sde=False"
        )
    center, half = plain.get_buffer("center_0"), plain.get_buffer("half_0")
    return StateDependentHead(features, center, half, plain.leaves[0].shape, plain.squash, log_std)


def _tail(inputs: int, hidden: tuple[int, ...] | None, net: Net) -> MLP | SimBa | None:
    """Layers of an actor or a critic behind a shared body; None without any."""
    return net.body(inputs, hidden) if hidden else None


class Body(nn.Module):
    """Encoder and fully connected layers: flat inputs -> [N, size], or [N, outputs] with an output layer."""

    def __init__(self, spec: EnvSpec, obs: Tree, net: Net) -> None:
        super().__init__()
        self.encoder = Encoder(obs, spec.action, net)
        self.mlp = net.body(self.encoder.size, net.hidden)
        self.size = self.mlp.size
        self._identity = self.encoder.is_identity

    def forward(self, inputs: Inputs, obs: Tree, out: nn.Module | None = None) -> Tensor:
        mlp: Any = self._modules["mlp"]
        return through(mlp, obs if self._identity else self.encoder(inputs, obs), out)


class ValueScale(nn.Module):
    """Multiplies the output of a value head by the running root mean square of returns.

    PopArt (van Hasselt et al. 2016, arXiv:1602.07714, proposition 1; for policy gradients Hessel et al. 2018,
    arXiv:1809.04474) without its shift: where all returns are alike, their deviation vanishes, and one that differs
    would be huge in it; their root mean square stays. An agent takes part by a module `value_scale` behind its linear
    layer `value_head` of gain `FIRST_GAIN`.
    """

    square: Tensor
    """Mean square of returns, float64; 0 before one other than 0 was seen."""
    batches: Tensor
    """Batches that made it."""
    unit: Tensor
    """Root of `square`, float32: the value that an output of 1 means; 1 until the first return."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("square", torch.zeros((), dtype=torch.float64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unit", torch.ones(()))
        self.register_load_state_dict_pre_hook(_without_unit)

    def forward(self, output: Tensor) -> Tensor:
        """Values, in the unit of rewards, of the head's output."""
        return output * self.unit

    @torch.no_grad()
    def update(self, mean_square: Tensor, head: nn.Linear) -> None:
        """Merges the mean square of a batch's returns; rescales the head, so that its values do not change.

        The first batches count equally, later ones by 1/100. Skips returns that are all 0 or not finite.
        """
        counts = mean_square.isfinite() & (mean_square > 0.0)
        self.batches += counts
        rate = (1.0 / self.batches.clamp(min=1.0)).clamp(min=_RATE)
        moved = self.square + rate * (mean_square.double() - self.square)
        self.square.copy_(torch.where(counts, moved, self.square))
        unit = torch.where(self.square > 0.0, self.square.sqrt(), 1.0).float()
        for parameter in head.parameters():
            parameter.mul_((self.unit / unit).to(parameter.dtype))
        self.unit.copy_(unit)


def _without_unit(scale: ValueScale, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Takes parameters of an agent without a value scale, too: their values are in the unit of rewards."""
    for name, start in (("square", 0.0), ("batches", 0.0), ("unit", 1.0)):
        state.setdefault(prefix + name, torch.full_like(scale.get_buffer(name), start))


def value_unit(agent: Any) -> Tensor | float:
    """The value that an output of 1 of the value head means; 1 for an agent without a value scale."""
    scale: ValueScale | None = getattr(agent, "value_scale", None)
    return 1.0 if scale is None else scale.unit


def action_std(agent: Any) -> dict[str, Tensor]:
    """The metric `action_std`: mean deviation of the Gaussians, where [-1, 1] is the box; {} for heads without one."""
    log_std: Tensor | None = getattr(getattr(agent, "head", None), "log_std", None)
    return {} if log_std is None else {"action_std": exp(log_std.detach()).mean()}


class ActorCritic(Agent):
    """Actor and critic with separate or shared bodies, optional memory, action masks and normalisers.

    A Dict observation with the key `action_mask` masks discrete choices; the mask is not fed to the networks.
    While acting, the critic does not run. With `net.actor_keys` or `net.critic_keys` each reads its part of a Dict
    observation, and a memory of the critic's own stands still where it is acted on without the critic's part.
    """

    def __init__(
        self,
        spec: EnvSpec,
        net: Net,
        discount: float = 0.99,
        normalize_value: bool = False,
    ) -> None:
        super().__init__()
        self.spec, self.net, self.fed = spec, net, net.fed
        self.preparation, self.central = parted(spec, net, discount)
        is_parted, net = self.central is not None, self.preparation.net
        self.unseen = self.preparation.unread
        seen, valued_obs = self.preparation.obs, (self.central or self.preparation).obs
        one_memory = net.is_recurrent and net.critic_recurrent == "shared"
        costly = one_memory or any(x.dtype == "uint8" and image_of(x, net) for x in tree_leaves(seen))
        shared = net.shared if net.shared is not None else costly and not is_parted
        if is_parted and (shared or one_memory):
            raise ConfigError(
                f"net.shared={net.shared}, net.critic_recurrent={net.critic_recurrent!r} with a critic that sees more "
                "than the actor; expected net.shared=None or False, and if recurrent net.critic_recurrent='own' or "
                "'none'"
            )
        if one_memory and not shared:
            raise ConfigError(
                "net.shared=False with a recurrent net: actor and critic share one memory; use shared=True, or "
                "net.critic_recurrent='own'"
            )
        self.normalizer, self.reward_scaler = self.preparation.normalizer, self.preparation.reward_scaler
        if self.central is not None:
            self.central_normalizer = self.central.normalizer
        self.actor = Body(spec, seen, (net if shared else net.of("actor")).without_keys(self.unseen))
        self.critic = None if shared or is_parted else Body(spec, seen, net.of("critic"))
        self.memory = Memory(net.recurrent, self.actor.size, net.recurrent_size) if net.recurrent != "none" else None
        features = self.memory.size if self.memory else self.actor.size
        if is_parted:  # drawn in the order of MAPPO's networks
            self.head = self._head(features, net)
            unread = (self.central or self.preparation).unread
            self.critic = Body(spec, valued_obs, net.of("critic").without_keys(unread))
        valued = self.actor.size if self.critic is None else self.critic.size
        own = net.recurrent != "none" and net.critic_recurrent == "own"
        self.critic_memory = Memory(net.recurrent, valued, net.recurrent_size) if own else None  # pyright: ignore
        valued = features if one_memory else self.critic_memory.size if self.critic_memory is not None else valued
        self.actor_tail = _tail(features, net.actor_hidden, net) if shared else None
        self.critic_tail = _tail(valued, net.critic_hidden, net) if shared else None
        if not is_parted:
            self.head = self._head(self.actor_tail.size if self.actor_tail is not None else features, net)
        self.value_head = nn.Linear(self.critic_tail.size if self.critic_tail is not None else valued, 1)
        orthogonal(self.value_head, FIRST_GAIN if normalize_value else 1.0)
        self.value_scale = ValueScale() if normalize_value else None
        self.noise_size = sum(self.head.noise_sizes)
        self.held_noise = HeldNoise(self.noise_size, net.sde_sample_freq) if net.use_sde else NOTHING_HELD

    def _head(self, features: int, net: Net) -> ActionHead | StateDependentHead:
        head = ActionHead(features, self.spec.action, net.squash, net.log_std())
        return _state_dependent(head, features, net.log_std()) if net.use_sde else head

    def initial_state(self, B: int) -> Tree:
        if self.critic_memory is not None and self.memory is not None:
            return {"actor": self.memory.initial_state(B), "critic": self.critic_memory.initial_state(B)}
        return self.memory.initial_state(B) if self.memory else None

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        obs, mask = self._prepared(inputs)
        parts: Any = self._modules  # attribute look-ups on modules are slow
        actor, head = parts["actor"], parts["head"]
        if self.memory is None and self.actor_tail is None:
            params = actor(inputs, obs, head._modules["linear"])
        elif self.memory is None:
            params = out_of(self.actor_tail, actor(inputs, obs), head.linear)
        else:
            features, first = actor(inputs, obs), inputs.first.unsqueeze(0)
            own = self.critic_memory is not None
            out, after = self.memory(features.unsqueeze(0), first, state["actor"] if own else state)
            params = out_of(self.actor_tail, out[0], head.linear)
            if self.critic_memory is not None and self._shows_critic(inputs.obs):
                seen = features if self.critic is None else self.critic(inputs, self._for_critic(inputs, obs))
                _, valued = self.critic_memory(seen.unsqueeze(0), first, state["critic"])
                after = {"actor": after, "critic": valued}
            elif self.critic_memory is not None:
                after = {"actor": after, "critic": state["critic"]}
            state = after
        action, logp = dists.acted(head(params, mask), noise)
        return action, {"logp": logp}, state

    def by_kernel(self, noisy: bool) -> Acting | None:
        parts: Any = self._modules
        body, head = parts["actor"], parts["head"]
        if self.memory is not None or self.actor_tail is not None:
            return None
        if not is_plain(body, Body) or not is_plain(head, ActionHead):
            return None
        n, given = head.widths[0], head.for_kernel()
        acting = chain_by_kernel(self, ActorCritic, body.encoder, body.mlp, head.linear, n)
        return None if acting is None or given is None else acting(n=n, **given)

    def forward(self, inputs: Inputs, state: Tree = None) -> Output:
        if self.critic is None or self.memory is not None:
            features, valued, mask = self._features(inputs, state)
            params = out_of(self.actor_tail, features, self.head.linear)
            if self._critic_is_flat and self.critic is not None:
                flat = inputs.flat()
                value = self.critic(flat, self._for_critic(flat), self.value_head).reshape(*inputs.first.shape, 1)
            else:
                value = out_of(self.critic_tail, valued, self.value_head)
        else:
            obs, mask = self._prepared(inputs)
            params = self.actor(inputs, obs, self.head.linear)
            value = self.critic(inputs, self._for_critic(inputs, obs), self.value_head)
        return Output(self.head(params, mask), self._scaled(value.squeeze(-1)))

    def values(self, batch: SampleBatch) -> Tensor:
        lead = batch.first.shape
        remembers = self.memory is not None and not self._critic_is_flat
        inputs = batch.inputs if remembers else batch.inputs.flat()
        # Images become four times as large as floats, and all of a batch together fall out of every cache.
        encoder = (self.actor if self.critic is None else self.critic).encoder
        parts = inputs.split(_IMAGES) if not remembers and encoder.sees_images else (inputs,)
        with torch.no_grad():
            if self.critic is None or remembers:
                features = (self._features(x, batch.state)[1] for x in parts)
                found = [out_of(self.critic_tail, x, self.value_head) for x in features]
            else:
                found = [self.critic(x, self._for_critic(x), self.value_head) for x in parts]
            return self._scaled((torch.cat(found) if len(found) > 1 else found[0]).reshape(lead))

    def needed(self, inputs: Inputs) -> Inputs:
        others = zip(Inputs._fields[1:], inputs[1:])
        return Inputs(inputs.obs, *(x if name in self.fed else None for name, x in others))

    def scaled_reward(self, reward: Tensor) -> Tensor:
        reward = reward.sign() if self.net.clip_reward else reward
        return self.preparation.scaled(reward) if self.preparation.active else reward

    def norm_groups(self) -> Mapping[str, Sequence[nn.Module]]:
        if self.critic is None:
            return {}
        actor = (self.actor, self.memory, self.head)
        critic = (self.critic, self.critic_memory, self.value_head)
        return {"actor": [x for x in actor if x is not None], "critic": [x for x in critic if x is not None]}

    def terminal(self, batch: SampleBatch) -> Tensor:
        return batch.terminal(self.net.terminal_info)

    @property
    def needs_statistics(self) -> bool:
        return self.preparation.active and (self.preparation.empty or (self.central is not None and self.central.empty))

    def _scaled(self, output: Tensor) -> Tensor:
        """Values of the value head's output."""
        return output if self.value_scale is None else self.value_scale(output)

    def _features(self, inputs: Inputs, state: Tree) -> tuple[Tensor, Tensor, Tensor | None]:
        """Features of actor and critic, and the mask: [T, B, ...] if recurrent, else [N, ...] of the one body."""
        if self.memory is None:
            obs, mask = self._prepared(inputs)
            features = self.actor(inputs, obs)
            return features, features, mask
        lead, flat, own = inputs.first.shape, inputs.flat(), self.critic_memory is not None
        obs, mask = self._prepared(flat)
        features = self.actor(flat, obs).reshape(*lead, -1)
        valued = features
        if self.critic is not None and not self._critic_is_flat:
            valued = self.critic(flat, self._for_critic(flat, obs)).reshape(*lead, -1)
        out, _ = self.memory(features, inputs.first, state["actor"] if own else state, inputs.idle)
        if self.critic_memory is not None:
            valued, _ = self.critic_memory(valued, inputs.first, state["critic"], inputs.idle)
        elif self.net.critic_recurrent == "shared":
            valued = out
        return out, valued, None if mask is None else mask.reshape(*lead, -1)

    def _prepared(self, inputs: Inputs) -> tuple[Tree, Tensor | None]:
        """The observation as the networks see it, and the action mask."""
        if not self.preparation.active:
            return inputs.obs, None
        return self.preparation.prepared(inputs.obs), self.preparation.mask(inputs.obs)

    def _for_critic(self, inputs: Inputs, obs: Tree = None) -> Tree:
        """The observation as the critic sees it; `obs` is the actor's, if it is there already."""
        if self.central is not None:
            return self.central.prepared(inputs.obs)
        return self._prepared(inputs)[0] if obs is None else obs

    @property
    def _critic_is_flat(self) -> bool:
        """True for a critic that sees its own part of the observation, and has no memory."""
        return self.central is not None and self.critic_memory is None

    def _shows_critic(self, obs: Tree) -> bool:
        """False where the agent acts on observations without the critic's part, as `predict` does."""
        return self.central is None or obs.keys() >= set(self.central.keys or ())  # pyright: ignore
