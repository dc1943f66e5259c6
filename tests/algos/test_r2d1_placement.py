"""R2D1 in every sampler: the same batches, evaluations and parameters wherever work is placed, and epsilon by slot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.core.batch import Inputs
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.toy import RepeatPrevious, TMaze
from penstock.testing.samplers import bits
from tests.algos.r2d1_slow import SMALL
from tests.params import slow_but

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]

CFG = replace(SMALL, learning_starts=60)
T, B, BATCHES = 4, 7, 16
SERIAL = ps.SerialSampler(T, B)
PLACES: dict[str, Any] = {
    "cpu": ps.CpuSampler(T, B, workers=2),
    "gpu": ps.GpuSampler(T, B, workers=2),
    "alternating": ps.AlternatingSampler(T, B, workers=2),
}
_FOUND: dict[Any, Any] = {}


def run(settings: Any) -> tuple[list[Any], list[bytes], int]:
    """Bits of every batch, with an evaluation now and then; of all parameters in the end; and how often it trained."""
    if settings in _FOUND:
        return _FOUND[settings]
    sampler = settings.build(lambda: RepeatPrevious(length=5), 5)
    policy = CFG.build(sampler.spec, 5)
    sampler.initialize(policy.agent)
    out: list[Any] = []
    try:
        for itr in range(BATCHES):
            batch = sampler.obtain_samples(itr)[0]
            out.append(bits(batch))
            ps.train_one_step(policy, batch)
            if itr in (9, 14):
                out.append({"eval": sampler.evaluate_agent(itr, 5, deterministic=itr == 9).return_.tobytes()})
    finally:
        sampler.shutdown()
    leaves = [x.numpy().tobytes() for x in tree_leaves(dict(policy.agent.state_dict())) if isinstance(x, torch.Tensor)]
    return _FOUND.setdefault(settings, (out, leaves, policy.updates))


@pytest.mark.parametrize("place", slow_but("gpu", [*PLACES]))
def test_placement_changes_nothing(place: str) -> None:
    here, there = run(SERIAL), run(PLACES[place])
    different = [
        (i, name) for i, (x, y) in enumerate(zip(here[0], there[0], strict=True)) for name in x if x[name] != y[name]
    ]
    assert different == []
    assert here[1:] == there[1:] and here[2] >= 10


@pytest.mark.slow
def test_the_asynchronous_sampler_repeats_itself_from_sampler_to_sampler() -> None:
    """Batches are a version behind, and recurrent state goes on from batch to batch all the same."""
    one = run(ps.AsyncSerialSampler(SERIAL, depth=1))
    two = run(ps.AsyncAlternatingSampler(ps.AlternatingSampler(T, B, workers=1), depth=1))
    assert one == two and one[1] != run(SERIAL)[1]


@pytest.mark.parametrize("settings", slow_but("serial", {"serial": SERIAL, "alternating": PLACES["alternating"]}))
def test_recurrent_state_goes_on_from_batch_to_batch(settings: Any) -> None:
    """The state before a batch is that after the one before, though an evaluation came between."""
    sampler = settings.build(TMaze, 3)
    policy = CFG.build(sampler.spec, 3)
    sampler.initialize(policy.agent)
    agent: Any = policy.agent
    after: Any = None
    try:
        for itr in range(8):
            batch = sampler.obtain_samples(itr)[0].copy()
            if after is not None:
                assert all(torch.allclose(torch.from_numpy(batch.state[k]), after[k], atol=1e-6) for k in after)
            inputs = Inputs(*(tree_map(torch.from_numpy, part) for part in batch.inputs_t))
            state = {name: torch.from_numpy(part) for name, part in batch.state.items()}
            with torch.no_grad():
                q, after = agent.online(inputs, inputs.obs, state)
            largest = torch.from_numpy(batch.info["q_max"])
            assert torch.allclose(q.amax(-1), largest, atol=1e-6)
            if itr % 3 == 1:
                sampler.evaluate_agent(itr, 3)
    finally:
        sampler.shutdown()


def test_every_slot_has_its_epsilon() -> None:
    """0.8^(1 + 7 i / 3) of 4 slots: 0.8, 0.475, 0.283, 0.168; a random one of 4 actions is the best one by chance."""
    cfg = replace(CFG, learning_starts=0, epsilon=0.8, state_interval=400, replay=replace(CFG.replay, capacity=10_000))
    sampler = ps.SerialSampler(400, 4).build(RepeatPrevious, 3)
    policy = cfg.build(sampler.spec, 3)
    sampler.initialize(policy.agent)
    policy.set_progress(0.0)
    expected = [0.8 ** (1 + 7 * i / 3) for i in range(4)]
    assert dict(policy.agent.named_buffers())["epsilon"].tolist() == pytest.approx(expected)
    batch = sampler.obtain_samples(0)[0]
    worse = (batch.info["q"] < batch.info["q_max"]).mean(0)
    assert worse.tolist() == pytest.approx([0.75 * each for each in expected], abs=0.09)  # 4 standard deviations
