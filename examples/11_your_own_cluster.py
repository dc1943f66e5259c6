"""Workers sample, this process trains, all of it written out: python examples/11_your_own_cluster.py [steps]

With `backend="ray"` the workers are actors of Ray, and `ray.get` is as good as `workers.get`.
"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

exp = ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3, minibatch=256), ps.SerialSampler(T=64, B=8), ps.RunConfig(seed=1))
with ps.EnvRunnerGroup(exp, num_env_runners=2, backend="processes") as workers:
    policy, done = workers.local_worker.policy, 0
    while done < steps:
        workers.sync_weights()  # one copy of the weights, which each worker fetches before it samples
        batch = ps.concat_samples(workers.get([w.sample.remote() for w in workers.remote_workers]))
        metrics = ps.train_one_step(policy, batch)
        done += batch.env_steps
    print(f"{done:,} steps  approx_kl {metrics['train/approx_kl']:.4f}")
    for worker, found in enumerate(workers.foreach(lambda w: w.get_metrics())):
        print(f"worker {worker}: return {found['rollout/ep_rew_mean']:.1f}")

# The same as a run, with logs, checkpoints and exact resume; its batches are those of one process, bit for bit.
sampler = ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=64, B=8), backend="processes")
print(ps.train(ps.Experiment("CartPole-v1", exp.algo, sampler, ps.RunConfig(steps=steps, seed=1))))
