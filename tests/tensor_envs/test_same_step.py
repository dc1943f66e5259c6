"""Environments that reset in the step of an end: their record, and what algorithms see of it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.batch import ROWS_AND_NEXT, as_arrays
from penstock.core.errors import ConfigError, EnvContractError
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.check import check_vector_env
from penstock.learn.rows.reset_rows import with_reset_rows
from tests.tensor_envs.same_step import DISCOUNT, VALUES, Counting, Ring


def collected(env: Any, algo: Any, T: int, B: int, batches: int = 1) -> tuple[Any, list[Any]]:
    """The policy, and copies of the first batches that it collects."""
    sampler = ps.SerialSampler(T=T, B=B).build(env, seed=3)
    policy = algo.build(sampler.spec)
    sampler.initialize(policy.agent)
    found = [sampler.obtain_samples(i)[0].copy() for i in range(batches)]
    sampler.shutdown()
    return policy, found


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("T", [1, 3, 16])
def test_with_reset_rows_a_batch_is_that_of_the_twin_that_resets_in_the_next_step(T: int, groups: bool):
    class Steady(ps.Agent):
        """Chooses by what it sees, so that both twins choose alike."""

        noise_size = 0

        def __init__(self, spec: Any) -> None:
            super().__init__()
            self.spec = spec

        def act(self, inputs: Any, state: Any, noise: Any) -> Any:
            seen = tree_leaves(inputs.obs)[0]
            return (seen.sum(-1) % 2).long(), {"seen": seen[:, 3]}, state

    B = 5
    same, twin = ({"same_step": x, "groups": groups} for x in (True, False))
    for first in (0, 1):
        samplers = [
            ps.SerialSampler(T=n, B=B).build(partial(Counting, **x), 3) for x, n in ((same, T), (twin, 3 * T + 3))
        ]
        for x in samplers:
            x.initialize(Steady(x.spec))
        for itr in range(first):
            samplers[0].obtain_samples(itr)
        batch = samplers[0].obtain_samples(first)[0].copy()
        others = [samplers[1].obtain_samples(i)[0].copy() for i in range(2)]
        assert batch.valid.all() and batch.final is not None
        made = with_reset_rows(batch)
        assert made.final is None
        expected = ps.concat_samples(others, "T")
        for b in range(B):
            start = int(next(t for t in range(expected.spec.T + 1) if _same(expected, t, batch, b)))
            rows = T + int(batch.resets[:, b].sum())
            for name in (*ROWS_AND_NEXT, "terminated", "truncated", "valid", "info"):
                for x, y in zip(tree_leaves(getattr(made, name)), tree_leaves(getattr(expected, name))):
                    more = name in ROWS_AND_NEXT
                    x, y = x[: rows + more, b], y[start : start + rows + more, b]
                    if name == "prev_action":  # null where an episode opens, and of a reset row not looked at
                        opens = made.first[: rows + 1, b] | torch.cat(
                            (made.first[1 : rows + 1, b], torch.zeros(1).bool())
                        )
                        acted = torch.cat((torch.zeros(1).bool(), made.valid[:rows, b]))
                        x, y = x[~opens & acted], y[~opens & acted]
                    elif name == "info":
                        x, y = x[made.valid[:rows, b]], y[made.valid[:rows, b]]
                    torch.testing.assert_close(
                        x,
                        y,
                        rtol=0,
                        atol=0,
                        equal_nan=True,
                        msg=lambda text, name=name, b=b: f"{name} of slot {b}: {text}",
                    )
            assert not made.valid[rows:, b].any()
        for x in samplers:
            x.shutdown()


def _same(expected: Any, t: int, batch: Any, b: int) -> bool:
    """Row t of slot b of one record is row 0 of the other."""
    return all(bool((x[t, b] == y[0, b]).all()) for x, y in zip(tree_leaves(expected.obs), tree_leaves(batch.obs)))


def by_hand(batch: Any, value: torch.Tensor, lambda_: float) -> torch.Tensor:
    """GAE [T, B] of a batch in which the value of a row's successor at an end is that of `final`."""
    final = (batch.final * value).sum(-1)
    at = (batch.obs * value).sum(-1)
    out, running = torch.zeros_like(batch.reward), torch.zeros(batch.spec.B)
    for t in reversed(range(batch.spec.T)):
        ended = batch.terminated[t] | batch.truncated[t]
        after = torch.where(ended, final[t], at[t + 1]).masked_fill(batch.terminated[t], 0.0)
        delta = batch.reward[t] + DISCOUNT * after - at[t]
        running = delta + DISCOUNT * lambda_ * running.masked_fill(ended, 0.0)
        out[t] = running
    return out


class Known(ps.Agent):
    """Chooses at random, and knows the value of each state of the ring."""

    noise_size = 1

    def __init__(self, spec: Any, values: Any = VALUES) -> None:
        super().__init__()
        self.spec = spec
        self.logits = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("known", torch.tensor(values))

    def act(self, inputs: Any, state: Any, noise: Any) -> Any:
        action = (torch.full(inputs.first.shape, 0.5) if noise is None else noise[:, 0]) > 0.6
        return action.long(), {"logp": self.logits.log_softmax(-1)[action.long()].detach()}, state

    def forward(self, inputs: Any, state: Any = None) -> Any:
        from penstock.agents.distributions import Categorical

        value = (inputs.obs * self.known).sum(-1)
        return ps.Output(Categorical(self.logits.expand(*value.shape, 2)), value)


@pytest.mark.parametrize("algo", [ps.PPO, ps.A2C, ps.IMPALA, ps.APPO, ps.MARWIL])
@pytest.mark.parametrize("given", ["always", "at ends"])
@pytest.mark.parametrize("T", [3, 16])
def test_with_the_true_values_every_advantage_is_zero(algo: Any, given: str, T: int):
    cfg = algo(
        discount=DISCOUNT,
        agent=lambda spec, cfg: Known(spec),
        **({} if algo is ps.MARWIL else {"normalize_advantage": False}),
    )
    policy, batches = collected(partial(Ring, given=given), cfg, T, 8, 3)
    for batch in batches:
        data = policy.postprocess(batch)
        target = data["return" if "return" in data.rows else "target"]
        value = (data.inputs.obs * torch.tensor(VALUES)).sum(-1)
        assert int(data.valid.sum()) == T * 8
        assert (target - value)[data.valid].abs().max() < 1e-5
        if "advantage" in data.rows:
            assert data["advantage"][data.valid].abs().max() < 1e-5


def test_with_other_values_advantages_are_those_by_hand():
    wrong = [1.0, -2.0, 0.5]
    cfg = ps.PPO(
        discount=DISCOUNT,
        gae_lambda=0.7,
        normalize_value=False,
        normalize_advantage=False,
        agent=lambda spec, cfg: Known(spec, wrong),
    )
    policy, (batch,) = collected(Ring, cfg, 16, 8)
    data = policy.postprocess(batch)
    expected = by_hand(batch, torch.tensor(wrong), 0.7)
    for b in range(8):
        torch.testing.assert_close(data["advantage"][data.valid[:, b], b], expected[:, b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_memory_sees_the_last_observation_after_all_that_went_before(kind: Any):
    net = ps.Net(recurrent=kind, hidden=(8,), recurrent_size=8)
    policy, batches = collected(Counting, ps.PPO(net=net, normalize_value=False), 7, 5, 2)
    batch, agent = batches[1], policy.agent
    made = with_reset_rows(batch)
    value = agent.values(made)
    for b in range(5):
        state: Any = tree_map(lambda x, b=b: x[b : b + 1], batch.state)
        q = 0
        for t in range(7):
            inputs = tree_map(lambda x, b=b, t=t: x[t : t + 1, b : b + 1], tuple(batch.inputs))
            found, state = _one_step(agent, inputs, state)
            assert abs(float(value[q, b]) - found) < 1e-6
            q += 1
            if batch.resets[t, b]:
                last = (tree_map(lambda x, b=b, t=t: x[t : t + 1, b : b + 1], batch.final), *inputs[1:])
                action, reward = (
                    batch.prev_action[t + 1 : t + 2, b : b + 1],
                    batch.prev_reward[t + 1 : t + 2, b : b + 1],
                )
                found, _ = _one_step(agent, (last[0], action, reward, torch.zeros(1, 1, dtype=torch.bool)), state)
                assert abs(float(value[q, b]) - found) < 1e-6
                q += 1


def _one_step(agent: Any, inputs: tuple[Any, ...], state: Any) -> tuple[float, Any]:
    """V of one row of one slot, and the state after it."""
    from penstock.core.batch import Inputs

    x = Inputs(*inputs[:4])
    with torch.no_grad():
        value = float(agent(x, state).value)
        _, _, after = agent.act(Inputs(*tree_map(lambda y: y[0], tuple(x[:4]))), state, None)
    return value, after


def test_the_number_of_updates_is_that_of_the_samplers_batch():
    policy, (batch,) = collected(Counting, ps.PPO(minibatch=8, epochs=1), 16, 4)
    ps.train_one_step(policy, batch)
    assert policy.updates == 8


def test_episodes_are_counted_as_the_twin_counts_them():
    found = []
    for same_step in (True, False):
        sampler = ps.SerialSampler(T=40, B=3).build(partial(Counting, same_step=same_step), seed=1)
        policy = ps.PPO(discount=0.9).build(sampler.spec)
        sampler.initialize(policy.agent)
        episodes = sampler.obtain_samples(0)[1]
        found.append({(int(s), i): int(n) for s in range(3) for i, n in enumerate(episodes.length[episodes.slot == s])})
        sampler.shutdown()
    same, twin = found
    assert len(twin) > 10 and twin.items() <= same.items()


class Broken(Ring):
    def __init__(self, num_envs: int = 4, how: str = "") -> None:
        super().__init__(num_envs, given="never" if how in ("missing", "hint") else "always")
        self.how = how
        if how == "hint":
            self.final_obs_hint = "switch cfg.compute_final_obs on"

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(actions)
        if self.how == "ragged":
            info["final_obs"] = info["final_obs"][truncated]
        if self.how == "some":
            info["final_obs"] = {"_env_ids": truncated.nonzero(), "obs": info["final_obs"]}
        if self.how == "objects":
            info["final_obs"] = np.array([None] * self.num_envs, object)
        if self.how == "next":
            info["final_obs"] = obs
        if self.how == "nan":
            info["final_obs"][truncated] = float("nan")
        return obs, reward, terminated, truncated, info


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("missing", "an episode ended and info\\['final_obs'\\] was not there.*final_obs = 'previous'"),
        ("hint", "switch cfg.compute_final_obs on"),
        ("ragged", "Expected observations of all 4 slots"),
        ("some", "Expected observations of all 4 slots"),
        ("objects", "Expected observations of all 4 slots"),
        ("next", "the observation after the reset, in the same memory"),
        ("nan", "row . of the batch: final_obs"),
    ],
)
def test_wrong_last_observations_are_refused(how: str, text: str):
    with pytest.raises(EnvContractError, match=text):
        collected(partial(Broken, how=how), ps.PPO(), 8, 4)


def test_one_of_tensors_without_a_device_is_told_of_it():
    env = Ring(4)
    env.device = None
    with pytest.raises(ConfigError, match=r"SAME_STEP returns .*torch tensors may, and has a `device`"):
        check_vector_env(env)


def test_one_that_says_so_is_taken_with_the_observation_before_and_a_warning():
    with pytest.warns(UserWarning, match="the observation before it, as rsl_rl does"):
        _, (batch,) = collected(partial(Ring, given="previous"), ps.PPO(), 8, 4)
    at = batch.resets
    assert at.any()
    torch.testing.assert_close(batch.final[at], batch.obs[:-1][at])


def test_a_final_observation_that_comes_counts_whatever_the_attribute_says():
    class Both(Ring):
        final_obs = "previous"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, (batch,) = collected(Both, ps.PPO(), 8, 4)
    at = batch.resets
    assert at.any() and not torch.equal(batch.final[at], batch.obs[:-1][at])


def test_a_space_of_all_slots_is_told_of():
    class Wide(Ring):
        def __init__(self, num_envs: int = 8, device: str = "cpu") -> None:
            super().__init__(num_envs, device)
            self.single_observation_space = gym.spaces.Box(0, 1, (num_envs, 3), np.float32)

    with pytest.raises(EnvContractError, match="single_observation_space is that of one slot, without num_envs"):
        collected(Wide, ps.PPO(), 8, 4)


def test_a_rule_of_another_name_is_refused():
    class Odd(Ring):
        final_obs = "prev"

    with pytest.raises(ConfigError, match="final_obs='prev'; expected 'previous'"):
        collected(Odd, ps.PPO(), 8, 4)


def test_a_batch_is_sliced_copied_joined_and_split_with_its_last_observations():
    _, (one, two) = collected(Counting, ps.PPO(), 6, 4, 2)
    both = ps.concat_samples([one, two], "T")
    torch.testing.assert_close(both[6:12].final, two.final)
    torch.testing.assert_close(both[2:5, 1:3].copy().final, one.final[2:5, 1:3])
    assert one.flatten()["final"].shape == (24, 4)
    fragments = ps.split_by_episode(as_arrays(both))
    assert sum(x.spec.T for x in fragments) == 48
    for x in fragments[:-1]:
        assert x.resets[:-1].sum() == 0
    whole = [x for x in fragments if x.first[0, 0] and (x.terminated | x.truncated)[-1, 0]]
    for x in whole:  # its last observation is older than any before it, by one step
        assert x.final[-1, 0, 2] == x.spec.T and x.final[-1, 0, 1] == x.obs[0, 0, 1]
