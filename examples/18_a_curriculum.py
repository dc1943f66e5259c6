"""Environments that grow harder as the agent gets better: python examples/18_a_curriculum.py [steps]"""

import sys

import gymnasium as gym

import penstock as ps


class Planets(gym.Wrapper):
    def set_level(self, level):
        self.unwrapped.gravity = (9.8, 15.0, 25.0)[level]


curriculum = ps.Curriculum({40: 1, 120: 2})  # level by mean return; by name: run.each="this_module:curriculum"
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
exp = ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3), run=ps.RunConfig(steps=steps, seed=1), wrappers=(Planets,))
with ps.Run(exp) as run:
    for it in run:
        curriculum(it)
    print(f"gravity of each environment: {run.envs.get('gravity')}")
print(run.result)
