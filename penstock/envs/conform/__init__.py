"""Environments of others in the form of the contract: single values, observations, and those of many agents."""
