"""OfflineSampler: the record that an online sampler would have written, in a seeded order, resumed exactly."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.tree import tree_leaves
from penstock.datasets.cutter import EpisodeCutter
from penstock.datasets.reader import Dataset
from penstock.datasets.writer import DatasetWriter
from penstock.envs.toy import Counter, SeedEcho
from penstock.samplers.offline_live import OfflineLive
from penstock.testing.pools import echo_config
from penstock.testing.records import RecordCheck
from penstock.testing.samplers import EchoAgent
from penstock.workers.shares import SharedMemory
from tests.slow import slow

FIELDS = ("obs", "first", "prev_action", "prev_reward", "terminated", "truncated", "valid")


class Mute(EchoAgent):
    """Records nothing but a log-probability, and remembers nothing."""

    def initial_state(self, B: int) -> Any:
        return None

    def act(self, inputs: Any, state: Any, noise: Any) -> Any:
        held = EchoAgent.initial_state(self, len(inputs.first))
        action, info, _ = super().act(inputs, held, noise)
        return action, {"logp": -info["noise"].sum(-1)}, None


def recorded(
    path: Path, nested: bool = False, B: int = 3, batches: int = 9, T: int = 7
) -> tuple[Path, list[ps.SampleBatch]]:
    """A dataset of whole episodes of `SeedEcho`, and the batches in which they were played."""
    sampler = ps.SerialSampler(T=T, B=B).build(echo_config(nested), 5)
    sampler.initialize(Mute(sampler.spec))
    cutter, kept = EpisodeCutter(B, ["logp"]), []
    with DatasetWriter(path, sampler.spec, shard_bytes=2000) as writer:
        for itr in range(batches):
            batch, _ = sampler.obtain_samples(itr)
            kept.append(batch.copy())
            for episode in cutter.add(batch):
                writer.append(episode)
    sampler.shutdown()
    return path, kept


def live(path: Path, nested: bool = False, seed: int = 3, agent: Any = Mute, **settings: Any) -> OfflineLive:
    sampler = ps.OfflineSampler(str(path), **settings).build(echo_config(nested), seed)
    sampler.initialize(agent(sampler.spec))
    return sampler


def bits(batch: ps.SampleBatch) -> list[bytes]:
    return [x.tobytes() for x in tree_leaves(batch)]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("T", [1, 4, 7])
def test_one_slot_in_order_is_the_record_it_was_made_of(nested: bool, T: int, tmp_path: Path) -> None:
    """Bit for bit, whatever T: reset rows, null actions, both kinds of end, and batch borders."""
    path, batches = recorded(tmp_path / "d", nested, B=1, batches=12)
    online = ps.concat_samples(batches, axis="T")
    sampler = live(path, nested, T=T, B=1, shuffle=False)
    rows = int(Dataset(path).lengths.sum()) + len(Dataset(path).lengths) - 1  # whole episodes and the resets between
    for k in range(rows // T):
        batch, _ = sampler.obtain_samples(k)
        part = online[k * T : (k + 1) * T]
        for name in FIELDS:
            for x, y in zip(tree_leaves(getattr(batch, name)), tree_leaves(getattr(part, name))):
                assert x.tobytes() == np.ascontiguousarray(y).tobytes(), (k, name)
        assert np.array_equal(batch.info["env"]["echo"], part.info["env"]["echo"], equal_nan=True)
        assert (batch.info["logp"][batch.valid] == part.info["logp"][batch.valid]).all()
        assert (batch.version == -1).all()
    sampler.shutdown()
    sampler.shutdown()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(("T", "B"), [(6, 5), *slow((1, 3), (30, 2))])
def test_every_rule_of_the_record_holds(nested: bool, T: int, B: int, tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d", nested, batches=30)
    sampler, check = live(path, nested, T=T, B=B), RecordCheck(B, seed=None, acted=True)
    lengths = Dataset(path).lengths
    for k in range(int(lengths.sum()) // (T * B)):  # within the first pass, so that no episode comes twice
        batch, episodes = sampler.obtain_samples(k)
        finished = check.add(batch)
        assert [(e.slot, e.length) for e in finished] == list(zip(episodes.slot.tolist(), episodes.length.tolist()))
        assert episodes.return_.tolist() == pytest.approx([sum(e.rewards) for e in finished])
    assert check.env_steps > 0.5 * lengths.sum()
    sampler.shutdown()


def played(sampler: OfflineLive, count: int) -> list[float]:
    """Returns of the next episodes as they end, which tell them apart."""
    found: list[float] = []
    while len(found) < count:
        found += sampler.obtain_samples(0)[1].return_.tolist()
    return found[:count]


def test_each_pass_plays_every_episode_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    data = Dataset(path)
    E = len(data.lengths)
    order = [float(data.episode(i).reward.sum(dtype=np.float64)) for i in range(E)]
    one, two = (lambda x: (x[:E], x[E:]))(played(live(path, T=5, B=1), 2 * E))
    assert sorted(one) == sorted(two) == pytest.approx(sorted(order))
    assert one != two
    assert one != order
    assert played(live(path, T=5, B=1), E) == one
    assert played(live(path, T=11, B=1), E) == one
    assert played(live(path, T=5, B=1, seed=4), E) != one
    assert played(live(path, T=5, B=1, shuffle=False), 2 * E) == pytest.approx(order * 2)
    sampler = live(path, T=5, B=4)
    while sampler.metrics()["sampler/passes"] < 1.0:
        sampler.obtain_samples(0)
    assert max(sampler.state_dict()["number"]) in range(E - 1, E + 5)


@pytest.mark.parametrize(("T", "B"), [(5, 1), (7, 3), (3, 40)])
def test_each_once_holds_every_episode_once_and_changes_nothing_after_it(T: int, B: int, tmp_path: Path) -> None:
    """A replay is filled with them; 40 slots are more than there are episodes."""
    path, _ = recorded(tmp_path / "d")
    data, sampler, cutter = Dataset(path), live(path, T=T, B=B), EpisodeCutter(B, ["logp"])
    batches = [x.copy() for x in sampler.each_once()]
    assert len(batches) * T == sampler.rows_once
    assert sum(x.env_steps for x in batches) == sampler.steps == data.lengths.sum()
    assert batches[-1].valid.any()
    found = [float(e.reward.sum(dtype=np.float64)) for x in batches for e in cutter.add(x)]
    expected = [float(data.episode(i).reward.sum(dtype=np.float64)) for i in range(len(data.lengths))]
    assert sorted(found) == pytest.approx(sorted(expected))
    fresh = live(path, T=T, B=B)
    for k in range(3):
        (one, episodes), (other, alike) = sampler.obtain_samples(k), fresh.obtain_samples(k)
        assert bits(one) == bits(other)
        assert episodes.return_.tolist() == alike.return_.tolist()
    assert sampler.metrics() == fresh.metrics()
    two = [ps.OfflineSampler(str(path), T=T, B=B).build(echo_config(False), 3, share=ps.Share(i * B, 2 * B))
           for i in range(2)]  # fmt: skip
    parts = []
    for each in two:
        each.initialize(Mute(each.spec))
        parts.append(sum(x.env_steps for x in each.each_once()))
    assert sum(parts) == data.lengths.sum()
    assert two[0].rows_once == two[1].rows_once


def test_more_slots_than_episodes(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d", B=1, batches=2)
    assert len(Dataset(path).lengths) < 8
    batch, _ = live(path, T=20, B=8).obtain_samples(0)
    assert batch.valid.any(0).all()


@pytest.mark.parametrize("agent", [Mute, EchoAgent])
def test_it_resumes_bit_for_bit_wherever_it_was_cut(agent: Any, tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    whole, states, outcomes = live(path, T=4, B=3, agent=agent), [], []
    for itr in range(8):
        states.append(copy.deepcopy(whole.state_dict()))
        batch, episodes = whole.obtain_samples(itr)
        outcomes.append((bits(batch), episodes.return_.tolist()))
    for start in (0, 1, 3, 7):
        resumed = live(path, T=4, B=3, agent=agent)
        resumed.load_state_dict(states[start])
        assert resumed.cut_slots == []
        for itr in range(start, 8):
            batch, episodes = resumed.obtain_samples(itr)
            assert (bits(batch), episodes.return_.tolist()) == outcomes[itr]


def test_another_dataset_is_no_place_to_go_on(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    sampler = live(path, T=4, B=3)
    sampler.obtain_samples(0)
    state = sampler.state_dict()
    other, _ = recorded(tmp_path / "e", batches=4)
    with pytest.raises(CheckpointError, match="has changed since the checkpoint was written"):
        live(other, T=4, B=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match="holds 3 slots; this sampler has B=2"):
        live(path, T=4, B=2).load_state_dict(state)


def test_a_recurrent_agent_remembers_from_the_start_of_each_episode(tmp_path: Path) -> None:
    """`EchoAgent` counts the steps since `first` and sums up rewards: known for every row of the data."""
    path, _ = recorded(tmp_path / "d")
    sampler = live(path, T=3, B=3, agent=EchoAgent)
    for itr in range(10):
        batch, _ = sampler.obtain_samples(itr)
        steps = SeedEcho.place_of(batch.obs)[1][0]
        going_on = ~batch.first[0] & batch.valid[0]
        assert (batch.state["age"] == steps)[going_on].all()


def test_the_cutter_finds_what_was_written(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    data, sampler, cutter = Dataset(path), live(path, T=5, B=1, shuffle=False), EpisodeCutter(1, ["logp"])
    found = [e for itr in range(40) for e in cutter.add(sampler.obtain_samples(itr)[0])][: len(data.lengths)]
    for i, x in enumerate(found):
        y = data.episode(i)
        same = [(e.obs, e.action, e.reward, e.info["logp"], e.info["env/echo"]) for e in (x, y)]
        assert all(a.tobytes() == b.tobytes() for a, b in zip(*map(tree_leaves, same)))
        assert (x.terminated, x.truncated) == (y.terminated, y.truncated)


def test_the_cutter_drops_what_a_fault_or_the_start_cut() -> None:
    """Episodes of 3 steps in rows 0 to 2, 4 to 6 and 8 to 10."""
    sampler = ps.SerialSampler(T=12, B=1).build(partial(Counter, 3))
    sampler.initialize(Mute(sampler.spec))
    batch, _ = sampler.obtain_samples(0)
    assert [len(e) for e in EpisodeCutter(1).add(batch)] == [3, 3, 3]
    assert [e.obs.ravel().tolist() for e in EpisodeCutter(1).add(batch[1:])] == [[0, 1, 2, 3]] * 2
    assert len(EpisodeCutter(1, counts=[2]).add(batch)) == 2
    batch.valid[5] = False  # a fault
    assert len(EpisodeCutter(1).add(batch)) == 2
    sampler.shutdown()


def test_evaluation_plays_the_environment_as_an_online_sampler_does(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    online = ps.SerialSampler(T=4, B=3).build(echo_config(), 3)
    online.initialize(Mute(online.spec))
    offline = live(path, T=4, B=3)
    before = bits(offline.obtain_samples(0)[0])
    for deterministic in (True, False):
        expected, found = (x.evaluate_agent(2, 5, deterministic) for x in (online, offline))
        assert found.return_.tolist() == expected.return_.tolist()
    assert bits(offline.last_batch) == before
    assert offline.info_keys == online.info_keys


def test_what_it_is_given_is_checked(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d", batches=3)
    with pytest.raises(ConfigError, match=r"sampler.dataset is empty"):
        ps.OfflineSampler().build(echo_config())
    with pytest.raises(ConfigError, match=r"sampler.T=0; expected 1 or more"):
        ps.OfflineSampler("x", T=0)
    with pytest.raises(ConfigError, match=r"other spaces than .*Counter: low of obs is|shape of obs is \(3,\)"):
        ps.OfflineSampler(str(path)).build(Counter)
    with pytest.raises(ConfigError, match="leaves nothing to overlap"):
        ps.OfflineSampler(str(path)).build(echo_config(), 0, shared=SharedMemory(3, None))
    file = path / "000000" / "reward.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(ConfigError, match=r"reward.npy is damaged"):
        ps.OfflineSampler(str(path)).build(echo_config())
    ps.OfflineSampler(str(path), verify=False).build(echo_config()).shutdown()
    sampler = ps.OfflineSampler(str(path), verify=False).build(echo_config())
    with pytest.raises(ConfigError, match="no agent yet"):
        sampler.obtain_samples(0)
    sampler.shutdown()
    with pytest.raises(ConfigError, match="was shut down"):
        sampler.obtain_samples(0)


def test_an_algorithm_learns_from_those_whom_it_can_learn_from(tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d", batches=3)
    data, online = ps.OfflineSampler(str(path), T=8, B=2), ps.SerialSampler(T=8, B=2)
    small = ps.ReplaySettings(capacity=100)
    for algo, sampler, message in (
        (ps.BC(), online, r"BC learns from the actions of others, and SerialSampler would show it its own"),
        (ps.MARWIL(), None, "use ps.OfflineSampler"),
        (ps.CQL(learning_starts=8, batch_size=8, replay=small), online, "CQL learns from the actions of others"),
        (ps.PPO(), data, "PPO learns from the actions of its present policy, and a dataset has those of others"),
    ):
        with pytest.raises(ConfigError, match=message):
            ps.Trainer(ps.Experiment(echo_config(), algo, sampler))
    sac = ps.DiscreteSAC(learning_starts=8, batch_size=8, replay=small)
    ps.Trainer(ps.Experiment(echo_config(), sac, data)).stop()


def parameters(run: Path) -> dict[str, torch.Tensor]:
    return dict(ps.load(run).agent.state_dict())


@pytest.mark.parametrize(
    ("algo", "recurrent"), [(ps.BC, "none"), (ps.MARWIL, "lstm"), *slow((ps.BC, "lstm"), (ps.MARWIL, "none"))]
)
def test_a_resumed_run_is_the_run(algo: Any, recurrent: Any, tmp_path: Path) -> None:
    path, _ = recorded(tmp_path / "d")
    net = ps.Net(hidden=(8,), recurrent=recurrent, recurrent_size=8)

    def exp(name: str, steps: int) -> ps.Experiment:
        run = ps.RunConfig(steps=steps, dir=str(tmp_path / name), eval_episodes=1, progress="off", learner_threads=1)
        env = partial(SeedEcho, nested=False)
        return ps.Experiment(env, algo(minibatch=16, net=net), ps.OfflineSampler(str(path), T=8, B=4), run)

    ps.train(exp("whole", 200))
    ps.train(exp("cut", 90))
    ps.resume(tmp_path / "cut", {"run.steps": 200}, env=partial(SeedEcho, nested=False))
    whole, cut = parameters(tmp_path / "whole"), parameters(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
