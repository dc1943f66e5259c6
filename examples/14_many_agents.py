"""One PPO plays every agent of a team, and is looked at agent by agent: python examples/14_many_agents.py [steps]

For PettingZoo's environments: pip install 'penstock[pettingzoo]', and "pettingzoo:mpe2/simple_spread_v3" in place of the
toy, in which two agents see a bit each and are paid where both play theirs.
"""

import sys

import penstock as ps

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000

env = "penstock.envs.toy:TeamBits"
exp = ps.Experiment(env, ps.PPO(lr=1e-3), ps.SerialSampler(T=32, B=8), ps.RunConfig(steps=steps, seed=1))
result = ps.train(exp)
print(f"return of the team: {result.episodes.mean_return:.1f} of 16")
for name, own in result.episodes.agents.items():
    print(f"{name}: {own.mean_return:.1f}")

policies = ps.load(result.run_dir)  # {id: Policy}; a plain algorithm's is "shared"
print(policies, policies["shared"].predict([[1.0], [-1.0]]))
print(f"evaluated once more: {ps.evaluate(policies, env, episodes=20).mean_return:.1f}")
