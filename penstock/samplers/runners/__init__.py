"""Samplers hosted by actors: the settings, what an actor runs, its owner's side, and batches made of fragments."""
