"""Unknown names of settings and the settings they mean: hints, and the names of other libraries as data."""
