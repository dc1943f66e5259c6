"""Converted rsl_rl configs: every setting is used or named, and losses and step sizes are rsl_rl's from equal weights."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from penstock.algos.ppo import PPO
from penstock.core.batch import Inputs, TrainBatch, allocate_batch
from penstock.core.errors import ConfigError
from penstock.core.spec import BatchSpec, EnvSpec, LeafSpec
from penstock.learn.policy import Policy
from penstock.learn.rows.postprocess import as_tensors
from penstock.studies.rsl_rl import converted

T, B = 8, 16
NEW: dict[str, Any] = {
    "seed": 42,
    "device": "cuda:0",
    "num_steps_per_env": T,
    "max_iterations": 300,
    "save_interval": 50,
    "experiment_name": "cartpole",
    "logger": "tensorboard",
    "clip_actions": None,
    "obs_groups": {"actor": ["policy"], "critic": ["policy", "critic"]},
    "algorithm": {
        "class_name": "rsl_rl.algorithms:PPO",
        "num_learning_epochs": 5,
        "num_mini_batches": 4,
        "clip_param": 0.2,
        "gamma": 0.98,
        "lam": 0.9,
        "value_loss_coef": 0.7,
        "entropy_coef": 0.005,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.8,
        "schedule": "adaptive",
        "desired_kl": 0.03,
        "use_clipped_value_loss": True,
        "rnd_cfg": None,
    },
    "actor": {
        "class_name": "rsl_rl.models:MLPModel",
        "hidden_dims": [16, 8],
        "activation": "elu",
        "distribution_cfg": {"class_name": "rsl_rl.modules:GaussianDistribution", "init_std": 0.5, "std_type": "log"},
    },
    "critic": {"class_name": "rsl_rl.models:MLPModel", "hidden_dims": [12, 8], "activation": "elu"},
}
OLD: dict[str, Any] = {
    "num_steps_per_env": 24,
    "empirical_normalization": True,
    "policy": {
        "class_name": "ActorCritic",
        "init_noise_std": 1.0,
        "actor_hidden_dims": [128, 64],
        "critic_hidden_dims": [128, 64],
        "activation": "lrelu",
    },
    "algorithm": {"class_name": "PPO", "schedule": "fixed", "use_clipped_value_loss": False, "optimizer": "adamw"},
}
SIZES = {"policy": 5, "critic": 3}
SPEC = EnvSpec({key: LeafSpec("box", (n,), "float32") for key, n in SIZES.items()}, LeafSpec("box", (2,), "float32"))
GOLDEN = {
    "loss": 2.6992652,
    "rate": 0.00019753086419753093,
    "value": 3.0769867,
    "surrogate": -0.0325813171,
    "entropy": 1.4539783,
}
"""Of rsl_rl 5.5.1 with torch 2.13.0: the first minibatch's loss, step size and mean losses after 20 updates."""


def test_every_setting_of_a_config_goes_somewhere() -> None:
    found = converted(NEW, B)
    algo = found.algo
    assert algo == PPO(
        lr="kl(0.001, desired=0.03)",
        epochs=5,
        minibatch=32,
        discount=0.98,
        gae_lambda=0.9,
        value_coef=1.4,
        value_clip=0.2,
        entropy_coef=0.005,
        max_grad_norm=0.8,
        adam_eps=1e-8,
        normalize_value=False,
        net=ps.Net(
            hidden=(16, 8),
            critic_hidden=(12, 8),
            activation="elu",
            init="torch",
            shared=False,
            log_std_init=math.log(0.5),
            actor_keys=("policy",),
            critic_keys=("policy", "critic"),
        ),
    )
    assert found.tables["sampler"] == {"T": T, "B": B}
    steps = {"steps": 300 * T * B, "seed": 42, "checkpoint_interval": 50 * T * B, "device": "cuda:0"}
    assert found.tables["run"] == steps
    assert set(found.missing) == {"output layers"}
    assert set(found.dropped) == {"experiment_name", "logger", "clip_actions", "algorithm.rnd_cfg"}


def test_a_config_of_earlier_versions() -> None:
    found = converted(OLD, 10)
    algo = found.algo
    assert (algo.lr, algo.value_clip, algo.optimizer, algo.entropy_coef) == (1e-3, None, "adamw", 0.01)
    assert algo.minibatch == 60 and algo.net.hidden == (128, 64) and algo.net.critic_hidden is None
    assert algo.net.activation == "leaky_relu" and algo.net.normalize_obs and algo.net.log_std_init == 0.0
    assert set(found.missing) == {"output layers", "std_type", "obs_normalization", "algorithm.optimizer"}


def test_a_config_of_rsl_rl_4() -> None:
    noise = {"stochastic": True, "init_noise_std": 0.5, "noise_std_type": "log", "state_dependent_std": False}
    none = {"stochastic": False, "init_noise_std": 1.0, "noise_std_type": "scalar", "state_dependent_std": False}
    models = {
        part: {"class_name": "MLPModel", "hidden_dims": [8], "activation": activation, **own}
        for part, activation, own in (("actor", "ELU", noise), ("critic", "elu", none))
    }
    found = converted({"algorithm": {"class_name": "PPO"}, **models}, 4)
    assert found.algo.net.log_std_init == math.log(0.5)
    assert found.algo.net.activation == "elu"
    assert set(found.missing) == {"output layers"}


def test_a_random_seed_is_left_out() -> None:
    found = converted(changed("seed", -1), B)
    assert "seed" not in found.tables["run"] and found.missing["seed"].startswith("-1, which stands for a random one")


def test_one_group_for_both_is_the_observation_itself() -> None:
    found = converted(changed("obs_groups", {"policy": ["policy"], "critic": ["policy"]}), B)
    assert found.algo.net.actor_keys is None and found.algo.net.critic_keys is None
    assert "net.actor_keys and net.critic_keys = ['policy'] if" in found.missing["obs_groups"]


def changed(path: str, value: Any) -> dict[str, Any]:
    *tables, last = path.split(".")
    config = {key: dict(x) if isinstance(x, dict) else x for key, x in NEW.items()}
    config["actor"]["distribution_cfg"] = dict(NEW["actor"]["distribution_cfg"])
    at: Any = config
    for table in tables:
        at = at[table]
    at[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("algorithm.symmetry_cfg", {"use_mirror_loss": True}),
        ("algorithm.rnd_cfg", {"weight": 1.0}),
        ("algorithm.normalize_advantage_per_mini_batch", True),
        ("algorithm.of_a_later_version", 3.5),
        ("algorithm.optimizer", "sgd"),
        ("actor.distribution_cfg.std_type", "scalar"),
        ("actor.distribution_cfg.learn_std", False),
        ("actor.distribution_cfg.std_range", (0.1, 2.0)),
        ("actor.distribution_cfg.class_name", "rsl_rl.modules:BetaDistribution"),
        ("actor.class_name", "rsl_rl.models:RNNModel"),
        ("critic.activation", "tanh"),
        ("critic.obs_normalization", True),
        ("clip_actions", 100.0),
        ("obs_groups", {"actor": ["policy"]}),
        ("anything", {"inner": 1}),
    ],
)
def test_what_has_no_counterpart_is_named(path: str, value: Any) -> None:
    found = converted(changed(path, value), B)
    last = path.split(".")[-1]
    named = [key for key in found.missing if last in key or last in found.missing[key] or "inner" in key]
    assert named or (last == "obs_normalization" and "critic: normalize_obs" in found.missing)
    assert any(
        "not in penstock" in line
        for line in found.toml().splitlines()
        if last in line or "inner" in line or ":" in line
    )


def test_what_penstock_has_otherwise_is_said() -> None:
    for path, value, ours in (
        ("algorithm.rnd_cfg", {"weight": 0.5}, "algo.rnd"),
        ("actor.rnn_type", "lstm", "net.recurrent"),
        ("actor.rnn_hidden_dim", 64, "net.recurrent_size"),
    ):
        assert f"{value!r}; {ours}" in converted(changed(path, value), B).missing[path]


def test_what_is_no_config_of_ppo_is_refused() -> None:
    for config, match in (
        ({}, "without a table 'algorithm'"),
        (changed("algorithm.class_name", "rsl_rl.algorithms:Distillation"), "expected PPO"),
        (changed("actor.activation", "crelu"), "activation='crelu'"),
        (changed("actor.hidden_dims", [-1, 8]), "expected widths"),
        (changed("actor.distribution_cfg.init_std", 0.0), "expected more than 0"),
        (changed("actor.distribution_cfg.init_std", None), r"actor.distribution_cfg.init_std=None; expected a number"),
        (changed("actor.hidden_dims", 16), "actor.hidden_dims=16; expected widths"),
        (changed("critic.hidden_dims", [16, "x"]), "critic.hidden_dims='x'; expected a number"),
        (changed("algorithm.gamma", "high"), "algorithm.gamma='high'; expected a number"),
        (changed("algorithm.gamma", 1.5), "discount=1.5; expected 0 to 1"),
        (changed("algorithm.num_mini_batches", 0), "num_mini_batches=0; expected a whole number of 1 or more"),
        (changed("num_steps_per_env", 2.5), "num_steps_per_env=2.5; expected a whole number of 1 or more"),
        (changed("max_iterations", "all"), "max_iterations='all'; expected a number"),
        (changed("max_iterations", math.inf), "max_iterations=inf; expected a whole number of 1 or more"),
        (changed("save_interval", math.nan), "save_interval=nan; expected a whole number of 1 or more"),
        (changed("seed", 0.5), "seed=0.5; expected a whole number of -1 or more"),
        (changed("seed", [1]), r"seed=\[1\]; expected a number"),
        (changed("seed", -math.inf), "seed=-inf; expected a whole number of -1 or more"),
    ):
        with pytest.raises(ConfigError, match=match):
            converted(config, B)


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    found = converted(changed("actor.distribution_cfg.init_std", "5e-1"), B)
    assert found.tables == converted(changed("actor.distribution_cfg.init_std", 0.5), B).tables


def arrays() -> dict[str, Any]:
    """A batch and weights by chance, the same with every version of torch."""
    rng = np.random.RandomState(7)
    shapes = {"actor": (5, 16, 8, 2), "critic": (8, 12, 8, 1)}
    weights = {
        part: [(rng.randn(o, i) / math.sqrt(i), 0.1 * rng.randn(o)) for i, o in zip(sizes, sizes[1:])]
        for part, sizes in shapes.items()
    }
    found: dict[str, Any] = {key: rng.randn(T + 1, B, n) for key, n in SIZES.items()}
    found |= {"noise": rng.randn(T, B, 2), "reward": rng.randn(T, B), "ended": rng.rand(T, B) < 0.1}
    return {**found, "weights": weights, "order": rng.permutation(T * B)}


def ours(x: dict[str, Any]) -> tuple[Policy, TrainBatch, Tensor]:
    """Our policy with these weights, the rows of a batch in the order of time, and the actions."""
    policy = converted({**NEW, "device": None}, B).algo.build(SPEC)
    agent: Any = policy.agent
    layers = {"actor": [*agent.actor.mlp.layers, agent.head.linear]}
    layers["critic"] = [*agent.critic.mlp.layers, agent.value_head]
    for part, found in layers.items():
        for layer, (weight, bias) in zip(found, x["weights"][part], strict=True):
            if part == "critic" and layer is found[0]:  # our parts lie by the alphabet: critic, policy
                weight = np.concatenate([weight[:, 5:], weight[:, :5]], 1)
            layer.weight.data.copy_(torch.from_numpy(weight))
            layer.bias.data.copy_(torch.from_numpy(bias))
    batch = allocate_batch(SPEC, BatchSpec(T, B), {"logp": np.float32(0)})
    for key in SIZES:
        batch.obs[key][...] = x[key]
    batch.reward[...], batch.terminated[...], batch.valid[...] = x["reward"], x["ended"], True
    tensors = as_tensors(batch, torch.device("cpu"))
    with torch.no_grad():
        dist = agent(tensors.inputs_t.flat()).dist
        action = dist.mean + dist.log_std.exp() * torch.from_numpy(x["noise"]).float().flatten(0, 1)
        batch.action[...] = action.reshape(T, B, 2).numpy()
        batch.info["logp"][...] = dist.log_prob(action).reshape(T, B).numpy()
    data = policy.postprocess(tensors)
    flat = {name: row.flatten(0, 1) for name, row in data.rows.items()}
    return policy, TrainBatch(data.inputs.flat(), flat, None), action


def trained(x: dict[str, Any]) -> dict[str, float]:
    """Our first loss, mean losses and step size after 20 updates."""
    policy, data, _ = ours(x)
    losses: list[Any] = []
    for _ in range(5):
        for part in np.split(x["order"], 4):
            pick = torch.from_numpy(part)
            inputs = Inputs({key: obs[pick] for key, obs in data.inputs.obs.items()}, *[None] * 3)  # pyright: ignore
            losses.append(policy.learn_on_batch(TrainBatch(inputs, {k: v[pick] for k, v in data.rows.items()}, None)))
    of = {"value": "value_loss", "surrogate": "policy_gradient_loss", "entropy": "entropy_loss"}
    found = {name: float(np.mean([loss.metrics[key] for loss in losses])) for name, key in of.items()}
    found |= {"value": 2 * found["value"], "entropy": -found["entropy"]}
    return {**found, "loss": float(losses[0].total), "rate": policy.optimizers["all"].param_groups[0]["lr"]}


def test_losses_and_step_sizes_are_those_of_rsl_rl() -> None:
    found = trained(arrays())
    assert found["loss"] == pytest.approx(GOLDEN["loss"], abs=1e-5)
    assert found["rate"] == pytest.approx(GOLDEN["rate"], rel=1e-9)
    assert found == pytest.approx(GOLDEN, abs=1e-4)
    assert GOLDEN["rate"] != 1e-3


@pytest.mark.skipif(importlib.util.find_spec("rsl_rl") is None, reason="rsl_rl is not installed")
def test_the_numbers_are_those_of_the_rsl_rl_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peer(arrays(), monkeypatch) == pytest.approx(GOLDEN, abs=1e-6)


def peer(x: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The same numbers of rsl_rl."""
    from rsl_rl.algorithms import PPO as Peer  # pyright: ignore
    from rsl_rl.models import MLPModel  # pyright: ignore
    from rsl_rl.storage import RolloutStorage  # pyright: ignore
    from tensordict import TensorDict  # pyright: ignore

    def shown(t: int) -> Any:
        return TensorDict({key: torch.from_numpy(x[key][t]).float() for key in SIZES}, batch_size=[B])

    groups, models = NEW["obs_groups"], []
    for part, outputs in (("actor", 2), ("critic", 1)):
        own = {key: value for key, value in NEW[part].items() if key != "class_name"}
        models.append(MLPModel(shown(0), groups, part, outputs, **own))
        for layer, (weight, bias) in zip([m for m in models[-1].mlp if isinstance(m, nn.Linear)], x["weights"][part]):
            layer.weight.data.copy_(torch.from_numpy(weight))
            layer.bias.data.copy_(torch.from_numpy(bias))
    own = {key: value for key, value in NEW["algorithm"].items() if key != "class_name"}
    storage = RolloutStorage("rl", B, T, shown(0), [2])
    alg = Peer(*models, storage, **own)
    for t in range(T):
        step = RolloutStorage.Transition()
        with torch.no_grad():
            models[0](shown(t), stochastic_output=True)
            step.observations, step.values = shown(t), models[1](shown(t))
        mean, std = models[0].output_mean.detach(), models[0].output_std.detach()
        step.actions = mean + std * torch.from_numpy(x["noise"][t]).float()
        step.actions_log_prob = models[0].get_output_log_prob(step.actions).detach()
        step.distribution_params = tuple(p.detach() for p in models[0].output_distribution_params)
        step.rewards, step.dones = torch.from_numpy(x["reward"][t]).float(), torch.from_numpy(x["ended"][t])
        storage.add_transition(step)
    alg.compute_returns(shown(T))
    losses: list[float] = []
    backward = Tensor.backward
    monkeypatch.setattr(torch, "randperm", lambda *args, **given: torch.from_numpy(x["order"]))
    monkeypatch.setattr(Tensor, "backward", lambda loss, *args: (losses.append(float(loss)), backward(loss, *args)))
    return {**alg.update(), "loss": losses[0], "rate": alg.learning_rate}
