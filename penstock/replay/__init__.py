"""Replay: storage x index x view. The rows that are kept, the choice of those drawn, and the sample made of each."""
