"""The agent of value learning: Q of discrete actions, as numbers or distributions, with a target network."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from penstock import ops
from penstock.agents.agent import Agent, follow
from penstock.agents.distributions import MASKED
from penstock.agents.mlp import chain_by_kernel, is_plain, out_of, surely, through
from penstock.agents.networks import Encoder, Net
from penstock.agents.noisy import NoisyLinear, NoisyMLP, mean_weights, noisy_layers
from penstock.agents.own.networks import own_q_network
from penstock.agents.preparation import Preparation, tell_of_privileged
from penstock.agents.recurrent import Memory
from penstock.core.batch import Inputs, flattened
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec, describe
from penstock.core.tree import Tree, tree_map
from penstock.native.acting import Acting
from penstock.native.dense import takes_all
from penstock.native.elementwise import softmax

Ladder = Literal["none", "ape-x", "log-space"]


class QSettings(Protocol):
    """Settings that `q_agent` reads."""

    @property
    def net(self) -> Net: ...
    @property
    def discount(self) -> float: ...
    @property
    def dueling(self) -> bool: ...
    @property
    def dueling_hidden(self) -> tuple[int, ...] | None: ...
    @property
    def noisy(self) -> bool: ...
    @property
    def noisy_sigma(self) -> float: ...
    @property
    def outputs(self) -> int: ...
    @property
    def ladder(self) -> Ladder: ...
    @property
    def records_q(self) -> bool: ...


def q_agent(spec: EnvSpec, settings: QSettings, network: nn.Module | None = None) -> QAgent:
    """The default `agent` of DQN and R2D1, or that agent with a Q network of your own.

    Args:
        network: maps observations [N, *O], without their mask, to Q [N, A], or to [N, A, K] atoms or quantiles; for
            R2D1 a `RecurrentQNetwork`. It replaces what `net` and `dueling` describe; its target is a copy.
    """
    agent = QAgent(
        spec,
        settings.net,
        settings.discount,
        dueling=settings.dueling,
        dueling_hidden=settings.dueling_hidden,
        noisy=settings.noisy,
        noisy_sigma=settings.noisy_sigma,
        outputs=settings.outputs,
        ladder=settings.ladder,
        records_q=settings.records_q,
        eps_eval=getattr(settings, "eps_eval", 0.0),
        has_target=getattr(settings, "has_target", True),
        network=network,
    )
    if getattr(settings, "distributional", "none") == "c51":
        ends: Any = settings
        agent.atoms = torch.linspace(ends.v_min, ends.v_max, ends.n_atoms)
    return agent


def one_choice(spec: EnvSpec) -> LeafSpec:
    """The action, if it is one discrete choice. Raises ConfigError for any other."""
    action = spec.action
    if not isinstance(action, LeafSpec) or action.kind != "discrete":
        raise ConfigError(
            f"Q-learning needs one discrete action; the environment takes {describe(action)}: use SAC, TD3 or "
            "DDPG for boxes, PPO for anything else"
        )
    return action


class QNetwork(nn.Module):
    """Features, optional memory and a head: [N, A] or, with more outputs for an action, [N, A, K].

    With `streams` there are two heads, of the value and of the advantages (Wang et al. 2016, figure 1), each with
    hidden layers of these widths of its own. None: one head. `sigma`: of noisy layers; None for plain ones.

    Layers start as torch's Linear do. Orthogonal ones with zero biases make Q of small raw observations, such as
    CartPole's, a cone, which fits slowly and grows where it is not anchored.
    """

    def __init__(
        self,
        spec: EnvSpec,
        obs: Tree,
        net: Net,
        actions: int,
        outputs: int,
        streams: tuple[int, ...] | None,
        sigma: float | None,
        closing: bool = True,
    ) -> None:
        super().__init__()

        def layers(inputs: int, hidden: tuple[int, ...]) -> nn.Module:
            if sigma is None:
                return net.body(inputs, hidden, gain=None)
            return NoisyMLP(inputs, hidden, sigma, net.activation, net.norm == "layer")

        def linear(inputs: int, outputs: int) -> nn.Module:
            return nn.Linear(inputs, outputs) if sigma is None else NoisyLinear(inputs, outputs, sigma)

        self.encoder = Encoder(obs, spec.action, net, closing)
        self.mlp = layers(self.encoder.size, net.hidden)
        size = int(self.mlp.size)  # pyright: ignore[reportArgumentType]
        self.memory = Memory(net.recurrent, size, net.recurrent_size) if net.recurrent != "none" else None
        size = self.memory.size if self.memory is not None else size
        self.actions, self.outputs = actions, outputs
        self.advantage_stream = layers(size, streams) if streams else None
        self.value_stream = layers(size, streams) if streams else None
        size = streams[-1] if streams else size
        self.advantage = linear(size, actions * outputs)
        self.value = linear(size, outputs) if streams is not None else None
        self.is_chain = self.memory is None and streams is None and sigma is None

    def forward(self, inputs: Inputs, obs: Tree, state: Tree = None) -> tuple[Tensor, Tree]:
        """Outputs of flat rows [N, ...], or of sequences [T, B, ...] with memory, and the state after them."""
        if self.memory is None:
            x = obs if self.encoder.is_identity else self.encoder(inputs, obs)
            if self.is_chain:
                return self._shaped(through(self.mlp, x, self.advantage)), None
            return self._head(self.mlp(x)), None
        lead = inputs.first.shape
        flat = inputs.flat()
        flat_obs = tree_map(flattened, obs)
        features = self.mlp(flat_obs if self.encoder.is_identity else self.encoder(flat, flat_obs))
        out, state = self.memory(features.reshape(*lead, -1), inputs.first, state, inputs.idle)
        return self._head(out), state

    def _head(self, x: Tensor) -> Tensor:
        advantage = self._shaped(out_of(self.advantage_stream, x, self.advantage))
        if self.value is None:
            return advantage
        value = out_of(self.value_stream, x, self.value)
        return ops.dueling(
            value if self.outputs == 1 else value.unsqueeze(-2), advantage, dim=-1 if self.outputs == 1 else -2
        )

    def _shaped(self, x: Tensor) -> Tensor:
        return x if self.outputs == 1 else x.unflatten(-1, (self.actions, self.outputs))


class QAgent(Agent):
    """Acts by the largest Q with a chance of `epsilon` for a random action, which may differ from slot to slot.

    A Dict observation with the key `action_mask` masks actions; the mask is not fed to the network. `target` is the
    network that bootstraps; it starts as a copy.

    Args:
        dueling: value and advantages in two streams (Wang et al. 2016). dueling_hidden: widths of each stream's hidden
            layers, which follow the body. None: one layer of its own for each stream: the body's last one, which is
            then no longer shared; behind a memory one as wide as it; and where `net.hidden` is empty one of 512, after
            an image's convolutions (as in the paper).
        noisy_sigma: first deviation of noisy layers times sqrt(inputs) (Fortunato et al. 2018, section 3.2).
        outputs: numbers for each action: 1, or the atoms or quantiles of a distribution.
        ladder: epsilon of slot i of N: the same for all, `epsilon^(1 + 7 i / (N - 1))` (Horgan et al. 2018), or spread
            evenly in logarithm from `epsilon_low` up to `epsilon` (rlpyt).
        records_q: record Q of the action and the largest Q, for priorities of fresh rows.
        eps_eval: chance of a random action in evaluations that are deterministic else.
        has_target: False leaves the target network out (PQN).
        network: a Q network of your own; see `q_agent`.
    """

    epsilon: Tensor
    """[B] of each slot."""
    explored: Tensor
    """Largest and smallest epsilon at this point of the run, which any number of slots is spread between."""
    atoms: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        net: Net,
        discount: float = 0.99,
        *,
        dueling: bool = False,
        dueling_hidden: tuple[int, ...] | None = None,
        noisy: bool = False,
        noisy_sigma: float = 0.5,
        outputs: int = 1,
        ladder: Ladder = "none",
        records_q: bool = False,
        eps_eval: float = 0.0,
        has_target: bool = True,
        network: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if net.use_sde:
            raise ConfigError("net.use_sde=True with one choice for an action; gSDE is for boxes, in PPO, A2C and SAC")
        net.refuse_parts("Q-learning")
        action: Any = one_choice(spec)
        if noisy and net.block != "none":
            raise ConfigError(f"noisy=True with net.block={net.block!r}, whose layers have no noise; use epsilon")
        if noisy and net.is_recurrent:
            raise ConfigError("noisy=True with a recurrent net; use epsilon, or a net without memory")
        self.spec, self.net, self.outputs = spec, net, outputs
        self.actions, self._start = action.sizes[0], int(action.start)  # pyright: ignore[reportArgumentType]
        tell_of_privileged(spec.obs, "leave it out, by a simulator's groups= or a wrapper, unless it may")
        self.fed, self.preparation = net.fed, Preparation(spec, net, discount)
        self.normalizer, self.reward_scaler = self.preparation.normalizer, self.preparation.reward_scaler
        streams = dueling_hidden if dueling else None
        body, closing = net, True
        if dueling and dueling_hidden is None:
            streams = (net.recurrent_size,) if net.is_recurrent else net.hidden[-1:] or (512,)
            body = net if net.is_recurrent else replace(net, hidden=net.hidden[:-1])
            closing = net.is_recurrent or bool(net.hidden)
        sigma = noisy_sigma if noisy else None
        seen = self.preparation.obs
        self.online: Any = (
            QNetwork(spec, seen, body, self.actions, outputs, streams, sigma, closing)
            if network is None
            else own_q_network(network, spec, seen, self.actions, outputs, net.is_recurrent)
        )
        self.target: Any = copy.deepcopy(self.online).requires_grad_(False) if has_target else None
        self._ladder, self._records_q, self.is_noisy = ladder, records_q, noisy
        self.env_ranks, self.noise_size = True, 3
        self._eps_eval, self.evaluates_with_noise = eps_eval, eps_eval > 0.0
        self.register_buffer("epsilon", torch.ones(1))
        self.register_buffer("atoms", torch.zeros(0), persistent=False)
        self.register_buffer("explored", torch.ones(2, dtype=torch.float64))
        self.register_load_state_dict_pre_hook(_as_many_slots)

    def set_slots(self, B: int) -> None:
        self.epsilon = self.epsilon.new_ones(B)
        self._spread(*self.explored.tolist())

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        high = float(settings.noisy_epsilon if self.is_noisy else settings.epsilon)
        low = min(float(settings.epsilon_low), high)
        wanted = [1.0, 1.0] if env_steps < settings.learning_starts else [high, low]
        explored: Any = self._buffers["explored"]  # looked up as an attribute it takes as long as it is read
        if explored.tolist() != wanted:  # asked twice for each batch
            explored.copy_(torch.from_numpy(np.array(wanted)))
            self._spread(*wanted)

    @property
    def needs_statistics(self) -> bool:
        return self.target is None and self.preparation.active and self.preparation.empty

    def renew_noise(self, rng: np.random.Generator) -> None:
        if self.is_noisy:
            for layer in (*noisy_layers(self.online), *noisy_layers(self.target)):
                layer.renew(rng)

    def initial_state(self, B: int) -> Tree:
        return self.online.memory.initial_state(B) if self.online.memory is not None else None

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        mask = self.mask(inputs.obs)
        if noise is None:
            explores = random = None
        else:
            chance, choice, slot, *_ = noise.unbind(1)
            explores, random = chance < self._chance(slot), self._random(choice, mask)
            if not self._records_q and self.online.memory is None and surely(explores):  # as all do in the beginning
                return random + self._start if self._start else random, {}, state
        if self.is_noisy and (noise is None or self._evaluated(noise)):
            with mean_weights(self.online):
                out, _ = self.online(inputs, self.prepared(inputs.obs))
        elif self.online.memory is None:
            out, _ = self.online(inputs, self.prepared(inputs.obs))
        else:
            one = Inputs(*(tree_map(lambda x: x.unsqueeze(0), part) for part in inputs))
            out, state = self.online(one, self.prepared(one.obs), state)
            out = out[0]
        q = self.expected(out)
        if mask is not None:
            q = q.masked_fill(~mask, MASKED)
        index = q.argmax(-1)
        if explores is not None and random is not None:
            index = torch.where(explores, random, index)
        info: dict[str, Tree] = {}
        if self._records_q:
            of_chosen = q.gather(-1, index.unsqueeze(-1)).squeeze(-1)
            info = {"q": of_chosen, "q_max": self.unless_stuck(inputs, q.amax(-1))}
        return index + self._start if self._start else index, info, state

    def by_kernel(self, noisy: bool) -> Acting | None:
        online = self.online
        if self._records_q or self.outputs > 1 or not is_plain(online, QNetwork) or not online.is_chain:
            return None
        if not takes_all((self.epsilon,)):
            return None
        acting = chain_by_kernel(self, QAgent, online.encoder, online.mlp, online.advantage, self.actions)
        given = {"start": self._start, "epsilon": self.epsilon, "epsilons": len(self.epsilon)}
        chance = {"evaluates": self.evaluates_with_noise, "evaluated": self._eps_eval}
        return acting and acting("greedy", self.actions, **given, **chance)

    def _chance(self, slot: Tensor) -> Tensor:
        """[B] or [1] of a random action, for slots of these numbers [B]."""
        chance = self.epsilon
        if len(chance) > 1:
            chance = chance[slot.long().remainder(len(chance))]  # an evaluation may have more slots
        return torch.where(slot < 0.0, self._eps_eval, chance) if self.evaluates_with_noise else chance

    def _random(self, u: Tensor, mask: Tensor | None) -> Tensor:
        """[B] indices of legal actions, all of them as likely, from uniforms [B]."""
        if mask is None:
            return (u * self.actions).long()
        nth = (u * mask.sum(-1)).long()
        return (mask.cumsum(-1) > nth.unsqueeze(-1)).long().argmax(-1)

    def forward(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """Outputs of the online network: [N, A] or [N, A, K]; [T, B, ...] with memory."""
        return self.online(inputs, self.prepared(inputs.obs), state)[0]

    def bootstrap(self, inputs: Inputs, state: Tree = None) -> Tensor:
        """Like `forward`, by the target network."""
        return self.target(inputs, self.prepared(inputs.obs), state)[0]

    def expected(self, out: Tensor) -> Tensor:
        """[..., A] Q of a network's outputs."""
        if self.outputs == 1:
            return out
        return (softmax(out) * self.atoms).sum(-1) if len(self.atoms) else out.mean(-1)

    def greedy(self, inputs: Inputs, q: Tensor) -> Tensor:
        """[...] index of the best action that the mask allows."""
        return self.legal(inputs, q).argmax(-1)

    def legal(self, inputs: Inputs, q: Tensor) -> Tensor:
        """[..., A] q, illegal actions set to `MASKED`."""
        mask = self.mask(inputs.obs)
        return q if mask is None else q.masked_fill(~mask.reshape(q.shape), MASKED)

    def index(self, action: Tensor) -> Tensor:
        """[...] int64 number of an action from 0."""
        return action.long() - self._start if self._start else action.long()

    def update_target(self, tau: float) -> None:
        """target <- (1 - tau) target + tau online."""
        follow(self.target, self.online, tau)

    def _evaluated(self, noise: Tensor) -> bool:
        """True in a deterministic evaluation; CUDA graphs, in which nothing can be asked, are of training alone."""
        return self.evaluates_with_noise and not _capturing(noise) and bool(noise[0, 2] < 0.0)

    def _spread(self, high: float, low: float) -> None:
        epsilon: Any = self._buffers["epsilon"]
        if self._ladder == "none" or high == 0.0:
            epsilon.fill_(high)
        elif self._ladder == "ape-x":
            epsilon.copy_(ops.epsilon_ladder(len(epsilon), high))
        else:
            epsilon.copy_(ops.log_space_ladder(len(epsilon), low, high))


def _as_many_slots(agent: QAgent, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Takes parameters of a run with any number of slots; `set_slots` then says how many there are."""
    stored = state.get(f"{prefix}epsilon")
    if stored is not None and stored.shape != agent.epsilon.shape:
        agent.epsilon = agent.epsilon.new_ones(stored.shape)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
