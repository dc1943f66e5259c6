"""Atari games as published agents see them: one game for each slot, or ale-py's batched environment.

Frame skip 4, the larger of the last two frames, 84 x 84 grey, stacks of 4 (Mnih et al. 2015, "Methods"). Sticky
actions, all 18 actions and the whole game as episode as Machado et al. 2018 (section 5) recommend. Rewards are the
game's own.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from penstock.core.errors import ConfigError, MissingExtraError, nearest

Frame = npt.NDArray[np.uint8]
_NOOP, _FIRE = 0, 1
_SIZE = 84


def atari(
    game: str,
    *,
    sticky: float = 0.0,
    noop_max: int = 30,
    full_actions: bool = False,
    fire_reset: bool = False,
    frame_skip: int = 4,
    stack: int = 4,
    max_frames: int = 108_000,
    render_mode: str | None = None,
) -> Atari:
    """One game with the published preprocessing: observations [stack, 84, 84] uint8, rewards of the game.

    Args:
        game: as ale-py spells it: `pong`, `ms_pacman`.
        sticky: probability that a frame repeats the frame's action before; 0.25 in Machado et al. 2018.
        noop_max: an episode begins with 0 to `noop_max - 1` no-ops, as in ale-py's batched environment; 0 for none.
        full_actions: all 18 actions instead of those that the game uses.
        fire_reset: begin with FIRE instead of the first no-op, if the game has that action.
        max_frames: emulated frames after which a game is truncated; 108,000 are half an hour.

    Raises:
        ConfigError: no such game, or a setting out of range.
        MissingExtraError: ale-py or OpenCV is not installed.
    """
    return Atari(game, sticky, noop_max, full_actions, fire_reset, frame_skip, stack, max_frames, render_mode)


def atari_vector(
    game: str,
    num_envs: int = 1,
    *,
    sticky: float = 0.0,
    noop_max: int = 30,
    full_actions: bool = False,
    fire_reset: bool = False,
    frame_skip: int = 4,
    stack: int = 4,
    max_frames: int = 108_000,
    threads: int = 0,
) -> AtariVector:
    """`num_envs` games in the threads of ale-py's batched environment, with the conventions of `atari`.

    Args:
        threads: number that step the games; 0 for one for each game, at most one for each core.

    Raises:
        ConfigError: no such game, or a setting out of range.
        MissingExtraError: ale-py is not installed.
    """
    _check(sticky, noop_max, frame_skip, stack, max_frames)
    _rom_path(game)
    module = _imported("ale_py.vector_env")
    env = module.AtariVectorEnv(
        game,
        num_envs,
        num_threads=threads,
        max_num_frames_per_episode=max_frames,
        repeat_action_probability=sticky,
        full_action_space=full_actions,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        img_height=_SIZE,
        img_width=_SIZE,
        stack_num=stack,
        frameskip=frame_skip,
        maxpool=frame_skip > 1,
        noop_max=max(noop_max, 1),
        use_fire_reset=fire_reset,
        episodic_life=False,
        life_loss_info=False,
        reward_clipping=False,
    )
    return AtariVector(env)


class Atari(gym.Env[Frame, int]):
    """One game, made by `atari`; its arguments are explained there.

    `info["lives"]` is the number of lives, `info["life_lost"]` 1.0 in the step that lost one while the game goes on.
    No-ops and, without sticky actions, every frame are those of ale-py's batched environment with the same seed.
    Sticky actions are drawn here, from `np_random`: ale-py can seed its own only by loading the game anew, which takes
    longer than a short episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}  # noqa: RUF012

    def __init__(
        self,
        game: str,
        sticky: float,
        noop_max: int,
        full_actions: bool,
        fire_reset: bool,
        frame_skip: int,
        stack: int,
        max_frames: int,
        render_mode: str | None,
    ) -> None:
        _check(sticky, noop_max, frame_skip, stack, max_frames)
        if render_mode not in (None, "rgb_array"):
            raise ConfigError(f"render_mode={render_mode!r}; expected None or 'rgb_array'")
        path, self.render_mode = _rom_path(game), render_mode
        ale_py, self._resize = _imported("ale_py"), _imported("cv2").resize
        self._area = _imported("cv2").INTER_AREA
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self._ale, self._state_of = ale_py.ALEInterface(), ale_py.ALEState
        self._ale.setFloat("repeat_action_probability", 0.0)
        self._ale.setInt("max_num_frames_per_episode", max_frames)
        self._ale.loadROM(path)
        actions = self._ale.getLegalActionSet() if full_actions else self._ale.getMinimalActionSet()
        self._actions = [int(action.value) for action in actions]
        self._sticky, self._noop_max, self._skip = sticky, noop_max, frame_skip
        self._fires = fire_reset and _FIRE in self._actions
        self._frames: list[Frame] = [np.zeros(self._ale.getScreenDims(), np.uint8) for _ in range(2)]
        self._obs: Frame = np.zeros((stack, _SIZE, _SIZE), np.uint8)
        self._noop_rng = np.random.RandomState()
        self._last, self._lives, self._untouched = _NOOP, 0, True
        self._ale.reset_game()
        self._loaded = self._ale.cloneState(include_rng=True)
        self.observation_space = spaces.Box(0, 255, self._obs.shape, np.uint8)
        self.action_space: Any = spaces.Discrete(len(self._actions))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        """The first frame of a new game after its no-ops, above frames of zeros."""
        super().reset(seed=seed)
        if seed is not None:
            self._noop_rng.seed(seed & 0xFFFFFFFF)
        ale = self._ale
        self._boot()
        noops = self._draw_noops()
        if self._fires:
            ale.act(_FIRE)
        for _ in range(noops - self._fires):
            ale.act(_NOOP)
            if ale.game_over():
                self._boot()
        ale.getScreenGrayscale(self._frames[0])
        self._frames[1].fill(0)
        self._obs = np.zeros_like(self._obs)
        self._last, self._lives, self._untouched = _NOOP, ale.lives(), noops == 0 and not self._fires
        return self._shown(), {"lives": self._lives, "life_lost": 0.0}

    def step(self, action: int) -> tuple[Frame, float, bool, bool, dict[str, Any]]:
        """`frame_skip` frames with this action: (obs, sum of rewards, game over, out of time, info).

        The frame in which a game ends is not shown; Gymnasium's AtariPreprocessing and ale-py do the same.
        """
        ale, chosen, reward, left = self._ale, self._actions[action], 0, self._skip
        repeats = self.np_random.random(left) < self._sticky if self._sticky else None
        over = self._untouched = False
        while left:
            if repeats is None or not repeats[-left]:
                self._last = chosen
            reward += ale.act(self._last)
            over = ale.game_over()
            if over:
                break
            left -= 1
            if left < 2:
                ale.getScreenGrayscale(self._frames[left])
        lives = ale.lives()
        truncated = over and ale.game_truncated()
        info = {"lives": lives, "life_lost": float(lives < self._lives and not over)}
        self._lives = lives
        return self._shown(), float(reward), over and not truncated, truncated, info

    def render(self) -> Any:
        """The screen in colour, [210, 160, 3] uint8."""
        return self._ale.getScreenRGB() if self.render_mode == "rgb_array" else None

    def get_state(self) -> dict[str, Any]:
        """The emulator (14 kB), the frames and the generators, as arrays and plain Python."""
        ale = self._ale.cloneState(include_rng=True).serialize()
        return {
            "ale": np.frombuffer(ale, np.uint8).copy(),
            "obs": self._obs.copy(),
            "frames": np.stack(self._frames),
            "last": self._last,
            "lives": self._lives,
            "untouched": self._untouched,
            "rng": self.np_random.bit_generator.state,
            "noop_rng": self._noop_rng.get_state(legacy=False),
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Inverse of `get_state`, on any instance with the same settings."""
        self._ale.reset_game()
        if not state["untouched"]:  # the first frame after a reset is special, and not in the saved state: see Q*bert
            self._ale.act(_NOOP)
        self._ale.restoreState(self._state_of(state["ale"].tobytes()))
        self._obs = np.array(state["obs"])
        for frame, saved in zip(self._frames, state["frames"]):
            frame[...] = saved
        self._last, self._lives, self._untouched = state["last"], state["lives"], state["untouched"]
        self.np_random.bit_generator.state = state["rng"]
        self._noop_rng.set_state(dict(state["noop_rng"]))

    def _boot(self) -> None:
        """Restores the state after loading; in some games, such as BeamRider, a reset keeps traces of earlier play."""
        self._ale.reset_game()
        self._ale.restoreState(self._loaded)

    def _shown(self) -> Frame:
        """A new stack whose last frame is the larger of the last two, pixel by pixel."""
        first, second = self._frames
        if self._skip > 1:
            np.maximum(first, second, out=first)
        obs = np.empty_like(self._obs)
        obs[:-1] = self._obs[1:]
        self._resize(first, (_SIZE, _SIZE), dst=obs[-1], interpolation=self._area)
        self._obs = obs
        return obs

    def _draw_noops(self) -> int:
        """As C++ draws from `uniform_int_distribution` over a Mersenne Twister (Lemire 2019, algorithm 5)."""
        n = self._noop_max
        if n < 2:
            return 0
        draw = self._noop_rng.randint
        threshold = (1 << 32) % n
        while (x := int(draw(0, 1 << 32, dtype=np.uint32)) * n) & 0xFFFFFFFF < threshold:
            pass
        return x >> 32


class AtariVector(gym.vector.VectorEnv[Frame, npt.NDArray[np.int64], npt.NDArray[Any]]):
    """ale-py's batched environment, which also reports `life_lost`; made by `atari_vector`."""

    def __init__(self, env: Any) -> None:
        self._env: Any = env
        self._received: Any = env.recv
        self.num_envs = int(env.num_envs)
        self.single_observation_space, self.single_action_space = env.single_observation_space, env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._lives = np.zeros(self.num_envs, np.int32)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Frame, dict[str, Any]]:
        """Resets every game; an integer seeds game i with `seed + i`."""
        obs, info = self._env.reset(seed=seed, options=options)
        self._lives = info["lives"]
        return obs, info

    def send(self, actions: npt.NDArray[np.int64]) -> None:
        """Starts a step of every game."""
        self._env.send(actions)

    def recv(self) -> tuple[Frame, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Waits for the step that `send` started, without a limit: ale-py has none."""
        return self._answered()

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[Frame, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """`send` and `recv`."""
        self._env.send(actions)
        return self._answered()

    def close_extras(self, **kwargs: Any) -> None:
        """Drops the games; their threads end with them."""
        self._env = self._received = None

    def _answered(self) -> tuple[Frame, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        obs, reward, terminated, truncated, info = self._received()
        lives = info["lives"]
        info["life_lost"] = ((lives < self._lives) & ~terminated & ~truncated).astype(np.float32)
        self._lives = lives
        return obs, reward, terminated, truncated, info


def _check(sticky: float, noop_max: int, frame_skip: int, stack: int, max_frames: int) -> None:
    if not 0.0 <= sticky < 1.0:
        raise ConfigError(f"sticky={sticky}; expected a probability in [0, 1), usually 0 or 0.25")
    if min(frame_skip, stack, max_frames) < 1 or noop_max < 0:
        raise ConfigError(
            f"frame_skip={frame_skip}, stack={stack}, max_frames={max_frames}, noop_max={noop_max}; expected at "
            "least 1, and at least 0 for noop_max"
        )


def _rom_path(game: str) -> Any:
    roms = _imported("ale_py.roms")
    known = roms.get_all_rom_ids()
    if game not in known:
        raise ConfigError(f"unknown Atari game {game!r}; {nearest(game.lower(), known)}")
    path = roms.get_rom_path(game)
    if _imported("ale_py").ALEInterface.isSupportedROM(path) is None:  # loading it would end the process
        raise ConfigError(f"game={game!r} is for several players; ale-py plays it through PettingZoo only")
    return path


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError("opencv" if module == "cv2" else "ale_py", "atari") from error
