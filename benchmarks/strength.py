"""How well algorithms learn, ours beside the peers', at equal steps: scores, learning curves, processor seconds.

A part is a task, a library, an algorithm and a seed, and gets a line of JSON in results/strength.jsonl. Parts that have
one are skipped, so that a stopped run goes on; parts come by seed, so that it is even wherever it stops. Each part is a
process of its own with one thread; ours run here, the peers' with `--peer`. Needs the extras `mujoco`, `box2d` and
`minatar`, and bsuite 0.3.6, on both sides.

    python benchmarks/strength.py [--only 'classic/*/ppo/*,bsuite'] [--jobs 1] [--peer PYTHON]
    python benchmarks/strength.py --list
    python benchmarks/strength.py --report     # results/strength.md and its pictures, from the lines that stand
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import fnmatch
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent / "peers"))
import strength_settings as chosen
import tasks

RESULTS = Path(__file__).parent / "results"
FILE = RESULTS / "strength.jsonl"
PEER_SCRIPT = Path(__file__).parent / "peers" / "sb3_strength.py"


@dataclass(frozen=True)
class Part:
    """One run of one seed."""

    task: str
    """`SUITE/NAME`, see peers/tasks.py."""
    library: str
    """`penstock`, `sb3`, `contrib`, `sbx` or `random`."""
    algo: str
    seed: int
    steps: int
    episodes: int | None = None
    """After how many it ends, for bsuite."""
    plays: int = 0
    """Deterministic episodes of the last policy."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the peer's constructor; ours: `preset`, an algorithm's table or "" for none, and changes to it."""

    @property
    def key(self) -> str:
        """By what `--only` finds it."""
        return f"{self.task}/{self.library}/{self.algo}/{self.seed}"


def parts() -> list[Part]:
    """All of them, by seed."""
    found: list[Part] = []
    for suite in chosen.SUITES:
        for task in suite.tasks:
            name, episodes, steps = f"{suite.name}/{task.name}", None, task.steps
            if suite.name == "bsuite":
                episodes = round(task.share * task.prescribed)
                steps = (episodes + 64) * task.longest  # slots begin more episodes than count
            for entry in task.entries or suite.entries:
                part = Part(
                    name, entry.library, entry.algo, 0, entry.steps or steps, episodes, suite.plays, entry.settings
                )
                found += [replace(part, seed=seed) for seed in range(1, 1 + (entry.seeds or suite.seeds))]
            if suite.name != "bsuite":
                found.append(Part(name, "random", "random", 1, 0, None, 100))
    return sorted(found, key=lambda part: part.seed)


def ours(part: Part) -> dict[str, Any]:
    """A run of this library, in this process."""
    import torch

    import penstock as ps
    from penstock.run.presets import find_preset, named_preset, with_preset

    torch.set_num_threads(1)
    suite, _, name = part.task.partition("/")
    env = {"minatar": f"penstock.envs.minatar:{name}"}.get(suite, name)
    settings = dict(part.settings)
    table, algo = settings.pop("preset", None), part.algo.partition("+")[0]
    preset = find_preset(algo, env) if table is None else named_preset(table) if table else None
    if preset is None and table is None:
        raise SystemExit(f"{part.key}: there is no preset of {algo} for {env}")
    record = tasks.Record(part.episodes)
    with tempfile.TemporaryDirectory() as folder:
        run = {"run.steps": part.steps, "run.seed": part.seed, "run.dir": f"{folder}/run", "run.progress": "off",
               "run.eval_episodes": 0, "run.eval_interval": 0, "run.checkpoint_interval": 0}  # fmt: skip
        exp = ps.override(with_preset(algo, env, preset), {**settings, **run})
        config = replace(exp.env_config, env=lambda: tasks.make(part.task, record), kwargs={})
        before = time.process_time()
        with ps.Run(replace(exp, env=config, env_checks="sampled")) as live:
            for _ in live:
                if record.full:
                    break
        row: dict[str, Any] = {"cpu_s": time.process_time() - before}
        policy: Any = None if part.episodes else ps.load(f"{folder}/run")

    def act(obs: Any, state: Any, start: bool) -> tuple[Any, Any]:
        found = policy.predict(obs, state, start)
        return found if policy.recurrent else (found, None)

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "gymnasium", "numpy")]
    learning = [f"penstock/{folder}" for folder in ("agents", "algos", "learn", "ops", "presets", "replay", "samplers")]
    revision = _output(["git", "log", "-1", "--format=%h", "--", *learning]).strip()
    return row | tasks.measured(asdict(part), record, act) | {"version": ", ".join([f"penstock {revision}", *versions])}


def at_random(part: Part) -> dict[str, Any]:
    """The score of uniformly random actions, the zero of scaled scores."""
    env = tasks.make(part.task)
    env.action_space.seed(part.seed)
    return {"cpu_s": 0.0, "steps": 0, "last": tasks.play(lambda *_: (env.action_space.sample(), None), env, part.plays)}


def measured(part: Part, peer: str) -> dict[str, Any]:
    """The line of a part, run in a process of its own."""
    words = [sys.executable, __file__, "--one", part.key]
    if part.library not in ("penstock", "random"):
        words = [peer, str(PEER_SCRIPT), json.dumps(asdict(part))]
    row = json.loads(_output(words).splitlines()[-1])
    row = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
    head = {"task": part.task, "library": part.library, "algo": part.algo, "seed": part.seed, "asked": part.steps}
    return head | row | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")}


def _output(words: list[str]) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, env=env, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=6 * 3600, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def read() -> list[dict[str, Any]]:
    """The lines that stand."""
    return [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.is_file() else []


def keep(row: dict[str, Any]) -> None:
    """Appends a line; several of these scripts may at once."""
    with FILE.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(row) + "\n")


def key_of(row: Mapping[str, Any]) -> str:
    """That of its part."""
    return f"{row['task']}/{row['library']}/{row['algo']}/{row['seed']}"


def wanted(found: list[Part], only: str) -> list[Part]:
    """Parts whose key, or a beginning of it, matches one of the patterns; in the order of the patterns."""
    if not only:
        return found
    by_key = {
        part.key: part
        for one in only.split(",")
        for part in found
        if any(map(fnmatch.fnmatchcase, [part.key] * 2, [one, f"{one}/*"]))
    }
    return list(by_key.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="beginnings or patterns of TASK/LIBRARY/ALGO/SEED, with commas")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=99, help="no more than so many of each")
    parser.add_argument("--peer", default=".venv-peer/bin/python")
    parser.add_argument("--list", action="store_true", help="the parts, and how many are there")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--one", metavar="KEY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.report:
        import strength_report

        return strength_report.write(read(), parts())
    found = [part for part in wanted(parts(), args.one or args.only) if part.seed <= args.seeds]
    if args.one:
        part = next(part for part in found if part.key == args.one)
        return print(json.dumps(ours(part) if part.library == "penstock" else at_random(part)), flush=True)
    there = {key_of(row) for row in read()}
    left = [part for part in found if part.key not in there]
    if args.list:
        print("\n".join(f"{'there' if part.key in there else 'left ':5s} {part.key} {part.steps}" for part in found))
        return print(f"{len(found) - len(left)} of {len(found)} parts are there")

    def run(part: Part) -> None:
        started = time.perf_counter()
        row = measured(part, args.peer)
        keep(row)
        shown = {key: row.get(key) for key in ("steps", "last", "late", "bsuite", "cpu_s") if key in row}
        print(f"{part.key} {shown} {time.perf_counter() - started:.0f} s", flush=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        for done in [pool.submit(run, part) for part in left]:
            try:
                done.result()
            except SystemExit as error:  # the others go on
                print(error, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
