"""Whole runs: the Experiment, the Trainer, the Runner's visible loop, and everything a run leaves on disk."""
