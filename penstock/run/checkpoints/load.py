"""Policies of runs and of policy files, without their environments: `load`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.core.spec import specs_from_plain
from penstock.envs.seats import PolicyMap
from penstock.learn.algorithm import AgentFn
from penstock.learn.policy_file import read_policy_file
from penstock.learn.policy_set import AnyPolicy, LoadedPolicy
from penstock.run.checkpoints.checkpoint import find_checkpoint, load_checkpoint
from penstock.run.files.sizes import limit_tensor_size
from penstock.run.files.stored_experiment import (
    NONE_SUPPLIED,
    StoredConfig,
    Supplied,
    as_checkpoint_error,
    prefix_errors,
    read_config,
)
from penstock.run.files.trust import is_trusted, remember


def load(
    path: str | Path,
    which: str = "last",
    *,
    agent: AgentFn | None = None,
    policy_mapping_fn: PolicyMap | None = None,
    device: str = "cpu",
    trust: bool = False,
) -> LoadedPolicy:
    """The policy of a run or of a file of `policy.save`, without its environment: `load("runs/a").predict(obs)`.

    With many agents it is a `PolicySet`, the policies by id: `load("runs/a")["shared"]`, and
    `load("runs/a").predict(obs, agent="player_0")`.

    Args:
        path: a run directory, a file in .safetensors, or a policy on the Hugging Face Hub, `hf:user/name` (extra hub).
        which: "last", "best" by evaluation, or the step of a checkpoint; of a run.
        agent, policy_mapping_fn: the agent function or the mapping again, where it could not be stored (a lambda);
            another one than was stored is refused.
        trust: allow importing the algorithm and agent that the run names; not needed for built-in ones, nor for your
            own runs (docs/security.md).
    """
    again = Supplied(agent=agent, policy_mapping_fn=policy_mapping_fn)
    on_hub = isinstance(path, str) and path.startswith("hf:")
    if on_hub or Path(path).suffix == ".safetensors":
        if which != "last":
            raise ConfigError(f"load({str(path)!r}, which={which!r}); a file holds one policy: leave `which` out")
        if on_hub:
            from penstock.run.sharing.hub import fetch_policy  # it needs `load`

            path = fetch_policy(str(path))
        return cast(LoadedPolicy, _of_file(Path(path), again, device, trust))
    return cast(LoadedPolicy, load_stored(read_config(Path(path), trust), which, again, device)[0])


def _of_file(path: Path, again: Supplied, device: str, trust: bool) -> AnyPolicy:
    """The policy in a file of `policy.save`, by the rules of a run directory."""
    file = read_policy_file(path)
    if trust:
        remember(path, file.digest)
    plain = {"algo": file.plain, "run": {"seed": file.seed}}
    with as_checkpoint_error(path), prefix_errors(path):
        spec = specs_from_plain(file.spec)
    vouched = trust or is_trusted(path, file.digest)
    return policy_of(StoredConfig(path, plain, spec, file.digest, vouched), file.parameters, again, device)


def load_stored(
    stored: StoredConfig, which: str, again: Supplied = NONE_SUPPLIED, device: str = "cpu"
) -> tuple[AnyPolicy, int]:
    """The policy of a run, and the step of the checkpoint that it is of."""
    stored.algorithm(again)  # first what may not be imported, then what cannot be read
    checkpoint = load_checkpoint(find_checkpoint(stored.path.parent, which))
    return policy_of(stored, checkpoint.policy, again, device), checkpoint.step


def policy_of(
    stored: StoredConfig, parameters: Mapping[str, Tensor], again: Supplied, device: str = "cpu"
) -> AnyPolicy:
    """The policy with these parameters; one of a stranger's makes no tensor that is larger than all that are stored."""
    algo = stored.algorithm(again)
    with as_checkpoint_error(stored.path):
        seed = int(stored.plain["run"]["seed"])
    if stored.trusted:
        policy: AnyPolicy = algo.build(stored.spec, seed=seed, device=device)
    else:
        limit = limit_tensor_size(parameters, stored.path)
        with as_checkpoint_error(stored.path), prefix_errors(stored.path), limit:
            policy = algo.build(stored.spec, seed=seed, device=device)
    with as_checkpoint_error(stored.path):
        policy.load_parameters(parameters)
    return policy
