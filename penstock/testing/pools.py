"""Conformance of pools: one suite for every EnvPool, on environments that say where a row came from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from penstock.core.batch import SampleBatch, allocate_batch, poison
from penstock.core.noise import Purpose, uniform
from penstock.core.protocols import require_members
from penstock.core.spec import BatchSpec
from penstock.core.tree import Tree, tree_assign, tree_leaves, tree_map
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.make import EnvConfig
from penstock.envs.pools.pool import EnvPool, slots_of
from penstock.envs.pools.settings import Reset
from penstock.envs.toy.plumbing import SeedEcho
from penstock.testing.records import RecordCheck, expect, same


def echo_config(nested: bool = False) -> EnvConfig:
    """The environment of the suites: `SeedEcho` with its `info["echo"]` recorded and every value checked."""
    return EnvConfig(SeedEcho, {"nested": nested}, info_keys=("echo",), checks="always")


def check_pool(
    make_pool: Callable[[], EnvPool],
    *,
    seed: int | None = None,
    slot: int = 0,
    reset: Reset = "next_step",
    decorrelated: bool = False,
    T: int = 7,
    batches: int = 8,
) -> None:
    """Raises AssertionError, with batch, row and slot, unless the pools write the record that `EnvPool` promises.

    Every row is compared with what `SeedEcho` must have answered. It runs with one buffer and with two that alternate,
    each poisoned when it is released, which must give the same bits.

    Args:
        make_pool: a new pool over environments made by `echo_config()`, nested or not; every call the same. One of
            tensors has them on the CPU.
        seed: of the run, if slot b plays the seeds `env_seed(seed, b, 0)`, `env_seed(seed, b, 1)` and so on. None: any
            seeds, each once.
        slot: global number of the pool's first slot.
        decorrelated: the pool may take steps before the first batch.
    """
    runs = [_run(make_pool(), buffers, seed, slot, reset, decorrelated, T, batches) for buffers in (1, 2)]
    for k, (one, two) in enumerate(zip(*runs)):
        expect(one == two, f"batch {k}", "two alternating buffers gave other bits than one")


def _run(
    pool: EnvPool, buffers: int, seed: int | None, slot: int, reset: Reset, decorrelated: bool, T: int, batches: int
) -> list[list[bytes]]:
    """The bits of every batch of a new pool."""
    require_members(pool, EnvPool, "docs/writing-a-sampler.md")
    B = slots_of(pool)
    expect(
        [b for _, slots in pool.groups for b in range(slots.start, slots.stop)] == list(range(B)),
        "groups",
        f"{pool.groups} are not consecutive, or not all slots",
    )
    spec = pool.specs[0]
    made = [
        allocate_batch(spec, BatchSpec(T, B), {"mark": np.float32(0)}, None, pool.info_keys) for _ in range(buffers)
    ]
    # Tensors on the CPU are views of the suite's arrays.
    bound = made if pool.device is None else pool.place(made, None)[0]
    for batch in made:
        poison(batch)
    check = RecordCheck(B, seed=seed, slot=slot, reset=reset, decorrelated=decorrelated)
    bits: list[list[bytes]] = []
    try:
        for k in range(batches):
            batch = made[k % buffers]
            _poison_but_last(batch)
            _fill(pool, batch, bound[k % buffers], _random_actions(pool, k, batch.spec), made[(k - 1) % buffers])
            check.add(batch)
            bits.append([x.tobytes() for x in tree_leaves(batch)])
    finally:
        pool.close()
        pool.close()
    expect(check.env_steps >= T * B * batches // 5, "suite", "too few steps to say anything")
    return bits


def _fill(pool: EnvPool, batch: SampleBatch, bound: SampleBatch, actions: Tree, released: SampleBatch) -> None:
    """Plays the loop's part for one batch, and checks that a row is there when `recv` says so, and never changes.

    Args:
        bound: the same memory as the pool takes it.
    """
    T, _ = batch.spec
    marks = batch.info["mark"].copy(), batch.version.copy()
    pool.bind([bound])
    if released is not batch:
        poison(released)
    rows = [0] * len(pool.groups)
    received: list[tuple[int, slice, list[Any]]] = []

    def send(group: int) -> None:
        slots, row = pool.groups[group].slots, rows[group]
        tree_assign(batch.action, (row, slots), actions, (row, slots))
        pool.send(group, row)

    for group in range(len(rows)):
        send(group)
    for _ in range(T * len(rows)):
        group = pool.recv()
        slots, row = pool.groups[group].slots, rows[group]
        received.append((row, slots, [x.copy() for x in _answer(batch, row, slots)]))
        rows[group] += 1
        if rows[group] < T:
            send(group)
    expect(rows == [T] * len(rows), "recv", f"gave the groups {rows} times; expected {T} times each")
    for row, slots, then in received:
        for x, y in zip(_answer(batch, row, slots), then):
            same(x, y, f"row {row}, slots {slots.start} to {slots.stop - 1}", "written after recv gave the group")
    for x, y in zip(tree_leaves(batch.action), tree_leaves(actions)):
        same(x, y, "actions", "the pool wrote the loop's memory")
    for x, y in zip((batch.info["mark"], batch.version), marks):
        same(x, y, "agent info and version", "the pool wrote the loop's memory")


def _answer(batch: SampleBatch, row: int, slots: slice) -> list[Any]:
    """The environment's part of a row, in the live buffer."""
    nexts = (batch.obs, batch.first)
    env_info = batch.info.get("env", {})
    return [x[row + 1, slots] for x in tree_leaves(nexts)] + [
        x[row, slots] for x in tree_leaves((batch.reward, batch.terminated, batch.truncated, batch.valid, env_info))
    ]


def _random_actions(pool: EnvPool, k: int, spec: BatchSpec) -> Tree:
    """[T, B, *A] actions of batch k; half of the boxes' are out of bounds, as an agent's may be."""
    T, B = spec
    noise = uniform(0, Purpose.CHECK, k, slice(0, B), T, action_noise_size(pool.specs[0].action))
    actions = sample_action(pool.specs[0].action, noise.reshape(T * B, -1))
    scale = tree_map(lambda leaf: 2 if leaf.kind == "box" else 1, pool.specs[0].action)
    return tree_map(lambda x, s: (x * x.dtype.type(s)).reshape(T, B, *x.shape[1:]), actions, scale)


def _poison_but_last(batch: SampleBatch) -> None:
    """Poisons a buffer, but for row T, which the next batch begins with if it is written to the same buffer."""
    tails = [x[-1].copy() for x in tree_leaves(batch)]
    poison(batch)
    for x, tail in zip(tree_leaves(batch), tails):
        x[-1] = tail
