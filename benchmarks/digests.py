"""Bits of two checkouts on one machine, compared by sha256: what each algorithm samples and learns.

    python benchmarks/digests.py OLD NEW [--only ppo]

Bits differ between processors, so no test stores them: a change that is to alter nothing is run beside the state
before it. Each case is a fresh process per checkout: batches of the sampler, parameters after training on them, and an
evaluation. A difference names the case and what differs first; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ITERATIONS = 12
LIMIT_S = 600.0
SMALL = '(hidden=(16,), activation="relu")'
ALGOS = {
    "ppo": ("CartPole-v1", "ps.PPO(lr='linear(1e-3, 0)', epochs=2, minibatch=32)"),
    "ppo-lstm": (
        "Pendulum-v1",
        "ps.PPO(epochs=2, minibatch=32, net=ps.Net(hidden=(16,), recurrent='lstm', recurrent_size=8, prev_action=True, "
        "prev_reward=True, normalize_obs=True, normalize_reward=True))",
    ),
    "dqn-per": (
        "CartPole-v1",
        f"ps.DQN(net=ps.Net{SMALL}, learning_starts=64, replay_ratio=32, n_step=3, ladder='ape-x', target_interval=20, "
        "replay=ps.ReplaySettings(capacity=1000, index='prioritized', fresh_priority='agent'))",
    ),
    "sac": ("Pendulum-v1", f"ps.SAC(net=ps.Net{SMALL}, learning_starts=64, batch_size=64, replay_ratio=32)"),
    "r2d1": (
        "CartPole-v1",
        "ps.R2D1(net=ps.Net(hidden=(16,), recurrent='lstm', recurrent_size=8), learning_starts=128, batch_size=4, "
        "burn_in=4, train_length=16, state_interval=16, n_step=2, "
        "replay=ps.ReplaySettings(capacity=1000, index='prioritized'))",
    ),
    "a2c": ("CartPole-v1", "ps.A2C()"),
    "impala": ("CartPole-v1", "ps.IMPALA()"),
    "appo": ("CartPole-v1", "ps.APPO(epochs=2, minibatch=32)"),
    "td3": ("Pendulum-v1", f"ps.TD3(net=ps.Net{SMALL}, learning_starts=64, batch_size=64, replay_ratio=32)"),
    "ddpg": ("Pendulum-v1", f"ps.DDPG(net=ps.Net{SMALL}, learning_starts=64, batch_size=64, replay_ratio=32)"),
    "discrete-sac": ("CartPole-v1", f"ps.DiscreteSAC(net=ps.Net{SMALL}, learning_starts=64, batch_size=64, replay_ratio=32)"),
    "c51": (
        "CartPole-v1",
        f"ps.DQN(net=ps.Net{SMALL}, learning_starts=64, replay_ratio=32, distributional='c51', dueling=True, noisy=True, "
        "v_min=0.0, v_max=50.0, tau=0.01, target_interval=1)",
    ),
    "quantile": ("CartPole-v1", f"ps.DQN(net=ps.Net{SMALL}, learning_starts=64, replay_ratio=32, distributional='quantile')"),
    "bc": ("CartPole-v1", "ps.BC()"),
    "marwil": ("CartPole-v1", "ps.MARWIL()"),
    "cql": ("CartPole-v1", f"ps.CQL(net=ps.Net{SMALL})"),
}  # fmt: skip
"""Environment and settings, as source: names of one checkout may be unknown to another."""
SAMPLERS = {
    "serial": "ps.SerialSampler(T=16, B=6, max_decorrelation_steps=9)",
    "cpu": "ps.CpuSampler(T=16, B=6, workers=2, max_decorrelation_steps=9)",
    "alternating": "ps.AlternatingSampler(T=16, B=6, workers=2, max_decorrelation_steps=9)",
    "async": "ps.AsyncSampler(ps.SerialSampler(T=16, B=6, max_decorrelation_steps=9), depth=1)",
    "batch-end": "ps.SerialSampler(T=16, B=6, reset='batch_end')",
    "offline": "ps.OfflineSampler(DATASET, T=16, B=6)",
}
EVERYWHERE = ("ppo", "ppo-lstm", "dqn-per", "sac", "r2d1")
OFFLINE = ("bc", "marwil", "cql")
CASES = [
    *((algo, sampler) for algo in EVERYWHERE for sampler in ("serial", "cpu", "alternating")),
    *((algo, "serial") for algo in ALGOS if algo not in (*EVERYWHERE, *OFFLINE)),
    *((algo, "offline") for algo in OFFLINE),
    ("ppo", "async"),
    ("ppo-lstm", "batch-end"),
]


def digest(tree: Any) -> str:
    """sha256 of the bytes of every leaf, by path."""
    import numpy as np
    import optree

    found = hashlib.sha256()
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=False)
    for path, leaf in zip(paths, leaves):
        found.update(repr(path).encode())
        found.update(np.ascontiguousarray(leaf.detach().numpy() if hasattr(leaf, "detach") else leaf).tobytes())
    return found.hexdigest()[:16]


def readable(batch: Any) -> dict[str, Any]:
    """The leaves of a batch that mean something: what was recorded on rows that are not valid does not."""
    import numpy as np

    rows = {
        "obs": batch.obs, "first": batch.first, "prev_action": batch.prev_action, "prev_reward": batch.prev_reward,
        "terminated": batch.terminated, "truncated": batch.truncated, "valid": batch.valid, "state": batch.state,
        "version": np.where(batch.valid, batch.version, 0),
    }  # fmt: skip
    import optree

    info = optree.tree_map(
        lambda x: np.where(batch.valid.reshape(*batch.valid.shape, *[1] * (x.ndim - 2)), x, 0), batch.info
    )
    return {**{k: v for k, v in rows.items() if v is not None}, "info": info}


def measure(algo: str, sampler: str, dataset: str) -> dict[str, str]:
    """Digests of a case, by name, in this process with whichever penstock it finds."""
    import torch

    import penstock as ps

    torch.set_num_threads(1)
    env, settings = ALGOS[algo]
    scope = {"ps": ps, "DATASET": dataset}
    live = eval(SAMPLERS[sampler], scope).build(env, seed=5)
    try:
        policy = eval(settings, scope).build(live.spec, seed=5)
        policy.prepare(live.batch_spec, live.initialize(policy.agent)["info"])
        found: dict[str, str] = {}
        for itr in range(ITERATIONS):
            policy.set_progress(itr / ITERATIONS, itr * live.batch_spec.size)
            batch, episodes = live.obtain_samples(itr)
            found[f"batch {itr}"] = digest(readable(batch))
            found[f"episodes {itr}"] = digest([episodes.return_, episodes.length, episodes.slot])
            ps.train_one_step(policy, batch)
            found[f"parameters {itr}"] = digest(policy.agent.state_dict())
        evaluated = live.evaluate_agent(ITERATIONS, 4)
        found["evaluation"] = digest([evaluated.return_, evaluated.length, evaluated.slot])
        found["updates"] = str(policy.updates)
        return found
    finally:
        live.shutdown()


def in_checkout(checkout: Path, *argv: str) -> str:
    """The output of this file run with another checkout's package."""
    env = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *argv], env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=checkout
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(argv)}\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def write_dataset(folder: str) -> None:
    """Episodes of a policy that was trained a little, for the offline cases."""
    import penstock as ps
    from penstock.run.recording import record

    run = ps.RunConfig(steps=2000, seed=1, dir=f"{folder}/teacher", progress="off", tensorboard=False)
    ps.train(ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3, epochs=4, minibatch=512), ps.SerialSampler(T=32, B=4), run))
    record(Path(folder, "teacher"), Path(folder, "data"), episodes=40, deterministic=False)


def main() -> int:
    """Compares and prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--dataset", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(*args.case)))
        return 0
    if args.dataset:
        write_dataset(args.dataset)
        print("written")
        return 0
    old, new = args.checkouts
    differ = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        cases = [(a, s) for a, s in CASES if args.only in f"{a}/{s}"]
        if any(s == "offline" for _, s in cases):
            in_checkout(old, "--dataset", folder)

        def compare(case: tuple[str, str]) -> list[str]:
            was, now = (json.loads(in_checkout(c, "--case", *case, f"{folder}/data")) for c in (old, new))
            return [name for name in was if was[name] != now.get(name)]

        for (algo, sampler), wrong in zip(cases, pool.map(compare, cases)):
            differ += bool(wrong)
            print(
                f"{algo + '/' + sampler:24} {'same' if not wrong else 'DIFFERS from ' + wrong[0] + ' on'}", flush=True
            )
    print(f"{len(cases)} cases, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
