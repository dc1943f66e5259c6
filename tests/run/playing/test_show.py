"""Policies watched in a window or on video, environments played by hand, videos in training; all without a screen."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import penstock as ps
from penstock.core.errors import ConfigError, EnvWorkerError, MissingExtraError
from penstock.datasets.reader import Dataset
from penstock.run.playing import by_hand, show
from penstock.run.playing.by_hand import play_by_hand
from penstock.run.playing.enjoy import enjoy
from tests.cli.conftest import cli, trained
from tests.cli.short import Cli
from tests.run.playing.pictures import Blind, Pictures

__all__ = ["cli", "trained"]

needs_ffmpeg = pytest.mark.skipif(importlib.util.find_spec("imageio_ffmpeg") is None, reason="needs the extra video")
EVENTS: dict[int, tuple[str, str]] = {}
"""Keys that a person presses and releases, by step; "" closes the window."""


class Keyboard(gym.Wrapper[Any, Any, Any, Any]):
    """Presses the keys of EVENTS where a window is open: at its first picture, as step 0, and at later steps."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.press()
        return super().step(action)

    def render(self) -> Any:
        if Keyboard.steps == 0:
            self.press()
        return super().render()

    @staticmethod
    def press() -> None:
        pygame: Any = sys.modules.get("pygame")
        if pygame is None or not pygame.display.get_init() or pygame.display.get_surface() is None:
            return
        if (event := EVENTS.get(Keyboard.steps)) is not None:
            kind, key = event
            code = {"key": pygame.key.key_code(key)} if key else {}
            pygame.event.post(pygame.event.Event(getattr(pygame, kind), **code))
        Keyboard.steps += 1


def keyboard(env: str = "CartPole-v1", render_mode: str | None = None, **kwargs: Any) -> Any:
    return Keyboard(gym.make(env, render_mode=render_mode, **kwargs))


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, tuple[str, str]]]:
    """A screen that nobody sees, without waiting for a frame's time."""
    pytest.importorskip("pygame", reason="needs the extra classic")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    monkeypatch.setattr(show, "frame_rate", lambda env: 100_000)
    monkeypatch.setattr(by_hand, "frame_rate", lambda env: 100_000)
    Keyboard.steps = 0
    EVENTS.clear()
    yield EVENTS
    EVENTS.clear()


@pytest.fixture
def no_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """CartPole's own clock, which waits in a window, stands still."""
    monkeypatch.setitem(CartPoleEnv.metadata, "render_fps", 100_000)


def test_a_window_is_closed_by_q(trained: Path, screen: dict[int, Any], quick: None) -> None:
    screen[5] = ("KEYDOWN", "q")
    assert enjoy(trained, 100, env=keyboard) == (None, "")
    assert Keyboard.steps < 9


def test_space_pauses_until_it_is_pressed_again(
    trained: Path, screen: dict[int, Any], quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pygame

    waits: list[int] = []

    def waited(seconds: float) -> None:
        waits.append(Keyboard.steps)
        if len(waits) == 3:
            pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_SPACE))
            EVENTS[Keyboard.steps + 1] = ("QUIT", "")

    monkeypatch.setattr(show.time, "sleep", lambda seconds: waited(seconds) if seconds == 0.05 else None)
    screen[4] = ("KEYDOWN", "space")
    enjoy(trained, 100, env=keyboard)
    assert len(waits) == 3 and len(set(waits)) == 1, "it played on"


@needs_ffmpeg
def test_without_a_screen_there_is_a_video(trained: Path, no_screen: None, cli: Cli) -> None:
    said = cli("enjoy", str(trained), "--episodes", "1")
    assert said.code == 0, said.both
    (video,) = (trained / "videos").glob("*.mp4")
    assert said.out == f"there is no display (DISPLAY or WAYLAND_DISPLAY); a video instead: {video}\n"
    ps.load(trained).save("policy.safetensors")
    assert cli("enjoy", "policy.safetensors", "--env", "CartPole-v1", "--video", "x.mp4").out == "video: x.mp4\n"
    assert Path("x.mp4").stat().st_size > 500


def test_without_a_screen_pygame_looks_for_none_and_complains_of_none(
    no_screen: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pygame: Any = pytest.importorskip("pygame", reason="needs the extra classic")
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    pygame.quit()
    live = gym.make("CartPole-v1", render_mode="rgb_array")
    live.reset()
    assert show.frame_of(live).shape == (400, 600, 3)
    assert pygame.display.get_driver() == "dummy" and "SDL_VIDEODRIVER" not in os.environ
    assert capfd.readouterr().err == ""


@needs_ffmpeg
def test_a_display_that_does_not_answer_is_none(
    trained: Path, no_screen: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pygame: Any = pytest.importorskip("pygame", reason="needs the extra classic")
    monkeypatch.setenv("DISPLAY", ":9999")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # so that it is put back, whatever `enjoy` sets
    monkeypatch.delenv("SDL_VIDEODRIVER")
    pygame.quit()
    found = enjoy(trained, 1)
    assert "no window could be opened" in found.why and found.video is not None and found.video.is_file()
    monkeypatch.delenv("SDL_VIDEODRIVER")
    pygame.quit()
    with pytest.raises(EnvWorkerError, match="the display does not answer"):
        play_by_hand(ps.EnvConfig("CartPole-v1"))


def test_what_cannot_be_shown(trained: Path, screen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[video\]"):
        enjoy(trained, 1, video=Path("x.mp4"))
    with pytest.raises(ConfigError, match="name the environment that it plays"):
        enjoy("hf:me/cart")
    with pytest.raises(ConfigError, match=r"Pendulum-v1 has observation box\[3\]"):
        enjoy(trained, 1, env="Pendulum-v1")


def test_hands_play_and_their_episodes_are_a_dataset(screen: dict[int, Any], tmp_path: Path, cli: Cli) -> None:
    screen |= {0: ("KEYDOWN", "right"), 12: ("KEYDOWN", "left"), 14: ("KEYUP", "right"), 40: ("QUIT", "")}
    name = f"{__name__}:keyboard"
    said = cli("play", name, "--keys", "left=0", "right=1", "--fps", "100000", "--seed", "7", "--dataset", "d")
    assert said.code == 0, said.both
    dataset = Dataset(Path("d"))
    episodes = [dataset.episode(i) for i in range(len(dataset.lengths))]
    assert [f"episode {i}: return {len(e):.2f}, {len(e):,} steps" for i, e in enumerate(episodes, 1)] == [
        line for line in said.out.splitlines() if line.startswith("episode ")
    ]
    assert episodes[0].terminated and not episodes[0].truncated
    assert episodes[-1].truncated and not episodes[-1].terminated, "the last one was cut by the hand"
    actions = np.concatenate([e.action for e in episodes])
    assert set(actions[:10]) == {1} and 0 in actions
    for seed, episode in enumerate(episodes, 7):  # what was written is what the environment does by these actions
        env = gym.make("CartPole-v1")
        obs, _ = env.reset(seed=seed)
        for row, action in zip(episode.obs, episode.action):
            assert row.tolist() == obs.tolist()
            obs = env.step(action)[0]
        assert episode.obs[-1].tolist() == obs.tolist()
    more = cli("play", name, "--keys", "left=0", "--dataset", "d")
    assert (more.code, "--append" in more.err) == (2, True), more.both
    dataset.close()


def test_a_signal_keeps_the_episodes(screen: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen[0] = ("KEYDOWN", "right")
    step = Keyboard.step

    def step_and_stop(self: Any, action: Any) -> Any:
        if Keyboard.steps == 25:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, action)

    monkeypatch.setattr(Keyboard, "step", step_and_stop)
    config = ps.EnvConfig(keyboard)
    found = play_by_hand(config, keys={"right": 1}, fps=100_000, dataset=tmp_path / "d")
    assert found.stopped_by == signal.SIGTERM
    assert Dataset(tmp_path / "d").lengths.sum() == found.steps >= 20


USUAL: dict[str, tuple[str, dict[Any, Any], Any]] = {
    "by name": ("MountainCar-v0", {"left": 0, "right": 2}, 1),
    "a digit for each choice": ("penstock.envs.toy:Counter", {"0": 0, "1": 1}, None),
    "a box": ("Pendulum-v1", {("left",): [-2.0], ("right",): [2.0]}, [0.0]),
}


@pytest.mark.parametrize("case", USUAL)
def test_the_usual_keys(case: str) -> None:
    name, keys, noop = USUAL[case]
    env: Any = ps.EnvConfig(name).make()
    found, rest = by_hand._actions(env, name, None, None)  # pyright: ignore[reportPrivateUsage]
    assert {key: np.asarray(action).tolist() for key, action in found.items()} == keys
    assert rest is None if noop is None else np.asarray(rest).tolist() == noop


def test_two_keys_of_a_box_act_together() -> None:
    space = gym.spaces.Box(np.array([-1, 0, 0], np.float32), np.ones(3, np.float32))
    env: Any = SimpleNamespace(action_space=space, has_wrapper_attr=lambda name: False)
    found, rest = by_hand._actions(env, "x", None, None)  # pyright: ignore[reportPrivateUsage]
    assert rest.tolist() == [0, 0, 0]
    assert found[("left",)].tolist() == [-1, 0, 0] and found[("left", "up")].tolist() == [-1, 1, 0]
    assert ("left", "right") not in found and ("down", "up") not in found


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no key": ("CartPole-v1", {"keys": {"lft": 0}}, "'lft' is no key; expected a character, or left"),
    "no action": ("CartPole-v1", {"keys": {"left": 5}}, "left is the action 5, which is not in Discrete"),
    "no idle action": ("CartPole-v1", {"keys": {"left": 0}, "noop": 7}, "no key is the action 7"),
    "no picture": (Blind, {}, "render.. gave NoneType"),
    "many agents": ("penstock.envs.toy:Nim", {}, "many agents; one keyboard"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_hands_cannot_play(case: str, screen: Any) -> None:
    name, how, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        play_by_hand(ps.EnvConfig(name), **how)


def test_without_a_screen_hands_cannot_play(no_screen: None, cli: Cli) -> None:
    said = cli("play", "CartPole-v1", "--dataset", "d")
    assert (said.code, "play needs a window, and there is no display" in said.err) == (2, True)
    assert not Path("d").exists()


RUN = ps.RunConfig(steps=96, eval_episodes=0, log_interval=0, progress="off", video_interval=40)
EXP = ps.Experiment(Pictures, ps.PPO(epochs=1, minibatch=32), ps.SerialSampler(T=8, B=4), RUN)


@pytest.fixture(params=["here", pytest.param("worker", marks=pytest.mark.slow)])
def filmed_where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Films in a worker process, as runs do, or in this one, which spares the start of the other."""
    if request.param == "here":
        monkeypatch.setattr(show, "divided", lambda plan, workers: None)


@needs_ffmpeg
def test_training_is_filmed_and_does_not_notice(filmed_where: None, tmp_path: Path) -> None:
    results = [
        ps.train(replace(EXP, run=replace(RUN, dir=tmp_path / name, video_interval=interval)))
        for name, interval in (("filmed", 40), ("plain", 0))
    ]
    videos = sorted(path.name for path in (tmp_path / "filmed" / "videos").iterdir())
    assert videos == ["000000000056.mp4", "000000000080.mp4"]
    weights = [result.policy.agent.state_dict() for result in results]
    assert all(a.equal(b) for a, b in zip(weights[0].values(), weights[1].values()))
    assert not (tmp_path / "plain" / "videos").exists()


@needs_ffmpeg
def test_training_goes_on_where_nothing_can_be_filmed(filmed_where: None, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"run\.video_interval: no video at step .*render\(\) gave NoneType") as said:
        result = ps.train(replace(EXP, env=Blind, run=replace(RUN, dir=tmp_path / "run")))
    assert result.stopped_by == "steps"
    assert len([w for w in said if "no video" in str(w.message)]) == 1


def test_without_the_extra_no_run_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match=r"penstock\[video\]"):
        ps.train(replace(EXP, run=replace(RUN, dir=tmp_path / "run")))
    assert not (tmp_path / "run").exists()
