"""Samplers by name, their settings on the command line, and those that ask for too much memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

import penstock as ps
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec
from penstock.samplers import SAMPLERS, find_sampler, sized
from tests.workers.first_batches import PLACES, TWO_KINDS, no_process_is_left

__all__ = ["no_process_is_left"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--sampler", "cpu", "--sampler.groups", "2"), "use AlternatingSampler (--sampler alternating)"),
        (("--sampler", "no-overlap-alternating", "--sampler.B", "4", "--sampler.groups", "5"), "use B>=5 or groups<=4"),
        (("--sampler", "gpu", "--sampler.device", "cuda:77"), "use 'cpu'"),
    ],
)  # fmt: skip
def test_the_command_line_says_the_same_and_ends_with_2(
    options: tuple[str, ...], text: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["train", "ppo", "--env", "CartPole-v1", "--preset", "none", "--run.dir", str(tmp_path / "run"), *options]
    try:
        code: Any = main(argv)
    except SystemExit as error:
        code = error.code
    out, err = capfd.readouterr()
    assert code == 2
    assert text in " ".join((out + err).replace("│", " ").split())
    assert "Traceback" not in err
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_said_before_any_is_taken() -> None:
    sampler = ps.GpuSampler(T=2**31, B=64, workers=1).build("CartPole-v1")
    agent = ps.PPO().build(sampler.spec).agent
    sampler._training = None
    try:
        with pytest.raises((ConfigError, MemoryError), match=r"bytes of shared memory|Unable to allocate"):
            sampler.initialize(agent)
    finally:
        sampler.shutdown()


@pytest.mark.parametrize("kind", ["serial", *TWO_KINDS])
@pytest.mark.parametrize("T", [2**30, 2**40])
def test_a_batch_too_large_for_memory_is_refused_with_its_bytes_before_it_is_taken(kind: str, T: int) -> None:
    settings = ps.SerialSampler(T, 64) if kind == "serial" else PLACES[kind](T, 64, 1)
    sampler = settings.build("Pendulum-v1")
    taken = psutil.Process().memory_info().rss
    try:
        with pytest.raises(ConfigError, match=r"(?s)([TGP]iB|,\d{3} bytes).*smaller.*T or B"):
            sampler.initialize(ps.PPO().build(sampler.spec).agent)
        assert psutil.Process().memory_info().rss - taken < 1 << 28
    finally:
        sampler.shutdown()


# By name.


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_name_has_settings_that_build(name: str) -> None:
    found = find_sampler(name)
    assert f"{found.__module__}:{found.__name__}" == SAMPLERS[name]
    assert callable(found.build)


def test_settings_of_ones_own_are_found_by_module_and_name() -> None:
    assert find_sampler("penstock.samplers.gpu:GpuSampler") is ps.GpuSampler
    assert find_sampler("dataclasses:dataclass") is dataclass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpuu", r"^unknown sampler 'gpuu'; did you mean .*'gpu'"),
        ("alternate", r"^unknown sampler 'alternate'; did you mean .*'alternating'"),
        ("xyzzy", r"^unknown sampler 'xyzzy'; known: alternating, async, async-alternating, .*runners, serial$"),
        ("penstock.samplers.gpu:GpuSamplers", r"GpuSamplers"),
        ("no_such_module:Sampler", r"no_such_module"),
    ],
)
def test_an_unknown_name_brings_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_sampler(name)


@pytest.mark.parametrize(
    ("settings", "T", "B", "same"),
    [
        (ps.SerialSampler(128, 16, reset="batch_end"), 5, 2, {"reset": "batch_end"}),
        (ps.CpuSampler(128, 16, workers=8), 5, 4, {"workers": 4, "groups": 1}),
        (ps.CpuSampler(128, 16, workers=3), 5, 64, {"workers": 3}),
        (ps.GpuSampler(128, 16, workers=4, device="cpu"), 5, 1, {"workers": 1, "groups": 1, "device": "cpu"}),
        (ps.AlternatingSampler(128, 16, workers=8), 5, 7, {"workers": 3, "groups": 2}),
        (ps.AlternatingSampler(128, 16, workers=2, groups=4), 5, 3, {"workers": 1, "groups": 3}),
        (ps.NoOverlapAlternatingSampler(128, 16), 5, 1, {"workers": 1, "groups": 1, "overlap": False}),
    ],
)
def test_settings_of_another_size_keep_the_rest_where_slots_suffice(settings: Any, T: int, B: int, same: Any) -> None:
    found = sized(settings, BatchSpec(T, B))
    assert found == replace(settings, T=T, B=B, **same)
    assert type(found) is type(settings)
    assert found.spec == (T, B)


def test_the_size_of_an_asynchronous_sampler_is_that_of_its_inner_one() -> None:
    settings = ps.AsyncCpuSampler(ps.CpuSampler(128, 16, workers=8), depth=2)
    assert sized(settings, BatchSpec(5, 4)) == ps.AsyncCpuSampler(ps.CpuSampler(5, 4, workers=4), depth=2)
    assert settings.spec == (128, 16)
