"""Small environments with known exact answers, and one that misbehaves in every named way."""

from penstock.envs.toy.base import Toy
from penstock.envs.toy.faults import FAULTS, FaultEnv
from penstock.envs.toy.goals import BitFlip
from penstock.envs.toy.memory import HideVelocity, RepeatPrevious, TMaze, cartpole_positions
from penstock.envs.toy.moves import Moves, Nim, PaidLater
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
from penstock.envs.toy.teams import Team, TeamBit, TwoStepMatrix

__all__ = [
    "Bandit",
    "BitFlip",
    "BoundedBandit",
    "Chain",
    "Coin",
    "Constant",
    "ContinuousBandit",
    "Counter",
    "Echo",
    "Endless",
    "FAULTS",
    "FaultEnv",
    "HideVelocity",
    "HugeScale",
    "Masked",
    "Match",
    "Moves",
    "Nim",
    "Overshoot",
    "PaidLater",
    "PixelCatch",
    "RepeatPrevious",
    "ScaledBandit",
    "SeedEcho",
    "Sign",
    "TMaze",
    "Team",
    "TeamBit",
    "ThreeStep",
    "Toy",
    "TwoStep",
    "TwoStepMatrix",
    "cartpole_positions",
]
