"""penstock: reinforcement learning in one loop and one record, where placement changes nothing but speed."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from penstock.core import VERSION

__version__ = VERSION

# A row's matrix product must not depend on its place among the others, nor on where in memory it lies. Intel's MKL,
# torch's library for them on CPU, keeps that at multiples of 4 rows in this mode, for nothing that could be measured;
# it reads the setting at its first product, and worker processes inherit it.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Each public name and where it lives. Nothing is imported before it is asked for (PEP 562), so that the command
# line's help and environment workers never load torch.
_WHERE = {
    "A2C": "penstock.algos.a2c",
    "APPO": "penstock.algos.appo",
    "ActorCritic": "penstock.agents.actor_critic",
    "Agent": "penstock.agents.agent",
    "AlternatingSampler": "penstock.samplers.gpu",
    "AsyncAlternatingSampler": "penstock.samplers.asynchronous",
    "AsyncCpuSampler": "penstock.samplers.asynchronous",
    "AsyncGpuSampler": "penstock.samplers.asynchronous",
    "AsyncSampler": "penstock.samplers.asynchronous",
    "AsyncSerialSampler": "penstock.samplers.asynchronous",
    "BC": "penstock.algos.bc",
    "BatchSpec": "penstock.core.spec",
    "BootDQN": "penstock.algos.boot_dqn",
    "CQL": "penstock.algos.cql",
    "CheckpointError": "penstock.core.errors",
    "ConfigError": "penstock.core.errors",
    "CpuSampler": "penstock.samplers.cpu",
    "Curriculum": "penstock.run.iteration",
    "CrossQ": "penstock.algos.crossq",
    "DAgger": "penstock.algos.dagger",
    "DDPG": "penstock.algos.ddpg",
    "DQN": "penstock.algos.dqn",
    "DiscreteSAC": "penstock.algos.discrete_sac",
    "EnvConfig": "penstock.envs.make",
    "EnvContractError": "penstock.core.errors",
    "EnvRunner": "penstock.run.env_runners.env_runner",
    "EnvRunnerGroup": "penstock.run.env_runners.group",
    "EnvSpec": "penstock.core.spec",
    "EnvWorkerError": "penstock.core.errors",
    "Episodes": "penstock.samplers.episodes",
    "ReplaySchedule": "penstock.replay.replay",
    "Experiment": "penstock.run.experiment",
    "ExportableAgent": "penstock.agents.agent",
    "GAIL": "penstock.algos.gail",
    "GpuSampler": "penstock.samplers.gpu",
    "GroupComm": "penstock.learn.comm",
    "IMPALA": "penstock.algos.impala",
    "IQL": "penstock.algos.iql",
    "Inputs": "penstock.core.batch",
    "Iteration": "penstock.run.iteration",
    "LearnerLostError": "penstock.core.errors",
    "Loss": "penstock.learn.algorithm",
    "MAPPO": "penstock.algos.mappo",
    "MARWIL": "penstock.algos.marwil",
    "MultiAgentBatch": "penstock.core.batch",
    "MultiAgentReplay": "penstock.replay.multi_agent",
    "Net": "penstock.agents.networks",
    "NoOverlapAlternatingSampler": "penstock.samplers.gpu",
    "NonFiniteError": "penstock.core.errors",
    "OfflineSampler": "penstock.samplers.offline",
    "Output": "penstock.agents.actor_critic",
    "PPO": "penstock.algos.ppo",
    "PQN": "penstock.algos.pqn",
    "PenstockError": "penstock.core.errors",
    "Placement": "penstock.core.placement",
    "Plateau": "penstock.run.iteration",
    "Policies": "penstock.learn.policies",
    "Policy": "penstock.learn.policy",
    "PolicySet": "penstock.learn.policy_set",
    "QAgent": "penstock.agents.q_agent",
    "QMIX": "penstock.algos.qmix",
    "RND": "penstock.algos.rnd",
    "R2D1": "penstock.algos.r2d1",
    "ReBRAC": "penstock.algos.rebrac",
    "Replay": "penstock.replay.replay",
    "ReplaySettings": "penstock.replay.replay",
    "Result": "penstock.run.result",
    "ResultDict": "penstock.learn.algorithm",
    "Run": "penstock.run.loop",
    "RunConfig": "penstock.run.experiment",
    "RunnerSampler": "penstock.samplers.runners.settings",
    "SAC": "penstock.algos.sac",
    "SelfPlay": "penstock.algos.self_play",
    "SampleBatch": "penstock.core.batch",
    "Schedule": "penstock.core.schedule",
    "SerialSampler": "penstock.samplers.serial",
    "Share": "penstock.core.spec",
    "StudyResult": "penstock.studies.report",
    "TD3": "penstock.algos.td3",
    "TD3BC": "penstock.algos.rebrac",
    "TQC": "penstock.algos.tqc",
    "TrainBatch": "penstock.core.batch",
    "Trainer": "penstock.run.trainer",
    "actor_critic": "penstock.agents.actor_critic",
    "adam": "penstock.learn.optimizers",
    "as_multi_agent": "penstock.core.batch_parts",
    "check_env": "penstock.envs.check",
    "concat_samples": "penstock.core.batch_parts",
    "control_agent": "penstock.agents.continuous",
    "cosine": "penstock.core.schedule",
    "discrete_control_agent": "penstock.agents.discrete_control",
    "exponential": "penstock.core.schedule",
    "launch": "penstock.studies.tune",
    "linear": "penstock.core.schedule",
    "piecewise": "penstock.core.schedule",
    "warmup": "penstock.core.schedule",
    "evaluate": "penstock.run.playing.evaluation",
    "load": "penstock.run.checkpoints.load",
    "load_replay": "penstock.run.replays.contents",
    "minibatches": "penstock.learn.rows.minibatch",
    "multi_gpu_train_one_step": "penstock.learn.train_ops",
    "override": "penstock.core.config",
    "plot_runs": "penstock.run.plots.figure",
    "preset": "penstock.run.presets",
    "replay_to_dataset": "penstock.run.replays.contents",
    "q_agent": "penstock.agents.q_agent",
    "resume": "penstock.run.loop",
    "Runs": "penstock.run.plots.run_table",
    "runs": "penstock.run.plots.run_table",
    "rmsprop": "penstock.learn.optimizers",
    "split_by_episode": "penstock.core.batch_parts",
    "timeslices": "penstock.core.batch_parts",
    "train": "penstock.run.loop",
    "train_one_step": "penstock.learn.train_ops",
    "trainable": "penstock.studies.ray_tune",
    "tune": "penstock.studies.tune",
    "wrap_as_needed": "penstock.core.batch_parts",
}
_FORMER: dict[str, tuple[str, str]] = {}
"""Former public names, each with the new one and the first version without the old one: `{"Old": ("New", "0.4")}`."""
_MODULES = (
    "actors",
    "agents",
    "algos",
    "core",
    "datasets",
    "envs",
    "learn",
    "ops",
    "processes",
    "replay",
    "run",
    "samplers",
    "studies",
    "testing",
    "workers",
)

__all__ = ["__version__", *_WHERE, "ops"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from penstock import ops as ops
    from penstock.agents.actor_critic import ActorCritic as ActorCritic, Output as Output, actor_critic as actor_critic
    from penstock.agents.agent import Agent as Agent, ExportableAgent as ExportableAgent
    from penstock.agents.continuous import control_agent as control_agent
    from penstock.agents.discrete_control import discrete_control_agent as discrete_control_agent
    from penstock.agents.networks import Net as Net
    from penstock.agents.q_agent import QAgent as QAgent, q_agent as q_agent
    from penstock.algos.a2c import A2C as A2C
    from penstock.algos.appo import APPO as APPO
    from penstock.algos.bc import BC as BC
    from penstock.algos.boot_dqn import BootDQN as BootDQN
    from penstock.algos.cql import CQL as CQL
    from penstock.algos.crossq import CrossQ as CrossQ
    from penstock.algos.dagger import DAgger as DAgger
    from penstock.algos.ddpg import DDPG as DDPG
    from penstock.algos.discrete_sac import DiscreteSAC as DiscreteSAC
    from penstock.algos.dqn import DQN as DQN
    from penstock.algos.gail import GAIL as GAIL
    from penstock.algos.impala import IMPALA as IMPALA
    from penstock.algos.iql import IQL as IQL
    from penstock.algos.mappo import MAPPO as MAPPO
    from penstock.algos.marwil import MARWIL as MARWIL
    from penstock.algos.ppo import PPO as PPO
    from penstock.algos.pqn import PQN as PQN
    from penstock.algos.qmix import QMIX as QMIX
    from penstock.algos.r2d1 import R2D1 as R2D1
    from penstock.algos.rebrac import TD3BC as TD3BC, ReBRAC as ReBRAC
    from penstock.algos.rnd import RND as RND
    from penstock.algos.sac import SAC as SAC
    from penstock.algos.self_play import SelfPlay as SelfPlay
    from penstock.algos.td3 import TD3 as TD3
    from penstock.algos.tqc import TQC as TQC
    from penstock.core.batch import (
        Inputs as Inputs,
        MultiAgentBatch as MultiAgentBatch,
        SampleBatch as SampleBatch,
        TrainBatch as TrainBatch,
    )
    from penstock.core.batch_parts import (
        as_multi_agent as as_multi_agent,
        concat_samples as concat_samples,
        split_by_episode as split_by_episode,
        timeslices as timeslices,
        wrap_as_needed as wrap_as_needed,
    )
    from penstock.core.config import override as override
    from penstock.core.errors import (
        CheckpointError as CheckpointError,
        ConfigError as ConfigError,
        EnvContractError as EnvContractError,
        EnvWorkerError as EnvWorkerError,
        LearnerLostError as LearnerLostError,
        NonFiniteError as NonFiniteError,
        PenstockError as PenstockError,
    )
    from penstock.core.placement import Placement as Placement
    from penstock.core.schedule import (
        Schedule as Schedule,
        cosine as cosine,
        exponential as exponential,
        linear as linear,
        piecewise as piecewise,
        warmup as warmup,
    )
    from penstock.core.spec import BatchSpec as BatchSpec, EnvSpec as EnvSpec, Share as Share
    from penstock.envs.check import check_env as check_env
    from penstock.envs.make import EnvConfig as EnvConfig
    from penstock.learn.algorithm import Loss as Loss, ResultDict as ResultDict
    from penstock.learn.comm import GroupComm as GroupComm
    from penstock.learn.optimizers import adam as adam, rmsprop as rmsprop
    from penstock.learn.policies import Policies as Policies
    from penstock.learn.policy import Policy as Policy
    from penstock.learn.policy_set import PolicySet as PolicySet
    from penstock.learn.rows.minibatch import minibatches as minibatches
    from penstock.learn.train_ops import (
        multi_gpu_train_one_step as multi_gpu_train_one_step,
        train_one_step as train_one_step,
    )
    from penstock.replay.multi_agent import MultiAgentReplay as MultiAgentReplay
    from penstock.replay.replay import (
        Replay as Replay,
        ReplaySchedule as ReplaySchedule,
        ReplaySettings as ReplaySettings,
    )
    from penstock.run.checkpoints.load import load as load
    from penstock.run.env_runners.env_runner import EnvRunner as EnvRunner
    from penstock.run.env_runners.group import EnvRunnerGroup as EnvRunnerGroup
    from penstock.run.experiment import Experiment as Experiment, RunConfig as RunConfig
    from penstock.run.iteration import Curriculum as Curriculum, Iteration as Iteration, Plateau as Plateau
    from penstock.run.loop import Run as Run, resume as resume, train as train
    from penstock.run.playing.evaluation import evaluate as evaluate
    from penstock.run.plots.figure import plot_runs as plot_runs
    from penstock.run.plots.run_table import Runs as Runs, runs as runs
    from penstock.run.presets import preset as preset
    from penstock.run.replays.contents import load_replay as load_replay, replay_to_dataset as replay_to_dataset
    from penstock.run.result import Result as Result
    from penstock.run.trainer import Trainer as Trainer
    from penstock.samplers.asynchronous import (
        AsyncAlternatingSampler as AsyncAlternatingSampler,
        AsyncCpuSampler as AsyncCpuSampler,
        AsyncGpuSampler as AsyncGpuSampler,
        AsyncSampler as AsyncSampler,
        AsyncSerialSampler as AsyncSerialSampler,
    )
    from penstock.samplers.cpu import CpuSampler as CpuSampler
    from penstock.samplers.episodes import Episodes as Episodes
    from penstock.samplers.gpu import (
        AlternatingSampler as AlternatingSampler,
        GpuSampler as GpuSampler,
        NoOverlapAlternatingSampler as NoOverlapAlternatingSampler,
    )
    from penstock.samplers.offline import OfflineSampler as OfflineSampler
    from penstock.samplers.runners.settings import RunnerSampler as RunnerSampler
    from penstock.samplers.serial import SerialSampler as SerialSampler
    from penstock.studies.ray_tune import trainable as trainable
    from penstock.studies.report import StudyResult as StudyResult
    from penstock.studies.tune import launch as launch, tune as tune


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        found = getattr(importlib.import_module(_WHERE[name]), name)
        if isinstance(found, type) and "__dataclass_fields__" in vars(found):
            from penstock.core.names.declared import FieldTexts

            if not isinstance(vars(found).get("__doc__"), FieldTexts):
                found.__doc__ = FieldTexts(found)  # pyright: ignore[reportAttributeAccessIssue]
        return found
    if name in _FORMER:
        from penstock.core.names.renamed import warn_renamed

        new, gone_in = _FORMER[name]
        found = __getattr__(new)  # first, since it imports packages that make Python forget what it has warned of
        warn_renamed(f"ps.{name}", f"ps.{new}", gone_in)
        return found
    if name in _MODULES:
        return importlib.import_module(f"penstock.{name}")
    if name[:1] == "_":  # asked for by tools, such as __wrapped__
        raise AttributeError(f"module 'penstock' has no {name!r}")
    from penstock.core.names.hints import of_public

    raise AttributeError(f"module 'penstock' has no {name!r}; {of_public(name, [*_WHERE, *_MODULES])}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
