"""One part of `strength.py` for Stable-Baselines3, sb3-contrib or SBX; it runs where they are installed.

Settings are those of the algorithm's constructor, and as in rl-baselines3-zoo `n_envs`, `normalize`, `noise_std`,
`lin_0.1` for a value that falls to 0, and names of activations. Prints one line of JSON.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from typing import Any

import numpy as np
import tasks
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

PACKAGES = {"sb3": "stable_baselines3", "contrib": "sb3_contrib", "sbx": "sbx"}
CLASSES = {"recurrentppo": "RecurrentPPO", "crossq": "CrossQ"}


class Stop(BaseCallback):
    """Ends training with the last episode that counts."""

    def __init__(self, record: tasks.Record) -> None:
        super().__init__()
        self._record = record

    def _on_step(self) -> bool:
        return not self._record.full


def built(part: dict[str, Any], record: tasks.Record) -> Any:
    """The model on environments that are recorded."""
    settings: dict[str, Any] = {key: _value(value) for key, value in part["settings"].items()}
    envs: Any = DummyVecEnv([lambda: tasks.make(part["task"], record)] * settings.pop("n_envs", 1))
    if settings.pop("normalize", False):
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    if "noise_std" in settings:
        shape = envs.action_space.shape
        settings["action_noise"] = NormalActionNoise(np.zeros(shape), np.full(shape, settings.pop("noise_std")))
    kwargs = settings.get("policy_kwargs", {})
    if "activation_fn" in kwargs:
        kwargs["activation_fn"] = {"relu": torch.nn.ReLU}[kwargs["activation_fn"]]
    if part["task"].startswith("minatar/"):
        from sb3_curves import SmallCNN

        settings["policy_kwargs"] = {**kwargs, "features_extractor_class": SmallCNN}
    algo, library = str(part["algo"]), str(part["library"])
    made = getattr(importlib.import_module(PACKAGES[library]), CLASSES.get(algo, algo.upper()))
    policy = "MlpLstmPolicy" if algo == "recurrentppo" else "MlpPolicy"
    device = {} if library == "sbx" else {"device": "cpu"}
    return made(policy, envs, seed=part["seed"], **device, **settings)


def _value(value: Any) -> Any:
    if isinstance(value, str) and value.startswith("lin_"):
        first = float(value.removeprefix("lin_"))
        return lambda left: left * first
    return value


def main() -> None:
    part = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    record = tasks.Record(part["episodes"])
    before = time.process_time()
    model = built(part, record)
    model.learn(part["steps"], callback=Stop(record))
    row: dict[str, Any] = {"cpu_s": time.process_time() - before}
    normalizer = model.get_vec_normalize_env()

    def act(obs: Any, state: Any, start: bool) -> tuple[Any, Any]:
        seen = obs if normalizer is None else normalizer.normalize_obs(obs)
        action, state = model.predict(seen, state=state, episode_start=np.array([start]), deterministic=True)
        return action.item() if np.ndim(action) == 0 else action, state

    row |= tasks.measured(part, record, act)
    row["version"] = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("stable-baselines3", *(("sb3-contrib",) if part["library"] == "contrib" else ()),
                     *(("sbx-rl", "jax") if part["library"] == "sbx" else ("torch",)), "gymnasium", "numpy")
    )  # fmt: skip
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
