"""Noise from a generator of the device; torch's CPU stands for one."""

from __future__ import annotations

import pytest
import torch

from penstock.core.noise import NOTHING_HELD, HeldNoise, Noise, Purpose
from penstock.samplers.tensors.noise import rows_on

CPU = torch.device("cpu")
HERE = Noise(3, Purpose.ACT, 5)


def drawn(noise: Noise = HERE, ranks: bool = False, policy: int = 0, held: HeldNoise = NOTHING_HELD) -> torch.Tensor:
    return rows_on(CPU, noise, 6, 50, 4, ranks, policy, held)


def test_it_follows_from_its_address() -> None:
    assert torch.equal(drawn(), drawn())
    others = [HERE._replace(seed=4), HERE._replace(purpose=Purpose.EVALUATE), HERE._replace(batch=6)]
    for other in (*map(drawn, [*others, HERE._replace(first_slot=50)]), drawn(policy=1)):
        assert (other != drawn()).float().mean() > 0.99
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn()
    assert torch.equal(state, torch.get_rng_state()), "the global generator was used"


def test_it_is_uniform_in_the_open_interval() -> None:
    x = rows_on(CPU, HERE, 100, 100, 100, False, 0, NOTHING_HELD).double()
    assert x.min() > 0 and x.max() < 1
    assert torch.equal(x * 2**24 % 2, torch.ones_like(x)), "odd multiples of 2^-24, as numpy's are"
    assert x.mean().item() == pytest.approx(0.5, abs=2e-3) and x.var().item() == pytest.approx(1 / 12, abs=1e-3)


@pytest.mark.parametrize("steps", [None, 4])
def test_what_is_held_stays_for_its_steps_over_batches(steps: int | None) -> None:
    """Rows that have equal numbers are those that have them in numpy's."""
    held = HeldNoise(2, steps)
    ours, theirs = (
        torch.cat([torch.as_tensor(rows(HERE._replace(batch=b))) for b in (5, 6)])[:, 0, :2]
        for rows in (lambda x: drawn(x, held=held), lambda x: x.rows(6, 50, 4, held=held))
    )
    assert torch.equal(*((x[:, None] == x).all(-1) for x in (ours, theirs)))
    assert torch.equal(drawn(held=held)[..., 2:], rows_on(CPU, HERE, 6, 50, 2, False, 0, NOTHING_HELD))


@pytest.mark.parametrize("purpose", [Purpose.ACT, Purpose.EVALUATE_GREEDILY])
def test_ranks_are_the_numbers_of_slots(purpose: Purpose) -> None:
    noise = HERE._replace(purpose=purpose, first_slot=7)
    theirs = torch.from_numpy(noise.rows(6, 50, 4, ranks=True))
    assert torch.equal(drawn(noise, ranks=True)[..., -1], theirs[..., -1])
