"""The search for the fastest sampler on this machine."""
