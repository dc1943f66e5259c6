"""The run directory: its files, its lock, and who may be believed about it."""

RUN_EXPECTED = (
    "expected the directory of a run, which holds config.json and metrics.jsonl: it lies in runs/, or at --run.dir, "
    "and `penstock runs FOLDER` lists those below a folder"
)
"""Ends the message for a path that is no run."""
