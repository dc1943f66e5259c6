"""A run's first lines say what was taken for an image, and its first batch whether that can be meant."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import penstock as ps
from penstock.learn.train_ops import train_one_step
from penstock.run import result

PIXELS = spaces.Box(0, 255, (8, 8, 4), np.uint8)


class Planes(gym.Env[Any, Any]):
    """Shows 0 and 1, or `one`, in one of the spaces; nothing but 0 where `dark`."""

    def __init__(self, obs: str = "pixels", one: int = 1, dark: int = 0) -> None:
        self.one, self.dark, self.t = one, dark, 0
        self.observation_space: Any = {
            "pixels": PIXELS,
            "bits": spaces.Box(0, 1, (8, 8, 4), np.uint8),
            "dict": spaces.Dict(camera=PIXELS, m=spaces.Box(-1, 1, (2, 3), np.float32), v=spaces.Box(-1, 1, (2,))),
            "vector": spaces.Box(-1, 1, (2,), np.float32),
        }[obs]
        self.action_space = spaces.Discrete(4)

    def seen(self) -> Any:
        self.t += 1
        found = self.observation_space.sample()
        planes = (self.np_random.random((8, 8, 4)) < 0.3).astype(np.uint8) * (self.one if self.t > self.dark else 0)
        if isinstance(found, dict):
            return {**found, "camera": planes}
        return planes if found.dtype == np.uint8 else found

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        return self.seen(), 0.0, False, self.t % 5 == 0, {}


@pytest.mark.parametrize(
    ("obs", "algo", "lines"),
    [
        ("pixels", ps.PPO(minibatch=8), ["  obs: image, channels last, scaled by 1/255 (8 x 8, 4 channels)"]),
        ("bits", ps.DQN(), ["  obs: image, channels last, not scaled (8 x 8, 4 channels)"]),
        (
            "dict",
            ps.PPO(minibatch=8, net=ps.Net(image_scale=1)),
            [
                "  obs['camera']: image, channels last, not scaled (8 x 8, 4 channels)",
                "  obs['m']: vector of 6 numbers",
            ],
        ),
        ("vector", ps.PPO(minibatch=8), []),
    ],
)
def test_the_first_lines_say_what_is_an_image(
    obs: str, algo: Any, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = ps.RunConfig(steps=8, dir=str(tmp_path), eval_episodes=0)
    with ps.Run(ps.Experiment(Planes, algo, ps.SerialSampler(T=4, B=2), run, env_kwargs={"obs": obs})):
        said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.startswith("  obs")] == lines


def told(algo: Any, batches: int = 2, **env: Any) -> list[str]:
    sampler = ps.SerialSampler(T=2, B=2).build(lambda: Planes(**env), seed=1)
    policy = algo.build(sampler.spec, seed=1)
    policy.prepare(sampler.batch_spec, sampler.initialize(policy.agent)["info"])
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for itr in range(batches):
            train_one_step(policy, sampler.obtain_samples(itr)[0])
    sampler.shutdown()
    return [str(warning.message) for warning in found if "leaves" in str(warning.message)]


@pytest.mark.parametrize("algo", [ps.PPO(epochs=1, minibatch=8), ps.DQN(net=ps.Net(hidden=(8,)))])
def test_a_first_batch_of_bytes_that_never_leaves_0_to_1_is_told_once(algo: Any):
    (text,) = told(algo)
    assert text.startswith("obs never leaves 0..1 in its first batch, and as an image it is scaled by 1/255")
    assert "net.image_scale=1 (--algo.net.image-scale 1)" in text
    (text,) = told(algo, obs="dict")
    assert text.startswith("obs['camera'] never leaves 0..1")
    assert len(told(algo, dark=9, batches=9)) == 1  # black screens first
    for env in ({"one": 255}, {"one": 2}, {"obs": "bits"}, {"obs": "vector"}, {"dark": 10_000}):
        assert told(algo, **env) == []
    assert told(ps.override(algo, {"net.image_scale": 1})) == []


def test_a_run_without_the_native_kernel_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for kernel, there in (("native 3", False), ("torch", True)):
        monkeypatch.setattr(result, "kernel", lambda kernel=kernel: kernel)
        run = ps.RunConfig(steps=8, dir=str(tmp_path / kernel), eval_episodes=0)
        with ps.Run(ps.Experiment("CartPole-v1", ps.PPO(minibatch=8), ps.SerialSampler(T=4, B=2), run)):
            assert ("learns on cpu, without the native kernel: " in capsys.readouterr().out) == there
