"""A replay on the learner's device: the bits of one in the host's memory, in samples, in checkpoints, and in both directions."""

from __future__ import annotations

import copy
from typing import Any, cast

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import allocate_batch, as_arrays
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.rows.torch_memory import TorchMemory, batch_on_device
from penstock.replay import endings, room
from penstock.replay.lockstep import LockstepTransitions
from penstock.replay.replay import Replay, ReplaySettings
from penstock.replay.view import Sequences, Transitions
from tests.replay.oracle import INFO, SPEC, random_batches
from tests.replay.test_endings import records

B = 3
CPU = torch.device("cpu")


def made(device: Any, n: int = 1, spec: EnvSpec = SPEC, exact: bool = False, **settings: Any) -> Replay:
    settings = {"capacity": 150, **settings}
    info = ("['q']",) if spec is SPEC else ()
    replay = Replay(spec, ReplaySettings(device=device, **settings), Transitions(n, 0.9), info=info, exact=exact)
    replay.device_memory = TorchMemory(CPU)
    return replay


def appended(replay: Replay, batch: Any) -> None:
    """Of an own copy, whose observations and actions are tensors where the replay keeps them so."""
    batch = copy.deepcopy(batch)
    if replay.settings.device == "learner":
        batch, _ = batch_on_device(batch, replay.device_memory, CPU)
        assert all(isinstance(x, torch.Tensor) for x in tree_leaves((batch.obs, batch.prev_action, batch.final)))
        assert isinstance(batch.prev_reward, np.ndarray)
    replay.append(batch)


def drawn(replay: Replay, seed: int, n: int = 13) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    drawing, shown = replay.sample(n, rng)
    replay.update_priorities(drawing, rng.random(n) * 3)
    there = isinstance(tree_leaves(shown.inputs.obs)[0], torch.Tensor)
    assert there is (replay.settings.device == "learner") is isinstance(tree_leaves(shown["action"])[0], torch.Tensor)
    return [*(x for x in drawing if x is not None), *tree_leaves(as_arrays((tuple(shown.inputs), dict(shown.rows))))]


def assert_equal(left: list[Any], right: list[Any]) -> None:
    assert len(left) == len(right)
    for x, y in zip(map(np.asarray, left), map(np.asarray, right)):
        assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


def assert_alike(left: Replay, right: Replay) -> None:
    x, y = left.arrays(), right.arrays()
    assert list(x) == list(y)
    assert_equal([*x.values()], [*y.values()])
    assert [(a.shape, a.dtype, a.nbytes) for a in x.values()] == [(a.shape, a.dtype, a.nbytes) for a in y.values()]
    assert str(left.state_dict()) == str(right.state_dict())


@pytest.mark.parametrize(
    ("n", "index", "exact", "stride"),
    [(1, "uniform", False, 1), (3, "prioritized", True, 1), (2, "fifo", False, 1), (1, "uniform", False, 3)],
)
def test_what_is_drawn_and_written_are_the_bits_of_the_host(n: int, index: Any, exact: bool, stride: int) -> None:
    """Units some rows apart too, for which rows are left out where a batch does not go on."""
    host, there = (made(device, n, index=index, exact=exact) for device in ("cpu", "learner"))
    for replay in (host, there):
        replay.view.stride = stride
    for k, (batch, _) in enumerate(random_batches(3, (4, 1, 7), B, 21, gaps=0.2)):
        for replay in (host, there):
            appended(replay, batch)
        if k % 3 == 2:
            assert_equal(drawn(host, k, 5), drawn(there, k, 5))
            assert_alike(host, there)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(("before", "after"), [("cpu", "learner"), ("learner", "cpu"), ("learner", "learner")])
def test_a_checkpoint_goes_on_in_either_place(before: str, after: str, whole: bool) -> None:
    """Arrays as a file holds them, which cannot be written to, and as they are fetched; float32 stands for float64."""
    replay, other = made(before), made(after)
    batches = [batch for batch, _ in random_batches(4, 4, B, 24)]
    for batch in batches[:17]:
        appended(replay, batch)
    other.prepare(4, B, {"q": INFO["q"]})
    arrays = {name: np.array(x) for name, x in replay.arrays().items()} if whole else replay.arrays()
    for x in arrays.values() if whole else ():
        x.flags.writeable = False
    other.load_state_dict(copy.deepcopy(replay.state_dict()), arrays)
    assert_alike(replay, other)
    for k, batch in enumerate(batches[17:]):
        assert_equal(drawn(replay, k), drawn(other, k))
        for each in (replay, other):
            appended(each, batch)
    assert_alike(replay, other)
    assert_alike(copy.deepcopy(other), other)


@pytest.mark.parametrize("groups", [False, True])
def test_last_observations_of_episodes_lie_there_too(groups: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring of them grows, comes round, and is written and loaded; one that is long from the start shows the same."""
    spec, batches, _ = records(7, 12, groups)
    host, there, again, long = (made(device, 3, spec, capacity=200) for device in ("cpu", "learner", "learner", "cpu"))
    appended(long, batches[0])
    monkeypatch.setattr(endings, "_LEAST", 3)
    for k, batch in enumerate(batches):
        for replay in (host, there, *([long] if k else [])):
            appended(replay, batch)
        if k > 1:
            assert_equal(seen := drawn(host, k, 64), drawn(there, k, 64))
            assert_equal(seen, drawn(long, k, 64))
    assert_alike(host, there)
    again.prepare(7, 5)
    again.load_state_dict(host.state_dict(), {name: np.array(x) for name, x in host.arrays().items()})
    assert_alike(again, host)
    assert_equal(drawn(host, 0, 64), drawn(again, 0, 64))
    kept: Any = there.storage
    assert all(isinstance(x, torch.Tensor) for x in kept.endings._ring.values())


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int8", "bool", "float16", "float64"])
def test_every_dtype_that_a_tensor_can_have_is_kept(dtype: str) -> None:
    spec = EnvSpec(LeafSpec("box", (2,), dtype), LeafSpec("discrete", (), "int64", sizes=(3,)))
    rng, host, there = np.random.default_rng(0), made("cpu", spec=spec), made("learner", spec=spec)
    for _ in range(3):
        batch = allocate_batch(spec, BatchSpec(3, B))
        batch.obs[...] = rng.integers(0, 2 if dtype == "bool" else 100, batch.obs.shape).astype(dtype)
        batch.valid[...] = True
        for replay in (host, there):
            appended(replay, batch)
    assert_equal(drawn(host, 1), drawn(there, 1))
    assert_alike(host, there)


def test_a_batch_goes_on_only_if_its_first_row_is_the_last_one_written() -> None:
    """As on the host: NaN equals NaN, and any other number that differs leaves a gap."""
    first, second, third = (batch for batch, _ in random_batches(5, 4, B, 3))
    for x in (first.obs["v"][-1], second.obs["v"][0]):
        x[1] = np.nan
    for changed in ("", "v", "action"):
        other = copy.deepcopy(third)
        if changed:
            (other.obs["v"] if changed == "v" else other.prev_action[1])[0, 2] += 1
        heads = []
        for replay in (made("cpu"), made("learner")):
            for batch in (first, second, other):
                appended(replay, batch)
            heads.append(cast(Any, replay.storage).head)
        assert heads == [13 if changed else 12] * 2


def test_a_view_may_read_rows_in_any_shape() -> None:
    """[L, N, ...] as well, whose last observations of episodes stand where they belong."""
    spec, batches, _ = records(7, 12, True)
    found: list[Any] = []
    for replay in (made("cpu", 3, spec), made("learner", 3, spec)):
        for batch in batches:
            appended(replay, batch)
        kept: Any = replay.storage
        t, b = np.broadcast_arrays(np.arange(kept.oldest, kept.oldest + 9)[:, None], np.arange(5))
        after = kept.successors(t, b, kept.places(t + 1, b), frozenset(("prev_action",)))
        found.append(as_arrays(tree_leaves((after.obs, after.prev_action, kept.obs(kept.places(t, b))))))
    assert found[0][0].shape == (9, 5, 4)
    assert_equal(*found)


REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"deduplicate_frames": True, "dir": "x"}, Transitions(), "with replay.deduplicate_frames=True, dir='x'; .*device='cpu'"),
    ({"hindsight": 4}, Transitions(), "with replay.hindsight=4"),
    ({"shards": 2}, Transitions(), "with replay.shards=2"),
    ({}, Sequences(4, 0, 4), "reads Sequences; expected one of single transitions"),
    ({}, LockstepTransitions(2), "reads LockstepTransitions"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "view", "message"), REFUSED)
def test_what_the_device_does_not_keep_is_refused_when_it_is_made(settings: Any, view: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^replay.device='learner' .*{message}"):
        Replay(SPEC, ReplaySettings(device="learner", **settings), view)


@pytest.mark.parametrize("asked", ["cuda", "gpu"])
def test_the_word_of_other_libraries_is_answered_with_both_choices(asked: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^replay.device='{asked}'; did you mean 'cpu'\? known: cpu, learner$"):
        ReplaySettings(device=asked)


def test_a_replay_without_a_policy_does_not_know_where() -> None:
    with pytest.raises(ConfigError, match=r"without a policy; expected .policy\.replay_schedule\.replay"):
        Replay(SPEC, ReplaySettings(device="learner"), Transitions()).prepare(4, B)


def test_a_policy_that_has_moved_is_named() -> None:
    batch = next(random_batches(0, 4, B, 1))[0]
    with pytest.raises(ConfigError, match=r"on cpu, and the policy has moved to meta; .*build the policy with it"):
        batch_on_device(batch, TorchMemory(CPU), torch.device("meta"))


class Tiny(TorchMemory):
    """A device with little memory of its own."""

    room = 5_000

    @property
    def free(self) -> int | None:
        return self.room


def test_memory_is_looked_for_where_the_rows_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """51 rows of 3 slots, of 12 + 4 + 8 + 8 + 8 + 8 bytes there and 12 here."""
    assert "in memory, observations and actions on cpu, uniform" in prepared(made("learner")).describe()
    assert "observations" not in prepared(made("cpu")).describe()
    monkeypatch.setattr(room, "free_memory", lambda: 8_000)
    with pytest.raises(
        ConfigError,
        match=r"153 rows x 60 B needs 9.18e-06 GB; free is 8e-06 GB of memory; .*device='cpu' with replay.dir$",
    ):
        prepared(made("learner"))  # the host's memory holds both
    away = made("learner")
    away.device_memory = Tiny(CPU)
    with pytest.raises(ConfigError, match=r"x 48 B needs 7.34e-06 GB; free is 5e-06 GB of the memory of cpu; use "
                       r"replay.capacity <= \d+, replay.device='cpu'$"):  # fmt: skip
        prepared(away)
    away.device_memory.room = 7_400
    assert prepared(away).bytes == 153 * 60 + prepared(away).index.bytes  # pyright: ignore

    def full(*args: Any) -> Any:
        raise MemoryError("CUDA out of memory")

    monkeypatch.setattr(Tiny, "zeros", full)
    other = made("learner")
    other.device_memory = away.device_memory
    with pytest.raises(ConfigError, match="and yet: CUDA out of memory; use "):
        prepared(other)


def prepared(replay: Replay) -> Replay:
    replay.prepare(4, B, tree_map(lambda x: x, INFO))
    return replay


def test_no_thread_reads_ahead_of_a_replay_on_the_device() -> None:
    """Unless it is asked for."""
    for wish, expected in (("auto", False), (True, True), (False, False)):
        algo = ps.SAC(replay=ReplaySettings(device="learner", prefetch=wish))
        schedule: Any = algo.build(ps.SerialSampler(T=1, B=1).build("Pendulum-v1", 0).spec).replay_schedule
        assert schedule.reads_ahead(to_gpu=True) is expected
