"""Environments: observations and actions, making and checking one, and the pools that step many."""
