"""Samplers: settings that build a live sampler, and the one loop in which agents meet environments."""
