"""PPO configs of rsl_rl (those of Isaac Lab and mjlab, too) as settings of penstock; what has no counterpart is named.

Numbers that a config leaves out are the defaults of rsl_rl 5.5.1. Its value loss is the whole square, penstock's half
of it, so `value_coef` is twice `value_loss_coef`; its values have the unit of rewards, so `normalize_value` is off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from penstock.algos.ppo import PPO
from penstock.core.config import override
from penstock.core.errors import ConfigError, MissingExtraError
from penstock.run.presets import flat_settings
from penstock.studies.toml import toml_table

_ACTIVATIONS = {
    **{name: name for name in ("elu", "selu", "relu", "tanh", "sigmoid", "softplus", "gelu", "swish", "mish")},
    "lrelu": "leaky_relu",
}
_OF_THEIR_RUNS = (
    *("class_name", "experiment_name", "run_name", "logger", "wandb_project", "neptune_project", "check_for_nan"),
    *("resume", "load_run", "load_checkpoint", "algorithm.grad_reduce_bucket_mb", "torch_compile_mode"),
    *("actor.stochastic", "critic.stochastic", "critic.init_noise_std", "critic.noise_std_type"),  # rsl_rl 4
)
"""Settings of their runner, which change nothing that is learned."""
_OTHERWISE = {
    "rnd_cfg": "algo.rnd has values of its own for novelty, where rsl_rl adds it to rewards",
    "rnn_type": "net.recurrent says lstm or gru, for actor and critic",
    "rnn_hidden_dim": "net.recurrent_size",
}
"""What penstock has instead of these, which are not carried over as they differ."""


class Conversion(NamedTuple):
    """An rsl_rl config as settings: every number of it is in one of these."""

    tables: dict[str, dict[str, Any]]
    """The tables algo, sampler and run, as a file of `penstock train --config` has them."""
    missing: dict[str, str]
    """Settings that penstock has not, or not so, with what is so instead; runs learn otherwise by them."""
    dropped: dict[str, Any]
    """Settings of their runner without a counterpart, which change nothing that is learned."""

    @property
    def algo(self) -> PPO:
        """The settings of the algorithm."""
        given = {key: x for key, x in self.tables["algo"].items() if key != "name"}
        return override(PPO(), flat_settings(given))

    def toml(self) -> str:
        """The text of a file for `penstock train --config`; what is missing or dropped stands in its comments."""
        lines = [line for name, table in self.tables.items() for line in (*toml_table(name, table), "")]
        lines += [f"# not in penstock: {key}: {said}" for key, said in self.missing.items()]
        lines += [f"# not carried over: {key} = {value!r}" for key, value in self.dropped.items()]
        return "\n".join(lines).rstrip() + "\n"


class _Config:
    """A nested config whose settings are taken one by one, by dotted names; what is left is known at the end."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.left: dict[str, Any] = {}
        self._flatten(config, "")

    def _flatten(self, config: Mapping[str, Any], prefix: str) -> None:
        for key, value in config.items():
            if isinstance(value, Mapping) and value and key not in ("rnd_cfg", "symmetry_cfg", "logger"):
                self._flatten(value, f"{prefix}{key}.")
            else:
                self.left[f"{prefix}{key}"] = value

    def take(self, name: str, default: Any = None) -> Any:
        found: Any = self.left.pop(name, default)
        return found

    def number(self, name: str, default: float) -> float:
        """A setting as a number; YAML reads 1e-3 as text. Raises ConfigError if it is none."""
        return _number(name, self.take(name, default))

    def whole(self, name: str, default: int) -> int:
        """A setting as a whole number of 1 or more. Raises ConfigError if it is none."""
        return _whole(name, self.take(name, default))

    def has(self, part: str) -> bool:
        return any(key.startswith(f"{part}.") for key in self.left)


def converted(config: Mapping[str, Any], num_envs: int) -> Conversion:
    """An rsl_rl config, as its runner takes it or as Isaac Lab writes `params/agent.yaml`, as settings of PPO.

    Args:
        num_envs: environments of the simulator, by which minibatches are sized and iterations become steps.

    Raises:
        ConfigError: the config is no one of PPO, or a number is out of range.
    """
    if not isinstance(config, Mapping) or not isinstance(config.get("algorithm"), Mapping):
        raise ConfigError("an rsl_rl config without a table 'algorithm'; expected that of an OnPolicyRunner")
    given = _Config(config)
    missing: dict[str, str] = {}
    kind = str(given.take("algorithm.class_name", "PPO"))
    if kind.replace(":", ".").split(".")[-1] != "PPO":
        raise ConfigError(
            f"algorithm.class_name={kind!r}; expected PPO, the only one that penstock has as rsl_rl has it"
        )
    T = given.whole("num_steps_per_env", 24)
    algo: dict[str, Any] = {"name": "ppo", **_algorithm(given, T * num_envs, missing), "net": _networks(given, missing)}
    run: dict[str, Any] = {}
    for ours, theirs, scale, least in (
        ("steps", "max_iterations", T * num_envs, 1),
        ("seed", "seed", 1, -1),
        ("checkpoint_interval", "save_interval", T * num_envs, 1),
    ):
        if (value := given.take(theirs)) is not None:
            run[ours] = _whole(theirs, value, least) * scale
    if run.get("seed", 0) < 0:
        missing["seed"] = f"{run.pop('seed')}, which stands for a random one; 0 unless run.seed is set"
    if (device := given.take("device")) is not None:
        run["device"] = str(device)
    if given.left.get("torch_compile_mode") is not None:
        run["compile"] = True
    if given.take("algorithm.use_mixed_precision", False):
        run["precision"] = "bf16"
    dropped = {key: given.take(key) for key in _OF_THEIR_RUNS if key in given.left}
    for key, value in given.left.items():
        if value not in (None, False, {}, []):
            instead = _OTHERWISE.get(key.rpartition(".")[2])
            missing[key] = f"{value!r}" if instead is None else f"{value!r}; {instead}"
    dropped |= {key: value for key, value in given.left.items() if value in (None, False, {}, [])}
    made = Conversion({"algo": algo, "sampler": {"T": T, "B": num_envs}, "run": run}, missing, dropped)
    _ = made.algo  # which refuses numbers out of range
    return made


def _algorithm(given: _Config, rows: int, missing: dict[str, str]) -> dict[str, Any]:
    def take(name: str, default: Any) -> Any:
        found: Any = given.take(f"algorithm.{name}", default)
        return found

    def number(name: str, default: float) -> float:
        return given.number(f"algorithm.{name}", default)

    lr, desired = number("learning_rate", 1e-3), take("desired_kl", 0.01)
    desired = desired if take("schedule", "adaptive") == "adaptive" else None
    clip, optimizer = number("clip_param", 0.2), str(take("optimizer", "adam")).lower()
    clips_value, parts = bool(take("use_clipped_value_loss", True)), given.whole("algorithm.num_mini_batches", 4)
    if optimizer not in ("adam", "adamw", "rmsprop"):
        missing["algorithm.optimizer"], optimizer = f"{optimizer!r}; adam is used", "adam"
    if optimizer == "adamw":
        missing["algorithm.optimizer"] = "'adamw', by which rsl_rl decays biases and the deviation, too"
    if take("normalize_advantage_per_mini_batch", False):
        missing["algorithm.normalize_advantage_per_mini_batch"] = "True; advantages are normalised over the batch"
    return {
        "lr": lr if desired is None else f"kl({lr!r}, desired={_number('algorithm.desired_kl', desired)!r})",
        "epochs": given.whole("algorithm.num_learning_epochs", 5),
        "minibatch": max(rows // parts, 1),
        "discount": number("gamma", 0.99),
        "gae_lambda": number("lam", 0.95),
        "clip": clip,
        "value_clip": clip if clips_value else None,
        "value_coef": 2.0 * number("value_loss_coef", 1.0),
        "entropy_coef": number("entropy_coef", 0.01),
        "max_grad_norm": number("max_grad_norm", 1.0),
        "optimizer": optimizer,
        "adam_eps": 1e-8,
        "normalize_value": False,
    }


def _networks(given: _Config, missing: dict[str, str]) -> dict[str, Any]:
    """Settings of `ps.Net`, from the tables actor and critic, or the one table `policy` of rsl_rl before 4."""
    old = given.has("policy")
    both = given.take("empirical_normalization", False)
    net: dict[str, Any] = {"init": "torch", "shared": False}
    found: dict[str, dict[str, Any]] = {"actor": {}, "critic": {}}
    for part, of_part in found.items():
        at = "policy" if old else part
        name = given.take(f"{at}.class_name", "MLPModel") if not (old and part == "critic") else "MLPModel"
        if str(name).replace(":", ".").split(".")[-1] not in ("MLPModel", "ActorCritic"):
            missing[f"{at}.class_name"] = f"{name!r}; layers that are fully connected are used"
        hidden = given.take(f"policy.{part}_hidden_dims" if old else f"{part}.hidden_dims", (256, 256, 256))
        if not isinstance(hidden, (list, tuple)) or -1 in hidden:
            raise ConfigError(f"{at}.hidden_dims={hidden!r}; expected widths: -1 is the number of inputs, say that")
        of_part["hidden"] = tuple(_whole(f"{at}.hidden_dims", width) for width in hidden)
        normal = f"policy.{part}_obs_normalization" if old else f"{part}.obs_normalization"
        of_part["normalize_obs"] = bool(given.take(normal, False) or both)
        of_part["activation"] = (
            found["actor"]["activation"]
            if old and part == "critic"
            else str(given.take(f"{at}.activation", "elu")).lower()
        )
        sets = ("actor", "policy") if part == "actor" else ("critic",)
        for keys in [x for x in (given.take(f"obs_groups.{name}") for name in sets) if x]:
            net[f"{part}_keys"] = tuple(keys)
    if len(absent := [part for part in found if f"{part}_keys" not in net]) == 1:
        missing["obs_groups"] = (
            f"none for the {absent[0]}, which reads all here; of rsl_rl {absent[0]!r}, else 'policy'"
        )
    if net.get("actor_keys") == net.get("critic_keys") and len(net.get("actor_keys", ())) == 1:
        (group,) = net.pop("actor_keys")  # the observation is that group alone
        del net["critic_keys"]
        missing["obs_groups"] = (
            f"{group!r} for both; set net.actor_keys and net.critic_keys = [{group!r}] if the observation has others"
        )
    actor, critic = found.values()
    net |= {"hidden": actor["hidden"]} | (
        {} if actor["hidden"] == critic["hidden"] else {"critic_hidden": critic["hidden"]}
    )
    activation = actor["activation"]
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"activation={activation!r}; penstock has of rsl_rl's {', '.join(_ACTIVATIONS)}: choose one of these"
        )
    net |= {"activation": _ACTIVATIONS[activation], "normalize_obs": actor["normalize_obs"]}
    for key in ("activation", "normalize_obs"):
        if actor[key] != critic[key]:
            missing[f"critic: {key}"] = f"{critic[key]!r}; the actor's {actor[key]!r} is used for both"
    net["log_std_init"] = math.log(_deviation(given, old, missing))
    missing["output layers"] = "rsl_rl starts them as torch does; penstock at gain 0.01 (actor) and 1 (critic)"
    if net["normalize_obs"]:
        missing["obs_normalization"] = (
            "rsl_rl divides by the deviation + 0.01; penstock by the deviation, clipped at 10"
        )
    return net


def _deviation(given: _Config, old: bool, missing: dict[str, str]) -> float:
    """The first standard deviation of actions, in the unit of the environment's where a box has no bounds."""
    if old or not given.has("actor.distribution_cfg"):  # as in rsl_rl before 5
        at = "policy" if old else "actor"
        std, kind = given.number(f"{at}.init_noise_std", 1.0), given.take(f"{at}.noise_std_type", "scalar")
    else:
        at = "actor.distribution_cfg."
        name = str(given.take(f"{at}class_name", "GaussianDistribution"))
        if not name.endswith("GaussianDistribution") or "Heteroscedastic" in name:
            missing[f"{at}class_name"] = f"{name!r}; a Gaussian is used, whose deviation does not depend on the state"
        std, kind = given.number(f"{at}init_std", 1.0), given.take(f"{at}std_type", "scalar")
        if not given.take(f"{at}learn_std", True):
            missing[f"{at}learn_std"] = "False; the deviation is learned"
        if (limits := given.take(f"{at}std_range")) is not None:
            missing[f"{at}std_range"] = f"{limits!r}; the deviation has no bounds"
    if kind != "log":
        missing["std_type"] = f"{kind!r}; the deviation is learned as its logarithm"
    if not std > 0.0:
        raise ConfigError(f"a first deviation of {std!r}; expected more than 0")
    return std


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name}={value!r}; expected a number") from error


def _whole(name: str, value: Any, least: int = 1) -> int:
    found = _number(name, value)
    if not (found >= least and found.is_integer()):
        raise ConfigError(f"{name}={value!r}; expected a whole number of {least} or more")
    return int(found)


def read_config(path: str | Path) -> Any:
    """The config of a file in YAML, as Isaac Lab and mjlab write it, or JSON. Raises ConfigError, MissingExtraError."""
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("pyyaml", "yaml") from error
    loader: Any = type("_Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("tag:yaml.org,2002:python/tuple", lambda read, node: tuple(read.construct_sequence(node)))
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), loader)
    except (OSError, UnicodeDecodeError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
