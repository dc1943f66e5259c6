"""A replay in shards gives the bits of a local one: samples, parameters, checkpoints. And what happens when one dies."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, LearnerError
from penstock.core.tree import tree_leaves
from penstock.envs.toy import TMaze
from penstock.processes.serialization import versions
from penstock.replay import shard as shard_module
from penstock.replay.replay import Replay, ReplaySettings, make_view
from penstock.replay.shard import PACKAGES, ReplayShard
from penstock.replay.view import Sequences, Transitions
from penstock.run.trainer import Trainer
from tests.replay.oracle import INFO, SPEC, STATE, random_batches
from tests.samplers.placed import digest, live
from tests.slow import slow

pytestmark = pytest.mark.timeout(180)
B = 3


def reward_fn(achieved: np.ndarray, desired: np.ndarray, info: Any) -> Any:
    return -np.abs(achieved - desired).sum(-1)


def by_q(storage: Any, t: np.ndarray) -> np.ndarray:
    rows, slots = (x.ravel() for x in np.broadcast_arrays(t[:, None], np.arange(storage.slots)))
    return (storage.info("['q']", rows, slots) + storage.prev_reward(storage.places(rows + 1, slots))).reshape(
        len(t), -1
    )


def made(kind: str, shards: int, backend: Any = "in-process", **kwargs: Any) -> Replay:
    if kind == "hindsight":
        kwargs |= {"hindsight": 4, "reward_fn": f"{__name__}:reward_fn"}
    settings = ReplaySettings(capacity=150, shards=shards, shard_backend=backend, **kwargs)
    fed = frozenset(("first",)) if kind == "hindsight" else frozenset(("prev_action", "prev_reward", "first"))
    n_step = 1 if kind == "hindsight" else 3
    view = Sequences(8, 2, 4, 2) if kind == "sequences" else make_view(settings, SPEC, n_step, 0.9, fed=fed)
    state = STATE if kind == "sequences" else None
    return Replay(SPEC, settings, view, info=("['q']",), priority_fn=by_q, state=state)


def drawn(replay: Replay, seed: int, n: int = 16) -> list[Any]:
    """All bits of n samples, some of whose priorities change."""
    rng = np.random.default_rng(seed)
    drawing, shown = replay.sample(n, rng)
    replay.update_priorities(drawing, rng.random(n) * 3)
    leaves = [*(x for x in drawing if x is not None), *tree_leaves(shown)]
    assert all(x.flags.writeable for x in leaves)
    return [(x.shape, str(x.dtype), x.tobytes()) for x in leaves]


def stored(replay: Replay) -> tuple[Any, dict[str, np.ndarray]]:
    return copy.deepcopy(replay.state_dict()), copy.deepcopy(replay.arrays())


def plain(state: Any) -> Any:
    """A state in which arrays can be compared."""
    if isinstance(state, dict):
        return {name: plain(x) for name, x in state.items()}
    return (x.dtype, x.shape, x.tobytes()) if isinstance(x := state, np.ndarray) else state


@pytest.fixture
def close() -> Iterator[Callable[[Replay], Replay]]:
    """Notes replays to be closed in the end."""
    replays: list[Replay] = []

    def note(replay: Replay) -> Replay:
        replays.append(replay)
        return replay

    yield note
    for replay in replays:
        replay.close()


KINDS = [
    ("transitions", {"index": "prioritized", "fresh_priority": "agent"}),
    ("transitions", {"index": "fifo", "deduplicate_frames": True}),
    ("sequences", {"index": "prioritized", "deduplicate_frames": True}),
    ("hindsight", {"deduplicate_frames": True}),
]


@pytest.mark.parametrize(("kind", "kwargs"), KINDS)
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_samples_and_checkpoints_are_those_of_a_local_replay(kind: str, kwargs: Any, shards: int, close: Any) -> None:
    """Over a ring that comes round, batches that continue none, slots that idle; then under other numbers of shards."""
    local, there = made(kind, 0, **kwargs), close(made(kind, shards, **kwargs))
    n = 1 if kwargs.get("index") == "fifo" else 16
    stream = random_batches(shards, 8, B, 30, gaps=0.2, zeros=kind == "hindsight", absences="agent" in kwargs.values())
    for i, (batch, _) in enumerate(stream):
        ends = batch.terminated | (batch.valid & (batch.prev_reward[1:] > 1)) if i % 2 else None
        local.append(batch, ends)
        there.append(batch, ends)
        for x in tree_leaves((batch, ends)):
            x[...] = 0  # a sampler's buffer
        assert len(local) == len(there)
        if len(local) >= n:
            assert drawn(local, i, n) == drawn(there, i, n)
        if i == 17:
            state, arrays = stored(local)
            state_there, arrays_there = stored(there)
            assert plain(state) == plain(state_there)
            assert plain(arrays) == plain(arrays_there)
            local, there = made(kind, 0, **kwargs), close(made(kind, shards % 3 + 1, **kwargs))
            for replay in (local, there):
                replay.prepare(8, B, {"q": INFO["q"]})
            local.load_state_dict(state_there, arrays_there)
            there.load_state_dict(state, arrays)
            assert drawn(local, i, n) == drawn(there, i, n)


def test_one_slot_that_does_not_go_on_sets_all_apart(close: Any) -> None:
    """Each shard is told what all of them together have found."""
    local, there = made("transitions", 0), close(made("transitions", 3))
    for i, (batch, _) in enumerate(random_batches(0, 8, B, 4)):
        batch.prev_reward[0, 1] += i == 2
        for replay in (local, there):
            replay.append(batch)
    assert local.storage is not None and local.storage.head == 4 * 8 + 1
    state, arrays = stored(local)
    state_there, arrays_there = stored(there)
    assert (plain(state), plain(arrays)) == (plain(state_there), plain(arrays_there))


SMALL = ps.Net(hidden=(16,), activation="relu")
CONTROL: dict[str, Any] = {"batch_size": 16, "replay_ratio": 2.0, "learning_starts": 40, "net": SMALL}
PER = ReplaySettings(capacity=240, index="prioritized", fresh_priority="agent")
ALGOS: dict[str, tuple[Any, Any]] = {
    "DQN-PER": ("CartPole-v1", ps.DQN(**CONTROL, n_step=3, target_interval=5, ladder="ape-x", epsilon=0.4, replay=PER)),
    "SAC": ("Pendulum-v1", ps.SAC(**CONTROL, replay=ReplaySettings(capacity=240))),
    "R2D1": (TMaze, ps.R2D1(
        learning_starts=40, batch_size=4, replay_ratio=2.0, burn_in=4, train_length=8, state_interval=8, n_step=2,
        target_interval=5, replay=PER, net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8))),
}  # fmt: skip
_LOCAL: dict[str, Any] = {}


def trained(case: str, shards: int = 0, backend: Any = "in-process", prefetch: Any = "auto") -> tuple[str, Any]:
    """Digest of the parameters after 16 batches of 4 x 6 rows, and the last metrics."""
    env, algo = ALGOS[case]
    algo = replace(algo, replay=replace(algo.replay, shards=shards, shard_backend=backend, prefetch=prefetch))
    sampler, policy = live(ps.SerialSampler(4, 6), env, algo)
    try:
        for itr in range(16):
            metrics = ps.train_one_step(policy, sampler.obtain_samples(itr)[0])
        assert policy.updates > 5
        return digest(policy), metrics
    finally:
        sampler.shutdown()
        policy.replay_schedule.replay.close()


def local(case: str) -> tuple[str, Any]:
    if case not in _LOCAL:
        _LOCAL[case] = trained(case)
    return _LOCAL[case]


@pytest.mark.parametrize("case", ALGOS)
@pytest.mark.parametrize("shards", [3, *slow(1, 2)])
def test_training_is_equal_bit_for_bit(case: str, shards: int) -> None:
    assert trained(case, shards, prefetch=shards != 2) == local(case)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("case", ALGOS)
def test_training_is_equal_from_processes(case: str) -> None:
    assert trained(case, 2, "processes") == local(case)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'penstock[ray]'")
    from penstock.actors.cluster import start_ray

    found = start_ray(num_cpus=1)
    yield found
    found.close()


@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("cluster")
@pytest.mark.slow
@pytest.mark.parametrize("case", ALGOS)
def test_training_is_equal_from_actors_of_ray(case: str) -> None:
    assert trained(case, 3, "ray") == local(case)


def wait_for_end(pid: int) -> None:
    until = time.monotonic() + 20.0
    while psutil.pid_exists(pid):
        assert time.monotonic() < until, f"{pid} lives"
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("backend", ["processes", "ray"])
def test_a_shard_that_dies_is_named(backend: Any) -> None:
    replay = made("transitions", 2, backend)
    try:
        for batch, _ in random_batches(0, 8, B, 3):
            replay.append(batch)
        store: Any = replay._store
        os.kill(int(store._where[1].rpartition(" ")[2]), signal.SIGKILL)
        for _ in range(2):  # it is not replaced, and says so again
            with pytest.raises(
                LearnerError, match=r"replay shard 1 \(slots 1 to 2, .*, pid \d+\) is lost, and its rows"
            ):
                for seed in range(5):
                    drawn(replay, seed)
            wait_for_end(int(store._where[0].rpartition(" ")[2]))  # the others end with it
    finally:
        replay.close()


class Slow(Transitions):
    """Reads nothing in time, but what shows its form."""

    def read(self, storage: Any, t: Any, b: Any, noise: Any = None) -> Any:
        if storage.slots > 1:
            time.sleep(60)
        return super().read(storage, t, b, noise)


@pytest.mark.slow
def test_a_shard_that_hangs_costs_its_deadline_and_is_killed() -> None:
    settings = ReplaySettings(capacity=150, shards=1, shard_backend="processes", shard_deadline_s=2.0)
    replay = Replay(SPEC, settings, Slow())
    children = set(psutil.Process().children())
    try:
        for batch, _ in random_batches(0, 8, B, 3):
            replay.append(batch)
        shard = set(psutil.Process().children()) - children
        begun = time.monotonic()
        with pytest.raises(
            LearnerError,
            match=r"(?s)shard 0 \(slots 0 to 2, .* is lost.* within .*shard_deadline_s; .*last checkpoint \(pen"
            r".*\nIt was here:\n.* in read\n",
        ):
            replay.sample(4, np.random.default_rng(0))
        assert time.monotonic() - begun < 30, "Slow takes a minute"
        assert shard and not any(x.is_running() for x in shard)
    finally:
        replay.close()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("backend", ["in-process", "processes"])
def test_what_a_shard_refuses_is_an_error_of_settings_here(backend: Any, close: Any) -> None:
    replay = close(made("transitions", 2, backend, deduplicate_frames=True))
    with pytest.raises(ConfigError, match=r"shard [01] .*no stacks .*deduplicate_frames=False"):
        for batch, _ in random_batches(0, 8, B, 9):
            batch.obs["image"][:, 1] = np.random.default_rng(0).integers(0, 255, batch.obs["image"][:, 1].shape)
            replay.append(batch)


def test_frames_before_episodes_are_the_same_in_all_shards(close: Any) -> None:
    replay = close(made("transitions", 3, deduplicate_frames=True))
    streams = [random_batches(1, 8, B, 9, zeros=zeros) for zeros in (False, True)]
    with pytest.raises(ConfigError, match=r"some stacks .*begin with zeros, others .*deduplicate_frames=False"):
        for (batch, _), (other, _) in zip(*streams):
            batch.obs["image"][:, 2] = other.obs["image"][:, 2]
            replay.append(batch)


def test_more_shards_than_slots_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"replay.shards=4 with 3 slots.*use replay.shards <= 3"):
        made("transitions", 4).prepare(8, B, {"q": INFO["q"]})


def test_shards_of_one_host_must_fit_into_its_memory_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    describe = ReplayShard.describe

    def noted(self: Any) -> Any:
        found = describe(self)
        sizes.append(found["bytes"])
        return {**found, "free": 10**12 if len(sizes) == 1 else sum(sizes) - 1}  # room for either of them alone

    monkeypatch.setattr(ReplayShard, "describe", noted)
    with pytest.raises(ConfigError, match=r"2 replay shards on .* need .*; free is .* of memory: use a smaller"):
        made("transitions", 2).prepare(8, B, {"q": INFO["q"]})
    assert len(sizes) == 2


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "versions", lambda packages: {**versions(PACKAGES), "numpy": "1.0"})
    with pytest.raises(ConfigError, match=r"shard 0 on .* has numpy 1.0 \(here .*install the same versions"):
        made("transitions", 2).prepare(8, B, {"q": INFO["q"]})


def test_a_view_that_cannot_be_sent_is_refused() -> None:
    view = Transitions()
    view.lock = sys.stdout  # pyright: ignore
    view.held = Path("/dev/null").open()  # pyright: ignore  # noqa: SIM115
    try:
        replay = Replay(SPEC, ReplaySettings(capacity=150, shards=2, shard_backend="processes"), view)
        with pytest.raises(ConfigError, match=r"view cannot be sent to a shard: TypeError: .*replay.shards=0"):
            replay.prepare(8, B)
    finally:
        view.held.close()  # pyright: ignore


def test_a_checkpoint_of_another_replay_is_refused_and_nothing_changes(close: Any) -> None:
    replay, other = close(made("transitions", 2)), close(made("transitions", 2, deduplicate_frames=True))
    for batch, _ in random_batches(0, 8, B, 3):
        replay.append(batch)
    other.prepare(8, B, {"q": INFO["q"]})
    with pytest.raises(CheckpointError, match=r"has uint8\[25, 3, 3, 2, 2\] as obs\['image'\]; this one keeps "):
        other.load_state_dict(*stored(replay))
    assert len(other) == 0
    with pytest.raises(ConfigError, match="cannot be copied"):
        copy.deepcopy(replay)


@pytest.mark.parametrize(("before", "after"), [(2, 3), *slow((2, 0), (0, 3))])
def test_a_run_goes_on_under_another_number_of_shards(before: int, after: int, tmp_path: Path) -> None:
    """What it writes on its way is what a run without shards does."""
    env, algo = ALGOS["DQN-PER"]
    sampler = ps.SerialSampler(4, 6)
    config = ps.RunConfig(steps=480, seed=3, eval_interval=0, eval_episodes=0, progress="off")

    def trainer(shards: int, run: Path) -> Trainer:
        memory = replace(algo.replay, shards=shards, shard_backend="in-process")
        exp = ps.Experiment(env, replace(algo, replay=memory), sampler, replace(config, dir=str(run)))
        return Trainer(exp, run)

    found: list[Any] = []
    with trainer(0, tmp_path / "whole") as whole, trainer(before, tmp_path / "run") as first:
        for _ in range(10):
            whole.train()
            first.train()
        first.save()
        with trainer(after, tmp_path / "run") as second:
            second.restore()
            for each in (whole, second):
                for _ in range(8):
                    each.train()
                arrays = {name: np.asarray(x).tobytes() for name, x in each.policy.arrays().items()}
                found.append((digest(each.policy), arrays))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_run_whose_shard_died_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """With runners too: Ape-X's layout. It ends in the bits of a run that never knew of either."""
    env, algo = ALGOS["DQN-PER"]
    config = ps.RunConfig(steps=480, seed=3, checkpoint_interval=96, eval_interval=0, eval_episodes=0, progress="off")

    def experiment(run: str, shards: int, sampler: Any) -> ps.Experiment:
        memory = replace(algo.replay, shards=shards, shard_backend="processes")
        return ps.Experiment(env, replace(algo, replay=memory), sampler, replace(config, dir=str(tmp_path / run)))

    whole = ps.train(experiment("whole", 0, ps.SerialSampler(4, 6)))
    runners = ps.RunnerSampler(2, ps.SerialSampler(4, 3), "in-process")
    with pytest.raises(LearnerError, match=r"replay shard 0 .* is lost.* resume the run from its last checkpoint"):
        with ps.Run(experiment("run", 2, runners)) as run:
            schedule: Any = run.policy.replay_schedule
            for it in run:
                if it.env_steps > 240:
                    os.kill(int(schedule.replay._store._where[0].rpartition(" ")[2]), signal.SIGKILL)
    schedule.replay.close()
    resumed = ps.resume(tmp_path / "run", {"algo.replay.shards": 3, "algo.replay.shard_backend": "in-process"})
    assert digest(resumed.policy) == digest(whole.policy)


def test_resume_takes_another_number_of_shards(tmp_path: Path) -> None:
    env, algo = ALGOS["SAC"]
    memory = replace(algo.replay, shards=2, shard_backend="in-process")
    config = ps.RunConfig(steps=96, dir=str(tmp_path / "run"), eval_episodes=0, progress="off")
    ps.train(ps.Experiment(env, replace(algo, replay=memory), ps.SerialSampler(4, 6), config))
    result = ps.resume(tmp_path / "run", {"run.steps": 144, "algo.replay.shards": 3})
    assert result.policy.replay_schedule is not None
    replay = result.policy.replay_schedule.replay
    assert (replay.settings.shards, replay.appended) == (3, 144)
    assert "memory of 3 shards (in-process)" in replay.describe()
    with pytest.raises(ConfigError, match=r"cannot change algo.replay.capacity"):
        ps.resume(tmp_path / "run", {"algo.replay.capacity": 300})


@pytest.mark.slow
def test_a_replay_without_shards_loads_nothing_that_starts_actors() -> None:
    """And a shard needs no torch."""
    code = (
        "import sys, penstock.replay.replay\n"
        "assert not [name for name in sys.modules if name.startswith(('penstock.actors', 'penstock.processes'))]\n"
        "import penstock.replay.shard\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
