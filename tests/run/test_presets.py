from __future__ import annotations

import dataclasses
import math
import tomllib
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from torch import nn

import penstock as ps
from penstock.agents.noisy import NoisyLinear
from penstock.algos import ALGOS
from penstock.core.errors import ConfigError
from penstock.core.spec import EnvSpec, LeafSpec
from penstock.run import presets
from penstock.run.presets import find_preset, is_full_name, named_preset, preset_names, why_no_preset, with_preset

FOLDER = Path(ps.__file__).parent / "presets"
ALL = [(path.stem, table) for path in sorted(FOLDER.glob("*.toml")) for table in tomllib.loads(path.read_text())]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(presets, "_FOLDER", tmp_path)
    return tmp_path


def test_every_shipped_preset_is_sound() -> None:
    for algo, table in ALL:
        is_sound(algo, table)


def is_sound(algo: str, table: str) -> None:
    assert algo in ALGOS
    found = named_preset(f"{algo}/{table}")
    assert found.why.strip(), f"{algo}/{table}"
    env = table if "*" not in table else table.replace("*", "Pong")
    exp = with_preset(algo, env, found)
    if isinstance(exp.algo, ps.Policies):
        (one,) = {settings for settings in exp.algo.algos.values()}
        exp = dataclasses.replace(exp, algo=one)
    assert exp.algo_name == algo
    if "*" not in table and ":" not in table and "/" not in table:
        assert table in gym.registry, f"Gymnasium does not know {table}"
    for path, value in found.changes.items():
        if path == "sampler.name" or path.startswith("policies."):
            continue
        here: Any = exp
        for key in path.split("."):
            here = getattr(here, key)
        assert here == value or str(here) == str(value), f"{algo}/{table}: {path}"
    defaults = with_preset(algo, env, None)
    changed = {f.name for f in dataclasses.fields(exp) if getattr(exp, f.name) != getattr(defaults, f.name)}
    assert changed, f"{algo}/{table} changes nothing"


def test_atari_presets_are_those_of_their_sources() -> None:
    for table in ("ALE/*", "penstock.envs.atari:*"):
        dopamine = with_preset("dqn", "ALE/Pong-v5", named_preset(f"dqn/{table}")).algo
        assert isinstance(dopamine, ps.DQN)
        assert (dopamine.eps_eval, dopamine.max_grad_norm) == (0.001, math.inf)
    rainbow: Any = with_preset("dqn", "ALE/Pong-v5", named_preset("dqn/rainbow/Atari")).algo
    pixels = LeafSpec("box", (84, 84, 4), "uint8", low=0, high=255)
    online = ps.q_agent(EnvSpec(pixels, LeafSpec("discrete", (), "int64", sizes=(6,))), rainbow).online
    linear = [(type(x), tuple(x.weight.shape)) for x in online.modules() if isinstance(x, (nn.Linear, NoisyLinear))]
    shapes = [(512, 3136), (512, 3136), (6 * 51, 512), (51, 512)]
    assert sorted(shape for _, shape in linear) == sorted(shapes)
    assert {kind for kind, _ in linear} == {NoisyLinear}


def test_preset_is_the_experiment_of_the_command_line() -> None:
    exp = ps.preset("ppo", "CartPole-v1")
    assert exp.env == "CartPole-v1"
    assert isinstance(exp.algo, ps.PPO)
    assert exp.run.dir is None


def test_no_preset_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match="MountainCar-v0"):
        ps.preset("ppo", "Nothing-v0")
    with pytest.raises(ConfigError, match="no preset for 'pppo'"):
        ps.preset("pppo", "CartPole-v1")


def test_tables_with_a_slash_are_no_full_names() -> None:
    assert is_full_name("dqn/c51/CartPole-v1") and is_full_name("ppo/CartPole-v1") and is_full_name("ppp/CartPole-v1")
    assert not any(map(is_full_name, ("c51/CartPole-v1", "rainbow/MinAtar", "CartPole-v1", "none")))


@pytest.mark.parametrize(
    "name", ["ppo/CartPol-v1", "ppo/", "CartPole-v1", "pppo/CartPole-v1", "", "../ppo/CartPole-v1"]
)
def test_unknown_name_gives_the_nearest(name: str) -> None:
    with pytest.raises(ConfigError, match="unknown preset"):
        named_preset(name)
    if name == "ppo/CartPol-v1":
        with pytest.raises(ConfigError, match="'ppo/CartPole-v1'"):
            named_preset(name)


def test_own_table_comes_before_patterns_and_patterns_in_order(folder: Path) -> None:
    (folder / "ppo.toml").write_text(
        '["ALE/*"]\nwhy = "a"\nalgo = {lr = 1.0}\n["*-v5"]\nwhy = "b"\n["ALE/Pong-v5"]\nwhy = "c"\n'
    )
    found = {env: find_preset("ppo", env) for env in ("ALE/Pong-v5", "ALE/Qbert-v5", "X-v5", "X-v4")}
    assert [f and f.why for f in found.values()] == ["c", "a", "b", None]
    assert preset_names("ppo") == ["ALE/*", "*-v5", "ALE/Pong-v5"]
    assert preset_names("a2c") == []


def test_a_preset_is_not_applied_to_observations_that_its_network_does_not_fit(folder: Path) -> None:
    (folder / "ppo.toml").write_text(
        '["ALE/*"]\nwhy = "a"\nalgo = {net = {cnn = "nature"}}\n["CartPole-v1"]\nwhy = "b"\nalgo = {lr = 1.0}\n'
        '["penstock.envs.minatar:*"]\nwhy = "c"\nalgo = {net = {cnn = "minatar"}}\n'
    )
    raw = {"raw": True}
    for env in ("ALE/Pong-v5", "ale_py:ALE/Pong-v5", "MinAtar/Breakout-v1"):
        assert find_preset("ppo", env) is not None
        assert find_preset("ppo", env, raw) is find_preset("ppo", env, {}, ("a:b",)) is None
        assert "left out" in why_no_preset("ppo", env, raw)
    assert find_preset("ppo", "CartPole-v1", {}, ("a:b",)) is not None
    assert why_no_preset("ppo", "X-v0", {}) == "no preset for ppo on X-v0: default settings"
    with pytest.raises(ConfigError, match=r"preset ppo/ALE.* preprocessed frames, which raw=true leaves out"):
        named_preset("ppo/ALE/*").require_fit("ALE/Pong-v5", raw)
    named_preset("ppo/ALE/*").require_fit("my_module:Env", raw)


def test_nested_tables_become_paths(folder: Path) -> None:
    (folder / "ppo.toml").write_text(
        '["X"]\nwhy = "w"\nwrappers = ["a:b"]\nenv_kwargs = {size = {x = 1}}\n'
        'algo = {lr = "linear(1e-3, 0)", net = {hidden = [8, 8]}}\n'
        'run = {steps = 10, stop = {"eval/mean_reward" = 3.0}}\nsampler = {name = "serial", T = 4, B = 2}\n'
    )
    exp = ps.preset("ppo", "X")
    assert exp.algo.net.hidden == (8, 8)
    assert exp.algo.lr == "linear(1e-3, 0)"
    assert exp.run.stop == {"eval/mean_reward": 3.0}
    assert exp.env_kwargs == {"size": {"x": 1}}
    assert exp.wrappers == ("a:b",)
    assert exp.sampler == ps.SerialSampler(T=4, B=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("algo = {lrr = 1.0}", r"preset ppo/X: .*'lr'"),
        ("alg = {lr = 1.0}", r"preset ppo/X: .*'algo'"),
        ("run = {stps = 1}", r"preset ppo/X: .*'steps'"),
        ("run = {steps = 'many'}", r"preset ppo/X: .*run\.steps='many'"),
        ("run = {steps = 0}", "steps=0"),
        ("sampler = {name = 'seril'}", "'serial'"),
    ],
)
def test_mistakes_in_a_preset_name_it_and_the_nearest(folder: Path, text: str, message: str) -> None:
    (folder / "ppo.toml").write_text(f'["X"]\nwhy = "w"\n{text}\n')
    with pytest.raises(ConfigError, match=message):
        ps.preset("ppo", "X")


def test_a_file_that_is_no_toml(folder: Path) -> None:
    (folder / "ppo.toml").write_text("[[[")
    with pytest.raises(ConfigError, match=r"ppo\.toml is not valid TOML"):
        ps.preset("ppo", "X")


def test_defaults_without_a_preset() -> None:
    exp = with_preset("a2c", "X-v0", None)
    assert exp.algo == ps.A2C()
    assert exp.sampler == ps.SerialSampler(T=5, B=16)
    with pytest.raises(ConfigError, match="'a2c'"):
        with_preset("a2d", "X-v0", None)


def test_a_preset_may_give_each_agent_a_policy() -> None:
    exp = ps.preset("mappo", "pettingzoo:mpe2/simple_speaker_listener_v4")
    assert isinstance(exp.algo, ps.Policies)
    assert exp.algo.policy_mapping_fn == {"speaker_0": "speaker", "listener_0": "listener"}
    assert exp.algo.algos["speaker"] == exp.algo.algos["listener"]
    assert exp.algo.algos["speaker"].epochs == 10
    said = "Policies has no 'lr'; each of speaker, listener has its own: algo.algos.speaker.lr"
    with pytest.raises(ConfigError, match=said):
        ps.override(exp, {"algo.lr": 1e-3})
    with pytest.raises(ConfigError, match=r": algo\.algos\.speaker\.net\.hidden$"):
        ps.override(exp, {"algo.net.hidden": (8,)})
    changed = ps.override(exp, {"algo.algos.speaker.net.hidden": (8,)}).algo
    assert [changed.algos[name].net.hidden for name in ("speaker", "listener")] == [(8,), (64, 64)]
