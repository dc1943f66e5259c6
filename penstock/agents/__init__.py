"""The acting side: agents, networks, distributions and normalisers. Importing a module of this package loads torch."""
