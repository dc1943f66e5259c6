"""R2D1: targets and loss against slow loops, burn-in, the priority of constants, masks, and a memory task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import penstock as ps
from penstock.agents.q_agent import QAgent
from penstock.algos.r2d1 import R2D1, loss_fn, postprocess_fn, targets
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_leaves, tree_map
from penstock.envs.toy import RepeatPrevious, TMaze
from penstock.learn.train_ops import train_one_step
from penstock.samplers.serial import SerialSampler
from tests.algos.r2d1_slow import BY_AGENT, SMALL, drawn, h, h_inverse, slow_priority, slow_target, trained
from tests.params import slow_but


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("rescale", [True, False])
def test_targets_equal_a_slow_loop(n: int, rescale: bool) -> None:
    cfg = replace(SMALL, n_step=n, value_rescale=rescale, train_length=12)
    policy, _ = trained(TMaze, cfg, 1)
    rng = np.random.default_rng(n)
    rows, columns = 12 + n - 1, 40
    reward, value = rng.normal(0, 5, (rows, columns)), rng.normal(0, 4, (rows + 1, columns))
    terminated = rng.random((rows, columns)) < 0.1
    truncated = ~terminated & (rng.random((rows, columns)) < 0.1)
    valid = rng.random((rows, columns)) < 0.85
    args = [torch.from_numpy(x) for x in (reward, value, terminated, truncated, valid)]
    found = targets(policy.agent, *args, cfg)  # pyright: ignore[reportArgumentType]
    assert found.shape == (12, columns)
    for t, b in zip(*np.nonzero(valid[:12])):
        own = (x[:, b] for x in (reward, value, terminated, truncated, valid))
        assert float(found[t, b]) == pytest.approx(slow_target(*own, t, cfg), abs=1e-6)


def by_hand(agent: QAgent, x: Any, cfg: R2D1) -> tuple[torch.Tensor, list[float]]:
    """Loss and priorities, row by row and slot by slot, from a sample as replay gives it."""
    L, N = x.valid.shape

    def unrolled(network: Any, n: int) -> list[torch.Tensor]:
        """Q [A] of each row; gradients flow from the trained rows back to the first of them."""
        state = tree_map(lambda s: s[n : n + 1], x.state)
        out: list[torch.Tensor] = []
        for t in range(L):
            inputs = type(x.inputs)(*(tree_map(lambda v, t=t: v[t : t + 1, n : n + 1], part) for part in x.inputs))
            if bool(inputs.first):
                state = tree_map(torch.zeros_like, state)
            if t in (cfg.burn_in, cfg.burn_in + cfg.train_length):
                state = tree_map(torch.detach, state)
            q, state = network(inputs, inputs.obs, state)
            out.append(q[0, 0])
        return out

    losses: list[torch.Tensor] = []
    priorities: list[float] = []
    for n in range(N):
        online, target = unrolled(agent.online, n), unrolled(agent.target, n)
        chooser = online if cfg.double else target
        value = [float(target[t][int(chooser[t].argmax())]) for t in range(L)]
        errors: list[float] = []
        for t in range(cfg.burn_in, cfg.burn_in + cfg.train_length):
            if x.valid[t, n]:
                own = (v[:, n] for v in (x["reward"], torch.tensor(value)[:, None].expand(L, N), x["terminated"],
                                         x["truncated"], x.valid))  # fmt: skip
                error = online[t][int(x["action"][t, n])] - slow_target(*own, t, cfg)
                losses.append(0.5 * error.square() * (x["weight"][n] if "weight" in x.rows else 1.0))
                errors.append(abs(error.item()))
        priorities.append(slow_priority(errors, cfg.eta))
    return torch.stack(losses).mean(), priorities


CHANGES: dict[str, dict[str, Any]] = {
    "all": {},
    "plain": {"double": False, "value_rescale": False},
    "no-burn-in": {"burn_in": 0, "dueling": False},
}


@pytest.mark.parametrize(
    ("env", "changes"),
    slow_but(
        "all-terminated plain-truncated no-burn-in-truncated",
        {
            f"{name}-{end}": (env, changes)
            for name, changes in CHANGES.items()
            for end, env in (("terminated", lambda: TMaze(3)), ("truncated", lambda: RepeatPrevious(length=5)))
        },
    ),
)
def test_loss_gradient_and_priorities_equal_a_slow_loop(env: Any, changes: dict[str, Any]) -> None:
    """Gradients stop at the burn-in: the slow loop cuts them there."""
    cfg = replace(SMALL, **changes)
    policy, _ = trained(env, cfg, 20)
    agent: Any = policy.agent
    _, x = drawn(policy)
    end = cfg.burn_in + cfg.train_length
    assert x.inputs.first[1:end].any() and not x.valid[cfg.burn_in : end].all() and x["weight"].min() < 1
    with torch.no_grad():
        ready = postprocess_fn(agent, x, cfg)
    assert not any(s.requires_grad for s in tree_leaves(ready.state))
    loss = loss_fn(agent, ready, cfg)
    total, priorities = by_hand(agent, x, cfg)
    assert isinstance(loss.total, torch.Tensor) and loss.priorities is not None
    torch.testing.assert_close(loss.total, total, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(loss.priorities.numpy(), priorities, rtol=1e-4, atol=1e-6)
    parameters = list(agent.online.parameters())
    for seen, slow in zip(torch.autograd.grad(loss.total, parameters), torch.autograd.grad(total, parameters)):
        torch.testing.assert_close(seen, slow, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("interval", "tau"), [(3, 1.0), (2, 0.25)])
def test_the_target_network_follows_every_few_updates(interval: int, tau: float) -> None:
    sampler = SerialSampler(T=4, B=4).build(TMaze, 1)
    policy = replace(SMALL, target_interval=interval, tau=tau).build(sampler.spec, 2)
    sampler.initialize(policy.agent)
    agent: Any = policy.agent
    expected = [x.clone() for x in agent.online.parameters()]
    update = policy.learn_on_batch

    def checked(x: Any) -> Any:
        for seen, target in zip(agent.target.parameters(), expected):
            torch.testing.assert_close(seen, target)
        loss = update(x)
        if policy.updates % interval == 0:
            expected[:] = [(1 - tau) * x + tau * y.detach() for x, y in zip(expected, agent.online.parameters())]
        return loss

    policy.learn_on_batch = checked
    for itr in range(14):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert policy.updates > 2 * interval


def test_what_is_burnt_in_and_what_lies_beyond_train_nothing_by_themselves() -> None:
    """Other actions and rewards in the burn-in, as `action` and `reward`, change no loss."""
    policy, _ = trained(lambda: TMaze(3), SMALL, 20)
    agent: Any = policy.agent
    _, x = drawn(policy)
    found = []
    for _ in range(2):
        with torch.no_grad():
            found.append(loss_fn(agent, postprocess_fn(agent, x, SMALL), SMALL).metrics["loss"])
        x["reward"][: SMALL.burn_in] += 7.0
        x["action"][SMALL.burn_in + SMALL.train_length :] ^= 1
    assert torch.equal(*found)


def test_priority_of_constant_values_is_the_true_n_step_error() -> None:
    """Q = 10 everywhere and no reward: |10 - h(0.997^5 h^-1(10))| = 0.083 (a bootstrap without discount^n has 0)."""
    cfg = replace(SMALL, discount=0.997, n_step=5)
    policy, _ = trained(RepeatPrevious, cfg, 1)
    value, zeros = torch.full((13, 1), 10.0), torch.zeros(12, 1)
    no, yes = torch.zeros(12, 1, dtype=torch.bool), torch.ones(12, 1, dtype=torch.bool)
    error = (10.0 - targets(policy.agent, zeros, value, no, no, yes, cfg)).abs()  # pyright: ignore[reportArgumentType]
    expected = 10.0 - h(0.997**5 * h_inverse(10.0))
    assert expected == pytest.approx(0.083, abs=1e-3)
    torch.testing.assert_close(error, torch.full((8, 1), expected), rtol=0, atol=1e-4)


def test_masked_actions_are_neither_chosen_nor_bootstrapped_from() -> None:
    class OneLegal(RepeatPrevious):
        """Only the action of the present symbol is legal."""

        def __init__(self) -> None:
            super().__init__()
            self.observation_space = spaces.Dict({"obs": self.observation_space, "action_mask": spaces.MultiBinary(4)})

        def observe(self) -> Any:
            obs = super().observe()
            return {"obs": obs, "action_mask": obs.astype(np.int8)}

    policy, kept = trained(OneLegal, SMALL, 20)
    agent: Any = policy.agent
    for batch in kept:
        legal = np.take_along_axis(batch.obs["action_mask"][:-1], batch.action[..., None].astype(int), -1)[..., 0]
        assert legal[batch.valid].all()
    _, x = drawn(policy)
    ready = postprocess_fn(agent, x, SMALL)
    assert torch.equal(agent.greedy(ready.inputs, ready["q_target"]), ready.inputs.obs["action_mask"].argmax(-1))
    assert policy.updates > 5


@pytest.mark.parametrize("changes", [{"normalize_obs": True, "normalize_reward": True}, {"recurrent": "gru"},
                                     {"prev_action": False, "prev_reward": False, "clip_reward": True}])  # fmt: skip
def test_the_parts_of_the_network_are_seen_alike_in_acting_and_in_sequences(changes: dict[str, Any]) -> None:
    """Row by row as `act` does it, the network gives what it gives for whole sequences."""
    policy, _ = trained(lambda: TMaze(3), replace(SMALL, net=replace(SMALL.net, **changes)), 16)
    agent: Any = policy.agent
    _, x = drawn(policy)
    with torch.no_grad():
        whole, state = agent(x.inputs, x.state), x.state
        for t, q in enumerate(whole):
            row = type(x.inputs)(*(None if part is None else part[t] for part in x.inputs))
            _, info, state = agent.act(row, state, None)
            torch.testing.assert_close(info["q_max"], q.amax(-1))
    assert policy.updates > 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: R2D1(net=ps.Net()), ["net.recurrent='none'", "DQN"]),
        (lambda: R2D1(burn_in=-1), ["burn_in=-1"]),
        (lambda: R2D1(eta=1.5), ["eta=1.5"]),
        (lambda: trained(TMaze, replace(SMALL, state_interval=6), 1), ["sampler.T=4", "state_interval", "6"]),
        (lambda: trained(TMaze, replace(SMALL, burn_in=990), 1),
         ["replay.capacity=4000", "samples of 1002 rows", "use replay.capacity >= "]),
    ],
    ids=["no memory", "burn-in", "eta", "interval", "too long"],
)  # fmt: skip
def test_settings_that_contradict_are_refused(make: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.slow
def test_it_remembers() -> None:
    """The symbol of the step before: 7 is the best return of 8 steps, 3.5 that of chance."""
    net = ps.Net(hidden=(32,), recurrent="lstm", recurrent_size=32)
    cfg = R2D1(lr=3e-3, discount=0.5, batch_size=32, replay_ratio=8.0, learning_starts=500, n_step=2, burn_in=0, train_length=8,
               state_interval=8, epsilon=0.2, target_interval=20, adam_eps=1e-5, net=net,
               replay=replace(BY_AGENT, capacity=20_000))  # fmt: skip
    sampler = SerialSampler(T=8, B=16).build(lambda: RepeatPrevious(1, 2, 8), 0)
    policy = cfg.build(sampler.spec, 0)
    sampler.initialize(policy.agent)
    for itr in range(80):
        train_one_step(policy, sampler.obtain_samples(itr)[0])
    assert sampler.evaluate_agent(80, 40).mean_return > 6.5
