"""Ape-X: a DQN whose slots explore by different epsilons, in processes that collect ahead: python examples/9_ape_x.py [steps]"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

algo = ps.DQN(
    lr=5e-4,
    n_step=3,
    dueling=True,
    batch_size=64,
    replay_ratio=16,
    target_interval=100,
    epsilon=0.4,
    ladder="ape-x",  # 0.4 in slot 0, down to 0.4^8 in the last
    replay=ps.ReplaySettings(capacity=100_000, index="prioritized", fresh_priority="agent"),
)
sampler = ps.AsyncSampler(ps.CpuSampler(T=8, B=8, workers=2), depth=1, weights="newest")
result = ps.train(ps.Experiment("CartPole-v1", algo, sampler, ps.RunConfig(steps=steps)))
for name in ("sampler/lag", "replay/ratio", "rollout/ep_rew_mean", "eval/mean_reward"):
    print(f"{name} {result.metrics[name]:.2f}")
