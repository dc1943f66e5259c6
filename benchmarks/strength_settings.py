"""What `strength.py` runs: suites of tasks, and the settings of both sides.

Ours are presets where the library has one for the task, else what stands here. The peers' are those of rl-baselines3-zoo
(commit 22e3ff2 of 2026-04-23, hyperparams/*.yml), tuned there for more steps in part; where the zoo has none, their
defaults, or what stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """A library's algorithm."""

    library: str
    algo: str
    """The algorithm, and after a + the name of a variant of it."""
    settings: Settings = field(default_factory=dict[str, Any])
    steps: int = 0
    """Other than the task's."""
    seeds: int = 0
    """Other than the suite's."""


@dataclass(frozen=True)
class Task:
    """An environment."""

    name: str
    steps: int = 0
    entries: tuple[Entry, ...] = ()
    """Other than the suite's."""
    share: float = 1.0
    """Of bsuite's prescribed episodes."""
    prescribed: int = 0
    longest: int = 0
    """Steps of the longest episode."""


@dataclass(frozen=True)
class Suite:
    """Tasks whose scores belong together."""

    name: str
    tasks: tuple[Task, ...]
    pairs: tuple[tuple[str, str], ...]
    """Ours, and the peer's that it stands beside, as `LIBRARY/ALGO`."""
    score: str
    """Key of a row: `last`, deterministic episodes of the last policy, or `late`, training episodes of the last tenth."""
    says: str
    """What the report says of it."""
    entries: tuple[Entry, ...] = ()
    seeds: int = 5
    plays: int = 20


def both(algo: str, steps: int, seeds: int = 5, library: str = "sb3", **peer: Any) -> tuple[Entry, ...]:
    """Our preset, and the zoo's settings of the peer."""
    return Entry("penstock", algo, {}, steps, seeds), Entry(library, algo, peer, steps, seeds)


Peer = dict[str, Any]
WIDE: Peer = {"net_arch": [256, 256]}
ACROBOT: Peer = {"normalize": True, "n_envs": 16}
DELAYED: Peer = {"gamma": 0.98, "buffer_size": 200_000, "learning_starts": 10_000, "noise_std": 0.1, "gradient_steps": 1, "train_freq": 1,
           "learning_rate": 1e-3, "policy_kwargs": {"net_arch": [400, 300]}}  # fmt: skip
LANDER: Peer = {
    "n_envs": 16,
    "n_steps": 1024,
    "batch_size": 64,
    "gae_lambda": 0.98,
    "gamma": 0.999,
    "n_epochs": 4,
    "ent_coef": 0.01,
}
DQN_EVERY_4: Peer = {"learning_rate": 6.3e-4, "batch_size": 128, "buffer_size": 50_000, "learning_starts": 0, "gamma": 0.99,
               "target_update_interval": 250, "train_freq": 4, "gradient_steps": -1, "exploration_fraction": 0.12,
               "exploration_final_eps": 0.1, "policy_kwargs": WIDE}  # fmt: skip
CLASSIC = Suite(
    "classic",
    (
        Task("CartPole-v1", entries=(
            *both("ppo", 50_000, 10, n_envs=8, n_steps=32, batch_size=256, gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0.0,
                  learning_rate="lin_0.001", clip_range="lin_0.2"),
            *both("a2c", 100_000, 10, n_envs=8, ent_coef=0.0),
            *both("dqn", 50_000, 10, learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1_000, gamma=0.99,
                  target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=0.16,
                  exploration_final_eps=0.04, policy_kwargs=WIDE),
        )),
        Task("Acrobot-v1", entries=(
            *both("ppo", 100_000, n_steps=256, gae_lambda=0.94, gamma=0.99, n_epochs=4, ent_coef=0.0, **ACROBOT),
            *both("a2c", 100_000, ent_coef=0.0, **ACROBOT),
            *both("dqn", 50_000, **DQN_EVERY_4),
        )),
        Task("MountainCar-v0", entries=both(
            "dqn", 120_000, learning_rate=4e-3, batch_size=128, buffer_size=10_000, learning_starts=1_000, gamma=0.98,
            target_update_interval=600, train_freq=16, gradient_steps=8, exploration_fraction=0.2, exploration_final_eps=0.07,
            policy_kwargs=WIDE)),
        Task("Pendulum-v1", entries=(
            *both("ppo", 100_000, n_envs=4, n_steps=1024, gae_lambda=0.95, gamma=0.9, n_epochs=10, ent_coef=0.0, learning_rate=1e-3,
                  clip_range=0.2, use_sde=True, sde_sample_freq=4),
            *both("sac", 5_000, learning_rate=1e-3),
            *both("td3", 20_000, **DELAYED),
        )),
        Task("MountainCarContinuous-v0", entries=(
            *both("ppo", 20_000, 10, normalize=True, n_envs=1, batch_size=256, n_steps=8, gamma=0.9999, learning_rate=7.77e-5,
                  ent_coef=0.00429, clip_range=0.1, n_epochs=10, gae_lambda=0.9, max_grad_norm=5, vf_coef=0.19, use_sde=True,
                  policy_kwargs={"log_std_init": -3.29, "ortho_init": False}),
            *both("sac", 20_000, learning_rate=3e-4, buffer_size=50_000, batch_size=512, ent_coef=0.1, train_freq=32,
                  gradient_steps=32, gamma=0.9999, tau=0.01, learning_starts=0, use_sde=True,
                  policy_kwargs={"log_std_init": -3.67, "net_arch": [64, 64]}),
        )),
        Task("LunarLander-v3", entries=(
            *both("ppo", 300_000, **LANDER),
            *both("a2c", 200_000, n_envs=8, gamma=0.995, n_steps=5, learning_rate="lin_0.00083", ent_coef=1e-5),
            *both("dqn", 100_000, **DQN_EVERY_4),
        )),
        Task("LunarLanderContinuous-v3", entries=(
            *both("ppo", 300_000, **LANDER),
            *both("sac", 50_000, batch_size=256, learning_rate="lin_7.3e-4", buffer_size=1_000_000, ent_coef="auto", gamma=0.99,
                  tau=0.01, train_freq=1, gradient_steps=1, learning_starts=10_000, policy_kwargs={"net_arch": [400, 300]}),
            *both("td3", 50_000, **DELAYED),
        )),
    ),
    tuple((f"penstock/{algo}", f"sb3/{algo}") for algo in ("ppo", "a2c", "dqn", "sac", "td3")),
    "last",
    "Ours with the presets, Stable-Baselines3 with the settings of rl-baselines3-zoo. A score is the mean return of 20 deterministic "
    "episodes of the last policy.",
)  # fmt: skip

GAMES = ("breakout", "freeway", "asterix", "space_invaders", "seaquest")
MINATAR_PPO: Peer = {"sampler.T": 128, "sampler.B": 8, "algo.lr": "linear(1e-3, 0)", "algo.epochs": 4, "algo.minibatch": 256,
               "algo.entropy_coef": 0.01, "algo.gae_lambda": 0.95, "algo.net.cnn": "minatar", "algo.net.hidden": (128,),
               "algo.net.activation": "relu"}  # fmt: skip
MINATAR = Suite(
    "minatar",
    tuple(Task(game, 200_000) for game in GAMES),
    (("penstock/dqn", "sb3/dqn"), ("penstock/dqn+rainbow", "sb3/dqn"), ("penstock/pqn", "penstock/dqn"),
     ("penstock/pqn+320k", "penstock/dqn"), ("penstock/pqn+400k", "penstock/dqn"), ("penstock/ppo", "sb3/ppo")),
    "late",
    "DQN as in `curves.py`, equal on both sides: Obando-Ceron and Castro 2021 but for a hidden layer of 128 and epsilon's fall. Rainbow: "
    "preset rainbow/MinAtar. PQN: preset penstock.envs.minatar:*, made for fifty times the steps, with a first step size of 1e-3 and "
    "16 slots x 16 rows in minibatches of 32; PQN-400k: with 32 slots, and twice the steps, in a fifth of DQN's CPU seconds (chosen on "
    "breakout, asterix and freeway, one or two seeds each). PPO, equal on both "
    "sides: rl-baselines3-zoo's settings for Atari (8 x 128, 4 epochs, minibatches of 256, entropy 0.01, a step size that falls to 0) "
    "with a first step size of 1e-3 and a clip of 0.2, on the network of DQN. A score is the mean return of the training episodes of the "
    "last tenth of the steps.",
    entries=(
        Entry("penstock", "dqn"),
        Entry("sb3", "dqn", {
            "learning_rate": 2.5e-4, "batch_size": 32, "buffer_size": 100_000, "learning_starts": 1_000, "train_freq": 4,
            "gradient_steps": 1, "gamma": 0.99, "target_update_interval": 1_000, "exploration_fraction": 0.05,
            "exploration_final_eps": 0.01, "policy_kwargs": {"net_arch": [128], "optimizer_kwargs": {"eps": 3.125e-4}}}),
        Entry("penstock", "dqn+rainbow", {"preset": "dqn/rainbow/MinAtar"}),
        Entry("penstock", "pqn", {"sampler.B": 16, "sampler.T": 16, "algo.minibatch": 32, "algo.lr": "linear(1e-3, 0)"}),
        Entry("penstock", "pqn+400k", {"sampler.B": 32, "algo.lr": "linear(1e-3, 0)"}, 400_000),
        Entry("penstock", "pqn+320k", {"sampler.B": 32, "algo.lr": "linear(1e-3, 0)"}, 320_000),
        Entry("penstock", "ppo", {"preset": "", **MINATAR_PPO}),
        Entry("sb3", "ppo", {"n_envs": 8, "n_steps": 128, "learning_rate": "lin_0.001", "n_epochs": 4, "batch_size": 256,
                             "ent_coef": 0.01, "policy_kwargs": {"net_arch": [128], "activation_fn": "relu"}}),
    ),
    plays=0,
)  # fmt: skip

STARTS, ONE_BY_ONE = (
    {"learning_starts": 10_000},
    {"preset": "", "sampler.T": 1, "sampler.B": 1, "algo.learning_starts": 10_000},
)
MUJOCO_TD3: Peer = {**STARTS, "noise_std": 0.1, "train_freq": 1, "gradient_steps": 1, "learning_rate": 1e-3, "batch_size": 256,
              "policy_kwargs": {"net_arch": [400, 300]}}  # fmt: skip
MUJOCO_PPO: Peer = {"normalize": True, "n_envs": 1, "n_steps": 512,
              "policy_kwargs": {"log_std_init": -2, "ortho_init": False, "activation_fn": "relu", "net_arch": [256, 256]}}  # fmt: skip
ZOO_PPO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {**MUJOCO_PPO, "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-5, "ent_coef": 0.000401762,
                       "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096},
    "Hopper-v5": {**MUJOCO_PPO, "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-5, "ent_coef": 0.00229519,
                  "clip_range": 0.2, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671},
    "Walker2d-v5": {"normalize": True, "n_envs": 1, "n_steps": 512, "batch_size": 32, "gamma": 0.99, "learning_rate": 5.05041e-5,
                    "ent_coef": 0.000585045, "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.95, "max_grad_norm": 1,
                    "vf_coef": 0.871923},
}  # fmt: skip
MUJOCO = Suite(
    "mujoco",
    tuple(
        Task(env, 50_000, (
            Entry("penstock", "sac"), Entry("sb3", "sac", STARTS), Entry("sbx", "sac", STARTS),
            Entry("penstock", "crossq+256", {**ONE_BY_ONE, "algo.net.critic_hidden": (256, 256)}),
            Entry("penstock", "crossq", ONE_BY_ONE), Entry("sbx", "crossq", STARTS), Entry("contrib", "crossq", STARTS),
            Entry("penstock", "tqc", ONE_BY_ONE), Entry("sbx", "tqc", STARTS), Entry("contrib", "tqc", STARTS),
            Entry("penstock", "td3", {"algo.learning_starts": 10_000}), Entry("sb3", "td3", MUJOCO_TD3),
            Entry("penstock", "ppo"), Entry("sb3", "ppo", zoo),
        ))
        for env, zoo in ZOO_PPO.items()
    ),
    (("penstock/crossq+256", "penstock/sac"), ("penstock/crossq", "penstock/sac"), ("penstock/tqc", "penstock/sac"),
     ("penstock/sac", "sb3/sac"), ("penstock/sac", "sbx/sac"), ("penstock/crossq", "sbx/crossq"),
     ("penstock/crossq", "contrib/crossq"), ("penstock/tqc", "sbx/tqc"), ("penstock/tqc", "contrib/tqc"),
     ("penstock/td3", "sb3/td3"), ("penstock/ppo", "sb3/ppo")),
    "last",
    "Ours with the presets, and where there is none (CrossQ, TQC) the defaults with an update at every step; the peers with "
    "rl-baselines3-zoo's settings of version 4 of these environments (SAC, TQC, CrossQ: the defaults). CrossQ-256: critics as wide "
    "as SAC's, since a run with those of 1,024 units would take over an hour here. All off-policy ones begin with 10,000 random steps. "
    "A score is the mean return of 10 deterministic episodes of the last policy.",
    plays=10,
)  # fmt: skip


def _bsuite(episodes: int, length: int, share: float, *names: str) -> list[Task]:
    return [Task(name, share=share, prescribed=episodes, longest=length) for name in names]


BSUITE_TASKS = (
    *_bsuite(10_000, 1, 1.0, "bandit/0", "bandit/1", "bandit_noise/0", "bandit_noise/8", "bandit_noise/16", "bandit_scale/0",
             "bandit_scale/8", "bandit_scale/16"),
    *_bsuite(10_000, 9, 0.3, "catch/0", "catch_noise/0", "catch_noise/8", "catch_noise/16", "catch_scale/0", "catch_scale/8",
             "catch_scale/16"),
    *_bsuite(10_000, 2, 1.0, "memory_len/0"),
    *_bsuite(10_000, 2, 1.0, "memory_size/0", "memory_size/2", "memory_size/4"),
    *_bsuite(10_000, 4, 1.0, "memory_len/2"),
    *_bsuite(10_000, 6, 1.0, "memory_len/4"),
    *_bsuite(10_000, 11, 0.5, "memory_len/9"),
    *_bsuite(10_000, 10, 0.3, "deep_sea/0", "deep_sea_stochastic/0"),
    *_bsuite(10_000, 14, 0.3, "deep_sea/2"),
    *_bsuite(10_000, 20, 0.3, "deep_sea/5"),
    *_bsuite(1_000, 100, 0.5, "discounting_chain/0", "discounting_chain/1", "discounting_chain/2", "discounting_chain/3",
             "discounting_chain/4"),
    *_bsuite(10_000, 20, 0.3, "umbrella_distract/0", "umbrella_distract/9"),
    *_bsuite(10_000, 1, 0.3, "umbrella_length/0"),
    *_bsuite(10_000, 6, 0.5, "umbrella_length/5"),
    *_bsuite(10_000, 17, 0.3, "umbrella_length/12"),
    *_bsuite(1_000, 1_000, 0.2, "cartpole/0", "cartpole_noise/16", "cartpole_scale/0", "cartpole_scale/16"),
    *_bsuite(1_000, 1_000, 0.05, "cartpole_swingup/0", "mountain_car/0", "mountain_car_noise/16", "mountain_car_scale/16"),
)  # fmt: skip
BSUITE_TAGS = {
    "basic": ("bandit", "catch", "cartpole", "mountain_car"),
    "noise": ("bandit_noise", "catch_noise", "cartpole_noise", "mountain_car_noise", "deep_sea_stochastic", "umbrella_distract",
              "umbrella_length"),
    "scale": ("bandit_scale", "catch_scale", "cartpole_scale", "mountain_car_scale"),
    "exploration": ("deep_sea", "deep_sea_stochastic", "cartpole_swingup"),
    "credit assignment": ("catch", "catch_noise", "catch_scale", "cartpole", "umbrella_distract", "umbrella_length",
                          "discounting_chain"),
    "memory": ("memory_len", "memory_size"),
    "generalization": ("cartpole", "cartpole_noise", "cartpole_scale", "cartpole_swingup", "mountain_car", "mountain_car_noise",
                       "mountain_car_scale"),
}  # fmt: skip
"""The experiments of each tag, by their sweep.py; mnist's need a data set that is not at hand."""
BSUITE = Suite(
    "bsuite",
    BSUITE_TASKS,
    (("penstock/ppo", "sb3/ppo"), ("penstock/dqn", "sb3/dqn"), ("penstock/pqn", "sb3/dqn"), ("penstock/boot-dqn", "sb3/dqn"),
     ("penstock/ppo+lstm", "contrib/recurrentppo"),
     ("penstock/r2d1", "contrib/recurrentppo")),
    "bsuite",
    "Everything with its defaults, without a preset. `share`: of bsuite's prescribed episodes.",
    entries=(
        Entry("penstock", "ppo", {"preset": ""}), Entry("sb3", "ppo"), Entry("penstock", "dqn", {"preset": ""}), Entry("sb3", "dqn"),
        Entry("penstock", "pqn", {"preset": ""}), Entry("penstock", "boot-dqn", {"preset": ""}),
        Entry("penstock", "ppo+lstm", {"preset": "", "algo.net.recurrent": "lstm"}), Entry("contrib", "recurrentppo"),
        Entry("penstock", "r2d1", {"preset": ""}),
    ),
    seeds=3,
    plays=0,
)  # fmt: skip


def _defaults(algo: str, *tasks: tuple[str, int, int]) -> list[Task]:
    entries = Entry("penstock", algo, {"preset": ""}), Entry("sb3", algo)
    return [Task(env, steps, tuple(replace(entry, seeds=seeds) for entry in entries)) for env, steps, seeds in tasks]


DEFAULTS = Suite(
    "defaults",
    (
        *_defaults("ppo", ("InvertedPendulum-v5", 50_000, 10), ("Hopper-v5", 50_000, 10), ("FrozenLake-v1", 150_000, 10),
                   ("LunarLander-v3", 150_000, 5), ("HalfCheetah-v5", 100_000, 10)),
        *_defaults("dqn", ("CartPole-v1", 50_000, 10), ("Acrobot-v1", 50_000, 10)),
        *_defaults("sac", ("Pendulum-v1", 10_000, 5), ("InvertedDoublePendulum-v5", 10_000, 5)),
    ),
    tuple((f"penstock/{algo}", f"sb3/{algo}") for algo in ("ppo", "dqn", "sac")),
    "last",
    "Both with their defaults, without a preset. A score is the mean return of 20 deterministic episodes of the last policy. Runs of "
    "earlier states of both: `defaults.md`.",
)  # fmt: skip

SUITES = (CLASSIC, DEFAULTS, MINATAR, MUJOCO, BSUITE)

NOTES: dict[str, str] = {
    "": "Where one of the tasks has one seed there is no interval, and no claim is made.",
    "classic": "MountainCarContinuous-v0, PPO: both reach the flag, the peer from the first episodes on: the zoo's settings update after "
    "every 8 steps with noise of gSDE, for 46 times the CPU seconds; our preset was made for 100,000 steps, in batches of 1,024. "
    "LunarLander-v3, A2C: our preset was made for 1,000,000 steps. Pendulum-v1, TD3: below by 3 of the "
    "1,050 between random actions and the best, with networks of 64 x 64 beside 400 x 300, in the same 20 episodes.",
    "minatar": "Few seeds, so little is shown. DQN beside PQN at equal steps trains on each row eight times. In a fifth of its CPU seconds "
    "PQN-320k is ahead of DQN in three games and behind in freeway; PQN-400k, in a fifth to a quarter, is ahead in all five with one seed. "
    "Freeway's episodes all last 2,500 steps, so 32 slots end theirs at 320,000 and 400,000 together.",
    "mujoco": "CrossQ, TQC, SAC: one seed each; of the peers' SBX's SAC on Hopper alone. CrossQ-256 has more than twice SAC's return on "
    "all three, for two to three times the CPU seconds; TQC has more on two. PPO: our presets are the zoo's settings, so both run the "
    "same ones; with those before (Schulman et al. 2017, for 1,000,000 steps) seed 1 had 360 on HalfCheetah, 317 on Hopper, 444 on "
    "Walker2d.",
    "bsuite": "One seed each, over ids of all seven tags for PPO. Ours is ahead where rewards are scaled (its values are in units of "
    "returns) and on bandits: it updates twice as often a step there, since every other row of one-step episodes is a reset row and its "
    "batches are cut by rows. deep_sea/2: SB3's run met the chest by chance at episode 1,769; neither solves the others, has a "
    "memory, or reaches the hill of mountain_car in a twentieth of its episodes. bandit/0: PQN takes the second best arm (0.78) "
    "from step 2,000 to 4,500. Epsilon has fallen by 2,000; that its updates are too few by then is a guess. "
    "memory_len/2, of three steps: memory solves it in all three. deep_sea/0: BootDQN finds the chest at episode 249, PQN at 2,351, too "
    "late for bsuite.",
}
"""What was found, for people, by suite; "" stands below the summary."""
