"""Conformance of samplers: one suite for every live sampler, over `SeedEcho` environments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.agents.agent import Agent
from penstock.core.batch import Inputs, SampleBatch, poison
from penstock.core.noise import Purpose, uniform
from penstock.core.spec import EnvSpec
from penstock.core.tree import Tree, tree_leaves, tree_map, tree_paths
from penstock.envs.actions import action_noise_size, sample_action
from penstock.envs.make import EnvConfig
from penstock.envs.pools.settings import Reset
from penstock.envs.toy.plumbing import SeedEcho
from penstock.samplers.episodes import Episodes
from penstock.samplers.sampler import Sampler
from penstock.testing.pools import echo_config
from penstock.testing.records import Finished, RecordCheck, expect

Build = Callable[[EnvConfig, int], Sampler]
"""(environment, run seed) -> live sampler, as the `build` of settings: `SerialSampler(T=7, B=5).build`."""


class EchoAgent(Agent):
    """An agent that acts at random by its noise, and records all that it is shown and remembers.

    Its state counts the steps since `first`, and sums up the rewards that it saw.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        self.spec, self.noise_size = spec, action_noise_size(spec.action)
        self.unused = nn.Parameter(torch.zeros(1))

    def initial_state(self, B: int) -> Tree:
        device = self.unused.device
        return {"age": torch.zeros(B, dtype=torch.int64, device=device), "return": torch.zeros(B, device=device)}

    def act(self, inputs: Inputs, state: Tree, noise: Tensor | None) -> tuple[Tree, dict[str, Tree], Tree]:
        held = tree_map(lambda x: x.masked_fill(inputs.first, 0), state)
        held["return"] = held["return"] + inputs.prev_reward.masked_fill(inputs.first, 0)
        if noise is None:
            noise = torch.full((len(inputs.first), self.noise_size), 0.5)
        drawn = sample_action(self.spec.action, noise.cpu().numpy())
        scale = tree_map(lambda leaf: 2 if leaf.kind == "box" else 1, self.spec.action)  # half of them out of bounds
        device = self.unused.device
        action = tree_map(lambda x, s: torch.as_tensor(x * x.dtype.type(s), device=device), drawn, scale)
        shown = {"obs": inputs.obs, "action": inputs.prev_action, "reward": inputs.prev_reward, "first": inputs.first}
        return action, {"noise": noise, "shown": shown, "held": held}, {**held, "age": held["age"] + 1}


def check_sampler(
    build: Build,
    *,
    nested: bool = False,
    reset: Reset = "next_step",
    decorrelated: bool = False,
    seeded: bool = True,
    env: Callable[[EnvConfig], EnvConfig] = lambda config: config,
    seed: int = 3,
    first_itr: int = 2,
    batches: int = 8,
    discount: float = 0.99,
) -> None:
    """Raises AssertionError unless samplers keep their promises on record, noise, episodes and evaluations.

    Every row is compared with the known answer of `SeedEcho` and with the agent's inputs. Released rows are poisoned.
    Two samplers of one seed, of which one evaluates in between, must give the same bits.

    Args:
        build: with any T and B; the same at every call.
        nested: observations and actions are trees with leaves of every kind.
        reset, decorrelated: as the sampler is set.
        seeded: each slot plays the seeds of `env_seed`, as all but native batched environments do.
        env: replaces the factory in the suite's EnvConfig, such as by one of a batched environment.
        first_itr: number of the first batch, which a resumed run has above 0.
        discount: as the sampler is set.
    """
    config = env(echo_config(nested))
    quiet, evaluating, other = build(config, seed), build(config, seed), build(config, seed + 1)
    try:
        for sampler in (quiet, evaluating, other):
            _check_examples(sampler.initialize(EchoAgent(sampler.spec)), sampler.spec)
        T, B = quiet.batch_spec
        check = RecordCheck(B, seed=seed if seeded else None, reset=reset, decorrelated=decorrelated, acted=True)
        ages: Any = None
        for k in range(batches):
            itr = first_itr + k
            place = f"itr {itr}"
            batch, episodes = quiet.obtain_samples(itr)
            steps_before = check.env_steps
            finished = check.add(batch)
            expect(batch.spec == (T, B), place, f"a batch of {tuple(batch.spec)}; expected {(T, B)}")
            expect(batch.env_steps == check.env_steps - steps_before, place, "env_steps are not the valid rows")
            _check_episodes(episodes, finished, discount, decorrelated, place)
            ages = _check_agent(batch, ages, uniform(seed, Purpose.ACT, itr, slice(0, B), T, _noise(batch)), itr)
            if k == 1:
                _check_evaluations(evaluating, itr)
            elif k > 1:
                evaluating.evaluate_agent(itr, 3, deterministic=k % 2 == 0)
            again, _ = evaluating.obtain_samples(itr)
            expect(bits(again) == bits(batch), place, "same seed, other bits, or evaluation disturbed training")
            different, _ = other.obtain_samples(itr)
            expect(bits(different) != bits(batch), place, "another seed gave the same batch")
            for sampler_batch in (batch, again, different):
                poison(sampler_batch[: T - 1])
        expect(check.env_steps >= T * B * batches // 5, "suite", "too few steps to say anything")
    finally:
        for sampler in (quiet, evaluating, other):
            sampler.shutdown()
            sampler.shutdown()


def check_resume(build: Build, *, nested: bool = False, seed: int = 3, before: int = 4, after: int = 4) -> None:
    """Raises AssertionError unless a new sampler goes on from another's `state_dict` bit by bit, at any batch."""
    config = echo_config(nested)
    whole = build(config, seed)
    states: list[dict[str, Any]] = []
    recorded: list[Any] = []
    try:
        whole.initialize(EchoAgent(whole.spec))
        for itr in range(before + after):
            states.append(copy.deepcopy(whole.state_dict()))
            recorded.append(_outcome(*whole.obtain_samples(itr)))
        evaluated = _outcome(None, whole.evaluate_agent(before + after, 3))
    finally:
        whole.shutdown()
    for start in range(before + 1):
        resumed = build(config, seed)
        try:
            resumed.initialize(EchoAgent(resumed.spec))
            resumed.load_state_dict(states[start])
            cut = getattr(resumed, "cut_slots", [])
            expect(cut == [], f"resumed at itr {start}", f"slots {cut} were cut")
            for itr in range(start, before + after):
                outcome = _outcome(*resumed.obtain_samples(itr))
                expect(outcome == recorded[itr], f"resumed at itr {start}, itr {itr}", "other bits than without a cut")
            again = _outcome(None, resumed.evaluate_agent(before + after, 3))
            expect(again == evaluated, f"resumed at itr {start}", "another evaluation than without a cut")
        finally:
            resumed.shutdown()


def bits(batch: SampleBatch) -> dict[str, bytes]:
    """The bits of every leaf that a caller may read; the agent's info counts on valid rows only."""
    agent_info = {key: value for key, value in batch.info.items() if key != "env"}
    masked = tree_map(
        lambda x: np.where(batch.valid.reshape(*batch.valid.shape, *[1] * (x.ndim - 2)), x, 0), agent_info
    )
    readable = {
        "inputs": tuple(batch.inputs),
        "terminated": batch.terminated,
        "truncated": batch.truncated,
        "valid": batch.valid,
        "info": masked,
        "env": batch.info.get("env"),
        "state": batch.state,
        "version": np.where(batch.valid, batch.version, 0),
    }
    return {path: x.tobytes() for path, x in zip(tree_paths(readable), tree_leaves(readable))}


def _outcome(batch: SampleBatch | None, episodes: Episodes) -> Any:
    columns = {key: values.tobytes() for key, values in episodes.columns.items()}
    sums = [x.tobytes() for x in (episodes.return_, episodes.length, episodes.discounted_return, episodes.slot)]
    return None if batch is None else bits(batch), sums, columns


def _noise(batch: SampleBatch) -> int:
    return batch.info["noise"].shape[-1]


def _check_examples(examples: dict[str, Any], spec: EnvSpec) -> None:
    for name, leaves in (("obs", tree_leaves(spec.obs)), ("action", tree_leaves(spec.action))):
        shown = [(np.shape(x), str(np.asarray(x).dtype)) for x in tree_leaves(examples[name])]
        expected = [(leaf.shape, leaf.dtype) for leaf in leaves]
        expect(shown == expected, "initialize", f"examples[{name!r}] are {shown}; expected {expected}")
    expect(np.shape(examples["state"]["age"]) == (), "initialize", "the state of one slot has a leading dimension")
    expect(np.shape(examples["info"]["shown"]["reward"]) == (), "initialize", "the info of one step has one too many")


def _check_agent(batch: SampleBatch, ages: Any, noise: Any, itr: int) -> Any:
    """Checks that the agent was shown the record, with the noise of this itr and the state of the row before.

    Gives the steps that each slot's agent remembers after the batch.
    """
    T, _ = batch.spec
    place, valid, info = f"itr {itr}", batch.valid, batch.info
    expect(bool((batch.version[valid] == itr).all()), place, f"version is {np.unique(batch.version[valid])}")
    expect(bool((info["noise"][valid] == noise[valid]).all()), place, "the noise is not that of (seed, itr, slot)")
    first = batch.first[:-1]
    recorded = {"obs": batch.obs, "action": batch.prev_action, "reward": batch.prev_reward, "first": batch.first}
    for name in recorded:
        for x, y in zip(tree_leaves(info["shown"][name]), tree_leaves(recorded[name])):
            expect(bool((x[valid] == y[:-1][valid]).all()), place, f"the agent was shown another {name}")
    if ages is not None:
        kept = valid[0] & ~first[0]
        expect(bool((batch.state["age"] == ages)[kept].all()), place, "the state before row 0 is not that after row T")
    ages = batch.state["age"].copy()
    returns = batch.state["return"].copy()
    for t in range(T):
        ages = np.where(first[t], 0, ages)
        returns = np.where(first[t], np.float32(0), returns + batch.prev_reward[t])
        for name, x in (("age", ages), ("return", returns)):
            seen = info["held"][name][t]
            expect(bool((seen == x)[valid[t]].all()), f"{place}, row {t}", f"recurrent {name} {seen}; expected {x}")
        ages = ages + 1
    return ages


def _check_episodes(
    episodes: Episodes, finished: Sequence[Finished], discount: float, decorrelated: bool, place: str
) -> None:
    """Raises AssertionError unless these are the episodes that ended in the record, in their order."""
    expect(len(episodes) == len(finished), place, f"{len(episodes)} episodes; {len(finished)} ended")
    for i, one in enumerate(finished):
        where = f"{place}, slot {one.slot}, episode of seed {one.seed}"
        got = int(episodes.slot[i]), int(episodes.length[i]), bool(episodes.terminated[i])
        expected = one.slot, one.length, one.terminated
        expect(got == expected, where, f"(slot, length, terminated) = {got}; expected {expected}")
        success = float(episodes.columns["is_success"][i])
        expect(success == one.seed % 2, where, f"is_success = {success}")
        if len(one.rewards) < one.length:
            expect(decorrelated, where, "the record lacks steps of the episode")
            continue
        echo = float(episodes.columns["echo"][i])
        expect(echo == (one.length - 1) // 2 * 2, where, f"echo = {echo}")
        weights = discount ** np.arange(one.length)
        for name, total in (("return_", sum(one.rewards)), ("discounted_return", float(weights @ one.rewards))):
            seen = float(getattr(episodes, name)[i])
            expect(abs(seen - total) < 1e-9 * max(abs(total), 1), where, f"{name} is {seen}; expected {total}")


def _check_evaluations(sampler: Sampler, itr: int) -> None:
    """Exact counts, spread over the slots, whole episodes, and the same ones for the same itr."""
    for count in (1, 5, 20):
        episodes = sampler.evaluate_agent(itr, count)
        per_slot = np.bincount(episodes.slot)
        place = f"evaluation of {count} episodes"
        expect(len(episodes) == count, place, f"gave {len(episodes)}")
        expect(int(per_slot.max() - per_slot.min()) <= 1, place, f"slots played {per_slot}; expected equal shares")
        expect(bool(((episodes.length >= 1) & (episodes.length <= SeedEcho.longest)).all()), place, "odd lengths")
    again, noisy = sampler.evaluate_agent(itr, 20), sampler.evaluate_agent(itr, 20, deterministic=False)
    later = sampler.evaluate_agent(itr + 1, 20)
    expect(_outcome(None, again) == _outcome(None, episodes), "evaluation", "the same itr gave other episodes")
    expect(again.length.tolist() == noisy.length.tolist(), "evaluation", "noise changed the environments' seeds")
    expect(again.return_.tolist() != noisy.return_.tolist(), "evaluation", "deterministic=False acted the same")
    expect(again.return_.tolist() != later.return_.tolist(), "evaluation", "every evaluation has the same episodes")
