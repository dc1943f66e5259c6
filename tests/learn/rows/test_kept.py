"""`Policies.min_rows`: a policy that acts rarely keeps the rows of its batches until there are enough to train on."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import allocate_batch
from penstock.core.errors import CheckpointError, ConfigError
from penstock.core.spec import LeafSpec
from penstock.learn.rows.kept import KeptRows, compacted
from penstock.learn.rows.postprocess import as_tensors
from tests.learn.ranks import on_ranks
from tests.learn.rows.boss import Boss

NET = ps.Net(hidden=(8,))
MEMORY = ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True)
PPO = ps.PPO(net=NET, epochs=1, minibatch=16)
MAPPING = {"agent_0": "boss", "agent_1": "hand"}


def pair(boss: Any = PPO, hand: Any = PPO, **more: Any) -> ps.Policies:
    return ps.Policies({"boss": boss, "hand": hand}, MAPPING, **more)


def begun(algo: ps.Policies, env: Any = Boss, T: int = 16, B: int = 3) -> tuple[Any, Any]:
    sampler = ps.SerialSampler(T=T, B=B).build(algo.seat(env), seed=3)
    policies = algo.build(sampler.specs, seed=4)
    sampler.initialize(policies.agents)
    return sampler, policies


def row(batch: ps.SampleBatch, t: Any, b: int) -> list[Any]:
    acted = batch.obs, batch.action, batch.reward, batch.info["logp"], batch.first
    return [x[t, b].tolist() for x in (*acted, batch.prev_action, batch.prev_reward, batch.terminated, batch.truncated)]


@pytest.mark.parametrize(("T", "B"), [(16, 3), (5, 1), (64, 2)])
@pytest.mark.parametrize("env", [Boss, "penstock.envs.toy:TeamBits"])
def test_kept_rows_are_those_of_all_batches_and_follow_each_other(env: Any, T: int, B: int) -> None:
    sampler, policies = begun(pair(min_rows={"boss": 10**6, "hand": 10**6}), env, T, B)
    rows: dict[str, list[list[list[Any]]]] = {name: [[] for _ in range(B)] for name in policies}
    last: dict[str, list[Any]] = {name: [None] * B for name in policies}
    for itr in range(400 // T):
        batch, _ = sampler.obtain_samples(itr)
        for name, own in batch.items():
            for b in range(B):
                for t in np.flatnonzero(own.valid[:, b]):
                    rows[name][b].append(row(own, t, b))
                    last[name][b] = own.obs[t + 1, b].tolist()
        metrics = ps.train_one_step(policies, batch)
        assert metrics["train/boss/kept_rows"] == sum(map(len, rows["boss"]))
    sampler.shutdown()
    for name, kept in policies.kept.items():
        found = kept.batch
        assert policies[name].updates == 0
        for b in range(B):
            at = np.flatnonzero(found.valid[:, b])
            assert [row(found, t, b) for t in at] == rows[name][b]
            assert found.obs[at[-1] + 1, b].tolist() == last[name][b]
            over = [bool(x[-1] or x[-2]) for x in rows[name][b]]
            assert any(over)
            # Each row of an episode that went on is followed by the next one, across the ends of batches.
            steps = np.diff(at).tolist()
            assert steps == [1 + end for end in over[:-1]]
        assert max(len(x) + sum(bool(y[-1] or y[-2]) for y in x) + 1 for x in rows[name]) >= found.spec.T


def test_kept_rows_are_copies() -> None:
    sampler, policies = begun(pair(min_rows={"boss": 10**6}), T=64)
    batch, _ = sampler.obtain_samples(0)
    ps.train_one_step(policies, batch)
    kept = policies.kept["boss"].batch
    before = kept.copy()
    for x in (batch["boss"].obs, batch["boss"].prev_reward, batch["boss"].info["logp"], batch["boss"].valid):
        x[...] = 77
    assert np.array_equal(kept.obs, before.obs)
    assert np.array_equal(kept.prev_reward, before.prev_reward)
    assert np.array_equal(kept.info["logp"], before.info["logp"])
    assert np.array_equal(kept.valid, before.valid)
    sampler.shutdown()


@pytest.mark.parametrize("T", [pytest.param(16, marks=pytest.mark.slow), 7])
def test_memory_runs_through_kept_rows_as_it_did_while_acting(T: int) -> None:
    """The log-probabilities that an unroll over all kept rows finds are those recorded as each was acted."""
    boss = ps.PPO(net=MEMORY, lr=1e-12)  # it trains, so that records begin within episodes, and stays what it was
    sampler, policies = begun(pair(boss, min_rows={"boss": 14}), T=T)
    most, opened = 0, set[bool]()
    for itr in range(60):
        ps.train_one_step(policies, sampler.obtain_samples(itr)[0])
        if (kept := policies.kept["boss"].batch) is not None and kept.env_steps:
            most = max(most, kept.env_steps)
            opened.update(kept.first[0][kept.valid[0]].tolist())
            kept = as_tensors(kept, torch.device("cpu"))
            distribution = policies["boss"].agent(kept.inputs_t, kept.state)[0]
            found = distribution.log_prob(kept.action)[kept.valid]
            torch.testing.assert_close(found, kept.info["logp"][kept.valid], rtol=0, atol=1e-5)
    assert most >= 10 and opened == {True, False} and policies["boss"].updates
    sampler.shutdown()


def test_rows_that_do_not_follow_each_other_are_no_trace() -> None:
    """Rows of one slot, one letter each: its observation, - before one that is not valid, ! behind one that ended."""

    def record(*slots: str) -> ps.SampleBatch:
        rows = [slot.split() for slot in slots]
        T, B = len(rows[0]) - 1, len(rows)
        spec = ps.EnvSpec(LeafSpec("box", (), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
        batch = allocate_batch(spec, ps.BatchSpec(T, B))
        for b in range(B):
            for t, text in enumerate(rows[b]):
                batch.obs[t, b] = ord(text.strip("-!*"))
                batch.first[t, b] = "*" in text
                if t < T:
                    batch.valid[t, b] = "-" not in text
                    batch.terminated[t, b] = "!" in text
        return batch

    def shown(batch: ps.SampleBatch, b: int) -> str:
        valid = [*batch.valid[:, b], False]
        end = [*batch.terminated[:, b], False]
        first = batch.first[:, b]
        return " ".join(
            "-" * (not valid[t]) + chr(int(x)) + "!" * int(end[t]) + "*" * int(first[t])
            for t, x in enumerate(batch.obs[:, b])
        )

    def kept(*slots: str) -> list[str]:
        found = compacted(record(*slots))
        return [shown(found, b) for b in range(len(slots))]

    assert kept("a b -c -c c") == ["a b -c"]  # what is after the last row
    assert kept("a -b -b b -c") == ["a b -c"]  # the turn goes on
    assert kept("a -b -b c -d") == ["a -b c -d"]  # it does not: another observation
    assert kept("a! -b -b c* -d") == ["a! -b c* -d"]  # a reset row
    assert kept("a -b -b b* -d") == ["a -b b* -d"]  # an episode that a fault cut
    assert kept("-a -a a b -c") == ["a b -c"]
    assert kept("-a -a -a -a -a", "a -b -b -b -b") == ["-a -a", "a -b"]
    assert kept("a b c d! -e", "-q -q q -r -r") == ["a b c d! -e", "q -r -r -r -r"]
    assert kept("a b! -c d* -e", "p q! -r -r -r") == ["a b! -c d* -e", "p q! -r -r -r"]
    assert kept("-p -p q! -r", "a b c -d") == ["q! -r -r -r", "a b c -d"]  # what fills a slot up ends nothing
    assert kept("a b c -c -c", "p q r s! -t") == ["a b c -c -c", "p q r s! -t"]


@pytest.mark.parametrize(
    "net", [pytest.param(NET, id="plain"), pytest.param(MEMORY, id="lstm", marks=pytest.mark.slow)]
)
def test_a_policy_trains_once_it_has_its_rows_and_in_parts_of_about_a_minibatch(net: ps.Net) -> None:
    boss = ps.PPO(net=net, epochs=2, minibatch=16)
    sampler, policies = begun(pair(boss, min_rows={"boss": 24}), B=7)
    trained, metrics = 0, dict[str, float]()
    for itr in range(40):
        batch, _ = sampler.obtain_samples(itr)
        had, before = policies.kept["boss"].rows, policies["boss"].updates
        rows = had + batch["boss"].env_steps
        metrics = ps.train_one_step(policies, batch)
        taken = policies["boss"].updates - before
        assert policies["boss"].version == policies["hand"].version == itr + 1
        assert metrics["train/boss/n_updates"] == policies["boss"].updates
        if rows < 24:
            assert taken == 0 and metrics["train/boss/kept_rows"] == rows and "train/boss/loss" not in metrics
        else:
            trained += 1
            assert taken == 2 * round(rows / 16)
            assert metrics["train/boss/kept_rows"] == 0 and "train/boss/loss" in metrics
    assert trained > 3
    assert "train/hand/kept_rows" not in metrics
    sampler.shutdown()


def test_without_min_rows_a_policy_of_few_rows_is_named_once() -> None:
    sampler, policies = begun(pair())
    with pytest.warns(UserWarning, match=r"policy 'boss' has .* room for 48.*min_rows={'boss': 16}"):
        ps.train_one_step(policies, sampler.obtain_samples(0)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for itr in range(1, 4):
            ps.train_one_step(policies, sampler.obtain_samples(itr)[0])
    sampler.shutdown()
    sampler, policies = begun(pair(ps.PPO(net=NET, minibatch=2)))
    sampler.obtain_samples(0)
    batch, _ = sampler.obtain_samples(1)
    assert 2 <= batch["boss"].env_steps < 48 / 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.train_one_step(policies, batch)  # few rows, and enough for a minibatch
    sampler.shutdown()
    sampler, policies = begun(pair(min_rows={"boss": 16}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ps.train_one_step(policies, sampler.obtain_samples(0)[0])
    sampler.shutdown()


def test_steps_without_training_are_no_lag() -> None:
    """While a policy waits its parameters stay what they are. Turns open as it trains are acted a step earlier."""
    impala = ps.IMPALA(net=NET, max_lag=1)
    sampler, policies = begun(pair(impala, min_rows={"boss": 12}))
    for itr in range(30):
        ps.train_one_step(policies, sampler.obtain_samples(itr)[0])
    assert policies["boss"].updates >= 4
    assert policies["boss"].stale_rows == 0
    sampler.shutdown()


def test_lag_counts_the_training_steps_since_a_row_was_acted() -> None:
    algo = ps.IMPALA(net=NET)
    sampler = ps.SerialSampler(T=4, B=2).build("CartPole-v1", seed=0)
    policy = algo.build(sampler.spec)
    sampler.initialize(policy.agent)
    batch = sampler.obtain_samples(0)[0].copy()
    sampler.shutdown()
    kept, batches = KeptRows(12), []
    for version in range(6):  # acted a version late, as with depth 1, and resumed between any two
        policy.version = version
        again = KeptRows(12)
        again.load_state_dict(kept.state_dict(policy), policy)
        kept = again
        part = batch[0:4]
        part.version[...] = max(version - 1, 0)
        part.first[0] = version > 0
        found = kept.whole(policy, part)
        batches.append(None if found is None else sorted((version - found.version[found.valid]).tolist()))
    # Version 0 was left by no training step; that of version 1 is the one after which rows of version 1 came.
    assert batches == [None, [0] * 16, None, [0] * 8 + [1] * 8, None, [0] * 8 + [1] * 8]


def test_what_waits_is_part_of_the_state() -> None:
    algo = pair(ps.PPO(net=MEMORY, minibatch=16), min_rows={"boss": 40})
    sampler, policies = begun(algo)
    other = algo.build(sampler.specs, seed=4)
    batches = [sampler.obtain_samples(itr)[0].copy() for itr in range(20)]
    sampler.shutdown()
    for batch in batches[:8]:
        ps.train_one_step(policies, batch)
    assert policies.kept["boss"].rows > 0
    other.load_state_dict(policies.state_dict(), policies.arrays())
    for batch in batches[8:]:
        assert ps.train_one_step(policies, batch) == ps.train_one_step(other, batch)
    assert policies["boss"].updates > 0
    ours, theirs = policies.parameters(), other.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert policies.kept["boss"].rows > 0
    narrow = KeptRows(40)
    narrow.slots = 2
    with pytest.raises(CheckpointError, match="rows that wait are of 3 slots; this run has 2"):
        narrow.load_state_dict(policies.kept["boss"].state_dict(policies["boss"]), policies["boss"])


def test_learners_keep_the_rows_of_one() -> None:
    algo = pair(ps.PPO(net=MEMORY, epochs=1, minibatch=8), min_rows={"boss": 30})
    sampler, whole = begun(algo, B=5)
    batches = [sampler.obtain_samples(itr)[0].copy() for itr in range(26)]
    specs = sampler.specs
    sampler.shutdown()
    numbers = []
    for batch in batches:
        metrics = ps.train_one_step(whole, batch)
        numbers.append((metrics["train/boss/kept_rows"], whole["boss"].updates))
    state = whole.state_dict()
    assert whole["boss"].updates >= 2 and whole.kept["boss"].rows > 0
    parts = [slice(0, 2), slice(2, 5)]

    def work(comm: Any) -> Any:
        policies = algo.build(specs, seed=4)
        policies.join(comm)
        own, found = parts[comm.rank], []
        for batch in batches:
            mine = {name: x[:, own] for name, x in batch.items()}
            metrics = ps.train_one_step(policies, ps.MultiAgentBatch(mine, batch.env_steps))
            found.append((metrics["train/boss/kept_rows"], policies["boss"].updates))
        state = policies.state_dict()
        kept, mine = KeptRows(30), policies.kept["boss"].batch
        kept.slots = own.stop - own.start
        kept.load_state_dict(state["boss/kept"], policies["boss"])
        assert kept.batch is not None and mine is not None
        assert np.array_equal(kept.batch.obs[:-1][kept.batch.valid], mine.obs[:-1][mine.valid])
        assert all(np.array_equal(kept.batch.state[name], x) for name, x in mine.state.items())
        return found, state

    for found, theirs in on_ranks(2, work):
        assert found == numbers
        ours, other = state["boss/kept"]["batch"], theirs["boss/kept"]["batch"]
        assert np.array_equal(ours["valid"], other["valid"])
        assert np.array_equal(ours["obs"], other["obs"])
        for name, x in state["agent"].items():
            torch.testing.assert_close(theirs["agent"][name], x, rtol=1e-4, atol=1e-6)


def test_batches_that_do_not_follow_each_other_are_refused() -> None:
    sampler, policies = begun(pair(min_rows={"hand": 10**6}))
    first, second, third = (sampler.obtain_samples(itr)[0].copy() for itr in range(3))
    sampler.shutdown()
    ps.train_one_step(policies, first)
    with pytest.raises(ConfigError, match=r"policy 'hand': row 0 of slot \d is not the last row.*mode='rounds'"):
        ps.train_one_step(policies, third)
    narrow = ps.MultiAgentBatch({name: x[:, 0:2] for name, x in second.items()}, 8)
    with pytest.raises(ConfigError, match="policy 'hand': a batch of B=2 after one of B=3"):
        ps.train_one_step(policies, narrow)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"min_rows": {"bos": 3}}, "min_rows names the policy 'bos'.*boss"),
        ({"min_rows": {"boss": 0}}, r"min_rows\['boss'\]=0; expected 1 or more rows"),
        ({"min_rows": {"boss": True}}, "min_rows.boss=True"),
        ({"min_rows": {"boss": 8}, "policies_to_train": ("hand",)}, "'boss', which is not in policies_to_train"),
    ],
)
def test_settings_that_cannot_be(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        pair(**more)


def test_a_replay_has_settings_of_its_own_for_it() -> None:
    algo = pair(ps.DQN(net=NET), min_rows={"boss": 8})
    with pytest.raises(ConfigError, match="min_rows names 'boss', and DQN draws its rows from a replay"):
        begun(algo)


def test_fragments_of_any_runner_are_refused_before_anything_is_collected() -> None:
    algo = pair(ps.IMPALA(net=NET), ps.IMPALA(net=NET), min_rows={"boss": 8})
    sampler = ps.RunnerSampler(runners=2, inner=ps.SerialSampler(T=8, B=2), backend="processes", mode="ready")
    exp = ps.Experiment("tests.learn.rows.boss:Boss", algo, sampler, ps.RunConfig(steps=64, progress="off"))
    with pytest.raises(ConfigError, match=r"policy 'boss': min_rows joins the rows.*mode='ready'"):
        ps.Trainer(exp)


def test_it_is_a_setting_of_the_command_line() -> None:
    exp: Any = ps.Experiment("tests.learn.rows.boss:Boss", pair())
    assert ps.override(exp, {"algo.min_rows.boss": 40}).algo.min_rows == {"boss": 40}
