"""Learning curves as pictures."""
