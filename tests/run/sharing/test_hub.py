"""Sharing through a stand-in of the Hugging Face Hub on loopback: what is pushed, pulled, loaded and refused."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError, PenstockError
from penstock.run.checkpoints.checkpoint import find_checkpoint
from penstock.run.sharing import hub as client
from penstock.run.sharing.hub import FILES, fetch_policy, pull_run, push_run
from tests.cli.conftest import cli, trained
from tests.cli.short import Cli
from tests.run.sharing.hub_server import READ, WRITE, HubServer

__all__ = ["cli", "trained"]

os.environ["HF_HUB_DISABLE_XET"] = os.environ["HF_HUB_DISABLE_TELEMETRY"] = os.environ[
    "HF_HUB_DISABLE_PROGRESS_BARS"
] = "1"
OBS = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[HubServer]:
    constants: Any = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hub")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", WRITE)
    with HubServer() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture(scope="session")
def shared_run(trained: Path) -> Path:
    (trained / "videos").mkdir()
    for name, data in (("000000000064.mp4", b"old"), ("000000000128.mp4", b"new")):
        (trained / "videos" / name).write_bytes(data)
    (trained / "my_env.py").write_text("raise SystemExit('executed')")
    return trained


def test_what_is_pushed_acts_elsewhere_and_holds_no_code(hub: HubServer, cli: Cli, shared_run: Path) -> None:
    said = cli("push", str(shared_run), "me/cart")
    assert said.code == 0, said.both
    files = hub.repos["me/cart"]
    assert sorted(files) == sorted([*FILES, ".gitattributes"])
    assert files["replay.mp4"] == b"new"
    assert files["curve.png"].startswith(b"\x89PNG")
    assert any(call.startswith("PUT /objects/") for call in hub.calls), "nothing went by way of LFS"
    contract = json.loads(files["policy.safetensors.contract.json"])
    assert [port["name"] for port in contract["inputs"]] == ["obs"]
    expected = ps.load(shared_run).predict(OBS)
    assert ps.load("hf:me/cart").predict(OBS).tolist() == expected.tolist()
    assert cli("pull", "me/cart", "pulled").code == 0
    assert sorted(os.listdir("pulled")) == sorted(FILES)
    assert ps.load("pulled/policy.safetensors").predict(OBS).tolist() == expected.tolist()
    assert os.listdir(".") == ["pulled"] or sorted(os.listdir(".")) == ["cache", "pulled"]


def test_the_card_says_what_it_is_how_it_was_made_and_how_it_is_used(hub: HubServer, shared_run: Path) -> None:
    push_run(shared_run, "me/cart")
    card = hub.repos["me/cart"]["README.md"].decode()
    data: Any = pytest.importorskip("huggingface_hub").ModelCard(card).data
    assert {"reinforcement-learning", "CartPole-v1", "ppo"} <= set(data.tags)
    evaluation = json.loads((shared_run / "eval" / "evaluations.jsonl").read_text().splitlines()[-1])
    assert data.eval_results[0].metric_value == f"{evaluation['eval/mean_reward']:.2f} +/- 0.00"
    for text in (
        "| environment | `CartPole-v1` |", "![Learning curve](curve.png)", 'src="replay.mp4"', 'ps.load("hf:me/cart")',
        "| inputs | `obs` | `float32` |", "nothing of this repository is executed",
        f"| checkpoint | step {int(find_checkpoint(shared_run).name):,} |",
    ):  # fmt: skip
        assert text in card, text
    assert str(shared_run) not in card, "a path of this machine"


def test_a_later_push_replaces_its_own_files_and_leaves_others(
    hub: HubServer, shared_run: Path, tmp_path: Path
) -> None:
    push_run(shared_run, "me/cart")
    hub.repos["me/cart"] |= {"train.py": b"raise SystemExit('executed')", "policy/model.pt": b"x"}
    hidden = shared_run / "videos"
    hidden.rename(tmp_path / "videos")
    try:
        pushed = push_run(shared_run, "me/cart")
    finally:
        (tmp_path / "videos").rename(hidden)
    assert "replay.mp4" not in hub.repos["me/cart"]
    assert hub.repos["me/cart"]["train.py"]
    assert sorted(pushed.left) == ["policy/model.pt", "train.py"]
    pulled = pull_run("me/cart", tmp_path / "deep" / "pulled")
    assert sorted(os.listdir(tmp_path / "deep" / "pulled")) == pulled.files == sorted(set(FILES) - {"replay.mp4"})
    assert not any("train.py" in call or "model.pt" in call for call in hub.calls), "another file was fetched"


def test_names_with_markup_stay_text(hub: HubServer, shared_run: Path, tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(shared_run, run, symlinks=True)
    meta = json.loads((run / "meta.json").read_text())
    meta |= {
        "env": "x`|<script>\n# y",
        "command": ["/home/me/penstock", "train", "ppo", "--run.dir", "/home/me/r", "```"],
    }
    (run / "meta.json").write_text(json.dumps(meta))
    push_run(run, "me/odd")
    card = hub.repos["me/odd"]["README.md"].decode()
    assert "| environment | `x'\\|<script>\\n# y` |" in card
    assert "/home/me" not in card and "\n# y" not in card.partition("\n---\n")[2].replace("env 'x`|<script>\n# y'", "")


def test_a_private_repository(hub: HubServer, cli: Cli, shared_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("push", str(shared_run), "me/own", "--private").code == 0
    assert hub.private == {"me/own"}
    monkeypatch.setenv("HF_TOKEN", READ)
    assert fetch_policy("hf:me/own").is_file()
    monkeypatch.delenv("HF_TOKEN")
    said = cli("pull", "me/own", "x")
    assert (said.code, "shows no such repository; check the name, or if private log in" in said.err) == (2, True)


REFUSED: dict[str, tuple[list[str], dict[str, str], int, str]] = {
    "no token": (["push", "RUN", "me/a"], {"HF_TOKEN": ""}, 2, "no token of http://127.0.0.1"),
    "a wrong token": (["push", "RUN", "me/a"], {"HF_TOKEN": "hf_other"}, 2, "answered 401"),
    "a token to read": (["push", "RUN", "me/a"], {"HF_TOKEN": READ}, 2, "with the right to write"),
    "no run": (["push", "nowhere", "cart"], {"HF_TOKEN": ""}, 5, "there is no such folder"),
    "a folder without a run": (["push", ".", "cart"], {"HF_TOKEN": ""}, 5, ". is no run directory"),
    "no name": (["push", "RUN", "cart"], {"HF_TOKEN": ""}, 2, "names no repository; expected user/name"),
    "an odd name": (["push", "RUN", "me/.."], {}, 2, "names no repository"),
    "a path": (["pull", "../a/b", "x"], {}, 2, "names no repository"),
    "no repository": (["pull", "me/none", "x"], {}, 2, "shows no such repository"),
    "no revision": (["pull", "me/sb3@v9", "x"], {}, 2, "there is no such revision"),
    "another's repository": (["pull", "me/sb3", "x"], {}, 5, "it has 'ppo.zip'"),
    "no policy": (["pull", "me/fake", "x"], {}, 5, "no safetensors file; expected one that policy.save"),
    "a folder in use": (["pull", "me/fake", "."], {}, 2, "holds something already"),
    "a pinned push": (["push", "RUN", "me/a@v1"], {}, 2, "expected user/name: a push goes to the newest revision"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(
    case: str, hub: HubServer, cli: Cli, shared_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, variables, code, message = REFUSED[case]
    hub.repos |= {"me/sb3": {"ppo.zip": b"x"}, "me/fake": {"policy.safetensors": b"not weights"}}
    Path("here").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = cli(*(str(shared_run) if word == "RUN" else word for word in words))
    assert (said.code, message in said.err) == (code, True), said.both
    assert said.err.count("\n") == 1, said.err
    assert "me/a" not in hub.repos
    assert not Path("x").exists()


def test_other_repositories_are_no_policy(hub: HubServer) -> None:
    hub.repos |= {"me/sb3": {"ppo.zip": b"x"}, "me/fake": {"policy.safetensors": b"not weights"}}
    for name, message in (
        ("hf:me/sb3", "holds no policy.safetensors"), ("hf:me/fake", "hf:me/fake: .* is no safetensors file"),
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=message):
            ps.load(name)
    for name, message in (("hf:me/none", "no such repository"), ("hf:cart", "names no repository")):
        with pytest.raises(ConfigError, match=message):
            ps.load(name)


def test_a_policy_that_names_code_is_loaded_with_trust_alone(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = (
        ps.PPO(net=ps.Net(hidden=(4,)))
        .build(ps.SerialSampler(T=1, B=1).build("CartPole-v1", 0).spec)
        .save(tmp_path / "policy.safetensors")
    )
    data = file.read_bytes().replace(b"penstock.algos.ppo:PPO", b"untrusted_module:Algos")
    hub.repos["me/odd"] = {"policy.safetensors": data}
    monkeypatch.setitem(
        sys.modules, "untrusted_module", SimpleNamespace(Algos=lambda **_: pytest.fail("it was called"))
    )
    with pytest.raises(CheckpointError, match="trust"):
        ps.load("hf:me/odd")


def test_without_network_what_was_fetched_is_loaded(
    hub: HubServer, shared_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push_run(shared_run, "me/cart")
    expected = ps.load("hf:me/cart").predict(OBS)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # between its attempts
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert ps.load("hf:me/cart").predict(OBS).tolist() == expected.tolist()
        with pytest.raises(PenstockError, match="cannot be reached, and it was not fetched before"):
            ps.load("hf:me/other")
        with pytest.raises(PenstockError, match="check the network"):
            push_run(shared_run, "me/cart")


def test_a_hub_that_never_answers(hub: HubServer, shared_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(PenstockError, match=r"ReadTimeout: .*check the network"):
            push_run(shared_run, "me/cart")


def test_a_hub_out_of_order(hub: HubServer, shared_run: Path) -> None:
    hub.fails = 418
    with pytest.raises(PenstockError, match="answered 418") as raised:
        push_run(shared_run, "me/cart")
    assert type(raised.value) is PenstockError, "no checkpoint is concerned"


def test_several_policies_are_one_file(hub: HubServer, cli: Cli) -> None:
    from tests.cli.short import QUIET

    assert cli("train", "self-play", "--env", "penstock.envs.toy:Nim", *QUIET[2:], "--run.dir", "r").code == 0
    push_run(Path("r"), "me/nim")
    assert sorted(hub.repos["me/nim"]) == sorted([".gitattributes", "README.md", "curve.png", "policy.safetensors"])
    assert list(ps.load("hf:me/nim")) == list(ps.load("r"))
    assert "| policy | observation | action |" in hub.repos["me/nim"]["README.md"].decode()


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trained: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for call in (
        lambda: ps.load("hf:me/cart"), lambda: push_run(trained, "cart"), lambda: pull_run("me/a", tmp_path / "x"),
    ):  # fmt: skip
        with pytest.raises(MissingExtraError, match=r"penstock\[hub\]"):
            call()
