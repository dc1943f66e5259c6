"""Adapters of batched simulators, each imported when an environment of it is made; `from_rsl_rl` takes any VecEnv."""
