"""Pure functions of arrays: returns, advantages, targets and losses, each with its source and a check of shapes."""

from penstock.ops.distributional import categorical_cross_entropy, project_categorical, quantile_huber
from penstock.ops.losses import (
    approx_kl,
    clipped_squared_error,
    clipped_surrogate,
    explained_variance,
    masked_mean,
    normalized,
    squared_error,
)
from penstock.ops.returns import continues, discounted_return, discounted_sum, gae, td_error, vtrace
from penstock.ops.value_learning import (
    critic_loss,
    double_q,
    dueling,
    epsilon_ladder,
    huber,
    log_space_ladder,
    n_step_return,
    polyak_,
    sequence_priority,
    td_loss,
    value_rescale,
    value_unscale,
)

__all__ = [
    "approx_kl",
    "categorical_cross_entropy",
    "clipped_squared_error",
    "clipped_surrogate",
    "continues",
    "critic_loss",
    "discounted_return",
    "discounted_sum",
    "double_q",
    "dueling",
    "epsilon_ladder",
    "explained_variance",
    "gae",
    "huber",
    "log_space_ladder",
    "masked_mean",
    "n_step_return",
    "normalized",
    "polyak_",
    "project_categorical",
    "quantile_huber",
    "sequence_priority",
    "squared_error",
    "td_error",
    "td_loss",
    "value_rescale",
    "value_unscale",
    "vtrace",
]
