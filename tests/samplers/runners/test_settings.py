"""A RunnerSampler as runs use it: traces, what is shipped to runners, and its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.samplers.runners import runner
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

EXP = ps.Experiment(
    "CartPole-v1", ps.A2C(net=ps.Net(hidden=(8,))), ps.RunnerSampler(2, ps.SerialSampler(8, 2), "in-process"),
    ps.RunConfig(seed=3, steps=10**6, progress="off"),
)  # fmt: skip


# Traces.


def traced(sampler: Any, path: Path) -> tuple[Counter[tuple[str, str]], list[Any]]:
    """How many spans of each kind each row has, and the spans."""
    with ps.Trainer(replace(EXP, sampler=sampler, run=replace(EXP.run, trace=str(path)))) as trainer:
        for _ in range(25):
            trainer.train()
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X"]
    assert path.with_suffix(".png").stat().st_size > 10_000
    return Counter((names[e["pid"]], e["name"]) for e in spans), spans


@pytest.mark.slow
def test_a_trace_has_a_row_for_each_runner(tmp_path: Path) -> None:
    inner = ps.CpuSampler(8, 2, workers=1)
    rows, _ = traced(ps.RunnerSampler(2, ps.SerialSampler(8, 2), "processes"), tmp_path / "a.json")
    for row in ("runner 0", "runner 1"):
        assert abs(rows[row, "step"] - 20 * 8) <= 8  # steps shorter than 1 us are not kept
        assert abs(rows[row, "act"] - 20 * 8) <= 8
    assert rows["learner", "learn"] == 20
    assert rows["learner", "wait"] >= 19
    assert rows["learner", "step"] == 0
    rows, _ = traced(ps.RunnerSampler(1, inner, "processes"), tmp_path / "b.json")
    assert {name for name, _ in rows} == {"learner", "runner 0", "worker 0"}


@pytest.mark.parametrize("ahead_s", [10**6, *slow(0, -(10**6))])
def test_a_runner_that_notes_nothing_itself_has_its_fragments_shown(
    ahead_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on another host, whose clock began with that machine."""
    fill = runner.Runner.fill

    def elsewhere(self: Any, *args: Any) -> dict[str, Any]:
        begun = runner.time.perf_counter_ns()
        reply = fill(self, *args)
        return {**reply, "span": [x + ahead_s * 10**9 for x in (begun, runner.time.perf_counter_ns())]}

    monkeypatch.setattr(runner.Runner, "fill", elsewhere)
    rows, spans = traced(EXP.sampler, tmp_path / "a.json")
    assert rows["runner 0", "sample"] == rows["runner 1", "sample"] == 20
    learner = [e for e in spans if e["name"] == "learn"]
    for e in spans:
        if e["name"] == "sample":
            assert 0 < e["dur"] < 10**6
            assert e["ts"] <= learner[-1]["ts"] + learner[-1]["dur"]


# What is sent to runners.

OWN = """
import sys
from dataclasses import dataclass

import gymnasium as gym
import torch

import penstock as ps

postprocess_calls = []


def make(**kwargs):
    return gym.make("CartPole-v1", **kwargs)


def agent(spec, cfg):
    made = ps.actor_critic(spec, cfg)
    made.register_buffer("mine", torch.ones(3))
    return made


def postprocess(agent, batch, cfg):
    postprocess_calls.append(batch.spec)
    value = agent.values(batch)
    ends = batch.terminated, batch.truncated, batch.valid
    return_ = ps.ops.discounted_return(batch.reward, value, *ends, discount=0.99)
    rows = {"action": batch.action, "return": return_, "advantage": return_ - value[:-1]}
    return ps.TrainBatch(agent.needed(batch.inputs_t), rows, batch.valid, batch.state)


def loss(agent, x, cfg):
    dist, value = agent(x.inputs, x.state)
    pg_loss = -ps.ops.masked_mean(dist.log_prob(x["action"]) * x["advantage"], x.valid)
    return ps.Loss(pg_loss + ps.ops.squared_error(value, x["return"], x.valid), {})


def optimizer(agent, cfg):
    return {"all": torch.optim.RMSprop(agent.parameters(), lr=cfg.lr)}


@dataclass(frozen=True)
class Mine:
    lr: ps.Schedule = 1e-3
    discount: float = 0.99
    net: ps.Net = ps.Net(hidden=(8,))
    batch = ps.BatchSpec(T=8, B=4)

    def build(self, spec, seed=0, device="cpu"):
        return ps.Policy(self, spec, agent_fn=agent, postprocess_fn=postprocess, loss_fn=loss,
                         optimizer_fn=optimizer, seed=seed, device=device)
"""
SCRIPT = """
import sys
sys.path.insert(0, {folder!r})  # of the driver alone
import mine
import penstock as ps

def trained(sampler):
    exp = ps.Experiment(mine.make, mine.Mine(), sampler, ps.RunConfig(seed=3))
    with ps.Trainer(exp) as trainer:
        for _ in range(4):
            trainer.train()
        return [x.tolist() for x in trainer.policy.agent.state_dict().values()]

serial = trained(ps.SerialSampler(8, 4))
assert trained(ps.RunnerSampler({n}, ps.SerialSampler(8, 4 // {n}), {backend!r})) == serial
assert len(mine.postprocess_calls) == 8 and set(mine.postprocess_calls) == {{(8, 4)}}, mine.postprocess_calls
exp = ps.Experiment(mine.make, mine.Mine(), ps.SerialSampler(8, 4 // {n}), ps.RunConfig(seed=3))
with ps.EnvRunnerGroup(exp, {n}, {backend!r}) as workers:
    for _ in range(2):
        ps.train_one_step(workers.local_worker.policy, workers.sample())
        workers.sync_weights()
    print("trained", workers.local_worker.policy.version)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "n"), [("in-process", 2), ("processes", 2), ("processes", 1)])
def test_functions_of_a_users_file_train_on_runners_unchanged(backend: str, n: int, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "mine.py").write_text(OWN)
    (tmp_path / "elsewhere").mkdir()
    script = tmp_path / "elsewhere" / "script.py"
    script.write_text(SCRIPT.format(folder=str(tmp_path / "code"), backend=backend, n=n))
    env = {**os.environ, "PYTHONPATH": str(Path(ps.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "trained 2" in done.stdout


# Settings.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inner": ps.AsyncSampler()}, "expected a synchronous sampler's settings.*rounds ahead are sampler.depth"),
        ({"inner": ps.RunnerSampler()}, "expected a synchronous sampler's settings"),
        ({"inner": ps.OfflineSampler()}, "expected a synchronous sampler's settings"),
        ({"runners": 0}, "sampler.runners=0"),
        ({"min_runners": 3}, "sampler.min_runners=3 with sampler.runners=2; expected at most as many"),
        ({"mode": "readdy"}, "mode='readdy'; did you mean 'ready'"),
        ({"workers": 3}, "has no setting 'workers'"),
    ],
)
def test_wrong_settings_bring_the_fix(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.RunnerSampler(**given)


def test_the_slots_are_those_of_all_runners_in_ready_mode_of_one() -> None:
    settings = ps.RunnerSampler(3, ps.SerialSampler(8, 2))
    assert settings.spec == (8, 6)
    assert replace(settings, mode="ready").spec == (8, 2)


OF_A_SCRIPT = """
import gymnasium as gym
import penstock as ps
from penstock.envs.toy import Counter
from penstock.workers.env_check import check_apart

class Own(Counter): ...

gym.register("Own-v0", entry_point="__main__:Own")
if __name__ == "__main__":
    check_apart("Own-v0")
    gpu = ps.GpuSampler(4, 1, workers=1)  # whose workers need no torch
    exp = ps.Experiment("Own-v0", ps.A2C(), gpu)
    with ps.EnvRunnerGroup(exp, 1, "processes") as workers:
        print(workers.sample().spec)
    for settings in (gpu, ps.AsyncSampler(gpu)):
        settings.build("Own-v0").shutdown()
        print("known to", type(settings).__name__)
    config = ps.RunConfig(steps=32, learners=2, dir=__file__ + ".run", progress="off")
    ps.train(ps.Experiment("Own-v0", ps.A2C(), ps.SerialSampler(4, 2), config))
    print("known to learners")
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_an_id_that_the_script_registers_by_name_is_known_to_runners_workers_and_learners(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(OF_A_SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "T=4, B=1" in done.stdout
    assert done.stdout.count("known to") == 3
