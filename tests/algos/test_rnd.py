"""Random network distillation: the authors' equations by a slow reference, and what an algorithm with it keeps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.algos.rnd import Novelty, endless_targets, novelty
from penstock.core.batch import SampleBatch
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.envs.toy import Chain, DeepSea, EchoAgents, PixelCatch, TwoStep
from penstock.learn.rows.postprocess import as_tensors
from penstock.testing.samplers import bits
from tests.params import slow_but

NET = ps.Net(hidden=(8,))
SMALL = ps.RND(features=4, net=NET)


def test_targets_go_on_over_ends_by_hand() -> None:
    """Rows 0, 1, a reset row, row 3; discount 1/2, lambda 1: R_3 = 3 + V_4 / 2, and R_1 is followed by R_3."""
    reward, valid = (torch.tensor(x).unsqueeze(1) for x in ([1.0, 2.0, 9.0, 3.0], [True, True, False, True]))
    value = torch.tensor([10.0, 20.0, 70.0, 30.0, 40.0]).unsqueeze(1)
    advantage, return_ = endless_targets(reward, value, valid, discount=0.5, trace_lambda=1.0)
    assert return_[[0, 1, 3], 0].tolist() == [1.0 + 0.5 * (2.0 + 0.5 * 23.0), 2.0 + 0.5 * 23.0, 23.0]
    assert advantage[:, 0].tolist() == [7.75 - 10.0, 13.5 - 20.0, 0.0, 23.0 - 30.0]
    _, return_ = endless_targets(reward, value, valid, discount=0.5, trace_lambda=0.0)
    assert return_[[0, 1, 3], 0].tolist() == [1.0 + 10.0, 2.0 + 15.0, 23.0]


def test_targets_of_stale_batches_are_v_trace_where_nothing_ends() -> None:
    rng = torch.Generator().manual_seed(0)
    reward, log_ratio, value = (torch.randn(n, 3, generator=rng) for n in (7, 7, 8))
    never = torch.zeros(7, 3, dtype=torch.bool)
    known = ps.ops.vtrace(log_ratio, reward, value, never, never, ~never, discount=0.9, vtrace_lambda=0.8)
    ratio = log_ratio.exp().clamp(max=1.0)
    advantage, return_ = endless_targets(reward, value, ~never, discount=0.9, trace_lambda=0.8, rho=ratio, c=ratio)
    assert torch.allclose(return_, known[0], atol=1e-5) and torch.allclose(advantage, known[1], atol=1e-5)


class Reference:
    """The authors' algorithm 1 for one slot at a time, in numpy's float64, on networks copied at the start."""

    def __init__(self, rnd: Novelty, lr: float) -> None:
        self.nets = copy.deepcopy(rnd)
        self.filters: dict[Any, Any] = {}
        self.returns: list[float] = []
        self.seen = np.zeros((0, 5))
        self.adam = torch.optim.Adam([p for p in self.nets.parameters() if p.requires_grad], lr=lr, eps=1e-5)

    def normalized(self, obs: Any) -> torch.Tensor:
        std = np.sqrt(self.seen.var(0) + 1e-8)
        return torch.from_numpy(np.clip((obs - self.seen.mean(0)) / std, -5, 5)).float()

    def error(self, obs: Any) -> torch.Tensor:
        none: Any = None
        x, own = self.normalized(obs), self.nets
        wanted = own.target(none, x, own.target_out).detach()
        return (own.predictor(none, x, own.predictor_out) - wanted).square().mean(-1)

    def value(self, obs: Any) -> torch.Tensor:
        none: Any = None
        return self.nets.critic(none, self.normalized(obs), self.nets.value_head).squeeze(-1)

    def rows(self, batch: SampleBatch) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Advantages and returns [T, B]: rewards, the forward filter, GAE without ends."""
        valid, obs = np.asarray(batch.valid), np.asarray(batch.obs, np.float64)
        T, B = valid.shape
        if not len(self.seen):
            self.seen = obs[1:][valid]
            begun = True
        else:
            begun = False
        with torch.no_grad():
            error, value = (
                f(obs.reshape(-1, 5)).numpy().reshape(T + 1, B).astype(np.float64) for f in (self.error, self.value)
            )
        for t, b in np.argwhere(valid):
            self.filters[b] = self.filters.get(b, 0.0) * 0.99 + error[t + 1, b]
            self.returns.append(self.filters[b])
        scale = 1.0 / np.sqrt(np.var(self.returns) + 1e-8)
        advantage, return_ = np.zeros((T, B)), np.zeros((T, B))
        for b in range(B):
            last, following = 0.0, value[T, b]
            for t in reversed(range(T)):
                if not valid[t, b]:
                    continue
                delta = error[t + 1, b] * scale + 0.99 * following - value[t, b]
                advantage[t, b] = last = delta + 0.99 * 0.9 * last
                return_[t, b], following = advantage[t, b] + value[t, b], value[t, b]
        if not begun:
            self.seen = np.concatenate([self.seen, obs[1:][valid]])
        return advantage, return_

    def train(self, batch: SampleBatch, return_: Any) -> None:
        """One step on the distillation loss and half the squared error of values."""
        valid, obs = np.asarray(batch.valid), np.asarray(batch.obs, np.float64)
        wanted = torch.from_numpy(return_[valid]).float()
        loss = self.error(obs[1:][valid]).mean() + 0.5 * 0.5 * (self.value(obs[:-1][valid]) - wanted).square().mean()
        self.adam.zero_grad()
        loss.backward()
        self.adam.step()


def test_updates_are_the_authors() -> None:
    """Four batches of A2C: intrinsic advantages, returns, and the networks after each step of Adam."""
    cfg = ps.A2C(rnd=SMALL, optimizer="adam", lr=1e-2, gae_lambda=0.9, max_grad_norm=1e9, net=NET)
    plain = ps.A2C(optimizer="adam", lr=1e-2, gae_lambda=0.9, max_grad_norm=1e9, net=NET)
    sampler = ps.SerialSampler(T=7, B=3).build(Chain, 1)
    policy = cfg.build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    reference = Reference(novelty(policy.agent), 1e-2)
    for itr in range(4):
        batch = sampler.obtain_samples(itr)[0].copy()
        assert itr == 0 or not batch.valid.all()
        own: Any = plain.build(sampler.spec, seed=1)
        own.agent.load_state_dict({k: x for k, x in policy.agent.state_dict().items() if not k.startswith("rnd.")})
        extrinsic = own.postprocess(as_tensors(batch, policy.device))["advantage"]
        x = policy.postprocess(as_tensors(batch, policy.device))
        advantage, return_ = reference.rows(batch)
        valid = np.asarray(batch.valid)
        assert np.allclose(x["rnd_return"].numpy()[valid], return_[valid], atol=1e-4)
        expected = 2.0 * extrinsic.numpy() + advantage
        assert np.allclose(x["advantage"].numpy()[valid], expected[valid], atol=1e-4)
        (minibatch,) = ps.minibatches(x, None, policy.shuffler(), 1)
        policy.learn_on_batch(minibatch)
        reference.train(batch, return_)
        policy.version += 1
        for mine, theirs in zip(novelty(policy.agent).parameters(), reference.nets.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


def test_the_algorithm_begins_as_without_it_and_the_target_stays() -> None:
    sampler = ps.SerialSampler(T=8, B=4).build(Chain, 1)
    off, on = ps.PPO(net=NET).build(sampler.spec, 3), ps.PPO(net=NET, rnd=SMALL).build(sampler.spec, 3)
    assert all(torch.equal(x, on.agent.state_dict()[name]) for name, x in off.agent.state_dict().items())
    sampler.initialize(on.agent)
    before = {name: x.clone() for name, x in novelty(on.agent).named_parameters()}
    ps.train_one_step(on, sampler.obtain_samples(0)[0])
    moved = {name.split(".")[0] for name, x in novelty(on.agent).named_parameters() if not torch.equal(x, before[name])}
    assert moved == {"predictor", "predictor_out", "critic", "value_head"}


def test_the_predictor_learns_from_its_share_of_the_rows() -> None:
    rnd = Novelty(EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))), SMALL)
    valid = torch.ones(500, 4, dtype=torch.bool)
    one, two = (rnd.learned_rows(valid, 0.25) for _ in range(2))
    assert set(one.unique().tolist()) == {0.0, 4.0} and not torch.equal(one, two)
    assert one.mean().item() == pytest.approx(1.0, abs=0.1)
    rnd.batches.zero_()
    assert torch.equal(one, rnd.learned_rows(valid, 0.25))


def test_the_predictors_loss_weighs_its_rows() -> None:
    sampler = ps.SerialSampler(T=7, B=3).build(Chain, 1)
    policy = ps.A2C(rnd=ps.RND(features=4, net=NET, share=0.25), net=NET).build(sampler.spec, seed=1)
    sampler.initialize(policy.agent)
    x = policy.postprocess(as_tensors(sampler.obtain_samples(0)[0], policy.device))
    loss: Any = policy.loss_fn(policy.agent, x, policy.settings)
    error, valid = novelty(policy.agent).errors(x["rnd_next"].flatten(0, 1)).reshape(7, 3), x.valid
    weights = x["rnd_weight"][valid]
    assert set(weights.unique().tolist()) == {0.0, 4.0}
    assert loss.metrics["rnd_loss"].item() == pytest.approx((error[valid] * weights).mean().item(), rel=1e-5)


def test_the_predictor_has_two_hidden_layers_more_than_the_target() -> None:
    rnd = Novelty(EnvSpec(LeafSpec("box", (2,), "float32"), LeafSpec("discrete", (), "int64", sizes=(2,))), SMALL)
    widths = [[x.shape for x in body.parameters() if x.ndim == 2] for body in (rnd.target, rnd.predictor, rnd.critic)]
    assert widths == [[(8, 2)], [(8, 2), (8, 8), (8, 8)], [(8, 2)]]


def test_images_and_parts_of_a_dict_are_normalised_element_by_element_and_masks_are_not_seen() -> None:
    obs = {
        "image": LeafSpec("box", (8, 8, 3), "uint8", 0.0, 255.0), "choice": LeafSpec("discrete", (), "int64", sizes=(3,)),
        "action_mask": LeafSpec("multi_binary", (2,), "int8"),
    }  # fmt: skip
    rnd = Novelty(EnvSpec(obs, LeafSpec("discrete", (), "int64", sizes=(2,))), SMALL)
    assert rnd.predictor.encoder.shown[1] is not None and len(rnd.normalizer.counts) == 1
    rng = torch.Generator().manual_seed(0)
    shown = {
        "image": torch.randint(256, (9, 8, 8, 3), dtype=torch.uint8, generator=rng), "choice": torch.randint(3, (9,)),
        "action_mask": torch.ones(9, 2),
    }  # fmt: skip
    rnd.normalizer.update({k: x.unsqueeze(0) for k, x in shown.items() if k != "action_mask"}, torch.ones(1, 9).bool())
    seen: Any = rnd.seen(shown)
    assert set(seen) == {"image", "choice"} and seen["image"].mean(0).abs().max() < 1e-5
    assert rnd.errors(shown).shape == (9,) == rnd.values(shown).shape


PLACES: dict[str, Any] = {
    "cpu": ps.CpuSampler(8, 4, workers=2),
    "gpu": ps.GpuSampler(8, 4, workers=2),
    "alternating": ps.AlternatingSampler(8, 4, workers=2),
    "async": ps.AsyncSerialSampler(ps.SerialSampler(8, 4), depth=0),
}


def run(settings: Any) -> tuple[list[Any], list[bytes]]:
    sampler = settings.build(Chain, 5)
    policy = ps.PPO(net=NET, minibatch=16, epochs=2, rnd=ps.RND(share=0.5, net=NET)).build(sampler.spec, 5)
    sampler.initialize(policy.agent)
    out: list[Any] = []
    try:
        for itr in range(4):
            batch = sampler.obtain_samples(itr)[0]
            out.append(bits(batch))
            ps.train_one_step(policy, batch)
    finally:
        sampler.shutdown()
    return out, [x.numpy().tobytes() for x in policy.agent.state_dict().values()]


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", slow_but("cpu", PLACES))
def test_placement_changes_nothing(place: Any) -> None:
    assert run(ps.SerialSampler(8, 4)) == run(place)


def test_values_of_the_task_are_exact_beside_it() -> None:
    cfg = ps.PPO(lr="linear(2e-2, 0)", discount=0.9, net=ps.Net(hidden=(16,)), rnd=SMALL, minibatch=64, epochs=4)
    sampler = ps.SerialSampler(T=32, B=4).build(TwoStep, 2)
    policy = cfg.build(sampler.spec, seed=2, total_steps=25 * 128)
    sampler.initialize(policy.agent)
    metrics: dict[str, float] = {}
    for itr in range(25):
        batch = sampler.obtain_samples(itr)[0]
        metrics = ps.train_one_step(policy, batch)
    assert metrics["train/rnd_loss"] < 0.01 and metrics["train/rnd_error"] < 0.01
    none: Any = None
    found = policy.agent(ps.Inputs(torch.tensor([[0.0], [1.0]]), none, none, none)).value
    assert found.tolist() == pytest.approx([0.9, 1.0], abs=0.03)


def test_several_policies_each_have_their_own() -> None:
    algo = ps.PPO(net=NET, minibatch=16, epochs=1, rnd=SMALL)
    who: Any = lambda agent, episode, seed: "ab"[int(agent[-1]) % 2]  # noqa: E731
    algos = ps.Policies({"a": algo, "b": ps.PPO(net=NET)}, who, {"a": 2, "b": 2})  # fmt: skip
    result = ps.train(
        ps.Experiment(EchoAgents, algos, ps.SerialSampler(T=8, B=2), ps.RunConfig(steps=64, progress="off"))
    )
    assert "train/a/rnd_loss" in result.metrics and "train/b/rnd_loss" not in result.metrics


def test_a_run_on_images_takes_it_from_the_command_line_and_other_algorithms_refuse_it(tmp_path: Any) -> None:
    exp = ps.Experiment(PixelCatch, ps.PPO(net=NET, minibatch=16, epochs=1), ps.SerialSampler(T=8, B=2),
                        ps.RunConfig(steps=32, dir=str(tmp_path / "run"), progress="off"))  # fmt: skip
    exp = ps.override(exp, {"algo.rnd.coef": 0.5})
    algo: Any = exp.algo
    assert algo.rnd == ps.RND(coef=0.5)
    ps.train(exp)
    assert ps.resume(tmp_path / "run", {"run.steps": 48}).metrics["train/rnd_error"] > 0.0
    other: Any
    for other in (ps.MAPPO, ps.DQN):
        with pytest.raises((ConfigError, TypeError), match="rnd"):
            other(rnd=SMALL)
    settings: Any
    for said, settings in {"share=0": {"share": 0.0}, "recurrent='lstm'": {"net": ps.Net(recurrent="lstm")}}.items():
        with pytest.raises(ConfigError, match=said):
            ps.RND(**settings)


@pytest.mark.slow
def test_deep_sea_is_solved_where_ppo_alone_fails() -> None:
    good: dict[str, float] = {}
    for name, rnd in {"rnd": ps.RND(), "alone": None}.items():
        sampler = ps.SerialSampler(T=40, B=32).build(ps.EnvConfig(DeepSea, {"size": 10}), seed=1)
        algo = ps.PPO(rnd=rnd, epochs=4, minibatch=256, entropy_coef=0.001, normalize_value=False)
        policy = algo.build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        returns: list[float] = []
        for itr in range(35):
            batch, ended = sampler.obtain_samples(itr)
            returns.extend(ended.return_)
            ps.train_one_step(policy, batch)
        good[name] = float(np.mean(np.array(returns[-300:]) > 0.5))
    assert good["rnd"] > 0.8 and good["alone"] < 0.1
