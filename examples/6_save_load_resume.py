"""What a run leaves, and how to use it: python examples/6_save_load_resume.py [steps]"""

import sys
import tempfile
from pathlib import Path

import gymnasium as gym

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
run = Path(tempfile.mkdtemp()) / "run"

exp = ps.override(ps.preset("ppo", "CartPole-v1"), {"run.steps": steps, "run.dir": str(run), "run.progress": "off"})
ps.train(exp)
print("the run directory holds", *sorted(path.name for path in run.iterdir()))

policy, env = ps.load(run), gym.make("CartPole-v1")
obs, _ = env.reset(seed=1)
score, ended = 0.0, False
while not ended:
    obs, reward, terminated, truncated, _ = env.step(policy.predict(obs))
    score, ended = score + reward, terminated or truncated
print(f"one episode with the stored policy: {score:.0f}")

result = ps.resume(run, {"run.steps": 2 * steps})
print(f"resumed up to {result.env_steps:,} steps: {result.episodes.mean_return:.1f}")
