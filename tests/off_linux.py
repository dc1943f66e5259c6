"""As near to macOS or Windows as Linux allows: what they lack is taken away, then penstock is used; run by a test."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import sys
import sysconfig
import warnings
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import gymnasium  # noqa: F401
import matplotlib.backends.backend_agg  # noqa: F401
import numpy as np
import psutil  # noqa: F401
import rich.console
import rich.live  # noqa: F401
import torch  # noqa: F401

MACOS = {
    "os": "pidfd_open memfd_create eventfd eventfd_read eventfd_write sched_setaffinity sched_getaffinity splice "
    "copy_file_range posix_fallocate posix_fadvise getrandom O_DIRECT O_NOATIME O_PATH EFD_CLOEXEC "
    "EFD_NONBLOCK MFD_CLOEXEC MFD_ALLOW_SEALING P_PIDFD",
    "fcntl": "F_ADD_SEALS F_GET_SEALS F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE F_SETSIG F_GETSIG",
    "signal": "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT",
    "socket": "SO_PEERCRED SCM_CREDENTIALS SO_PASSCRED AF_NETLINK AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK",
    "select": "epoll",
    "resource": "prlimit RLIMIT_NICE RLIMIT_OFILE",
    "mmap": "MAP_POPULATE",
}
WINDOWS = {
    "os": "fork forkpty register_at_fork killpg getpgid setpgid setsid getuid getgid mkfifo nice getloadavg "
    "sysconf fchmod fchown chown pread preadv pwrite pwritev readv writev sendfile uname getpriority setpriority waitid "
    "O_CLOEXEC O_ASYNC O_SYNC ttyname",
    "signal": "SIGHUP SIGUSR1 SIGUSR2 SIGCHLD SIGALRM SIGKILL SIGQUIT setitimer pthread_sigmask pthread_kill siginterrupt "
    "SIG_BLOCK SIG_UNBLOCK SIG_SETMASK",
    "socket": "AF_UNIX SCM_RIGHTS send_fds recv_fds",
    "select": "poll",
    "mmap": "MAP_SHARED MAP_PRIVATE PROT_READ PROT_WRITE",
}
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "syslog"}


class _Absent(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def take_away(system: str) -> None:
    """Removes what a system lacks from modules of the standard library; other packages have it by then."""
    sysconfig.get_config_vars()  # read once, from a file of the real system
    for gone in (MACOS, WINDOWS) if system == "win32" else (MACOS,):
        for module, names in gone.items():
            for name in names.split():
                if hasattr(importlib.import_module(module), name):
                    delattr(importlib.import_module(module), name)
    if system == "win32":
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.meta_path.insert(0, _Absent())
    sys.platform = system
    real = builtins.open

    def without_proc(path: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return real(path, *args, **kwargs)

    builtins.open = without_proc


class Msvcrt(ModuleType):
    """A stand-in: locks whole files, and refuses as Windows does."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        import fcntl

        super().__init__("msvcrt")
        self._flock, self._lock, self._unlock = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

    def locking(self, fd: int, mode: int, count: int) -> None:
        try:
            self._flock(fd, self._lock if mode == self.LK_NBLCK else self._unlock)
        except BlockingIOError as error:
            raise PermissionError(13, "Permission denied") from error


def use(work: Path) -> dict[str, Any]:
    """The outcome of each thing that must work, or its error."""
    import penstock as ps

    def train(folder: str, algo: Any, sampler: Any, steps: int, env: Any = "CartPole-v1", **run: Any) -> Any:
        run = {"progress": "off", "eval_episodes": 1, "checkpoint_interval": 1000, **run}
        return ps.train(ps.Experiment(env, algo, sampler, ps.RunConfig(steps=steps, dir=work / folder, **run)))

    def dqn(folder: str, **replay: Any) -> int:
        settings = ps.ReplaySettings(capacity=1000, **replay)
        return train(folder, ps.DQN(learning_starts=100, replay=settings), ps.SerialSampler(T=1, B=1), 300).env_steps

    def busy() -> str:
        with RunLock(work / "ppo"):
            try:
                with RunLock(work / "ppo"):
                    return "two learners in one directory"
            except ps.ConfigError as error:
                return str(error)

    def viewed() -> bool:
        with ViewServer(work) as server:
            return len(server.catalog.refresh()) == 4

    from penstock.run.files.lock import RunLock
    from penstock.view.server import ViewServer

    serial = ps.SerialSampler(T=32, B=4)
    things = {
        "train": lambda: train("ppo", ps.PPO(), serial, 2000).env_steps >= 2000,
        "resume": lambda: ps.resume(work / "ppo", {"run.steps": 3000}).env_steps >= 3000,
        "locked": busy,
        "load": lambda: int(ps.load(work / "ppo").predict(np.zeros(4, np.float32))) in (0, 1),
        "evaluate": lambda: len(ps.evaluate(work / "ppo", episodes=2)) == 2,
        "memory": lambda: dqn("memory") >= 300,
        "disk": lambda: dqn("disk", dir=work / "replay") >= 300,
        "native": lambda: train("tensor", ps.PPO(), serial, 500, "penstock.tensor_envs:CartPole").env_steps >= 500,
        "plot": lambda: ps.plot_runs([work / "ppo"], work / "x.png").stat().st_size > 1000,
        "runs": lambda: len(ps.runs(work)) == 4,
        "view": viewed,
        "auto": lambda: train("auto", ps.PPO(), "auto", 1000, progress="plain").env_steps >= 1000,
        "serial": lambda: "SerialSampler" in (work / "auto" / "config.json").read_text(),
        "cpu": lambda: train("cpu", ps.PPO(), ps.CpuSampler(T=32, B=4, workers=2), 100),
        "runners": lambda: train("far", ps.PPO(), ps.RunnerSampler(inner=serial, backend="processes"), 100),
    }
    outcomes: dict[str, Any] = {}
    for name, thing in things.items():
        try:
            outcomes[name] = thing()
        except BaseException as error:
            at = error.__traceback__
            while at is not None and at.tb_next is not None:
                at = at.tb_next
            where = "" if at is None else f" ({at.tb_frame.f_code.co_filename}:{at.tb_lineno})"
            outcomes[name] = f"{type(error).__name__}: {error}{where}"
    return outcomes


if __name__ == "__main__":
    if sys.argv[1] == "win32":
        sys.modules["msvcrt"] = Msvcrt()
    take_away(sys.argv[1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = use(Path(sys.argv[2]))
    print(json.dumps({**found, "warnings": [str(one.message) for one in said]}))
