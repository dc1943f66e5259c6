"""Samplers spread over several processes or machines, on Ray or without it."""
