import math
from typing import Any

import pytest
import torch

from penstock.agents.actor_critic import Output
from penstock.agents.distributions import Categorical
from penstock.algos.a2c import A2C, loss_fn
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.errors import ConfigError

P = torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]], dtype=torch.float64)
VALUE = torch.tensor([1.0, 2, 5], dtype=torch.float64)
ROWS = {
    "action": torch.tensor([0, 1, 2]),
    "advantage": torch.tensor([2.0, -3, 1], dtype=torch.float64),
    "return": torch.tensor([2.0, 0, 5], dtype=torch.float64),
}


class Fixed:
    """Answers with given probabilities and values."""

    def __init__(self) -> None:
        self.logits, self.value = P.log().requires_grad_(), VALUE.clone().requires_grad_()

    def __call__(self, inputs: Inputs, state: Any = None) -> Output:
        return Output(Categorical(self.logits), self.value)


def loss(agent: Fixed, valid: torch.Tensor | None = None, **settings: float) -> Any:
    batch = TrainBatch(Inputs(None, None, None, None), ROWS, valid)
    return loss_fn(agent, batch, A2C(**settings))  # pyright: ignore


def test_the_loss_by_hand():
    got = loss(Fixed(), value_coef=0.5, entropy_coef=0.1)
    policy_loss = -(2 * math.log(0.5) - 3 * math.log(0.2) + math.log(0.2)) / 3
    entropy = -sum(p * math.log(p) for row in P.tolist() for p in row) / 3
    assert {name: m.item() for name, m in got.metrics.items()} == {
        "policy_gradient_loss": pytest.approx(policy_loss),
        "value_loss": pytest.approx(0.5 * 5 / 3),
        "entropy_loss": pytest.approx(-entropy),
        "loss": pytest.approx(policy_loss + 0.5 * 0.5 * 5 / 3 - 0.1 * entropy),
    }
    assert got.total.item() == got.metrics["loss"].item()
    assert not any(m.requires_grad for m in got.metrics.values())


def test_its_gradient_by_hand():
    agent = Fixed()
    logits, value = torch.autograd.grad(loss(agent, entropy_coef=0.0).total, (agent.logits, agent.value))
    chosen = torch.nn.functional.one_hot(ROWS["action"], 3)
    torch.testing.assert_close(logits, -ROWS["advantage"].unsqueeze(1) * (chosen - P) / 3)
    torch.testing.assert_close(value, 0.5 * (VALUE - ROWS["return"]) / 3)


def test_a_mask_leaves_rows_out():
    agent = Fixed()
    valid = torch.tensor([True, False, True])
    logits, value = torch.autograd.grad(loss(agent, valid, entropy_coef=0.1).total, (agent.logits, agent.value))
    assert not logits[1].any()
    assert value[1] == 0
    assert value[0] == pytest.approx(0.5 * -1 / 2)


def test_settings_that_contradict_are_refused():
    for settings, message in (
        ({"discount": 1.1}, r"^discount=1\.1; expected 0 to 1$"),
        ({"gae_lambda": -0.5}, r"^gae_lambda=-0\.5; expected 0 to 1$"),
    ):
        with pytest.raises(ConfigError, match=message):
            A2C(**settings)
