"""The weights of replayed tokens, on numbers worked by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch

from openrlhf_ext.off_policy import ReplayMeter, behavior_kl, clip_center_and_weight, clipped_tokens

CAP = 5.0


def token_loss(current: float, proximal: float, behavior: float, advantage: float, objective: str = "decoupled"):
    """The loss of one token with clip 0.2 / 0.28, and its gradient by the current log-probability."""
    theta = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    others = (torch.tensor([value], dtype=torch.float64) for value in (proximal, behavior))
    center, weight = clip_center_and_weight(*others, objective=objective, weight_cap=CAP)
    ratio = (theta - center).exp()
    loss = -torch.min(ratio * weight * advantage, ratio.clamp(0.8, 1.28) * weight * advantage)
    loss.backward()
    return loss.item(), theta.grad.item()


@pytest.mark.parametrize(
    ("objective", "advantage", "loss", "gradient"),
    [
        # w = e^0.5 = 1.648721, r = e^0.1 = 1.105171; 1.5 w r = 2.733178 = 1.5 e^0.6
        ("decoupled", 1.5, -2.733178, -2.733178),
        # e^0.6 = 1.822119 is beyond 1.28: 1.5 x 1.28, no gradient
        ("behavior_clip", 1.5, -1.92, 0.0),
        # 1.5 x 1.105171
        ("on_policy", 1.5, -1.657756, -1.657756),
        ("decoupled", -1.5, 2.733178, 2.733178),
        ("behavior_clip", -1.5, 2.733178, 2.733178),
        ("on_policy", -1.5, 1.657756, 1.657756),
    ],
)
def test_the_three_objectives_on_one_token(objective: str, advantage: float, loss: float, gradient: float) -> None:
    assert token_loss(-1.0, -1.1, -1.6, advantage, objective) == pytest.approx((loss, gradient), abs=1e-6)


@pytest.mark.parametrize(
    ("advantage", "clip_high", "loss", "gradient"),
    [
        # r = e^0.2 = 1.221403, w = e^0.8 = 2.225541. Within 1.28: w r = e^1 = 2.718282. Beyond 1.2: 1.2 w = 2.670649.
        (1.0, 0.28, -2.718282, -2.718282),
        (1.0, 0.2, -2.670649, 0.0),
        (-1.0, 0.2, 2.718282, 2.718282),
    ],
)
def test_c32_which_policy_goes_in_which_ratio(
    advantage: float, clip_high: float, loss: float, gradient: float
) -> None:
    theta = torch.tensor([-1.0], requires_grad=True)
    proximal, behavior = torch.tensor([-1.2], requires_grad=True), torch.tensor([-2.0], requires_grad=True)
    center, weight = clip_center_and_weight(proximal, behavior, objective="decoupled", weight_cap=CAP)
    assert not center.requires_grad and not weight.requires_grad
    ratio = (theta - center).exp()
    found = -torch.min(ratio * weight * advantage, ratio.clamp(0.8, 1 + clip_high) * weight * advantage)
    found.backward()
    assert (found.item(), theta.grad.item()) == pytest.approx((loss, gradient), abs=1e-5)


@pytest.mark.parametrize("objective", ["decoupled", "on_policy", "behavior_clip"])
def test_no_gradient_goes_through_weight_or_center(objective: str) -> None:
    proximal, behavior = (torch.randn(4, requires_grad=True) for _ in range(2))
    found = clip_center_and_weight(proximal, behavior, objective=objective, weight_cap=CAP)
    assert not any(tensor.requires_grad for tensor in found)


def test_the_weight_is_capped_from_above_only_and_never_overflows() -> None:
    # Proximal over behavior: e^0, e^-3, e^-40, e^2 > 5, e^200 (beyond float32).
    proximal = torch.tensor([-1.0, -4.0, -41.0, -1.0, -0.1])
    behavior = torch.tensor([-1.0, -1.0, -1.0, -3.0, -200.1])
    _, weight = clip_center_and_weight(proximal, behavior, objective="decoupled", weight_cap=CAP)
    assert weight.tolist() == pytest.approx([1.0, math.exp(-3), math.exp(-40), 5.0, 5.0], rel=1e-5)


def test_one_policy_in_both_roles_has_a_weight_of_exactly_one() -> None:
    same = -20 * torch.rand(1000)
    for objective in ("decoupled", "on_policy", "behavior_clip"):
        center, weight = clip_center_and_weight(same, same.clone(), objective=objective, weight_cap=CAP)
        assert torch.equal(center, same) and torch.equal(weight, torch.ones(1000))


# -- metrics --


def weight_metrics(pieces: Iterable[torch.Tensor], *, weight_cap: float) -> dict[str, float]:
    meter = ReplayMeter(weight_cap=weight_cap)
    for piece in pieces:
        meter.add(piece, torch.zeros_like(piece), age=1)
    return {key: value for key, value in meter.metrics().items() if "kl" not in key}


def kl_by_age(rows: Iterable[tuple[int, torch.Tensor]]) -> dict[str, float]:
    meter = ReplayMeter(weight_cap=CAP)
    for age, kl in rows:
        meter.add(torch.ones_like(kl), kl, age=age)
    return {key: value for key, value in meter.metrics().items() if "kl" in key}


def test_weight_metrics_by_hand() -> None:
    # Sum 8, squares 1 + 1 + 1 + 25 = 28: 64 / (4 x 28) = 4/7.
    found = weight_metrics([torch.tensor([1.0, 1.0, 1.0]), torch.tensor([5.0])], weight_cap=CAP)
    assert found == {
        "weight_mean": 2.0,
        "weight_max": 5.0,
        "weight_capped_frac": 0.25,
        "effective_sample_frac": pytest.approx(4 / 7),
    }
    assert weight_metrics([], weight_cap=CAP) == {}


def test_a_computed_cap_counts_as_capped_and_a_weight_just_below_does_not() -> None:
    gaps = torch.tensor([9.0, math.log(5) - 1e-3, 0.0])
    for cap in (5.0, 2.0, 100.0):
        _, weight = clip_center_and_weight(gaps, torch.zeros(3), objective="decoupled", weight_cap=cap)
        capped = sum(math.exp(gap) >= cap for gap in gaps.tolist())
        assert weight_metrics([weight], weight_cap=cap)["weight_capped_frac"] == pytest.approx(capped / 3)


@pytest.mark.parametrize(("weights", "expected"), [([1e-30, 1e-30], 1.0), ([1e-30, 0.0], 0.5), ([0.0, 0.0], 0.0)])
def test_weights_next_to_nothing_have_an_effective_sample_size(weights: list[float], expected: float) -> None:
    found = weight_metrics([torch.tensor(weights)], weight_cap=CAP)
    assert found["effective_sample_frac"] == pytest.approx(expected)


def test_the_behavior_kl_by_hand() -> None:
    # d = log 2: 2 - 1 - log 2 = 0.306853. d = -1: 1/e - 1 + 1 = 0.367879. d = 200 is beyond float32.
    found = behavior_kl(torch.tensor([math.log(2), -2.0, -1.0, 0.0]), torch.tensor([0.0, -1.0, -1.0, -200.0]))
    assert found.tolist() == pytest.approx([0.306853, 0.367879, 0.0, math.exp(200)], rel=1e-5)


def test_the_behavior_kl_estimates_the_divergence_of_behavior_from_proximal() -> None:
    # Behavior (1/4, 3/4), proximal (1/2, 1/2). KL = 1/4 log(1/2) + 3/4 log(3/2) = 0.130812, as the mean of estimates.
    behavior, proximal = torch.tensor([0.25, 0.75]), torch.tensor([0.5, 0.5])
    estimate = (behavior * behavior_kl(proximal.log(), behavior.log())).sum().item()
    assert estimate == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5)) == pytest.approx(0.130812, abs=1e-6)


def test_ages_fall_into_bins_that_double() -> None:
    bins = {1: "01", 2: "02", 3: "03_04", 4: "03_04", 5: "05_08", 8: "05_08", 9: "09_16", 16: "09_16", 17: "17_up"}
    for age, name in {**bins, 1000: "17_up"}.items():
        assert kl_by_age([(age, torch.ones(2))]) == {"behavior_kl": 1.0, f"behavior_kl_age_{name}": 1.0}


def test_the_behavior_kl_is_a_mean_over_tokens_not_over_rows() -> None:
    # Age 3: 1 and 4, 4, 4 in one bin: 13/4. All: (13 + 2) / 5.
    rows = [(3, torch.tensor([1.0])), (4, torch.full((3,), 4.0)), (1, torch.tensor([2.0]))]
    assert kl_by_age(rows) == {"behavior_kl": 3.0, "behavior_kl_age_01": 2.0, "behavior_kl_age_03_04": 3.25}
    assert kl_by_age([]) == {}


def test_a_clipped_token_is_one_that_the_advantage_pushes_further_out() -> None:
    ratios = torch.tensor([1.29, 1.27, 0.79, 0.81, 1.29, 1.27, 0.79, 0.81])
    advantages = torch.tensor([2.0] * 4 + [-2.0] * 4)
    found = clipped_tokens(ratios.log(), torch.zeros(8), advantages, eps_low=0.2, eps_high=0.28)
    assert found.tolist() == [True, False, False, False, False, False, True, False]
