"""What the long processes of `cluster.py` measure: a run whose runners are killed, and the memory of another."""

from __future__ import annotations

import ctypes
import random
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from kills import left

import penstock as ps
from penstock.distributed.sampler import RunnerSampler
from penstock.run.trainer import Trainer

RUNNERS, SOLVED, GONE_S = 4, 475.0, 20.0
WARM = 0.2
"""Part of a run in which memory may grow: buffers, the first gradient steps, metrics kept."""
Found = dict[str, list[float]]


def faults(kills: int, seconds: float, seed: int) -> Found:
    """Sends SIGKILL to random runners at random times of a run; counts what was lost, learned and left behind."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # the subreaper of all that is started below, so that none can hide
    warnings.filterwarnings("ignore", message="runner .*replaced")
    trainer = _trainer(ps.preset("ppo", "CartPole-v1"), seed, runners=RUNNERS, restarts=50, num_cpus=0.01)
    sampler: Any = trainer.sampler
    folder = Path(sampler.workers.backend.cluster.folder)
    over, hit = threading.Event(), list[int]()
    killer = threading.Thread(target=_kill, args=(kills, seconds, random.Random(seed), hit, over))
    killer.start()
    valid = lost = rows = 0
    highest, metrics = 0.0, dict[str, Any]()
    try:
        last = time.monotonic() + 3 * seconds
        while (
            killer.is_alive()
            or sampler.metrics()["group/runners"] < RUNNERS
            or (highest < SOLVED and time.monotonic() < last)
        ):
            metrics = trainer.train()
            batch = sampler.last_batch
            rows, valid = rows + batch.spec.size, valid + batch.env_steps
            lost += int(np.count_nonzero(~batch.valid & ~batch.first[1:]))  # neither a step nor a reset
            if len(trainer.recent) == 100:
                highest = max(highest, float(metrics["rollout/ep_rew_mean"]))
        metrics |= sampler.metrics()
        steps = trainer.env_steps
    finally:
        over.set()
        killer.join(60)
        trainer.stop()
    return {
        "kills": [len(hit)],
        "replacements": [metrics["faults/restarts"]],
        "rows": [rows],
        "rows lost": [lost],
        "rows counted as lost": [metrics.get("faults/lost_steps", 0.0)],
        "valid rows": [valid],
        "steps": [steps],
        "highest return": [highest],
        "last return": [float(metrics["rollout/ep_rew_mean"])],
        "left behind": [len(left(GONE_S)) + folder.exists()],
    }


def _kill(kills: int, seconds: float, rng: random.Random, hit: list[int], over: threading.Event) -> None:
    """Kills one runner at each of some random times; one that starts may be hit too."""
    began = time.monotonic()
    for at in sorted(rng.uniform(0.0, seconds) for _ in range(kills)):
        if over.wait(max(began + at - time.monotonic(), 0.0)):
            return
        while not (alive := [p for p in _runners() if p.pid not in hit]) and not over.wait(0.1):
            pass
        if alive:
            victim = rng.choice(alive)
            victim.kill()
            hit.append(victim.pid)


def _runners() -> list[psutil.Process]:
    """The actors below this process, by the titles that Ray gives them."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("ShippedRunner" in word for word in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


def memory(minutes: float, seed: int) -> Found:
    """MB of the driver, the runners, the object store and Ray's servers through a run of IMPALA; their growth once warm.

    The driver's allocator takes a minute or two of this run to reach its size, so a run of few minutes shows a slope.
    """
    exp = ps.preset("impala", "CartPole-v1")
    trainer = _trainer(exp, seed, runners=2, mode="ready", depth=1, num_cpus=0.01)
    sampler: Any = trainer.sampler
    ray = sampler.workers.backend.cluster.ray
    below = psutil.Process().children(recursive=True)
    raylet, server = (next(p for p in below if name in p.name()) for name in ("raylet", "gcs_server"))
    names = ("driver MB", "runners MB", "store MB", "raylet MB", "server MB")
    found: Found = {name: [] for name in ("minute", *names)}
    began, total = time.monotonic(), minutes * 60
    next_at = 0.0
    try:
        while (now := time.monotonic() - began) < total:
            trainer.train()
            if now >= next_at:
                next_at += total / 100
                free = ray.available_resources().get("object_store_memory", 0.0)
                found["minute"].append(now / 60)
                found["driver MB"].append(psutil.Process().memory_info().rss / 1e6)
                found["runners MB"].append(sum(p.memory_info().rss for p in _runners()) / 1e6)
                found["store MB"].append((ray.cluster_resources()["object_store_memory"] - free) / 1e6)
                found["raylet MB"].append(raylet.memory_info().rss / 1e6)
                found["server MB"].append(server.memory_info().rss / 1e6)
        warm = int(len(found["minute"]) * WARM)
        for name in names:
            slope = np.polyfit(found["minute"][warm:], found[name][warm:], 1)[0]
            found[f"{name} a minute"] = [float(slope)]
        return found | {"million steps": [trainer.env_steps / 1e6], "return": [float(trainer.recent.return_.mean())]}
    finally:
        trainer.stop()


def _trainer(exp: ps.Experiment, seed: int, runners: int, **settings: Any) -> Trainer:
    """A run of the preset with its slots dealt among runners on Ray."""
    spec: Any = exp.sampler_settings.spec
    inner = ps.SerialSampler(T=spec.T, B=spec.B if settings.get("mode") == "ready" else spec.B // runners)
    sampler = RunnerSampler(runners, inner, backend="ray", **settings)
    run = ps.RunConfig(steps=10**9, seed=seed, eval_episodes=0, progress="off", tensorboard=False)
    return Trainer(replace(exp, sampler=sampler, run=run))


PARTS: dict[str, Callable[..., Found]] = {"faults": faults, "memory": memory}


def prepare() -> None:
    """One thread for torch, as runners have."""
    torch.set_num_threads(1)
