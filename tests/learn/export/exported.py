"""Exported policies of every kind, opened by their contract alone, beside `predict`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import penstock as ps
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.core.tree import tree_leaves, tree_structure, tree_unflatten

VECTOR = LeafSpec("box", (3,), "float32", -5.0, 5.0)
IMAGE = LeafSpec("box", (36, 36, 1), "uint8", 0.0, 255.0)
CHOICE = LeafSpec("discrete", (), "int64", sizes=(3,), start=2)
BOX = LeafSpec("box", (2,), "float32", (-0.05, -3.0), (0.05, 0.5))
DICT = {"camera": IMAGE, "arm": {"joints": VECTOR, "grip": LeafSpec("discrete", (), "int64", sizes=(4,))}}
TUPLE = (VECTOR, LeafSpec("multi_binary", (4,), "int8"))
MASKED = {"action_mask": LeafSpec("multi_binary", (3,), "int8"), "x": VECTOR}
TEAM = {"obs": VECTOR, "state": LeafSpec("box", (6,), "float32", -5.0, 5.0)}
GROUPS = {"policy": VECTOR, "height": LeafSpec("box", (4,), "float32", -5.0, 5.0), "critic": TEAM["state"]}
GROUPED: Any = {"hidden": (8, 6), "normalize_obs": True, "activation": "elu", "actor_keys": ("policy", "height")}
HYBRID = {"wheel": BOX, "gear": CHOICE, "lights": LeafSpec("multi_binary", (2,), "int8")}
MANY = LeafSpec("multi_discrete", (2,), "int64", sizes=(3, 4), start=(1, 0))
SMALL: Any = {"hidden": (8, 6)}
NORM: Any = {**SMALL, "normalize_obs": True}
PREVIOUS: Any = {"prev_action": True, "prev_reward": True}


def memory(kind: str, **more: Any) -> Any:
    return {**SMALL, "recurrent": kind, "recurrent_size": 5, **more}


def net(kwargs: Any) -> ps.Net:
    return ps.Net(**kwargs)


KINDS: dict[str, tuple[EnvSpec, Any]] = {
    "ppo": (EnvSpec(VECTOR, CHOICE), ps.PPO(net=net(NORM))),
    "ppo box": (EnvSpec(VECTOR, BOX), ps.PPO(net=net(NORM))),
    "ppo float64": (
        EnvSpec(VECTOR, (LeafSpec("box", (2,), "float64", -0.1, 0.3), LeafSpec("box", (1,), "float64"))),
        ps.PPO(net=net(SMALL)),
    ),
    "ppo squash": (EnvSpec(VECTOR, BOX), ps.PPO(net=net({**NORM, "squash": True}))),
    "ppo gsde": (EnvSpec(VECTOR, BOX), ps.PPO(net=net({**SMALL, "use_sde": True}))),
    "ppo groups": (EnvSpec(GROUPS, BOX), ps.PPO(net=net(GROUPED))),
    "ppo groups lstm": (
        EnvSpec(GROUPS, BOX),
        ps.PPO(net=net({**GROUPED, "activation": "silu", **memory("lstm", critic_recurrent="own")})),
    ),
    "ppo image": (EnvSpec(IMAGE, CHOICE), ps.PPO(net=net(SMALL))),
    "ppo impala cnn": (EnvSpec(IMAGE, CHOICE), ps.PPO(net=net({**SMALL, "cnn": "impala"}))),
    "ppo dict hybrid": (EnvSpec(DICT, HYBRID), ps.PPO(net=net(NORM))),
    "ppo tuple": (EnvSpec(TUPLE, MANY), ps.PPO(net=net(SMALL))),
    "ppo mask": (EnvSpec(MASKED, CHOICE), ps.PPO(net=net(NORM))),
    "ppo lstm": (EnvSpec(VECTOR, BOX), ps.PPO(net=net(memory("lstm", **PREVIOUS)))),
    "ppo gru": (EnvSpec(VECTOR, CHOICE), ps.PPO(net=net(memory("gru", **PREVIOUS)))),
    "ppo lstm dict hybrid": (EnvSpec(DICT, HYBRID), ps.PPO(net=net(memory("lstm", normalize_obs=True, **PREVIOUS)))),
    "ppo gru mask": (EnvSpec(MASKED, CHOICE), ps.PPO(net=net(memory("gru", normalize_obs=True)))),
    "a2c": (EnvSpec({"a": VECTOR, "b": {"c": VECTOR, "d": CHOICE}}, HYBRID), ps.A2C(net=net(NORM))),
    "a2c lstm image": (EnvSpec(IMAGE, CHOICE), ps.A2C(net=net(memory("lstm")))),
    "impala": (EnvSpec(MASKED, CHOICE), ps.IMPALA(net=net(SMALL))),
    "impala lstm": (EnvSpec(VECTOR, CHOICE), ps.IMPALA(net=net(memory("lstm", **PREVIOUS)))),
    "appo gru": (EnvSpec(VECTOR, BOX), ps.APPO(net=net(memory("gru")))),
    "dqn": (EnvSpec(VECTOR, CHOICE), ps.DQN(net=net(NORM))),
    "dqn mask": (EnvSpec(MASKED, CHOICE), ps.DQN(net=net(NORM), dueling=True)),
    "dqn dict": (EnvSpec(DICT, CHOICE), ps.DQN(net=net(SMALL))),
    "rainbow": (
        EnvSpec(IMAGE, CHOICE),
        ps.DQN(net=net(SMALL), dueling=True, noisy=True, distributional="c51", n_atoms=5),
    ),
    "qr-dqn": (EnvSpec(VECTOR, CHOICE), ps.DQN(net=net(SMALL), distributional="quantile", n_atoms=5)),
    "boot dqn": (EnvSpec(MASKED, CHOICE), ps.BootDQN(heads=2, net=net(SMALL))),
    "r2d1": (EnvSpec(VECTOR, CHOICE), ps.R2D1(net=net(memory("lstm", **PREVIOUS)))),
    "r2d1 gru mask": (EnvSpec(MASKED, CHOICE), ps.R2D1(net=net(memory("gru", **NORM)))),
    "sac": (EnvSpec(VECTOR, BOX), ps.SAC(net=net(NORM))),
    "fast td3 groups": (
        EnvSpec(GROUPS, BOX),
        ps.TD3(distributional="c51", exploration_noise_low=0.1, net=net({**GROUPED, "activation": "relu"})),
    ),
    "sac dict": (EnvSpec(DICT, BOX), ps.SAC(net=net(SMALL))),
    "tqc": (EnvSpec(VECTOR, BOX), ps.TQC(net=net({**NORM, "norm": "layer"}), quantiles=5)),
    "crossq": (EnvSpec(VECTOR, BOX), ps.CrossQ(net=net(NORM))),
    "pqn lstm": (EnvSpec(MASKED, CHOICE), ps.PQN(net=net(memory("lstm", norm="layer", **PREVIOUS)))),
    "pqn gru": (EnvSpec(VECTOR, CHOICE), ps.PQN(net=net(memory("gru", norm="layer", normalize_obs=True)))),
    "sac simba": (EnvSpec(VECTOR, BOX), ps.SAC(net=net({"hidden": (8, 8), "block": "simba"}))),
    "td3": (EnvSpec(VECTOR, BOX), ps.TD3(net=net(NORM))),
    "ddpg image": (EnvSpec(IMAGE, BOX), ps.DDPG(net=net(SMALL))),
    "discrete sac": (EnvSpec(MASKED, CHOICE), ps.DiscreteSAC(net=net(SMALL))),
    "cql": (EnvSpec(VECTOR, BOX), ps.CQL(net=net(SMALL))),
    "cql choices": (EnvSpec(VECTOR, CHOICE), ps.CQL(net=net(SMALL))),
    "iql": (EnvSpec(VECTOR, BOX), ps.IQL(net=net(SMALL))),
    "rebrac": (EnvSpec(VECTOR, BOX), ps.ReBRAC(net=net(SMALL))),
    "bc": (EnvSpec(VECTOR, HYBRID), ps.BC(net=net(NORM))),
    "marwil": (EnvSpec(VECTOR, CHOICE), ps.MARWIL(net=net(SMALL))),
    "qmix": (EnvSpec(TEAM, CHOICE, 2), ps.QMIX(net=net(NORM))),
    "mappo gru": (EnvSpec(TEAM, CHOICE, 2), ps.MAPPO(net=net(memory("gru", normalize_obs=True)))),
}


def built(kind: str) -> ps.Policy:
    """A policy whose actions vary: weights at random, statistics of a normaliser that shift and scale."""
    spec, settings = KINDS[kind]
    policy = settings.build(spec, seed=1)
    for i, (name, p) in enumerate(policy.agent.named_parameters()):
        spread = p[0].numel() ** -0.5 if p.ndim > 1 else 0.1
        torch.nn.init.normal_(p.data, 0.0, spread, generator=torch.Generator().manual_seed(i))
        if name.endswith(".variance"):
            p.data.abs_().add_(0.5)
    for name, buffer in policy.agent.named_buffers():
        if name.endswith(("moments.mean", ".mean")) and "normalizer" in name:
            buffer.copy_(torch.linspace(-1.0, 1.0, len(buffer)))
        if name.endswith(".var") and "normalizer" in name:
            buffer.copy_(torch.linspace(0.5, 4.0, len(buffer)))
    return policy


def opened(path: Path) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A function from named inputs to named outputs, by the contract and the file alone."""
    contract = json.loads(Path(f"{path}.contract.json").read_text())
    names = [[port["name"] for port in contract[side]] for side in ("inputs", "outputs")]
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        assert [port.name for port in session.get_inputs()] == names[0]
        assert [port.name for port in session.get_outputs()] == names[1]
        return lambda feed: dict(zip(names[1], session.run(None, feed)))
    module = torch.export.load(path).module()

    def act(feed: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            return dict(
                zip(names[1], (x.numpy() for x in module(*(torch.from_numpy(feed[name]) for name in names[0]))))
            )

    return act


def drawn(leaf: LeafSpec, n: int, rng: np.random.Generator) -> Any:
    shape = (n, *leaf.shape)
    if leaf.kind != "box":
        flat = np.reshape(leaf.start, -1) + rng.integers(0, np.asarray(leaf.sizes or 2), (n, leaf.size))
        return flat.reshape(shape).astype(leaf.dtype)
    return rng.uniform(leaf.low, leaf.high, shape).astype(leaf.dtype)


def observed(policy: ps.Policy, n: int, rng: np.random.Generator) -> Any:
    spec = {key: leaf for key, leaf in policy.spec.obs.items() if key not in policy.agent.unseen} if (
        policy.agent.unseen
    ) else policy.spec.obs  # fmt: skip
    obs = tree_unflatten(tree_structure(spec), [drawn(leaf, n, rng) for leaf in tree_leaves(spec)])
    if isinstance(obs, dict) and "action_mask" in obs:
        obs["action_mask"][:, 1] = 1
    return obs


def compare(policy: ps.Policy, path: Path, rows: int, steps: int) -> None:
    """Acts by the file and by `predict`, from `rows` observations or sequences of `steps` with episodes that begin."""
    act, rng = opened(path), np.random.default_rng(5)
    contract = json.loads(Path(f"{path}.contract.json").read_text())
    names = [port["name"] for port in contract["inputs"]]
    state = {s["input"]: np.zeros((rows, *s["shape"]), s["dtype"]) for s in contract["state"]}
    carried: Any = None
    for t in range(steps if policy.recurrent else 1):
        obs, reward = observed(policy, rows, rng), rng.normal(size=rows).astype(np.float32)
        first = np.full(rows, t == 0) | (rng.random(rows) < 0.1)
        feed = dict(zip(names, tree_leaves(obs))) | state
        if policy.recurrent:
            feed |= {"first": first}
            expected, carried = policy.predict(obs, carried, None if t == 0 else first, prev_reward=reward)
        else:
            expected = policy.predict(obs)
        if "prev_reward" in names:
            feed |= {"prev_reward": reward}
        found = act(feed)
        state = {s["input"]: found[s["output"]] for s in contract["state"]}
        for leaf, x, y in zip(tree_leaves(policy.spec.action), found.values(), tree_leaves(expected)):
            assert x.dtype == y.dtype == np.dtype(leaf.dtype)
            if leaf.kind == "box":
                np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)
                assert (x >= leaf.bound("low").astype(leaf.dtype)).all()
                assert (x <= leaf.bound("high").astype(leaf.dtype)).all()
            else:
                np.testing.assert_array_equal(x, y)
