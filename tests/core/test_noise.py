import itertools
from typing import Any

import numpy as np
import pytest

from penstock.core import noise
from penstock.core.noise import Noise, Purpose, derived_seed, env_seed, generator, uniform

ONES = (1 << 64) - 1
# From the file kat_vectors of Random123 1.0: counter, key, answer of philox4x64 with 10 rounds.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    ),
    (
        (ONES, ONES, ONES, ONES),
        (ONES, ONES),
        (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
    ),
    (
        (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
        (0x452821E638D01377, 0xBE5466CF34E90C6C),
        (0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6),
    ),
]


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x64-10 as the paper writes it (Salmon et al. 2011, section 4.3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & ONES, (p0 >> 64) ^ c3 ^ k1, p0 & ONES
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & ONES, (k1 + 0xBB67AE8584CAA73B) & ONES
    return c0, c1, c2, c3


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_the_generator_gives_the_published_vectors(counter, key, answer):
    before = (sum(word << (64 * i) for i, word in enumerate(counter)) - 1) % (1 << 256)  # numpy counts, then generates
    bits = np.random.Philox(counter=before, key=sum(word << (64 * i) for i, word in enumerate(key)))
    assert tuple(int(word) for word in bits.random_raw(4)) == answer
    assert philox(counter, key) == answer


def reference(seed: int, purpose: int, batch: int, slot: int, T: int, n: int) -> np.ndarray:
    """[T, n] of one slot, block by block: its blocks lie side by side at counter (1 + slot * blocks + i, 0, batch)."""
    blocks = -(-T * n // 8)
    words = itertools.chain.from_iterable(
        philox((1 + slot * blocks + i, 0, batch, 0), (seed, purpose)) for i in range(blocks)
    )
    draws = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)][: T * n]
    return np.array([((draw >> 9) + 0.5) / 2**23 for draw in draws], np.float32).reshape(T, n)


@pytest.mark.parametrize("batch", [0, 127, 128, 129, 340, 341, (3 << 24) + 5])
@pytest.mark.parametrize(("slots", "n"), [(slice(0, 1), 3), (slice(2, 4), 4)])
def test_small_batches_that_are_drawn_together_keep_their_addresses(batch: int, slots: slice, n: int):
    expected = [reference(5, Purpose.ACT, batch, slot, 1, n) for slot in range(slots.start, slots.stop)]
    drawn = uniform(5, Purpose.ACT, batch, slots, 1, n)
    np.testing.assert_array_equal(drawn, np.stack(expected, 1))
    drawn[:] = 0.0  # the caller's own
    np.testing.assert_array_equal(uniform(5, Purpose.ACT, batch, slots, 1, n), np.stack(expected, 1))


@pytest.mark.parametrize(("T", "n"), [(1, 1), (3, 1), (4, 2), (5, 3), (9, 7)])
def test_every_number_is_a_function_of_its_address(T: int, n: int):
    for seed, purpose, batch in [(0, Purpose.ACT, 0), (7, Purpose.EVALUATE, 3), (ONES, Purpose.PREDICT, ONES)]:
        got = uniform(seed, purpose, batch, slice(2, 5), T, n)
        expected = np.stack([reference(seed, int(purpose), batch, slot, T, n) for slot in (2, 3, 4)], 1)
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert got.tobytes() == expected.tobytes()


def test_a_slice_of_slots_gets_the_columns_of_the_whole():
    for T, n in itertools.product((1, 2, 5, 16, 33), (1, 2, 3, 4, 8)):
        whole = uniform(11, Purpose.ACT, 4, slice(0, 13), T, n)
        assert whole.shape == (T, 13, n)
        for start, stop in [(0, 1), (0, 13), (3, 7), (5, 6), (12, 13), (4, 4)]:
            assert uniform(11, Purpose.ACT, 4, slice(start, stop), T, n).tobytes() == whole[:, start:stop].tobytes()


def test_nothing_asked_is_nothing_given():
    for T, slots, n in [(0, slice(0, 2), 3), (4, slice(0, 2), 0), (4, slice(2, 2), 3)]:
        assert uniform(0, Purpose.ACT, 0, slots, T, n).shape == (T, slots.stop - slots.start, n)


def test_no_two_addresses_share_numbers():
    def draw(seed=1, purpose=Purpose.ACT, batch=1, slot=1):
        return uniform(seed, purpose, batch, slice(slot, slot + 1), 64, 4).tobytes()

    others = (
        [draw(seed=s) for s in (0, 1, 2, 2**40, 2**63, 2**63 + 1, -1, -2)]
        + [draw(purpose=p) for p in Purpose if p != Purpose.ACT]
        + [draw(batch=b) for b in (0, 2, 2**40, 2**63, 2**63 + 1)]
        + [draw(slot=b) for b in (0, 2, 1000)]
    )
    assert len(set(others)) == len(others)
    flat = uniform(1, Purpose.ACT, 1, slice(0, 64), 8, 8).ravel()
    assert len(np.unique(flat)) > 4090  # 4,096 draws of 2^23 values repeat one about once


def test_zero_and_one_never_occur(monkeypatch):
    u = uniform(3, Purpose.ACT, 0, slice(0, 64), 256, 8)
    assert u.min() > 0
    assert u.max() < 1

    class Extreme:
        state: Any = None

        def random_raw(self, size):
            return np.array([0, ONES] * (size // 2), np.uint64)

    monkeypatch.setattr(noise._scratch, "bits", Extreme())
    low, high = uniform(0, Purpose.ACT, 0, slice(0, 1), 4, 1)[[0, 2], 0, 0]
    assert (low, high) == (2.0**-24, 1.0 - 2.0**-24)
    assert np.isfinite([np.log(low), np.log1p(-high)]).all()


def test_draws_are_uniform_and_slots_uncorrelated():
    u = uniform(5, Purpose.ACT, 0, slice(0, 32), 512, 4).astype(np.float64)
    counts = np.bincount((u.ravel() * 256).astype(int), minlength=256)
    expected = u.size / 256
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert 184 < chi_square < 342  # 255 degrees of freedom, p = 0.0003 on either side
    neighbours = np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]
    in_time = np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]
    assert max(abs(neighbours), abs(in_time)) < 0.016  # 4 standard deviations


def test_a_generator_is_not_moved_by_other_draws_and_counts_from_its_address():
    rng = generator(ONES, Purpose.REPLAY, 5)
    first = rng.random(3)
    uniform(1, Purpose.ACT, 0, slice(2, 9), 3, 3)
    generator(ONES, Purpose.REPLAY, 5).random(7)
    words = [w for i in range(2) for w in philox((1 + i, 5, 0, 0), (ONES, Purpose.REPLAY))]
    assert [*first, *rng.random(5)] == [(w >> 11) / 2**53 for w in words]


def test_generators_differ_by_address_and_repeat():
    def first(*address):
        return generator(9, Purpose.MINIBATCH, *address).integers(2**63)

    addresses = [(), (1,), (2,), (0, 1), (0, 0, 1)]
    assert len({first(*a) for a in addresses}) == len(addresses)
    assert first(2) == first(2)
    assert first(5) != generator(9, Purpose.REPLAY, 5).integers(2**63)
    assert first(5) != generator(8, Purpose.MINIBATCH, 5).integers(2**63)
    assert (
        generator(9, Purpose.MINIBATCH, 5).permutation(6).tolist()
        == generator(9, Purpose.MINIBATCH, 5).permutation(6).tolist()
    )


@pytest.mark.parametrize(
    ("neighbours", "episodes"),  # across the border at 128
    [(range(120, 136), 32), pytest.param(range(90, 190), 256, marks=pytest.mark.slow)],
)
def test_env_seeds_never_meet(neighbours: range, episodes: int):
    seen = [
        env_seed(seed, slot, episode, evaluation)
        for seed in neighbours
        for slot in (0, 1, 15, 512, 1023)
        for episode in (0, 1, 2, 100, 8192, 16383)
        for evaluation in (False, True)
    ]
    assert len(set(seen)) == len(seen)
    assert min(seen) >= 0
    assert max(seen) < 2**32
    one_run = [env_seed(1, slot, episode) for slot in range(64) for episode in range(episodes)]
    assert len(set(one_run)) == len(one_run)
    assert all(isinstance(s, int) for s in one_run[:4])


def test_env_seeds_beyond_the_limits_are_still_seeds():
    for seed, slot, episode in [(2**70, 5, 5), (3, 5000, 2), (3, 5, 100_000), (-1, 0, 0)]:
        assert 0 <= env_seed(seed, slot, episode) < 2**32
    assert env_seed(3, 0, 0) != env_seed(3, 1024, 0)
    assert env_seed(3, 0, 0) != env_seed(3, 0, 16384)
    assert env_seed(3, 0, 0) != env_seed(131, 0, 0)


def test_env_seeds_look_random():
    seeds = np.array([env_seed(0, slot, episode) for slot in range(16) for episode in range(64)], np.uint64)
    ones = ((seeds[:, None] >> np.arange(32, dtype=np.uint64)) & np.uint64(1)).mean(0)
    assert np.abs(ones - 0.5).max() < 0.08  # 5 standard deviations of 1,024 coins


def test_derived_seeds_fit_63_bits_and_differ():
    seeds = [derived_seed(seed, purpose) for seed in range(20) for purpose in Purpose]
    assert len(set(seeds)) == len(seeds)
    assert min(seeds) >= 0
    assert max(seeds) < 2**63


def test_a_batch_s_noise_is_that_of_its_slots_and_the_last_number_may_be_the_slot() -> None:
    whole = Noise(3, Purpose.ACT, 5).rows(4, 6, 2)
    np.testing.assert_array_equal(whole, uniform(3, Purpose.ACT, 5, slice(0, 6), 4, 2))
    np.testing.assert_array_equal(Noise(3, Purpose.ACT, 5, first_slot=4).rows(4, 2, 2), whole[:, 4:])
    ranked = Noise(3, Purpose.ACT, 5, first_slot=4).rows(4, 2, 2, ranks=True)
    np.testing.assert_array_equal(ranked[..., 0], whole[:, 4:, 0])
    assert (ranked[..., 1] == [4, 5]).all()
