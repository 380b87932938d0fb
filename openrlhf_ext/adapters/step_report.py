"""What one step says about itself: metrics of its groups and rows, samples as text, failures in a line each."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_ext.groups import group_metrics
from openrlhf_ext.sampling import SampledStep
from openrlhf_ext.settings import Settings
from openrlhf_ext.types import FailedRequest, RolloutGroup

logger = logging.getLogger(__name__)


def step_metrics(sampled: SampledStep, trained: Sequence[RolloutGroup], *, tolerance: float) -> dict[str, float]:
    """Counts and group statistics of what was generated and of what is trained."""
    return {
        **group_metrics(sampled.generated, tolerance=tolerance, suffix="generated"),
        **group_metrics(trained, tolerance=tolerance, suffix="trained"),
        "step/num_prompts": sampled.num_prompts,
        "step/num_rounds": sampled.num_rounds,
        "step/num_retries": sampled.num_retries,
        "step/num_failed_groups": len(sampled.failed),
    }


def sample_lines(
    step: int, groups: Sequence[RolloutGroup[Experience]], rows: Sequence[Experience], tokenizer, *, limit: int
) -> list[dict[str, object]]:
    """The first rollout of every group, then the second, up to ``limit``, as lines of samples.jsonl.

    ``rows`` are the groups' rollouts in order, with advantages. A response of several turns is shown with what the
    environment said between them.
    """
    if not groups:
        return []
    size = len(groups[0].rollouts)
    lines: list[dict[str, object]] = []
    for g, i in [(g, i) for i in range(size) for g in range(len(groups))][:limit]:
        group, row, rollout = groups[g], rows[g * size + i], groups[g].rollouts[i]
        actions = torch.where(row.action_mask)[0]
        lines.append(
            {
                "step": step,
                "prompt_id": group.prompt.prompt_id,
                "group_id": group.group_id,
                "prompt": group.prompt.text,
                "response": tokenizer.decode(
                    row.sequences[1:][actions[0] : actions[-1] + 1], skip_special_tokens=True
                ),
                "reward": rollout.reward,
                "accuracy": rollout.accuracy,
                "advantage": float(row.advantages[actions[0]]),
                "policy_version": group.policy_version,
            }
        )
    return lines


def report_failures(failed: list[FailedRequest], num_requests: int, where: str) -> None:
    """One line for each reason. Raises RuntimeError when no prompt at all got a valid reward."""
    by_reason: dict[str, list[FailedRequest]] = {}
    for failure in failed:
        by_reason.setdefault(failure.reason, []).append(failure)
    for reason, failures in by_reason.items():
        first = failures[0]
        message = (
            f"{where}: no usable group for {len(failures)} of {num_requests} prompts ({reason}); "
            f"first, prompt {first.request.prompt.prompt_id}: {first.detail}"
        )
        if reason == "invalid_reward" and len(failures) == num_requests:
            raise RuntimeError(f"{message}. The verifier works on no prompt: correct it, then start again")
        logger.warning("%s", message)


def row_metrics(rows: list[Experience]) -> dict[str, float]:
    """Lengths, truncation, entropy, and how far the engine's log-probabilities are from the trainer's, of fresh rows.

    The entropy is the mean of ``-log p`` over sampled tokens, in nats: unbiased for that of the policy that sampled.
    So is ``engine_kl_mean`` for the KL divergence of the engine's policy from the trainer's, of a token (the k3
    estimator, http://joschu.net/blog/kl-approx.html, which is never negative).
    """
    if not rows:
        return {}
    tokens = sum(float(row.action_mask.sum()) for row in rows)
    surprise = -sum(float((row.action_log_probs * row.action_mask).sum()) for row in rows)
    metrics = {
        "rollout/entropy_mean": surprise / tokens,
        "rollout/response_length_mean": float(np.mean([row.action_mask.sum().item() for row in rows])),
        "rollout/truncated_frac": float(np.mean([row.truncated.item() for row in rows])),
    }
    if rows[0].rollout_log_probs is not None:
        gaps = torch.cat([(r.action_log_probs - r.rollout_log_probs)[r.action_mask.bool()] for r in rows])
        metrics["rollout/engine_log_prob_abs_diff_mean"] = float(gaps.abs().mean())
        metrics["rollout/engine_kl_mean"] = float((gaps.exp() - 1 - gaps).mean())
    return metrics


def method_name(settings: Settings) -> str:
    estimator = settings.upstream.algo.advantage.estimator
    base = {"group_norm": "grpo", "gae": "ppo"}.get(estimator, estimator)
    ext = settings.ext
    parts = {
        "pilot_commit": ext.pilot,
        "mopps": ext.mopps,
        "arpo": ext.success_replay,
        "popo": ext.fill,
        "aper": ext.replay,
    }
    names = [name for name, part in parts.items() if part is not None]
    if names:
        return "_".join(names if base == "grpo" else [*names, base])
    if ext.dapo is not None:
        return "dapo"
    if ext.groups is not None and ext.groups.ineffective == "drop":
        return "grpo_filter"
    return base
