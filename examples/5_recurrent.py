"""Memory: name the symbol of two steps ago. Best return 14, without memory 3.5: python examples/5_recurrent.py [steps]"""

import sys

import penstock as ps
from penstock.envs.toy import RepeatPrevious

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000

for recurrent in ("none", "lstm"):
    net = ps.Net(recurrent=recurrent, recurrent_size=64)
    algo = ps.PPO(lr=3e-3, epochs=4, minibatch=256, discount=0.5, entropy_coef=0.01, net=net)
    exp = ps.Experiment(RepeatPrevious, algo, ps.SerialSampler(T=32, B=32), ps.RunConfig(steps=steps, progress="off"))
    print(f"{recurrent}: mean return {ps.train(exp).episodes.mean_return:.1f}")
