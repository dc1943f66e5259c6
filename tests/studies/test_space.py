from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.studies.space import Dimension, check_space, read_space

EXP = ps.Experiment("CartPole-v1", ps.PPO(), ps.SerialSampler(T=16, B=4))


def only(form: object) -> Dimension:
    return read_space({"x": form})["x"]


def test_forms() -> None:
    assert only("loguniform(1e-5, 1e-2)") == Dimension("loguniform", 1e-5, 1e-2)
    assert only(" uniform( 0.9,1 ) ") == Dimension("uniform", 0.9, 1.0)
    assert only("int(1, 1e2)") == Dimension("int", 1, 100)
    assert only("logint(16,4096)") == Dimension("logint", 16, 4096)
    assert only("choice(32, 0.5, relu, true, none)").choices == (32, 0.5, "relu", True, None)
    assert only("choice([64,64], [256])").choices == ((64, 64), (256,))
    assert only("choice(linear(1e-3, 0), 3e-4)").choices == ("linear(1e-3, 0)", 3e-4)
    assert only([32, 64]).choices == (32, 64)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("logunifrom(1e-5, 1e-2)", "did you mean 'loguniform'"),
        ("loguniform(1e-5)", "two numbers|unpack"),
        ("loguniform(0, 1)", "above 0; use uniform"),
        ("uniform(1, 1)", "lower one first"),
        ("uniform(0, inf)", "finite"),
        ("uniform(a, b)", "could not convert"),
        ("int(1.5, 3)", "could not convert|1.5|whole"),
        ("choice(32)", "at least two"),
        ("choice(32, 32)", "each once"),
        ("choice(1, 2, 1.0)", r"1 and 1\.0 are equal.*each once"),
        ("choice(true, 1)", "True and 1 are equal"),
        ("1e-3", "expected loguniform"),
        (3, "expected loguniform"),
        ([print, 1], "no number, text or tuple"),
    ],
)
def test_a_form_that_is_none_is_refused(form: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        only(form)


def test_an_empty_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs settings to vary"):
        read_space({})


@pytest.mark.parametrize(
    ("path", "form", "message"),
    [
        ("algo.lrr", "uniform(0.1, 1)", "did you mean 'lr'"),
        ("algo.learning_rate", "uniform(0.1, 1)", "'lr'"),
        ("algo.discount", "uniform(0.9, 1.1)", "at 1.1: .*discount=1.1; expected 0 to 1"),
        ("algo.lr", "uniform(0, 1)", "at 0.0: .*more than 0"),
        ("sampler.T", "choice(16, 0)", "at 0: .*T=0"),
        ("algo.epochs", "uniform(1, 3.5)", "at 3.5"),
        ("algo.epochs", "uniform(1, 4)", r"at 2\.85.*use int or logint"),
        ("algo.minibatch", "loguniform(32, 64)", r"at 51\.77.*use int or logint"),
        ("run.seed", "int(1, 3)", "the same for all trials; use --run.seed"),
        ("lr", "uniform(0.1, 1)", "such as algo.lr"),
        ("alog.lr", "uniform(0.1, 1)", "'algo.'"),
    ],
)
def test_a_path_that_is_no_setting_and_a_value_beyond_its_limits_are_refused(
    path: str, form: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_space(read_space({path: form}), EXP)


def test_a_sound_space_passes() -> None:
    space = {
        "algo.lr": "loguniform(1e-5, 1e-2)",
        "sampler.T": "choice(32, 128)",
        "env_kwargs.gravity": "uniform(9, 10)",
        "algo.net.hidden": "choice([64,64], [256,256])",
        "algo.weight_decay": "choice(none, 0.5)",
    }
    check_space(read_space(space), EXP)


@pytest.mark.parametrize("form", ["loguniform(1e-5, 1e-2)", "uniform(-1, 2)", "int(3, 5)", "logint(2, 300)"])
def test_draws_and_explored_values_stay_inside_and_move(form: str) -> None:
    dimension, rng = only(form), np.random.default_rng(1)
    values = [dimension.drawn(rng) for _ in range(300)]
    assert all(map(dimension.holds, values))
    assert max(values) - min(values) > 0.9 * (dimension.high - dimension.low)
    near = [dimension.explored(values[0], rng) for _ in range(300)]
    assert all(map(dimension.holds, near))
    assert len(set(near)) > 1
    moved = [b for b in near if values[0] > 0 and 0.79 * values[0] < b < 1.26 * values[0]]
    assert len(moved) > 150 or dimension.whole or values[0] < 0
    assert any(b < values[0] for b in near)
    assert any(b > values[0] for b in near)
    up = [b for b in moved if b > values[0]]
    assert 0.25 * len(moved) < len(up) < 0.75 * len(moved) or dimension.whole or values[0] < 0


def test_explored_choices_are_those_beside() -> None:
    dimension, rng = only("choice(1, 2, 3, 4, 5)"), np.random.default_rng(1)
    near = [dimension.explored(3, rng) for _ in range(400)]
    assert near.count(2) + near.count(4) > 280
    assert set(near) == {1, 2, 3, 4, 5}
    assert {dimension.explored(1, rng) for _ in range(50)} >= {1, 2}


def test_a_value_is_of_a_dimension_only_with_its_type() -> None:
    assert only("choice(1, 2)").holds(1)
    assert not only("choice(1, 2)").holds(True)
    assert not only("int(1, 2)").holds(1.0)
    assert not only("uniform(0, 1)").holds(2.0)
