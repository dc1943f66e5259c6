"""Samplers hosted by actors: settings, the runner in an actor, its owner's side, and batches made of fragments."""
