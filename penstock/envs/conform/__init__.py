"""Environments of others: brought into the form of the contract, and remarks on what they do to a run."""
