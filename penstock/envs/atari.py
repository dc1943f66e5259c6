"""Atari games as the literature plays them: one at a time with exact resume, or many in the library's own threads.

Frames, noops and sticky actions as in Mnih et al. 2015 ("Methods") and Machado et al. 2018 (sections 4 and 5). Rewards are
the game's points, and the agent clips what it learns from: `net.clip_reward`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from penstock.core.errors import ConfigError, MissingExtraError, nearest

_SIZE, _STACK, _SKIP, _SCREEN = 84, 4, 4, (210, 160)
Frame = npt.NDArray[np.uint8]


def atari(
    game: str,
    *,
    noops: int = 30,
    sticky: float = 0.0,
    full_actions: bool = False,
    life_loss: bool = False,
    max_frames: int = 108_000,
) -> Atari:
    """One Atari game: observation uint8 [4, 84, 84], the newest frame last, zeros before the episode's first.

    An action is held for 4 frames; an observation's frame is the maximum of the last two, in grey.

    Args:
        game: as ALE names its ROMs, such as `pong` or `ms_pacman`.
        noops: an episode opens with 1 to so many frames without action (Mnih et al. 2015: 30); 0 for none.
        sticky: probability that a frame repeats the action of the frame before (Machado et al. 2018, section 5.2: 0.25).
        full_actions: all 18 actions instead of those that the game reads (Machado et al. 2018, section 4.1.1).
        life_loss: a lost life ends the episode, and the next one goes on in the same game. `info["game_return"]` then
            holds the whole game's points, which returns of episodes do not.
        max_frames: the game is truncated after so many frames (18,000 to 108,000 in the literature).

    Raises:
        ConfigError: no such game, or a number out of range.
        MissingExtraError: ale-py or opencv is not installed.
    """
    _check(game, noops, sticky, max_frames)
    return Atari(game, noops, sticky, full_actions, life_loss, max_frames)


def atari_vector(
    game: str,
    num_envs: int = 1,
    *,
    noops: int = 30,
    sticky: float = 0.0,
    full_actions: bool = False,
    max_frames: int = 108_000,
    threads: int = 0,
) -> gym.vector.VectorEnv[Any, Any, Any]:
    """`num_envs` games in ale-py's own threads, under the conventions of `atari`; samplers set `num_envs`.

    Seeds lead to other noops and sticky actions than in `atari`. There is no `life_loss`: the library would reset the
    game at each lost life, or go on without the reset row that the record needs.

    Args:
        threads: of each group of slots; 0 for one for each core, at most `num_envs`.

    Raises:
        ConfigError, MissingExtraError: as `atari`.
    """
    _check(game, noops, sticky, max_frames)
    from ale_py.vector_env import AtariVectorEnv

    return AtariVectorEnv(
        game, num_envs, num_threads=threads, max_num_frames_per_episode=max_frames, repeat_action_probability=sticky,
        full_action_space=full_actions, noop_max=noops, reward_clipping=False, use_fire_reset=False,
    )  # fmt: skip


class Atari(gym.Env[Frame, np.int64]):
    """One game; `atari` says what the settings mean.

    `info` holds `lives`, and in an episode's last step `game_return` and `game_length` (in steps) if the game ended.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 60 // _SKIP}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(
        self, game: str, noops: int, sticky: float, full_actions: bool, life_loss: bool, max_frames: int
    ) -> None:
        ale = _ale()
        self._ale = ale.ALEInterface()
        self._ale.setInt("random_seed", 0)
        # Sticky actions are drawn here: the emulator takes a new seed by loading the ROM again only, which takes tens of
        # milliseconds.
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._ale.setInt("max_num_frames_per_episode", max_frames)
        self._ale.loadROM(ale.roms.get_rom_path(game))
        self._ale_state = ale.ALEState
        self._actions: list[Any] = list(self._ale.getLegalActionSet() if full_actions else self._ale.getMinimalActionSet())
        self._noops, self._sticky, self._life_loss = noops, sticky, life_loss
        self._screens: list[Frame] = [np.zeros(_SCREEN, np.uint8) for _ in range(2)]
        self._stack = np.zeros((_STACK, _SIZE, _SIZE), np.uint8)
        self._ale.reset_game()
        self._opening = self._ale.cloneState(include_rng=True)
        self._ale.getScreenGrayscale(self._screens[0])
        self._opening_screen = self._screens[0].copy()
        self._in_game = False
        self._lives = self._held = self._steps = 0
        self._return = 0.0
        self.observation_space = spaces.Box(0, 255, (_STACK, _SIZE, _SIZE), np.uint8)
        self.action_space = spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        """Opens a game; after a lost life that ended an episode, the same game goes on with a frame without action."""
        super().reset(seed=seed)
        self._stack.fill(0)
        if self._in_game:
            self._ale.act(self._actions[0])
            self._see()
        if not self._in_game or self._ale.game_over():
            self._open_game()
        self._in_game = False
        self._lives, self._held = self._ale.lives(), 0
        self._screens[1].fill(0)
        self._push()
        return self._stack.copy(), {"lives": self._lives}

    def step(self, action: np.int64) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """Four frames of one action."""
        points, over, truncated, play = 0.0, False, False, self._ale
        repeats = self.np_random.random(_SKIP) < self._sticky if self._sticky else (False,) * _SKIP
        for t in range(_SKIP):
            if not repeats[t]:
                self._held = int(action)
            points += play.act(self._actions[self._held])
            over = play.game_over(with_truncation=False)
            truncated = not over and play.game_truncated()
            if over or truncated:
                break
            if t >= _SKIP - 2:
                play.getScreenGrayscale(self._screens[_SKIP - 1 - t])
        self._push()
        self._return += points
        self._steps += 1
        lives = play.lives()
        lost = self._life_loss and lives < self._lives and not (over or truncated)
        self._lives, self._in_game = lives, lost
        info: dict[str, Any] = {"lives": lives}
        if over or truncated:
            info |= {"game_return": self._return, "game_length": self._steps}
        return self._stack.copy(), points, over or lost, truncated, info

    def render(self) -> Frame:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[210, 160, 3] uint8: the screen as it is."""
        return self._ale.getScreenRGB()

    def get_state(self) -> dict[str, Any]:
        """What `set_state` needs, as plain data and arrays: the emulator's state (15 kB), frames, and random numbers."""
        return {
            "ale": np.frombuffer(self._ale.cloneState(include_rng=True).serialize(), np.uint8).copy(),
            "stack": self._stack.copy(), "screens": [x.copy() for x in self._screens],
            "random": self.np_random.bit_generator.state, "in_game": self._in_game, "lives": self._lives,
            "held": self._held, "steps": self._steps, "return": self._return,
        }  # fmt: skip

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on where `get_state` was called, bit for bit."""
        self._ale.restoreState(self._ale_state(state["ale"].tobytes()))
        np.copyto(self._stack, state["stack"])
        for x, y in zip(self._screens, state["screens"]):
            np.copyto(x, y)
        self.np_random.bit_generator.state = state["random"]
        self._in_game, self._lives, self._held = state["in_game"], state["lives"], state["held"]
        self._steps, self._return = state["steps"], state["return"]

    def _open_game(self) -> None:
        self._return, self._steps = 0.0, 0
        self._ale.restoreState(self._opening)
        np.copyto(self._screens[0], self._opening_screen)
        if self._noops:
            for _ in range(int(self.np_random.integers(1, self._noops + 1))):
                self._ale.act(self._actions[0])
                if self._ale.game_over():
                    self._ale.restoreState(self._opening)
            self._see()

    def _see(self) -> None:
        self._ale.getScreenGrayscale(self._screens[0])

    def _push(self) -> None:
        """The maximum of the last two screens becomes the newest frame."""
        import cv2

        self._stack[:-1] = self._stack[1:]
        screen = np.maximum(*self._screens, out=self._screens[0])
        cv2.resize(screen, (_SIZE, _SIZE), dst=self._stack[-1], interpolation=cv2.INTER_AREA)


def _ale() -> Any:
    try:
        import ale_py
        import ale_py.roms
    except ImportError as error:
        raise MissingExtraError("ale_py", "atari") from error
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return ale_py


def _check(game: str, noops: int, sticky: float, max_frames: int) -> None:
    try:
        import cv2  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("opencv", "atari") from error
    games = _ale().roms.get_all_rom_ids()
    if game not in games:
        raise ConfigError(f"game={game!r}; {nearest(str(game), games)} Games are named like ms_pacman")
    if noops < 0 or not 0 <= sticky < 1 or max_frames < _SKIP:
        raise ConfigError(f"noops={noops}, sticky={sticky}, max_frames={max_frames}; expected noops >= 0, 0 <= sticky < 1 and "
                          f"max_frames >= {_SKIP}")  # fmt: skip
