"""Two algorithms play each other, in turn, and meet opponents: python examples/15_two_policies.py [steps]

PPO and DQN take stones from a heap; who takes the last one wins. Who begins changes from episode to episode.
"""

import sys

import penstock as ps
from penstock.run.playing.matches import match_runs

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000


def in_turn(agent, episode, seed):
    return ("a", "b")[(int(agent[-1]) + episode) % 2]


def last_of_four(obs):  # perfect play: leave a multiple of 4
    return max(int(obs["observation"].argmax()) % 4 - 1, 0)


algo = ps.Policies(
    {"a": ps.PPO(lr=1e-3, minibatch=128), "b": ps.DQN(lr=1e-3, learning_starts=500, replay_ratio=8)},
    policy_mapping_fn=in_turn,
    seats={"a": 1, "b": 1},
)
exp = ps.Experiment("penstock.envs.toy:Nim", algo, ps.SerialSampler(T=32, B=8), ps.RunConfig(steps=steps, seed=1))
result = ps.train(exp)
print({name: round(x, 2) for name, x in result.metrics.items() if name.endswith("/ep_rew_mean")})
for match in match_runs(result.run_dir, ["random", last_of_four], episodes=100):  # and other runs, by directory
    print(f"{match.sides[0]} against {match.sides[1]}: won {match.won}, lost {match.lost}")
