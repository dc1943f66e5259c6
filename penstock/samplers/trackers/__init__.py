"""Episode trackers: a sampler's records of the episodes that it plays."""
