r"""The decoupled off-policy objective, and what replay does to it in numbers.

Three policies meet in a replayed token: the *behavior* policy that sampled it some steps ago, the *proximal* policy at
the start of this train step, and the *current* policy that is being optimized. With r = pi_current / pi_proximal, the
decoupled loss (Hilton et al., arXiv 2110.00641; for replayed groups POPO, arXiv 2606.01281) is, for each token,

    -w min(r A, clip(r, 1 - eps_low, 1 + eps_high) A),      w = min(pi_proximal / pi_behavior, cap), a constant.

The weight corrects for who sampled the token; the clip bounds how far this step moves, for fresh and replayed tokens
alike. Fresh tokens have w = 1 exactly, since for them behavior and proximal policy are one.

Because w >= 0, ``w min(r A, clip(r) A) = min(r (w A), clip(r) (w A))``, and the same with the dual clip's
``max(., c A)``. So OpenRLHF's own loss, given the advantages ``w A``, *is* this objective; nothing in it is replaced.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from openrlhf_ext.config import Objective


def clip_center_and_weight(
    proximal: torch.Tensor, behavior: torch.Tensor, *, objective: Objective, weight_cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """How replayed tokens enter the loss.

    ==============  ==============================  =================  ==================================
    objective       ratio r is current over         advantage times    POPO's name
    ==============  ==============================  =================  ==================================
    decoupled       proximal                        min(prox/beh, cap) the method
    on_policy       proximal                        1                  replay treated as on-policy
    behavior_clip   behavior                        1                  behavior-aligned clipping
    ==============  ==============================  =================  ==================================

    Args:
        proximal, behavior: log-probabilities of the sampled tokens, of one shape.
        weight_cap: upper bound of the weight (truncated importance sampling). There is no lower bound: raising small
            weights or dropping their tokens would bias the gradient towards what the policy has moved away from.

    Returns:
        The log-probabilities that the ratio is taken against, and the weights; both without gradient.
    """
    proximal, behavior = proximal.detach(), behavior.detach()
    if objective == "behavior_clip":
        return behavior, torch.ones_like(behavior)
    if objective == "on_policy":
        return proximal, torch.ones_like(proximal)
    # Capped before exp, which overflows in float32 from 89 on.
    return proximal, (proximal - behavior).clamp(max=math.log(weight_cap)).exp()


def behavior_kl(proximal: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """KL(behavior || proximal) at each token, estimated from the token that the behavior policy sampled.

    Schulman's k3: e^d - 1 - d with d = log pi_proximal - log pi_behavior; unbiased and never negative.
    """
    d = (proximal - behavior).double()
    return torch.expm1(d) - d


class ReplayMeter:
    """Sums over replayed tokens, added row by row: their weights, and how far the policy has moved since birth."""

    def __init__(self, *, weight_cap: float) -> None:
        self._weight_cap = weight_cap
        self._num_tokens = self._num_capped = 0
        self._weights = self._squares = self._largest = 0.0
        self._kl: Counter[str] = Counter()
        self._kl_tokens: Counter[str] = Counter()

    def add(self, weights: torch.Tensor, kl: torch.Tensor, *, age: int) -> None:
        """The tokens (N,) of one row: their weights, their `behavior_kl`, and the row's age in train steps."""
        weights = weights.double()  # the square of a small float32 is zero
        self._num_tokens += len(weights)
        self._num_capped += int((weights >= self._weight_cap * (1 - 1e-6)).sum())
        self._weights += float(weights.sum())
        self._squares += float(weights.square().sum())
        self._largest = max(self._largest, float(weights.max()))
        for key in ("behavior_kl", f"behavior_kl_age_{_age_bin(age)}"):
            self._kl[key] += float(kl.sum())
            self._kl_tokens[key] += len(kl)

    def metrics(self) -> dict[str, float]:
        """Means over tokens; nothing without a token.

        The effective sample size is Kish's (sum w)^2 / sum w^2 as a share of the tokens, in (0, 1]; 1: all are equal,
        0 where no weight is above zero. The KL is given for ages 1, 2, 3-4, 5-8, 9-16, 17 and more, and for all.
        """
        n = self._num_tokens
        if not n:
            return {}
        return {
            "weight_mean": self._weights / n,
            "weight_max": self._largest,
            "weight_capped_frac": self._num_capped / n,
            "effective_sample_frac": self._weights**2 / (n * self._squares) if self._squares else 0.0,
            **{key: self._kl[key] / self._kl_tokens[key] for key in sorted(self._kl)},
        }


def _age_bin(age: int) -> str:
    if age > 16:
        return "17_up"
    top = 1 << (age - 1).bit_length() if age > 1 else 1
    return f"{top:02d}" if top <= 2 else f"{top // 2 + 1:02d}_{top:02d}"


def clipped_tokens(
    current: torch.Tensor, center: torch.Tensor, advantages: torch.Tensor, *, eps_low: float, eps_high: float
) -> torch.Tensor:
    """Tokens whose ratio is beyond the clip on the side that the advantage pushes to: no gradient."""
    ratio = (current - center).detach().exp()
    return ((advantages > 0) & (ratio > 1 + eps_high)) | ((advantages < 0) & (ratio < 1 - eps_low))
