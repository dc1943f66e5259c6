"""PPO on Pong by Stable-Baselines3, or in one plain file of torch over EnvPool as CleanRL's recipe does it.

For `atari_ppo.py`: answers each line of standard input, a number of batches, once it has collected and trained on as many.
The settings are those of the contest: 16 games, 128 steps, minibatches of 256, 4 epochs, whole games as episodes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

B, T, MINIBATCH, EPOCHS, LR, CLIP, DISCOUNT, LAMBDA = 16, 128, 256, 4, 2.5e-4, 0.1, 0.99, 0.95
ENTROPY, VALUE, NORM = 0.01, 0.5, 0.5


def sb3() -> tuple[str, Callable[[int], object]]:
    """SB3's PPO with a process for each game."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecFrameStack

    gym.register_envs(ale_py)
    envs = make_atari_env("PongNoFrameskip-v4", n_envs=B, seed=0, wrapper_kwargs={"terminal_on_life_loss": False},
                          vec_env_cls=SubprocVecEnv, vec_env_kwargs={"start_method": "fork"})  # fmt: skip
    model = PPO("CnnPolicy", VecFrameStack(envs, 4), n_steps=T, batch_size=MINIBATCH, n_epochs=EPOCHS, learning_rate=LR,
                clip_range=CLIP, ent_coef=ENTROPY, vf_coef=VALUE, max_grad_norm=NORM, device="cpu")  # fmt: skip
    return "stable-baselines3", lambda batches: model.learn(batches * T * B, reset_num_timesteps=False)


class Plain:
    """Environments, network, buffers and the loop over them."""

    def __init__(self, threads: int) -> None:
        torch.manual_seed(0)
        make: Any = importlib.import_module("envpool").make
        self.env = make("Pong-v5", env_type="gymnasium", num_envs=B, num_threads=threads, seed=0, episodic_life=False,
                        reward_clip=True, repeat_action_probability=0.0)  # fmt: skip
        self.body = nn.Sequential(
            _layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), _layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            _layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(), _layer(nn.Linear(3136, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = _layer(nn.Linear(512, int(self.env.action_space.n)), 0.01)
        self.critic = _layer(nn.Linear(512, 1), 1.0)
        self.parameters = [*self.body.parameters(), *self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=LR, eps=1e-5)
        self.obs = torch.zeros(T, B, 4, 84, 84)
        self.action, self.logp, self.reward, self.done, self.value = torch.zeros(5, T, B)
        self.now, self.ended = torch.as_tensor(self.env.reset()[0]), torch.zeros(B)

    def outputs(self, obs: torch.Tensor) -> tuple[Categorical, torch.Tensor]:
        """Policy and value [N] of observations [N, 4, 84, 84]."""
        features = self.body(obs / 255.0)
        return Categorical(logits=self.actor(features)), self.critic(features).flatten()

    def learn(self, batches: int) -> None:
        """Batches, each with its gradient steps."""
        for _ in range(batches):
            self.collect()
            self.train()

    def collect(self) -> None:
        """T steps of every game, with value and log-probability of each."""
        for t in range(T):
            self.obs[t], self.done[t] = self.now, self.ended
            with torch.no_grad():
                policy, self.value[t] = self.outputs(self.obs[t])
                action = policy.sample()
                self.action[t], self.logp[t] = action, policy.log_prob(action)
            obs, reward, terminated, truncated, _ = self.env.step(action.numpy().astype(np.int32))
            self.reward[t] = torch.as_tensor(reward)
            self.now, self.ended = torch.as_tensor(obs), torch.as_tensor(terminated | truncated).float()

    def train(self) -> None:
        """Advantages, then epochs of shuffled minibatches."""
        advantage, last = torch.zeros(T, B), torch.zeros(B)
        with torch.no_grad():
            following = self.outputs(self.now.float())[1]
        for t in reversed(range(T)):
            going = 1.0 - (self.ended if t == T - 1 else self.done[t + 1])
            error = self.reward[t] + DISCOUNT * following * going - self.value[t]
            advantage[t] = last = error + DISCOUNT * LAMBDA * going * last
            following = self.value[t]
        rows = [
            x.flatten(0, 1) for x in (self.obs, self.action, self.logp, advantage, advantage + self.value, self.value)
        ]
        for _ in range(EPOCHS):
            for part in np.array_split(np.random.permutation(T * B), T * B // MINIBATCH):
                self.update(*(x[part] for x in rows))

    def update(self, obs: Any, action: Any, logp: Any, advantage: Any, return_: Any, value: Any) -> None:
        """One gradient step, the value loss clipped as well."""
        policy, now = self.outputs(obs)
        ratio = (policy.log_prob(action) - logp).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        surrogate = torch.min(advantage * ratio, advantage * ratio.clamp(1.0 - CLIP, 1.0 + CLIP)).mean()
        near = value + (now - value).clamp(-CLIP, CLIP)
        value_loss = 0.5 * torch.max((now - return_).square(), (near - return_).square()).mean()
        self.optimizer.zero_grad()
        (VALUE * value_loss - surrogate - ENTROPY * policy.entropy().mean()).backward()
        nn.utils.clip_grad_norm_(self.parameters, NORM)
        self.optimizer.step()


def _layer(layer: Any, gain: float = 2.0**0.5) -> Any:
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["sb3", "envpool"], required=True)
    parser.add_argument("--threads", type=int, required=True, help="of torch, and of EnvPool")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name, learn = sb3() if args.peer == "sb3" else ("envpool", Plain(args.threads).learn)
    learn(1)
    print(f"{name} {importlib.metadata.version(name)}, torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        learn(int(line))
        print("done", flush=True)
    os._exit(0)  # EnvPool's threads end in a segmentation fault otherwise
