"""What a GPU gives: sampling, updates, R2D1, two learners and tensor environments, each part within a limit of seconds.

    python benchmarks/gpu.py sampling [--workers 14] [--B 64,128,256,512,1024] [--limit-s 420] [--write]
    python benchmarks/gpu.py updates | r2d1 | learners | tensors | simulators [--write]

Every part runs on `--device cpu --tiny` in seconds, which proves the script and says nothing about speed. With `--write` a
part's table takes the place of the one of its name in results/gpu.md, with command, versions and device. When the limit
is reached, no further measurement begins, and the table has what was measured. `updates` is of use on a CPU too: what bf16
and a compiler do there. Contestants share the one GPU, so they take turns in one process here.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from learners import Frames, timed_all_reduce
from peers import plain_updates
from turns import write

import penstock as ps
from penstock.core import VERSION
from penstock.core.noise import NOTHING_HELD, Noise, Purpose
from penstock.learn.precision import compute
from penstock.learn.step.gradients import gradients_of
from penstock.learn.train_ops import as_tensors, samples
from penstock.run.trainer import Trainer
from penstock.samplers.tensors.noise import rows_on

RESULTS = Path(__file__).parent / "results"
Row = dict[str, str]


@dataclass(frozen=True)
class How:
    """What the command line asks for."""

    device: str
    tiny: bool
    workers: int
    slots: tuple[int, ...]
    ends: float
    """By `time.monotonic`, when no further measurement begins."""
    modes: tuple[str, ...]
    cases: str

    @property
    def late(self) -> bool:
        """True once the limit is reached."""
        return time.monotonic() > self.ends


def wait(device: str) -> None:
    """Returns when the device has done what it was asked for."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


# Part 2: sampling.


def pong() -> Any:
    """Pong as 84 x 84 x 4 frames, or frames drawn at no cost where ale_py is missing."""
    try:
        import ale_py  # noqa: F401  # pyright: ignore
    except ModuleNotFoundError:
        return Frames
    from penstock.envs.atari import atari

    return lambda: atari("pong")


def sampling(how: How) -> Iterator[Row]:
    """Steps/s of samplers that act on the device, graph on and off, beside one process; a timeline at the end."""
    pixels = pong()
    for name, env, net in (
        ("CartPole-v1", "CartPole-v1", ps.Net()),
        ("frames" if pixels is Frames else "Pong", pixels, ps.Net(hidden=(512,), activation="relu", cnn="nature")),
    ):
        for B in how.slots:
            T = 8 if how.tiny else 64 if net.cnn == "auto" else 16
            kinds: dict[str, Any] = {"SerialSampler": ps.SerialSampler(T, B)}
            for kind in (ps.GpuSampler, ps.AlternatingSampler):
                for graph in (True, False):
                    settings = kind(T, B, how.workers, device=how.device, cuda_graph=graph)
                    kinds[f"{kind.__name__}, {'graph' if graph else 'no graph'}"] = settings
            for kind, settings in kinds.items():
                if how.late:
                    return
                yield {"environment": name, "B": f"{B:,}", "sampler": kind, **sampled(how, env, net, settings)}
    trace = str(RESULTS / "gpu_timeline.json") if not how.tiny else "/tmp/penstock_gpu_timeline.json"
    settings = ps.AlternatingSampler(8 if how.tiny else 32, how.slots[0], how.workers, device=how.device)
    run = ps.RunConfig(steps=10**9, device=how.device, trace=trace, progress="off")
    with Trainer(ps.Experiment("CartPole-v1", ps.PPO(epochs=1, minibatch=512), settings, run)) as trainer:
        for _ in range(25):
            trainer.train()


def sampled(how: How, env: Any, net: ps.Net, settings: Any) -> Row:
    """One measurement: a fresh sampler, three batches to warm up, then some for three seconds."""
    live = settings.build(env, 0)
    try:
        live.initialize(ps.PPO(net=net).build(live.spec, seed=0, device=how.device).agent)
        for itr in range(3):
            live.obtain_samples(itr)
        started, steps, itr = time.perf_counter(), 0, 3
        while time.perf_counter() - started < (0.2 if how.tiny else 3.0):
            steps += live.obtain_samples(itr)[0].env_steps
            itr += 1
        rate, found = steps / (time.perf_counter() - started), live.metrics()
    finally:
        live.shutdown()
    shares = {name: f"{found[key]:.0%}" if (key := f"sampler/{name}") in found else "-" for name in WAITS}
    return {"steps/s": f"{rate:,.0f}", **shares}


WAITS = ("env_wait", "agent_wait")


# Part 3: updates.


class Random(gym.Env[Any, Any]):
    """Random observations, so that a batch of any shape is there; an episode has 50 steps."""

    def __init__(self, obs: Any, action: Any) -> None:
        self.observation_space, self.action_space, self._t = obs, action, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self.observation_space.sample(), 1.0, False, self._t >= 50, {}


VECTOR, IMAGE = gym.spaces.Box(-1.0, 1.0, (17,), np.float32), gym.spaces.Box(0, 255, (4, 84, 84), np.uint8)
CHOICE, BOX = gym.spaces.Discrete(6), gym.spaces.Box(-1.0, 1.0, (6,), np.float32)


def off_policy(algo: Any, rows: int, hidden: tuple[int, ...], **more: Any) -> Any:
    return algo(
        batch_size=rows, learning_starts=0, net=ps.Net(hidden=hidden, activation="relu"),
        replay=ps.ReplaySettings(capacity=max(2_000, 2 * rows)), **more,
    )  # fmt: skip


def update_cases(tiny: bool) -> dict[str, tuple[Any, Any, Any]]:
    """Observation, action and algorithm of each."""
    wide, wider = ((32, 32), (64, 64)) if tiny else ((256, 256), (1024, 1024))
    deep, rows, most = ((32, 16), 512, 512) if tiny else ((512, 256, 128), 24_576, 8_192)
    nature = ps.Net(hidden=(512,), activation="relu", cnn="nature")
    images = {
        "DQN, Nature CNN, 32 rows": (IMAGE, CHOICE, off_policy(ps.DQN, 32, ())),
        "PPO, Nature CNN, 256 rows": (IMAGE, CHOICE, ps.PPO(minibatch=256, net=nature)),
    }
    return {
        "PPO, MLP 64 x 64, 512 rows": (VECTOR, CHOICE, ps.PPO(minibatch=512)),
        f"SAC, {wide[0]} x {wide[0]}, 256 rows": (VECTOR, BOX, off_policy(ps.SAC, 256, wide)),
        **({} if tiny else images),
        f"PPO, relu {' x '.join(map(str, deep))}, {rows:,} rows": (
            VECTOR, CHOICE, ps.PPO(minibatch=rows, net=ps.Net(hidden=deep, activation="relu")),
        ),
        f"SAC, {wider[0]} x {wider[0]}, {most:,} rows": (VECTOR, BOX, off_policy(ps.SAC, most, wider)),
    }  # fmt: skip


MODES: dict[str, dict[str, Any]] = {
    "eager": {},
    "bf16": {"precision": "bf16"},
    "compiled": {"compiled": True},
    "compiled, bf16": {"compiled": True, "precision": "bf16"},
}


def updates(how: How) -> Iterator[Row]:
    """Updates/s of each case in each mode, by turns; of forward and backward pass alone as one CUDA graph; and of plain
    torch, eager, compiled and graphed."""
    for name, (obs, action, algo) in update_cases(how.tiny).items():
        if how.cases not in name:
            continue
        steps: dict[str, Callable[[], Any]] = {}
        first: dict[str, float] = {}
        said: dict[str, str] = {}
        for mode in how.modes:
            settings = MODES[mode]
            if how.late:
                break
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    step = update(how, obs, action, algo, settings)
                    started = time.perf_counter()
                    step()
                    wait(how.device)
                except ps.ConfigError as error:
                    said[mode] = str(error)
                    continue
            first[mode], steps[mode] = time.perf_counter() - started, step
            said[mode] = " ".join(str(x.message) for x in caught if "run.compile" in str(x.message))
        if how.device.startswith("cuda") and not how.late:
            try:
                steps["forward and backward, CUDA graph"] = graphed(how, obs, action, algo)
            except RuntimeError as error:
                said["forward and backward, CUDA graph"] = str(error).splitlines()[0]
        for form in plain_updates.FORMS:
            if how.late or (form == "CUDA graph" and not how.device.startswith("cuda")):
                continue
            rows, hidden = getattr(algo, "batch_size", None) or algo.minibatch, algo.net.hidden
            actions = int(getattr(action, "n", 0)) or action.shape[0]
            started = time.perf_counter()
            try:
                step = plain_updates.made(name[:3], form, obs, actions, rows, hidden, how.device, algo.net.activation)
                step()
                wait(how.device)
            except RuntimeError as error:
                said[f"plain torch, {form}"] = str(error).splitlines()[0]
                continue
            first[f"plain torch, {form}"], steps[f"plain torch, {form}"] = time.perf_counter() - started, step
        rates: dict[str, list[float]] = {mode: [] for mode in steps}
        for _ in range(2 if how.tiny else 5):
            for mode, step in steps.items():
                rates[mode].append(rate_of(step, how.device, 0.05 if how.tiny else 0.6))
        for mode in (*steps, *(x for x in said if x not in steps)):
            rate = statistics.median(rates[mode]) if mode in steps else float("nan")
            against = rate / statistics.median(rates["eager"])
            start = f"{first[mode]:.1f}" if mode in first else "-"
            cells = {"updates/s": f"{rate:,.0f}", "of eager": f"{against:.2f}", "first update, s": start}
            yield {"update": name, "mode": mode, **cells, "said": said.get(mode, "")[:90]}


def rate_of(step: Callable[[], Any], device: str, seconds: float) -> float:
    """Calls a second; on a CPU of processor time, since others may use the machine."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    wait(device)
    started, calls = clock(), 0
    while clock() - started < seconds:
        step()
        calls += 1
    wait(device)
    return calls / (clock() - started)


def prepared(how: How, obs: Any, action: Any, algo: Any) -> tuple[Any, Callable[[], Any]]:
    """A policy that has a replay or a batch of random rows, and a function that returns its next minibatch."""
    T, B = 32, max(16, -(-(getattr(algo, "minibatch", None) or 0) // 32))
    sampler = ps.SerialSampler(T, B).build(lambda: Random(obs, action), 0)
    policy = algo.build(sampler.spec, seed=0, device=how.device)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    batch, schedule = sampler.obtain_samples(0)[0], policy.replay_schedule
    if schedule is None:
        data = policy.postprocess(as_tensors(batch, policy.device))
        rows = next(iter(ps.minibatches(data, policy.minibatch, policy.shuffler(), 1, None)))
        sampler.shutdown()
        return policy, lambda: rows
    for itr in range(1, 4):
        schedule.collected += schedule.replay.append(batch, batch.terminated)
        batch = sampler.obtain_samples(itr)[0]
    sampler.shutdown()
    rng = np.random.default_rng(0)
    ((_, x),) = samples(policy, 1, rng)

    def following() -> Any:
        with torch.no_grad():
            return policy.postprocess(replace(x, rows={**x.rows, "update": policy.updates}))

    return policy, following


def update(how: How, obs: Any, action: Any, algo: Any, settings: dict[str, Any]) -> Callable[[], Any]:
    """A function that takes a gradient step, targets included."""
    policy, minibatch = prepared(how, obs, action, algo)
    compute(policy, **settings)
    return lambda: policy.learn_on_batch(minibatch())


def graphed(how: How, obs: Any, action: Any, algo: Any) -> Callable[[], Any]:
    """A function that replays loss and gradients of one minibatch: what remains of an update without its launches."""
    policy, minibatch = prepared(how, obs, action, algo)
    rows = minibatch()

    def run() -> None:
        gradients_of(policy.loss_fn(policy.agent, rows, policy.settings), policy.optimizers)

    with torch.cuda.device(how.device):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()

    def replay(held: Any = run) -> None:  # a graph holds nothing that was there before it: the rows would be freed
        graph.replay()

    return replay


# Part 4: R2D1, collected and trained at once.


def r2d1(how: How) -> Iterator[Row]:
    """Steps/s collected and rows/s trained by an asynchronous sampler on frames."""
    env, B = pong(), how.slots[0]
    net = ps.Net(
        hidden=() if not how.tiny else (16,), activation="relu", recurrent="lstm", prev_action=True, prev_reward=True,
        recurrent_size=16 if how.tiny else 512, cnn=((4, 8, 8),) if how.tiny else "nature",
    )  # fmt: skip
    T, length = (8, 8) if how.tiny else (40, 80)
    algo: Any = ps.R2D1(
        net=net, batch_size=4 if how.tiny else 64, burn_in=T, train_length=length, state_interval=T, learning_starts=T * B,
        replay=ps.ReplaySettings(capacity=(40 if how.tiny else 400) * B, index="prioritized", fresh_priority="agent"),
    )  # fmt: skip
    inner = ps.AlternatingSampler(T, B, how.workers, device=how.device)
    for name, sampler in {
        "AsyncSampler(AlternatingSampler)": ps.AsyncSampler(inner, depth=1, weights="newest"),
        "AlternatingSampler": inner,
        "SerialSampler": ps.SerialSampler(T, B),
    }.items():
        if how.late:
            return
        run = ps.RunConfig(steps=10**9, device=how.device, progress="off")
        with Trainer(ps.Experiment(env, algo, sampler, run)) as trainer:
            while not trainer.policy.updates:
                trainer.train()
            schedule = trainer.policy.replay_schedule
            started, steps, trained = time.perf_counter(), trainer.env_steps, schedule.trained
            while time.perf_counter() - started < (1.0 if how.tiny else 20.0):
                result = trainer.train()
            took_s = time.perf_counter() - started
            rows = (schedule.trained - trained) * algo.batch_size * length
            yield {
                "sampler": name, "B": f"{B:,}", "steps/s": f"{(trainer.env_steps - steps) / took_s:,.0f}",
                "rows trained/s": f"{rows / took_s:,.0f}", "sampling": f"{result['time/sample_frac']:.0%}",
            }  # fmt: skip


# Part 6: two learners on one device.


def learners(how: How) -> Iterator[Row]:
    """Steps/s of one learner and two, how far apart their parameters are, and the share of the all-reduce."""
    T, B = (8, 4) if how.tiny else (64, 64)
    net = ps.Net(hidden=(16,), cnn=((4, 8, 8),)) if how.tiny else ps.Net(hidden=(512,), activation="relu", cnn="nature")
    algo: Any = ps.PPO(epochs=2, minibatch=256, net=net)
    ended: dict[int, dict[str, torch.Tensor]] = {}
    for count in (1, 2):
        if how.late:
            return
        run = ps.RunConfig(steps=10**9, device=how.device, learners=count, progress="off", seed=1)
        with Trainer(ps.Experiment(Frames, algo, ps.SerialSampler(T, B), run)) as trainer:
            for _ in range(2):
                trainer.train()
            ended[count] = {k: x.detach().cpu().clone() for k, x in trainer.policy.agent.named_parameters()}
            spent = timed_all_reduce(trainer.policy.comm) if count > 1 else [0.0]
            started, steps, learning = time.perf_counter(), trainer.env_steps, 0.0
            while time.perf_counter() - started < (1.0 if how.tiny else 8.0):
                before = time.perf_counter()
                learning += (1.0 - trainer.train()["time/sample_frac"]) * (time.perf_counter() - before)
            took_s = time.perf_counter() - started
            apart = max(float((x - ended[1][k]).abs().max()) for k, x in ended[count].items())
            yield {
                "learners": str(count), "steps/s": f"{(trainer.env_steps - steps) / took_s:,.0f}",
                "apart from one after 2 batches": f"{apart:.1e}",
                "all-reduce, of training": f"{spent[0] / learning:.1%}" if count > 1 else "-",
            }  # fmt: skip


# Part 7: environments of tensors.

CARTPOLE, PIXELS = "penstock.tensor_envs:CartPole", "penstock.tensor_envs:PixelCatch"


def tensors(how: How) -> Iterator[Row]:
    """Steps/s beside Gymnasium's CartPoleVectorEnv on the CPU, by turns; waits for the device; steps in which PPO learns."""
    T, seconds = 8 if how.tiny else 64, 0.1 if how.tiny else 0.8
    for B in how.slots:
        live: dict[str, Any] = {}
        for env, kwargs, device in ((CARTPOLE, {"device": how.device}, how.device), (CartPoleVectorEnv, {}, "cpu")):
            name = "arrays" if kwargs == {} else "tensors"
            live[name] = ps.SerialSampler(T, B).build(ps.EnvConfig(env, kwargs), 1)
            live[name].initialize(ps.PPO().build(live[name].spec, 0, device).agent)
        rates: dict[str, list[float]] = {name: [] for name in live}
        itr = 0
        for _ in range(6):
            for name, sampler in live.items():
                started, steps = time.perf_counter(), 0
                while time.perf_counter() - started < seconds:
                    steps += sampler.obtain_samples(itr)[0].env_steps  # which waits for the device
                    itr += 1
                rates[name].append(steps / (time.perf_counter() - started))
        ours, theirs = (statistics.median(rates[name][1:]) for name in ("tensors", "arrays"))
        against = f"{statistics.median(x / y for x, y in zip(*(rates[name][1:] for name in live))):.2f} of numpy's {theirs:,.0f}"
        yield {"what": "sampling, steps/s", "slots": f"{B:,}", "found": f"{ours:,.0f}", "said": against}
        if how.device.startswith("cuda"):
            yield {
                "what": "obtain_samples, waits",
                "slots": f"{B:,}",
                **waits(lambda x=live["tensors"], itr=itr: x.obtain_samples(itr)),
            }
        for sampler in live.values():
            sampler.shutdown()
    for env, algo, rows, goal, most in (
        (CARTPOLE, ps.PPO(lr=1e-3, epochs=4, minibatch=2048, gae_lambda=0.9), 32, 475.0, 3_000_000),
        (PIXELS, ps.PPO(lr=1e-3, epochs=4, minibatch=1024), 8, 0.95, 1_000_000),
    ):
        if how.late:
            return
        run = ps.RunConfig(steps=most, device=how.device, eval_slots=100, progress="off")
        exp = ps.Experiment(env, algo, ps.SerialSampler(rows, how.slots[0]), run, env_kwargs={"device": how.device})
        took_s, reached = 0.0, float("-inf")
        with Trainer(exp) as trainer:
            trainer.train()
            if how.device.startswith("cuda"):
                yield {"what": f"{env} train, waits", "slots": f"{how.slots[0]:,}", **waits(trainer.train)}
            while not took_s or (reached < goal and trainer.env_steps < most and not how.tiny):
                started = time.perf_counter()
                for _ in range(10):
                    trainer.train()
                took_s += time.perf_counter() - started  # training alone
                reached = trainer.evaluate(100)[1].mean_return
            said = f"{took_s:.1f} s of training; evaluation {reached:.2f}"
            yield {
                "what": f"{env} to {goal:g}, steps",
                "slots": f"{how.slots[0]:,}",
                "found": f"{trainer.env_steps:,}",
                "said": said,
            }


# Part 8: PPO as simulators ask for it.

SIMULATED: tuple[tuple[int, ...], int] = (512, 256, 128), 24
"""Layers and time steps of the usual settings of robots in simulators."""


def simulators(how: How) -> Iterator[Row]:
    """The GPU tests; then the time of an iteration of PPO with wide layers, what noise takes of it, and its waits."""
    if how.device.startswith("cuda") and not how.tiny:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_waits.py", "tests/gpu/test_replay.py"],
            cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
        yield {
            "what": "pytest -m gpu tests/gpu/test_waits.py tests/gpu/test_replay.py",
            "slots": "-",
            "found": f"exit {done.returncode}",
            "said": last,
        }
    hidden, T = ((16, 16), 8) if how.tiny else SIMULATED
    for B in how.slots:
        rows = B * T // 4
        algo = ps.PPO(epochs=5, minibatch=rows, net=ps.Net(hidden=hidden, activation="relu"))
        for compiled in (False, True) if how.device.startswith("cuda") else (False,):
            if how.late:
                return
            run = ps.RunConfig(steps=10**9, device=how.device, compile=compiled, eval_episodes=0, progress="off")
            exp = ps.Experiment(CARTPOLE, algo, ps.SerialSampler(T, B), run, env_kwargs={"device": how.device})
            with Trainer(exp) as trainer:
                for _ in range(3):
                    trainer.train()
                took_s = 1.0 / rate_of(trainer.train, how.device, 0.2 if how.tiny else 10.0)
                name = f"iteration{', compiled' * compiled}, ms"
                said = f"{T * B / took_s:,.0f} steps/s"
                yield {"what": name, "slots": f"{B:,}", "found": f"{took_s * 1e3:.1f}", "said": said}
                if how.device.startswith("cuda") and not compiled:
                    yield {"what": "iteration, waits", "slots": f"{B:,}", **waits(trainer.train)}
        for where in ("device", "host"):
            spent = 1e3 / rate_of(partial(noise, how.device, where, T, B), how.device, 0.1 if how.tiny else 1.0)
            said = f"{T} x {B:,} x 12 numbers"
            yield {
                "what": f"noise of a batch by the {where}, ms",
                "slots": f"{B:,}",
                "found": f"{spent:.2f}",
                "said": said,
            }


def noise(device: str, where: str, T: int, B: int) -> Any:
    """The noise of a batch, 12 numbers a step, on the device: drawn there, or on the host and brought."""
    address, numbers = Noise(0, Purpose.ACT, 0), (T, B, 12, False, 0, NOTHING_HELD)
    if where == "device":
        return rows_on(torch.device(device), address, *numbers)
    return torch.from_numpy(address.rows(*numbers)).to(device)


def waits(call: Callable[[], Any]) -> Row:
    """How often the processor waits for the device in a call, and where most: file and line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        call()
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{'/'.join(Path(x.filename).parts[-2:])}:{x.lineno}" for x in caught if "synchro" in str(x.message)
    )
    return {"found": f"{sum(places.values())}", "said": ", ".join(f"{place} {n}" for place, n in places.most_common(6))}


PARTS: dict[str, Callable[[How], Iterator[Row]]] = {
    "sampling": sampling,
    "updates": updates,
    "r2d1": r2d1,
    "learners": learners,
    "tensors": tensors,
    "simulators": simulators,
}


def table(rows: list[Row]) -> str:
    """The rows in markdown, under the names of the first."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def main() -> None:
    """Measures a part and prints its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--B", default="64,128,256,512,1024", help="slots, the first also of r2d1")
    parser.add_argument("--modes", default=",".join(MODES), help="of updates; eager is among them always")
    parser.add_argument("--cases", default="", help="of updates, those whose name has this in it")
    parser.add_argument("--limit-s", type=float, default=420.0)
    parser.add_argument("--tiny", action="store_true", help="small shapes and short times, to prove the script")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--to", type=Path, default=RESULTS / "gpu.md")
    args = parser.parse_args()
    slots = tuple(int(x) for x in args.B.split(","))
    modes = tuple(dict.fromkeys(("eager", *args.modes.split(","))))
    how = How(args.device, args.tiny, args.workers, slots, time.monotonic() + args.limit_s, modes, args.cases)
    rows: list[Row] = []
    for row in PARTS[args.part](how):
        rows.append(row)
        print(" | ".join(row.values()), flush=True)
    on_gpu = args.device.startswith("cuda")
    name = torch.cuda.get_device_name(args.device) if on_gpu else platform.processor() or "CPU"
    cut = "; cut at the limit" if how.late else ""
    head = (
        f"`python benchmarks/gpu.py {shlex.join(sys.argv[1:])}`: {name}, {os.cpu_count()} CPUs, penstock {VERSION}, torch "
        f"{torch.__version__}, Python {platform.python_version()}{cut}."
    )
    text = f"{head}\n\n{table(rows)}"
    print(text)
    if args.write:
        write(args.to, args.part, text)


if __name__ == "__main__":
    main()
