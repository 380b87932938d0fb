"""Evaluation metrics: accuracy from the verifier's score, unbiased pass@k, and accuracy against length."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from openrlhf_ext.types import P, RolloutGroup


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of ``k`` samples drawn without replacement is correct.

    Unbiased estimator of Chen et al. 2021 (arXiv 2107.03374): ``1 - C(n-c, k) / C(n, k)``. Raises ValueError when
    ``k > num_samples``.
    """
    if k > num_samples:
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, got {num_samples}")
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def aes(
    accuracy: float,
    length: float,
    base_accuracy: float,
    base_length: float,
    *,
    alpha: float = 1.0,
    beta: float = 3.0,
    gamma: float = 5.0,
) -> float:
    """Accuracy-efficiency score against a base model: shorter responses count for it, lost accuracy against it.

    ``alpha * (base_length - length) / base_length`` plus ``beta`` times the relative change of accuracy, or ``gamma``
    times it where accuracy fell (O1-Pruner, arXiv 2501.12570). Lengths are mean tokens per response.

    Raises:
        ValueError: the base's accuracy or length is not above 0, so that nothing is relative to it.
    """
    if not (base_accuracy > 0 and base_length > 0):
        raise ValueError(
            f"AES needs a base with accuracy and length above 0, got accuracy {base_accuracy} and length {base_length}"
        )
    shorter = (base_length - length) / base_length
    better = (accuracy - base_accuracy) / base_accuracy
    return alpha * shorter + (beta if better >= 0 else gamma) * better


def evaluate_groups(
    groups: Sequence[RolloutGroup[P]], *, pass_at: Sequence[int], correct_at: float
) -> dict[str, float]:
    """Accuracy, its standard error, pass@k and response lengths; overall and by data source.

    A rollout is correct when its accuracy is at least ``correct_at``. The standard error is over prompts (samples of
    one prompt are not independent).
    """
    if not groups:
        return {"eval/num_prompts": 0}
    metrics: dict[str, float] = {"eval/num_prompts": len(groups)}
    metrics |= _accuracy(groups, pass_at, correct_at, "eval")
    sources = sorted({group.prompt.datasource for group in groups})
    if len(sources) > 1:
        for source in sources:
            subset = [group for group in groups if group.prompt.datasource == source]
            metrics |= _accuracy(subset, pass_at, correct_at, f"eval/{source}")
    return metrics


def accuracy_by_prompt(groups: Sequence[RolloutGroup[P]], *, correct_at: float) -> dict[str, float]:
    """Share of correct rollouts for each prompt id."""
    return {g.prompt.prompt_id: float(np.mean([a >= correct_at for a in g.accuracies()])) for g in groups}


def paired_gain(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[float, float]:
    """Mean difference of accuracy over the prompts that both evaluations have, and its standard error.

    Pairing removes how much prompts differ in difficulty, most of what an unpaired standard error consists of. NaN
    without a common prompt; a standard error of 0 with a single one.
    """
    gains = [after[prompt_id] - before[prompt_id] for prompt_id in before if prompt_id in after]
    if not gains:
        return math.nan, math.nan
    return float(np.mean(gains)), float(np.std(gains, ddof=1) / math.sqrt(len(gains))) if len(gains) > 1 else 0.0


def _accuracy(
    groups: Sequence[RolloutGroup[P]], pass_at: Sequence[int], correct_at: float, prefix: str
) -> dict[str, float]:
    correct = [[a >= correct_at for a in group.accuracies()] for group in groups]
    means = [float(np.mean(row)) for row in correct]
    lengths = [(r.num_tokens, r.accuracy >= correct_at) for group in groups for r in group.rollouts]
    right = [n for n, ok in lengths if ok]
    wrong = [n for n, ok in lengths if not ok]
    metrics = {
        f"{prefix}/accuracy": float(np.mean(means)),
        f"{prefix}/accuracy_se": float(np.std(means, ddof=1) / math.sqrt(len(means))) if len(means) > 1 else 0.0,
        f"{prefix}/num_samples": len(lengths),
        f"{prefix}/response_length_mean": float(np.mean([n for n, _ in lengths])),
    }
    if right:
        metrics[f"{prefix}/response_length_correct_mean"] = float(np.mean(right))
    if wrong:
        metrics[f"{prefix}/response_length_wrong_mean"] = float(np.mean(wrong))
    for k in pass_at:
        if k > min(len(row) for row in correct):
            break
        metrics[f"{prefix}/pass@{k}"] = float(np.mean([pass_at_k(len(row), sum(row), k) for row in correct]))
    return metrics


def accuracy_over_rollouts(curves: Sequence[Mapping[int, float]], num_points: int = 11) -> np.ndarray:
    """Accuracies of several runs at equal rollouts, to compare them by.

    Args:
        curves: accuracy by rollouts generated so far, at each evaluation of a run; the first at 0.
        num_points: points of the common grid, from 0 to the smallest last evaluation.

    Returns:
        (runs + 1, num_points): the grid, then a row for each run, linear between its evaluations; never beyond one.
    """
    grid = np.linspace(0, min(max(curve) for curve in curves), num_points)
    return np.array([grid, *(np.interp(grid, sorted(curve), [curve[x] for x in sorted(curve)]) for curve in curves)])
