"""Ape-X written out: workers collect for ever, this process learns from replay: python examples/17_your_own_ape_x.py [steps]

Batches have the columns of all slots, in which each worker's fragment stands once it has come: so replay takes them.
"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

algo = ps.DQN(lr=5e-4, n_step=3, dueling=True, batch_size=64, replay_ratio=16, target_interval=100, epsilon=0.4,
              ladder="ape-x",  # 0.4 in slot 0 of the first worker, down to 0.4^8 in the last slot of the last one
              replay=ps.ReplaySettings(capacity=100_000, index="prioritized", fresh_priority="agent"))  # fmt: skip
exp = ps.Experiment("CartPole-v1", algo, ps.SerialSampler(T=8, B=4), ps.RunConfig(seed=1, steps=steps))
with ps.EnvRunnerGroup(exp, num_env_runners=2, backend="processes") as workers:
    policy, done = workers.local_worker.policy, 0
    for batch in workers.sample_async(max_in_flight=2):  # it asks again at once, with this policy's newest weights
        metrics = ps.train_one_step(policy, batch)
        done += batch.env_steps
        if done >= steps:
            break
    print(f"{done:,} steps, {metrics['train/n_updates']:,.0f} updates, epsilon", policy.agent.epsilon)
    for worker, found in enumerate(workers.foreach(lambda w: w.get_metrics())):
        print(f"worker {worker}: return {found['rollout/ep_rew_mean']:.1f}")
