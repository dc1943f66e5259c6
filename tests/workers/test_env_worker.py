"""Worker processes that step environments: their imports, and environments that they cannot make."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import penstock as ps
from penstock.envs.make import EnvConfig
from penstock.testing.samplers import bits
from tests.slow import slow
from tests.workers.first_batches import PLACES, first_batches, no_process_is_left, refuse

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("kind", ["gpu", *slow("alternating", "no-overlap")])
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
            for child in each.pool._workers.workers:
                maps = Path(f"/proc/{child.child.pid}/maps").read_text()
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


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("kind", "module", "extra"),
    [("cpu", "Box2D", "box2d"), ("alternating", "mujoco", "mujoco"), ("cpu", "ale_py", "atari")],
)
def test_a_missing_extra_is_named_though_a_worker_missed_it(kind: str, module: str, extra: str) -> None:
    def make() -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    refuse(kind, make, rf"is not installed.*pip install 'penstock\[{extra}\]'")


REGISTERS = """
import gymnasium
import penstock.envs.toy
gymnasium.register("OnlyByImport-v0", "penstock.envs.toy:SeedEcho")
"""


@pytest.mark.parametrize("kind", ["alternating", *slow("cpu")])
def test_ids_that_an_import_registers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_only.py").write_text(textwrap.dedent(REGISTERS))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvConfig("OnlyByImport-v0", imports=("registers_only",))
    settings = PLACES[kind](T=6, B=5, workers=2)
    try:
        there = first_batches(settings, config)
        assert there == first_batches(ps.SerialSampler(T=6, B=5), config)
        # Known here by now, and not in a new process, which is given what was registered:
        assert there == first_batches(settings, EnvConfig("OnlyByImport-v0"))
        refuse(kind, EnvConfig("CartPole-v1", imports=("no_such_module",)), r"imports: cannot import 'no_such_module'")
    finally:
        gym.registry.pop("OnlyByImport-v0", None)
        sys.modules.pop("registers_only", None)
