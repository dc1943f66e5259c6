"""Duration of a batch of Atari transitions out of a replay that keeps every frame once, and its size.

A uniform batch of 256 with the next observations: 2 x 256 stacks [4, 84, 84] of bytes, 14 MB. Its floor is the bare numpy
gather of as many frames, from places that are known beforehand; a replay has to choose, to find the frames of each stack
and of the one n steps later, and to read actions, rewards and ends as well. A replay of whole stacks, a quarter of the
rows in the same memory, is the third way. They take turns, A B C, C B A, in a thread as the prefetch of a run does.

    python benchmarks/replay_frames.py [--rows 200000] [--batches 200]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import penstock as ps
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.replay.replay import Replay, make_view

RESULTS = Path(__file__).parent / "results"
SPEC = EnvSpec(LeafSpec("box", (4, 84, 84), "uint8", 0.0, 255.0), LeafSpec("discrete", (), "int64", sizes=(6,)))
BATCH, T, SLOTS, LIMIT_S = 256, 64, 8, 600.0
BAR_RATIO, BAR_GB = 1.5, 7.3


def replay_of(rows: int, frames: bool, n_step: int = 3) -> Replay:
    """An empty replay of `rows` Atari transitions."""
    settings = ps.ReplaySettings(capacity=rows, deduplicate_frames=frames)
    return Replay(SPEC, settings, make_view(settings, SPEC, n_step, fed=frozenset()))


def random_batches(count: int) -> Any:
    """Batches in which every frame is random and an episode ends every 200 rows."""
    rng = np.random.default_rng(0)
    batch = allocate_batch(SPEC, BatchSpec(T, SLOTS))
    obs, stack = np.asarray(batch.obs), np.zeros((SLOTS, 4, 84, 84), np.uint8)
    first, ended, age = np.ones(SLOTS, bool), np.zeros(SLOTS, bool), np.arange(SLOTS) * 25
    for _ in range(count):
        for t in range(T + 1):
            if t:
                frame = rng.integers(0, 256, (SLOTS, 84, 84), np.uint8)
                stack = np.concatenate([stack[:, 1:], frame[:, None]], 1)
                first = ended
                stack[first] = frame[first][:, None]
                batch.valid[t - 1] = ~ended
                age = np.where(ended, 0, age + 1)
                ended = age == 200
                batch.terminated[t - 1] = ended
            obs[t], batch.first[t] = stack, first
        yield batch


def filled(rows: int, frames: bool, times: list[float]) -> Replay:
    """A replay that is full; microseconds for each row that was appended are added to `times`."""
    replay = replay_of(rows, frames)
    batches: list[SampleBatch] = [batch.copy() for batch in random_batches(8)]
    for i in range(rows // (T * SLOTS) + 2):
        batch = batches[i % len(batches)]
        started = time.perf_counter()
        replay.append(batch)
        times.append((time.perf_counter() - started) * 1e6 / (T * SLOTS))
    return replay


def measure(rows: int, batches: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Milliseconds of a batch by way, and medians of other numbers."""
    append: dict[str, list[float]] = {"frames": [], "stacks": []}
    frames, stacks = filled(rows, True, append["frames"]), filled(rows // 4, False, append["stacks"])
    assert frames.storage is not None
    flat: NDArray[np.uint8] = next(x for x in frames.storage.arrays.values() if x.shape[2:] == (84, 84))
    flat = flat.reshape(-1, 84, 84)
    rng = np.random.default_rng(1)

    def places() -> NDArray[np.int64]:
        newest = rng.integers(3 * SLOTS, len(flat), (2, BATCH, 1))
        return newest - np.arange(3, -1, -1) * SLOTS

    at = places()

    def gather() -> Any:
        return flat.take(at[0], 0), flat.take(at[1], 0)

    ways: dict[str, Callable[[], Any]] = {"gather": gather, "frames": lambda: frames.sample(BATCH, rng),
                                          "stacks": lambda: stacks.sample(BATCH, rng)}  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(batches):
        at = places()
        for name in list(ways)[:: 1 if i % 2 == 0 else -1]:
            started = time.perf_counter()
            ways[name]()
            times[name].append((time.perf_counter() - started) * 1e3)
    return times, {name: statistics.median(x) for name, x in append.items()}


def main(argv: list[str]) -> int:
    """Measures and writes results/replay_frames.md. 1 if a promise is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000, help="rows that are written and drawn from; 7 kB each")
    parser.add_argument("--batches", type=int, default=200)
    args = parser.parse_args(argv)
    full = replay_of(1_000_000, True)
    full.prepare(T, SLOTS)  # pages that are never written are never taken
    whole, said = full.bytes / 1e9, full.describe()
    del full
    header = [f"command: {' '.join(['python benchmarks/replay_frames.py', *argv])}",
              f"date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
              f"machine: {_cpu()}, {len(os.sched_getaffinity(0))} cores, one thread, {os.getloadavg()[0]:.1f} runnable processes a "
              "minute before the start",
              f"python {platform.python_version()}, numpy {np.__version__}, penstock {ps.__version__}"]  # fmt: skip
    with ThreadPoolExecutor(1) as thread:
        times, append = thread.submit(measure, args.rows, args.batches).result(LIMIT_S)
    ratios = {name: statistics.median(a / b for a, b in zip(times[name], times["gather"])) for name in times}
    names = {
        "gather": "bare gather of the frames",
        "frames": "replay, `deduplicate_frames=True`",
        "stacks": "replay of whole stacks",
    }
    lines = ["# Atari frames in a replay", "", *(f"- {line}" for line in header), "",
             f"A uniform batch of {BATCH} three-step transitions out of {args.rows:,} rows ({args.rows * 7056 / 1e9:.1f} GB of frames), "
             f"{args.batches} batches each way, in turns.", "",
             "| way | median ms | lowest tenth | GB/s | times the bare gather | append, us a row |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, x in times.items():
        middle, low = statistics.median(x), statistics.quantiles(x, n=10)[0]
        rate, added = 2 * BATCH * 4 * 7056 / middle / 1e6, f"{append[name]:.1f}" if name in append else ""
        lines.append(f"| {names[name]} | {middle:.2f} | {low:.2f} | {rate:.1f} | {ratios[name]:.2f} | {added} |")
    bars = [(f"batch of {BATCH} <= {BAR_RATIO} bare gathers", f"{ratios['frames']:.2f}", ratios["frames"] <= BAR_RATIO),
            (f"1,000,000 transitions <= {BAR_GB} GB", f"{whole:.2f} GB", whole <= BAR_GB)]  # fmt: skip
    lines += ["", f"`describe()`: {said}", "", "| bar | measured | |", "|---|---|---|",
              *(f"| {text} | {seen} | {'met' if met else '**missed**'} |" for text, seen, met in bars), ""]  # fmt: skip
    print("\n".join(lines))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "replay_frames.md").write_text("\n".join(lines))
    return 0 if all(met for _, _, met in bars) else 1


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
