"""200 steps of training on every Gymnasium id that can be made here, and on ids of other packages, with what each needs.

Each is a `penstock train` with a time limit: as it is, and with what it needs where that is refused; in one process and
with two workers (GpuSampler on the CPU, whose workers import no torch). Runs that stand in results/compatibility.json
already are not repeated; the table is written to results/compatibility.md after each run.

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
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
LIMIT_S = 240
SETTINGS = (
    "--preset none --sampler.T 25 --sampler.B 4 --run.steps 200 --run.eval-episodes 0 "
    "--run.progress off --run.log-interval 0"
)  # fmt: skip
SERIAL, WORKERS = "--sampler serial", "--sampler gpu --sampler.workers 2"


@dataclass(frozen=True)
class Case:
    """One environment: its package, its id, and the options without which it is refused."""

    package: str
    env: str
    needs: str = ""
    module: str = ""
    """Imported because it registers the id."""
    algo: str = "ppo"
    packages: str = ""
    """Versions that it needs of others, which are put on PYTHONPATH: `pip install --target DIR`."""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.env, self.algo * (self.algo != "ppo"), self.needs)))


def of(package: str, module: str, *ids: str, needs: str = "", algo: str = "ppo", packages: str = "") -> list[Case]:
    """A case for each id of a package."""
    return [Case(package, env, needs, module, algo, packages) for env in ids]


DROP, WRAP = "--env-drop mission", "--wrappers minigrid.wrappers:"
ADD_UP = "--wrappers penstock.envs.wrappers:WeightedReward"
OTHERS = [
    *of("ale-py", "", "ALE/Pong-v5", "ALE/MsPacman-v5"),
    *of("ale-py", "", "ALE/Pong-v5", needs="--env-kwargs raw=true"),
    *of("MinAtar", "", "MinAtar/Breakout-v1", "MinAtar/Seaquest-v1"),
    *of("envpool", "", "envpool:CartPole-v1", "envpool:FrozenLake-v1", "envpool:LunarLander-v3", "envpool:Pong-v5",
        "envpool:HalfCheetah-v4", "envpool:CartpoleBalance-v1", "envpool:MiniGrid-Empty-5x5-v0",
        "envpool:MetaWorld/Assembly-v3", "envpool:Jumanji/Game2048-v1"),
    *of("minigrid", "minigrid", "MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0", needs=DROP),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs=f"{WRAP}ImgObsWrapper"),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs=f"{WRAP}FlatObsWrapper"),
    *of("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", needs="--env-text 64"),
    *of("minigrid", "minigrid", "BabyAI-GoToRedBall-v0", needs=DROP),
    *of("minigrid", "minigrid", "BabyAI-GoToLocal-v0", needs="--env-text 128"),
    *of("highway-env", "highway_env", "highway-fast-v0", "merge-v0", "roundabout-v0", "parking-v0",
        "racetrack-v0"),
    *of("gymnasium-robotics", "gymnasium_robotics", "PointMaze_UMaze-v3", "AntMaze_UMaze-v5", "AdroitHandDoor-v1"),
    *of("gymnasium-robotics", "gymnasium_robotics", "FetchReach-v4", "HandReach-v3", "FrankaKitchen-v1",
        packages="mujoco==3.2.7"),
    *of("panda-gym", "panda_gym", "PandaReach-v3", "PandaPush-v3"),
    *of("panda-gym", "panda_gym", "PandaReach-v3", algo="sac"),
    *of("popgym", "popgym", "popgym-RepeatPreviousEasy-v0", "popgym-AutoencodeEasy-v0", "popgym-BattleshipEasy-v0",
        "popgym-ConcentrationEasy-v0", "popgym-VelocityOnlyCartpoleEasy-v0", "popgym-MineSweeperEasy-v0"),
    *of("flappy-bird-gymnasium", "flappy_bird_gymnasium", "FlappyBird-v0"),
    *of("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0"),
    *of("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0", algo="sac"),
    *of("gym-anytrading", "gym_anytrading", "forex-v0", "stocks-v0"),
    *of("dm_control (shimmy)", "shimmy", "dm_control/cartpole-balance-v0", "dm_control/walker-walk-v0",
        "dm_control/reacher-easy-v0", packages="mujoco<4"),
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
    driver = None
    for case in [] if args.table else cases:
        if args.only not in f"{case.package} {case.env}" or (case.name in done and not args.again):
            continue
        if driver is None or driver.over:
            driver = Driver(args.python)
        done[case.name] = measure(case, driver, args.python)
        print(f"{case.name}: {done[case.name]}", flush=True)
        path.write_text(json.dumps(done, indent=1) + "\n")
        write_tables(cases, done)
    if driver is not None:
        driver.close()
    write_tables(cases, done)


def gymnasium_ids(python: str) -> list[str]:
    """The ids that Gymnasium registers by itself."""
    code = "import gymnasium; print('\\n'.join(sorted(gymnasium.registry)))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.split()


def ways(case: Case) -> dict[str, str]:
    """The options of each column."""
    serial = {"serial": f"{SERIAL} {case.needs}"} if case.needs else {}
    return {"as it is": SERIAL, **serial, "two workers": f"{WORKERS} {case.needs}"}


def command(case: Case, way: str, run: Path) -> list[str]:
    words = f"train {case.algo} --env {case.env} {SETTINGS} {way} --run.dir {run}"
    if case.module:
        words += f" --import {case.module}"
    if case.algo == "sac":
        words += " --algo.learning-starts 50 --algo.batch-size 32 --algo.replay.capacity 1000"
    return words.split()


DRIVER = """
import contextlib, io, json, sys
from penstock.cli.main import main
for line in sys.stdin:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(json.loads(line))
        except SystemExit as error:
            code = error.code
    print("answer " + json.dumps([code, said.getvalue()]), flush=True)
"""


class Driver:
    """A process that trains what it is told, one after the other; importing torch takes longer than 200 steps."""

    def __init__(self, python: str) -> None:
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SDL_VIDEODRIVER": "dummy"}
        self._process = subprocess.Popen(
            [python, "-c", DRIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environ,
        )

    def train(self, argv: list[str], run: Path) -> str:
        """`trains`, with the number of steps out of bounds if there are any; or the message."""
        assert self._process.stdin is not None and self._process.stdout is not None
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write((json.dumps(argv) + "\n").encode())
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith(b"answer "):
                    return outcome(*json.loads(line.removeprefix(b"answer ")), run)
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        return f"the process ended with {self._process.wait(LIMIT_S)}, or was ended after {LIMIT_S} s"

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def close(self) -> None:
        self._process.kill()
        self._process.wait(LIMIT_S)


def measure(case: Case, driver: Driver, python: str) -> dict[str, str]:
    """What becomes of a case: as it is, with what it needs, and with two workers."""
    with tempfile.TemporaryDirectory() as folder:
        row: dict[str, str] = {}
        for name, way in ways(case).items():
            if driver.over or (case.package == "gymnasium" and row and not row["as it is"].startswith("trains")):
                break
            run = Path(folder, name.replace(" ", "-"))
            row[name] = driver.train(command(case, way, run), run)
    if case.package == "gymnasium" and not row["as it is"].startswith("trains"):
        code = f"import gymnasium; gymnasium.make({case.env!r}).reset(seed=0)"
        made = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if made.returncode:
            return {"as it is": f"cannot be made: {brief(made.stderr.strip().splitlines()[-1])}"}
    return {"serial": row["as it is"], "two workers": "", **row}


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
            ", ".join(f"`{text}`" for text in (case.needs, case.packages) if text),
            row.get("serial", ""),
            row.get("two workers", ""),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    (RESULTS / "compatibility.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
