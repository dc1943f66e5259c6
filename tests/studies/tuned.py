"""A search by Ray Tune over penstock, as a script: `tuned.py asha|pbt|restore FOLDER`; prints what it found as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import penstock as ps
from penstock.actors.cluster import start_ray

STEPS = 1024
EXP = ps.Experiment(
    "CartPole-v1",
    ps.A2C(),
    ps.SerialSampler(T=16, B=4),
    ps.RunConfig(steps=STEPS, seed=1, progress="off", eval_episodes=1, log_interval=1),
)


def main(which: str, folder: str) -> None:
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    cluster = start_ray(num_cpus=2)
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

    if which == "restore":
        tuner = tune.Tuner.restore(f"{folder}/search", trainable=ps.trainable(EXP, report_interval=256))
    else:
        scheduler = ASHAScheduler(time_attr="env_steps", max_t=STEPS, grace_period=256)
        space = {"algo.lr": tune.loguniform(1e-4, 1e-2)}
        if which == "pbt":
            space = {"algo.lr": tune.grid_search([1e-6, 1e-3])}
            scheduler = PopulationBasedTraining(
                time_attr="training_iteration", perturbation_interval=1, quantile_fraction=0.5, synch=True,
                hyperparam_mutations={"algo.lr": tune.loguniform(1e-4, 1e-2)},
            )  # fmt: skip
        tuner = tune.Tuner(
            ps.trainable(EXP, report_interval=256),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="rollout/ep_rew_mean", mode="max", scheduler=scheduler, num_samples=1 if which == "pbt" else 3
            ),
            run_config=tune.RunConfig(storage_path=folder, name="search", verbose=0),
        )
    found = tuner.fit()
    rows = [
        {
            "lr": result.config["algo.lr"],
            "steps": result.metrics["env_steps"],
            "error": str(result.error) if result.error else None,
            "stored": json.loads(Path(result.checkpoint.path, "config.json").read_text())["experiment"]["algo"]["lr"],
            "trained": ps.load(result.checkpoint.path).predict([0.0, 0.0, 0.0, 0.0]) in (0, 1),
        }
        for result in found
    ]
    print(json.dumps({"rows": rows, "listeners": cluster.listeners}))
    cluster.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
