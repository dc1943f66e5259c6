"""Former names work, warn at the caller's line, and are refused once their version has come."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.algos.ppo import PPO
from penstock.cli.values import located
from penstock.core.config import from_plain, to_plain
from penstock.core.names import declared as declared_module
from penstock.core.names.renamed import former, renamed
from tests.parsed import ROOT

SAID = "PPO.clip_ratio is now PPO.clip; the old name goes in penstock 9.0"


@dataclass(frozen=True)
class Mine(PPO):
    own: int = 1


@pytest.fixture
def old_clip(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PPO as if its `clip` had been `clip_ratio`; all that is added to the classes is taken away again."""
    inits: dict[Any, Any] = {cls: cls.__init__ for cls in (PPO, Mine)}
    monkeypatch.setattr(PPO, "__former__", {}, raising=False)
    monkeypatch.setattr(PPO, "clip_ratio", None, raising=False)
    renamed("9.0", clip_ratio="clip")(PPO)
    yield
    for cls, init in inits.items():
        cls.__init__ = init


def line() -> int:
    return sys._getframe(1).f_lineno  # pyright: ignore[reportPrivateUsage]


@pytest.mark.usefixtures("old_clip")
def test_a_former_setting_works_in_every_place_and_warns_at_the_line_of_the_user() -> None:
    with pytest.warns(FutureWarning) as said:
        at, settings = line(), PPO(clip_ratio=0.3)  # pyright: ignore[reportCallIssue]
    assert [(str(one.message), one.filename, one.lineno) for one in said] == [(SAID, __file__, at)]
    assert settings == PPO(clip=0.3) and dataclasses.replace(settings, lr=1e-3).clip == 0.3
    exp = ps.Experiment("CartPole-v1", PPO())
    with pytest.warns(FutureWarning, match=SAID) as said:
        at, changed = line(), ps.override(exp, {"algo.clip_ratio": 0.1})
    assert changed.algo == PPO(clip=0.1) and (said[0].filename, said[0].lineno) == (__file__, at)
    with pytest.warns(FutureWarning, match=SAID) as said:
        at, read = line(), settings.clip_ratio  # pyright: ignore[reportAttributeAccessIssue]
    assert read == 0.3 and said[0].lineno == at
    with pytest.warns(FutureWarning, match=r"^--algo.clip_ratio is now --algo.clip; the old"):
        assert located(exp, "--algo.clip-ratio") == ("algo.clip", located(exp, "--algo.clip")[1])  # pyright: ignore[reportOptionalSubscript]
    with pytest.warns(FutureWarning, match="Mine.clip_ratio is now Mine.clip"):
        assert Mine(clip_ratio=0.3, own=2) == Mine(clip=0.3, own=2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ps.ConfigError, match="clip_ratio and clip are one, and both were given"):
        PPO(clip_ratio=0.3, clip=0.2)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ps.ConfigError, match="has no setting 'clip_rati'"):
        PPO(clip_rati=0.3)  # pyright: ignore[reportCallIssue]


@pytest.mark.usefixtures("old_clip")
def test_stored_settings_of_a_former_name_are_read_in_silence() -> None:
    plain = to_plain(PPO(clip=0.3))
    plain["clip_ratio"] = plain.pop("clip")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert from_plain(plain) == PPO(clip=0.3)


def test_settings_that_are_read_from_source_know_former_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command line's help and early checks read a class's source in place of importing it."""
    (tmp_path / "old_settings.py").write_text(
        "from dataclasses import dataclass\nfrom penstock.core.names.renamed import renamed\n\n"
        "@renamed('9.0', rows='T')\n@dataclass(frozen=True)\nclass Settings:\n    T: int = 1\n"
    )
    monkeypatch.setattr(declared_module, "_ROOT", tmp_path)
    assert declared_module.declared("old_settings:Settings").__former__["rows"].new == "T"


def test_functions_and_arguments_of_former_names() -> None:
    @renamed("9.0", columns="partition")
    def split(*, partition: int = 1) -> int:
        return partition

    with pytest.warns(
        FutureWarning, match=r"split: columns is now .*split: partition; the old name goes in penstock 9\.0"
    ):
        assert split(columns=3) == 3  # pyright: ignore[reportCallIssue]
    disown = former(split, "Pool.disown", "9.0")
    with pytest.warns(FutureWarning, match=r"Pool\.disown is now .*split; the old name") as said:
        at, found = line(), disown(partition=2)
    assert found == 2 and (said[0].filename, said[0].lineno) == (__file__, at)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert split(partition=2) == 2


def test_a_name_that_was_to_go_is_refused() -> None:
    with pytest.raises(RuntimeError, match=f"old was to go in penstock {ps.__version__}.*remove the old name"):
        renamed(ps.__version__, old="new")
    with pytest.raises(RuntimeError, match=r"f was to go in penstock 0\.1"):
        former(line, "f", "0.1")


def test_a_former_public_name_is_the_new_one_and_names_the_line_of_its_import(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(ps.__dict__["_FORMER"], "Experience", ("ReplaySchedule", "9.0"))
    with pytest.warns(FutureWarning, match=r"ps\.Experience is now ps\.ReplaySchedule; the old") as said:
        assert ps.Experience is ps.ReplaySchedule  # pyright: ignore[reportAttributeAccessIssue]
    assert said[0].filename == __file__
    script = tmp_path / "old.py"
    script.write_text(
        "import penstock\npenstock._FORMER['Experience'] = ('ReplaySchedule', '9.0')\n\n"
        "from penstock import Experience\nfor _ in range(3):\n    penstock.Experience\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=variables)
    shown = [text for text in ended.stderr.splitlines() if "FutureWarning" in text]
    assert [text.split(":")[1] for text in shown] == ["4", "6"] and all(str(script) in text for text in shown)


def test_public_former_names_lead_to_public_names_and_are_not_due() -> None:
    for old, (new, gone_in) in ps.__dict__["_FORMER"].items():
        assert new in ps.__all__ and old not in ps.__all__
        former(line, old, gone_in)
