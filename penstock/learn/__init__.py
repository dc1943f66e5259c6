"""The learning side: the Policy, train operations, minibatches and gradients."""
