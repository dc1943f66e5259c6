"""Settings given as ordinary values of numpy, torch, pathlib, JSON and TOML are stored as the values that they mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.core.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "name", "stored"),
    [
        (lambda: ps.Net(hidden=[64, 64]), "hidden", (64, 64)),  # pyright: ignore
        (lambda: ps.Net(hidden=np.array([64, 32])), "hidden", (64, 32)),  # pyright: ignore
        (lambda: ps.Net(hidden=[np.int64(64)]), "hidden", (64,)),  # pyright: ignore
        (lambda: ps.Net(cnn=[[16, 3, 1], [8, 3, 2, 1]]), "cnn", ((16, 3, 1), (8, 3, 2, 1))),  # pyright: ignore
        (lambda: ps.DQN(dueling_hidden=[32]), "dueling_hidden", (32,)),  # pyright: ignore
        (lambda: ps.Experiment("A-v0", ps.PPO(), info_keys=["a"]), "info_keys", ("a",)),  # pyright: ignore
        (lambda: ps.Experiment("A-v0", ps.PPO(), imports=["ale_py"]), "imports", ("ale_py",)),  # pyright: ignore
        (lambda: ps.Experiment("A-v0", ps.PPO(), wrappers=["m:n"]), "wrappers", ("m:n",)),  # pyright: ignore
        (lambda: ps.EnvConfig("A-v0", imports=["ale_py"]), "imports", ("ale_py",)),  # pyright: ignore
        (lambda: ps.RunConfig(seed=np.int64(3)), "seed", 3),  # pyright: ignore
        (lambda: ps.RunConfig(steps=np.float64(1e5)), "steps", 100_000),  # pyright: ignore
        (lambda: ps.PPO(lr=np.float32(0.25)), "lr", 0.25),  # pyright: ignore
        (lambda: ps.PPO(normalize_advantage=np.bool_(True)), "normalize_advantage", True),  # pyright: ignore
        (lambda: ps.SAC(alpha=np.float64(0.5)), "alpha", 0.5),  # pyright: ignore
        (lambda: ps.RunConfig(device=torch.device("cuda:1")), "device", "cuda:1"),  # pyright: ignore
        (lambda: ps.GpuSampler(device=torch.device("cpu")), "device", "cpu"),  # pyright: ignore
        (lambda: ps.RunConfig(dir=Path("runs/a")), "dir", "runs/a"),
        (lambda: ps.RunConfig(trace=Path("x.json")), "trace", "x.json"),  # pyright: ignore
        (lambda: ps.ReplaySettings(dir=Path("rows")), "dir", "rows"),  # pyright: ignore
        (lambda: ps.OfflineSampler(dataset=Path("data")), "dataset", "data"),  # pyright: ignore
    ],
)
def test_an_ordinary_value_is_stored_as_the_value_it_means(settings: Any, name: str, stored: Any) -> None:
    value = getattr(settings(), name)
    assert value == stored
    assert type(value) is type(stored)
    if isinstance(stored, tuple):
        assert list(map(type, value)) == list(map(type, stored))


@pytest.mark.parametrize("text", ["64,32", "[64, 32]", "[64,32]", [64, 32], "64, 32"])
def test_widths_are_read_as_people_write_them(text: Any) -> None:
    assert ps.override(ps.PPO(), {"net.hidden": text}).net.hidden == (64, 32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ps.Net(hidden="wide"), "net.hidden='wide'"),  # pyright: ignore
        (lambda: ps.Net(hidden=[64, "a"]), "net.hidden="),  # pyright: ignore
        (lambda: ps.RunConfig(seed=np.float32(1.5)), r"run.seed=1.5 \(float\); expected a whole number"),  # pyright: ignore
        (lambda: ps.RunConfig(device=3), r"run.device=3 \(int\)"),  # pyright: ignore
        (lambda: ps.SerialSampler(T="many"), "sampler.T='many'"),  # pyright: ignore
        (lambda: ps.EnvConfig("A-v0", imports="ale_py"), r"imports='ale_py'; expected a tuple"),  # pyright: ignore
    ],
)
def test_an_error_names_the_whole_setting(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
