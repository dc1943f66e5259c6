"""Who is trusted: this user's own runs by their settings, those below PENSTOCK_TRUST, and those of --trust."""

from __future__ import annotations

import shutil
import stat
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.cli.config import experiment_from
from penstock.core.errors import CheckpointError, ConfigError
from penstock.run.files import trust
from penstock.run.files.trust import VARIABLE, is_listed, list_path, remember
from penstock.run.playing.evaluation import evaluate
from tests.run.cartpole import CARTPOLE, at

OWN = """
import gymnasium as gym
def make(**kwargs):
    return gym.make("CartPole-v1")
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("code")
    (folder / "own_env.py").write_text(OWN)
    return folder


@pytest.fixture
def state(tmp_path: Path, code: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home of the list, and an environment of the user's own."""
    monkeypatch.syspath_prepend(str(code))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_said", set())
    return tmp_path / "state"


def trained(run: Path, eval_env: str | None = None) -> Path:
    ps.train(at(run, replace(CARTPOLE, env="own_env:make", eval_env=eval_env), steps=64, eval_episodes=0))
    return run


def refused(run: Path) -> bool:
    try:
        evaluate(run, episodes=1)
    except CheckpointError as error:
        assert str(run / "config.json") in str(error)  # noqa: PT017
        assert "own_env:make" in str(error)  # noqa: PT017
        return True
    return False


def test_a_run_of_ones_own_is_trusted_and_stays_so_wherever_it_is_copied(state: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    assert not refused(run)
    shutil.copytree(run, tmp_path / "copy")
    (tmp_path / "link").symlink_to(tmp_path / "copy")
    assert not refused(tmp_path / "copy")
    assert not refused(tmp_path / "link")
    ps.resume(run, {"run.steps": 128})  # rewrites config.json
    assert not refused(run)
    assert not refused(tmp_path / "copy")
    file = tmp_path / "copy" / "config.json"
    file.write_bytes(file.read_bytes().replace(b'"sha256"', b'"sha257"'))
    with pytest.raises(CheckpointError, match="not as penstock wrote it"):
        evaluate(tmp_path / "copy", episodes=1)


def test_another_users_run_needs_trust_once(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained(tmp_path / "run")
    shutil.rmtree(state)
    assert refused(run)
    with pytest.raises(CheckpointError, match=r"env='own_env:make'.*--trust"):
        ps.resume(run, {"run.steps": 128})
    ps.load(run)  # the algorithm is built in
    evaluate(run, episodes=1, env="CartPole-v1")
    assert refused(run)
    monkeypatch.setenv(VARIABLE, f"/nowhere:{tmp_path}")
    assert not refused(run)
    monkeypatch.setenv(VARIABLE, "runs")
    with pytest.raises(ConfigError, match="PENSTOCK_TRUST names 'runs'; expected absolute"):
        evaluate(run, episodes=1)
    monkeypatch.delenv(VARIABLE)
    assert refused(run)
    evaluate(run, episodes=1, trust=True)
    assert not refused(run)


def test_an_environment_of_ones_own_takes_the_place_of_both_that_another_users_run_names(
    state: Path, tmp_path: Path
) -> None:
    run = trained(tmp_path / "run", eval_env="own_env:make")
    shutil.rmtree(state)
    assert refused(run)
    assert len(evaluate(run, "CartPole-v1", 1)) == 1


def test_settings_from_another_users_run_need_trust_too(state: Path, tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    shutil.rmtree(state)
    for path in (run, run / "config.json"):
        with pytest.raises(CheckpointError, match=r"env='own_env:make'.*--trust"):
            experiment_from(path)
    assert experiment_from(run, trust=True).env == "own_env:make"


def test_the_list_is_this_users_alone(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(tmp_path / "a", "a" * 64)
    file = list_path()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert is_listed("a" * 64)
    assert not is_listed("b" * 64)
    for path, mode in ((file, 0o602), (file.parent, 0o770)):
        before = path.stat().st_mode
        path.chmod(mode)
        with pytest.warns(UserWarning, match="is not believed: .*can be written by others"):
            assert not is_listed("a" * 64)
        monkeypatch.setattr(trust, "_said", set())
        path.chmod(before)
        assert is_listed("a" * 64)
    file.rename(file.with_name("other"))
    file.symlink_to("other")
    assert not is_listed("a" * 64)


def test_a_folder_in_the_place_of_the_list(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_said", set())
    list_path().mkdir(parents=True)
    list_path().parent.chmod(0o700)
    with pytest.warns(UserWarning, match="is not believed: it is not a plain file"):
        assert not is_listed("a" * 64)
    with pytest.warns(UserWarning, match="cannot be written"):
        remember(tmp_path / "a", "a" * 64)
    assert list_path().is_dir()


def test_runs_that_begin_together_are_all_on_the_list(state: Path, tmp_path: Path) -> None:
    names = [f"{i:064x}" for i in range(200)]
    threads = [
        threading.Thread(target=lambda k=k: [remember(tmp_path / "run", name) for name in names[k::8]])
        for k in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    list_path().open("ab").write(b"\n" + b"f" * 30)  # a write that a full disk cut short
    remember(tmp_path / "a\nb", "e" * 64)
    assert all(map(is_listed, [*names, "e" * 64]))
    assert not is_listed("f" * 30)


def test_a_home_that_cannot_be_written_warns_once(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/no/such/place")
    with pytest.warns(UserWarning, match="cannot be written.*PENSTOCK_TRUST") as told:
        runs = [trained(tmp_path / name) for name in ("run", "other")]
    assert len([text for text in told if "cannot be written" in str(text.message)]) == 1
    assert refused(runs[0])
    monkeypatch.setattr(trust, "_said", set())
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(tmp_path / "third")
    assert not refused(runs[0])
