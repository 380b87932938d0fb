"""Countdown in words: 1 for a right expression in `<answer>` tags, 0.1 for another answer in tags, else 0 (TinyZero).

An OpenRLHF reward file: `--reward.remote_url openrlhf_ext/rewards/countdown_words.py`. The score, by which accuracy is
reported, is 1 or 0.
"""

from openrlhf_ext.rewards.response import extract_response
from openrlhf_ext.tasks.countdown import parse_label
from openrlhf_ext.tasks.countdown_words import grade_response

FORMAT_REWARD = 0.1


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, float | dict[str, float]]:
    """Grade one rollout; OpenRLHF 0.11 passes them one at a time.

    Raises:
        ValueError: more than one rollout, a malformed label, or a query that does not start with its prompt.
    """
    (query,), (prompt,), (label,) = queries, prompts, labels
    puzzle = parse_label(label)
    result = grade_response(extract_response(query, prompt), puzzle.numbers, puzzle.target)
    logs = {"accuracy": result.accuracy, "format": result.format}
    return {
        "rewards": max(result.accuracy, FORMAT_REWARD * result.format),
        "scores": result.accuracy,
        "extra_logs": logs,
    }
