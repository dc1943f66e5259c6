"""Vocabulary of all layers: trees, the record, specs, noise, settings, errors. Imports numpy and optree only."""

VERSION = "0.2.0"
"""The package's version, where every layer can read it."""
