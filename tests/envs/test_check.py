from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.spec import LeafSpec
from penstock.envs.check import action_noise_size, check_env, sample_action
from penstock.envs.contract import describe_reset_violation, describe_step_violation, describe_violation
from penstock.envs.make import EnvConfig
from penstock.envs.spaces import space_to_spec
from penstock.envs.toy import FAULTS, Counter, Echo, FaultEnv, Masked
from penstock.envs.toy.faults import CRASHES, DICT_FAULTS, OBS_FAULTS, RESULT_FAULTS

BOX = LeafSpec("box", (3,), "float32", -1.0, 1.0)

SENSOR = {
    "nan_obs": ("got nan at [1]", "expected finite", "division by zero"),
    "inf_obs": ("got inf at [1]", "expected finite", "division by zero"),
    "wrong_shape": ("got shape [4]", "expected [3]", "nothing is broadcast"),
    "wrong_dtype": ("got dtype float64", "expected float32", "obs.astype(np.float32)"),
    "out_of_space": ("got 7.0 at [1]", "expected at most 1.0", "clip"),
    "scalar_obs": ("got shape []", "expected [3]", "nothing is broadcast"),
    "list_obs": ("got list", "expected a numpy array float32[3]", "np.asarray(obs, dtype=np.float32)"),
    "none_obs": ("got NoneType", "expected a numpy array float32[3]", "np.asarray"),
    "reused_buffer": ("got the memory", "has changed", "expected a new array", "obs.copy()"),
}
RESULT = {
    "short_tuple": ("got tuple of 4", "expected a tuple (obs, reward, terminated", "split done"),
    "inf_reward": ("reward: got inf", "expected a finite number", "division by zero"),
    "nan_reward": ("reward: got nan", "expected a finite number", "division by zero"),
    "str_reward": ("reward: got str 'abc'", "expected one real number", "float(reward)"),
    "none_reward": ("reward: got NoneType", "expected one real number", "float(reward)"),
    "array_reward": (
        "reward: got array float64[2]",
        "expected one real number",
        "penstock.envs.wrappers:WeightedReward",
    ),
    "non_bool": ("terminated: got int 0", "expected a bool", "bool(terminated)"),
    "none_info": ("info: got NoneType", "expected a dict", "return {}"),
}
STRUCTURE = {
    "extra_key": ("got keys ['mode', 'sensor', 'surprise']", "expected ['mode', 'sensor']", "unexpected ['surprise']"),
    "missing_key": ("got keys ['mode']", "expected ['mode', 'sensor']", "missing ['sensor']"),
    "not_a_dict": ("got array float32[3]", "expected a dict with keys ['mode', 'sensor']", "Dict"),
}


def test_the_tables_above_cover_every_fault():
    assert SENSOR.keys() == OBS_FAULTS.keys() | {"reused_buffer"}
    assert RESULT.keys() == RESULT_FAULTS.keys()
    assert STRUCTURE.keys() == DICT_FAULTS.keys()
    rest = {"none", "raise_in_init", "raise_in_reset", "unseeded"} | CRASHES.keys()
    assert set(FAULTS) == SENSOR.keys() | RESULT.keys() | STRUCTURE.keys() | rest


@pytest.mark.parametrize("fault", [*SENSOR, *RESULT])
def test_faults_are_named_with_place_and_cure(fault: str):
    step = 0 if fault == "reused_buffer" else 3
    with pytest.raises(EnvContractError, match=rf"^slot 0, step {step} of episode 0 \(seed \d+\): ") as caught:
        check_env(EnvConfig(FaultEnv, {"fault": fault}, checks="always"))
    for part in {**SENSOR, **RESULT}[fault]:
        assert part in str(caught.value)
    if fault in SENSOR:
        assert "observation: got" in str(caught.value)


@pytest.mark.parametrize("fault", [*SENSOR, *STRUCTURE])
def test_faults_in_a_dict_are_named_by_key(fault: str):
    with pytest.raises(EnvContractError) as caught:
        check_env(EnvConfig(FaultEnv, {"fault": fault, "dict_obs": True}, checks="always"))
    for part in {**SENSOR, **STRUCTURE}[fault]:
        assert part in str(caught.value)
    assert ("observation: got" if fault in STRUCTURE else "observation['sensor']: got") in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "place", "cause"),
    [
        ("raise_in_step", "step 3 of episode 0", "ValueError: the arm fell off"),
        ("odd_error_in_step", "step 3 of episode 0", "OddError: odd 3: two arguments"),
        ("exit_in_step", "step 3 of episode 0", "SystemExit: 7"),
        ("raise_in_reset", "reset of episode 1", "RuntimeError: the door is locked"),
    ],
)
def test_exceptions_are_wrapped_with_their_traceback(fault: str, place: str, cause: str):
    config = EnvConfig(FaultEnv, {"fault": fault, "at": 1 if fault == "raise_in_reset" else 3})
    with pytest.raises(EnvWorkerError, match=rf"slot 0, {place} \(seed \d+\) raised {cause}") as caught:
        check_env(config)
    assert "faults.py" in str(caught.value)
    assert not isinstance(caught.value, EnvContractError)


def test_values_are_checked_as_the_settings_say():
    found = {}
    for fault in ("out_of_space", "nan_obs", "reused_buffer", "wrong_dtype"):
        for checks in ("always", "sampled", "finite", "off"):
            try:
                found[fault, checks] = check_env(EnvConfig(FaultEnv, {"fault": fault}, checks=checks)).out_of_bounds
            except EnvContractError as error:
                found[fault, checks] = f"refused: {error}"
    refused = {key for key, message in found.items() if message and message.startswith("refused")}
    assert refused == {
        ("out_of_space", "always"),
        *(("nan_obs", checks) for checks in ("always", "sampled", "finite")),
        *(("reused_buffer", checks) for checks in ("always", "sampled", "finite")),
        *(("wrong_dtype", checks) for checks in ("always", "sampled", "finite", "off")),
    }
    assert found["out_of_space", "finite"] is found["out_of_space", "off"] is None
    for checks in ("always", "sampled"):
        message = found["out_of_space", checks]
        assert message is not None
        assert "step 3 of episode 0" in message
        assert "--env-checks finite" in message


def test_memory_that_never_changes_may_be_shared():
    class Window(Counter):
        prices = np.arange(40, dtype=np.float32)

        def observe(self) -> Any:
            return self.prices[self.t : self.t + 1]

    assert check_env(Window).reproducible


def test_a_good_environment_is_described():
    report = check_env(EnvConfig(FaultEnv), steps=25)
    assert report.spec.obs == BOX
    assert report.spec.action == LeafSpec("discrete", (), "int64", sizes=(2,))
    assert (report.reproducible, report.has_state, report.steps) == (True, False, 25)
    assert 0 < report.step_s < 1
    assert 0 < report.reset_s < 1


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Acrobot-v1", "Blackjack-v1", Masked])
def test_known_environments_pass_and_are_reproducible(env: Any):
    assert check_env(env).reproducible


def test_randomness_from_outside_the_seed_is_found():
    assert not check_env(EnvConfig(FaultEnv, {"fault": "unseeded"})).reproducible


def test_state_carried_over_between_episodes_is_found():
    report = check_env(Echo)
    assert not report.reproducible
    assert report.has_state


def test_what_differs_between_instances_is_found():
    made = []

    def factory() -> gym.Env:
        made.append(None)
        return Counter(terminate_at=4 + len(made))

    assert not check_env(factory).reproducible


def test_actions_come_from_the_seed_and_not_from_the_action_space():
    seen: list[list[int]] = []

    class Recorder(Counter):
        def __init__(self) -> None:
            super().__init__(terminate_at=None)
            seen.append([])
            self.action_space.sample = lambda *_: pytest.fail("sampled")  # pyright: ignore

        def step(self, action: Any) -> Any:
            assert np.ndim(action) == 0
            hash(action)
            seen[-1].append(int(action))
            return super().step(action)

    check_env(Recorder, seed=4)
    check_env(Recorder, seed=4)
    check_env(Recorder, seed=5)
    assert seen[0] == seen[2] != seen[4]
    assert set(seen[0]) == {0, 1}


def test_instances_are_closed_even_if_close_fails():
    closed = []

    class Closing(Counter):
        def close(self) -> None:
            closed.append(self)
            raise RuntimeError("cannot close")

    check_env(Closing)
    assert len(closed) == 2


def test_vector_environments_must_reset_at_the_next_step():
    report = check_env(EnvConfig(CartPoleVectorEnv, {"num_envs": 4}))
    assert report.spec.obs.shape == (4,)
    assert not report.reproducible
    sync = {"id": "CartPole-v1", "num_envs": 2, "vectorization_mode": "sync"}
    assert check_env(EnvConfig(gym.make_vec, sync)).steps == 0
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.DISABLED):
        config = EnvConfig(gym.make_vec, {**sync, "vector_kwargs": {"autoreset_mode": mode}})
        with pytest.raises(
            ConfigError, match=rf"SyncVectorEnv resets by {mode}.*autoreset_mode=AutoresetMode\.NEXT_STEP"
        ):
            check_env(config)


def test_the_autoreset_mode_may_be_text_or_missing():
    class Vector(CartPoleVectorEnv):
        metadata = {"autoreset_mode": "next_step"}  # noqa: RUF012

    class Silent(CartPoleVectorEnv):
        metadata = {}  # noqa: RUF012

    assert check_env(Vector).steps == 0
    with pytest.raises(ConfigError, match="does not name its autoreset mode"):
        check_env(Silent)


@pytest.mark.parametrize(
    ("obs", "leaf", "part"),
    [
        (3, LeafSpec("discrete", (), "int64", sizes=(3,), start=1), None),
        (np.int8(1), LeafSpec("discrete", (), "int64", sizes=(3,), start=1), None),
        (np.array(2), LeafSpec("discrete", (), "int64", sizes=(3,), start=1), None),
        (0, LeafSpec("discrete", (), "int64", sizes=(3,), start=1), "got 0, expected 1 to 3"),
        (4, LeafSpec("discrete", (), "int64", sizes=(3,), start=1), "got 4, expected 1 to 3"),
        (True, LeafSpec("discrete", (), "int64", sizes=(3,)), "got bool True, expected an integer"),
        (1.0, LeafSpec("discrete", (), "int64", sizes=(3,)), "got float 1.0, expected an integer"),
        (np.array([1]), LeafSpec("discrete", (), "int64", sizes=(3,)), "got array int64[1]"),
        (np.array([0, 4]), LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 5), start=(0, 0)), None),
        (np.array([0, 5]), LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 5), start=(0, 0)), "got 5 at [1]"),
        (np.array([0, 0]), LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 5), start=(0, 1)), "at least 1"),
        (np.array([1, 0], np.int8), LeafSpec("multi_binary", (2,), "int8"), None),
        (np.array([1, 2], np.int8), LeafSpec("multi_binary", (2,), "int8"), "got 2 at [1], expected at most 1"),
        (np.array([1, 0]), LeafSpec("multi_binary", (2,), "int8"), "got dtype int64, expected int8"),
        (np.full((2, 2), 255, np.uint8), LeafSpec("box", (2, 2), "uint8", 0.0, 255.0), None),
        (np.full((2, 2), 255, np.uint8), LeafSpec("box", (2, 2), "uint8", 0.0, 254.0), "got 255 at [0, 0]"),
        (np.float32(0.5), LeafSpec("box", (), "float32", 0.0, 1.0), None),
        (np.array([-2.0, 9.0], np.float32), LeafSpec("box", (2,), "float32", (-2.0, 0.0), np.inf), None),
        (np.array([0.0, -0.5], np.float32), LeafSpec("box", (2,), "float32", (-2.0, 0.0)), "got -0.5 at [1]"),
        (np.array([0.0, np.inf], np.float32), LeafSpec("box", (2,), "float32"), "got inf at [1]"),
    ],
)
def test_describe_violation_of_one_leaf(obs: Any, leaf: LeafSpec, part: str | None):
    message = describe_violation(obs, leaf, "obs")
    assert message is None if part is None else (message is not None and part in message)


@pytest.mark.parametrize(
    ("shape", "call"), [((8, 9, 3), ", or return np.moveaxis(obs, -1, -3)"), ((8, 3, 9), "declare it so")]
)
def test_an_image_with_its_channels_at_the_other_end_is_told_how_to_turn_it(shape: tuple[int, ...], call: str) -> None:
    said = describe_violation(np.zeros(shape, np.uint8), LeafSpec("box", (3, 8, 9), "uint8", 0.0, 255.0), "obs")
    assert said is not None and said.endswith(call)


def test_describe_violation_finds_the_path_in_a_tree():
    spec = {"a": (BOX, LeafSpec("discrete", (), "int64", sizes=(2,)))}
    good = np.zeros(3, np.float32)
    assert describe_violation({"a": (good, 1)}, spec, "obs") is None
    assert (describe_violation({"a": (good, 2)}, spec, "obs") or "").startswith("obs['a'][1]: got 2")
    assert "got list" in (describe_violation({"a": [good, 1]}, spec, "obs") or "")
    assert "got tuple of 1, expected a tuple of 2" in (describe_violation({"a": (good,)}, spec, "obs") or "")


def test_bounds_are_those_that_gymnasium_knows():
    space = spaces.Box(np.float32(-4.8), np.float32(4.8), (2,))
    assert describe_violation(np.full(2, 4.8, np.float32), space_to_spec(space, "obs"), "obs") is None
    above = np.nextafter(np.full(2, 4.8, np.float32), np.float32(5))
    assert describe_violation(above, space_to_spec(space, "obs"), "obs") is not None


@pytest.mark.parametrize("reward", [1, 1.5, True, np.float32(2), np.int8(1), np.bool_(True), np.array(2.0)])
def test_numbers_that_are_rewards(reward: Any):
    assert describe_step_violation((None, reward, False, np.bool_(True), {})) is None


@pytest.mark.parametrize(
    ("reward", "part"),
    [(np.array([2.0]), "reward.item()"), (1e39, "fits float32"), (1j, "real number"), (np.array("x"), "real number")],
)
def test_what_is_no_reward(reward: Any, part: str):
    assert part in (describe_step_violation((None, reward, False, False, {})) or "")


def test_describe_reset_violation():
    assert describe_reset_violation((0, {})) is None
    assert "got int 0, expected a tuple (obs, info)" in (describe_reset_violation(0) or "")
    assert "info: got list" in (describe_reset_violation((0, [])) or "")


def test_sample_action_by_hand():
    spec = (
        LeafSpec("box", (2,), "float32", (-3.0, 0.0), (5.0, np.inf)),
        LeafSpec("box", (1,), "float64"),
        LeafSpec("discrete", (), "int64", sizes=(4,), start=10),
        LeafSpec("multi_discrete", (2,), "int64", sizes=(2, 3), start=(0, 5)),
        LeafSpec("multi_binary", (2,), "int8"),
        LeafSpec("box", (1,), "uint8", 0.0, 3.0),
    )
    assert action_noise_size(spec) == 9
    u = np.array([[0.5, 0.25, 0.75, 0.3, 0.6, 0.9, 0.4, 0.6, 0.99], [0.25, 0.5, 0.25, 0.99, 0.4, 0.1, 0.6, 0.4, 0.01]])
    box, free, one, many, bits, pixel = sample_action(spec, u)
    assert box.tolist() == [[1.0, 0.5], [-1.0, 1.0]]
    assert free.tolist() == [[0.5], [-0.5]]
    assert one.tolist() == [11, 13]
    assert many.tolist() == [[1, 7], [0, 5]]
    assert bits.tolist() == [[1, 0], [0, 1]]
    assert pixel.tolist() == [[3], [0]]
    assert [x.dtype.name for x in (box, free, one, many, bits, pixel)] == [
        "float32", "float64", "int64", "int64", "int8", "uint8",
    ]  # fmt: skip


def test_sampled_actions_lie_in_their_space_and_cover_it():
    space = spaces.Dict({
        "a": spaces.Discrete(3, start=-1),
        "b": spaces.Tuple((spaces.Box(-2, 7, (2,), np.float32), spaces.MultiDiscrete([2, 4]))),
        "c": spaces.MultiBinary(3),
    })  # fmt: skip
    spec = space_to_spec(space, "action")
    u = np.random.default_rng(0).uniform(size=(500, action_noise_size(spec))).astype(np.float32)
    u[0], u[1] = 2.0**-24, 1 - 2.0**-24
    many = sample_action(spec, u)
    for i in range(500):
        one = {"a": many["a"][i], "b": (many["b"][0][i], many["b"][1][i]), "c": many["c"][i]}
        assert one in space
        assert describe_violation(one, spec, "action") is None
    assert np.unique(many["a"], return_counts=True)[1].min() > 120
    assert many["b"][0].mean() == pytest.approx(2.5, abs=0.3)
    assert len(np.unique(many["b"][1], axis=0)) == 8


def test_masked_actions_are_legal_and_even():
    spec = LeafSpec("multi_discrete", (2,), "int64", sizes=(3, 2), start=(0, 4))
    u = np.random.default_rng(0).uniform(size=(4000, 2))
    mask = np.tile(np.array([[1, 0, 1, 0, 1], [0, 1, 0, 0, 0]], np.int8), (2000, 1))
    drawn = sample_action(spec, u, mask)
    assert set(drawn[::2, 0]) == {0, 2}
    assert set(drawn[1::2, 0]) == {1}
    assert set(drawn[::2, 1]) == {5}
    assert (drawn[::2, 0] == 0).mean() == pytest.approx(0.5, abs=0.05)
    assert set(drawn[1::2, 1]) == {4, 5}, "a dimension without a legal choice is drawn from all"
    with pytest.raises(ConfigError, match="no choices to mask"):
        sample_action(BOX, u[:, :1].repeat(3, 1), mask)


class NothingLegal(gym.Env[Any, Any]):
    """Allows nothing in the third step, and at the end, where it may."""

    observation_space = spaces.Dict(
        {"x": spaces.Box(-1, 1, (1,), np.float32), "action_mask": spaces.Box(0, 1, (5,), np.int8)}
    )
    action_space = spaces.MultiDiscrete([3, 2])

    def __init__(self, never: tuple[int, ...]) -> None:
        self.never, self.t = never, 0

    def _obs(self) -> Any:
        mask = np.ones(5, np.int8)
        if self.t in self.never:
            mask[3:] = 0
        return {"x": np.zeros(1, np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), 0.0, self.t == 5, False, {}


def test_a_mask_that_allows_nothing_is_refused_where_an_action_is_asked_for():
    check_env(lambda: NothingLegal((5,)))
    with pytest.raises(EnvContractError, match=r"slot 0, step 2 .*only zeros for dimension 1 of the action.*legal"):
        check_env(lambda: NothingLegal((2, 5)))
    check_env(EnvConfig(lambda: NothingLegal((2, 5)), checks="off"))
