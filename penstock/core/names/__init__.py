"""Names that are not ours, or no longer: hints at what is meant, names of other libraries as data, former names."""
