"""Stored replays: shown and exported."""
