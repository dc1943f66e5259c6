"""PPO with memory behind an encoder of your own, whose step size is smaller: python examples/own_encoder.py [steps]"""

import sys

from torch import nn

import penstock as ps
from penstock.envs.toy import HideVelocity


class MyEncoder(nn.Module):
    def __init__(self, obs):  # the observation's spec
        super().__init__()
        self.features = 64
        self.layers = nn.Sequential(nn.Linear(obs.size, 64), nn.LayerNorm(64), nn.GELU())

    def forward(self, x):  # [N, *O] -> [N, features]
        return self.layers(x)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 60_000
    net = ps.Net(encoder=MyEncoder, hidden=(), recurrent="lstm", recurrent_size=64, critic_recurrent="own")
    algo = ps.PPO(lr=1e-3, net=net, lr_scales={"encoder.*": 0.5})
    env = ps.EnvConfig("CartPole-v1", wrappers=(HideVelocity,))
    ps.train(ps.Experiment(env, algo, run=ps.RunConfig(steps=steps)))
