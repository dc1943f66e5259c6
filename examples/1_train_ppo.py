"""Train PPO on CartPole and look at the result: python examples/1_train_ppo.py [steps]"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

exp = ps.Experiment(
    env="CartPole-v1",
    algo=ps.PPO(lr=1e-3, minibatch=256, epochs=10),
    sampler=ps.SerialSampler(T=64, B=16),
    run=ps.RunConfig(steps=steps, seed=1),
)
result = ps.train(exp)
print(f"mean return of the last episodes: {result.episodes.mean_return:.1f}; everything is in {result.run_dir}")
