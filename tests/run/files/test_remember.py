"""Who puts a file on the list of trusted ones: those to whom its user vouches for it, and those that wrote all of it."""

from __future__ import annotations

import ast
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.core.errors import ConfigError
from penstock.run.files.trust import VARIABLE
from penstock.run.playing.evaluation import evaluate
from penstock.studies.fork import copy_parameters
from tests.run.cartpole import CARTPOLE, at
from tests.run.files.forging import with_config
from tests.run.files.test_trust import code, refused, state, trained

__all__ = ["code", "state"]

PACKAGE = Path(__file__).parents[3] / "penstock"
CALLERS = {
    ("run/files/stored_experiment.py", "read_config"): "vouched",
    ("run/checkpoints/load.py", "_of_file"): "vouched",
    ("run/files/settings_file.py", "require_trust"): "vouched",
    ("studies/study.py", "open_study"): "vouched",
    ("studies/fork.py", "copy_parameters"): "trusted",
    ("studies/fork.py", "fork_run"): "written",
    ("studies/study.py", "begin"): "written",
    ("studies/study.py", "_write_settings"): "written",
    ("studies/report.py", "write_preset"): "written",
    ("run/files/rundir.py", "write_config"): "written",
    ("run/files/changes.py", "write_change"): "written",
    ("run/files/changes.py", "require_own_journal"): "vouched",
}
"""`vouched`: in the body of `if trust:`. `trusted`: of `if is_trusted(...)`, asked for these very bytes. `written`: after
the same function wrote it, which reads no file of settings."""
READS = {"read_bytes", "read_text", "read_stored", "read_json", "read_config", "loads"}


def calls(node: ast.AST) -> list[str]:
    """The last names of all functions that are called in a node, in the order of the text."""
    found = [
        (n.lineno, n.col_offset, ast.unparse(n.func).rpartition(".")[2])
        for n in ast.walk(node)
        if isinstance(n, ast.Call)
    ]
    return [name for _, _, name in sorted(found)]


def reason(function: ast.AST) -> str:
    """Why a function may remember a file, "" if there is no reason."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and "remember" in [name for part in node.body for name in calls(part)]:
            if ast.unparse(node.test) == "trust":
                return "vouched"
            if isinstance(node.test, ast.Call) and ast.unparse(node.test.func) == "is_trusted":
                return "trusted"
    made = calls(function)
    wrote = {"write_atomic", "save", "fsync"} & set(made[: made.index("remember")])
    return "written" if wrote and not READS & set(made) else ""


def test_every_caller_has_a_reason() -> None:
    found: dict[tuple[str, str], str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name == "run/files/trust.py":
            continue
        text = path.read_text()
        assert "list_path" not in text, f"{name} knows where the list is, and only trust.py may write it"
        for node in ast.walk(ast.parse(text)) if "remember" in text else ():
            if isinstance(node, ast.FunctionDef) and "remember" in calls(node):
                found[name, node.name] = reason(node)
    assert found == CALLERS


def strangers(run: Path, state: Path) -> Path:
    """A run that names code, of which this user has never heard."""
    trained(run)
    shutil.rmtree(state)
    return run


def test_a_run_whose_environment_was_given_again_is_not_trusted(state: Path, tmp_path: Path) -> None:
    run = strangers(tmp_path / "run", state)
    file = with_config(lambda settings: settings["run"].update(steps=640))(run)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="env='CartPole-v1' is given, and 'own_env:make' was stored"):
        ps.resume(run, {"run.steps": 192}, env=ps.EnvConfig("CartPole-v1"))
    with ps.Run.resume(run, env="own_env:make"):  # it begins, and nothing of it is changed
        pass
    assert file.read_bytes() == before
    assert refused(run)
    ps.resume(run, {"run.steps": 192}, env="own_env:make")  # now it is written anew, with what its user has named
    assert not refused(run)
    assert len(evaluate(run, episodes=1)) == 1


def test_a_run_that_trials_start_from_is_not_trusted(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = strangers(tmp_path / "run", state)
    ps.load(run)
    copy_parameters(run, tmp_path / "init")
    ps.load(tmp_path / "init")
    for copy in (run, tmp_path / "init"):
        assert refused(copy)
    monkeypatch.setenv(VARIABLE, str(run))
    copy_parameters(run, tmp_path / "vouched")
    monkeypatch.delenv(VARIABLE)
    assert not refused(tmp_path / "vouched")


def test_a_run_that_another_starts_from_is_not_trusted(state: Path, tmp_path: Path) -> None:
    run = strangers(tmp_path / "run", state)
    ps.train(at(tmp_path / "mine", CARTPOLE, steps=64, eval_episodes=0), run)
    assert refused(run)


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    exp = at(tmp_path / "run", CARTPOLE)
    folder = str(tmp_path / "run") + "\udcff"
    with pytest.raises(ConfigError, match=r"run directory '.*run\\udcff' is not UTF-8.*choose another"):
        ps.train(replace(exp, run=replace(exp.run, dir=folder)))
