from functools import partial
from typing import Any

import numpy as np
import pytest

from penstock.core.batch import SampleBatch, allocate_batch
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.core.spec import BatchSpec
from penstock.envs import atari as module
from penstock.envs.atari import Atari, atari, atari_vector
from penstock.envs.check import check_env
from penstock.envs.make import EnvConfig
from penstock.envs.pools.native_groups import NativeGroups
from penstock.envs.pools.serial import SerialPool

ale_py: Any = pytest.importorskip("ale_py")
pytest.importorskip("cv2")


def play(env: Atari, actions: Any) -> list[tuple[Any, ...]]:
    """Everything that the steps return; ended games are reset."""
    out: list[tuple[Any, ...]] = []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(int(action))
        out.append((obs.tobytes(), reward, terminated, truncated, *info.values()))
        if terminated or truncated:
            out.append((env.reset()[0].tobytes(),))
    return out


def random_actions(env: Atari, n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, env.action_space.n, n)


@pytest.mark.parametrize(
    ("game", "settings", "steps"),
    [
        ("pong", {}, 850),
        ("breakout", {}, 600),
        ("qbert", {}, 400),
        ("breakout", {"full_actions": True, "fire_reset": True, "noop_max": 10}, 200),
        ("pong", {"frame_skip": 1, "stack": 2, "noop_max": 0}, 100),
        ("qbert", {"frame_skip": 5, "stack": 3, "noop_max": 1, "max_frames": 403}, 200),
    ],
)
def test_one_game_and_the_batched_environment_agree_frame_by_frame(game: str, settings: dict[str, Any], steps: int):
    many, single = atari_vector(game, 2, **settings), [atari(game, **settings) for _ in range(2)]
    assert many.single_observation_space == single[0].observation_space
    assert many.single_action_space == single[0].action_space
    obs, _ = many.reset(seed=7)
    for i, env in enumerate(single):
        assert np.array_equal(obs[i], env.reset(seed=7 + i)[0])
    actions = np.random.default_rng(1).integers(0, single[0].action_space.n, (steps, 2))
    ended, ends, lost = [False, False], 0, 0.0
    for t, row in enumerate(actions):
        obs, reward, terminated, truncated, info = many.step(row)
        for i, env in enumerate(single):
            if ended[i]:
                first, about = env.reset()
                expected = (first, 0.0, False, False, about)
            else:
                expected = env.step(int(row[i]))
            assert np.array_equal(obs[i], expected[0]), (t, i)
            assert (reward[i], terminated[i], truncated[i]) == expected[1:4]
            assert {key: info[key][i] for key in ("lives", "life_lost")} == expected[4]
            ended[i] = expected[2] or expected[3]
            ends, lost = ends + ended[i], lost + expected[4]["life_lost"]
    assert ends or steps < 400
    assert lost or game == "pong" or steps < 400
    many.close()


def test_frames_are_those_of_gymnasiums_preprocessing():
    import gymnasium as gym
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    gym.register_envs(ale_py)
    base = gym.make("ALE/Breakout-v5", frameskip=1, repeat_action_probability=0.0, obs_type="grayscale")
    theirs = FrameStackObservation(AtariPreprocessing(base, noop_max=0), 4, padding_type="zero")
    ours = atari("breakout", noop_max=0)
    assert np.array_equal(ours.reset(seed=0)[0], theirs.reset(seed=0)[0])
    for action in random_actions(ours, 400):
        mine, yours = ours.step(int(action)), theirs.step(int(action))
        assert np.array_equal(mine[0], yours[0])
        assert mine[1:4] == yours[1:4]
        if mine[2]:
            break
    else:
        pytest.fail("no game ended")


@pytest.mark.parametrize("game", ["pong", "qbert", "beam_rider"])
def test_a_seed_alone_decides_a_game_whatever_was_played_before(game: str):
    env = atari(game, sticky=0.25)
    actions = random_actions(env, 150)
    first, _ = env.reset(seed=9)
    known = play(env, actions)
    play(env, random_actions(env, 300, seed=1))
    assert np.array_equal(env.reset(seed=9)[0], first)
    assert play(env, actions) == known
    env.reset(seed=10)
    assert play(env, actions) != known


@pytest.mark.parametrize("game", ["pong", "qbert", "breakout"])
@pytest.mark.parametrize("noop_max", [0, 30])
def test_a_saved_state_goes_on_bit_for_bit_in_any_instance(game: str, noop_max: int):
    env = atari(game, sticky=0.25, noop_max=noop_max)
    actions = random_actions(env, 120)
    env.reset(seed=3)
    for steps in (0, 40):
        play(env, actions[:steps])
        state = env.get_state()
        known = play(env, actions)
        fresh, used = (atari(game, sticky=0.25, noop_max=noop_max) for _ in range(2))
        fresh.reset(seed=4)
        used.reset(seed=5)
        play(used, random_actions(env, 77, seed=1))
        for other in (fresh, used):
            other.set_state(state)
            assert play(other, actions) == known
        env.set_state(state)


def test_the_checks_find_it_reproducible_and_restorable():
    report = check_env(EnvConfig("penstock.envs.atari:atari", {"game": "pong", "sticky": 0.25}))
    assert report.reproducible
    assert report.has_state
    assert report.spec.obs.shape == (4, 84, 84)
    assert report.spec.obs.is_image


def rows(pool: Any, T: int, batch: SampleBatch | None = None, seed: int = 0) -> SampleBatch:
    out = batch or allocate_batch(pool.spec, BatchSpec(T, pool.groups[-1].slots.stop), env_info=pool.info_keys)
    pool.bind([out])
    out.action[...] = np.random.default_rng(seed).integers(0, 4, out.action.shape)
    for t in range(T):
        for g in range(len(pool.groups)):
            pool.send(g, t)
        for _ in pool.groups:
            pool.recv()
    return out


def test_a_run_is_resumed_without_a_journal():
    config = EnvConfig(partial(atari, "breakout", sticky=0.25), info_keys=("life_lost",))
    pool = SerialPool(config, 1, slice(0, 2))
    batch = rows(pool, 30)
    state, last = pool.get_state(), batch.copy()
    known = rows(pool, 30, batch, seed=1).copy()
    again = SerialPool(config, 1, slice(0, 2))
    resumed = allocate_batch(again.spec, BatchSpec(30, 2), env_info=again.info_keys)
    assert again.set_state(state, [last], [None, None]) == []
    resumed.obs[-1], resumed.first[-1], resumed.prev_reward[-1] = last.obs[-1], last.first[-1], last.prev_reward[-1]
    resumed.prev_action[-1] = last.prev_action[-1]
    rows(again, 30, resumed, seed=1)
    assert np.array_equal(resumed.obs, known.obs)
    assert np.array_equal(resumed.reward, known.reward)


@pytest.mark.parametrize("groups", [1, 2])
def test_lost_lives_end_no_episode_and_rewards_are_the_games_own(groups: int):
    config = EnvConfig("penstock.envs.atari:atari_vector", {"game": "breakout"}, info_keys=("life_lost", "lives"))
    pool = NativeGroups(config, 2, 4, groups)
    batch = rows(pool, 500)
    lost = batch.info["env"]["life_lost"]
    lives = batch.info["env"]["lives"]
    ended = batch.terminated | batch.truncated
    assert ended.any()
    assert np.nansum(lost) > ended.sum()
    assert not (ended & (lost > 0)).any()
    assert np.array_equal(lost[1:] == 1, (lives[1:] < lives[:-1]) & ~ended[1:] & batch.valid[1:])
    assert np.array_equal(~batch.valid[1:], ended[:-1])
    pool.close()


def test_rewards_are_not_clipped():
    env, many = atari("ms_pacman"), atari_vector("ms_pacman", 1)
    env.reset(seed=1)
    many.reset(seed=1)
    assert max(env.step(3)[1] for _ in range(150)) == 10.0
    assert max(many.step(np.array([3]))[1][0] for _ in range(150)) == 10


def test_sticky_actions_repeat_the_frame_before():
    env = atari("pong", sticky=0.25, noop_max=0)
    env.reset(seed=0)
    taken: list[int] = []

    class Recorded:
        def __init__(self, ale: Any) -> None:
            self.ale = ale

        def __getattr__(self, name: str) -> Any:
            return getattr(self.ale, name)

        def act(self, action: int) -> int:
            taken.append(action)
            return self.ale.act(action)

    env._ale = Recorded(env._ale)  # pyright: ignore
    for t in range(700):
        env.step(2 + t % 2)
    right, left = (env._actions[a] for a in (2, 3))  # pyright: ignore
    wanted = [right if (t // 4) % 2 == 0 else left for t in range(2800)]
    changes = [t for t in range(4, 2800, 4)]
    stuck = np.mean([taken[t] != wanted[t] for t in changes])
    assert abs(stuck - 0.25) < 0.06
    twice = np.mean([taken[t + 1] != wanted[t + 1] for t in changes])
    assert abs(twice - 0.0625) < 0.03


@pytest.mark.parametrize("maker", [atari, atari_vector])
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"game": "Pong"}, "unknown Atari game 'Pong'; did you mean 'pong'"),
        ({"game": "combat"}, "several players"),
        ({"game": "pong", "sticky": 1.0}, "sticky=1.0; expected a probability"),
        ({"game": "pong", "noop_max": -1}, "noop_max=-1; expected"),
        ({"game": "pong", "frame_skip": 0}, "frame_skip=0"),
    ],
)
def test_what_cannot_be_played_is_refused(maker: Any, settings: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        maker(**settings)


@pytest.mark.parametrize(("missing", "package"), [("ale_py.roms", "ale_py"), ("cv2", "opencv")])
def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch, missing: str, package: str):
    real = module.importlib.import_module

    def without(name: str) -> Any:
        if name == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name)

    monkeypatch.setattr(module.importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed.*penstock\[atari\]"):
        atari("pong")


def test_the_screen_is_shown_on_request():
    env = atari("pong", render_mode="rgb_array")
    env.reset(seed=0)
    assert env.render().shape == (210, 160, 3)
    assert atari("pong").render() is None
    with pytest.raises(ConfigError, match="render_mode='human'"):
        atari("pong", render_mode="human")
