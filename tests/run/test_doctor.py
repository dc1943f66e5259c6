from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor

from penstock.run import doctor
from penstock.run.doctor import CONFLICTS, RowBits, conflicts, examine, ranges, row_bits

INPUTS = torch.arange(1.0, 34.0).unsqueeze(1)


def shown() -> tuple[int, str]:
    console = Console(file=io.StringIO(), width=200, highlight=False)
    return examine(console), console.file.getvalue()  # pyright: ignore


def pairs(**installed: str) -> list[tuple[str, str]]:
    versions = {name.replace("_", "-"): version for name, version in installed.items()}
    return [(c.package, c.other) for c in conflicts(versions.get)]


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        ({}, []),
        ({"dm_control": "1.0.40"}, []),
        ({"dm_control": "1.0.40", "mujoco": "3.9.2"}, []),
        ({"dm_control": "1.0.40", "mujoco": "4.0.0"}, [("dm-control", "mujoco")]),
        ({"dm_control": "1.0.40", "mujoco": "10.0"}, [("dm-control", "mujoco")]),
        ({"moviepy": "2.2.1", "pillow": "12"}, [("moviepy", "pillow")]),
        ({"moviepy": "2.2.1", "pillow": "11.3.0"}, []),
        ({"rliable": "1.2", "pandas": "3.1.0", "arch": "7.2"}, [("rliable", "pandas"), ("arch", "pandas")]),
        ({"torchrl": "0.14.1", "tensordict": "0.15.3"}, [("torchrl", "tensordict")]),
        ({"torchrl": "0.15.0", "tensordict": "0.15.3"}, []),
        ({"torchrl": "0.14.1", "tensordict": "0.14.3"}, []),
        ({"ray": "2.60.0", "gymnasium": "1.2.2"}, []),
        ({"ray": "2.60.0", "gymnasium": "1.4.0"}, []),  # which RLlib does not work with, but Ray does
    ],
)
def test_finds_conflicts_of_what_is_installed(installed: dict[str, str], found: list[tuple[str, str]]) -> None:
    assert pairs(**installed) == found


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("4.0.0", ">=4", True),
        ("4", ">1.2.2", True),
        ("1.2.2", ">1.2.2", False),
        ("1.2.2.0", ">1.2.2", False),
        ("1.10", "<1.9", False),
        ("2.13.0+cpu", "<2.13.1", True),
        ("0.15rc1", "<0.15", False),
        ("1.2", "", True),
        (None, "", False),
        (None, "<1", False),
    ],
)
def test_compares_releases_as_numbers(version: str | None, wanted: str, fits: bool) -> None:
    assert doctor._fits(version, wanted) is fits  # pyright: ignore[reportPrivateUsage]


def test_every_fix_is_a_requirement_of_one_of_the_two() -> None:
    for c in CONFLICTS:
        assert c.fix.startswith((c.package, c.other)), c


def test_equal_bits_are_one_group() -> None:
    found = row_bits("x", [lambda x: x * 2.0], INPUTS, range(1, 34))
    assert found == RowBits("x", (tuple(range(1, 34)),), True)


def test_groups_counts_by_their_bits_and_measures_the_padding_rule() -> None:
    def fewer_than_four_differ(x: Tensor) -> Tensor:
        return x + (1e-6 if len(x) < 4 else 0.0)

    assert row_bits("x", [fewer_than_four_differ], INPUTS, range(1, 9)) == RowBits(
        "x", ((1, 2, 3), (4, 5, 6, 7, 8)), True
    )


def test_one_of_several_networks_is_enough_to_tell() -> None:
    found = row_bits("x", [lambda x: x, lambda x: x + 1e-6 * (len(x) == 2)], INPUTS, (1, 2, 4))
    assert found == RowBits("x", ((1, 4), (2,)), True)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x + 1e-6 * (len(x) == 8),  # even in multiples of 4
        lambda x: x + 1e-6 * torch.arange(len(x)).unsqueeze(1),  # a row depends on its place
        lambda x: x + 1e-6 * x.sum(),  # and on its neighbours
    ],
    ids=["count", "place", "neighbours"],
)
def test_sees_a_padding_rule_that_fails(forward: doctor.Forward) -> None:
    assert not row_bits("x", [forward], INPUTS, range(1, 9)).padded


def test_ranges() -> None:
    assert ranges([1]) == "1"
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


def test_says_what_is_here_and_leaves_torch_as_it_was() -> None:
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    code, text = shown()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), generator)
    for word in (
        "penstock",
        torch.__version__,
        "cores",
        "layout",
        "placement",
        "for 64 slots, a core for each",
        "memory",
        "accelerator",
        "64, outputs: 1",
        "Nature CNN",
        "LSTM 64",
    ):
        assert word in text
    assert code == 0, text
    assert "The padding rule holds" in text


def test_a_rule_that_fails_is_named_and_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    bits = [RowBits("MLP", ((1, 2),), True), RowBits("LSTM", ((1,), (2,)), False)]
    monkeypatch.setattr(doctor, "measure_rows", lambda: bits)
    code, text = shown()
    assert code == 1
    assert "The padding rule FAILS here for LSTM:" in text
    assert "they differ" in text


def test_names_conflicts_with_their_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "conflicts", lambda: [CONFLICTS[0]])
    monkeypatch.setattr(doctor, "measure_rows", list)
    _, text = shown()
    assert "dm-control" in text
    assert "pip install 'mujoco<4'" in text
