from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from penstock.agents.recurrent import Memory
from penstock.core.tree import tree_leaves, tree_map

Kind = Literal["lstm", "gru"]
KINDS = ("lstm", "gru")


def case(kind: Kind, T: int = 12, B: int = 4, resets: float = 0.2) -> tuple[Memory, Tensor, Tensor, Any]:
    memory = Memory(kind, 3, 5)
    x, first = torch.randn(T, B, 3), torch.rand(T, B) < resets
    state = tree_map(torch.randn_like, memory.initial_state(B))
    return memory, x, first, state


def reference_cell(memory: Memory, kind: Kind) -> nn.Module:
    """torch's single-step cell with the same parameters: another implementation of the same equations."""
    cell = (nn.LSTMCell if kind == "lstm" else nn.GRUCell)(3, 5)
    cell.load_state_dict({name.removesuffix("_l0"): p for name, p in memory.cell.state_dict().items()})
    return cell


@pytest.mark.parametrize("kind", KINDS)
def test_one_unroll_is_the_stepwise_loop_with_state_zeroed_by_hand(kind: Kind):
    for T, resets in ((1, 0.0), (1, 1.0), (12, 0.0), (12, 0.2), (12, 1.0)):
        memory, x, first, state = case(kind, T, resets=resets)
        out, last = memory(x, first, state)
        cell, held = reference_cell(memory, kind), tree_map(torch.clone, state)
        for t in range(T):
            for b in range(4):
                if first[t, b]:
                    for leaf in tree_leaves(held):
                        leaf[b] = 0
            with torch.no_grad():
                new = cell(x[t], (held["h"], held["c"]) if kind == "lstm" else held["h"])
            held = {"h": new[0], "c": new[1]} if kind == "lstm" else {"h": new}
            torch.testing.assert_close(out[t], held["h"], rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(tree_leaves(last), tree_leaves(held)):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_gives_the_same_as_at_once(kind: Kind):
    memory, x, first, state = case(kind)
    out, last = memory(x, first, state)
    stepwise: list[Tensor] = []
    for t in range(len(x)):
        one, state = memory(x[t : t + 1], first[t : t + 1], state)
        stepwise.append(one)
    torch.testing.assert_close(torch.cat(stepwise), out, rtol=1e-6, atol=1e-6)
    for a, b in zip(tree_leaves(state), tree_leaves(last)):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_from_before_a_reset_matters_after_it(kind: Kind):
    memory, x, first, state = case(kind)
    first[:] = False
    first[5, 1] = True
    out, _ = memory(x, first, state)
    changed = x.clone()
    changed[:5] += 10
    other, _ = memory(changed, first, tree_map(lambda s: s + 10, state))
    assert torch.equal(other[5:, 1], out[5:, 1])
    assert not torch.allclose(other[5:, 0], out[5:, 0])
    fresh, _ = memory(x[5:], torch.zeros(7, 4, dtype=torch.bool), memory.initial_state(4))
    torch.testing.assert_close(fresh[:, 1], out[5:, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_do_not_cross_a_reset(kind: Kind):
    memory, x, first, state = case(kind)
    first[:] = False
    first[5, 1] = True
    x.requires_grad_()
    state = tree_map(lambda s: s.requires_grad_(), state)
    out, _ = memory(x, first, state)
    inputs, *states = torch.autograd.grad(out[8].sum(), [x, *tree_leaves(state)])
    assert (inputs[5:9, 1].abs().sum(-1) > 0).all()
    assert not inputs[:5, 1].any()
    assert not inputs[9:].any()
    assert (inputs[:9, 0].abs().sum(-1) > 0).all()
    assert all(not s[1].any() and s[0].any() for s in states)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_row_may_open_an_episode(kind: Kind):
    memory, x, first, state = case(kind)
    first[:] = False
    first[0] = True
    out, _ = memory(x, first, state)
    zeroed, _ = memory(x, torch.zeros_like(first), memory.initial_state(4))
    torch.testing.assert_close(out, zeroed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_left_alone_and_starts_at_zero(kind: Kind):
    memory, x, first, state = case(kind)
    before = tree_map(torch.clone, state)
    memory(x, first, state)
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(state), tree_leaves(before)))
    initial = memory.initial_state(3)
    assert sorted(initial) == (["c", "h"] if kind == "lstm" else ["h"])
    assert all(leaf.shape == (3, 5) and not leaf.any() for leaf in tree_leaves(initial))
    if kind == "lstm":
        initial["h"] += 1
        assert not initial["c"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_it_starts_orthogonal(kind: Kind):
    memory = Memory(kind, 3, 5)
    for name, parameter in memory.cell.named_parameters():
        if "bias" in name:
            assert not parameter.any()
        else:
            torch.testing.assert_close(parameter.T @ parameter, torch.eye(parameter.shape[1]), rtol=0, atol=1e-5)
