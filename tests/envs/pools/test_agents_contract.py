"""Environments of many agents that break the contract: the errors name environment, slot, episode and agent."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.envs.agent_observations import read_agents
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.seats import seat_agents
from penstock.envs.toy import EchoAgents, EchoTurns
from tests.envs.pools.plain_loop import Driver, seated


class BadAgents(EchoAgents):
    """Breaks the contract in one way in the third step, of agent_1."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(3, 9, steady=True, masks=fault == "mask")
        self.fault = fault
        self._kept: dict[str, Any] = {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        obs, rewards, ends, cuts, infos = super().step(actions)
        if self.fault == "mutates":
            for agent, x in obs.items():
                obs[agent] = self._kept.setdefault(agent, x)
                self._kept[agent][:] = x
        if self.fault == "revives" and self.t == 2:
            ends["agent_1"] = True
            self.agents = ["agent_0", "agent_2"]
        if self.t == 3:
            agent = "agent_1"
            if self.fault == "drops":
                self.agents = ["agent_0", "agent_2"]
            elif self.fault == "revives":
                self.agents = ["agent_0", "agent_1", "agent_2"]
                obs[agent] = obs["agent_0"]
            elif self.fault == "stays":
                ends[agent] = True
            elif self.fault == "absent":
                rewards["nobody"] = 1.0
            elif self.fault == "unknown":
                self.agents = [*self.agents, "nobody"]
            elif self.fault == "mask":
                infos[agent]["action_mask"] = np.zeros(3, np.int8)
            elif self.fault == "no mask":
                del infos[agent]["action_mask"]
            elif self.fault in ("obs", "rewards", "ends", "cuts"):
                del {"obs": obs, "rewards": rewards, "ends": ends, "cuts": cuts}[self.fault][agent]
            elif self.fault == "flag":
                ends[agent] = None  # pyright: ignore[reportArgumentType]
            elif self.fault == "other order":
                ends = {"agent_1": True, "agent_0": False, "agent_2": False}
            elif self.fault == "array":
                rewards[agent] = np.zeros(2)
            elif self.fault == "nan":
                rewards[agent] = float("nan")
            elif self.fault == "dtype":
                obs[agent] = obs[agent].astype(np.float64)
            elif self.fault == "nan obs":
                obs[agent] = obs[agent] * np.float32("nan")
            elif self.fault == "raises":
                raise RuntimeError("broken")
            elif self.fault == "tuple":
                return obs, rewards, ends, infos
        return obs, rewards, ends, cuts, infos


PARALLEL = {
    "drops": ("agent_1", "without an end"),
    "revives": ("agent_1", "ended earlier in this episode"),
    "stays": ("agent_1", "env.agents names it still"),
    "absent": ("nobody", "reaches nobody"),
    "unknown": ("nobody", "none of possible_agents"),
    "mask": ("agent_1", "mask is all zero"),
    "obs": ("agent_1", "observations lack it"),
    "rewards": ("agent_1", "rewards lack it"),
    "ends": ("agent_1", "terminations lack it"),
    "cuts": ("agent_1", "truncations lack it"),
    "array": ("agent_1", "expected one real number"),
    "nan": ("agent_1", "finite"),
    "dtype": ("agent_1", "got dtype float64"),
    "nan obs": ("agent_1", "finite"),
    "flag": ("agent_1", "expected a bool"),
    "other order": ("agent_1", "env.agents names it still"),
    "raises": (None, "broken"),
    "tuple": (None, "a tuple of five dicts"),
}


def bad_env(fault: str) -> BadAgents:
    return BadAgents(fault)


@pytest.mark.parametrize("fault", PARALLEL)
def test_parallel_faults_name_agent_slot_and_episode(fault: str) -> None:
    agent, words = PARALLEL[fault]
    config = seated(BadAgents, kwargs={"fault": fault})
    with pytest.raises(EnvWorkerError) as caught:
        Driver(config, 2, 8).play(1)
    text = str(caught.value)
    assert re.search(r"slot [01] of .*BadAgents in step\(\) at episode 0, step 2, seed \d+", text), text
    assert words in text
    assert agent is None or f"agent {agent!r}" in text
    assert isinstance(caught.value, EnvContractError) == (fault != "raises")
    with pytest.raises(EnvWorkerError, match=re.escape(words)):
        check_env(EnvConfig(BadAgents, {"fault": fault}))


class BadTurns(EchoTurns):
    """The same of agents that take turns."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(3, 9, steady=True)
        self.fault = fault
        self._kept: dict[str, Any] = {}

    def observe(self, agent: str) -> Any:
        obs = super().observe(agent)
        if self.fault == "mutates":
            kept = self._kept.setdefault("all", obs)
            kept[:] = obs
            return kept
        if self.t == 3 and self.fault == "dtype":
            return obs.astype(np.float64)
        return obs * np.float32("nan") if self.t == 3 and self.fault == "nan obs" else obs

    def last(self, observe: bool = True) -> tuple[Any, ...]:
        obs, reward, end, cut, info = super().last(observe)
        if self.t == 3:
            if self.fault == "flag":
                return obs, reward, None, cut, info
            if self.fault == "nan":
                return obs, float("nan"), end, cut, info
            if self.fault == "tuple":
                return obs, reward, end, info
        return obs, reward, end, cut, info

    def step(self, action: Any) -> None:
        super().step(action)
        if self.t == 3:
            if self.fault == "drops":
                self.agents = ["agent_0", "agent_2"]
            elif self.fault == "dead":
                self.agent_selection = "nobody"
            elif self.fault == "absent":
                self.rewards["nobody"] = 1.0
            elif self.fault == "raises":
                raise RuntimeError("broken")
        gone = {"revives": "agent_0", "dead acts": "agent_2"}.get(self.fault)
        if self.t == 2 and gone in self.agents:
            self.end(gone)
            self._turn()
        elif self.t == 3 and gone is not None and gone not in self.agents:
            self.enter(gone)


TURNS = {
    "drops": ("agent_1", "without an end"),
    "revives": ("agent_0", "ended earlier in this episode"),
    "dead acts": ("agent_2", "a dead agent must act"),
    "dead": (None, "agent_selection is 'nobody'"),
    "dtype": ("agent_0", "got dtype float64"),
    "nan obs": ("agent_0", "finite"),
    "nan": ("agent_0", "finite"),
    "flag": ("agent_0", "expected a bool"),
    "tuple": ("agent_0", "expected a tuple"),
    "raises": ("agent_2", "broken"),
}


@pytest.mark.parametrize("fault", TURNS)
def test_faults_of_turns_name_agent_slot_and_episode(fault: str) -> None:
    agent, words = TURNS[fault]
    config = seated(BadTurns, kwargs={"fault": fault})
    with pytest.raises(EnvWorkerError) as caught:
        Driver(config, 2, 8).play(1)
    text = str(caught.value)
    step = 1 if fault == "dead acts" else 2  # moves are counted from 0, as steps are
    assert re.search(rf"slot [01] of .*BadTurns in step\(\) at episode 0, step {step}, seed \d+", text), text
    assert words in text
    assert agent is None or f"agent {agent!r}" in text, text
    with pytest.raises(EnvWorkerError, match=re.escape(words)):
        check_env(EnvConfig(BadTurns, {"fault": fault}))


class BadReset(EchoTurns):
    """Raises in its second reset, or shows something wrong after it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__(2, 4, steady=True)
        self.fault, self.resets = fault, 0

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        self.resets += 1
        if self.resets == 3 and self.fault == "raises":  # the first one was to read what the environment shows
            raise RuntimeError("broken")
        super().reset(seed)

    def observe(self, agent: str) -> Any:
        obs = super().observe(agent)
        return obs.astype(np.float64) if self.resets == 3 and self.fault == "dtype" else obs


@pytest.mark.parametrize("fault", ["raises", "dtype"])
def test_what_is_wrong_at_a_reset_of_turns_is_said_to_be_of_the_reset(fault: str) -> None:
    with pytest.raises(EnvWorkerError, match=r"BadReset in reset\(\) at episode [12], step 0, seed \d+"):
        Driver(seated(BadReset, kwargs={"fault": fault}), 1, 16).play(3)


@pytest.mark.parametrize("cls", [BadAgents, BadTurns])
def test_the_check_finds_memory_that_changes(cls: Any) -> None:
    with pytest.raises(EnvContractError, match=r"slot 0 of .* at episode 0, agent 'agent_\d'.*has changed"):
        check_env(EnvConfig(cls, {"fault": "mutates"}))


def test_the_check_finds_memory_that_changes_below_wrappers() -> None:
    pytest.importorskip("pettingzoo")
    from pettingzoo import AECEnv  # pyright: ignore[reportMissingTypeStubs]

    class Below(BadTurns, AECEnv):  # `last` is PettingZoo's own, and read past
        last: Any = AECEnv.last
        render: Any = AECEnv.render

    def made(fault: str) -> Any:
        return Below(fault)

    with pytest.raises(EnvContractError, match=r"at episode 0, agent 'agent_\d'.*has changed"):
        check_env(EnvConfig(made, {"fault": "mutates"}))
    check_env(EnvConfig(made, {"fault": "mutates"}, checks="off"))
    check_env(EnvConfig(made, {"fault": "mutates"}, wrappers=("penstock.envs.wrappers:copy_obs",)))


@pytest.mark.parametrize("cls", [EchoAgents, EchoTurns])
@pytest.mark.parametrize(
    ("odd", "kind"),
    [(lambda x: x.flat, "flatiter"), (lambda x: (i for i in x), "generator"), (memoryview, "memoryview"),
     (lambda x: torch.tensor(x, requires_grad=True) * 2, "Tensor"), (lambda x: {0: 1}.keys(), "dict_keys"),
     (lambda x: x.tolist(), "list"), (lambda x: None, "NoneType")],
)  # fmt: skip
def test_the_check_judges_observations_that_cannot_be_copied(cls: Any, odd: Any, kind: str) -> None:
    class Odd(cls):
        def observe(self, agent: str) -> Any:
            return odd(super().observe(agent))

    with pytest.raises(EnvContractError, match=rf"in reset\(\) at episode 0.*, agent 'agent_\d': obs: got {kind}"):
        check_env(Odd)


def test_memory_that_changes_may_be_copied() -> None:
    check_env(EnvConfig(BadAgents, {"fault": "mutates"}, wrappers=("penstock.envs.wrappers:copy_obs",)))


def test_the_check_finds_rewards_of_agents_that_are_not_there() -> None:
    with pytest.raises(EnvContractError, match="'nobody': rewards it with"):
        check_env(EnvConfig(BadTurns, {"fault": "absent"}))


def test_more_agents_than_seats_name_agent_slot_and_episode() -> None:
    config = seated(EchoAgents, ("a", "b"), lambda agent, episode, seed: "a", {"a": 1, "b": 1}, kwargs={"steady": True})
    with pytest.raises(
        ConfigError,
        match=r"slot 0 of .*EchoAgents in reset\(\) at episode 0.*'agent_1' finds no seat of policy 'a': 1 seat",
    ):
        Driver(config, 2, 4).play(1)


def test_a_mapping_that_changes_within_an_episode() -> None:
    said: list[int] = []

    def fickle(agent: str, episode: int, seed: int) -> str:
        said.append(0)
        return "a" if len(said) < 3 * 3 * 64 or len(said) % 2 else "b"

    config = seated(EchoAgents, ("a", "b"), lambda *_: "a", {"a": 3, "b": 3})
    assert config.seating is not None
    object.__setattr__(config.seating, "mapping", fickle)
    with pytest.raises(ConfigError, match=r"changes within an episode.*'agent_\d' in episode \d+, seed \d+"):
        Driver(config, 2, 64).play(9)


def raising(agent: str, episode: int, seed: int) -> str:
    raise KeyError(agent)


@pytest.mark.parametrize(
    ("policies", "mapping", "seats", "words"),
    [
        (("a",), {"agent_0": "a", "agent_1": "b"}, None, "names 'b' for agent 'agent_1'"),
        (
            ("a",),
            raising,
            {"a": 2},
            r"policy_mapping_fn raised KeyError: 'agent_0' for agent 'agent_0' in episode 0, seed \d",
        ),
        (("a",), {"agent_0": "a"}, None, r"no policy for agent 'agent_1', only for \['agent_0'\]; add"),
        (("a", "b"), {"agent_0": "a", "agent_1": "a"}, None, "policy 'b' plays no agent"),
        (("a", "b"), None, None, "without a policy_mapping_fn"),
        (("a", "b"), lambda *_: "a", None, r"policy 'a' has 0 seats.*seats="),
        (("a",), {"agent_0": "a", "agent_1": "a", "agent_7": "a"}, None, "names agent 'agent_7'"),
        (("a",), None, {"b": 1}, "seats names the policy 'b'"),
        (("a",), 3, None, "expected a dict of agent to policy id"),
    ],
)
def test_seatings_that_do_not_fit(policies: Any, mapping: Any, seats: Any, words: str) -> None:
    found = read_agents(EnvConfig(EchoAgents, {"agents": 2}))
    with pytest.raises(ConfigError, match=words):
        seat_agents(found, policies, mapping, seats)
