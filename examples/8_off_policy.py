"""An algorithm of your own on replay, Munchausen DQN from DQN's parts: python examples/8_off_policy.py [steps]"""

import sys
from dataclasses import dataclass

import penstock as ps
from penstock.algos import dqn


def postprocess(agent, x, cfg):  # Vieillard et al. 2020, arXiv:2007.14430, eq. 2 and 3; x is a sample of the replay
    q, q_next = agent.bootstrap(x.inputs), agent.bootstrap(x["next"])
    logp, logp_next = (q / cfg.temperature).log_softmax(-1), (q_next / cfg.temperature).log_softmax(-1)
    chosen = cfg.temperature * logp.gather(1, agent.index(x["action"]).unsqueeze(1)).squeeze(1)
    value = (logp_next.exp() * (q_next - cfg.temperature * logp_next)).sum(-1)
    target = x["return"] + cfg.bonus * chosen.clamp(-1.0, 0.0) + x["discount"] * value
    return ps.TrainBatch(x.inputs, {**x.rows, "target": target}, None)


@dataclass(frozen=True)
class Munchausen(ps.DQN):
    bonus: float = 0.9
    temperature: float = 0.03

    def build(self, spec, seed=0, device="cpu"):
        return ps.Policy(self, spec, agent_fn=self.agent, postprocess_fn=postprocess, loss_fn=dqn.loss_fn,
                         optimizer_fn=dqn.optimizer_fn, experience_fn=lambda agent: dqn.replay_fn(agent, self),
                         max_grad_norm=self.max_grad_norm, seed=seed, device=device)  # fmt: skip


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    algo = Munchausen(lr=1e-3, batch_size=64, replay_ratio=32, learning_starts=500, target_interval=100)
    result = ps.train(ps.Experiment("CartPole-v1", algo, run=ps.RunConfig(steps=steps)))
    print(f"evaluation: {result.metrics['eval/mean_reward']:.1f}, trained {result.metrics['replay/ratio']:.1f} times")
