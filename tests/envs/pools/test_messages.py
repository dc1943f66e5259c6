from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from penstock.core.errors import ConfigError, EnvContractError, EnvWorkerError
from penstock.core.noise import env_seed
from penstock.core.spec import LeafSpec
from penstock.envs.make import Checks, EnvConfig
from penstock.envs.pools.messages import fail
from penstock.envs.toy import FAULTS, FaultEnv
from penstock.envs.toy.faults import CRASHES, DICT_FAULTS, OBS_FAULTS, RESULT_FAULTS
from penstock.samplers.live import LiveSampler
from penstock.samplers.serial import SerialSampler
from penstock.testing.samplers import EchoAgent

SEED, SLOT = 9, 1

VIOLATIONS = {
    "nan_obs": "got nan at [1]",
    "inf_obs": "got inf at [1]",
    "wrong_shape": "got shape [4], expected [3]",
    "wrong_dtype": "got dtype float64, expected float32",
    "out_of_space": "got 7.0 at [1], expected at most 1.0",
    "scalar_obs": "got shape [], expected [3]",
    "list_obs": "got list",
    "none_obs": "got NoneType",
    "extra_key": "unexpected ['surprise']",
    "missing_key": "missing ['sensor']",
    "not_a_dict": "got array float32[3], expected a dict",
    "short_tuple": "got tuple of 4, expected a tuple (obs, reward, terminated, truncated, info)",
    "inf_reward": "reward: got inf",
    "nan_reward": "reward: got nan",
    "str_reward": "reward: got str 'abc'",
    "none_reward": "reward: got NoneType",
    "array_reward": "reward: got array float64[2]",
    "non_bool": "terminated: got int 0, expected a bool",
    "none_info": "info: got NoneType, expected a dict",
}
VALUES = ("nan_obs", "inf_obs", "out_of_space")
"""What is looked for in the first episode, and in one row of 64 after it; all else is looked for always.

A value out of its space is an error with `always` only; see tests/samplers/test_out_of_bounds.py for the rest."""
EXCEPTIONS = {
    "raise_in_step": "ValueError: the arm fell off",
    "odd_error_in_step": "OddError: odd 3: two arguments",
    "exit_in_step": "SystemExit: 7",
}
HARMLESS = ("none", "reused_buffer", "unseeded")
TAKE_THE_PROCESS_ALONG = ("os_exit_in_step", "sigkill_in_step", "sigsegv_in_step", "hang_in_step")


def test_the_tables_above_cover_every_fault():
    tables = (VIOLATIONS, EXCEPTIONS, HARMLESS, TAKE_THE_PROCESS_ALONG)
    rest = {"raise_in_init", "raise_in_reset", "interrupt_in_step"}
    assert rest.union(*tables) == {*FAULTS}
    assert VIOLATIONS.keys() == OBS_FAULTS.keys() | DICT_FAULTS.keys() | RESULT_FAULTS.keys()
    assert EXCEPTIONS.keys() | {*TAKE_THE_PROCESS_ALONG, "interrupt_in_step"} == CRASHES.keys()


def faulty(fault: str, at: int, **kwargs: Any) -> Callable[[], FaultEnv]:
    """Makes environments of which only that of slot 1 is at fault; the first is made to see what is made."""
    made: list[FaultEnv] = []

    def make() -> FaultEnv:
        known = {"dict_obs": fault in DICT_FAULTS, "slot": len(made) - 1, "only_slot": SLOT}
        env = FaultEnv(fault, at, **(known | kwargs))
        made.append(env)
        return env

    return make


def live(fault: str, at: int, checks: Checks = "sampled", **kwargs: Any) -> LiveSampler:
    sampler = SerialSampler(T=5, B=3).build(EnvConfig(faulty(fault, at, **kwargs), checks=checks), SEED)
    sampler.initialize(EchoAgent(sampler.spec))
    return sampler


def caught(sampler: LiveSampler, batches: int) -> str | None:
    """The message of the fault, None if there was none. Checks the error's type and that the row is right."""
    for itr in range(batches):
        try:
            sampler.obtain_samples(itr)
        except EnvWorkerError as error:
            return f"{type(error).__name__}: {error}"
    return None


def place(episode: int, step: int, phase: str = "step") -> str:
    return f"in {phase}() at episode {episode}, step {step}, seed {env_seed(SEED, SLOT, episode)}: "


def check_message(message: str | None, episode: int, step: int, text: str, error: type[EnvWorkerError]) -> None:
    assert message is not None
    assert message.startswith(f"{error.__name__}: slot {SLOT} of ")
    assert place(episode, step) in message
    assert text in message
    assert "; last action " in message
    assert message.split("; last action ")[1][0] in "01"


@pytest.mark.parametrize("fault", VIOLATIONS)
def test_a_broken_contract_names_slot_episode_step_seed_and_action(fault: str):
    for at in (3, 10, 14):
        checks: Checks = "always" if fault == "out_of_space" or (fault in VALUES and at >= 10) else "sampled"
        message = caught(live(fault, at, checks), 12)
        check_message(message, at // 10, at % 10, VIOLATIONS[fault], EnvContractError)


@pytest.mark.parametrize("fault", EXCEPTIONS)
def test_an_exception_carries_its_traceback_and_cause_as_well(fault: str):
    for at in (0, 3, 10, 14):
        sampler = live(fault, at)
        with pytest.raises(EnvWorkerError) as error:
            for itr in range(5):
                sampler.obtain_samples(itr)
        message = f"{type(error.value).__name__}: {error.value}"
        check_message(message, at // 10, at % 10, EXCEPTIONS[fault], EnvWorkerError)
        assert "Traceback (most recent call last)" in message
        assert "faults.py" in message
        assert type(error.value.__cause__).__name__ == EXCEPTIONS[fault].split(":")[0]


def test_an_exception_in_reset_names_its_episode():
    for at in (0, 1, 2):
        message = caught(live("raise_in_reset", at), 12)
        assert message is not None
        assert message.startswith(f"EnvWorkerError: slot {SLOT} of ")
        assert place(at, 0, "reset") in message
        assert "RuntimeError: the door is locked" in message
        assert "faults.py" in message


@pytest.mark.parametrize("fault", VALUES)
@pytest.mark.parametrize(
    ("checks", "at", "found"),
    [
        ("sampled", 9, "in its row"),
        ("sampled", 57, "in its batch"),
        ("sampled", 58, "in its row"),
        ("always", 57, "in its row"),
        ("finite", 3, "in its row"),
        ("finite", 57, "in its batch"),
        ("off", 3, ""),
        ("off", 58, ""),
    ],
)
@pytest.mark.filterwarnings("ignore:.*out_of_bounds")
def test_a_bad_value_after_the_first_episode_is_found_in_one_row_of_64(fault: str, checks: Checks, at: int, found: str):
    """An episode of 10 steps takes 11 rows with its reset: step 58 of the environment is in row 63, the 64th."""
    if fault == "out_of_space" and checks != "always":
        found = ""
    for dict_obs in (False, True):
        message = caught(live(fault, at, checks, dict_obs=dict_obs), 25)
        if found == "in its row":
            check_message(message, at // 10, at % 10, VIOLATIONS[fault], EnvContractError)
        elif found == "in its batch":
            assert message is not None
            assert message.startswith(f"EnvContractError: slot {SLOT} of ")
            leaf = "obs['sensor'][1]" if dict_obs else "obs[1]"
            assert f"row {(at + at // 10) % 5 + 1} of the batch: {leaf}: got {fault[:3]}, expected a finite" in message
            assert message.split("; last action ")[1][0] in "01"
        else:
            assert message is None, message


@pytest.mark.parametrize("fault", [f for f in VIOLATIONS if f not in VALUES])
def test_what_is_no_value_is_found_with_checks_off(fault: str):
    check_message(caught(live(fault, 57, "off"), 25), 5, 7, VIOLATIONS[fault], EnvContractError)


@pytest.mark.parametrize("fault", HARMLESS)
def test_what_cannot_hurt_a_record_is_let_pass(fault: str):
    sampler = live(fault, 3, "always")
    for itr in range(6):
        batch, _ = sampler.obtain_samples(itr)
        for obs in batch.obs[:, SLOT], batch.obs[:, 0]:
            assert len({row.tobytes() for row in obs}) == len(obs), "one array that is returned for ever was not copied"


def test_a_failure_to_make_an_environment_is_told_at_construction():
    with pytest.raises(EnvWorkerError, match="raised RuntimeError: no simulator licence"):
        live("raise_in_init", 0)
    with pytest.raises(ConfigError, match="did you mean 'nan_obs'"):
        SerialSampler(T=5, B=3).build(EnvConfig(FaultEnv, {"fault": "nan_ops"}))


def test_an_interrupt_passes_through():
    sampler = live("interrupt_in_step", 3)
    with pytest.raises(KeyboardInterrupt):
        sampler.obtain_samples(0)
    sampler.shutdown()


def test_steps_are_counted_from_the_reset_where_random_steps_come_before_the_first_batch():
    for at in (0, 2, 25):
        factory = faulty("raise_in_step", at, length=20)
        sampler = SerialSampler(T=5, B=3, max_decorrelation_steps=15).build(EnvConfig(factory), SEED)
        sampler.initialize(EchoAgent(sampler.spec))
        message = caught(sampler, 20)
        check_message(message, at // 20, at % 20, "the arm fell off", EnvWorkerError)


def test_faults_of_an_evaluation_say_so():
    sampler = live("raise_in_step", 4)
    made = FaultEnv("raise_in_step", at=4)
    sampler.evaluate_agent(0, 3)
    pool: Any = sampler._evaluation.pool  # pyright: ignore
    pool.host.steps[2] = made.step
    made.reset(seed=0)
    with pytest.raises(
        EnvWorkerError, match=r"^evaluation slot 2 of .* in step\(\) at episode 0, step 4, seed \d+: Val"
    ):
        sampler.evaluate_agent(0, 3)


def test_the_reported_seed_and_actions_lead_to_the_fault_again():
    sampler = live("nan_obs", 14, "always")
    message = caught(sampler, 12)
    assert message is not None
    seed = int(message.split("seed ")[1].split(":")[0])
    step = int(message.split("step ")[1].split(",")[0])
    env = FaultEnv()
    obs, _ = env.reset(seed=seed)
    for _ in range(step):
        obs = env.step(0)[0]
    assert (sampler.last_batch.obs[:, SLOT] == obs).all(-1).any(), "the row before the fault is of another episode"


class OppositeRewards(gym.Env[Any, Any]):
    """Every other instance earns 1e39, the others -1e39: each overflows float32, and their sum is 0."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    made = 0

    def __init__(self) -> None:
        self.sign = 1 if OppositeRewards.made % 2 else -1
        self.steps = 0
        OppositeRewards.made += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), self.sign * 1e39, False, False, {}


def test_rewards_that_cancel_are_still_too_large():
    sampler = SerialSampler(T=5, B=2).build(EnvConfig(OppositeRewards), SEED)
    sampler.initialize(EchoAgent(sampler.spec))
    with pytest.raises(
        EnvContractError, match=r"slot 0 of .* reward: got -?1e\+39, expected a finite number that fits float32"
    ):
        sampler.obtain_samples(0)


def test_a_choice_that_the_space_does_not_have_is_the_agents():
    where, error = "slot 0", ValueError("invalid")
    choice = LeafSpec("discrete", (), "int64", sizes=(2,))
    with pytest.raises(EnvWorkerError, match=r"last action 2, which the agent chose \(action: .*have 2 outputs\?"):
        fail(where, error, 2, spec=choice)
    for action, spec in ((1, choice), (2, None), (np.zeros(2), LeafSpec("box", (2,), "float32"))):
        with pytest.raises(EnvWorkerError) as caught:
            fail(where, error, action, spec=spec)
        assert "which the agent chose" not in str(caught.value)
