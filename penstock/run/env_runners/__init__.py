"""Samplers and policies of an experiment as runners, for loops of one's own: EnvRunner, EnvRunnerGroup."""
