import math

import pytest
import torch
from torch import Tensor, nn

from penstock.core.errors import ConfigError
from penstock.learn.algorithm import Loss, Optimizers
from penstock.learn.step.gradients import first_wrong, set_gradients


def parameters(*values: list[float]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(v)) for v in values]


def one(params: list[nn.Parameter]) -> Optimizers:
    return {"all": torch.optim.SGD(params, lr=1.0)}


def loss(total: Tensor | dict[str, Tensor]) -> Loss:
    return Loss(total, {})


def grads(params: list[nn.Parameter]) -> list[list[float]]:
    return [p.grad.tolist() for p in params if p.grad is not None]


def test_a_large_gradient_is_scaled_to_the_norm():
    params = parameters([1.0, 1.0], [1.0])
    total = 3 * params[0][0] + 4 * params[1].sum()
    assert max(set_gradients(loss(total), one(params), 0.5).of.values()) == pytest.approx(5)
    assert grads(params) == [pytest.approx([0.3, 0]), pytest.approx([0.4])]


@pytest.mark.parametrize("limit", [None, 5.0, 6.0])
def test_a_gradient_within_the_limit_is_left_alone(limit: float | None):
    params = parameters([1.0, 1.0], [1.0])
    assert max(
        set_gradients(loss(3 * params[0][0] + 4 * params[1].sum()), one(params), limit).of.values()
    ) == pytest.approx(5)
    assert grads(params) == [[3, 0], [4]]


def test_it_is_torchs_clipping():
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(5, 3)
    norm = max(set_gradients(loss(net(x).square().sum()), one(list(net.parameters())), 0.1).of.values())
    ours = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    net(x).square().sum().backward()
    theirs = nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    assert norm == pytest.approx(float(theirs))
    for a, p in zip(ours, net.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-7)


def test_gradients_do_not_accumulate():
    params = parameters([1.0])
    for _ in range(3):
        set_gradients(loss(2 * params[0].sum()), one(params), None)
    assert grads(params) == [[2]]


def test_an_unused_parameter_has_no_gradient():
    params = parameters([1.0], [1.0])
    params[1].grad = torch.ones(1)
    assert max(set_gradients(loss(2 * params[0].sum()), one(params), 1.0).of.values()) == 2
    assert params[1].grad is None
    assert grads(params) == [[1]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_reported_and_not_set(bad: float):
    params = parameters([1.0], [1.0])
    assert not math.isfinite(
        max(set_gradients(loss(bad * params[0].sum() + params[1].sum()), one(params), 1.0).of.values())
    )
    assert grads(params) == []


def test_each_optimizer_has_its_own_loss_and_norm():
    params = parameters([1.0], [1.0], [1.0])
    optimizers: Optimizers = {
        "actor": torch.optim.SGD(params[:1], lr=1.0),
        "critic": torch.optim.SGD(params[1:], lr=1.0),
    }
    shared = params[0].sum() * params[1].sum()  # both losses run through it, each for its own parameters
    totals = {"actor": 3 * shared, "critic": 8 * shared + 6 * params[2].sum()}
    assert max(set_gradients(loss(totals), optimizers, 5.0).of.values()) == pytest.approx(10)
    assert grads(params) == [[3], [4], [3]]
    totals = {"actor": params[0].sum(), "critic": math.nan * params[1].sum()}
    assert set_gradients(loss(totals), optimizers, 5.0).refused is True


def test_groups_of_one_optimizer_share_its_norm():
    params = parameters([1.0], [1.0])
    optimizer = torch.optim.SGD([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}], lr=1.0)
    assert max(set_gradients(loss(3 * params[0].sum() + 4 * params[1].sum()), {"all": optimizer}, 1.0).of.values()) == 5
    assert grads(params) == [pytest.approx([0.6]), pytest.approx([0.8])]


def test_gradients_that_share_memory_are_scaled_once():
    """Autograd hands one tensor to both terms of a sum, expanded if the sum is reduced."""
    params = parameters([1.0, 1.0], [1.0, 1.0])
    assert max(
        set_gradients(loss((params[0] + params[1]).square().sum()), one(params), 1.0).of.values()
    ) == pytest.approx(8)
    assert grads(params) == [pytest.approx([0.5, 0.5])] * 2
    assert max(set_gradients(loss((params[0] + params[1]).sum()), one(params), 1.0).of.values()) == pytest.approx(2)
    assert grads(params) == [pytest.approx([0.5, 0.5])] * 2


def test_losses_and_optimizers_have_the_same_names():
    params = parameters([1.0])
    optimizers: Optimizers = {"actor": torch.optim.SGD(params, lr=1.0)}
    with pytest.raises(ConfigError, match=r"totals for \['all'\]; optimizer_fn gave optimizers \['actor'\]"):
        set_gradients(loss(params[0].sum()), optimizers, None)


def test_a_loss_that_is_not_finite_is_reported_though_its_gradient_is():
    params = parameters([1.0])
    found = set_gradients(loss(params[0].sum() + math.inf), one(params), 1.0)
    assert found.refused is True and first_wrong(found.numbers) == math.inf
    assert grads(params) == []


def test_frozen_parameters_stay_whatever_their_optimizer_holds():
    params = parameters([1.0], [2.0])
    optimizers = {"all": torch.optim.SGD(params, lr=1.0), "other": torch.optim.SGD([*parameters([1.0])], lr=1.0)}
    params[0].grad = torch.ones(1)  # from before it was frozen
    params[0].requires_grad_(False)
    optimizers["other"].param_groups[0]["params"][0].requires_grad_(False)
    total = params[0].sum() * params[1].sum()
    assert max(
        set_gradients(loss({"all": total, "other": torch.zeros(())}), optimizers, None).of.values()
    ) == pytest.approx(1)
    optimizers["all"].step()
    assert [p.tolist() for p in params] == [[1.0], [1.0]]
    params[1].requires_grad_(False)
    with pytest.raises(ConfigError, match=r"every parameter of the optimizers \['all'\] is frozen"):
        set_gradients(loss(torch.zeros(())), optimizers, None)


def test_a_loss_that_reaches_only_parameters_of_no_optimizer_is_refused_though_all_of_its_own_are_frozen():
    frozen, new = parameters([1.0], [2.0])
    optimizers = one([frozen.requires_grad_(False)])
    with pytest.raises(ConfigError, match="no parameter of optimizer 'all' takes part"):
        set_gradients(loss(frozen.sum() * new.sum()), optimizers, None)


def test_replaced_parameters_are_named_as_what_no_optimizer_holds():
    net = nn.Linear(2, 1)
    optimizers = one(list(net.parameters()))
    net.load_state_dict({key: x.clone() for key, x in net.state_dict().items()}, assign=True)
    with pytest.raises(ConfigError, match="assign=True"):
        set_gradients(loss(net(torch.ones(3, 2)).sum()), optimizers, None)


def test_a_norm_group_is_scaled_by_its_own_norm():
    """One norm over all would leave the small group a thousandth of its gradient."""
    params = parameters([1.0, 1.0], [1.0], [1.0], [1.0])
    total = 3 * params[0][0] + 4 * params[1].sum() + 3000 * params[2].sum() + 0.5 * params[3].sum()
    group_of = {id(params[0]): "actor", id(params[1]): "actor", id(params[2]): "critic"}
    found = set_gradients(loss(total), one(params), 1.0, None, group_of)
    assert found.of == pytest.approx({"actor": 5, "critic": 3000, "all": 0.5})
    assert grads(params) == [pytest.approx([0.6, 0]), pytest.approx([0.8]), pytest.approx([1]), [0.5]]
    params[1].requires_grad_(False)
    assert set_gradients(loss(3 * params[0][0] + params[2].sum()), one(params), None, None, group_of).of == {
        "actor": 3,
        "critic": 1,
    }
