import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.samplers.episodes import Episodes, join_episodes
from penstock.samplers.trackers import slots as slots_module
from penstock.samplers.trackers.slots import EpisodeStats

SPEC = EnvSpec(LeafSpec("box", (1,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
KEYS = ("is_success", "height")


class Row(NamedTuple):
    """What one slot recorded in one row."""

    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    valid: bool = True
    opens: bool = False
    """The next observation is `first`."""
    height: float = np.nan
    is_success: float = np.nan


def random_slot(rng: Any, rows: int, mode: str, T: int, warm: bool) -> list[Row]:
    """A legal stream of one slot: episodes of random length, cut by faults now and then."""
    out: list[Row] = []
    left = int(rng.integers(1, 12)) if not warm or rng.random() < 0.8 else 0
    while len(out) < rows:
        if left == 0:  # ended: idle to the end of the batch if the mode says so, then reset
            while mode == "batch_end" and len(out) % T:
                out.append(Row(valid=False))
            out.append(Row(valid=False, opens=True))
            left = int(rng.integers(1, 12))
        elif mode == "faults" and rng.random() < 0.05:  # cut without an end
            out += [Row(valid=False)] * int(rng.integers(0, 4))
            out.append(Row(valid=False, opens=True))
            left = int(rng.integers(1, 12))
        else:
            left -= 1
            end = rng.integers(1, 4) if left == 0 else 0
            height = float(rng.integers(100)) if rng.random() < 0.3 else np.nan
            success = float(rng.random() < 0.5) if end and rng.random() < 0.7 else np.nan
            out.append(Row(float(rng.normal()), bool(end & 1), bool(end & 2), True, False, height, success))
    return out[:rows]


def batches_of(slots: list[list[Row]], T: int, opened: list[bool]) -> list[SampleBatch]:
    out: list[SampleBatch] = []
    for start in range(0, len(slots[0]), T):
        batch = allocate_batch(SPEC, BatchSpec(T, len(slots)), env_info=KEYS)
        batch.first[0] = out[-1].first[-1] if out else opened
        for b, slot in enumerate(slots):
            for t, row in enumerate(slot[start : start + T]):
                batch.reward[t, b], batch.valid[t, b], batch.first[t + 1, b] = row.reward, row.valid, row.opens
                batch.terminated[t, b], batch.truncated[t, b] = row.terminated, row.truncated
                for key in KEYS:
                    batch.info["env"][key][t, b] = getattr(row, key)
        out.append(batch)
    return out


def slow(slots: list[list[Row]], T: int, discount: float, before: list[list[float]]) -> list[list[dict[str, Any]]]:
    """Per batch the episodes that ended in it, one row after the other."""
    out: list[list[dict[str, Any]]] = []
    rewards: list[list[float] | None] = [[*x] for x in before]
    last: list[dict[str, float]] = [dict.fromkeys(KEYS, np.nan) for _ in slots]
    for t in range(len(slots[0])):
        out += [[]] if t % T == 0 else []
        for b, slot in enumerate(slots):
            row, so_far = slot[t], rewards[b]
            if row.opens:
                rewards[b], last[b] = [], dict.fromkeys(KEYS, np.nan)
            elif not row.valid:
                rewards[b] = None
            elif so_far is not None:
                so_far.append(float(np.float32(row.reward)))
                last[b] |= {key: getattr(row, key) for key in KEYS if not np.isnan(getattr(row, key))}
                if row.terminated or row.truncated:
                    discounted = sum(discount**k * r for k, r in enumerate(so_far))
                    out[-1].append({"slot": b, "length": len(so_far), "return_": sum(so_far), **last[b],
                                    "discounted_return": discounted, "terminated": row.terminated})  # fmt: skip
                    rewards[b] = None
    return out


@pytest.mark.parametrize("T", [1, 5])
def test_batches_without_an_end_are_added_to_the_same_bits(T: int, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(T)
    B = 2 if T == 1 else 1
    batches = batches_of([random_slot(rng, 100 * T, "faults", T, False) for _ in range(B)], T, [True] * B)
    found: list[list[Any]] = []
    for way in ("as it is", "in general"):
        stats = EpisodeStats(B, 0.97)
        if way == "in general":
            monkeypatch.setattr(slots_module, "_all_go_on", lambda batch: False)
        else:
            assert sum(map(slots_module._all_go_on, batches)) >= 3
        found.append([(repr(stats.update(batch)), repr(stats.state_dict())) for batch in batches])
    assert found[0] == found[1]


@pytest.mark.parametrize(("T", "count"), [(1, 150), (5, 30), (80, 3)])
def test_sums_of_many_batches_have_the_bits_of_sums_made_one_by_one(
    T: int, count: int, monkeypatch: pytest.MonkeyPatch
):
    rewards = np.random.default_rng(T).normal(size=(T * count, 2)).astype(np.float32)
    slots = [[Row(float(x)) for x in column[:-1]] + [Row(float(column[-1]), terminated=True)] for column in rewards.T]
    batches = batches_of(slots, T, [True, True])
    many, restored, single = (EpisodeStats(2, 0.97) for _ in range(3))
    for batch in batches[:-1]:
        assert len(many.update(batch)) == 0
    restored.update(batches[1])  # which the state takes the place of
    restored.load_state_dict(many.state_dict())
    found = [stats.update(batches[-1]) for stats in (many, restored)]
    monkeypatch.setattr(slots_module, "_all_go_on", lambda batch: False)
    found.append([single.update(batch) for batch in batches][-1])
    assert [x.length.tolist() for x in found] == 3 * [[T * count] * 2]
    assert len({(x.return_.tobytes(), x.discounted_return.tobytes()) for x in found}) == 1


def test_batches_of_another_length_are_summed_apart():
    stats = EpisodeStats(1, 0.5)
    stats.update(batches_of([[Row(1.0)]], 1, [False])[0])
    stats.update(batches_of([[Row(2.0), Row(4.0)]], 2, [False])[0])
    assert stats.state_dict()["return"].tolist() == [7.0]
    assert stats.state_dict()["discounted"].tolist() == [1.0 + 0.5 * 2.0 + 0.25 * 4.0]


def assert_same(episodes: Episodes, expected: list[dict[str, Any]]) -> None:
    assert len(episodes) == len(expected)
    for name in ("slot", "length", "terminated"):
        assert getattr(episodes, name).tolist() == [x[name] for x in expected]
    for name in ("return_", "discounted_return"):
        assert np.allclose(getattr(episodes, name), [x[name] for x in expected], rtol=1e-9, atol=1e-9)
    for key in KEYS:
        assert np.array_equal(episodes.columns[key], np.array([x[key] for x in expected], float), equal_nan=True)


@pytest.mark.parametrize("mode", ["next_step", "batch_end", "faults"])
@pytest.mark.parametrize("T", [1, 2, 5, 16])
@pytest.mark.parametrize("warm", [False, True])
def test_against_a_slow_loop(mode: str, T: int, warm: bool):
    found = 0
    for seed in range(12):
        rng = np.random.default_rng(seed)
        B, discount = int(rng.integers(1, 6)), float(rng.choice([0.0, 0.5, 0.99, 1.0]))
        slots = [random_slot(rng, 4 * T * (6 if T < 5 else 2), mode, T, warm) for _ in range(B)]
        before = [rng.normal(size=int(rng.integers(0, 5))).tolist() if warm else [] for _ in range(B)]
        stats = EpisodeStats(B, discount)
        for b, rewards in enumerate(before):
            stats.begin(b, rewards)
        expected = slow(slots, T, discount, before)
        for k, batch in enumerate(batches_of(slots, T, [not rewards for rewards in before])):
            assert_same(stats.update(batch), expected[k])
            found += len(expected[k])
            if k % 3 == 2:  # a copy that is restored goes on as this one
                state = stats.state_dict()
                stats = EpisodeStats(B, discount)
                stats.load_state_dict(state)
    assert found > 25


def test_by_hand():
    slot = [Row(1.0), Row(2.0, height=5.0), Row(3.0, truncated=True, is_success=1.0), Row(valid=False, opens=True),
            Row(10.0, terminated=True, truncated=True), Row(valid=False, opens=True), Row(7.0), Row(7.0)]  # fmt: skip
    stats = EpisodeStats(1, 0.5)
    stats.begin(0, [4.0])
    one, two = (stats.update(batch) for batch in batches_of([slot], 4, [False]))
    assert one.return_.tolist() == [10.0]
    assert one.length.tolist() == [4]
    assert one.discounted_return.tolist() == [4 + 0.5 + 0.5 + 0.375]
    assert one.terminated.tolist() == [False]
    assert one.columns["height"].tolist() == [5.0]
    assert two.return_.tolist() == [10.0] == two.discounted_return.tolist()
    assert two.terminated.tolist() == [True]
    assert np.isnan(two.columns["is_success"]).all()
    assert stats.return_.tolist() == [14.0]
    assert stats.discounted.tolist() == [10.5]
    assert stats.length.tolist() == [2]


def test_what_was_open_is_dropped_where_the_next_batch_begins_with_a_reset():
    """As after the resume of a native environment, which begins all its episodes anew."""
    stats = EpisodeStats(1, 0.5)
    one, two = batches_of([[Row(9.0, height=3.0)] * 2 + [Row(1.0), Row(2.0, terminated=True)]], 2, [True])
    stats.update(one)
    two.first[0] = True
    found = stats.update(two)
    assert found.return_.tolist() == [3.0]
    assert found.length.tolist() == [2]
    assert found.discounted_return.tolist() == [2.0]
    assert np.isnan(found.columns["height"]).all()


def test_a_batch_without_an_end_gives_no_episodes():
    stats = EpisodeStats(2, 0.9)
    slots = [[Row(1.0)] * 3, [Row(2.0)] * 3]
    empty = stats.update(batches_of(slots, 3, [True, True])[0])
    assert len(empty) == 0
    assert empty.metrics() == {}
    assert np.isnan(empty.mean_return)
    assert np.isnan(empty.mean_length)


def episodes(slots: list[int], columns: dict[str, list[float]] | None = None) -> Episodes:
    """Episodes of these slots; the return is the position."""
    n = len(slots)
    return Episodes(np.arange(n) * 1.0, np.arange(n) + 1, np.arange(n) / 2, np.array(slots, np.int64),
                    np.arange(n) % 2 == 0, {k: np.array(v) for k, v in (columns or {}).items()})  # fmt: skip


def test_the_first_of_each_slot_and_the_last_of_all():
    many = episodes([0, 1, 0, 2, 2, 2, 0], {"h": [0.0, 1, 2, 3, 4, 5, 6]})
    kept = many.first_of_each_slot([2, 0, 2])
    assert kept.return_.tolist() == [0.0, 2.0, 3.0, 4.0] == kept.columns["h"].tolist()
    assert kept.slot.tolist() == [0, 0, 2, 2]
    assert kept.length.tolist() == [1, 3, 4, 5]
    assert kept.terminated.tolist() == [True, True, False, True]
    assert many.last(2).return_.tolist() == [5.0, 6.0]
    assert many.last(2).discounted_return.tolist() == [2.5, 3.0]
    assert len(many.last(100)) == 7
    assert len(many.last(0)) == 0
    assert len(episodes([]).first_of_each_slot([1, 1])) == 0


def test_joined_episodes_keep_their_order_and_miss_what_was_not_recorded():
    joined = join_episodes([Episodes(), episodes([1], {"h": [4.0]}), episodes([0, 2], {"g": [1.0, 2.0]})])
    assert joined.slot.tolist() == [1, 0, 2]
    assert joined.return_.tolist() == [0.0, 0.0, 1.0]
    assert joined.terminated.dtype == bool
    assert np.array_equal(joined.columns["h"], [4.0, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(joined.columns["g"], [np.nan, 1.0, 2.0], equal_nan=True)
    assert len(join_episodes([])) == 0
    one = episodes([3])
    assert join_episodes([one]) is one


def test_metrics_have_the_usual_names_and_leave_out_what_was_never_reported():
    columns = {"is_success": [1.0, np.nan, 0.0], "height": [np.nan, 2.0, 5.0], "x": [np.nan] * 3}
    many = replace(episodes([0, 0, 1], columns), return_=np.array([4.0, 0.0, 2.0]))
    std = float(np.sqrt(8 / 3))
    assert many.metrics() == pytest.approx(
        {"rollout/ep_rew_mean": 2.0, "rollout/ep_rew_std": std, "rollout/ep_rew_median": 2.0, "rollout/ep_rew_min": 0.0,
         "rollout/ep_rew_max": 4.0, "rollout/ep_len_mean": 2.0, "rollout/ep_len_std": std / 2,
         "rollout/ep_len_median": 2.0, "rollout/ep_len_min": 1.0, "rollout/ep_len_max": 3.0,
         "rollout/ep_discounted_rew_mean": float(many.discounted_return.mean()), "rollout/success_rate": 0.5,
         "rollout/ep_height_mean": 3.5}
    )  # fmt: skip
    evaluation = many.metrics("eval/{stat}_{key}", "reward", "ep_length")
    assert {"eval/mean_reward", "eval/std_reward", "eval/median_ep_length", "eval/mean_discounted_reward",
            "eval/success_rate", "eval/mean_height"} < evaluation.keys()  # fmt: skip
    assert many.reported() == {"success_rate": 0.5, "height": 3.5}
    assert Episodes().metrics() == {}


@pytest.mark.parametrize("names", [(), ("eval/{stat}_{key}", "reward", "ep_length")], ids=["rollout", "eval"])
def test_info_keys_do_not_stand_for_metrics_of_the_episodes(names: Any):
    one: Any = np.ones(1)
    plain = Episodes(one * 5, one.astype(np.int64), one * 4, one.astype(np.int64), one.astype(bool), {})
    own = plain.metrics(*names)
    keys = ("rew", "len", "discounted_rew", "reward", "ep_length", "discounted_reward", "info_rew", "info_reward")
    columns = {key: np.array([float(i + 100)]) for i, key in enumerate((*keys, "success_rate", "is_success"))}
    shown = replace(plain, columns=columns).metrics(*names)
    assert {name: shown[name] for name in own} == own
    assert len(shown) == len(own) + len(columns)
    assert shown[f"{names[0][:4] if names else 'rollout'}/success_rate"] == 109.0
    assert shown[(names or ("rollout/ep_{key}_{stat}",))[0].format(key="info_success_rate", stat="mean")] == 108.0


def test_a_median_of_an_even_number_lies_between_the_middle_two():
    two = replace(episodes([0, 0]), return_=np.array([5.0, 2.0]))
    assert two.metrics()["rollout/ep_rew_median"] == 3.5


def test_info_keys_that_never_come_are_said_once() -> None:
    def reported(stats: EpisodeStats, batches: int) -> list[str]:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for k in range(batches):
                batch = allocate_batch(SPEC, BatchSpec(2, 4), env_info=("nope", "seldom", "is_success"))
                batch.valid[...], batch.terminated[1] = True, True
                batch.info["env"]["seldom"][1, 0] = k if k == 4 else np.nan
                stats.update(batch)
        return [str(one.message) for one in said]

    stats = EpisodeStats(4, 1.0)
    going_on = allocate_batch(SPEC, BatchSpec(2, 4), env_info=("amid",))
    going_on.valid[...], going_on.info["env"]["amid"][1, 2] = True, 5.0
    stats.update(going_on)
    going_on.info["env"]["amid"][...], going_on.terminated[1] = np.nan, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(6):
            stats.update(going_on)

    stats = EpisodeStats(4, 1.0)
    assert reported(stats, 4) == []  # 16 episodes
    (text,) = reported(stats, 5)
    assert text.startswith(
        "info_keys 'nope', 'seldom' (--info-keys): no step has reported that in the first 20 episodes"
    )
    assert reported(stats, 20) == []
    (text,) = reported(EpisodeStats(4, 1.0), 30)
    assert text.startswith("info_keys 'nope' (")


def test_joined_states_have_nan_where_a_key_was_never_reported() -> None:
    def state(n: int, **columns: list[float]) -> dict[str, Any]:
        sums = {"return": np.arange(n) + 0.5, "length": np.arange(n), "discounted": np.arange(n) + 0.25}
        return {**sums, "columns": {key: np.array(x) for key, x in columns.items()}}

    joined = EpisodeStats.join_states([state(2, height=[1.0, 2.0]), state(1, is_success=[3.0])])
    assert joined["return"].tolist() == [0.5, 1.5, 0.5] and joined["length"].tolist() == [0, 1, 0]
    assert joined["discounted"].tolist() == [0.25, 1.25, 0.25]
    np.testing.assert_array_equal(joined["columns"]["height"], [1.0, 2.0, np.nan])
    np.testing.assert_array_equal(joined["columns"]["is_success"], [np.nan, np.nan, 3.0])


def test_episodes_of_some_slots_are_numbered_from_0_and_back() -> None:
    numbers = np.arange(6)
    episodes = Episodes(np.zeros(6), numbers, np.zeros(6), np.array([0, 3, 1, 2, 3, 4]), numbers > 2)
    own = episodes.of_slots(slice(2, 4))
    assert own.slot.tolist() == [1, 0, 1] and own.length.tolist() == [1, 3, 4]
    assert own.numbered(2).slot.tolist() == [3, 2, 3]
