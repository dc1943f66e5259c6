"""Conformance suites for pools, samplers and agents of your own, and environments that say where a row came from."""
