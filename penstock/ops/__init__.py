"""Pure functions of arrays: returns, advantages and losses, each with its source; shapes are checked on entry."""

from penstock.ops.losses import approx_kl, clipped_surrogate, explained_variance, masked_mean, normalized, squared_error
from penstock.ops.returns import continues, discounted_return, discounted_sum, gae, td_error

__all__ = [
    "approx_kl",
    "clipped_surrogate",
    "continues",
    "discounted_return",
    "discounted_sum",
    "explained_variance",
    "gae",
    "masked_mean",
    "normalized",
    "squared_error",
    "td_error",
]
