"""Episodes played with trained policies: evaluation, matches, video."""
