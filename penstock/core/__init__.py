"""Vocabulary: trees, the record, specs, noise, settings and errors. Imports numpy and optree, nothing else."""
