"""Running statistics, and what an agent's networks and targets see of observations and rewards."""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.agents.actor_critic import ActorCritic
from penstock.agents.agent import Agent
from penstock.agents.continuous import ControlAgent
from penstock.agents.discrete_control import DiscreteControlAgent
from penstock.agents.networks import Net
from penstock.agents.preparation import ObsNormalizer, Preparation, RewardScaler, RunningMoments
from penstock.agents.q_agent import QAgent
from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_map

VECTOR = LeafSpec("box", (2,), "float32")
ONE_TO_TEN = torch.arange(1.0, 11.0, dtype=torch.float64).unsqueeze(1)


@pytest.mark.parametrize("sizes", [(1, 3, 0, 6), (10,), (5, 5), (1,) * 10, (0, 9, 1)])
def test_one_to_ten_in_any_chunks(sizes: tuple[int, ...]):
    moments = RunningMoments(1)
    for chunk in ONE_TO_TEN.split(list(sizes)):
        moments.update(chunk)
    assert moments.mean.item() == pytest.approx(5.5, abs=1e-12)
    assert moments.var.item() == pytest.approx(8.25, abs=1e-12)
    assert moments.count.item() == 10


def test_any_chunking_gives_the_same_to_the_twelfth_digit():
    generator = np.random.default_rng(0)
    data = torch.from_numpy(generator.normal(size=(500, 3)) * [1.0, 1e6, 1e-6] + [0.0, 1e6, 3.0])
    for _ in range(20):
        moments = RunningMoments(3)
        cuts = sorted(generator.integers(0, 501, size=int(generator.integers(0, 12))).tolist())
        for a, b in zip([0, *cuts], [*cuts, 500]):
            moments.update(data[a:b])
        torch.testing.assert_close(moments.mean, data.mean(0), rtol=1e-12, atol=0)
        torch.testing.assert_close(moments.var, data.var(0, correction=0), rtol=1e-9, atol=0)
        assert moments.count.item() == 500


def test_before_any_data_nothing_changes():
    moments = RunningMoments(2)
    moments.update(torch.empty(0, 2))
    assert moments.mean.tolist() == [0, 0]
    assert moments.var.tolist() == [1, 1]
    assert moments.count.item() == 0


def test_moments_survive_storage():
    moments, other = RunningMoments(1), RunningMoments(1)
    moments.update(ONE_TO_TEN[:4])
    other.load_state_dict(moments.state_dict())
    for m in (moments, other):
        m.update(ONE_TO_TEN[4:])
    assert torch.equal(other.var, moments.var)
    assert other.var.item() == pytest.approx(8.25)


def rows(T: int, B: int) -> Tensor:
    return torch.ones(T, B, dtype=torch.bool)


def test_observations_get_mean_zero_and_variance_one():
    normalizer = ObsNormalizer(VECTOR)
    obs = torch.randn(50, 4, 2) * torch.tensor([100.0, 0.01]) + torch.tensor([3.0, -7.0])
    assert normalizer.empty
    normalizer.update(obs, rows(50, 4))
    assert not normalizer.empty
    out = normalizer(obs.flatten(0, 1))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.mean(0), torch.zeros(2), rtol=0, atol=1e-4)
    torch.testing.assert_close(out.var(0, correction=0), torch.ones(2), rtol=2e-3, atol=0)


def test_before_the_first_update_observations_pass():
    out = ObsNormalizer(VECTOR)(torch.tensor([[0.5, -2.0], [100.0, 0.0]]))
    torch.testing.assert_close(out, torch.tensor([[0.5, -2.0], [10.0, 0.0]]))


def test_only_valid_rows_count():
    normalizer, reference = ObsNormalizer(VECTOR), ObsNormalizer(VECTOR)
    obs, valid = torch.randn(9, 3, 2), torch.rand(9, 3) < 0.5
    poisoned = obs.masked_fill(~valid.unsqueeze(-1), math.nan)
    normalizer.update(poisoned, valid)
    reference.update(obs[valid].unsqueeze(0), valid[valid].unsqueeze(0))
    assert torch.equal(normalizer.moments[0].mean, reference.moments[0].mean)  # pyright: ignore
    assert torch.equal(normalizer.moments[0].var, reference.moments[0].var)  # pyright: ignore
    assert normalizer.moments[0].count == valid.sum()


def test_a_batch_without_a_valid_row_changes_nothing():
    normalizer, scaler = ObsNormalizer(VECTOR), RewardScaler(0.9)
    normalizer.update(torch.ones(1, 3, 2), ~rows(1, 3))
    scaler.update(torch.zeros(1, 3), ~rows(1, 3), ~rows(1, 3), ~rows(1, 3))
    assert normalizer.empty
    assert scaler.moments.count.item() == 0


def test_a_constant_column_becomes_zero_and_a_huge_one_is_scaled():
    normalizer = ObsNormalizer(VECTOR)
    sign = torch.tensor([1.0, -1.0, -1.0, 1.0])
    obs = torch.stack([sign * 1e6, torch.full((4,), 7.0)], -1)
    for _ in range(3):
        normalizer.update(obs.unsqueeze(1), rows(4, 1))
    out = normalizer(obs)
    torch.testing.assert_close(out[:, 0], sign)
    assert (out[:, 1] == 0).all()
    surprise = normalizer(torch.tensor([[0.0, 7.1]]))
    assert surprise.tolist() == [[0, 10]]  # clipped, and finite


def test_what_is_far_away_is_clipped():
    normalizer = ObsNormalizer(VECTOR, clip=2.0)
    normalizer.update(torch.randn(100, 1, 2), rows(100, 1))
    assert normalizer(torch.tensor([[1e30, -1e30]])).tolist() == [[2, -2]]


def test_images_choices_and_bits_pass():
    obs = {
        "bits": LeafSpec("multi_binary", (2,), "int8"),
        "choice": LeafSpec("discrete", (), "int64", sizes=(3,)),
        "image": LeafSpec("box", (3, 4, 4), "uint8"),
        "scalar": LeafSpec("box", (), "float64"),
    }
    normalizer = ObsNormalizer(obs)
    x = {
        "bits": torch.ones(5, 2, dtype=torch.int8),
        "choice": torch.arange(5) % 3,
        "image": torch.full((5, 3, 4, 4), 200, dtype=torch.uint8),
        "scalar": torch.arange(5.0, dtype=torch.float64),
    }
    normalizer.update({k: v.unsqueeze(1) for k, v in x.items()}, rows(5, 1))
    out = normalizer(x)
    for key in ("bits", "choice", "image"):
        assert out[key] is x[key]
    torch.testing.assert_close(out["scalar"], torch.arange(-2.0, 3.0) / math.sqrt(2))
    assert not ObsNormalizer(obs["image"]).empty  # nothing to normalise, nothing to wait for


def returns_by_loop(reward: Tensor, ended: Tensor, valid: Tensor, discount: float) -> list[float]:
    """The running discounted return at each valid row, slot by slot (Engstrom et al. 2020, section 3)."""
    out: list[float] = []
    for t in range(len(reward)):
        for b in range(reward.shape[1]):
            if not valid[t, b]:
                continue
            total, k = 0.0, t
            weight = 1.0
            while True:
                total += weight * float(reward[k, b])
                weight *= discount
                k -= 1
                if k < 0 or not valid[k, b] or ended[k, b]:
                    break
            out.append(total)
    return out


@pytest.mark.parametrize("cuts", [(), (6,), (1, 2, 7), tuple(range(1, 12))])
def test_rewards_are_divided_by_the_deviation_of_the_running_return(cuts: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(12, 3, generator=generator)
    ended = torch.rand(12, 3, generator=generator) < 0.2
    valid = torch.ones(12, 3, dtype=torch.bool)
    valid[1:] = ~ended[:-1]
    valid[4, 1] = False  # a fault: the row is lost, no end before it
    ended &= valid
    reward[~valid] = 0
    first = torch.zeros_like(valid)
    first[1:] = ~valid[:-1]
    scaler = RewardScaler(0.9)
    for a, b in zip((0, *cuts), (*cuts, 12)):
        scaler.update(reward[a:b], ended[a:b], valid[a:b], first[a:b])
    expected = np.array(returns_by_loop(reward, ended, valid, 0.9))
    assert scaler.moments.count.item() == len(expected)
    assert scaler.moments.mean.item() == pytest.approx(expected.mean(), rel=1e-5)
    assert scaler.moments.var.item() == pytest.approx(expected.var(), rel=1e-5)
    x = torch.tensor([[0.5, -1.0], [0.0, 1e9]])
    torch.testing.assert_close(scaler(x), (x / expected.std()).float().clamp(-10, 10))


def test_a_return_goes_on_past_rows_in_which_an_agent_awaits_its_turn():
    reward = torch.tensor([[1.0], [2.0], [7.0], [4.0], [5.0]])
    valid = torch.tensor([[True], [True], [False], [True], [True]])
    first = torch.tensor([[True], [False], [False], [False], [True]])
    scaler = RewardScaler(0.5)
    for rows in (slice(0, 3), slice(3, 5)):
        scaler.update(reward[rows], torch.zeros_like(valid[rows]), valid[rows], first[rows])
    expected = np.array([1.0, 2.5, 5.25, 5.0])
    assert scaler.moments.mean.item() == pytest.approx(expected.mean())
    assert scaler.moments.var.item() == pytest.approx(expected.var())


def test_rewards_pass_before_the_first_update_and_are_never_shifted():
    scaler = RewardScaler(0.9)
    x = torch.tensor([[0.5, 0.0, 20.0]])
    torch.testing.assert_close(scaler(x), torch.tensor([[0.5, 0.0, 10.0]]))


def test_an_open_return_goes_on_after_storage():
    reward, never = torch.randn(10, 2), torch.zeros(10, 2, dtype=torch.bool)
    straight, first, second = RewardScaler(0.9), RewardScaler(0.9), RewardScaler(0.9)
    straight.update(reward, never, ~never, never)
    first.update(reward[:4], never[:4], ~never[:4], never[:4])
    second.load_state_dict(first.state_dict())
    second.update(reward[4:], never[4:], ~never[4:], never[4:])
    fresh = RewardScaler(0.9)
    fresh.update(reward[4:], never[4:], ~never[4:], never[4:])
    assert torch.equal(second.carry, straight.carry)
    assert not torch.equal(fresh.carry, straight.carry)
    torch.testing.assert_close(second.moments.var, straight.moments.var, rtol=1e-12, atol=0)
    first.update(reward[4:], never[4:], ~never[4:], never[4:])  # the stored state is a copy, not a view
    assert torch.equal(first.carry, second.carry)


CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,))
PAIR = LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3))
SHOWN = {"action_mask": LeafSpec("multi_binary", (5,), "int8"), "x": LeafSpec("box", (2,), "float32")}


def masked_batch(T: int = 3, B: int = 2) -> SampleBatch:
    """A batch of tensors, of observations with a mask and rewards of 2."""
    batch: Any = allocate_batch(EnvSpec(SHOWN, PAIR), BatchSpec(T, B))
    rng = np.random.default_rng(0)
    batch.obs["x"][...] = rng.normal(3.0, 2.0, batch.obs["x"].shape)
    batch.obs["action_mask"][...] = rng.integers(0, 2, batch.obs["action_mask"].shape)
    batch.valid[...], batch.reward[...] = True, 2.0
    return tree_map(torch.from_numpy, batch)


def test_the_mask_is_split_off_and_the_rest_normalised() -> None:
    preparation = Preparation(EnvSpec(SHOWN, PAIR), Net(normalize_obs=True, normalize_reward=True), 0.9)
    batch = masked_batch()
    assert preparation.active
    assert preparation.empty
    preparation.observe(batch)
    assert not preparation.empty
    assert preparation.obs == {"x": SHOWN["x"]}
    seen = preparation.prepared(tree_map(lambda x: x[0], batch.obs))
    assert list(seen) == ["x"]
    acted_on = batch.obs["x"][:-1].reshape(-1, 2)
    expected = (batch.obs["x"][0] - acted_on.mean(0)) / acted_on.std(0, correction=0)
    torch.testing.assert_close(seen["x"], expected)
    mask = preparation.mask(tree_map(lambda x: x[0], batch.obs))
    assert mask is not None
    assert mask.dtype == torch.bool
    assert torch.equal(mask, batch.obs["action_mask"][0] != 0)
    scaler = preparation.reward_scaler
    assert scaler is not None
    assert scaler.discount == 0.9
    assert torch.equal(preparation.scaled(batch.reward), scaler(batch.reward))


@pytest.mark.parametrize("kind", [ActorCritic, QAgent])
def test_rewards_are_scaled_for_targets_after_they_are_clipped(kind: Any) -> None:
    spec = EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,)))
    reward = torch.tensor([[-3.0], [0.5]])
    assert kind(spec, Net(hidden=(4,), reward_scale=0.1)).scaled_reward(reward).tolist() == [
        [pytest.approx(-0.3)],
        [pytest.approx(0.05)],
    ]
    if kind is ActorCritic:  # a replay clips by itself, before rewards are summed
        clipped = kind(spec, Net(hidden=(4,), reward_scale=0.1, clip_reward=True)).scaled_reward(reward)
        assert clipped.tolist() == [[pytest.approx(-0.1)], [pytest.approx(0.1)]]
    assert kind(spec, Net(hidden=(4,))).scaled_reward(reward) is reward


def test_without_settings_everything_passes() -> None:
    batch = masked_batch()
    reward = batch.reward
    for preparation in (Preparation(EnvSpec(VECTOR, CHOICE), Net()), Agent.preparation):
        assert not preparation.active
        assert not preparation.empty
        assert preparation.prepared(batch.obs) is batch.obs
        assert preparation.scaled(reward) is reward
        assert preparation.mask(batch.obs) is None
        preparation.observe(batch)


@pytest.mark.parametrize(
    ("size", "action", "choices"), [(4, PAIR, 5), (5, CHOICE, 3), (5, LeafSpec("box", (5,), "float32", -1.0, 1.0), 0)]
)
def test_a_mask_has_an_element_for_each_choice(size: int, action: LeafSpec, choices: int) -> None:
    obs = {**SHOWN, "action_mask": LeafSpec("multi_binary", (size,), "int8")}
    with pytest.raises(ConfigError, match=rf"obs\['action_mask'\] has {size} elements for {choices} discrete choices"):
        Preparation(EnvSpec(obs, action), Net())


AGENTS: dict[str, Callable[[EnvSpec, Net], Agent]] = {
    "actor-critic": lambda spec, net: ActorCritic(spec, net, 0.9),
    "q": lambda spec, net: QAgent(spec, net, 0.9),
    "discrete": lambda spec, net: DiscreteControlAgent(spec, net, 0.9, 2),
    "control": lambda spec, net: ControlAgent(spec, net, 0.9, 2, "gaussian", "SAC"),
}


@pytest.mark.parametrize("kind", AGENTS)
def test_every_agent_prepares_alike_and_stores_its_statistics(kind: str) -> None:
    boxes = kind == "control"
    shown = SHOWN["x"] if boxes else {**SHOWN, "action_mask": LeafSpec("multi_binary", (3,), "int8")}
    spec = EnvSpec(shown, LeafSpec("box", (1,), "float32", -1.0, 1.0) if boxes else CHOICE)
    net = Net(hidden=(4,), normalize_obs=True, normalize_reward=True, prev_reward=True)
    agent = AGENTS[kind](spec, net)
    batch: Any = tree_map(torch.from_numpy, allocate_batch(spec, BatchSpec(4, 2)))
    batch.valid[...] = True
    for x in tree_leaves(batch.obs):
        x.copy_(torch.randint(0, 2, x.shape))
    batch.prev_reward.copy_(torch.randn_like(batch.prev_reward))
    agent.observe(batch)
    assert agent.fed == {"prev_reward", "first"}
    stored = agent.state_dict()
    assert {"normalizer.moments.0.count", "reward_scaler.moments.var"} <= stored.keys()
    assert float(stored["normalizer.moments.0.count"]) == 8
    for other in (copy.deepcopy(agent), AGENTS[kind](spec, net)):
        other.load_state_dict(stored)
        shown, own = (tree_leaves(a.prepared(tree_map(lambda x: x[0], batch.obs))) for a in (other, agent))
        assert all(torch.equal(x, y) for x, y in zip(shown, own))
        assert torch.equal(other.scaled_reward(batch.reward), agent.scaled_reward(batch.reward))
        other.observe(batch)
        assert float(agent.state_dict()["normalizer.moments.0.count"]) == 8
        assert float(other.state_dict()["normalizer.moments.0.count"]) == 16


def test_a_mask_over_boxes_is_refused_by_every_agent() -> None:
    spec = EnvSpec(SHOWN, LeafSpec("box", (1,), "float32", -1.0, 1.0))
    for kind in ("actor-critic", "control"):
        with pytest.raises(ConfigError, match="5 elements for 0 discrete choices"):
            AGENTS[kind](spec, Net())
