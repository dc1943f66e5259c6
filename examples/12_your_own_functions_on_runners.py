"""Postprocessing, loss and optimizer of your own, trained by runners: python examples/12_your_own_functions_on_runners.py [steps]

`examples/reinforce.py` is used as it stands. Runners in other processes get the agent by value; they need neither the
file nor its folder, on Ray as little as here.
"""

import sys

import reinforce  # this file's folder is on the import path of a script
import torch

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000


def optimizer(agent, cfg):
    return {"all": torch.optim.RMSprop(agent.parameters(), lr=cfg.lr, alpha=0.99)}


class WithRMSprop(reinforce.Reinforce):
    def build(self, spec, seed=0, device="cpu"):
        return ps.Policy(self, spec, agent_fn=ps.actor_critic, postprocess_fn=reinforce.postprocess,
                         loss_fn=reinforce.loss, optimizer_fn=optimizer, seed=seed, device=device)  # fmt: skip


sampler = ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=64, B=8), depth=0, backend="processes")
print(ps.train(ps.Experiment("CartPole-v1", WithRMSprop(), sampler, ps.RunConfig(steps=steps, seed=1))))
