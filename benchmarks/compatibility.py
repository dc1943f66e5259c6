"""200 steps of training on every Gymnasium id that can be made here, and on ids of other packages, with what each needs.

Each run is a `penstock train` of its own, with a time limit: once as it is, and where that is refused once more with
what it needs; once in one process and once with two workers. Runs that stand in results/compatibility.json already are
not repeated; the table is written to results/compatibility.md after each run.

    python benchmarks/compatibility.py [--python .venv-compat/bin/python] [--only TEXT] [--again] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
LIMIT_S = 240
SETTINGS = (
    "--preset none --sampler.T 25 --sampler.B 4 --run.steps 200 --run.eval-episodes 0 --run.tensorboard False "
    "--run.progress off --run.log-interval 0"
)  # fmt: skip
SERIAL, WORKERS = "--sampler serial", "--sampler cpu --sampler.workers 2"


@dataclass(frozen=True)
class Case:
    """One environment: its package, its id, and the options without which it is refused."""

    package: str
    env: str
    needs: str = ""
    module: str = ""
    """Imported because it registers the id."""
    algo: str = "ppo"

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.env, self.algo * (self.algo != "ppo"), self.needs)))


def of(package: str, module: str, *ids: str, needs: str = "", algo: str = "ppo") -> list[Case]:
    """A case for each id of a package."""
    return [Case(package, env, needs, module, algo) for env in ids]


DROP, WRAP = "--env-drop mission", "--wrappers minigrid.wrappers:"
ADD_UP = "--wrappers penstock.envs.wrappers:WeightedReward"
OTHERS = [
    *of("ale-py", "", "ALE/Pong-v5", "ALE/MsPacman-v5"),
    *of("ale-py", "", "ALE/Pong-v5", needs="--env-kwargs raw=true"),
    *of("MinAtar", "", "MinAtar/Breakout-v1", "MinAtar/Seaquest-v1"),
    *of("minigrid", "minigrid", "MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0", needs=DROP),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs=f"{WRAP}ImgObsWrapper"),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs=f"{WRAP}FlatObsWrapper"),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs="--env-text 64"),
    *of("minigrid", "minigrid", "BabyAI-GoToRedBall-v0", needs=DROP),
    *of("minigrid", "minigrid", "BabyAI-GoToLocal-v0", needs="--env-text 128"),
    *of("highway-env", "highway_env", "highway-v0", "merge-v0", "roundabout-v0", "intersection-v0", "parking-v0",
        "racetrack-v0"),
    *of("gymnasium-robotics", "gymnasium_robotics", "FetchReach-v4", "HandReach-v3", "PointMaze_UMaze-v3",
        "AntMaze_UMaze-v5", "AdroitHandDoor-v1", "FrankaKitchen-v1"),
    *of("panda-gym", "panda_gym", "PandaReach-v3", "PandaPush-v3"),
    *of("panda-gym", "panda_gym", "PandaReach-v3", algo="sac"),
    *of("popgym", "popgym", "popgym-RepeatPreviousEasy-v0", "popgym-AutoencodeEasy-v0", "popgym-BattleshipEasy-v0",
        "popgym-ConcentrationEasy-v0", "popgym-VelocityOnlyCartpoleEasy-v0", "popgym-MineSweeperEasy-v0"),
    *of("flappy-bird-gymnasium", "flappy_bird_gymnasium", "FlappyBird-v0"),
    *of("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0"),
    *of("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0", algo="sac"),
    *of("gym-anytrading", "gym_anytrading", "forex-v0", "stocks-v0"),
    *of("dm_control (shimmy)", "shimmy", "dm_control/cartpole-balance-v0", "dm_control/walker-walk-v0",
        "dm_control/reacher-easy-v0"),
    *of("mo-gymnasium", "mo_gymnasium", "deep-sea-treasure-v0", "mo-mountaincar-v0", "mo-hopper-v5", "minecart-v0",
        needs=ADD_UP),
    *of("mo-gymnasium", "mo_gymnasium", "mo-mountaincar-v0", needs="--wrappers mo_gymnasium.wrappers:LinearReward"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the packages")
    parser.add_argument("--only", default="", help="cases whose package or id contains this text")
    parser.add_argument("--again", action="store_true", help="repeat runs that are there")
    parser.add_argument("--table", action="store_true", help="write the tables from results that are there")
    args = parser.parse_args()
    path = RESULTS / "compatibility.json"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    cases = [Case("gymnasium", env) for env in gymnasium_ids(args.python)] + OTHERS
    known = {case.name for case in cases}
    done = {name: row for name, row in done.items() if name in known}
    for case in [] if args.table else cases:
        if args.only not in f"{case.package} {case.env}" or (case.name in done and not args.again):
            continue
        done[case.name] = measure(case, args.python)
        print(f"{case.name}: {done[case.name]}", flush=True)
        path.write_text(json.dumps(done, indent=1) + "\n")
        write_tables(cases, done)
    write_tables(cases, done)


def gymnasium_ids(python: str) -> list[str]:
    """The ids that Gymnasium registers by itself."""
    code = "import gymnasium; print('\\n'.join(sorted(gymnasium.registry)))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.split()


def measure(case: Case, python: str) -> dict[str, str]:
    """What becomes of a case: as it is, with what it needs, and with two workers."""
    ways = {"as it is": SERIAL, **({"serial": f"{SERIAL} {case.needs}"} if case.needs else {})}
    ways["two workers"] = f"{WORKERS} {case.needs}"
    row = dict(zip(ways, train(case, python, list(ways.values()))))
    if case.package == "gymnasium" and not row["as it is"].startswith("trains"):
        code = f"import gymnasium; gymnasium.make({case.env!r}).reset(seed=0)"
        made = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if made.returncode:
            return {"as it is": f"cannot be made: {brief(made.stderr.strip().splitlines()[-1])}"}
    return {"serial": row["as it is"], **row}


DRIVER = """
import contextlib, io, json, sys
from penstock.cli.main import main
for argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(argv)
        except SystemExit as error:
            code = error.code
    print(json.dumps([code, said.getvalue()]), flush=True)
"""


def train(case: Case, python: str, ways: list[str]) -> list[str]:
    """For each way `trains`, with the number of steps out of bounds if there are any; or the message.

    One process runs them all, since importing torch takes longer than 200 steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder, str(i)) for i in range(len(ways))]
        common = f"train {case.algo} --env {case.env} {SETTINGS}"
        if case.module:
            common += f" --import {case.module}"
        if case.algo == "sac":
            common += " --algo.learning-starts 50 --algo.batch-size 32 --algo.replay.capacity 1000"
        commands = [f"{common} {way} --run.dir {run}".split() for way, run in zip(ways, runs)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
        try:
            done = subprocess.run(
                [python, "-c", DRIVER, json.dumps(commands)],
                capture_output=True, text=True, timeout=LIMIT_S, env=environ, check=False,
            )  # fmt: skip
            out, end = done.stdout, f"exit {done.returncode}"
        except subprocess.TimeoutExpired as error:
            out, end = (error.stdout or b"").decode(), f"not done within {LIMIT_S} s"
        answers = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
        found = [outcome(code, said, run) for (code, said), run in zip(answers, runs)]
        return found + [end] * (len(ways) - len(found))


def outcome(code: int, said: str, run: Path) -> str:
    if code == 0:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        outside = rows[-1].get("env/out_of_bounds", 0)
        return "trains" + (f", {outside:.0f} steps out of bounds" if outside else "")
    lines = [line for line in said.splitlines() if line.startswith("penstock: ")]
    return brief(f"exit {code}: {lines[-1].removeprefix('penstock: ') if lines else said.strip()[-300:]}")


def brief(text: str, limit: int = 160) -> str:
    """One line without addresses and colours."""
    text = re.sub(r"\x1b\[[0-9;]*m| at 0x[0-9a-f]+", "", " ".join(text.split()))
    return text if len(text) <= limit else text[:limit] + " ..."


def write_tables(cases: list[Case], done: dict[str, Any]) -> None:
    rows = [(case, done[case.name]) for case in cases if case.name in done]
    good = [r for _, r in rows if r.get("serial", "").startswith("trains") and r["two workers"].startswith("trains")]
    gone = [r for _, r in rows if "serial" not in r]
    lines = [
        "# Other people's environments",
        "",
        f"200 steps each, with one process and with two workers: {len(good)} of {len(rows) - len(gone)} train with "
        f"both; {len(gone)} cannot be made here by Gymnasium itself. PPO unless another algorithm is named. "
        f"`penstock train ppo --env ID {SETTINGS}`, {time.strftime('%Y-%m-%d')}.",
        "",
        "| package | id | as it is | needs | serial | two workers |",
        "|---|---|---|---|---|---|",
    ]
    for case, row in rows:
        cells = (
            case.package,
            f"{case.env}{f' ({case.algo})' * (case.algo != 'ppo')}",
            row["as it is"],
            f"`{case.needs}`" if case.needs else "",
            row.get("serial", ""),
            row.get("two workers", ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    (RESULTS / "compatibility.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
