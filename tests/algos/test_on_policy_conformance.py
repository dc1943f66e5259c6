"""A2C, PPO, IMPALA and APPO: losses and their gradients by hand, rows left out, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from penstock.algos import a2c, appo, impala, ppo
from penstock.algos.a2c import A2C
from penstock.algos.appo import APPO
from penstock.algos.impala import IMPALA
from penstock.algos.ppo import PPO
from penstock.core.errors import ConfigError
from tests.algos.by_hand import ROWS, VALUE, Fixed, P, minibatch

EACH: dict[str, tuple[Any, Any]] = {
    "a2c": (A2C, a2c.loss_fn), "ppo": (PPO, ppo.loss_fn), "impala": (IMPALA, impala.loss_fn), "appo": (APPO, appo.loss_fn),
}  # fmt: skip
each_algorithm = pytest.mark.parametrize("name", EACH)
CLIPPED = ("ppo", "appo")


def loss(name: str, agent: Fixed, valid: torch.Tensor | None = None, rows: Any = ROWS, **settings: float) -> Any:
    make, loss_fn = EACH[name]
    return loss_fn(agent, minibatch(valid, **rows), make(**settings))


@each_algorithm
def test_the_loss_by_hand(name: str) -> None:
    """Where ratios count the first row is clipped above, the second below and the third is free."""
    clip = {"clip": 0.2} if name in CLIPPED else {}
    got = loss(name, Fixed(), value_coef=0.5, entropy_coef=0.1, **clip)
    policy_loss = -(2 * math.log(0.5) - 3 * math.log(0.2) + math.log(0.2)) / 3
    if clip:
        policy_loss = -(1.2 * 2 + 0.8 * -3 + 1.0 * 1) / 3
    value_loss = 0.5 * (1 + 4 + 0) / 3
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 3
    ratios = {
        "approx_kl": pytest.approx((0.25 - math.log(1.25) - 0.5 - math.log(0.5)) / 3),
        "clip_fraction": pytest.approx(2 / 3),
    }
    assert {name: float(value) for name, value in got.metrics.items()} == {
        "policy_gradient_loss": pytest.approx(policy_loss),
        "value_loss": pytest.approx(value_loss),
        "entropy_loss": pytest.approx(-entropy),
        "loss": pytest.approx(policy_loss + 0.5 * value_loss - 0.1 * entropy),
        **(ratios if clip else {}),
    }
    assert got.total.item() == pytest.approx(got.metrics["loss"].item())
    assert not any(m.requires_grad for m in got.metrics.values())


@each_algorithm
def test_its_gradient_by_hand(name: str) -> None:
    """-A (onehot - p) / 3, of the row alone that is not clipped where ratios are; values: coef (V - R) / 3."""
    agent = Fixed()
    logits, value = torch.autograd.grad(
        loss(name, agent, value_coef=0.5, entropy_coef=0.0).total, (agent.logits, agent.value)
    )
    chosen = torch.nn.functional.one_hot(ROWS["action"], 3)
    expected = -ROWS["advantage"].unsqueeze(1) * (chosen - P) / 3
    if name in CLIPPED:
        expected[:2] = 0.0
    torch.testing.assert_close(logits, expected)
    torch.testing.assert_close(value, 0.5 * (VALUE - ROWS["return"]) / 3)


@each_algorithm
def test_a_mask_is_the_loss_of_what_is_left(name: str) -> None:
    agent, valid = Fixed(), torch.tensor([True, False, True])
    masked = loss(name, agent, valid, value_coef=0.5, entropy_coef=0.1)
    logits, value = torch.autograd.grad(masked.total, (agent.logits, agent.value))
    assert not logits[1].any() and value.tolist() == [pytest.approx(0.5 * -1 / 2), 0, 0]
    free = loss(name, Fixed(valid), rows={k: v[valid] for k, v in ROWS.items()}, value_coef=0.5, entropy_coef=0.1)
    poisoned = {k: v.masked_fill(~valid, 0 if k == "action" else 1e30) for k, v in ROWS.items()}
    for one in (masked, loss(name, Fixed(), valid, poisoned, value_coef=0.5, entropy_coef=0.1)):
        torch.testing.assert_close(one.total, free.total)
    for key, metric in masked.metrics.items():
        torch.testing.assert_close(metric, free.metrics[key])


SHARES = {"discount": (1.1, -0.1), "gae_lambda": (-0.5, 1.5)}
V_TRACE = {"discount": (1.1,), "vtrace_lambda": (-0.5,)}


@pytest.mark.parametrize(
    ("algo", "refused"),
    [
        (A2C, {"0 to 1": SHARES}),
        (PPO, {"0 to 1": SHARES, "1 or more": {"epochs": (0,), "minibatch": (0,)}}),
        (IMPALA, {"0 to 1": V_TRACE, "more than 0": {"rho_bar": (0.0,)}, "0 or more": {"max_lag": (-1,)}}),
        (APPO, {"0 to 1": V_TRACE, "more than 0": {"rho_bar": (0.0,), "clip": (0.0,)}, "0 or more": {"max_lag": (-1,)},
                "1 or more": {"target_interval": (0,), "target_ratio_bar": (0.5,)}}),
    ],
)  # fmt: skip
def test_settings_that_contradict_are_refused(algo: Any, refused: dict[str, dict[str, Any]]) -> None:
    for expected, settings in refused.items():
        for name, values in settings.items():
            for value in values:
                with pytest.raises(ConfigError) as error:
                    algo(**{name: value})
                assert str(error.value) == f"{name}={value}; expected {expected}"


@pytest.mark.parametrize("algo", [IMPALA, APPO])
def test_ratios_are_bounded_further_than_traces(algo: Any) -> None:
    with pytest.raises(ConfigError, match=r"^c_bar=2\.0, rho_bar=1\.0; expected c_bar <= rho_bar$"):
        algo(c_bar=2.0)
    assert algo(rho_bar=math.inf, c_bar=3.0, max_lag=0).takes_fragments
    assert algo is IMPALA or algo(target_ratio_bar=math.inf).takes_stale
