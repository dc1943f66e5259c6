"""Stand-ins for simulators with the interfaces of their documentation, all of which step a ring of three states."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector.utils import batch_space

LIMIT = 4


class Ring:
    """State 2 pays 1 when it is left; an episode is truncated after 4 steps, and terminated by an action above 0.5.

    It opens in state `seed % 3`. Its buffers are overwritten in place, as those of simulators are.
    """

    def __init__(self, num_envs: int) -> None:
        self.state, self.age = torch.zeros(num_envs, dtype=torch.long), torch.zeros(num_envs, dtype=torch.long)
        self.shown, self.opening = torch.zeros(num_envs, 3), 0

    def obs(self) -> torch.Tensor:
        self.shown[:] = torch.nn.functional.one_hot(self.state, 3)
        return self.shown

    def groups(self, *names: str) -> dict[str, torch.Tensor]:
        """The observation as group 0, the age as group 1."""
        return dict(zip(names, (self.obs(), self.age[:, None].float())))

    def advance(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        reward = (self.state == 2).float()
        self.state, self.age = (self.state + 1) % 3, self.age + 1
        return reward, action[:, 0] > 0.5, self.age >= LIMIT

    def restart(self, ended: Any, seed: int | None = None) -> None:
        self.opening = self.opening if seed is None else seed % 3
        self.state[ended], self.age[ended] = self.opening, 0


def boxes(**sizes: int) -> dict[str, Any]:
    return {name: gym.spaces.Box(-np.inf, np.inf, (size,)) for name, size in sizes.items()}


class MjlabEnv:
    """`ManagerBasedRlEnv` of mjlab 1.6: with `auto_reset=False` a further step after an end raises."""

    def __init__(self, cfg: Any, device: str) -> None:
        assert not cfg.auto_reset
        self.cfg, self.ring, self.extras, self.max_episode_length = cfg, Ring(cfg.scene.num_envs), {}, LIMIT
        self.pending = torch.zeros(cfg.scene.num_envs, dtype=torch.bool)
        shape = types.SimpleNamespace
        self.single_observation_space = shape(spaces={"actor": shape(shape=(3,)), "critic": shape(shape=(1,))})
        self.single_action_space = shape(shape=(1,))

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.ring.age

    def reset(self, *, seed: int | None = None, env_ids: Any = None, options: Any = None) -> Any:
        ended = slice(None) if env_ids is None else env_ids
        self.ring.restart(ended, seed)
        self.pending[ended] = False
        self.extras["log"] = {"Episode_Termination/time_out": 1, "Episode_Reward/track": torch.tensor(0.5)}
        obs = self.ring.groups("actor", "critic")
        if env_ids is not None:  # it computes the observations of the others again, with other noise
            others = torch.ones(len(self.pending), dtype=torch.bool)
            others[env_ids] = False
            obs["actor"][others] += 100
        return obs, self.extras

    def step(self, action: torch.Tensor) -> Any:
        if self.pending.any():
            raise RuntimeError("Environments must be reset via reset(env_ids=...) before calling step() again")
        self.extras["log"] = {}
        reward, terminated, cut = self.ring.advance(action)
        self.pending |= terminated | cut
        return self.ring.groups("actor", "critic"), reward, terminated, cut, self.extras

    def close(self) -> None:
        CLOSED.append("mjlab")


class IsaacEnv(gym.Env[Any, Any]):
    """`DirectRLEnv` of Isaac Lab 3: extras stay from step to step, and `final_obs` comes in steps that reset."""

    def __init__(self, cfg: Any) -> None:
        assert cfg.compute_final_obs
        Simulation.one = self
        self.cfg, self.ring, self.extras, self.max_episode_length = cfg, Ring(cfg.scene.num_envs), {}, LIMIT
        self.single_observation_space = gym.spaces.Dict(boxes(policy=3, critic=1))
        self.single_action_space = gym.spaces.Box(-np.inf, np.inf, (1,))

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.ring.age

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.ring.restart(slice(None), seed)
        return self.ring.groups("policy", "critic"), self.extras

    def step(self, action: torch.Tensor) -> Any:
        reward, terminated, cut = self.ring.advance(action)
        ended = terminated | cut
        self.extras.pop("final_obs", None)
        if ended.any():
            self.extras["final_obs"] = {k: x.clone() for k, x in self.ring.groups("policy", "critic").items()}
            self.ring.restart(ended)
            self.extras["log"] = {"Episode_Reward/track": torch.tensor(0.5), "Episode_Termination/time_out": 1}
        return self.ring.groups("policy", "critic"), reward, terminated, cut, self.extras

    def close(self) -> None:
        Simulation.one = None
        CLOSED.append("isaaclab")


class Simulation:
    """`SimulationContext`: one in a process."""

    one: Any = None

    @classmethod
    def instance(cls) -> Any:
        return cls.one


class ManiSkillEnv(gym.Env[Any, Any]):
    """A task of ManiSkill: partial resets by `options`, flags of success in the info."""

    def __init__(self, num_envs: int, obs_mode: str, sim_backend: str) -> None:
        assert (obs_mode, sim_backend) == ("state", "cpu")
        self.ring, self.num_envs, self.device = Ring(num_envs), num_envs, torch.device(sim_backend)
        self.single_observation_space = gym.spaces.Box(-np.inf, np.inf, (3,))
        self.single_action_space = gym.spaces.Box(-1, 1, (1,))
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.ring.restart(slice(None) if options is None else options["env_idx"], seed)
        return self.ring.obs(), {"success": torch.zeros(self.num_envs, dtype=torch.bool)}

    def step(self, action: torch.Tensor) -> Any:
        reward, terminated, cut = self.ring.advance(action)
        return self.ring.obs(), reward, terminated, cut, {"success": terminated}

    def close(self) -> None:
        CLOSED.append("maniskill")


class ManiSkillVectorEnv:
    """ManiSkill's own batched environment: SAME_STEP, `final_observation` only in steps in which some ended."""

    def __init__(self, env: Any, auto_reset: bool, ignore_terminations: bool) -> None:
        assert auto_reset
        assert not ignore_terminations
        self.env, self.device = env, env.unwrapped.device
        self.single_observation_space = env.unwrapped.single_observation_space
        self.single_action_space = env.unwrapped.single_action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.env.unwrapped.reset(seed=seed, options=options)

    def step(self, action: torch.Tensor) -> Any:
        obs, reward, terminated, cut, infos = self.env.unwrapped.step(action)
        dones = terminated | cut
        if dones.any():
            final, last = obs.clone(), dict(infos)
            obs, infos = self.reset(options={"env_idx": dones.nonzero().flatten()})
            infos |= {"final_observation": final, "final_info": last, "_final_observation": dones}
        return obs, reward, terminated, cut, infos

    def close(self) -> None:
        self.env.close()


class VecEnv:
    """`VecEnv` of rsl_rl 5: groups, no final observation, `time_outs`."""

    num_actions, max_episode_length, device, cfg = 1, LIMIT, "cpu", None
    finite = False

    def __init__(self, num_envs: int) -> None:
        self.ring, self.num_envs = Ring(num_envs), num_envs

    @property
    def episode_length_buf(self) -> torch.Tensor:
        return self.ring.age

    @episode_length_buf.setter
    def episode_length_buf(self, value: torch.Tensor) -> None:
        self.ring.age = value

    def seed(self, seed: int) -> None:
        self.ring.opening = seed % 3

    def reset(self) -> Any:
        self.ring.restart(slice(None))
        return self.get_observations(), {}

    def get_observations(self) -> dict[str, torch.Tensor]:
        return self.ring.groups("policy", "critic")

    def step(self, action: torch.Tensor) -> Any:
        reward, terminated, cut = self.ring.advance(action)
        ended = terminated | cut
        self.ring.restart(ended)
        extras = {} if self.finite else {"time_outs": cut & ~terminated}
        if ended.any():
            extras["log"] = {"Episode_Reward/track": torch.tensor(0.5), "Episode_Termination/time_out": 1}
        return self.get_observations(), reward, ended.long(), extras

    def close(self) -> None:
        CLOSED.append("rsl_rl")


CLOSED: list[str] = []
"""Simulators that were closed, in this order."""


def settings(**more: Any) -> Any:
    """Settings of a task, as mjlab and Isaac Lab have them."""
    scene = types.SimpleNamespace(num_envs=1)
    return types.SimpleNamespace(scene=scene, seed=None, is_finite_horizon=False, episode_length_s=20.0, **more)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the stand-ins where the adapters import simulators from."""
    CLOSED.clear()
    Simulation.one = None

    def parsed(task: str, device: str, num_envs: int) -> Any:
        gym.spec(task)
        cfg = settings(compute_final_obs=False)
        cfg.scene.num_envs = num_envs
        return cfg

    for id_, entry in {"Isaac-Ring-v0": IsaacEnv, "ManiRing-v1": ManiSkillEnv}.items():
        monkeypatch.setitem(gym.registry, id_, gym.envs.registration.EnvSpec(id_, entry, order_enforce=False))
    module(monkeypatch, "mjlab.envs", ManagerBasedRlEnv=MjlabEnv)
    tasks: dict[str, Callable[..., Any]] = {
        "list_tasks": lambda: ["Mjlab-Ring"],
        "load_env_cfg": lambda task: settings(auto_reset=True),
    }
    module(monkeypatch, "mjlab.tasks.registry", **tasks)
    module(monkeypatch, "isaaclab.app", AppLauncher=lambda headless, device: object())
    module(monkeypatch, "isaaclab.sim", SimulationContext=Simulation)
    module(monkeypatch, "isaaclab_tasks")
    module(monkeypatch, "isaaclab_tasks.utils", parse_env_cfg=parsed)
    module(monkeypatch, "mani_skill.envs")
    module(monkeypatch, "mani_skill.vector.wrappers.gymnasium", ManiSkillVectorEnv=ManiSkillVectorEnv)


def module(monkeypatch: pytest.MonkeyPatch, path: str, **members: Any) -> None:
    """A module that is importable by its path until the test ends."""
    made = types.ModuleType(path)
    vars(made).update(members)
    parts = path.split(".")
    for k in range(1, len(parts)):
        if ".".join(parts[:k]) not in sys.modules:
            monkeypatch.setitem(sys.modules, ".".join(parts[:k]), types.ModuleType(".".join(parts[:k])))
    monkeypatch.setitem(sys.modules, path, made)
