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
from penstock.samplers import SAMPLERS, find_sampler, placed
from penstock.samplers.sampler import SamplerSettings
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
    with pytest.raises(ConfigError, match=r"dataclasses:dataclass is .*; expected a frozen dataclass with build"):
        find_sampler("dataclasses:dataclass")


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
    found = settings.sized(BatchSpec(T, B))
    assert found == replace(settings, T=T, B=B, **same)
    assert type(found) is type(settings)
    assert found.spec == (T, B)


def test_the_size_of_an_asynchronous_sampler_is_that_of_its_inner_one() -> None:
    settings = ps.AsyncCpuSampler(ps.CpuSampler(128, 16, workers=8), depth=2)
    assert settings.sized(BatchSpec(5, 4)) == ps.AsyncCpuSampler(ps.CpuSampler(5, 4, workers=4), depth=2)
    assert settings.spec == (128, 16)


# Shared among runners.


def test_the_slots_of_a_batch_are_divided_among_runners() -> None:
    settings = ps.RunnerSampler(3, ps.CpuSampler(128, 16, workers=8))
    assert settings.sized(BatchSpec(5, 12)) == ps.RunnerSampler(3, ps.CpuSampler(5, 4, workers=4))
    ready = ps.RunnerSampler(3, ps.SerialSampler(128, 16), mode="ready")
    assert ready.sized(BatchSpec(5, 4)).spec == (5, 4)  # of one runner, as is its batch


@pytest.mark.parametrize(
    ("B", "message"),
    [
        (8, r"sampler.runners=3 for the B=8 .*a number that divides 8; .*sampler.inner.B=3 .* for 9 in all$"),
        (2, r"sampler.runners=3 for the B=2 .*runners than slots make no sense; .*--sampler.inner.B 1\) for 3 in all$"),
    ],
)
def test_slots_that_runners_cannot_share_are_refused(B: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ps.RunnerSampler(3).sized(BatchSpec(5, B))


SERIAL = ps.SerialSampler(9, 12, reset="batch_end", max_decorrelation_steps=4)


@pytest.mark.parametrize(
    ("changes", "found", "rest"),
    [
        ({}, SERIAL, {}),
        ({"sampler.T": 3, "algo.lr": 1}, SERIAL, {"sampler.T": 3, "algo.lr": 1}),
        ({"sampler": "cpu"}, ps.CpuSampler(9, 12, reset="batch_end", max_decorrelation_steps=4), {}),
        (
            {"sampler.name": "runners", "sampler.runners": 4},
            ps.RunnerSampler(4, replace(SERIAL, B=3)), {"sampler.runners": 4},
        ),
        (
            {"sampler": "runners", "sampler.runners": "6", "sampler.min_runners": 6, "sampler.inner": "cpu"},
            ps.RunnerSampler(6, ps.CpuSampler(9, 2, 2, reset="batch_end", max_decorrelation_steps=4), min_runners=6),
            {"sampler.runners": "6", "sampler.min_runners": 6},
        ),
        (
            {"sampler": "runners", "sampler.runners": 5, "sampler.inner.B": "7"},
            ps.RunnerSampler(5, replace(SERIAL, B=7)), {"sampler.runners": 5, "sampler.inner.B": "7"},
        ),
        (
            {"sampler": "runners", "sampler.mode": "ready"},
            ps.RunnerSampler(2, SERIAL, mode="ready"), {"sampler.mode": "ready"},
        ),
        (
            {"sampler": "async", "sampler.inner.name": "cpu"},
            ps.AsyncSampler(ps.CpuSampler(9, 12, reset="batch_end", max_decorrelation_steps=4)), {},
        ),
        ({"sampler": ps.SerialSampler(1, 2)}, ps.SerialSampler(1, 2), {}),
    ],
)  # fmt: skip
def test_another_place_has_the_slots_and_the_content_of_the_one_before(changes: Any, found: Any, rest: Any) -> None:
    assert placed(SERIAL, changes) == (found, rest)


def test_a_sampler_named_again_keeps_its_settings_and_depth_goes_along() -> None:
    runners = ps.RunnerSampler(2, ps.SerialSampler(9, 6), depth=2, deadline_s=7.0)
    assert placed(runners, {"sampler": "runners"})[0] == runners
    assert placed(runners, {"sampler": "async-serial"})[0] == ps.AsyncSerialSampler(ps.SerialSampler(9, 12), depth=2)
    assert placed(runners, {"sampler.runners": 4})[0] == replace(runners, runners=4, inner=ps.SerialSampler(9, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "runner"}, r"unknown sampler 'runner'; did you mean .*'runners'"),
        ({"sampler": "runners", "sampler.inner": "alternate"}, r"sampler.inner='alternate'; did you mean .*'alternating'"),
        ({"sampler": "runners", "sampler.inner": "async"}, r"sampler.inner='async'; known: alternating, cpu, .*serial$"),
        ({"sampler.inner": "cpu"}, r"'cpu' with SerialSampler, which has no sampler inside it.*--sampler async.*runners$"),
        ({"sampler": "async-cpu", "sampler.inner": "gpu"}, r"AsyncCpuSampler, which is around a CpuSampler.*--sampler async"),
        ({"sampler": "runners", "sampler.runners": "many"}, r"^sampler.runners='many'.*expected a whole number"),
    ],
)  # fmt: skip
def test_a_place_that_does_not_fit_brings_the_fix(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(SERIAL, changes)


def test_samplers_whose_checkpoints_each_other_can_take_have_equal_content() -> None:
    serial = ps.SerialSampler(9, 12).content()
    assert ps.RunnerSampler(3, ps.CpuSampler(9, 4)).content() == serial
    assert ps.AlternatingSampler(9, 12).content() == serial
    ahead = ps.AsyncSampler(ps.CpuSampler(9, 12), depth=1).content()
    assert ps.RunnerSampler(2, ps.SerialSampler(9, 6), depth=1).content() == ahead
    others: list[Any] = [
        ps.SerialSampler(9, 13), ps.SerialSampler(8, 12), ps.SerialSampler(9, 12, reset="batch_end"),
        ps.SerialSampler(9, 12, max_decorrelation_steps=1), ps.AsyncSampler(ps.SerialSampler(9, 12), depth=0),
        ps.RunnerSampler(1, ps.SerialSampler(9, 12), mode="ready"),
        ps.AsyncSampler(ps.SerialSampler(9, 12), weights="newest"),
    ]  # fmt: skip
    assert all(other.content() not in (serial, ahead) for other in others)


def test_a_sampler_in_words() -> None:
    cpu = ps.CpuSampler(8, 4, workers=1)
    said = {
        "serial": ps.SerialSampler(8, 4),
        "cpu with 1 worker": cpu,
        "gpu with 2 workers": ps.GpuSampler(8, 4, workers=2),
        "async: cpu with 1 worker, depth 1": ps.AsyncSampler(cpu, depth=1),
        "runners: 4 on processes, 16 slots each, serial": ps.RunnerSampler(4, ps.SerialSampler(8, 16), "processes"),
        "runners: 1 on ray, 4 slots each, cpu with 1 worker, ready mode, depth 2": ps.RunnerSampler(
            1, cpu, mode="ready", depth=2
        ),
    }
    assert {sampler.described: sampler for sampler in said.values()} == said


# Settings of one's own.


@dataclass(frozen=True)
class Own(SamplerSettings):
    """It keeps `reset`, and says nothing of `speed`."""

    kept = ("reset", "discount")
    T: int = 4
    B: int = 6
    reset: str = "next_step"
    speed: int = 1
    discount: float | None = None

    def build(self, env: Any, seed: int = 0, *, share: Any = None) -> Any:
        return ps.SerialSampler(self.T, self.B).build(env, seed, share=share or ps.Share())


def test_settings_of_ones_own_answer_by_what_they_keep() -> None:
    own = Own(speed=3)
    assert (own.spec, own.name, own.described, own.cores) == ((4, 6), f"{__name__}:Own", "Own", 1)
    assert own.sized(BatchSpec(2, 3)) == Own(2, 3, speed=3)
    assert own.shares(4) == [Own(B=B, speed=3) for B in (2, 2, 1, 1)]
    assert own.with_discount(0.9) == Own(speed=3, discount=0.9) and own.with_discount(None) is own
    assert own.content() == Own().content() != Own(reset="batch_end").content()
    assert own.in_place_of(ps.CpuSampler(8, 2, reset="batch_end", discount=0.5)) == Own(4, 6, "batch_end", 3, 0.5)
    assert ps.AsyncSampler(own).shares(2) == [ps.AsyncSampler(Own(B=3, speed=3))] * 2
    with pytest.raises(ConfigError, match=r"sampler.inner=.*expected a synchronous sampler's settings"):
        ps.RunnerSampler(inner=own)  # it keeps no journal, so its episodes could not move to another runner
    with pytest.raises(ConfigError, match=r"Own has no setting 'sped'"):
        Own(sped=1)  # pyright: ignore[reportCallIssue]
