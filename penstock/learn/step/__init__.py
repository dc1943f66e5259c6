"""Parts of a gradient step: gradients and their norms, groups of parameters, checks, settings changed under way."""
