"""`policy.save` and `ps.load`: one file acts as the policy did, alone; what is wrong with a file is told in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.core.tree import tree_leaves, tree_map
from penstock.learn.policy_set import parameters

NET = ps.Net(hidden=(8,))
ALONE: dict[str, tuple[str, Any]] = {
    "PPO, normalised": ("CartPole-v1", ps.PPO(net=ps.Net(hidden=(8,), normalize_obs=True, normalize_reward=True))),
    "PPO, LSTM": (
        "CartPole-v1",
        ps.PPO(net=ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8), lr="linear(1e-3, 0)"),
    ),
    "A2C, GRU with its action": ("CartPole-v1", ps.A2C(net=ps.Net(hidden=(8,), recurrent="gru", prev_action=True))),
    "SAC": ("Pendulum-v1", ps.SAC(net=NET)),
    "DQN, noisy": ("CartPole-v1", ps.DQN(net=NET, noisy=True)),
    "R2D1": ("CartPole-v1", ps.R2D1()),
}
MANY: dict[str, Any] = {
    "shared": ps.PPO(net=NET),
    "two": ps.Policies({"a": ps.PPO(net=NET), "b": ps.DQN(net=NET)}, {"agent_0": "a", "agent_1": "b"}),
    "MAPPO": ps.MAPPO(net=NET),
}


def built(env: str, algo: Any) -> Any:
    from penstock.learn.policies import for_agents

    algo = for_agents(algo, "Team" in env)
    seated = algo.seat(env) if hasattr(algo, "seat") else env
    sampler = ps.SerialSampler(T=2, B=1).build(seated)
    policy = algo.build(sampler.specs if "Team" in env else sampler.specs["shared"], seed=3)
    with torch.no_grad():
        for name, x in parameters(policy).items():  # no two policies that are merely new are alike then
            if x.is_floating_point():
                x.add_(torch.linspace(0.01, 0.3, x.numel()).view(x.shape) if "count" not in name else 5.0)
    sampler.shutdown()
    return policy


def same(one: ps.Policy, other: ps.Policy) -> None:
    obs = tree_map(lambda leaf: np.stack([leaf.null() + leaf.null().dtype.type(i) for i in range(2)]), one.spec.obs)
    for deterministic in (True, False):
        one.predictions = other.predictions = 0  # draws are a function of the seed and their number
        first, second = one.predict(obs, deterministic=deterministic), other.predict(obs, deterministic=deterministic)
        for x, y in zip(tree_leaves(first), tree_leaves(second), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", ALONE)
def test_a_policy_acts_as_it_did(name: str, tmp_path: Path) -> None:
    policy = built(*ALONE[name])
    again = ps.load(policy.save(tmp_path / "deep" / "a.safetensors"))
    assert type(again.algorithm) is type(policy.algorithm)
    assert repr(again.algorithm) == repr(policy.algorithm)
    assert (again.spec, again.seed) == (policy.spec, policy.seed)
    for key, x in policy.agent.state_dict().items():
        assert torch.equal(x, again.agent.state_dict()[key]), key
    same(policy, again)


@pytest.mark.parametrize("name", MANY)
def test_policies_of_many_agents_and_each_alone(name: str, tmp_path: Path) -> None:
    policies = built("penstock.envs.toy:TeamBits", MANY[name])
    again = ps.load(policies.save(tmp_path / "all.safetensors"))
    assert list(again) == list(policies)
    for id_, policy in policies.items():
        same(policy, again[id_])
        same(policy, ps.load(policy.save(tmp_path / "one.safetensors")))


def test_it_needs_nothing_but_the_file(tmp_path: Path) -> None:
    built("CartPole-v1", ps.PPO(net=NET)).save(tmp_path / "a.safetensors")
    code = "import penstock as ps; print(ps.load('a.safetensors').predict([0.1, 0.2, 0.3, 0.4]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.stdout.strip() in ("0", "1"), done.stderr


def cut(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at]


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def with_content(**changes: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        text = json.loads(data[8 : 8 + size])["__metadata__"]["penstock"]
        return safetensors.torch.save(
            safetensors.torch.load(data), {"penstock": json.dumps({**json.loads(text), **changes})}
        )

    return change


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    def forge(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return forge


def ends_at(end: float) -> Callable[[bytes], bytes]:
    return with_header(lambda header: header[max(header)].update(data_offsets=[0, end]))


BAD: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a header without text": (with_header(lambda header: header.update(__metadata__=5)), "no header of penstock"),
    "an end that is no number of bytes": (ends_at(float("inf")), r"damaged in its header \(OverflowError\)"),
    "more than it says": (lambda data: data + bytes(9), r"has [\d,]+ bytes; expected [\d,]+ bytes; copy it again"),
    "seed": (with_content(seed=float("inf")), r"damaged \(OverflowError"),
    "empty": (cut(0), "is no safetensors file"),
    "a pickle": (lambda data: b"\x80\x04" + data, "is no safetensors file"),
    "cut in its header": (cut(40), "is cut short: it has 40 bytes, and its header alone more; copy it again"),
    "cut in its weights": (lambda data: data[:-7], r"is cut short: it has [\d,]+ of [\d,]+ bytes; copy it again"),
    "a bit flipped": (flipped, "is damaged .*its weights are not those that were saved.*copy it again"),
    "weights alone": (
        lambda data: safetensors.torch.save(safetensors.torch.load(data)),
        "no header of penstock; expected",
    ),
    "another format": (with_content(format=9), "format 9; this penstock reads format 1"),
    "no settings": (with_content(algo=7), "is damaged"),
    "no space": (with_content(spec={"obs": 1, "action": 1, "agents": 1}), "not a stored spec"),
    "another network": (
        with_content(
            algo={"class": "penstock.algos.ppo:PPO", "net": {"class": "penstock.agents.networks:Net", "hidden": [9]}}
        ),
        "do not fit",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_with_a_file_is_one_line(case: str, tmp_path: Path) -> None:
    path = built("CartPole-v1", ps.PPO(net=NET)).save(tmp_path / "a.safetensors")
    change, said = BAD[case]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ps.PenstockError, match=said) as told:
        ps.load(path)
    assert str(path) in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_larger_than_the_memory_is_not_read(tmp_path: Path) -> None:
    path = built("CartPole-v1", ps.PPO(net=NET)).save(tmp_path / "a.safetensors")
    path.write_bytes(ends_at(1 << 43)(path.read_bytes()))
    size = 8 + int.from_bytes(path.read_bytes()[:8], "little") + (1 << 43)
    os.truncate(path, size)
    with pytest.raises(ps.CheckpointError, match=r"a.safetensors has 8,796.1 GB; free is [\d.]+ GB of memory"):
        ps.load(path)


def test_a_path_that_is_wrong(tmp_path: Path) -> None:
    policy = built("CartPole-v1", ps.PPO(net=NET))
    with pytest.raises(ps.ConfigError, match=r"ends in \.safetensors"):
        policy.save(tmp_path / "a.pt")
    with pytest.raises(ps.CheckpointError, match=r"cannot read .*nowhere\.safetensors: No such file"):
        ps.load(tmp_path / "nowhere.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(ps.CheckpointError, match="cannot write"):
        policy.save(tmp_path / "file" / "a.safetensors")
    with pytest.raises(ps.ConfigError, match="leave `which` out"):
        ps.load(policy.save(tmp_path / "a.safetensors"), "best")


def test_code_that_a_file_names_is_imported_only_if_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_algo.py").write_text(
        "from dataclasses import dataclass\nimport penstock as ps\n@dataclass(frozen=True)\nclass Own(ps.PPO):\n    pass\n"
    )
    import own_algo  # pyright: ignore[reportMissingImports]

    path = built("CartPole-v1", own_algo.Own(net=NET)).save(tmp_path / "a.safetensors")
    monkeypatch.delitem(sys.modules, "own_algo")
    with pytest.raises(
        ps.CheckpointError, match=r"own_algo:Own.* If it is yours, .*: trust=True, which is needed once"
    ):
        ps.load(path)
    assert "own_algo" not in sys.modules
    assert type(ps.load(path, trust=True).algorithm).__name__ == "Own"
    assert type(ps.load(path).algorithm).__name__ == "Own"  # it was vouched for


def test_what_a_file_cannot_hold_is_said_when_it_is_saved(tmp_path: Path) -> None:
    class Local(nn.Module):
        def __init__(self, obs: Any) -> None:
            super().__init__()
            self.features, self.layer = 4, nn.Linear(obs.size, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    policy = built("CartPole-v1", ps.PPO(net=ps.Net(encoder=Local)))
    with pytest.warns(UserWarning, match=r"cannot hold algo\.net\.encoder=.*Local: .* top of a module") as told:
        path = policy.save(tmp_path / "a.safetensors")
    assert told[0].filename == __file__
    with pytest.raises(
        ps.PenstockError, match=r"Local could not be stored .* ps\.evaluate.* as net\.encoder, belongs into a module"
    ):
        ps.load(path)


@dataclass(frozen=True)
class NoBuild:
    lr: float = 0.1


def test_settings_that_cannot_build_are_refused(tmp_path: Path) -> None:
    policy = built("CartPole-v1", ps.PPO(net=NET))
    policy.algorithm = NoBuild()
    with pytest.raises(ps.ConfigError, match=r"NoBuild have no build\(spec, seed, device\)"):
        policy.save(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "net", [ps.Net(hidden=(8,), recurrent="lstm", recurrent_size=8, prev_action=True, prev_reward=True)]
)
def test_rows_that_start_an_episode_forget_and_the_others_do_not(net: ps.Net) -> None:
    policy = built("CartPole-v1", ps.PPO(net=net))
    obs = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
    _, state = policy.predict(obs, prev_reward=np.ones(3, np.float32))
    starts = np.array([False, True, False])
    _, mixed = policy.predict(obs, state, prev_reward=np.ones(3, np.float32), episode_start=starts)
    _, kept = policy.predict(obs, state, prev_reward=np.ones(3, np.float32))
    _, begun = policy.predict(obs)
    for x, y, z in zip(*(tree_leaves(s[0]) for s in (mixed, kept, begun))):
        np.testing.assert_array_equal(x[[0, 2]].cpu(), y[[0, 2]].cpu())
        np.testing.assert_array_equal(x[1].cpu(), z[1].cpu())
        assert not torch.equal(y[1], z[1])
    _, every = policy.predict(obs, state, episode_start=True)
    for x, z in zip(*(tree_leaves(s[0]) for s in (every, begun))):
        np.testing.assert_array_equal(x[:3].cpu(), z[:3].cpu())
    for wrong in (np.zeros(2, bool), np.zeros(3), [0, 1, 0]):
        with pytest.raises(ps.ConfigError, match=r"episode_start is .*; expected bool\[3\]"):
            policy.predict(obs, state, episode_start=wrong)
