"""REINFORCE with a baseline (Williams 1992), from outside the package: python examples/reinforce.py [steps]

Or, in this folder, with every option of the command line: penstock train reinforce:Reinforce --env CartPole-v1
"""

import sys
from dataclasses import dataclass

import penstock as ps


def postprocess(agent, batch, cfg):
    value = agent.values(batch)
    ends = batch.terminated, batch.truncated, batch.valid
    return_ = ps.ops.discounted_return(batch.reward, value, *ends, discount=cfg.discount)
    rows = {"action": batch.action, "return": return_, "advantage": return_ - value[:-1]}
    return ps.TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state)


def loss(agent, x, cfg):
    dist, value = agent(x.inputs, x.state)
    pg_loss = -ps.ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    v_loss = ps.ops.squared_error(value, x["return"], x.valid)
    return ps.Loss(pg_loss + v_loss, {"policy_gradient_loss": pg_loss.detach(), "value_loss": v_loss.detach()})


@dataclass(frozen=True)
class Reinforce:
    lr: ps.Schedule = 3e-3
    discount: float = 0.99
    net: ps.Net = ps.Net()
    batch = ps.BatchSpec(T=64, B=16)

    def build(self, spec, seed=0, device="cpu"):
        return ps.Policy(self, spec, agent_fn=ps.actor_critic, postprocess_fn=postprocess, loss_fn=loss,
                         optimizer_fn=ps.adam, max_grad_norm=0.5, seed=seed, device=device)  # fmt: skip


if __name__ == "__main__":
    ps.train(ps.Experiment("CartPole-v1", Reinforce(), run=ps.RunConfig(int(sys.argv[1]) if sys.argv[1:] else 100_000)))
