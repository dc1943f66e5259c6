"""Gangs: several learners of this machine in one run, each with its own sampler and slots."""
