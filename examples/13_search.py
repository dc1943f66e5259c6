"""A search for settings by successive halving, with the best one trained again: python examples/13_search.py [steps]"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

run = ps.RunConfig(steps=steps, seed=1, eval_episodes=5)
exp = ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=32, B=8), run)
space = {"algo.lr": "loguniform(1e-4, 1e-2)", "algo.entropy_coef": [0.0, 0.01]}
found = ps.tune(exp, space, scheduler="asha", trials=3, interval=max(steps // 9, 256))  # parallel=2: two at a time
for trial in found.trials:
    print(f"trial {trial.number}: {trial.state} with {trial.score} after {trial.steps:,} steps, {dict(trial.values)}")
print(found)
if found.experiment is not None:
    print(ps.train(ps.override(found.experiment, {"run.seed": 2, "run.progress": "off"})))
