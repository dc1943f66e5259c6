"""Replays stored in checkpoints: their content, and exports of it."""
