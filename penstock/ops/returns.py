"""Returns and advantages over a `[T, B]` record, where a row is followed only by a valid one.

Arrays are torch tensors. `x_t` covers rows [0, T-1]; `x_tp1` covers rows [1, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.core.errors import ConfigError
from penstock.native.elementwise import exp


def continues(terminated_t: Tensor, truncated_t: Tensor, valid_t: Tensor) -> Tensor:
    """[T, B] bool: row t+1 goes on where row t stopped, so that a trace may run through it.

    False at an end and before an invalid row (a reset, an idle slot, a fault). The last row's successor is not in
    the batch, so a trace stops there and bootstraps.
    """
    _check_rows(terminated_t, truncated_t=truncated_t, valid_t=valid_t)
    out = valid_t & ~terminated_t & ~truncated_t
    out[:-1] &= valid_t[1:]
    out[-1] = False
    return out


def discounted_sum(x_t: Tensor, decay_t: Tensor) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1} with y_T = 0, in about log2(T) vectorised passes.

    Args:
        x_t, decay_t: [T, B] floats. Differs from the loop by rounding only: products of decays are formed first
        (Blelloch, "Prefix sums and their applications", 1990, section 1.4: a scan over first-order recurrences).
    """
    _check_rows(x_t, decay_t=decay_t)
    y, a, largest = x_t.clone(), decay_t.clone(), torch.finfo(x_t.dtype).max
    distance = 1
    while distance < len(y):
        ends = a[:-distance] == 0.0  # nothing beyond counts, were it infinite
        y[:-distance] += (a[:-distance] * y[distance:]).masked_fill_(ends, 0.0)
        a[:-distance] = (a[:-distance] * a[distance:]).clamp_(max=largest)
        distance *= 2
    return y


def td_error(reward_t: Tensor, value_t: Tensor, value_tp1: Tensor, terminated_t: Tensor, *, discount: float) -> Tensor:
    """[T, B] r_t + discount * (1 - terminated_t) * V_{t+1} - V_t: truncated rows bootstrap, terminal ones do not."""
    _check_rows(reward_t, value_t=value_t, value_tp1=value_tp1, terminated_t=terminated_t)
    return reward_t + discount * value_tp1.masked_fill(terminated_t, 0.0) - value_t


def gae(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    discount: float,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns they imply (Schulman et al. 2016, eq. 16).

    Args:
        reward: [T, B] float. value: [T+1, B], V(obs), without gradient.
        terminated, truncated, valid: [T, B] bool.

    Returns:
        advantage [T, B], 0 on invalid rows, and return_ = advantage + value[:T].
    """
    if value.shape[0] != reward.shape[0] + 1:
        raise ConfigError(
            f"gae got value of shape {tuple(value.shape)} for reward {tuple(reward.shape)}; expected [T+1, B]"
        )
    delta = td_error(reward, value[:-1], value[1:], terminated, discount=discount).masked_fill(~valid, 0.0)
    decay = continues(terminated, truncated, valid).to(delta.dtype) * (discount * gae_lambda)
    advantage = discounted_sum(delta, decay)
    return advantage, advantage + value[:-1]


def discounted_return(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, *, discount: float
) -> Tensor:
    """[T, B] discounted sum of rewards to the end of the episode, bootstrapped with V where the record stops.

    Equal to `gae(..., gae_lambda=1)[1]`; pass zeros as `value` for a Monte-Carlo return that ignores what follows.
    """
    return gae(reward, value, terminated, truncated, valid, discount=discount, gae_lambda=1.0)[1]


def vtrace(
    log_ratio: Tensor,
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    valid: Tensor,
    *,
    discount: float,
    vtrace_lambda: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace targets, and advantages for the policy gradient (Espeholt et al. 2018, arXiv:1802.01561).

        delta_t = rho_t (r_t + discount V_{t+1} - V_t),         rho_t = min(rho_bar, pi / mu)
        v_t - V_t = delta_t + discount c_t (v_{t+1} - V_{t+1}),   c_t = vtrace_lambda min(c_bar, pi / mu)   (eq. 1)
        A_t = rho_t (r_t + discount q_{t+1} - V_t),           q_{t+1} = V_{t+1} + vtrace_lambda (v_{t+1} - V_{t+1})

    The paper has lambda in the targets (its remark on TD(lambda)) and not in the advantages (section 4.2), so with
    lambda 1 these are its own. With ratios of 1, both are those of `gae` with this lambda. A trace stops where GAE's
    does, and v_T = V_T. The paper assumes c_bar <= rho_bar.

    Args:
        log_ratio: [T, B] float, log pi(a|s) - log mu(a|s): of the policy to evaluate and of the one that acted.
        reward: [T, B] float. value: [T+1, B], V(obs). All without gradient.
        terminated, truncated, valid: [T, B] bool.

    Returns:
        target [T, B], and advantage [T, B], 0 on invalid rows.
    """
    if value.shape[0] != reward.shape[0] + 1:
        raise ConfigError(
            f"vtrace got value of shape {tuple(value.shape)} for reward {tuple(reward.shape)}; expected [T+1, B]"
        )
    _check_rows(log_ratio, reward=reward, valid=valid)
    ratio = exp(log_ratio.masked_fill(~valid, 0.0))
    rho = ratio.clamp(max=rho_bar)
    error = td_error(reward, value[:-1], value[1:], terminated, discount=discount).masked_fill(~valid, 0.0)
    decay = continues(terminated, truncated, valid).to(error.dtype) * (discount * vtrace_lambda)
    correction = discounted_sum(rho * error, decay * ratio.clamp(max=c_bar))  # v - V
    following = torch.cat((correction[1:], torch.zeros_like(correction[:1])))
    beyond = (decay * following).masked_fill(decay == 0.0, 0.0)  # an infinite one, too
    return value[:-1] + correction, rho * (error + beyond)


def _check_rows(first: Tensor, **others: Tensor) -> None:
    if first.ndim < 2 or any(x.shape != first.shape for x in others.values()):
        shapes = {name: tuple(x.shape) for name, x in others.items()}
        raise ConfigError(f"expected arrays of one shape [T, B]; got {tuple(first.shape)} and {shapes}")
