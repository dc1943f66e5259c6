from __future__ import annotations

import functools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode

from penstock.core.batch import SampleBatch, allocate_batch, as_arrays
from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.spec import BatchSpec
from penstock.core.tree import tree_leaves
from penstock.envs.make import EnvConfig
from penstock.envs.toy import SeedEcho
from penstock.tensor_envs import CartPole, PixelCatch
from penstock.tensor_envs.pool import TensorPool
from penstock.testing.pools import check_pool
from tests.tensor_envs.echo import ArrayCartPole, Bad, echoes


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (3, 2), (8, 7)])
def test_the_contract(nested: bool, B: int, T: int):
    check_pool(lambda: TensorPool(echoes(nested), 3, B), T=T)


def placed(pool: TensorPool, T: int) -> SampleBatch:
    B = pool.groups[0].slots.stop
    return pool.place([allocate_batch(pool.spec, BatchSpec(T, B), env_info=pool.info_keys)], None)[0][0]


def rows(pool: TensorPool, T: int, batch: SampleBatch | None = None, actions: Any = None) -> SampleBatch:
    """A batch that is stepped with null actions, or those given; a new one unless one is given."""
    out = placed(pool, T) if batch is None else batch
    pool.bind([out])
    for t in range(T):
        if actions is not None:
            out.action[t] = actions[t]
        pool.send(0, t)
        pool.recv()
    return out


@pytest.mark.parametrize("T", [1, 5, 16])
@pytest.mark.parametrize(
    "toy", [functools.partial(CartPole, max_episode_steps=30), PixelCatch], ids=["cartpole", "pixels"]
)
def test_batches_equal_a_plain_loops_row_for_row(toy: Any, T: int):
    B, seed = 7, 11
    pool, plain = TensorPool(EnvConfig(toy), seed, B), toy(num_envs=B)
    random = torch.Generator().manual_seed(2)
    obs, _ = plain.reset(seed=env_seed(seed, 0, 0) >> 1)
    first, action, reward = torch.ones(B, dtype=torch.bool), torch.zeros(B, dtype=torch.int64), torch.zeros(B)
    buffers, ends = [placed(pool, T) for _ in range(2)], 0
    over = torch.zeros(B, dtype=torch.bool)
    for k in range(96 // T):
        batch = buffers[k % 2]
        actions = torch.randint(plain.single_action_space.n, (T, B), generator=random)
        rows(pool, T, batch, actions)
        for t in range(T):
            seen = batch.obs[t], batch.first[t], batch.prev_action[t], batch.prev_reward[t]
            for x, y in zip(seen, (obs, first, action, reward)):
                assert torch.equal(x, y)
            ended = over
            obs, reward, terminated, truncated, _ = plain.step(actions[t])
            first, action = ended, actions[t]
            over = terminated | truncated
            ends += int(over.sum())
            for x, y in zip((batch.valid, batch.terminated, batch.truncated), (~ended, terminated, truncated)):
                assert torch.equal(x[t], y)
            assert torch.equal(batch.reward[t], reward)
        assert torch.equal(batch.obs[T], obs)
        assert torch.equal(batch.first[T], first)
    assert ends > 20
    pool.close()


def test_seeds_depend_on_run_restart_and_purpose_and_a_resumed_pool_starts_anew():
    def opening(pool: TensorPool) -> list[int]:
        return SeedEcho.place_of(as_arrays(rows(pool, 1).obs))[0][0].tolist()

    one = TensorPool(echoes(), 5, 2)
    known = opening(one)
    assert known == opening(TensorPool(echoes(), 5, 2)) != opening(TensorPool(echoes(), 6, 2))
    assert opening(TensorPool(echoes(), 5, 2, evaluation=True)) != known
    rows(one, 5)
    one.restart(5)
    assert opening(one) == known
    batch = rows(one, 3)
    assert one.set_state(one.get_state(), [batch], [None] * 2) == [0, 1]
    assert opening(one) != known


@pytest.mark.parametrize(
    ("config", "B", "text"),
    [
        (
            EnvConfig(lambda: CartPole(3)),
            4,
            "num_envs=3; sampler.B=4: make them equal, or let the factory accept num_envs",
        ),
        (EnvConfig(ArrayCartPole), 4, "expected a gymnasium.vector.VectorEnv with a `device`"),
        (EnvConfig(SeedEcho), 1, "made SeedEcho; expected a gymnasium.vector.VectorEnv with a `device`"),
    ],
)
def test_what_does_not_fit_is_refused(config: EnvConfig, B: int, text: str):
    with pytest.raises(ConfigError) as caught:
        TensorPool(config, 0, B)
    assert text in str(caught.value)


class Disabled(CartPole):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}


class Silent(CartPole):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs)
        self.metadata = {}


class Elsewhere(CartPole):
    def __init__(self, num_envs: int = 1) -> None:
        super().__init__(num_envs)
        self.device = "cuda:77"


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (Disabled, "Disabled resets by AutoresetMode.DISABLED; expected metadata['autoreset_mode'] to be SAME_STEP"),
        (Silent, "does not name its autoreset mode; expected metadata['autoreset_mode'] to be SAME_STEP"),
        (Elsewhere, "has device='cuda:77', which is not here"),
    ],
)
def test_an_environment_is_refused_before_it_is_stepped(env: Any, text: str):
    with pytest.raises(ConfigError) as caught:
        TensorPool(EnvConfig(env), 0, 2)
    assert text in str(caught.value)
    assert env is Elsewhere or "penstock.tensor_envs.NextStep" in str(caught.value)


def put(k: int, change: Any) -> Any:
    def changed(answer: list[Any]) -> Any:
        answer[k] = change(answer[k])
        return tuple(answer)

    return changed


@pytest.mark.parametrize("since", [0, 3])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(0, lambda x: x.double()), "obs: got float64[2, 4] on cpu, expected float32[2, 4] on cpu; return x.to(torch.float32)"),
        (put(0, lambda x: x[:1]), "obs: got float32[1, 4] on cpu, expected float32[2, 4] on cpu; nothing is broadcast"),
        (put(0, lambda x: x.to("meta")), "obs: got float32[2, 4] on meta, expected float32[2, 4] on cpu; keep every tensor on"),
        (put(0, lambda x: x.numpy()), "obs: got a numpy array float32[2, 4], expected a torch tensor float32[2, 4] on cpu"),
        (put(0, lambda x: {"policy": x}), "obs: its structure is"),
        (put(1, lambda x: x.long()), "reward: got int64[2] on cpu, expected dtype float32; return reward.float()"),
        (put(1, lambda x: x.unsqueeze(1)), "reward: got float32[2, 1] on cpu, expected float32[2] on cpu; nothing is broad"),
        (put(1, lambda x: x.numpy()), "reward: got a numpy array float32[2], expected a torch tensor"),
        (put(2, lambda x: x.float()), "terminated: got float32[2] on cpu, expected dtype bool; return terminated.bool()"),
        (put(3, lambda x: False), "truncated: got bool, expected a torch tensor bool[2] on cpu"),
        (put(4, lambda x: None), "info: got NoneType, expected a dict"),
        (put(4, lambda x: {"final_observation": 0}), "info['final_observation']: it resets in the step of an end"),
        (put(4, lambda x: {"height": 3.0}), "info['height']: got float, expected a tensor [2] on cpu"),
        (lambda answer: tuple(answer[:4]), "got tuple of 4, expected (obs, reward, terminated, truncated, info); that is the"),
    ],
)  # fmt: skip
def test_an_answer_that_breaks_the_contract_is_refused_in_its_step(change: Any, text: str, since: int):
    pool = TensorPool(EnvConfig(functools.partial(Bad, 2, change, since), info_keys=("height",)), 0, 2)
    with pytest.raises(EnvContractError) as caught:
        rows(pool, 8)
    assert text in str(caught.value)
    assert f"in step(), {since} steps after the reset" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            put(0, lambda x: x.numpy()),
            "in reset(), 0 steps after the reset of all environments: obs: got a numpy array",
        ),
        (put(0, lambda x: x.half()), "obs: got float16[2, 4] on cpu, expected float32[2, 4]"),
        (lambda answer: (answer[0], {}, {}), "got tuple of 3, expected a tuple (obs, info)"),
    ],
)
def test_a_reset_that_needs_the_host_is_refused(change: Any, text: str):
    pool = TensorPool(EnvConfig(functools.partial(Bad, 2, change, in_reset=True)), 0, 2)
    with pytest.raises(EnvContractError) as caught:
        rows(pool, 1)
    assert text in str(caught.value)


def at(slot: int, value: float, column: int | None = None) -> Any:
    def changed(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[slot if column is None else (slot, column)] = value
        return x

    return changed


@pytest.mark.parametrize(
    ("change", "checks", "text"),
    [
        (
            put(1, at(1, float("nan"))),
            "off",
            "slot 6 of tests.tensor_envs.echo:Bad, row 3 of the batch: reward is nan; expected a finite number",
        ),
        (
            put(1, at(0, float("inf"))),
            "sampled",
            "slot 5 of tests.tensor_envs.echo:Bad, row 3 of the batch: reward is inf",
        ),
        (
            put(0, at(1, float("nan"), 2)),
            "sampled",
            "slot 6 of tests.tensor_envs.echo:Bad, row 4 of the batch: obs: got nan at [2]",
        ),
        (
            put(0, at(1, 5.0, 0)),
            "always",
            "slot 6 of tests.tensor_envs.echo:Bad, row 4 of the batch: obs: got 5.0 at [0], expected at most 4.8",
        ),
        (put(0, at(1, float("nan"), 2)), "off", None),
        (put(0, at(1, 5.0, 0)), "finite", None),
    ],
)
def test_values_are_looked_at_once_a_batch(change: Any, checks: Any, text: str | None):
    pool = TensorPool(EnvConfig(functools.partial(Bad, 2, change, 3), checks=checks), 0, 2, first_slot=5)
    if text is None:
        rows(pool, 5)
        return
    with pytest.raises(EnvContractError) as caught:
        rows(pool, 5)
    assert text in str(caught.value)


def test_the_earliest_value_that_is_refused_is_told_since_others_follow_from_it():
    nan, told = torch.full((2,), float("nan")), []

    def carried_on(answer: list[Any]) -> Any:
        answer[1] = nan if told else answer[1]
        answer[0] = at(1, float("nan"), 2)(answer[0])
        told.append(True)
        return tuple(answer)

    pool = TensorPool(EnvConfig(functools.partial(Bad, 2, carried_on, 1)), 0, 2)
    with pytest.raises(EnvContractError, match=r"slot 1 of .*, row 2 of the batch: obs: got nan at \[2\]"):
        rows(pool, 5)


def test_a_batch_has_no_graph_if_the_environments_tensors_do():
    def grad(answer: list[Any]) -> Any:
        return (answer[0].requires_grad_(), answer[1])

    batch = rows(TensorPool(EnvConfig(functools.partial(Bad, 2, grad, in_reset=True)), 0, 2), 2)
    assert not batch.obs.requires_grad


def test_what_a_reset_row_is_given_besides_its_observation_counts_for_nothing():
    def nan_where_over(answer: list[Any]) -> Any:
        over = answer[1] == 0
        answer[1], answer[2], answer[3] = torch.where(over, float("nan"), answer[1]), answer[2] | over, answer[3] | over
        return tuple(answer)

    batch = rows(TensorPool(EnvConfig(functools.partial(Bad, 2, nan_where_over)), 0, 2), 60)
    assert not batch.valid.all()
    assert torch.equal(batch.reward, batch.valid.float())
    assert not (batch.terminated | batch.truncated)[~batch.valid].any()
    assert (batch.valid[1:] | batch.valid[:-1]).all()


def test_what_an_environment_raises_is_told_with_its_place():
    def broken(answer: list[Any]) -> Any:
        raise ZeroDivisionError("of the simulator")

    pool = TensorPool(EnvConfig(functools.partial(Bad, 2, broken, 1)), 0, 2)
    with pytest.raises(EnvWorkerError, match=r"in step\(\), 1 steps after .*ZeroDivisionError.*of the simulator"):
        rows(pool, 4)


def test_actions_are_clipped_and_owned_by_the_environment_and_it_may_change_its_tensors_later():
    class Pushy(CartPole):
        """Writes into its actions and, in reset, into what it made in the loop."""

        given: ClassVar[list[Any]] = []

        def step(self, actions: Any) -> Any:
            self.given.append(actions.clone())
            actions.fill_(1)
            return super().step(actions)

        def reset(self, **kwargs: Any) -> Any:
            if hasattr(self, "state"):
                self.state.zero_()
            return super().reset(**kwargs)

    pool = TensorPool(EnvConfig(Pushy), 0, 2)
    batch = placed(pool, 3)
    with torch.inference_mode():
        rows(pool, 3, batch)
    assert not batch.action.any()
    pool.restart(1)
    assert torch.isfinite(rows(pool, 3, batch).obs).all()
    assert not torch.stack(Pushy.given).any()


def test_an_unused_environment_is_lent_to_evaluation_and_a_used_one_is_not():
    made: list[CartPole] = []

    def make() -> CartPole:
        made.append(CartPole(4))
        return made[-1]

    pool = TensorPool(EnvConfig(make), 0, 4)
    assert pool.evaluation_slots(16) == 4
    evaluation = pool.for_evaluation(4)
    assert len(made) == 1
    rows(evaluation, 3)
    rows(pool, 3)
    assert len(made) == 2
    rows(pool.for_evaluation(4), 3)
    assert len(made) == 3
    assert TensorPool(EnvConfig(CartPole), 0, 4).evaluation_slots(16) == 16
    for one in (evaluation, pool):
        one.close()
        one.close()
    assert [env.closed for env in made] == [True, True, False]


def test_images_lie_in_the_batch_as_uint8():
    batch = rows(TensorPool(EnvConfig(PixelCatch), 0, 3), 9)
    assert (batch.obs.dtype, tuple(batch.obs.shape)) == (torch.uint8, (10, 3, 3, 24, 24))
    assert all(isinstance(x, torch.Tensor) for x in tree_leaves(batch))
    assert np.unique(as_arrays(batch.obs)).tolist() == [0, 255]
