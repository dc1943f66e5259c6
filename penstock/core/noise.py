"""Random numbers with an address: every draw is a function of (seed, purpose, batch, slot), never of call order.

The generator is Philox-4x64-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) as numpy
ships it. The key is (seed, purpose); one counter step yields four 64-bit words. Because a counter can be set
anywhere, a worker draws the noise of its own slots alone and gets the bits that the whole batch would have held.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from enum import IntEnum, unique
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_WORDS_PER_STEP = 4
_MASK_64 = (1 << 64) - 1
_SHIFT, _HALF, _UNIT = np.uint32(9), np.float32(0.5), np.float32(2.0**-23)
_BLOCK = 1024  # numbers that are drawn at once, of as many small batches
_HELD = 1 << 16  # added to a purpose, for noise that stays over steps


@unique
class Purpose(IntEnum):
    """The use of a stream of noise; two purposes never share a number."""

    ACT = 1
    EVALUATE = 2
    DECORRELATE = 3
    MINIBATCH = 4
    INIT = 5
    PREDICT = 6
    CHECK = 7
    REPLAY = 8
    BOOTSTRAP = 9
    DATASET = 10
    EVALUATE_GREEDILY = 11
    """Evaluations without exploration of agents that then act at random now and then; slots count from -1 down."""
    SEARCH = 12
    POLICY = 13
    NOVELTY = 14
    DEMONSTRATE = 15


def generator(seed: int, purpose: Purpose, *address: int) -> np.random.Generator:
    """A numpy generator for up to three further address words, for shuffles and other draws of unknown size."""
    return at_address(np.random.Generator(np.random.Philox(_PLACEHOLDER)), seed, purpose, *address)


def at_address(rng: np.random.Generator, seed: int, purpose: Purpose, *address: int) -> np.random.Generator:
    """A generator made by `generator`, moved to another address: half the time of making one."""
    _set_address(rng.bit_generator, (seed, purpose), (0, *address, *[0] * (3 - len(address))))
    return rng


def uniform(seed: int, purpose: int, batch: int, slots: slice, T: int, n: int) -> npt.NDArray[np.float32]:
    """Uniform noise of one batch for some of its slots.

    Args:
        batch: its number, from 0.
        slots: global slot numbers `[start, stop)`; the result equals those columns of the whole batch's noise.
        T: time steps. n: numbers per step and slot.

    Returns:
        [T, B, n] float32 in the open interval (0, 1), multiples of 2^-24 with 23 random bits: neither 0 nor 1
        occurs, so log(u) and log1p(-u) are finite.
    """
    slot_count = slots.stop - slots.start
    size = T * n * slot_count
    if size == 0:
        return np.empty((T, slot_count, n), dtype=np.float32)
    if size > _BLOCK // 2:
        return _drawn(seed, purpose, range(batch, batch + 1), slots.start, slots.stop, T, n)[0]
    number, at = divmod(batch, _BLOCK // size)
    return _block(seed, purpose, number, slots.start, slots.stop, T, n)[at].copy()


@functools.lru_cache(maxsize=16)
def _block(seed: int, purpose: int, number: int, start: int, stop: int, T: int, n: int) -> npt.NDArray[np.float32]:
    """[batches, T, B, n] `uniform` of small batches in a row: one by one takes five times as long."""
    batches = _BLOCK // (T * n * (stop - start))
    return _drawn(seed, purpose, range(number * batches, (number + 1) * batches), start, stop, T, n)


def _drawn(seed: int, purpose: int, batches: range, start: int, stop: int, T: int, n: int) -> npt.NDArray[np.float32]:
    """[batches, T, B, n] uniforms; see `uniform`."""
    slot_count = stop - start
    words_per_slot = -(-T * n // 2)  # a 64-bit word holds two 32-bit draws
    steps_per_slot = -(-words_per_slot // _WORDS_PER_STEP)
    bits = _scratch.bits
    state: Any = _address((seed, purpose), (0, 0, 0, 0))
    words: list[npt.NDArray[np.uint64]] = []
    for batch in batches:
        state["state"]["counter"] = (0, 0, batch & _MASK_64, 0)
        bits.state = state
        if start:
            bits.advance(start * steps_per_slot)
        words.append(bits.random_raw(slot_count * steps_per_slot * _WORDS_PER_STEP))
    halves = np.stack(words).view(np.uint32).reshape(len(batches), slot_count, -1)[:, :, : T * n]
    out = (halves >> _SHIFT).astype(np.float32)
    out += _HALF
    out *= _UNIT
    return np.ascontiguousarray(out.reshape(len(batches), slot_count, T, n).transpose(0, 2, 1, 3))


class HeldNoise(NamedTuple):
    """The part of an agent's noise that stays for some steps, such as the matrix of state-dependent exploration."""

    size: int = 0
    """Numbers of a step that stay: the first of `noise_size`."""
    steps: int | None = None
    """Steps that they stay for, counted over batches; None for a batch."""

    def blocks(self, batch: int, T: int) -> list[int]:
        """The number, among all draws of the run, of the one that holds in each row of a batch."""
        return [batch if self.steps is None else (batch * T + t) // self.steps for t in range(T)]

    def purpose(self, purpose: int) -> int:
        """The purpose of the part that stays."""
        return purpose + _HELD


NOTHING_HELD = HeldNoise()


class Noise(NamedTuple):
    """The address of a batch's noise: everything that its numbers depend on."""

    seed: int
    purpose: Purpose
    batch: int
    first_slot: int = 0
    """The pool's first slot, counted among the slots of the whole run."""

    def rows(
        self, T: int, B: int, n: int, ranks: bool = False, policy: int = 0, held: HeldNoise = NOTHING_HELD
    ) -> npt.NDArray[np.float32]:
        """[T, B, n] uniforms; with `ranks` the last of the n is the slot's number. Every policy has its own."""
        slots = slice(self.first_slot, self.first_slot + B)
        purpose = self.purpose + (policy << 32)
        out = uniform(self.seed, purpose, self.batch, slots, T, n - held.size)
        if held.size:
            blocks, own = held.blocks(self.batch, T), held.purpose(purpose)
            drawn = {block: uniform(self.seed, own, block, slots, 1, held.size) for block in set(blocks)}
            out = np.concatenate([np.concatenate([drawn[block] for block in blocks]), out], -1)
        if ranks:
            ranks_B = np.arange(self.first_slot, self.first_slot + B, dtype=np.float32)
            out[..., -1] = -1.0 - ranks_B if self.purpose == Purpose.EVALUATE_GREEDILY else ranks_B
        return out


def env_seed(seed: int, slot: int, episode: int, evaluation: bool = False) -> int:
    """The seed of one episode: 32 bits, as every environment accepts (numpy's RandomState refuses more).

    Distinct by construction for training and evaluation, 128 neighbouring run seeds, 1,024 slots and 16,384
    episodes a slot; beyond those limits seeds are hashed and may meet by chance.
    """
    return env_seeds(seed, slot, episode, 1, evaluation)[0]


def env_seeds(seed: int, slot: int, episode: int, count: int, evaluation: bool = False) -> list[int]:
    """`env_seed` of `count` episodes in a row, which must not cross a multiple of 16,384."""
    episodes = np.arange(episode, episode + count, dtype=np.int64)
    seed = int(seed)
    block = _hash(seed >> 7, slot >> 10, episode >> 14)
    low = _feistel(((slot & 0x3FF) << 14) | (episodes & 0x3FFF), 12, block)
    words = (((int(evaluation) << 7) | (seed & 0x7F)) << 24) | low
    # Python's integers: Gymnasium refuses numpy's.
    return _feistel(words, 16, 0x9E3779B97F4A7C15).tolist()


class EpisodeSeeds:
    """`env_seed` of one slot's episodes by number, made 256 at a time: a single one costs as much as half a reset."""

    def __init__(self, seed: int, slot: int, evaluation: bool = False) -> None:
        self._of = seed, slot, evaluation
        self._block = -1
        self._seeds: list[int] = []

    def __getitem__(self, episode: int) -> int:
        block, at = divmod(episode, 256)
        if block != self._block:
            seed, slot, evaluation = self._of
            self._block, self._seeds = block, env_seeds(seed, slot, block * 256, 256, evaluation)
        return self._seeds[at]


def derived_seed(seed: int, purpose: Purpose) -> int:
    """A 63-bit seed for a library that wants one number, such as `torch.manual_seed`."""
    return _hash(seed, int(purpose), 0) >> 1


def stream_seed(seed: int, purpose: int, batch: int, first_slot: int) -> int:
    """A 63-bit seed for a generator that is not numpy's: of the noise of one batch, from `first_slot` on."""
    return _hash(seed, purpose, batch, first_slot) >> 1


def policy_seed(seed: int, number: int) -> int:
    """The seed of one of a run's policies by its number: the first has the run's own, as the only one of a run has."""
    return _hash(seed, int(Purpose.POLICY), number) >> 1 if number else seed


class _Placeholder(np.random.SeedSequence):
    """A fixed seed for a Philox with a state that is set right after; without one numpy asks the system for entropy."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> npt.NDArray[Any]:
        return np.zeros(n_words, dtype)


_PLACEHOLDER = _Placeholder(0)


class _Scratch(threading.local):
    """A Philox for each thread, to be set to an address and drawn from at once: making one takes ten times as long."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(_PLACEHOLDER)


_scratch = _Scratch()


def _set_address(bits: np.random.BitGenerator, key: tuple[int, ...], counter: tuple[int, ...]) -> None:
    """Sets a Philox to a key and a counter, as if it had just been made with them."""
    bits.state = _address(key, counter)


def _address(key: tuple[int, ...], counter: tuple[int, ...]) -> dict[str, Any]:
    """The state of a Philox that has just been made with a key and a counter; words are taken modulo 2^64."""
    return {
        "bit_generator": "Philox",
        "state": {
            "counter": tuple([int(word) & _MASK_64 for word in counter]),
            "key": tuple([int(word) & _MASK_64 for word in key]),
        },
        "buffer": (0, 0, 0, 0),
        "buffer_pos": _WORDS_PER_STEP,  # nothing is left of the step before
        "has_uint32": 0,
        "uinteger": 0,
    }


@functools.lru_cache(maxsize=1024)
def _hash(*words: int) -> int:
    text = ",".join(str(w) for w in words).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _feistel(word: npt.NDArray[np.int64], half_bits: int, key: int) -> npt.NDArray[np.int64]:
    """A bijection of words of 2 * half_bits bits (four Feistel rounds), so that distinct inputs stay distinct."""
    mask = (1 << half_bits) - 1
    left, right = word >> half_bits, word & mask
    for round_ in range(4):
        mixed = (right * 0x9E3779B1 + ((key >> (16 * round_)) & 0xFFFF) * 0x85EBCA6B + round_) & 0xFFFFFFFF
        mixed ^= mixed >> 15
        mixed = (mixed * 0x2C1B3C6D) & 0xFFFFFFFF
        mixed ^= mixed >> 13
        left, right = right, left ^ (mixed & mask)
    return (left << half_bits) | right
