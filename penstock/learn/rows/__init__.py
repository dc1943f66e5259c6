"""Rows on their way to the gradient: kept until there are enough of them, and cut into minibatches."""
