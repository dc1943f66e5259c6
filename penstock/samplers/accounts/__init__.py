"""Accounts: what a sampler keeps of the episodes that it plays."""
