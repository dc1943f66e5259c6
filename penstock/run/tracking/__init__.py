"""Trackers: services and files that show a run as it goes, fed from its directory."""
