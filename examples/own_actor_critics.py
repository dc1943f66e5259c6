"""SAC with an actor and critics of your own: python examples/own_actor_critics.py [steps]"""

import sys

import torch
from torch import nn

import penstock as ps


def layers(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


class MyCritics(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.first, self.second = layers(inputs, 1), layers(inputs, 1)

    def forward(self, obs, action):  # [N, *O], [N, A] in [-1, 1] -> [k, N], here of k=2 critics
        x = torch.cat([obs, action], -1)
        return torch.stack([self.first(x), self.second(x)]).squeeze(-1)


def my_agent(spec, settings):
    obs, action = spec.obs.size, spec.action.size
    actor = layers(obs, 2 * action)  # [N, *O] -> [N, 2 A]: means and log deviations, before tanh
    return ps.control_agent(spec, settings, actor, MyCritics(obs + action))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    algo = ps.SAC(agent=my_agent, lr=1e-3, batch_size=128, replay_ratio=128, learning_starts=500)
    ps.train(ps.Experiment("Pendulum-v1", algo, run=ps.RunConfig(steps=steps)))
