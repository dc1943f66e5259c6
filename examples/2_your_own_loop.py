"""The same without a run: your loop, nothing on disk: python examples/2_your_own_loop.py [steps]"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

sampler = ps.SerialSampler(T=64, B=16).build("CartPole-v1", seed=1)
policy = ps.PPO(lr=1e-3, minibatch=256, epochs=10).build(sampler.spec, seed=1)
sampler.initialize(policy.agent)
done = itr = 0
while done < steps:
    batch, episodes = sampler.obtain_samples(itr)
    metrics = ps.train_one_step(policy, batch)
    done, itr = done + batch.env_steps, itr + 1
    if itr % 10 == 0:
        print(f"{done:>7,} steps  return {episodes.mean_return:6.1f}  approx_kl {metrics['train/approx_kl']:.4f}")
print(f"evaluation: {sampler.evaluate_agent(itr, episodes=20).mean_return:.1f}")
sampler.shutdown()
