"""Does DQN, with all that makes it fast, end up where a few lines of plain torch do?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.core.batch import Inputs, TrainBatch
from penstock.core.spec import EnvSpec, LeafSpec

UPDATES, N, ACTIONS, INTERVAL = 60, 16, 3, 20
VECTOR = LeafSpec("box", (5,), "float32")
IMAGE = LeafSpec("box", (10, 10, 4), "bool")


class Plain(nn.Module):
    """The networks of Young and Tian 2019 (images) and of two layers (vectors), channels first."""

    def __init__(self, images: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 16, 3) if images else None
        self.hidden, self.out = nn.Linear(1024 if images else 5, 32), nn.Linear(32, ACTIONS)

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if self.conv is not None:
            x = torch.relu(self.conv(x.permute(0, 3, 1, 2))).flatten(1)
        return self.out(torch.relu(self.hidden(x)))


def draw(images: bool, rng: np.random.Generator) -> dict[str, Tensor]:
    def obs() -> Tensor:
        return torch.from_numpy(rng.random((N, 10, 10, 4)) < 0.1 if images else rng.random((N, 5), np.float32))

    return {"obs": obs(), "next": obs(), "action": torch.from_numpy(rng.integers(0, ACTIONS, N)),
            "return": torch.from_numpy(rng.normal(size=N).astype(np.float32) * 3.0),
            "discount": torch.from_numpy(np.where(rng.random(N) < 0.2, 0.0, 0.9).astype(np.float32))}  # fmt: skip


@pytest.mark.parametrize("images", [False, True])
def test_many_updates_end_at_the_same_values(images: bool) -> None:
    """Layouts of gradients, clipping, Adam and the copies of the target network included."""
    net = ps.Net(cnn="minatar" if images else "nature", hidden=(32,), activation="relu")
    cfg = ps.DQN(lr=1e-3, discount=0.9, double=False, batch_size=N, max_grad_norm=1.0, net=net)
    policy = cfg.build(EnvSpec(IMAGE if images else VECTOR, LeafSpec("discrete", (), "int64", sizes=(ACTIONS,))), 1)
    agent: Any = policy.agent
    online, target = Plain(images), Plain(images)
    with torch.no_grad():
        for mine, its in zip(online.parameters(), agent.online.parameters(), strict=True):
            mine.copy_(its)
    target.load_state_dict(online.state_dict())
    adam, rng = torch.optim.Adam(online.parameters(), 1e-3), np.random.default_rng(0)
    for update in range(UPDATES):
        x = draw(images, rng)
        with torch.no_grad():
            wanted = x["return"] + x["discount"] * target(x["next"]).amax(1)
        chosen = online(x["obs"]).gather(1, x["action"].unsqueeze(1)).squeeze(1)
        adam.zero_grad()
        F.smooth_l1_loss(chosen, wanted).backward()
        nn.utils.clip_grad_norm_(online.parameters(), 1.0)
        adam.step()
        rows = {key: x[key] for key in ("action", "return", "discount")}
        inputs, following = (Inputs(x[key], *[None] * 3) for key in ("obs", "next"))  # pyright: ignore[reportArgumentType]
        batch = TrainBatch(inputs, {**rows, "next": following, "update": update}, None)
        with torch.no_grad():
            ready = policy.postprocess(batch)  # pyright: ignore[reportArgumentType]
        policy.learn_on_batch(ready)
        if (update + 1) % INTERVAL == 0:
            target.load_state_dict(online.state_dict())
            agent.update_target(1.0)
    for mine, its in zip(online.parameters(), agent.online.parameters(), strict=True):
        torch.testing.assert_close(its, mine, rtol=1e-3, atol=1e-5)
