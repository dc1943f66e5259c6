"""An agent as a module of tensors alone: what `torch.export`, ONNX and `torch.jit.trace` take."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs
from penstock.core.tree import Tree, tree_leaves, tree_structure, tree_unflatten


class ExportableAgent(nn.Module):
    """[N, ...] observations -> [N, *A] deterministic actions, clipped to their bounds as `Policy.predict` clips them.

    With memory it returns the action and the new state; `agent.initial_state(N)` is the state before an episode. The
    normaliser of observations is inside. An `Agent`'s own `forward` is for losses and may return a distribution.
    """

    def __init__(self, agent: Agent) -> None:
        super().__init__()
        self.agent = agent
        self._structure = tree_structure(agent.spec.action)
        leaves = tree_leaves(agent.spec.action)
        self._clips = [x.kind == "box" and any(np.isfinite(b).any() for b in x.limits()) for x in leaves]
        for i, leaf in enumerate(leaves):
            if self._clips[i]:
                for name in ("low", "high"):
                    bound = torch.tensor(leaf.bound(name), dtype=torch.float32)
                    self.register_buffer(f"{name}_{i}", bound, persistent=False)

    def forward(
        self,
        obs: Tree,
        state: Tree = None,
        first: Tensor | None = None,
        prev_action: Tree = None,
        prev_reward: Tensor | None = None,
    ) -> Tree:
        """The action [N, *A], or (action, state) with memory.

        Args:
            state: as the step before returned it. first: [N] bool, None where no observation opens an episode.
            prev_action, prev_reward: [N, ...], only for agents that are fed them.
        """
        if first is None and "first" in self.agent.fed:
            one = tree_leaves(obs)[0]
            first = torch.zeros(one.shape[:1], dtype=torch.bool, device=one.device)
        inputs = Inputs(obs, prev_action, prev_reward, first)  # pyright: ignore[reportArgumentType]
        action, _, state = self.agent.act(inputs, state, None)
        clipped = [
            x.clamp(getattr(self, f"low_{i}"), getattr(self, f"high_{i}")) if self._clips[i] else x
            for i, x in enumerate(tree_leaves(action))
        ]
        action = tree_unflatten(self._structure, clipped)
        return action if state is None else (action, state)
