"""Vocabulary: trees, the record, specs, noise, settings and errors. Imports numpy and optree, nothing else."""

VERSION = "0.1.0"
"""Of the package, where every layer can read it."""
