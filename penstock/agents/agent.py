"""What samplers and algorithms need of an agent: act on one step, answer over a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.core.batch import Inputs, SampleBatch
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree


class Agent(nn.Module):
    """A policy with whatever networks it needs. Memoryless unless `initial_state` says otherwise.

    Acting is a pure function of inputs, state and noise: no modes, no hidden generators, no `reset_one`. Recurrent
    state, previous action and reward count as null wherever `first`; the agent sees to it.
    """

    spec: EnvSpec
    noise_size: int
    """Uniform numbers that `act` uses for each slot and step."""
    env_ranks = False
    """True: the last of the `noise_size` numbers is the slot's number instead, over all workers."""

    def initial_state(self, B: int) -> Tree:
        """Recurrent state [B, ...] before an episode, or None."""
        return None

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        """One step for B slots, called without gradients.

        Args:
            inputs: [B, ...] tensors. state: [B, ...] as the step before returned it.
            noise: [B, noise_size] float32 in (0, 1), or None for the deterministic action.

        Returns:
            action [B, *A] in the units of the environment, info [B, ...] to record, and the new state.
        """
        raise NotImplementedError(f"{type(self).__name__} must define act(inputs, state, noise)")

    def forward(self, inputs: Inputs, state: Tree = None) -> Any:
        """What the loss needs, for [N, ...] rows, or for [T, B, ...] rows from `state` if recurrent."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(inputs, state)")

    def values(self, batch: SampleBatch) -> Tensor:
        """V(obs) [T+1, B] without gradient, in one forward (recurrent: one unroll from the batch's state)."""
        with torch.no_grad():
            if batch.state is not None:
                return self(batch.inputs, batch.state).value
            return self(batch.inputs.flat(), None).value.reshape(batch.first.shape)

    def needed(self, inputs: Inputs) -> Inputs:
        """The inputs that `forward` reads, the others None, so that minibatches need not carry them."""
        return inputs

    def observe(self, batch: SampleBatch) -> None:
        """Called after training on a batch: the place to update running statistics. Does nothing by default."""

    def scaled_reward(self, reward: Tensor) -> Tensor:
        """The reward that targets are made of; the record keeps the environment's own."""
        return reward

    def terminal(self, batch: SampleBatch) -> Tensor:
        """[T, B] bool: rows after which targets expect nothing more; the record keeps the environment's own."""
        return batch.terminated

    def set_slots(self, B: int) -> None:
        """Called by the sampler with the number of slots, before anything is acted on. Does nothing by default."""

    def set_exploration(self, settings: Any, env_steps: int) -> None:
        """Called between batches with the algorithm's settings at present; whatever changes lives in buffers."""

    def renew_noise(self, rng: np.random.Generator) -> None:
        """Called before each gradient step from replay: the place to draw the noise of noisy networks."""

    @property
    def needs_statistics(self) -> bool:
        """True before the first batch if running statistics must be set before anything is learned."""
        return False
