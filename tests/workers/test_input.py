"""What users get wrong with worker processes, and what they may rely on: each is said at once, with what to change."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.envs.make import EnvConfig
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.samplers import EchoAgent, bits

pytestmark = pytest.mark.timeout(300)

PLACES: dict[str, Callable[..., Any]] = {
    "cpu": ps.CpuSampler, "gpu": ps.GpuSampler, "alternating": ps.AlternatingSampler,
    "no-overlap": ps.NoOverlapAlternatingSampler,
}  # fmt: skip
TWO_KINDS = ["cpu", "alternating"]
"""One whose workers act, and one whose workers only step."""


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Any:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= before


def first_batches(settings: Any, env: Any, batches: int = 3) -> list[dict[str, bytes]]:
    sampler = settings.build(env, 4)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        return [bits(sampler.obtain_samples(itr)[0]) for itr in range(batches)]
    finally:
        sampler.shutdown()


def refuse(kind: str, env: Any, match: str, error: type[Exception] = ConfigError) -> None:
    with pytest.raises(error, match=match):
        first_batches(PLACES[kind](T=6, B=5, workers=2), env)


# Settings.


def test_groups_with_a_cpu_sampler_name_the_sampler_that_has_them() -> None:
    text = r"sampler\.groups=2 with CpuSampler.*use AlternatingSampler.*leave groups out"
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.CpuSampler(T=8, B=2, workers=2, groups=2)
    with pytest.raises(ConfigError, match=text):
        ps.override(ps.Experiment("CartPole-v1", ps.PPO(), ps.CpuSampler()), {"sampler.groups": 2})
    assert ps.CpuSampler(groups=1) == ps.CpuSampler()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--sampler", "cpu", "--sampler.groups", "2"), "use AlternatingSampler (--sampler alternating)"),
        (("--sampler", "cpu", "--sampler.B", "4", "--sampler.workers", "9"),
         "sampler.B=4 leaves 5 of 9 workers without a slot; use B>=9 or workers<=4"),
        (("--sampler", "alternating", "--sampler.B", "6", "--sampler.workers", "8"),
         "sampler.B=6 leaves 10 of 8 workers x 2 groups without a slot; use B>=16 or workers<=3"),
        (("--sampler", "no-overlap-alternating", "--sampler.B", "4", "--sampler.groups", "5"), "use B>=10 or groups<=4"),
        (("--sampler", "gpu", "--sampler.device", "cuda:77"), "use 'cpu'"),
    ],
)  # fmt: skip
def test_the_command_line_says_the_same_and_ends_with_2(
    options: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--run.dir", str(tmp_path / "run"), *options]
    try:
        code: Any = main(argv)
    except SystemExit as error:
        code = error.code
    out, err = capfd.readouterr()
    assert code == 2
    assert text in " ".join((out + err).replace("│", " ").split())
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", ["serial", *TWO_KINDS])
@pytest.mark.parametrize("T", [2**30, 2**40])
def test_a_batch_too_large_for_memory_is_refused_with_its_bytes_before_it_is_taken(kind: str, T: int) -> None:
    settings = ps.SerialSampler(T, 64) if kind == "serial" else PLACES[kind](T, 64, 1)
    sampler = settings.build("Pendulum-v1")
    taken = psutil.Process().memory_info().rss
    try:
        with pytest.raises(ConfigError, match=r"(?s)([TGP]iB|,\d{3} bytes).*smaller.*T or B"):
            sampler.initialize(ps.PPO().build(sampler.spec).agent)
        assert psutil.Process().memory_info().rss - taken < 1 << 28
    finally:
        sampler.shutdown()


# Environments that cannot be sent.


@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("what", ["lock", "file"])
def test_what_cannot_be_pickled_is_named_before_a_process_starts(
    what: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_start(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse_to_start)
    with (tmp_path / "file").open("w") as file:
        config = EnvConfig(SeedEcho, {"nested": threading.Lock() if what == "lock" else file})
        text = "'_thread.lock'" if what == "lock" else "not opened for reading"
        refuse(kind, config, rf"cannot be sent to a worker process.*({text}).*inside the factory, or use SerialSampler")


@pytest.mark.parametrize("kind", PLACES)
def test_lambdas_closures_and_local_classes_are_sent(kind: str) -> None:
    scale = 3.0

    class Local(gym.RewardWrapper):
        def reward(self, reward: Any) -> float:
            return scale * float(reward)

    config = EnvConfig(lambda size: Local(SeedEcho(nested=size > 1)), {"size": 1}, wrappers=(lambda env: env,))
    there = first_batches(PLACES[kind](T=6, B=5, workers=2), config)
    assert there == first_batches(ps.SerialSampler(T=6, B=5), config)


SCRIPT = """
import hashlib
import numpy as np
import gymnasium as gym
import penstock as ps
from penstock.testing.samplers import EchoAgent, bits

print("begun", flush=True)

class Walk(gym.Env):  # of the script itself, which has no main guard
    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = self.np_random.normal(size=2).astype(np.float32)
        self.t = 0
        return self.at.copy(), {}

    def step(self, action):
        self.at += self.np_random.normal(size=2).astype(np.float32) * float(action)
        self.t += 1
        return self.at.copy(), float(self.at.sum()), False, self.t >= LENGTH, {}

LENGTH = 11
digests = []
for settings in (ps.SerialSampler(8, 5), ps.CpuSampler(8, 5, 2), ps.AlternatingSampler(8, 5, 2)):
    sampler = settings.build(Walk, 3)
    sampler.initialize(EchoAgent(sampler.spec))
    found = [bits(sampler.obtain_samples(itr)[0]) for itr in range(4)]
    digests.append(hashlib.sha256(repr(found).encode()).hexdigest())
    sampler.shutdown()
print(len(set(digests)), "digest", flush=True)
"""


@pytest.mark.parametrize("way", ["script", "stdin"])
def test_a_class_of_a_script_without_a_main_guard(way: str, tmp_path: Path) -> None:
    """`stdin` has no file to import again, as a notebook has none."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    argv, text = ([str(path)], None) if way == "script" else (["-"], SCRIPT)
    done = subprocess.run(
        [sys.executable, *argv], input=text, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begun", "1 digest"], "the script ran again in a worker, or bits differ"


# Environments that are not the same everywhere.


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_spaces_that_differ_between_workers_are_shown_side_by_side(kind: str, tmp_path: Path) -> None:
    claimed = str(tmp_path / "claimed")

    class OfThisProcess(SeedEcho):
        """Shows one number more in every process but the first that makes one."""

        def __init__(self) -> None:
            super().__init__()
            with contextlib.suppress(FileExistsError):
                os.symlink(str(os.getpid()), claimed)  # at once, or not at all
            if os.readlink(claimed) != str(os.getpid()):
                self.observation_space = gym.spaces.Box(0.0, 1.0, (4,))

    text = r"(?s)differs between workers: one shows box\[[34]\].*another shows box\[[34]\].*the same in every instance"
    refuse(kind, OfThisProcess, text)


@pytest.mark.parametrize("kind", TWO_KINDS)
@pytest.mark.parametrize(("module", "extra"), [("Box2D", "box2d"), ("mujoco", "mujoco"), ("ale_py", "atari")])
def test_a_missing_extra_is_named_though_a_worker_missed_it(kind: str, module: str, extra: str) -> None:
    def make() -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    refuse(kind, make, rf"is not installed.*pip install 'penstock\[{extra}\]'")


REGISTERS = """
import gymnasium
import penstock.envs.toy
gymnasium.register("OnlyByImport-v0", "penstock.envs.toy:SeedEcho")
"""


@pytest.mark.parametrize("kind", TWO_KINDS)
def test_ids_that_an_import_registers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_only.py").write_text(textwrap.dedent(REGISTERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvConfig("OnlyByImport-v0", imports=("registers_only",))
    settings = PLACES[kind](T=6, B=5, workers=2)
    try:
        there = first_batches(settings, config)
        assert there == first_batches(ps.SerialSampler(T=6, B=5), config)
        # Known here by now, but not in a new process:
        refuse(kind, "OnlyByImport-v0", r"unknown environment id 'OnlyByImport-v0'.*name the package in `imports=`")
        refuse(kind, EnvConfig("CartPole-v1", imports=("no_such_module",)), r"imports: cannot import 'no_such_module'")
    finally:
        gym.registry.pop("OnlyByImport-v0", None)
        sys.modules.pop("registers_only", None)


# What a worker imports.


@pytest.mark.parametrize("kind", ["gpu", "alternating", "no-overlap"])
def test_a_worker_without_an_agent_never_loads_torch(kind: str) -> None:
    sampler = PLACES[kind](T=6, B=5, workers=2).build("CartPole-v1", 4)
    again = PLACES[kind](T=6, B=5, workers=2).build("CartPole-v1", 4)
    try:
        for each in (sampler, again):
            each.initialize(ps.PPO().build(each.spec).agent)
        sampler.obtain_samples(0)
        sampler.evaluate_agent(0, 3)
        again.load_state_dict(sampler.state_dict())
        assert bits(again.obtain_samples(1)[0]) == bits(sampler.obtain_samples(1)[0])
        for each in (sampler, again):
            for child in each._pool._workers.workers:
                maps = Path(f"/proc/{child.process.pid}/maps").read_text()
                assert "libtorch" not in maps
                assert "numpy" in maps
    finally:
        sampler.shutdown()
        again.shutdown()


def test_nothing_that_a_worker_imports_to_begin_with_is_torch() -> None:
    text = (
        "import sys, penstock.workers.env_worker; print(sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
