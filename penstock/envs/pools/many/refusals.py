"""The reasons for which a row of many agents is refused, once a look at all of it says that something is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from penstock.core.spec import MASK_KEY
from penstock.core.tree import Tree
from penstock.envs.conform.values import NOT_YOURS, conform_flag
from penstock.envs.contract import describe_step_violation
from penstock.envs.pools.many.contract import NO_CHOICE
from penstock.envs.pools.many.parallel import ParallelEnvs
from penstock.envs.pools.many.rows import column_of
from penstock.envs.pools.messages import refuse_reward
from penstock.envs.pools.settings import FLAGS
from penstock.envs.pools.values import write_tree


def refuse_flags(parallel: ParallelEnvs, ends: Mapping[int, Sequence[Mapping[str, Any]]]) -> NoReturn:
    """Raises for an agent with flags that are no bools, or that has ended but is still present.

    Args:
        ends: terminations and truncations by environment, for environments where no agent may end.
    """
    for e, both in ends.items():
        for name, flags in zip(("terminated", "truncated"), both):
            for agent, flag in flags.items():
                if type(flag) not in FLAGS:
                    cure = NOT_YOURS if isinstance(conform_flag(flag), bool) else ""
                    said = f"{name} is {type(flag).__name__}, expected a bool; return bool({name}){cure}"
                    parallel.host.refuse(e, "step", agent, said)
                if flag:
                    parallel.host.refuse(
                        e,
                        "step",
                        agent,
                        "it has ended, yet env.agents names it still, as if it were to act; take it out of env.agents "
                        "in the step in which it ends",
                    )
    raise AssertionError("flags that no environment returned")


def real_rewards(parallel: ParallelEnvs, p: int, rewards: Sequence[Any]) -> list[float]:
    """Rewards of a policy's columns as floats. Raises for one that is no real number."""
    for b, reward in enumerate(rewards):
        e, agent = parallel.at(p, b)
        if message := describe_step_violation((None, reward, False, False, {})):
            parallel.host.refuse(e, "step", agent, message)
    return [float(reward) for reward in rewards]


def write_unusual(parallel: ParallelEnvs, p: int, row: Tree, found: Sequence[Any]) -> None:
    """Raises for an observation that broke the contract; writes them if one is only of an unusual but sound type."""
    for b, obs in enumerate(found):
        e, agent = parallel.at(p, b)
        parallel.host.check_obs(e, "step", agent, p, obs)
        write_tree(row, b, obs)


def check_values(parallel: ParallelEnvs, p: int, row: Tree, rewards: Sequence[Any], everyone: bool) -> None:
    """Raises for a reward that is not finite, a refused value, or a mask that leaves an agent no choice.

    Args:
        row: [B, *O] observations of the policy. everyone: look at values after first episodes too.
    """
    host = parallel.host
    for b, reward in enumerate(rewards):
        e, agent = parallel.at(p, b)
        refuse_reward(host.where(e, "step", agent), reward, None)
        if everyone or host.episode[e] == 0:
            host.check_obs(e, "step", agent, p, column_of(row, b))
        masked = host.refused != "any" and isinstance(row, dict) and MASK_KEY in row
        if agent is not None and masked and not row[MASK_KEY][b].any():
            host.refuse(e, "step", agent, NO_CHOICE)
