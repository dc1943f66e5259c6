"""Gradient steps of PPO, SAC and DQN in plain torch, as CleanRL writes them, eager, compiled, or as one CUDA graph.

For `gpu.py`: the same networks, rows and optimizers as penstock's, on rows that stay the same, with nothing around them.
The compiled and graphed forms are what LeanRL adds: `torch.compile` of the whole update, Adam with `capturable`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Update = Callable[[], None]
FORMS = ("eager", "compiled", "CUDA graph")


def layers(inputs: int, hidden: Iterable[int], outputs: int, kind: type[nn.Module]) -> nn.Sequential:
    """Fully connected layers, each but the last followed by the activation."""
    widths = (inputs, *hidden, outputs)
    parts = [part for n, m in pairwise(widths) for part in (nn.Linear(n, m), kind())]
    return nn.Sequential(*parts[:-1])


def nature() -> nn.Sequential:
    """[N, 4, 84, 84] uint8 as floats -> [N, 512] (Mnih et al. 2015)."""
    return nn.Sequential(
        nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(),
    )  # fmt: skip


def rows_of(obs: Any, rows: int, device: str) -> Tensor:
    """Random observations of a space."""
    if obs.dtype.kind == "u":
        return torch.randint(0, 256, (rows, *obs.shape), dtype=torch.uint8, device=device)
    return torch.rand(rows, *obs.shape, device=device) * 2.0 - 1.0


def features(x: Tensor) -> Tensor:
    """What networks take: images as floats in [0, 1]."""
    return x.float() / 255.0 if x.dtype is torch.uint8 else x


def adam(parameters: Iterable[Tensor], lr: float, device: str) -> torch.optim.Adam:
    """Fused, and fit for a graph on CUDA."""
    on_gpu = device.startswith("cuda")
    return torch.optim.Adam(parameters, lr=lr, fused=True, capturable=on_gpu)


def ppo(obs: Any, actions: int, rows: int, hidden: tuple[int, ...], device: str, activation: str = "tanh") -> Update:
    """One minibatch: clipped surrogate, value loss, entropy, clipped gradient norm."""
    if len(obs.shape) == 3:
        body, size = nature().to(device), 512
        policy, value = nn.Linear(size, actions).to(device), nn.Linear(size, 1).to(device)
    else:
        body, size = nn.Identity(), obs.shape[0]
        kind = {"tanh": nn.Tanh, "relu": nn.ReLU}[activation]
        policy, value = (layers(size, hidden, n, kind).to(device) for n in (actions, 1))
    held = [p for module in (body, policy, value) for p in module.parameters()]
    optimizer = adam(held, 3e-4, device)
    x = rows_of(obs, rows, device)
    action = torch.randint(0, actions, (rows, 1), device=device)
    old_logp, advantage, returns = torch.randn(3, rows, device=device)

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        h = body(features(x))
        logp_all = policy(h).log_softmax(-1)
        ratio = (logp_all.gather(1, action).squeeze(1) - old_logp).exp()
        surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        entropy = -(logp_all.exp() * logp_all).sum(-1).mean()
        loss = 0.5 * F.mse_loss(value(h).squeeze(1), returns) - surrogate - 0.01 * entropy
        loss.backward()
        nn.utils.clip_grad_norm_(held, 0.5)
        optimizer.step()

    return update


def sac(obs: Any, actions: int, rows: int, hidden: tuple[int, ...], device: str, activation: str = "relu") -> Update:
    """Critics, actor, temperature and soft targets."""
    inputs = obs.shape[0]
    actor = layers(inputs, hidden, 2 * actions, nn.ReLU).to(device)
    critics = nn.ModuleList(layers(inputs + actions, hidden, 1, nn.ReLU) for _ in range(2)).to(device)
    targets = copy.deepcopy(critics).requires_grad_(False)
    log_alpha = torch.zeros(1, device=device, requires_grad=True)
    optimizers = [adam(x, 3e-4, device) for x in (critics.parameters(), actor.parameters(), [log_alpha])]
    x, following = rows_of(obs, rows, device), rows_of(obs, rows, device)
    taken = torch.rand(rows, actions, device=device) * 2.0 - 1.0
    reward = torch.randn(rows, device=device)

    def sample(states: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = actor(states).chunk(2, -1)
        z, log_std = torch.randn_like(mean), log_std.clamp(-20.0, 2.0)
        u = mean + log_std.exp() * z
        logp = -0.5 * z.square() - log_std - 2.0 * (0.6931 - u - F.softplus(-2.0 * u))
        return torch.tanh(u), logp.sum(-1)

    def least(modules: nn.ModuleList, states: Tensor, action: Tensor) -> Tensor:
        both = torch.cat([states, action], -1)
        return torch.min(modules[0](both), modules[1](both)).squeeze(-1)

    def update() -> None:
        with torch.no_grad():
            action, logp = sample(following)
            target = reward + 0.99 * (least(targets, following, action) - log_alpha.exp() * logp)
        both = torch.cat([x, taken], -1)
        critic_loss = sum(0.5 * F.mse_loss(critic(both).squeeze(-1), target) for critic in critics)
        action, logp = sample(x)
        actor_loss = (log_alpha.exp().detach() * logp - least(critics, x, action)).mean()
        alpha_loss = -(log_alpha * (logp.detach() - actions).mean()).sum()
        for loss, module in ((critic_loss, critics), (actor_loss, actor), (alpha_loss, None)):
            held = [log_alpha] if module is None else list(module.parameters())
            for p, gradient in zip(held, torch.autograd.grad(loss, held, retain_graph=module is critics)):  # pyright: ignore
                p.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(targets.parameters()), list(critics.parameters()), 0.005)  # pyright: ignore

    return update


def dqn(obs: Any, actions: int, rows: int, hidden: tuple[int, ...], device: str, activation: str = "relu") -> Update:
    """Double Q-learning with Huber loss; images, whose features are the last hidden layer."""
    body, head = nature().to(device), nn.Linear(512, actions).to(device)
    online = nn.Sequential(body, head)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = adam(online.parameters(), 1e-4, device)
    x, following = rows_of(obs, rows, device), rows_of(obs, rows, device)
    action = torch.randint(0, actions, (rows, 1), device=device)
    reward = torch.randn(rows, device=device)

    def update() -> None:
        with torch.no_grad():
            best = online(features(following)).argmax(1, keepdim=True)
            aim = reward + 0.99 * target(features(following)).gather(1, best).squeeze(1)
        optimizer.zero_grad(set_to_none=True)
        loss = F.huber_loss(online(features(x)).gather(1, action).squeeze(1), aim)
        loss.backward()
        nn.utils.clip_grad_norm_(online.parameters(), 10.0)
        optimizer.step()

    return update


MAKERS: dict[str, Callable[..., Update]] = {"PPO": ppo, "SAC": sac, "DQN": dqn}


def made(
    algo: str, form: str, obs: Any, actions: int, rows: int, hidden: tuple[int, ...], device: str, activation: str
) -> Update:
    """A function that takes one gradient step. Raises RuntimeError where the form is not to be had."""
    update = MAKERS[algo](obs, actions, rows, hidden, device, activation)
    if form == "eager":
        return update
    if form == "compiled":
        torch._dynamo.reset()  # pyright: ignore  # else another algorithm's shapes count as changes of these
        compiled = torch.compile(update)
        compiled()
        return compiled
    if not device.startswith("cuda"):
        raise RuntimeError("a CUDA graph needs CUDA")
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                update()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            update()

    def replay(
        held: Update = update,
    ) -> None:  # a graph holds nothing that was there before it: the rows would be freed
        graph.replay()

    return replay
