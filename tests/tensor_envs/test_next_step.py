from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.batch import as_arrays
from penstock.core.errors import ConfigError
from penstock.core.tree import tree_map
from penstock.envs.make import EnvConfig
from penstock.envs.toy import SeedEcho
from penstock.tensor_envs import NextStep
from penstock.tensor_envs.pool import TensorPool
from penstock.testing.pools import check_pool, echo_config
from tests.tensor_envs.echo import as_tensors


class OnDemand:
    """`SeedEcho` in every slot; an episode goes on after its end until `reset_slots`, as in a simulator."""

    def __init__(self, num_envs: int, nested: bool) -> None:
        self.envs = [SeedEcho(nested) for _ in range(num_envs)]
        self.num_envs, self.device, self.closes = num_envs, "cpu", 0
        self.single_observation_space = self.envs[0].observation_space
        self.single_action_space = self.envs[0].action_space

    def _stacked(self, rows: list[Any]) -> Any:
        return as_tensors(tree_map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *rows))

    def reset(self, *, seed: int | None = None) -> Any:
        self.obs = [env.reset(seed=seed and seed + b)[0] for b, env in enumerate(self.envs)]
        return self._stacked(self.obs), {}

    def reset_slots(self, slots: torch.Tensor) -> Any:
        for b in slots.tolist():
            self.obs[b] = self.envs[b].reset()[0]
        shown = list(self.obs)
        for b in set(range(self.num_envs)) - set(slots.tolist()):  # those of the others are not to be used
            shown[b] = self.envs[b].obs_of(np.int64(0), np.int64(0), isinstance(self.obs[b], dict))
        return self._stacked(shown)

    def step(self, actions: Any) -> Any:
        taken = [env.step(tree_map(lambda x, b=b: x[b], as_arrays(actions))) for b, env in enumerate(self.envs)]
        self.obs = [x[0] for x in taken]
        info = {key: torch.tensor([x[4].get(key, float("nan")) for x in taken]) for key in ("echo", "is_success")}
        reward, *flags = (torch.tensor([x[k] for x in taken]) for k in (1, 2, 3))
        return self._stacked(self.obs), reward.double(), *flags, info

    def close(self) -> None:
        self.closes += 1


def make(num_envs: int = 1, nested: bool = False) -> NextStep:
    env = OnDemand(num_envs, nested)
    return NextStep(env, env.reset_slots)


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "nested"])
def test_no_row_of_an_environment_that_resets_on_demand_is_lost(nested: bool) -> None:
    config = EnvConfig(make, {"nested": nested}, info_keys=echo_config().info_keys, checks="always")
    check_pool(lambda: TensorPool(config, 3, 5), T=7)


def test_it_is_closed_once_and_says_what_it_needs() -> None:
    env = make(2)
    env.close()
    env.close()
    assert env.env.closes == 1
    with pytest.raises(ConfigError, match=r"NextStep\(object\): it has no num_envs; expected a batched environment"):
        NextStep(object(), lambda slots: slots)
