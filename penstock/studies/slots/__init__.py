"""Slots, where the runs of a study execute, and the launcher that fills them."""
