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
from collections.abc import Iterable

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


def weight_metrics(weights: torch.Tensor, *, weight_cap: float) -> dict[str, float]:
    """Of the weights of some tokens (N,): mean, max, share at the cap, and effective sample size.

    The effective sample size is Kish's (sum w)^2 / sum w^2 as a share of N, in (0, 1]; 1: all are equal.
    """
    total, squares = (float(x.sum(dtype=torch.float64)) for x in (weights, weights * weights))
    return {
        "weight_mean": total / len(weights),
        "weight_max": float(weights.max()),
        "weight_capped_frac": float((weights >= weight_cap * (1 - 1e-6)).sum()) / len(weights),
        "effective_sample_frac": total**2 / (len(weights) * squares),
    }


def behavior_kl(proximal: torch.Tensor, behavior: torch.Tensor) -> torch.Tensor:
    """KL(behavior || proximal) at each token, estimated from the token that the behavior policy sampled.

    Schulman's k3: e^d - 1 - d with d = log pi_proximal - log pi_behavior; unbiased and never negative.
    """
    d = (proximal - behavior).double()
    return torch.expm1(d) - d


def kl_by_age(token_kls: Iterable[tuple[int, torch.Tensor]]) -> dict[str, float]:
    """Mean over tokens of `behavior_kl`, by age in train steps: 1, 2, 3-4, 5-8, 9-16, 17 and more; and of all."""
    by_age: dict[str, list[torch.Tensor]] = {}
    for age, kl in token_kls:
        by_age.setdefault(_age_bin(age), []).append(kl)
    means = {f"behavior_kl_age_{name}": float(torch.cat(by_age[name]).mean()) for name in sorted(by_age)}
    everything = [kl for kls in by_age.values() for kl in kls]
    return {"behavior_kl": float(torch.cat(everything).mean()), **means} if everything else {}


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
