"""Action masks of many agents, in infos and in observations: in every sampler only what they allow is played."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import EnvWorkerError
from penstock.core.spec import MASK_KEY
from penstock.envs.toy import EchoAgents
from tests.samplers.test_many_placed import PLACED
from tests.slow import slow

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked")]
SAMPLERS = {"serial": lambda T: ps.SerialSampler(T, 5), **PLACED}


class Legal(EchoAgents):
    """Masks in infos, another one in every step; what they forbid is an error."""

    blank = False

    def __init__(self) -> None:
        super().__init__(3, 9, masks=True)
        self.masks: dict[str, Any] = {}

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        obs, infos = super().reset(seed=seed, options=options)
        self._show(infos)
        return obs, infos

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        assert all(self.masks[agent][action] for agent, action in actions.items()), (self.masks, actions)
        found = super().step(actions)
        self._show(found[-1])
        return found

    def _show(self, infos: dict[str, Any]) -> None:
        for k, agent in enumerate(sorted(infos)):
            mask = np.eye(3, dtype=np.int8)[(self.t + k) % 3] + np.eye(3, dtype=np.int8)[k % 3]
            self.masks[agent] = infos[agent]["action_mask"] = np.minimum(mask, 1) * (not (self.blank and self.t == 3))


class Blank(Legal):
    blank = True


def played(env: Any, settings: Any) -> list[Any]:
    """The batches of PPO's own agent, whose actions are looked at."""
    algo = ps.Policies({"all": ps.PPO(net=ps.Net(hidden=(4,)))})
    sampler = settings.build(algo.seat(env), 1)
    try:
        sampler.initialize(algo.build(sampler.specs, 1).agents)
        out: list[Any] = []
        for k in range(4):
            batch = sampler.obtain_samples(k)[0]["all"]
            mask = batch.obs[MASK_KEY][:-1]
            allowed = np.take_along_axis(mask, batch.action[..., None].astype(np.int64), -1)[..., 0]
            assert allowed[batch.valid].all()
            assert 0 < mask[batch.valid].mean() < 1
            out.append([batch.action.tobytes(), batch.valid.tobytes(), mask[batch.valid].tobytes()])
    finally:
        sampler.shutdown()
    return out


@pytest.mark.parametrize("names", [["serial", "cpu-1"], *slow([*SAMPLERS])], ids=["one", "all"])
@pytest.mark.parametrize("env", [Legal, "pettingzoo:classic/tictactoe_v3"], ids=["infos", "observations"])
def test_only_what_masks_allow_is_played(env: Any, names: list[str]) -> None:
    if isinstance(env, str):
        pytest.importorskip("pettingzoo")
    found = {name: played(env, SAMPLERS[name](6)) for name in names}
    assert all(each == found["serial"] for each in found.values())


def test_a_worker_names_the_agent_whose_mask_allows_nothing() -> None:
    where = r"(?s)slot 0 .*Blank.*episode 0.*agent 'agent_\d'.*mask is all zero"
    with pytest.raises(EnvWorkerError, match=where):
        played(Blank, ps.CpuSampler(6, 2, workers=1))
