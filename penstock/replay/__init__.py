"""Replay: storage x index x view. Which rows are kept, which are drawn, and what a drawn one is shown as."""
