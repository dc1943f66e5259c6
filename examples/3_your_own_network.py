"""PPO with an agent of your own: python examples/3_your_own_network.py [steps]"""

import sys

from torch import nn

import penstock as ps
from penstock.agents.distributions import Categorical


class MyAgent(ps.Agent):
    def __init__(self, spec):
        super().__init__()
        self.spec, self.noise_size = spec, 1  # one uniform number draws one choice
        self.body = nn.Sequential(nn.Linear(spec.obs.size, 64), nn.LayerNorm(64), nn.ReLU())
        self.actor, self.critic = nn.Linear(64, spec.action.sizes[0]), nn.Linear(64, 1)

    def forward(self, inputs, state=None):  # PPO and A2C read `dist` and `value`
        features = self.body(inputs.obs)
        return ps.Output(Categorical(self.actor(features)), self.critic(features).squeeze(-1))

    def act(self, inputs, state, noise):
        dist = self(inputs).dist
        action = dist.mode() if noise is None else dist.sample(noise)
        return action, {"logp": dist.log_prob(action)}, state


def my_agent_fn(spec, settings):
    return MyAgent(spec)


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3, agent=my_agent_fn), run=ps.RunConfig(steps=steps)))
