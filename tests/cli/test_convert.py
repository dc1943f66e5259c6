"""`penstock convert`: its output is a settings file of `penstock train`."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.config import experiment_from
from tests.cli.short import Cli
from tests.studies.test_rsl_rl import NEW, converted

YAML = """
seed: 1
num_steps_per_env: 8
max_iterations: 10
class_name: OnPolicyRunner
algorithm:
  class_name: PPO
  learning_rate: 1.0e-3
  schedule: adaptive
  desired_kl: 0.02
  num_mini_batches: 2
  symmetry_cfg: {use_data_augmentation: true}
policy:
  class_name: ActorCritic
  activation: elu
  actor_hidden_dims: !!python/tuple [32, 16]
  critic_hidden_dims: [32, 16]
"""


def test_the_output_is_a_file_of_settings(cli: Cli) -> None:
    pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'penstock[yaml]'")
    Path("agent.yaml").write_text(YAML)
    said = cli("convert", "agent.yaml", "--num-envs", "16")
    assert said.code == 0, said.both
    assert "# not in penstock: algorithm.symmetry_cfg: {'use_data_augmentation': True}" in said.out
    Path("ours.toml").write_text(said.out)
    exp = experiment_from("ours.toml", env="Pendulum-v1")
    algo, sampler = exp.algo, exp.sampler
    assert (algo.lr, algo.minibatch, algo.net.hidden) == ("kl(0.001, desired=0.02)", 64, (32, 16))  # pyright: ignore
    assert (sampler.T, sampler.B, exp.run.steps, exp.run.seed) == (8, 16, 1280, 1)  # pyright: ignore
    Path("new.toml").write_text(converted({**NEW, "device": "cpu"}, 16).toml())
    assert experiment_from("new.toml", env="Pendulum-v1").algo == converted(NEW, 16).algo


def test_what_it_refuses(cli: Cli) -> None:
    pytest.importorskip("yaml", reason="pyyaml is not installed: pip install 'penstock[yaml]'")
    Path("bad.yaml").write_text("a: [")
    Path("none.yaml").write_text("3")
    Path("deep.json").write_text('{"a":' * 5_000 + "1" + "}" * 5_000)
    for arguments, match in (
        (("bad.yaml", "--num-envs", "1"), "cannot be read as YAML"),
        (("deep.json", "--num-envs", "1"), "deep.json cannot be read as YAML"),
        (("nowhere.yaml", "--num-envs", "1"), "No such file"),
        (("none.yaml", "--num-envs", "1"), "without a table 'algorithm'"),
        (("none.yaml", "--num-envs", "0"), "expected 1 or more"),
        (("none.yaml",), "--num-envs"),
    ):
        said = cli("convert", *arguments)
        assert said.code == 2 and match in said.both
    said = cli("train", "--config", "bad.yaml", "--env", "CartPole-v1")
    assert said.code == 2 and "`penstock convert` makes one of rsl_rl's YAML" in said.both
