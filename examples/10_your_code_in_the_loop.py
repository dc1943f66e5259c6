"""Code of your own between the iterations of a run: python examples/10_your_code_in_the_loop.py [steps]"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

exp = ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3), run=ps.RunConfig(steps=steps, seed=1, eval_interval=10_000))
good = 0
with ps.Run(exp) as run:  # logs, evaluates, checkpoints and obeys Ctrl-C as ps.train does
    for it in run:
        good = good + 1 if it.episodes.mean_return > 200 else 0
        it.metrics["mine/good_batches"] = good  # a column of metrics.jsonl, progress.csv and trackers
        if it.evaluation is not None:
            print(f"step {it.env_steps:,}: worst of the evaluated episodes {it.evaluation.return_.min():.0f}")
        if good == 10:
            break  # saves, and ends the run; ps.resume would go on
print(run.result)
episodes = ps.evaluate(run.result.policy, "CartPole-v1", episodes=10, seed=2)
print(f"evaluated once more: {episodes.mean_return:.1f} +- {episodes.return_.std():.1f}")
