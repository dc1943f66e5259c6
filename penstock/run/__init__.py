"""Whole runs: the Experiment, the Trainer, the Run as an iterator, and everything a run leaves on disk."""
