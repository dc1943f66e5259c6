"""Environments: what they show and take, how one is made and checked, and the pools that step many."""
