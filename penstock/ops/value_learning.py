"""Value learning: targets, losses and priorities of Q-learning, target networks, exploration ladders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.core.errors import ConfigError
from penstock.ops.returns import continues


def shape_error(function: str, expected: str, **seen: Tensor) -> ConfigError:
    """A ConfigError that names the shapes that a function got and those that it expects."""
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in seen.items())
    return ConfigError(f"{function} got {shapes}; expected {expected}")


def huber(x: Tensor, delta: float = 1.0) -> Tensor:
    """x^2 / 2 where |x| <= delta, delta (|x| - delta / 2) beyond, element by element (Huber 1964).

    The gradient is x clipped to [-delta, delta]; `delta=math.inf` is half the square everywhere.
    """
    _check_delta("huber", delta)
    return F.huber_loss(x, x.new_zeros(()).expand_as(x), reduction="none", delta=delta)


def td_loss(
    q: Tensor, target: Tensor, weight: Tensor | None = None, delta: float = 1.0
) -> tuple[Tensor, Tensor | None]:
    """The mean of weight * `huber` of Q - target, and what replay is told of each row.

    Args:
        q: [N] float. target: [N] float, without gradient. weight: [N] of prioritized replay; None for 1.

    Returns:
        the loss, a scalar; and [N] |Q - target| for priorities, None where there is no weight.
    """
    _check_delta("td_loss", delta)
    if q.shape != target.shape or (weight is not None and weight.shape != q.shape):
        raise shape_error("td_loss", "equal shapes", q=q, target=target)
    if weight is None:
        return torch.ops.aten.huber_loss(q, target, 1, delta), None  # the mean; F's broadcasts, two nodes of the graph
    return (F.huber_loss(q, target, reduction="none", delta=delta) * weight).mean(), (q.detach() - target).abs()


def _check_delta(function: str, delta: float) -> None:
    if not delta > 0:
        raise ConfigError(f"{function} got delta={delta}; expected delta > 0, or math.inf for half the square")


def critic_loss(q: Tensor, target: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """The sum over k critics of the mean of weight (Q - target)^2, and what replay is told of each row.

    Args:
        q: [k, N] float. target: [N] float, without gradient. weight: [N] of prioritized replay; None for 1.

    Returns:
        the loss, a scalar; and [N] mean |Q - target| over the critics, for priorities, None where there is no weight.
    """
    if q.ndim != 2 or target.shape != q.shape[1:]:
        raise shape_error("critic_loss", "q [k, N] and target [N]", q=q, target=target)
    if weight is None:
        return len(q) * F.mse_loss(q, target.expand_as(q)), None
    error = q - target
    return (error.square() * weight).mean(1).sum(), error.detach().abs().mean(0)


def double_q(q_online: Tensor, q_target: Tensor) -> Tensor:
    """The target's value of the action that the online network prefers (van Hasselt et al. 2016, eq. 4).

    Args:
        q_online, q_target: [..., A] float, at the observation bootstrapped from. Ties go to the first action.

    Returns:
        [...] float, a value for the target: no gradient should pass.
    """
    if q_online.shape != q_target.shape or q_online.ndim < 2:
        raise shape_error("double_q", "one shape [..., A], a value per action", q_online=q_online, q_target=q_target)
    return q_target.gather(-1, q_online.argmax(-1, keepdim=True)).squeeze(-1)


def dueling(value: Tensor, advantage: Tensor, *, dim: int = 1) -> Tensor:
    """Q = V + A - mean over actions of A (Wang et al. 2016, eq. 9).

    Args:
        value: [N, 1] or [N, 1, K] float: of shape 1 on axis `dim`, else as `advantage`.
        advantage: [N, A] or, with K atoms of a distribution whose logits these are, [N, A, K].
        dim: the axis of the actions.
    """
    if not -advantage.ndim <= dim < advantage.ndim or value.shape != advantage.narrow(dim, 0, 1).shape:
        raise shape_error("dueling", f"one shape but for 1 on axis {dim} of value", value=value, advantage=advantage)
    return value + advantage - advantage.mean(dim, keepdim=True)


def n_step_return(
    reward: Tensor, value: Tensor, terminated: Tensor, truncated: Tensor, valid: Tensor, *, discount: float, n: int
) -> Tensor:
    """[T, B] sum of n discounted rewards from each row on plus discount^n of the value after them.

    Sutton and Barto 2018, eq. 7.1. The sum is shorter where the record stops: nothing follows a terminated row; the
    value of the next observation follows a truncated row, one whose successor is invalid, and the last.

    Args:
        reward: [T, B] float.
        value: [T+1, B] float, without gradient: the value of obs[t] to bootstrap with. For double Q-learning
            `double_q(online(obs), target(obs))`; for rescaled values `value_unscale` of that.
        terminated, truncated, valid: [T, B] bool.

    Returns:
        [T, B], 0 on invalid rows. With n >= T it is `discounted_return`.
    """
    if n < 1:
        raise ConfigError(f"n_step_return got n={n}; expected n >= 1")
    go_on = continues(terminated, truncated, valid)[:-1]
    if reward.shape != terminated.shape or value.shape != (len(reward) + 1, *reward.shape[1:]):
        expected = "reward [T, B] like terminated and value [T+1, B]"
        raise shape_error("n_step_return", expected, reward=reward, value=value, terminated=terminated)
    after = value[1:].masked_fill(terminated, 0.0)
    total = reward + discount * after
    for _ in range(min(n, len(reward)) - 1):
        longer = torch.where(go_on, total[1:], after[:-1])
        total = reward + discount * torch.cat((longer, after[-1:]))
    return total.masked_fill(~valid, 0.0)


def value_rescale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """h(x) = sign(x) (sqrt(|x| + 1) - 1) + eps x, which shrinks large returns (Pohlen et al. 2018, prop. A.2).

    Computed as x / (sqrt(|x| + 1) + 1) + eps x, the same without the cancellation near 0, where the slope is
    1/2 + eps. Kapturowski et al. 2019 use eps = 1e-3.
    """
    if eps < 0:
        raise ConfigError(f"value_rescale got eps={eps}; expected eps >= 0")
    return x / ((x.abs() + 1.0).sqrt() + 1.0) + eps * x


def value_unscale(x: Tensor, eps: float = 1e-3) -> Tensor:
    """Inverse of `value_rescale` in closed form (Pohlen et al. 2018, prop. A.2).

    With d = sqrt(|y| + 1) - 1 the equation |x| = h(|y|) is eps d^2 + (1 + 2 eps) d = |x|, and |y| = d (d + 2). Its
    root is taken in the form that subtracts nothing, so that float32 keeps its seven digits; the paper's form,
    a difference divided by 2 eps, keeps four.
    """
    if eps < 0:
        raise ConfigError(f"value_unscale got eps={eps}; expected eps >= 0")
    slope = 1.0 + 2.0 * eps
    d = 2.0 * x / (slope + (slope * slope + 4.0 * eps * x.abs()).sqrt())
    return d * (d.abs() + 2.0)


def sequence_priority(abs_td: Tensor, valid: Tensor, eta: float = 0.9) -> Tensor:
    """[B] eta max_t |delta_t| + (1 - eta) mean_t |delta_t| over valid rows (Kapturowski et al. 2019, section 2.3).

    Args:
        abs_td: [T, B] float, not negative. valid: [T, B] bool. A column without a valid row gets 0.
        eta: 1 is the largest error of the sequence, 0 the mean.
    """
    if abs_td.shape != valid.shape or abs_td.ndim != 2 or not len(abs_td):
        raise shape_error("sequence_priority", "one shape [T, B] with T >= 1", abs_td=abs_td, valid=valid)
    if not 0 <= eta <= 1:
        raise ConfigError(f"sequence_priority got eta={eta}; expected 0 <= eta <= 1")
    kept = abs_td.masked_fill(~valid, 0.0)
    return eta * kept.amax(0) + (1.0 - eta) * kept.sum(0) / valid.sum(0).clamp(min=1)


def polyak_(target: Sequence[Tensor], source: Sequence[Tensor], tau: float) -> None:
    """Moves `target` in place to (1 - tau) target + tau source (Lillicrap et al. 2016, algorithm 1); tau=1 copies.

    Args:
        target, source: floats of pairwise equal shape, such as `list(module.parameters())`. No gradient is recorded.
    """
    if not 0 <= tau <= 1:
        raise ConfigError(f"polyak_ got tau={tau}; expected 0 <= tau <= 1, the share that comes from the source")
    if len(target) != len(source):
        raise ConfigError(f"polyak_ got {len(target)} targets for {len(source)} sources; expected a source per target")
    for i, (a, b) in enumerate(zip(target, source)):
        if a.shape != b.shape:
            raise shape_error("polyak_", f"equal shapes in pair {i}", target=a, source=b)
    if not target:
        return
    with torch.no_grad():
        if tau == 1:
            torch._foreach_copy_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                list(target), list(source)
            )
        else:
            torch._foreach_lerp_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                list(target), list(source), tau
            )


def epsilon_ladder(slots: int, base: float = 0.4, alpha: float = 7.0) -> Tensor:
    """[slots] float32 base^(1 + alpha i / (slots - 1)), an epsilon per slot (Horgan et al. 2018, section 4).

    Args:
        slots: number of slots over all workers and ranks; i is the index among all of them. One slot gets `base`.
    """
    if slots < 1 or not 0 < base <= 1 or not alpha >= 0:
        raise ConfigError(
            f"epsilon_ladder got slots={slots}, base={base}, alpha={alpha}; "
            "expected slots >= 1, 0 < base <= 1, alpha >= 0"
        )
    i = torch.arange(slots, dtype=torch.float64)
    return (base ** (1.0 + alpha * i / max(slots - 1, 1))).float()


def log_space_ladder(slots: int, low: float, high: float) -> Tensor:
    """[slots] float32 from `low` to `high` in equal ratios: rlpyt's vector epsilon (Stooke and Abbeel 2019).

    Args:
        slots: as for `epsilon_ladder`. One slot gets `high`, since a lone actor has to explore.
    """
    if slots < 1 or not 0 < low <= high < math.inf:
        raise ConfigError(
            f"log_space_ladder got slots={slots}, low={low}, high={high}; expected slots >= 1 and 0 < low <= high"
        )
    fraction = torch.linspace(0, 1, slots, dtype=torch.float64) if slots > 1 else torch.ones(1, dtype=torch.float64)
    return (low * (high / low) ** fraction).float()
