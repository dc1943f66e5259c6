"""Cost of a checkpoint with a replay, in seconds and memory, with the replay in memory and in files.

Each case is a process of its own. "Peak" is the highest resident set during the call (`VmHWM`, reset before it) beyond
the resident set before it; "anonymous" is the part of it that the kernel cannot take back, measured at 200 Hz.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.core.batch import SampleBatch
from penstock.run.checkpoints import manifest
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint

RESULTS = Path(__file__).parent / "results" / "replay_checkpoint.md"
CASES = ("memory", "files", "memory, small rows")
LIMIT_MB = 64.0


def status(name: str) -> float:
    """A field of /proc/self/status in MB."""
    text = Path("/proc/self/status").read_text()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:")) * 1024 / 1e6


def measured(call: Callable[[], Any]) -> dict[str, float]:
    """Seconds, and MB beyond those before."""
    Path("/proc/self/clear_refs").write_text("5")
    resident, anonymous = status("VmRSS"), status("RssAnon")
    highest, over = [anonymous], threading.Event()

    def watch() -> None:
        while not over.wait(0.005):
            highest[0] = max(highest[0], status("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    over.set()
    thread.join(10)
    return {"before": resident, "peak": status("VmHWM") - resident, "anonymous": highest[0] - anonymous, "s": seconds}


def policy(case: str, gb: float, folder: Path) -> Any:
    """A DQN policy whose prioritized replay is full: rows of 4 x 84 x 84 kept frame by frame, or of 4 numbers."""
    from penstock.core.spec import EnvSpec, LeafSpec

    small = "small" in case
    shape, dtype = ((4,), "float32") if small else ((4, 84, 84), "uint8")
    obs = LeafSpec("box", shape, dtype, low=0.0, high=255.0)
    spec = EnvSpec(obs, LeafSpec("discrete", (), "int64", sizes=(4,)))
    rows = int(gb * 1e9 / (16 + 8 + 4 + 4 + 16 if small else 84 * 84 + 33))
    replay = ps.ReplaySettings(capacity=rows, index="prioritized", deduplicate_frames=not small,
                               dir=str(folder / "replay") if case == "files" else None)  # fmt: skip
    live: Any = ps.DQN(replay=replay, learning_starts=100).build(spec)
    T, B = 512 if small else 64, 16
    first = np.zeros((T + 1, B), bool)
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (T + 4, B, *shape[1:]), np.uint8)
    first[0] = True
    stacks = (
        np.stack([frames[i : i + T + 1] for i in range(4)], 2) if not small else rng.random((T + 1, B, 4), np.float32)
    )
    if not small:
        stacks[0] = stacks[0, :, -1:]
        for i in (1, 2, 3):
            stacks[i, :, :-1] = stacks[i - 1, :, 1:]
    zero, no = np.zeros((T + 1, B), np.float32), np.zeros((T, B), bool)
    ended = no.copy()
    ended[-1] = True
    batch = SampleBatch(obs=stacks, first=first, prev_action=zero.astype(np.int64), prev_reward=zero, terminated=ended, truncated=no,
                        valid=~no, info={}, state=None, version=no.astype(np.int64))  # fmt: skip
    for _ in range(rows // (T * B) + 2):
        live.replay_schedule.replay.append(batch)
    return live


def bare(file: Path, megabytes: int) -> None:
    """As many zeros into a file: what the disk allows."""
    fd, zeros = os.open(file, os.O_WRONLY | os.O_CREAT), bytes(1_000_000)
    for _ in range(megabytes):
        os.write(fd, zeros)
    os.fsync(fd)
    os.close(fd)
    file.unlink()


def child(case: str, gb: float, folder: Path) -> None:
    """Prints what saving, finding and loading cost."""
    torch.set_num_threads(1)
    live = policy(case, gb, folder)
    arrays, state = live.arrays(), live.state_dict()
    agent = state.pop("agent")
    megabytes = sum(x.nbytes for x in arrays.values()) / 1e6
    save_checkpoint(folder / "warm-up", 1, {}, agent)
    found: dict[str, Any] = {
        "MB": megabytes,
        "write and fsync": measured(lambda: bare(folder / "bare", int(megabytes))),
    }
    found["save"] = measured(lambda: save_checkpoint(folder, 1, state, agent, arrays))
    found["save again"] = measured(lambda: save_checkpoint(folder, 2, state, agent, arrays))
    found["policy"] = measured(lambda: load_checkpoint(find_checkpoint(folder)))
    manifest._SEEN_GOOD.clear()  # pyright: ignore[reportPrivateUsage]  # as in a process that has not written it
    found["verify"] = measured(lambda: find_checkpoint(folder, replay=True))

    def restore() -> None:
        checkpoint = load_checkpoint(find_checkpoint(folder, replay=True), replay=True)
        live.load_state_dict({**checkpoint.state, "agent": checkpoint.policy}, checkpoint.arrays())

    found["restore"] = measured(restore)
    print(json.dumps(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--dir", type=Path, help="where to write (default: a temporary directory)")
    args = parser.parse_args()
    if args.case:
        child(args.case, args.gb, args.dir)
        return 0
    lines = [
        f"# Checkpoints with a replay of {args.gb:g} GB", "",
        f"`python benchmarks/replay_checkpoint.py --gb {args.gb:g}`, torch {torch.__version__}, {os.cpu_count()} cores, one thread. "
        "Peak and anonymous: MB beyond those before the call.", "",
        "| replay | call | MB | s | MB/s | before | peak | anonymous |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    worst = 0.0
    for case in CASES:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            command = [sys.executable, __file__, "--case", case, "--gb", str(args.gb), "--dir", folder]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200)
        found = json.loads(done.stdout.splitlines()[-1])
        megabytes = found.pop("MB")
        for call, x in found.items():
            rate = "" if call == "policy" else f"{megabytes / x['s']:,.0f}"
            lines.append(f"| {case} | {call} | {megabytes:,.0f} | {x['s']:.2f} | {rate} | {x['before']:,.0f} | {x['peak']:,.0f} | "
                         f"{x['anonymous']:,.0f} |")  # fmt: skip
            print(lines[-1], flush=True)
            worst = max(worst, x["peak"])
    verdict = "met" if worst <= LIMIT_MB else "MISSED"
    lines += [
        "",
        f"Promise: no call takes more than {LIMIT_MB:g} MB beyond what it had before. {verdict}: {worst:,.0f} MB.",
        "",
    ]
    RESULTS.write_text("\n".join(lines))
    print(lines[-2])
    return int(worst > LIMIT_MB)


if __name__ == "__main__":
    raise SystemExit(main())
