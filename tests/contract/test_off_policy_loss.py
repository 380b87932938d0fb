"""OpenRLHF's loss on weighted advantages is the decoupled objective: the formula, written out token by token."""

from __future__ import annotations

import math

import pytest
import torch
from openrlhf.models import PolicyLoss

from openrlhf_ext.off_policy import clip_center_and_weight

pytestmark = pytest.mark.contract

LOW, HIGH, CAP = 0.2, 0.28, 5.0
MODES = pytest.mark.parametrize("token_mean", [True, False], ids=["token-mean", "seq-mean"])
DUAL = pytest.mark.parametrize("dual_clip", [None, 3.0], ids=["no dual clip", "dual clip"])


def by_formula(current, proximal, behavior, advantages, mask, *, token_mean: bool, dual_clip: float | None):
    """-w min(r A, clip(r) A), and -w max(that, c A) for A < 0 with the dual clip, one token after the other."""
    rows = []
    for b in range(len(mask)):
        losses = []
        for t in range(mask.shape[1]):
            if not mask[b, t]:
                continue
            weight = min(math.exp(proximal[b, t].item() - behavior[b, t].item()), CAP)
            ratio = torch.exp(current[b, t] - proximal[b, t].item())
            clipped = min(max(ratio, torch.tensor(1 - LOW)), torch.tensor(1 + HIGH))
            a = advantages[b, t].item()
            gain = ratio * a if ratio * a <= clipped * a else clipped * a
            if dual_clip is not None and a < 0 and gain < dual_clip * a:
                gain = torch.tensor(dual_clip * a, dtype=current.dtype)
            losses.append(-weight * gain)
        rows.append(losses)
    if token_mean:
        return sum(loss for losses in rows for loss in losses) / sum(len(losses) for losses in rows)
    return sum(sum(losses) / len(losses) for losses in rows) / len(rows)


def by_upstream(current, proximal, behavior, advantages, mask, *, token_mean: bool, dual_clip: float | None):
    loss = PolicyLoss(LOW, HIGH, dual_clip=dual_clip, token_level_loss=token_mean)
    center, weight = clip_center_and_weight(proximal, behavior, objective="decoupled", weight_cap=CAP)
    return loss(current, center, advantages * weight, action_mask=mask)[0]


def tokens(seed: int) -> tuple[torch.Tensor, ...]:
    """Float64 log-probabilities of the three policies, advantages of both signs and a mask: 4 rows of 1 to 9 tokens.

    Far enough apart that every branch is taken: capped weights, clips on both sides, the dual clip.
    """
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, 4, 9, generator=generator, dtype=torch.float64)
    proximal = -2 + 0.5 * noise[0]
    mask = torch.arange(9) < torch.tensor([1, 4, 9, 6])[:, None]
    return proximal + 0.8 * noise[1], proximal, proximal - 1.5 * noise[2], noise[3], mask


@MODES
@DUAL
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_those_of_the_formula(seed: int, token_mean: bool, dual_clip: float | None) -> None:
    current, *others = tokens(seed)
    found = []
    for loss in (by_upstream, by_formula):
        theta = current.clone().requires_grad_()
        value = loss(theta, *others, token_mean=token_mean, dual_clip=dual_clip)
        value.backward()
        found.append((value.detach(), theta.grad))
    torch.testing.assert_close(found[0], found[1], atol=1e-7, rtol=1e-7)
    assert found[0][1].abs().max() > 1e-3


def test_the_random_tokens_take_every_branch() -> None:
    # The control of the tests above.
    ratios, gaps, signs = [], [], []
    for seed in range(3):
        current, proximal, behavior, advantages, mask = tokens(seed)
        ratios.append((current - proximal)[mask].exp())
        gaps.append((proximal - behavior)[mask].exp())
        signs.append(advantages[mask])
    ratio, gap, sign = torch.cat(ratios), torch.cat(gaps), torch.cat(signs)
    for branch in (ratio > 1 + HIGH, ratio < 1 - LOW, (ratio < 1 + HIGH) & (ratio > 1 - LOW)):
        assert (branch & (sign > 0)).any() and (branch & (sign < 0)).any()
    assert ((ratio > 3.0) & (sign < 0)).any() and (gap > CAP).any() and (gap < 1 / CAP).any()


@MODES
@DUAL
def test_the_gradient_is_that_of_finite_differences(token_mean: bool, dual_clip: float | None) -> None:
    current, *others = tokens(0)
    theta = current.clone().requires_grad_()
    by_upstream(theta, *others, token_mean=token_mean, dual_clip=dual_clip).backward()
    step = 1e-6
    for b, t in ((b, t) for b in range(4) for t in range(9)):
        up, down = current.clone(), current.clone()
        up[b, t] += step
        down[b, t] -= step
        values = [by_upstream(x, *others, token_mean=token_mean, dual_clip=dual_clip).item() for x in (up, down)]
        assert theta.grad[b, t].item() == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-7)


@MODES
@DUAL
def test_over_several_optimizer_steps_the_weight_stays_and_the_ratio_moves(token_mean, dual_clip) -> None:
    _, proximal, *others = tokens(1)
    ends = []
    for loss in (by_upstream, by_formula):
        theta = proximal.clone().requires_grad_()  # the first ratio is 1
        optimizer = torch.optim.SGD([theta], lr=2.0)
        for _ in range(5):
            optimizer.zero_grad()
            loss(theta, proximal, *others, token_mean=token_mean, dual_clip=dual_clip).backward()
            optimizer.step()
        ends.append(theta.detach())
    torch.testing.assert_close(ends[0], ends[1], atol=1e-6, rtol=0)
    assert ((ends[0] - proximal).exp() > 1 + HIGH).any()  # far enough for the clip to matter


@MODES
@DUAL
def test_one_policy_in_both_roles_is_upstreams_loss_bit_for_bit(token_mean: bool, dual_clip: float | None) -> None:
    current, proximal, _, advantages, mask = (x.float() if x.is_floating_point() else x for x in tokens(2))
    found = by_upstream(current, proximal, proximal, advantages, mask, token_mean=token_mean, dual_clip=dual_clip)
    plain = PolicyLoss(LOW, HIGH, dual_clip=dual_clip, token_level_loss=token_mean)
    assert torch.equal(found, plain(current, proximal, advantages, action_mask=mask)[0])
