"""An algorithm of your own on replay, DQN with mellowmax for the maximum: python examples/8_off_policy.py [steps]"""

import math
import sys
from dataclasses import dataclass

import penstock as ps


def postprocess(agent, x, cfg):  # Asadi and Littman 2017, arXiv:1612.05628; x is a sample of the replay
    q = agent.bootstrap(x["next"])
    value = ((cfg.omega * q).logsumexp(1) - math.log(q.shape[1])) / cfg.omega
    return ps.TrainBatch(x.inputs, {**x.rows, "target": x["return"] + x["discount"] * value}, None)


@dataclass(frozen=True)
class Mellow(ps.DQN):
    functions = ps.DQN.functions._replace(postprocess=postprocess)
    omega: float = 5.0


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000
    net = ps.Net(hidden=(64, 64), activation="relu")
    learning = {"lr": "linear(1e-3, 1e-4)", "batch_size": 64, "replay_ratio": 32, "learning_starts": 500}
    algo = Mellow(**learning, target_interval=1, tau=0.01, net=net)
    result = ps.train(ps.Experiment("CartPole-v1", algo, run=ps.RunConfig(steps=steps)))
    print(f"evaluation: {result.metrics['eval/mean_reward']:.1f}, trained {result.metrics['replay/ratio']:.1f} times")
