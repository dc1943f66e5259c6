"""Exported policies act as `predict`; what cannot be exported is named, and what differs is not written."""

from __future__ import annotations

import hashlib
import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves
from penstock.learn.export import files
from penstock.learn.export.check import Acting, check
from penstock.learn.export.graph import ActingGraph
from tests.learn.export.exported import BOX, CHOICE, KINDS, VECTOR, built, compare, observed

CORE = [("a2c", "pt2"), ("a2c", "onnx")]
CASES = [
    pytest.param(kind, form, marks=[] if (kind, form) in CORE else [pytest.mark.slow], id=f"{kind}-{form}")
    for kind in KINDS
    for form in ("onnx", "pt2")
]


def need_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'penstock[export]'")


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_the_file_acts_as_predict(kind: str, form: str, tmp_path: Path) -> None:
    if form == "onnx":
        need_onnx()
    policy = built(kind)
    path = policy.export(tmp_path / f"policy.{form}")
    contract = json.loads((tmp_path / f"policy.{form}.contract.json").read_text())
    assert contract["checked"]["ties"] == 0
    assert contract["checked"]["observations"] >= 1000
    assert contract["checked"]["steps"] == (50 if policy.recurrent else 1)
    rows = 20 if policy.recurrent else 1000
    compare(policy, path, rows, 50)
    compare(policy, path, 1, 3)


@pytest.mark.parametrize(
    "kind", [k if k in ("ppo lstm", "ppo float64", "sac") else pytest.param(k, marks=pytest.mark.slow) for k in KINDS]
)
def test_weights_are_those_of_save_and_load(kind: str, tmp_path: Path) -> None:
    policy = built(kind)
    path = policy.export(tmp_path / "p.safetensors")
    loaded, obs = ps.load(path, trust=True), observed(policy, 5, np.random.default_rng(0))
    for x, y in zip(tree_leaves(loaded.predict(obs)), tree_leaves(policy.predict(obs)), strict=True):
        assert torch.equal(torch.as_tensor(x), torch.as_tensor(y))


def test_what_only_the_critic_sees_is_no_input(tmp_path: Path) -> None:
    policy = built("ppo groups")
    path = policy.export(tmp_path / "p.safetensors")
    contract = json.loads((tmp_path / "p.safetensors.contract.json").read_text())
    assert len(contract["inputs"]) == 2 and "critic" not in json.dumps(contract["inputs"])
    obs = observed(policy, 5, np.random.default_rng(0))
    assert sorted(obs) == ["height", "policy"]
    assert np.array_equal(ps.load(path, trust=True).predict(obs), policy.predict(obs))


def test_the_contract_says_what_goes_in_and_comes_out(tmp_path: Path) -> None:
    policy = built("ppo dict hybrid")
    path = policy.export(tmp_path / "p.safetensors")
    contract = json.loads((tmp_path / "p.safetensors.contract.json").read_text())
    assert contract["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert contract["versions"]["penstock"] == ps.__version__
    assert [(x["name"], x["dtype"], x["shape"]) for x in contract["inputs"]] == [
        ("obs.arm.grip", "int64", ["batch"]),
        ("obs.arm.joints", "float32", ["batch", 3]),
        ("obs.camera", "uint8", ["batch", 36, 36, 1]),
    ]
    assert [(x["name"], x["dtype"]) for x in contract["outputs"]] == [
        ("action.gear", "int64"), ("action.lights", "int8"), ("action.wheel", "float32"),
    ]  # fmt: skip
    assert contract["outputs"][2]["space"] == {"kind": "box", "low": [-0.05, -3.0], "high": [0.05, 0.5]}
    assert contract["outputs"][0]["space"] == {"kind": "discrete", "sizes": [3], "start": 2}
    joints = contract["normalization"]["obs.arm.joints"]
    assert (joints["mean"], joints["var"], joints["clip"]) == ([-1.0, 0.0, 1.0], [0.5, 2.25, 4.0], 10.0)
    assert contract["normalization"].keys() == {"obs.arm.joints"}


def test_memory_ends_with_the_previous_action(tmp_path: Path) -> None:
    built("ppo lstm").export(tmp_path / "p.safetensors")
    contract = json.loads((tmp_path / "p.safetensors.contract.json").read_text())
    assert [x["name"] for x in contract["inputs"]] == ["obs", "state.0", "state.1", "state.2", "first", "prev_reward"]
    assert [x["name"] for x in contract["outputs"]] == ["action", "next_state.0", "next_state.1", "next_state.2"]
    assert contract["state"][2] == {
        "input": "state.2", "output": "next_state.2", "dtype": "float32", "shape": [2]
    }  # fmt: skip


class OnTheWay(nn.Module):
    """A layer that leaves torch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.from_numpy(np.tanh(x.numpy())))


class RowByRow(OnTheWay):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.linear(row) for row in x])


class Bessel(OnTheWay):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.special.bessel_j0(x))


def with_layer(layer: type[nn.Module]) -> ps.Policy:
    def agent(spec: EnvSpec, settings: Any) -> ps.Agent:
        return ps.q_agent(spec, settings, network=nn.Sequential(nn.Tanh(), layer()))

    return ps.DQN(agent=agent).build(EnvSpec(VECTOR, CHOICE), seed=1)


@pytest.mark.parametrize("layer", [OnTheWay, RowByRow])
def test_a_module_that_cannot_be_traced_is_named(layer: type[nn.Module], tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"^module online\.network\.1 \({layer.__name__}\) cannot be traced"
    ) as error:
        with_layer(layer).export(tmp_path / "p.pt2")
    assert ("it works for 3 rows alone" in str(error.value)) == (layer is RowByRow)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_module_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    need_onnx()
    with pytest.raises(ConfigError, match=r"^module online\.network\.1 \(Bessel\) cannot be written as ONNX"):
        with_layer(Bessel).export(tmp_path / "p.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.*cannot hold")
def test_what_cannot_be_traced_is_still_saved_as_weights(tmp_path: Path) -> None:
    with_layer(OnTheWay).export(tmp_path / "p.safetensors")


@pytest.mark.parametrize("kind", ["sac", "dqn", "ppo lstm"])
def test_a_file_that_acts_otherwise_is_not_written(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ActingGraph.forward

    def other(self: ActingGraph, *tensors: Tensor) -> tuple[Tensor, ...]:
        action, *rest = forward(self, *tensors)
        state = [x + 0.01 for x in rest]
        return ((action - 1) % 3 + 2 if kind == "dqn" else action + 2e-5 * (kind == "sac"), *state)

    monkeypatch.setattr(ActingGraph, "forward", other)
    with pytest.raises(ConfigError, match=r"differs from predict in \d+ of \d+ rows"):
        built(kind).export(tmp_path / "p.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_choice_on_which_rounding_decides_is_a_tie_and_no_other_is() -> None:
    policy = built("dqn")
    spec = policy.spec
    acting = Acting(policy.agent, spec, spec.obs)
    graph = ActingGraph(policy.agent, spec, spec.obs)
    for p in policy.agent.parameters():
        if p.shape[0] == 3:
            p.data[1] = p.data[0]  # the first two choices have one value

    def swapped(inputs: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        (action,) = graph(*map(torch.from_numpy, inputs))
        return [np.where(action.numpy() == 2, 3, action.numpy())]

    found = check(acting, graph.inputs, swapped)
    assert found.ties > 100
    assert found.observations == 1000
    with pytest.raises(ConfigError, match="differs from predict"):
        check(acting, graph.inputs, lambda inputs: [np.where(x == 3, 4, x) for x in swapped(inputs)])


@pytest.mark.parametrize(
    ("name", "to", "said"),
    [
        ("p", None, "expected a name that ends in .onnx or .pt2 or .safetensors"),
        ("p.tflite", None, "expected a name that ends in"),
        ("p.onnx", "pt2", "expected a name that ends in .pt2"),
        ("p.onnx", "onxx", "did you mean 'onnx'"),
        (".", "pt2", "expected a name"),
        ("folder.pt2", None, "is a folder"),
    ],
)
def test_a_place_or_format_that_cannot_be(name: str, to: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(ConfigError, match=said):
        built("sac").export(tmp_path / name, to)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write .*; choose another place"):
        built("sac").export(tmp_path / "file" / "p.safetensors")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(files.importlib, "import_module", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'penstock\[export\]'"):
        built("sac").export(tmp_path / "p.onnx")
    monkeypatch.undo()
    assert importlib.import_module("json") is json


def test_two_parts_of_one_name_are_refused(tmp_path: Path) -> None:
    spec = EnvSpec({"a.b": VECTOR, "a": {"b": VECTOR}}, CHOICE)
    with pytest.raises(ConfigError, match=r"both be named 'obs\.a\.b'"):
        ps.PPO().build(spec, seed=1).export(tmp_path / "p.safetensors")


def test_observations_are_drawn_from_the_space() -> None:
    odd = {
        "half": LeafSpec("box", (2,), "float32", 3.0, np.inf),
        "whole": LeafSpec("box", (), "int16", -3.0, 9.0),
        "wide": LeafSpec("box", (2,), "float32", -1e8, 1e8),
        "pick": LeafSpec("multi_discrete", (2, 2), "int64", sizes=(2, 3, 4, 5), start=(1, 0, 0, 7)),
    }
    policy = ps.PPO().build(EnvSpec(odd, BOX), seed=1)
    seen: list[Any] = []
    graph = ActingGraph(policy.agent, policy.spec, odd)

    def execute(inputs: list[Any]) -> list[Any]:
        seen.append(inputs)
        return [x.numpy() for x in graph(*map(torch.from_numpy, inputs))]

    with torch.no_grad():
        check(Acting(policy.agent, policy.spec, odd), graph.inputs, execute)
    half, pick, whole, wide = (np.concatenate(x) for x in zip(*seen))
    assert (half.min(), len(half)) >= (3.0, 1000)
    assert half.dtype == np.float32
    assert pick.reshape(-1, 4).min(0).tolist() == [1, 0, 0, 7]
    assert pick.reshape(-1, 4).max(0).tolist() == [2, 2, 3, 11]
    assert (whole.min(), whole.max()) == (-3, 9)
    assert whole.dtype == np.int16
    assert 1.0 < np.abs(wide).max() < 10.0


def test_drawn_masks_leave_a_choice() -> None:
    policy, seen = built("ppo mask"), list[Any]()
    graph = ActingGraph(policy.agent, policy.spec, policy.spec.obs)

    def execute(inputs: list[Any]) -> list[Any]:
        seen.append(inputs[0])
        return [x.numpy() for x in graph(*map(torch.from_numpy, inputs))]

    with torch.no_grad():
        check(Acting(policy.agent, policy.spec, policy.spec.obs), graph.inputs, execute)
    counts = np.concatenate(seen).sum(1)
    assert (counts.min(), counts.max()) == (1, 3)


def test_what_only_critics_see_is_no_input(tmp_path: Path) -> None:
    built("qmix").export(tmp_path / "p.safetensors")
    contract = json.loads((tmp_path / "p.safetensors.contract.json").read_text())
    assert [port["name"] for port in contract["inputs"]] == ["obs.obs"]


def several() -> ps.PolicySet:
    algorithm = ps.Policies(
        {"a": ps.PPO(net=ps.Net(hidden=(8,))), "b": ps.DQN(net=ps.Net(hidden=(8,)))},
        policy_mapping_fn={"p0": "a", "p1": "b"},
    )
    policies = algorithm.build({"a": EnvSpec(VECTOR, CHOICE), "b": EnvSpec(VECTOR, CHOICE)}, seed=1)
    assert isinstance(policies, ps.PolicySet)
    return policies


def test_several_policies_have_a_file_each(tmp_path: Path) -> None:
    policies = several()
    assert policies.export(tmp_path / "two", "safetensors") == tmp_path / "two"
    assert sorted(path.name for path in (tmp_path / "two").glob("*.safetensors")) == ["a.safetensors", "b.safetensors"]
    for place, to in (("x.pt2", None), ("x.pt2", "pt2"), ("two", None)):
        with pytest.raises(ConfigError, match=r"of the policies \['a', 'b'\]; expected a folder"):
            policies.export(tmp_path / place, to)
    policies["b"].export(tmp_path / "b.safetensors")


@pytest.mark.parametrize("form", ["pt2", "safetensors", pytest.param("onnx", marks=pytest.mark.slow)])
def test_metadata_stands_in_the_file_and_in_the_contract(form: str, tmp_path: Path) -> None:
    said = {
        "joint_names": ["hip", "knee"],
        "gain": 20.5,
        "clip": [[-1.0, 1.0], [float("-inf"), float("inf")]],
        "task": "walk",
    }
    expected = {**said, "clip": [[-1.0, 1.0], ["-inf", "inf"]]}
    policy = ps.PPO().build(ps.SerialSampler(T=1, B=1).build("CartPole-v1", seed=0).spec)
    if form == "onnx":
        need_onnx()
    path = policy.export(tmp_path / f"p.{form}", metadata=said)
    assert json.loads((tmp_path / f"p.{form}.contract.json").read_text())["metadata"] == expected
    if form == "pt2":
        extra = {"metadata.json": ""}
        torch.export.load(path, extra_files=extra)
        assert json.loads(extra["metadata.json"]) == expected
    if form == "onnx":
        import onnx

        found = {x.key: x.value for x in onnx.load(path).metadata_props}
        shown = {"joint_names": "hip,knee", "gain": "20.5", "clip": "-1.0;1.0,-inf;inf", "task": "walk"}
        assert {key: found[key] for key in shown} == shown


@pytest.mark.parametrize("wrong", [{"a": {"b": 1}}, {"a": None}, {"a": object()}, {"": 1}])
def test_metadata_of_other_kinds_is_refused(wrong: Any, tmp_path: Path) -> None:
    policy = ps.PPO().build(ps.SerialSampler(T=1, B=1).build("CartPole-v1", seed=0).spec)
    with pytest.raises(ConfigError, match="metadata of an export"):
        policy.export(tmp_path / "p.safetensors", metadata=wrong)
    assert not list(tmp_path.iterdir())
