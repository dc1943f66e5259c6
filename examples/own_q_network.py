"""DQN with a Q network of your own, whose target is made for you: python examples/own_q_network.py [steps]"""

import sys

from torch import nn

import penstock as ps


class MyQ(nn.Module):
    def __init__(self, spec):
        super().__init__()
        width, actions = spec.obs.size, spec.action.sizes[0]
        self.layers = nn.Sequential(nn.Linear(width, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, actions))

    def forward(self, obs):  # [N, *O] -> [N, A]
        return self.layers(obs)


def my_agent(spec, settings):
    return ps.q_agent(spec, settings, network=MyQ(spec))


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    algo = ps.DQN(
        agent=my_agent, lr=1e-3, batch_size=64, replay_ratio=32, learning_starts=500, target_interval=1, tau=0.01
    )
    ps.train(ps.Experiment("CartPole-v1", algo, run=ps.RunConfig(steps=steps)))
