"""Small environments with known exact answers, and one that misbehaves in every named way."""

from penstock.envs.toy.agents import EchoAgents, EchoTurns, LatePay, Nim, ParallelToy, TeamBits, TurnToy
from penstock.envs.toy.base import Toy
from penstock.envs.toy.connect import Connect3
from penstock.envs.toy.deep_sea import DeepSea
from penstock.envs.toy.faults import FAULTS, FaultEnv
from penstock.envs.toy.goals import BitFlip
from penstock.envs.toy.memory import HideVelocity, RepeatPrevious, TMaze, cartpole_positions
from penstock.envs.toy.pixels import PixelCatch
from penstock.envs.toy.plumbing import Counter, Echo, SeedEcho
from penstock.envs.toy.probes import (
    Bandit,
    BoundedBandit,
    Chain,
    Coin,
    Constant,
    ContinuousBandit,
    Endless,
    HugeScale,
    Masked,
    Match,
    Overshoot,
    ScaledBandit,
    Sign,
    ThreeStep,
    TwoStep,
)
from penstock.envs.toy.teams import TwoStepMatrix

__all__ = [
    "Bandit",
    "BitFlip",
    "BoundedBandit",
    "Chain",
    "Coin",
    "Constant",
    "Connect3",
    "ContinuousBandit",
    "Counter",
    "DeepSea",
    "Echo",
    "EchoAgents",
    "EchoTurns",
    "Endless",
    "FAULTS",
    "FaultEnv",
    "HideVelocity",
    "HugeScale",
    "Masked",
    "LatePay",
    "Match",
    "Nim",
    "Overshoot",
    "ParallelToy",
    "PixelCatch",
    "RepeatPrevious",
    "ScaledBandit",
    "SeedEcho",
    "Sign",
    "TMaze",
    "TeamBits",
    "ThreeStep",
    "Toy",
    "TurnToy",
    "TwoStep",
    "TwoStepMatrix",
    "cartpole_positions",
]
