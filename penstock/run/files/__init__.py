"""The run directory: its files, its lock, and who may be believed about it."""
