from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("tasks", "strength", "strength_report", "strength_settings"):
        sys.modules.pop(name, None)


def test_scores_of_bsuite_by_hand(loaded: Any) -> None:
    score = loaded("tasks").bsuite_score
    assert score("catch", [(0, {"x": 0.25}), (0, {"x": 0.75})]) == 0.5
    assert score("bandit", [(0, {"x": 1.3})]) == 0.0  # worse than the baseline
    assert score("cartpole", [(0, {"x": 0.4, "good": 1.0})]) == pytest.approx(0.5 * (0.6 + 1))
    assert score("discounting_chain", [(0, {"x": 1.0}), (1, {"x": 1.1})]) == pytest.approx(0.5)
    assert score("memory_len", [(0, {"x": 0.74}), (1, {"x": 0.75})]) == 0.5  # passed below 0.75
    assert score("umbrella_length", [(0, {"x": 0.49}), (1, {"x": 0.5}), (2, {"x": 0.9}), (3, {"x": 0.2})]) == 0.5
    assert score("deep_sea_stochastic", [(0, {"x": 300.0, "good": 1.0}), (1, {"x": -1.0, "good": 0.0})]) == 0.5
    # Levels score 0.8 (of 0.7 and 0.9) and 0.4; their mean is 0.6, their deviation 0.2.
    levels = [(0, {"x": 0.3}), (0, {"x": 0.1}), (4, {"x": 0.6})]
    assert score("catch_noise", levels) == pytest.approx(0.5 * (0.6 + 0.4))


class Ends(gym.Env[int, int]):
    """Episodes of two steps that pay 1 and then 2."""

    observation_space: Any = gym.spaces.Discrete(1)
    action_space: Any = gym.spaces.Discrete(1)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return 0, {}

    def step(self, action: int) -> Any:
        self.t += 1
        return 0, float(self.t), self.t == 2, False, {}


def test_a_record_counts_the_steps_and_episodes_of_all_environments(loaded: Any) -> None:
    tasks = loaded("tasks")
    record = tasks.Record(episodes=3)
    envs = [tasks.Recorded(Ends(), record) for _ in range(2)]
    for env in envs:
        env.reset()
    for _ in range(4):
        for env in envs:
            if env.step(0)[2]:
                env.reset()
    assert record.full and record.ends == [(3, 3.0), (4, 3.0), (7, 3.0)] and record.steps == 7
    assert record.curve(40) == [[4, 3.0], [8, 3.0]]  # points every 2 steps, those without an end left out
    assert record.late(7) == 3.0 and record.late(20) is None


def test_sums_of_bsuite_leave_out_episodes_that_have_not_ended(loaded: Any) -> None:
    tasks = loaded("tasks")

    class Walk(tasks.Bsuite):
        """Steps that pay -1, which the sums count at once."""

        def __init__(self, length: int) -> None:
            self.name, self.raw, self.length, self.t, self.total = "mountain_car/0", self, length, 0, 0.0

        def bsuite_info(self) -> dict[str, float]:
            return {"raw_return": self.total}

        def reset(self, **_: Any) -> Any:
            self.t = 0
            return 0, {}

        def step(self, action: int) -> Any:
            self.t, self.total = self.t + 1, self.total - 1.0
            return 0, -1.0, self.t == self.length, False, {}

    record = tasks.Record()
    envs = [tasks.Recorded(Walk(length), record) for length in (2, 3, 100)]
    for _ in range(4):
        for env in envs:
            if env.step(0)[2]:
                env.reset()
    # Two episodes of 2 steps and one of 3; a running one of 1 step, and one of 4.
    assert tasks.bsuite_measure("mountain_car/0", record) == {"x": pytest.approx((-100 + 7 / 3) / 1000)}


def test_deep_sea_is_solved_by_the_episodes_of_all_environments(loaded: Any) -> None:
    tasks = loaded("tasks")

    class Sea(tasks.Bsuite):
        """Episodes of one step, bad or not as told."""

        def __init__(self, *bad: bool) -> None:
            self.name, self.raw, self._size, self._bad, self.t = "deep_sea/0", self, 3, bad, 0

        def bsuite_info(self) -> dict[str, int]:
            return {"total_bad_episodes": sum(self._bad[: self.t])}

        def step(self, action: int) -> Any:
            self.t += 1
            return 0, 0.0, True, False, {}

    record = tasks.Record()
    one, other, _ = (tasks.Recorded(Sea(*bad), record) for bad in ((True, True, True), (True, False), (False,)))
    for env in (one, other, one, one):
        env.step(0)
    assert record.solved_at is None  # four bad ones; the third environment has played none
    other.step(0)
    assert record.solved_at == 5 and tasks.bsuite_measure("deep_sea/0", record) == {"x": 5.0, "good": 1.0}


def rows(**scores: list[float]) -> list[dict[str, Any]]:
    return [
        {"task": "classic/CartPole-v1", "library": name, "algo": "random" if name == "random" else "ppo", "seed": seed, "last": last,
         "cpu_s": 1.0, "steps": 1, "curve": [[1, last]], "date": "2026-01-01"}
        for name, found in scores.items() for seed, last in enumerate(found)
    ]  # fmt: skip


def test_the_report_scales_scores_and_says_which_is_below(loaded: Any) -> None:
    report, settings = loaded("strength_report"), loaded("strength_settings")
    found = report.Results(settings.CLASSIC, rows(random=[20.0], penstock=[100.0, 120.0], sb3=[400.0, 440.0]))
    assert found.scaled("penstock/ppo") == {"CartPole-v1": [0.2, 0.25]}  # the best mean is 420
    one = found.comparison("penstock/ppo", "sb3/ppo")
    assert one.better == (0.0, 0.0, 0.0) and one.verdict == "**below**" and one.scaled[1][0] == 1.0
    assert found.comparison("penstock/sac", "sb3/sac") is None
    single = report.Results(settings.CLASSIC, rows(random=[20.0], penstock=[100.0], sb3=[40.0]))
    assert single.comparison("penstock/ppo", "sb3/ppo").verdict == "one seed: open"
    lines = report.by_task(found)
    assert next(line for line in lines if "| CartPole-v1 | 50,000 | PPO |" in line).startswith(
        "| CartPole-v1 | 50,000 | PPO | 2 | 110 [100, 120] | 110 [100, 120] | 1 | SB3 PPO | 2 | 420 [400, 440] |"
    )
    assert next(line for line in lines if "| LunarLander-v3 | 100,000 | DQN |" in line).count("not run") == 2


def test_parts_are_named_once_and_found_by_pattern(loaded: Any) -> None:
    strength = loaded("strength")
    parts = strength.parts()
    assert len({part.key for part in parts}) == len(parts)
    assert [part.seed for part in parts] == sorted(part.seed for part in parts)
    ours = strength.wanted(parts, "classic/CartPole-v1/*/ppo/1,bsuite/catch/0/sb3/ppo")
    assert [part.key for part in ours][:2] == ["classic/CartPole-v1/penstock/ppo/1", "classic/CartPole-v1/sb3/ppo/1"]
    assert {part.seed for part in ours} == {1, 2, 3} and len(ours) == 5  # seed 1 is not 10
