"""A rank in a process of its own: `gloo_rank.py RANK SIZE FILE BATCHES OUT [hang|die]`."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

import penstock as ps
from penstock.learn.comm import GroupComm, meet

ALGO = ps.PPO(epochs=5, minibatch=64, net=ps.Net(hidden=(16,)))


def main() -> None:
    rank, size, path, stored, out, *trouble = sys.argv[1:]
    torch.set_num_threads(1)
    spec, batches = torch.load(stored, weights_only=False)
    limit = 5.0 if trouble else 60.0
    comm = GroupComm(meet(path, int(rank), int(size), timeout_s=60.0), limit)
    policy = ALGO.build(spec, seed=5)
    policy.join(comm)
    B = batches[0].spec.B // int(size)
    own = slice(int(rank) * B, (int(rank) + 1) * B)
    if trouble and rank == "1":
        if trouble == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(20)
    began = time.monotonic()
    try:
        for batch in batches:
            ps.multi_gpu_train_one_step(policy, batch[:, own])
    except ps.LearnerLostError as error:
        print(f"{time.monotonic() - began:.1f} {error}", flush=True)
        raise SystemExit(error.exit_code) from error
    torch.save((policy.updates, policy.agent.state_dict(), policy.optimizers["all"].state_dict()), f"{out}.{rank}")


if __name__ == "__main__":
    main()
