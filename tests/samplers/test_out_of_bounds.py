import warnings
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import penstock as ps
from penstock.core.batch import allocate_batch
from penstock.core.errors import EnvContractError
from penstock.core.spec import BatchSpec, EnvSpec
from penstock.envs.make import EnvConfig
from penstock.envs.pools.bounds import OutOfBounds
from penstock.envs.spaces import space_to_spec
from penstock.envs.toy import Overshoot
from penstock.testing.samplers import EchoAgent
from tests.samplers.placed import PLACES

BOXES = spaces.Dict({
    "a": spaces.Box(-1, 1, (2, 2), np.float32),
    "b": spaces.Discrete(3),
    "c": spaces.Box(-np.inf, np.inf, (1,), np.float32),
    "d": spaces.MultiBinary(2),
})  # fmt: skip


def first(values: Any, **checks: Any) -> OutOfBounds:
    spec = EnvSpec(space_to_spec(BOXES, "observation"), space_to_spec(spaces.Discrete(2), "action"))
    batch = allocate_batch(spec, BatchSpec(3, 2))
    batch.valid[...] = True
    for key, (at, value) in values.items():
        batch.obs[key][at] = value
    bounds = OutOfBounds(EnvConfig(Overshoot, **checks), spec, first_slot=10)
    bounds.look(batch)
    return bounds


def test_steps_are_counted_by_the_observation_they_return() -> None:
    with pytest.warns(
        UserWarning, match=r"slot 11 of .*Overshoot, row 2 of the batch: obs\['a'\]: got 1\.5 at \[0, 1\]"
    ):
        assert first({"a": ((2, 1, 0, 1), 1.5), "b": ((2, 1), 9), "d": ((3, 0, 1), 2)}).count == 2
    for inside in ({"a": ((2, 1, 0, 1), 1.0)}, {"c": ((2, 1), 1e30)}, {"a": ((2, 1), np.nan)}, {"a": ((0, 1), 9.0)}):
        assert first(inside).count == 0, "row 0 was the last row of the batch before"
    assert first({"a": ((2, 1, 0, 1), 1.5)}, checks="finite").count == 0


def test_rows_that_are_no_steps_do_not_count() -> None:
    spec = EnvSpec(space_to_spec(spaces.Box(0, 1, (1,)), "observation"), space_to_spec(spaces.Discrete(2), "action"))
    batch = allocate_batch(spec, BatchSpec(3, 1))
    batch.obs[...] = 7
    bounds = OutOfBounds(EnvConfig(Overshoot), spec, 0)
    bounds.look(batch)
    assert bounds.count == 0
    batch.first[0] = True
    with pytest.warns(UserWarning, match="row 0 of the batch"):
        bounds.look(batch)
    assert bounds.count == 0, "a reset is no step, but is worth a warning"


def played(settings: Any) -> tuple[dict[str, float], list[str]]:
    """Count after 36 rows and an evaluation, and the warnings said by then, of this process."""
    sampler = settings.build(EnvConfig(Overshoot), 3)
    try:
        sampler.initialize(EchoAgent(sampler.spec))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for itr in range(3):
                sampler.obtain_samples(itr)
            assert len(sampler.evaluate_agent(0, 6)) == 6
        found = {name: n for name, n in sampler.metrics().items() if name.startswith(("env/", "faults/"))}
        return found, [str(w.message) for w in said if "env/out_of_bounds" in str(w.message)]
    finally:
        sampler.shutdown()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("place", ["serial", "gpu-1", "async-serial-0"])
def test_every_sampler_goes_on_warns_once_and_reports_one_count(place: str) -> None:
    found, said = played(PLACES[place](12, 6))
    assert found == {"env/out_of_bounds": 4 * 4 * 6}
    if not place.startswith("async"):  # whose own process says it
        assert len(said) == 1
        assert "expected at most 1.0" in said[0]


def test_an_evaluation_warns_and_does_not_count() -> None:
    sampler = ps.SerialSampler(12, 6).build(EnvConfig(Overshoot), 3)
    sampler.initialize(EchoAgent(sampler.spec))
    with pytest.warns(UserWarning, match="env/out_of_bounds"):
        assert len(sampler.evaluate_agent(0, 6)) == 6
    assert sampler.metrics() == {}


def test_a_native_batched_environment_is_counted_too() -> None:
    def make() -> Any:
        return SyncVectorEnv([Overshoot] * 6, autoreset_mode=AutoresetMode.NEXT_STEP)

    sampler = ps.SerialSampler(12, 6).build(EnvConfig(make), 3)
    sampler.initialize(EchoAgent(sampler.spec))
    with pytest.warns(UserWarning, match="env/out_of_bounds"):
        sampler.obtain_samples(0)
    sampler.obtain_samples(1)
    sampler.obtain_samples(2)
    assert sampler.metrics()["env/out_of_bounds"] == 4 * 4 * 6


def test_the_count_goes_on_in_a_resumed_sampler_and_always_makes_it_an_error() -> None:
    sampler = ps.SerialSampler(12, 2).build(EnvConfig(Overshoot), 3)
    sampler.initialize(EchoAgent(sampler.spec))
    with pytest.warns(UserWarning, match="env/out_of_bounds"):
        sampler.obtain_samples(0)
    again = ps.SerialSampler(12, 2).build(EnvConfig(Overshoot), 3)
    again.initialize(EchoAgent(again.spec))
    again.load_state_dict(sampler.state_dict())
    assert again.metrics() == sampler.metrics() == {"env/out_of_bounds": 8.0}
    strict = ps.SerialSampler(12, 2).build(EnvConfig(Overshoot, checks="always"), 3)
    strict.initialize(EchoAgent(strict.spec))
    with pytest.raises(EnvContractError, match=r"episode 0, step 4, seed .*got 1\.25.*env_checks='finite'"):
        strict.obtain_samples(0)
