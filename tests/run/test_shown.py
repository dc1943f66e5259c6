"""Objects that explain themselves: signatures, texts of fields, and short reprs."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.names.hints import settings_classes

SETTINGS = sorted({cls.__name__ for classes in settings_classes().values() for cls in classes})
SHORT = {"steps": 32, "eval_episodes": 1, "eval_max_steps": 5, "progress": "off"}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_signature_shows_the_fields_and_help_their_texts(name: str) -> None:
    cls = getattr(ps, name)
    fields = [f.name for f in dataclasses.fields(cls)]
    assert list(inspect.signature(cls).parameters) == fields
    said = inspect.getdoc(cls) or ""
    assert "Args:" in said and all(f"    {field}: " in said for field in fields)
    with pytest.raises((ps.ConfigError, TypeError), match="nowhere_known"):
        cls(nowhere_known=1)


def test_the_texts_of_a_subclass_are_not_those_of_its_base() -> None:
    class Mine(ps.Net):
        """Mine."""

    assert Mine.__doc__ == "Mine." and Mine().hidden == (64, 64)


def test_an_experiment_is_its_difference_to_the_defaults() -> None:
    exp = ps.Experiment("CartPole-v1", ps.PPO(lr=1e-3, net=ps.Net(hidden=(8,))), run=ps.RunConfig(seed=2))
    assert repr(exp) == (
        "Experiment(env='CartPole-v1', algo=PPO(lr=0.001, net=Net(hidden=(8,))), run=RunConfig(seed=2))"
    )
    assert eval(repr(exp), {name: getattr(ps, name) for name in ("Experiment", "PPO", "Net", "RunConfig")}) == exp
    two = ps.Policies({"a": ps.PPO(), "b": ps.DQN(lr=0.1)}, {"x": "a", "y": "b"})
    assert "algos={'a': PPO(), 'b': DQN(lr=0.1)}" in repr(ps.Experiment("CartPole-v1", two))


def test_episodes_are_counted_and_averaged() -> None:
    some = ps.Episodes(np.array([1.0, 3.0]), np.array([5, 6]), np.zeros(2), np.zeros(2, np.int64), np.ones(2, bool))
    assert repr(some) == "Episodes(2: return 2.0 +- 1.0, length 5.5)"
    assert repr(ps.Episodes()) == "Episodes(none)"


def test_a_run_its_policy_and_its_result_are_a_line_each(tmp_path: Path) -> None:
    settings: Any = {**SHORT, "dir": str(tmp_path / "run")}
    exp = ps.Experiment(
        "CartPole-v1", ps.PPO(net=ps.Net(hidden=(8,))), ps.SerialSampler(T=8, B=2), ps.RunConfig(**settings)
    )
    run = ps.Run(exp)
    assert repr(run) == "Run(not begun: with ps.Run(exp) as run: ...)"
    with run:
        for it in run:
            assert repr(run) == f"Run(PPO on CartPole-v1, {it.env_steps} of 32 steps; {tmp_path / 'run'})"
            assert repr(it.policy).startswith("Policy(PPO: observation box[4] float32, action discrete(2) int64; ")
            assert repr(it.policy).endswith(f" parameters, {it.policy.updates} updates)")
    assert repr(run.result.policy).endswith(" updates)") and repr(ps.load(run.run_dir)).endswith(" parameters)")
    assert repr(run) == f"Run({run.result!r})" and "\n" not in repr(run)
    assert run.result.plot("eval/mean_reward")._repr_png_().startswith(b"\x89PNG")
