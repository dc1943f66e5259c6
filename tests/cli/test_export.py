"""`penstock export`: what it writes of a run or a file, and what it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from tests.cli.short import QUIET, Cli

PAGE = Path(__file__).parent.parent.parent / "docs" / "export.md"


@pytest.fixture(scope="session")
def run(trained: Path) -> str:
    return str(trained)


def test_a_run_becomes_a_file_with_a_contract(cli: Cli, run: str) -> None:
    said = cli("export", run, "--out", "policy.pt2")
    assert said.code == 0, said.both
    assert "as predict over 1,000 observations" in " ".join(said.out.split())
    contract = json.loads(Path("policy.pt2.contract.json").read_text())
    assert [port["name"] for port in (*contract["inputs"], *contract["outputs"])] == ["obs", "action"]
    obs = np.random.default_rng(0).normal(size=(9, 4)).astype(np.float32)
    with torch.no_grad():
        (action,) = torch.export.load("policy.pt2").module()(torch.from_numpy(obs))
    assert action.tolist() == ps.load(run).predict(obs).tolist()


def test_a_file_of_weights_is_exported_again(cli: Cli, run: str) -> None:
    assert cli("export", run, "--to", "safetensors", "--out", "a.safetensors").code == 0
    assert cli("export", "a.safetensors", "--out", "b.safetensors").code == 0
    assert Path("a.safetensors").read_bytes() == Path("b.safetensors").read_bytes()


WRONG: dict[str, tuple[list[str], int, str]] = {
    "no run": (["nowhere", "--out", "x.pt2"], 5, "there is no such folder"),
    "no file": (["nowhere.safetensors", "--out", "x.pt2"], 5, "cannot read nowhere.safetensors"),
    "no format": (["RUN", "--out", "x"], 2, "expected a name that ends in .onnx or .pt2 or .safetensors"),
    "two formats": (["RUN", "--out", "x.onnx", "--to", "pt2"], 2, "expected a name that ends in .pt2"),
    "unknown format": (["RUN", "--out", "x.onnx", "--to", "tf"], 2, "invalid choice: 'tf'"),
    "no such policy": (["RUN", "--out", "x.pt2", "--policy", "b"], 2, "has the policies ['shared']"),
    "no such checkpoint": (["RUN", "--out", "x.pt2", "--which", "7"], 5, "no good checkpoint of step 7"),
    "no place": (["RUN", "--out", "/proc/no/x.safetensors"], 5, "cannot write /proc/no/x.safetensors"),
    "no out": (["RUN"], 2, "--out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input(case: str, cli: Cli, run: str) -> None:
    argv, code, message = WRONG[case]
    said = cli("export", *(run if word == "RUN" else word for word in argv))
    assert (said.code, message in said.err) == (code, True), said.both
    assert not list(Path().iterdir())


def test_of_several_policies_each_has_a_file(cli: Cli) -> None:
    assert cli("train", "self-play", "--env", "penstock.envs.toy:Nim", *QUIET[2:], "--run.dir", "r").code == 0
    assert cli("export", "r", "--out", "main.safetensors").code == 0
    obs: Any = {"observation": np.eye(ps.load("r")["main"].spec.obs["observation"].size, dtype=np.int8)}
    obs["action_mask"] = np.ones((len(obs["observation"]), 3), np.int8)
    obs["observation"] = obs["observation"].astype(ps.load("r")["main"].spec.obs["observation"].dtype)
    expected = ps.load("r").predict(obs)
    assert ps.load("main.safetensors").predict(obs).tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_script_of_the_page_acts_without_torch(memory: str, cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install 'penstock[export]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: pip install 'penstock[export]'")
    script = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
    assert len([line for line in script.splitlines() if line]) <= 13
    train = ("train", "ppo", "--env", "CartPole-v1", *QUIET, "--algo.net.recurrent", memory, "--run.dir", "r")
    assert cli(*train).code == 0
    assert cli("export", "r", "--to", "onnx", "--out", "policy.onnx").code == 0
    command = [sys.executable, "-c", script + "\nimport sys\nassert not {'torch', 'penstock'} & set(sys.modules)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    policy, state, expected = ps.load("r"), None, []
    for obs in np.random.default_rng(0).normal(size=(100, 1, 4)).astype(np.float32):
        found: Any = policy.predict(obs, state)
        action, state = found if memory == "lstm" else (found, None)
        expected.append(str(action))
    assert done.stdout.splitlines() == expected
