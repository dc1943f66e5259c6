"""Functions, heads, norms and optimizers by the native kernel: as torch's, and the same bits by all instructions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.agents import distributions as dists
from penstock.learn.optimizers import Adam, RMSprop
from penstock.native import elementwise, heads, library, updates

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("by_kernel")]
FUNCTIONS = ["exp", "log", "log1p", "tanh", "softplus", "sigmoid", "elu"]
SPECIAL = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-42, -1e-42, 88.9, -104.5, -1.0, 3e38]


def numbers(name: str, size: int = 4099) -> Tensor:
    """Where the function changes most, in numbers that no processor rounds."""
    steps = torch.arange(size, dtype=torch.float32) / size
    low, high = {"log": (2.0**-20, 40.0), "log1p": (-0.999, 30.0)}.get(name, (-30.0, 30.0))
    return low + (high - low) * steps


def by_torch(name: str) -> Callable[[Tensor], Tensor]:
    return getattr(torch.nn.functional if name in ("softplus", "elu") else torch, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_and_their_gradients_are_torchs(name: str) -> None:
    x = numbers(name).requires_grad_()
    y, expected = getattr(elementwise, name)(x), by_torch(name)(x.double())
    torch.testing.assert_close(y.double(), expected, rtol=5e-7, atol=1e-30 if name == "exp" else 5e-7)
    (own,) = torch.autograd.grad(y.sum(), [x])
    (theirs,) = torch.autograd.grad(expected.sum(), [x])
    torch.testing.assert_close(own, theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_special_numbers_are_torchs(name: str) -> None:
    x = torch.tensor(SPECIAL)
    torch.testing.assert_close(getattr(elementwise, name)(x), by_torch(name)(x), equal_nan=True, rtol=1e-6, atol=1e-6)


def test_normals_are_those_of_the_inverse_cdf() -> None:
    u = (torch.arange(2**16) + 0.5) / 2**16
    expected = math.sqrt(2.0) * torch.erfinv(2.0 * u.double() - 1.0)
    torch.testing.assert_close(elementwise.normal(u).double(), expected, rtol=1e-6, atol=1e-6)


def test_every_set_of_instructions_gives_the_same_bits(each_instruction_set: list[bytes]) -> None:
    assert {b"scalar"} < {*each_instruction_set}
    found: list[list[Tensor]] = []
    for name in each_instruction_set:
        library.found.choose(name)
        torch.manual_seed(1)
        weight = torch.empty(33, 20)
        elementwise.orthogonal_(weight, 1.5)
        logits, u = numbers("tanh", 61 * 7).reshape(61, 7), (torch.arange(61.0).unsqueeze(1) + 0.5) / 61
        each = [getattr(elementwise, f)(torch.cat([numbers(f), torch.tensor(SPECIAL)])) for f in FUNCTIONS]
        mean, wide = logits[:, :3].contiguous() / 9, u.repeat(1, 3)
        box = torch.full((3,), 0.5), torch.full((3,), 2.0)
        each += [elementwise.normal(u), elementwise.log_softmax(logits), weight]
        each += [*heads.categorical(logits, None, u, 0), *heads.categorical(logits, logits > 0.0, u, 0)]
        for squash in (False, True):
            each += heads.gaussian(mean, torch.linspace(-1, 1, 3), *box, wide, squash)
        each += [heads.control(mean, wide, 0.3, *box), heads.control(mean.repeat(1, 2), wide, None, *box)]
        each += [torch.tensor(updates.squares([logits, mean]))]
        for optimizer in (Adam, RMSprop):
            p = logits.clone().requires_grad_()
            own = optimizer([p], lr=0.1)
            for _ in range(3):
                p.grad = p.detach() - 1.0
                own.step()
            each.append(p.detach())
        found.append(each)
    for each in found:
        assert all(torch.equal(x, y) or (x.isnan() == y.isnan()).all() for x, y in zip(each, found[-1], strict=True))
        assert all(torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)) for x, y in zip(each, found[-1], strict=True))


@pytest.mark.parametrize("n", [1, 2, 7, 300])
@pytest.mark.parametrize("masked", [False, True])
def test_choices_are_drawn_as_torch_draws_them(n: int, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(n)
    logits, u = 3.0 * torch.randn(500, n, generator=g), torch.rand(500, 1, generator=g).clamp(1e-6, 1.0 - 1e-6)
    mask = torch.rand(500, n, generator=g) < 0.6 if masked else None
    if mask is not None:
        mask[mask.sum(-1) == 0] = True
    for noise in (u, None):
        action, logp = dists.Categorical(logits, 3, mask).acted(noise)
        assert mask is None or mask.gather(1, action.unsqueeze(1) - 3).all()
        torch.testing.assert_close(logp, dists.Categorical(logits, 3, mask).log_prob(action), rtol=0, atol=0)
        with monkeypatch.context() as m:
            m.setattr(library, "found", None)
            theirs, theirs_logp = dists.Categorical(logits, 3, mask).acted(noise)
        same = action == theirs
        assert same.float().mean() > 0.995  # a draw at a boundary may fall to the other side
        torch.testing.assert_close(logp[same], theirs_logp[same], rtol=2e-6, atol=2e-6)


def test_logits_that_are_not_numbers_give_some_choice_and_no_probability() -> None:
    logits = torch.tensor([[math.nan, 0.0, 1.0], [0.0, math.inf, 0.0], [-math.inf, 0.0, 0.0]])
    action, logp = heads.categorical(logits, None, torch.full((3, 1), 0.5), 0)
    assert ((action >= 0) & (action < 3)).all()
    assert logp.isnan().tolist() == [True, True, False]
    assert heads.categorical(logits, None, None, 0)[0].tolist() == logits.argmax(-1).tolist()
    nothing = heads.categorical(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool), torch.full((2, 1), 0.999), 0)
    assert nothing[0].tolist() == [2, 2]  # a mask that allows nothing does not count
    assert heads.categorical(torch.zeros(0, 3), None, None, 0)[0].shape == (0,)


@pytest.mark.parametrize("kind", [dists.Gaussian, dists.SquashedGaussian])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_boxes_are_drawn_as_torch_draws_them(
    kind: Any, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = math.prod(shape)
    g = torch.Generator().manual_seed(size)
    mean, u = torch.randn(200, size, generator=g), torch.rand(200, size, generator=g).clamp(1e-6, 1.0 - 1e-6)
    dist = kind(mean, torch.linspace(-2, 0.5, size), torch.linspace(-1, 1, size), torch.linspace(0.1, 4, size), shape)
    for noise in (u, None):
        action, logp = dist.acted(noise)
        with monkeypatch.context() as m:
            m.setattr(library, "found", None)
            theirs, theirs_logp = dist.acted(noise)
        assert action.shape == (200, *shape)
        torch.testing.assert_close(action, theirs, rtol=5e-6, atol=5e-6)
        torch.testing.assert_close(logp, theirs_logp, rtol=1e-4, atol=2e-4)
        torch.testing.assert_close(logp, dist.log_prob(action), rtol=5e-6, atol=2e-5)


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled": True}])
def test_steps_are_torchs(settings: dict[str, Any]) -> None:
    decoupled = settings.pop("decoupled", False)
    for own_kind, theirs_kind in ((Adam, torch.optim.AdamW if decoupled else torch.optim.Adam), (RMSprop,) * 2):
        if decoupled and own_kind is RMSprop:
            continue
        g = torch.Generator().manual_seed(1)
        own, theirs = ([torch.linspace(-1, 1, n).requires_grad_() for n in (1, 7, 64)] for _ in range(2))
        extra = {"decoupled": True} if decoupled else {}
        a, b = own_kind(own, lr=0.01, eps=1e-5, **settings, **extra), theirs_kind(theirs, lr=0.01, eps=1e-5, **settings)
        for step in range(20):
            for p, q in zip(own, theirs):
                p.grad = torch.randn(p.shape, generator=g) * 10.0 ** (step % 4)
                q.grad = p.grad.clone()
            if own_kind is RMSprop:
                with pytest.MonkeyPatch.context() as m:
                    a.step()
                    m.setattr(library, "found", None)
                    b.step()
            else:
                a.step()
                b.step()
        for p, q in zip(own, theirs):
            torch.testing.assert_close(p, q, rtol=2e-5, atol=2e-6)


def test_a_moment_that_fades_becomes_zero_and_never_subnormal() -> None:
    p = torch.ones(8, requires_grad=True)
    adam = Adam([p], betas=(0.5, 0.5))
    for step in range(300):
        p.grad = torch.full((8,), 1.0 if step == 0 else 0.0)
        adam.step()
    assert (adam.state_dict()["averages"][0] == 0.0).all()
    assert (adam.state_dict()["squares"][0] == 0.0).all()


def test_norms_are_torchs() -> None:
    tensors = [torch.linspace(-3, 3, n) for n in (1, 9, 64, 1001)] + [torch.zeros(0)]
    for found, x in zip(updates.squares(tensors), tensors):
        assert found == pytest.approx(float(x.double().square().sum()), rel=1e-7)


@pytest.mark.parametrize("shape", [(64, 4), (2, 64), (16, 3, 4, 4), (1, 1)])
def test_starts_are_orthogonal(shape: tuple[int, ...]) -> None:
    weight = torch.empty(shape)
    elementwise.orthogonal_(weight, 2.0)
    flat = weight.flatten(1)
    gram = flat @ flat.t() if flat.shape[0] <= flat.shape[1] else flat.t() @ flat
    torch.testing.assert_close(gram, 4.0 * torch.eye(len(gram)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("net", [{}, {"squash": True}, {"recurrent": "lstm"}])
def test_the_first_ratio_is_exactly_one(net: dict[str, Any]) -> None:
    import penstock as ps
    from penstock.learn.rows.postprocess import as_tensors

    for env in ("CartPole-v1", "Pendulum-v1") if "squash" not in net else ("Pendulum-v1",):
        sampler = ps.SerialSampler(T=8, B=7).build(env, 1)
        policy = ps.PPO(net=ps.Net(hidden=(24, 24), **net)).build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        batch, _ = sampler.obtain_samples(0)
        batch.info["logp"][1:] += 1e-4  # as if something else had computed it
        batch.info["logp"][0] += 0.25  # as if another policy had acted
        data = policy.postprocess(as_tensors(batch, policy.device))
        inputs = data.inputs if policy.recurrent else data.inputs.flat()
        with torch.no_grad():
            logp = policy.agent(inputs, data.state).dist.log_prob(batch_actions(data, policy.recurrent))
        valid = torch.as_tensor(batch.valid)
        assert torch.equal(logp.reshape(valid.shape)[1:][valid[1:]], data["logp"][1:][valid[1:]])
        assert torch.equal(data["logp"][0], torch.as_tensor(batch.info["logp"][0]))
        policy.version = 5  # the batch is of an earlier one: what was recorded counts
        recorded = policy.postprocess(as_tensors(batch, policy.device))["logp"]
        assert torch.equal(recorded, torch.as_tensor(batch.info["logp"]))


def test_batches_of_other_policies_keep_what_they_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """IMPALA's ratios are to the policy that acted, wherever it did."""
    import penstock as ps
    from penstock.learn.rows.postprocess import as_tensors

    sampler = ps.SerialSampler(T=8, B=4).build("CartPole-v1", 1)
    for algo, changes in ((ps.PPO(), True), (ps.IMPALA(), False)):
        policy = algo.build(sampler.spec, seed=1)
        sampler.initialize(policy.agent)
        batch, _ = sampler.obtain_samples(0)
        recorded = as_tensors(batch, policy.device)
        recorded.info["logp"] = recorded.info["logp"] + 1e-4
        seen: list[Tensor] = []
        inner = policy.postprocess_fn

        def look(agent: Any, given: Any, cfg: Any, inner: Any = inner, seen: Any = seen) -> Any:
            seen.append(given.info["logp"])
            return inner(agent, given, cfg)

        policy.postprocess_fn = look
        policy.postprocess(recorded)
        assert torch.equal(seen[0], recorded.info["logp"]) != changes


@pytest.mark.parametrize("width", [3, 5])
def test_what_does_not_fit_is_torchs_error(width: int) -> None:
    from penstock.agents.mlp import MLP

    body = MLP(4, (8, 8))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        body(torch.zeros(2, width))
    body.layers[1] = torch.nn.Linear(7, 8)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), torch.no_grad():
        body(torch.zeros(2, 4))


def test_masks_and_deviations_of_other_shapes_count_as_in_torch() -> None:
    u = torch.full((3, 1), 0.6)
    for mask in (torch.tensor([True, False, False, True]), torch.tensor([[2.0, 0.0, 0.0, 0.5]] * 3)):
        assert dists.Categorical(torch.zeros(3, 4), 0, mask).acted(u)[0].tolist() == [3, 3, 3]
    wide = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])  # of each row
    action, _ = dists.Gaussian(torch.zeros(3, 2), wide, torch.zeros(2), torch.ones(2), (2,)).acted(u.repeat(1, 2))
    torch.testing.assert_close(action, wide.exp() * elementwise.normal(u))


def test_a_distribution_of_ones_own_draws_in_its_own_way() -> None:
    class Cut(dists.Gaussian):
        def sample(self, noise: Tensor) -> Tensor:
            return super().sample(noise).clamp(-0.5, 0.5)

    own = Cut(torch.zeros(2, 1), torch.zeros(1), torch.zeros(1), torch.ones(1), (1,))
    action, logp = dists.acted(own, torch.tensor([[0.01], [0.99]]))
    assert action.flatten().tolist() == [-0.5, 0.5]
    torch.testing.assert_close(logp, own.log_prob(action))


def batch_actions(data: Any, recurrent: bool) -> Tensor:
    return data["action"] if recurrent else data["action"].flatten(0, 1)
