"""Forks a fresh process for each request on its standard input: what kill -9 tests need, without 2 s of imports each.

Not a test module. Nothing but imports has happened in the process that is forked. One JSON object a line:
{"log": path, "train": plain experiment, "init": run or null}, {"log", "resume": run, "changes"}, {"log", "argv"}, or
{"log", "script": path, "args": list, "cwd": path or null} is answered by the pid, {"wait": pid, "timeout": s} by the
exit code, negative for a signal, or null for still running. With "forked": true its workers, runners and ranks are
forks of it as well.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium.envs.classic_control  # noqa: F401
import torch

import penstock as ps
import penstock.run.loop
from penstock.cli.main import main
from penstock.core.config import from_plain
from penstock.core.errors import PenstockError
from penstock.envs.check import check_env
from penstock.workers import env_check

sys.path.append(str(Path(__file__).parent.parent.parent))
from tests.forked import fork_from_here_on


def carry_out(request: dict[str, Any]) -> int:
    if request["forked"]:
        fork_from_here_on()
    if "argv" in request:
        return main(request["argv"])
    if "script" in request:
        sys.argv = [request["script"], *request["args"]]
        sys.path.insert(0, str(Path(request["script"]).parent))
        os.chdir(request["cwd"] or ".")
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        runpy.run_path(request["script"], run_name="__main__")
        return 0
    try:
        if "train" in request:
            result = ps.train(from_plain(request["train"]), request["init"])
        else:
            result = ps.resume(request["resume"], request["changes"])
        print(json.dumps({"env_steps": result.env_steps, "stopped_by": result.stopped_by}))
    except PenstockError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def wait(pid: int, timeout: float) -> int | None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def serve() -> int | None:
    """None when there are no more requests; in a child the exit code."""
    torch.set_num_threads(1)
    env_check._apart = lambda config, parts, seed, settings: check_env(config, seed=seed)  # as in conftest.py
    assert ps.PPO and ps.A2C and ps.SerialSampler  # imports them
    torch.optim.Adam([torch.zeros(1)])  # imports a thousand modules more
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer: Any = wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                out = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                os.dup2(out, 1)
                os.dup2(out, 2)
                return carry_out(request)
        print(json.dumps(answer), flush=True)
    return None


if __name__ == "__main__":
    code = serve()
    raise SystemExit(code or 0)
