"""Bits of two checkouts on one machine, compared by sha256: what each algorithm samples, learns, logs and resumes.

    python benchmarks/digests.py OLD NEW [--only ppo]

Bits differ between processors, so no test stores them: a change that is to alter nothing is run beside the state
before it. Each case is a run, and the same run resumed for another third, in a process of each checkout. Of every
iteration batch, episodes, parameters and metrics but those of time are compared, and every evaluation. A difference
names the case and what differs first; the exit code is then 1. OLD twice shows that the cases repeat themselves.

Only names that `penstock` exports are used, so that older checkouts have them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

STEPS, RESUMED = 768, 288
"""Environment steps of a run, 8 batches of 16 x 6 rows or more, and of its resumption."""
LIMIT_S = 1800.0
TOGETHER = 8
"""Cases that a process runs one after the other: importing torch takes longer than a case."""
TIMED = ("time/", "_ms", "_wait")
"""Metrics that contain one of these are of time."""
SMALL = 'net=ps.Net(hidden=(16,), activation="relu")'
OFF_POLICY = f"{SMALL}, learning_starts=64, batch_size=64, replay_ratio=32"
LSTM = "recurrent='lstm', recurrent_size=8"
GRU = "recurrent='gru', recurrent_size=8"
PER = "replay=ps.ReplaySettings(capacity=1000, index='prioritized'{})"
TOY = "penstock.envs.toy:"
ALGOS = {
    "ppo": ("CartPole-v1", "ps.PPO(lr='linear(1e-3, 0)', epochs=2, minibatch=32)"),
    "ppo-lstm": (
        "Pendulum-v1",
        f"ps.PPO(epochs=2, minibatch=32, net=ps.Net(hidden=(16,), {LSTM}, prev_action=True, prev_reward=True, "
        "normalize_obs=True, normalize_reward=True))",
    ),
    "dqn-per": (
        "CartPole-v1",
        f"ps.DQN({SMALL}, learning_starts=64, replay_ratio=32, n_step=3, ladder='ape-x', target_interval=20, "
        f"{PER.format(', fresh_priority=' + repr('agent'))})",
    ),
    "sac": ("Pendulum-v1", f"ps.SAC({OFF_POLICY})"),
    "r2d1": (
        "CartPole-v1",
        f"ps.R2D1(net=ps.Net(hidden=(16,), {LSTM}), learning_starts=128, batch_size=4, burn_in=4, train_length=16, "
        f"state_interval=16, n_step=2, {PER.format('')})",
    ),
    "a2c": ("CartPole-v1", "ps.A2C()"),
    "impala": ("CartPole-v1", "ps.IMPALA()"),
    "appo": ("CartPole-v1", "ps.APPO(epochs=2, minibatch=32)"),
    "td3": ("Pendulum-v1", f"ps.TD3({OFF_POLICY})"),
    "ddpg": ("Pendulum-v1", f"ps.DDPG({OFF_POLICY})"),
    "discrete-sac": ("CartPole-v1", f"ps.DiscreteSAC({OFF_POLICY})"),
    "c51": (
        "CartPole-v1",
        f"ps.DQN({SMALL}, learning_starts=64, replay_ratio=32, distributional='c51', dueling=True, noisy=True, "
        "v_min=0.0, v_max=50.0, tau=0.01, target_interval=1)",
    ),
    "quantile": ("CartPole-v1", f"ps.DQN({SMALL}, learning_starts=64, replay_ratio=32, distributional='quantile')"),
    "bc": ("CartPole-v1", "ps.BC()"),
    "marwil": ("CartPole-v1", "ps.MARWIL()"),
    "cql": ("CartPole-v1", f"ps.CQL({SMALL})"),
    "ppo-gru": (f"{TOY}RepeatPrevious", f"ps.PPO(epochs=2, minibatch=32, net=ps.Net(hidden=(16,), {GRU}))"),
    "ppo-images": (f"{TOY}PixelCatch", "ps.PPO(epochs=1, minibatch=48, net=ps.Net(hidden=(32,)))"),
    "dqn-frames": (
        "digests:frames",
        "ps.DQN(net=ps.Net(hidden=(32,)), learning_starts=64, batch_size=16, replay_ratio=4, "
        "replay=ps.ReplaySettings(capacity=500, deduplicate_frames=True))",
    ),
    "ppo-dict": (f"{TOY}BitFlip", "ps.PPO(epochs=2, minibatch=32)"),
    "dqn-hindsight": (
        f"{TOY}BitFlip",
        f"ps.DQN({OFF_POLICY}, replay=ps.ReplaySettings(capacity=1000, hindsight=4, reward_fn='{TOY}BitFlip'))",
    ),
    "ppo-masks": (f"{TOY}Masked", "ps.PPO(epochs=2, minibatch=32)"),
    "ppo-tensors": ("penstock.tensor_envs:CartPole", "ps.PPO(epochs=2, minibatch=32)"),
    "ppo-agents": (f"ps.EnvConfig('{TOY}EchoAgents', {{'masks': True}})", "ps.PPO(epochs=2, minibatch=64)"),
    "ppo-turns": (f"{TOY}EchoTurns", f"ps.PPO(epochs=2, minibatch=64, net=ps.Net(hidden=(16,), {GRU}))"),
    "dqn-turns": (f"{TOY}Nim", f"ps.DQN({OFF_POLICY})"),
    "mappo-agents": (f"{TOY}EchoAgents", "ps.MAPPO(epochs=2, minibatch=64)"),
    "mappo-turns": (f"{TOY}Nim", "ps.MAPPO(epochs=2, minibatch=64)"),
    "qmix": (f"{TOY}TeamBits", f"ps.QMIX({OFF_POLICY})"),
    "vdn": (f"{TOY}EchoAgents", f"ps.QMIX({OFF_POLICY}, mixer='vdn', n_step=2)"),
    "policies": (
        f"{TOY}TeamBits",
        f"ps.Policies({{'a': ps.PPO(minibatch=32), 'b': ps.DQN({OFF_POLICY})}}, {{'agent_0': 'a', 'agent_1': 'b'}})",
    ),
    "policies-turns": (
        f"{TOY}Nim",
        f"ps.Policies({{'a': ps.PPO(minibatch=32, net=ps.Net(hidden=(16,), {LSTM})), 'b': ps.A2C()}}, 'digests:by_seed', "
        "{'a': 1, 'b': 1}, policies_to_train=('a',))",
    ),
    "self-play": (f"{TOY}Nim", "ps.SelfPlay(ps.PPO(epochs=2, minibatch=64), pool=2, interval=3)"),
}
"""Environment and settings, as source: names of one checkout may be unknown to another."""
UNEQUAL = ", max_decorrelation_steps=9"
EQUAL = ("EchoTurns", "Nim", "tensor_envs:CartPole")
"""Environments that cannot begin at unequal steps."""
SERIAL = f"ps.SerialSampler(T=16, B=6{UNEQUAL})"
RUNNERS = f"ps.RunnerSampler(2, ps.SerialSampler(T=16, B=3{UNEQUAL}), '{{}}'{{}})"
SAMPLERS = {
    "serial": SERIAL,
    "cpu": f"ps.CpuSampler(T=16, B=6, workers=2{UNEQUAL})",
    "gpu": f"ps.GpuSampler(T=16, B=6, workers=2{UNEQUAL})",
    "alternating": f"ps.AlternatingSampler(T=16, B=6, workers=2{UNEQUAL})",
    "async": f"ps.AsyncSampler({SERIAL}, depth=1)",
    "batch-end": "ps.SerialSampler(T=16, B=6, reset='batch_end')",
    "offline": "ps.OfflineSampler(DATASET, T=16, B=6)",
    "runners": RUNNERS.format("in-process", ""),
    "processes": RUNNERS.format("processes", ", depth=1"),
    "ready": RUNNERS.format("in-process", ", mode='ready', depth=2"),
}
EVERYWHERE = ("ppo", "ppo-lstm", "dqn-per", "sac", "r2d1")
SERIALLY = (
    *("a2c", "impala", "appo", "td3", "ddpg", "discrete-sac", "c51", "quantile", "ppo-gru", "ppo-images", "dqn-frames"),
    *("ppo-dict", "dqn-hindsight", "ppo-masks", "ppo-agents", "ppo-turns", "dqn-turns", "mappo-agents", "mappo-turns"),
    *("qmix", "vdn", "policies", "policies-turns", "self-play", "ppo-tensors"),
)
TWO = "learners=2"
CASES = {
    "/".join(filter(None, case)): case
    for case in (
        *((algo, sampler, "") for algo in EVERYWHERE for sampler in ("serial", "cpu", "alternating")),
        *((algo, "serial", "") for algo in SERIALLY),
        *((algo, "offline", "") for algo in ("bc", "marwil", "cql")),
        *((algo, "cpu", "") for algo in ("ppo-images", "ppo-agents", "ppo-turns", "policies", "self-play")),
        *((algo, "alternating", "") for algo in ("ppo-masks", "ppo-agents", "ppo-turns")),
        *((algo, "runners", "") for algo in ("ppo", "dqn-per", "ppo-agents", "policies-turns")),
        *((algo, "processes", "") for algo in ("ppo", "sac", "ppo-turns")),
        *((algo, "ready", "") for algo in ("impala", "appo")),
        *((algo, "serial", TWO) for algo in ("ppo-lstm", "dqn-per", "mappo-agents", "policies", "self-play")),
        *(("ppo", sampler, TWO) for sampler in ("cpu", "runners")),
        ("ppo", "gpu", ""),
        ("ppo", "async", ""),
        ("qmix", "async", ""),
        ("ppo-lstm", "batch-end", ""),
    )
}
"""By name: algorithm with its environment, sampler, and settings of the run."""


def frames() -> Any:
    """PixelCatch in grey, the last four frames as [4, 24, 24] uint8."""
    import gymnasium as gym

    from penstock.envs.toy import PixelCatch

    grey = gym.wrappers.GrayscaleObservation(PixelCatch("hwc"))
    return gym.wrappers.FrameStackObservation(grey, 4, padding_type="zero")


def by_seed(agent: str, episode: int, seed: int) -> str:
    """Policy "a" plays the first agent in every second episode."""
    return "ab"[(seed + (agent == "agent_0")) % 2]


def digest(tree: Any) -> str:
    """sha256 of path, dtype, shape and bytes of every leaf."""
    import numpy as np
    import optree

    found = hashlib.sha256()
    paths, leaves, _ = optree.tree_flatten_with_path(tree, none_is_leaf=False)
    for path, leaf in zip(paths, leaves):
        x = np.ascontiguousarray(leaf.detach().numpy() if hasattr(leaf, "detach") else leaf)
        found.update(repr((path, x.dtype, x.shape)).encode() + x.tobytes())
    return found.hexdigest()[:16]


def readable(batch: Any) -> dict[str, Any]:
    """The leaves of a batch that mean something: what was recorded on rows that are not valid does not."""
    import numpy as np
    import optree

    if hasattr(batch, "policy_batches"):
        return {name: readable(part) for name, part in batch.items()}
    valid = np.asarray(batch.valid)
    rows = {
        "obs": batch.obs, "first": batch.first, "prev_action": batch.prev_action, "prev_reward": batch.prev_reward,
        "terminated": batch.terminated, "truncated": batch.truncated, "valid": valid, "state": batch.state,
        "version": np.where(valid, batch.version, 0),
    }  # fmt: skip
    info = optree.tree_map(lambda x: np.where(valid.reshape(*valid.shape, *[1] * (np.ndim(x) - 2)), x, 0), batch.info)
    return {**{k: v for k, v in rows.items() if v is not None}, "info": info}


def parameters(policy: Any) -> str:
    """Digest of the networks and normalisers of a policy, or of several by id."""
    policies = policy.items() if isinstance(policy, Mapping) else [("", policy)]
    return digest({name: dict(one.agent.state_dict()) for name, one in policies})


def follow(run: Any) -> dict[str, str]:
    """Digests of every iteration of a run, and its other numbers as text, by name."""
    found: dict[str, str] = {}
    with run:
        for it in run:
            found[f"batch {it.itr}"] = digest(readable(it.batch))
            found[f"parameters {it.itr}"] = parameters(it.policy)
            for what, episodes in (("episodes", it.episodes), ("evaluation", it.evaluation)):
                if episodes is not None:
                    found[f"{what} {it.itr}"] = digest([episodes.return_, episodes.length, episodes.slot])
            logged = {name: value for name, value in it.metrics.items() if not any(part in name for part in TIMED)}
            found |= {f"{name} {it.itr}": repr(float(value)) for name, value in logged.items()}
    return found | {"steps": str(run.result.env_steps), "updates": str(run.result.policy.updates)}


def measure(algo: str, sampler: str, settings: str, dataset: str) -> dict[str, str]:
    """Digests of a case, by name, in this process with whichever penstock it finds."""
    import penstock as ps

    scope = {"ps": ps, "DATASET": dataset}
    env, source = ALGOS[algo]
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"dir": f"{folder}/run", "progress": "off", "seed": 5, "eval_episodes": 6}
        run = ps.RunConfig(steps=STEPS, eval_interval=STEPS // 2, **quiet, **eval(f"dict({settings})", scope))
        sampling = SAMPLERS[sampler].replace(UNEQUAL, "") if env.endswith(EQUAL) else SAMPLERS[sampler]
        made = eval(env, scope) if env.startswith("ps.") else env
        exp = ps.Experiment(made, eval(source, scope), eval(sampling, scope), run)
        found = follow(ps.Run(exp))
        found["loaded"] = parameters(ps.load(run.dir))
        after = follow(ps.Run.resume(run.dir, {"run.steps": STEPS + RESUMED}))
        return found | {f"{name}, resumed": value for name, value in after.items()}


def in_checkout(checkout: Path, *argv: str) -> str:
    """The output of Python with another checkout's package."""
    here = Path(__file__).resolve().parent
    env = {**os.environ, "PYTHONPATH": f"{checkout.resolve()}{os.pathsep}{here}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *argv], env=env, capture_output=True, text=True, timeout=LIMIT_S, cwd=checkout
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {' '.join(argv)}\n{done.stderr}")
    return done.stdout


def write_dataset(checkout: Path, folder: str) -> None:
    """Episodes of a policy that was trained a little, for the offline cases."""
    for command in (
        "train ppo --env CartPole-v1 --preset none --algo.lr 1e-3 --algo.epochs 4 --algo.minibatch 512 --sampler.T 32 "
        "--sampler.B 4 --run.steps 2000 --run.seed 1 --run.progress off --run.dir teacher",
        "record teacher --dataset data --episodes 40 --stochastic",
    ):
        argv = [f"{folder}/{word}" if word in ("teacher", "data") else word for word in command.split()]
        in_checkout(checkout, "-m", "penstock", *argv)


def main() -> int:
    """Compares and prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, metavar="OLD NEW")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--cases", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--dataset", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.cases:
        print(json.dumps({name: measure(*CASES[name], args.dataset) for name in args.cases}))
        return 0
    old, new = args.checkouts
    names = [name for name in CASES if args.only in name]
    parts = [names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)]
    differ = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        if any("offline" in name for name in names):
            write_dataset(old, folder)

        def compare(part: list[str]) -> list[tuple[dict[str, str], dict[str, str]]]:
            argv = [__file__, "--dataset", f"{folder}/data", "--cases", *part]
            was, now = (json.loads(in_checkout(checkout, *argv).splitlines()[-1]) for checkout in (old, new))
            return [(was[name], now[name]) for name in part]

        for name, (was, now) in zip(names, chain.from_iterable(pool.map(compare, parts))):
            wrong = [value for value in was if was[value] != now.get(value)]
            differ += bool(wrong)
            said = f"DIFFERS from {wrong[0]!r} on, {len(wrong)} of {len(was)}" if wrong else f"same, {len(was)} values"
            print(f"{name:32} {said}", flush=True)
    print(f"{len(names)} cases, {differ} differ")
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
