"""Parts of a gradient step: gradients and their norms, groups of parameters, checks, and the state between steps."""
