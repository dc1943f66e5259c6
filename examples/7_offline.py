"""Learning from a dataset: episodes of one policy teach another: python examples/7_offline.py [steps]"""

import sys
import tempfile
from pathlib import Path

import penstock as ps
from penstock.run.recording import record

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
folder = Path(tempfile.mkdtemp())


def settings(name: str) -> ps.RunConfig:
    return ps.RunConfig(steps=steps, dir=str(folder / name), progress="off")


ps.train(ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3), run=settings("teacher")))
data = record(folder / "teacher", folder / "data", episodes=100, deterministic=False)
print(f"{data.total} episodes recorded, mean return {data.returns.mean():.1f}")

for algo in (ps.BC(), ps.MARWIL()):
    name = type(algo).__name__
    exp = ps.Experiment("CartPole-v1", algo, ps.OfflineSampler(str(folder / "data")), settings(name))
    print(f"{name} learned from them: {ps.train(exp).metrics['eval/mean_reward']:.1f}")
