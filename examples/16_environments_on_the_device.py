"""Environments whose arrays are torch tensors: python examples/16_environments_on_the_device.py [steps]

The batch lies on the device where the environments are; "cpu" here, "cuda" where there is one.
"""

import sys

import penstock as ps
from penstock.tensor_envs import PixelCatch

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40_000
device = "cpu"

sampler = ps.SerialSampler(T=8, B=128).build(ps.EnvConfig(PixelCatch, {"device": device}), seed=0)
policy = ps.PPO(lr=1e-3, epochs=4, minibatch=512).build(sampler.spec, seed=0, device=device)
sampler.initialize(policy.agent)
for itr in range(steps // sampler.batch_spec.size):
    batch, episodes = sampler.obtain_samples(itr)
    ps.train_one_step(policy, batch)
print(f"{type(batch.obs).__name__} {batch.obs.dtype} {list(batch.obs.shape)} on {batch.obs.device}")
print(f"return of the last {len(episodes)} episodes: {episodes.mean_return:.2f}")
sampler.shutdown()
