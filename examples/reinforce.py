"""REINFORCE with a baseline (Williams 1992), from outside the package: penstock train reinforce:Reinforce --env CartPole-v1"""

from dataclasses import dataclass

import torch

import penstock as ps


def postprocess(agent, batch, cfg):
    value = agent.values(batch)
    ends = (batch.terminated, batch.truncated, batch.valid)
    return_ = ps.ops.discounted_return(batch.reward, value, *ends, discount=cfg.discount)
    rows = {"action": batch.action, "return": return_, "advantage": return_ - value[:-1]}
    return ps.TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state)


def loss(agent, x, cfg):
    dist, value = agent(x.inputs, x.state)
    policy_loss = -ps.ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    value_loss = ps.ops.squared_error(value, x["return"], x.valid)
    return ps.Loss(policy_loss + value_loss, {"policy_gradient_loss": policy_loss.detach(), "value_loss": value_loss.detach()})


@dataclass(frozen=True)
class Reinforce:
    lr: ps.Schedule = 3e-3
    discount: float = 0.99
    net: ps.Net = ps.Net()
    batch: ps.BatchSpec = ps.BatchSpec(T=64, B=16)

    def build(self, spec, seed=0, device="cpu"):
        return ps.Policy(self, spec, agent_fn=ps.actor_critic, postprocess_fn=postprocess, loss_fn=loss,
                         optimizer_fn=ps.adam, max_grad_norm=0.5, seed=seed, device=device)
