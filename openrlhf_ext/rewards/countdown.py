"""Countdown reward: 1 for a right expression, else 0; whether it is well-formed is logged beside it.

An OpenRLHF reward file: `--reward.remote_url openrlhf_ext/rewards/countdown.py`.
"""

from openrlhf_ext.rewards.response import extract_response
from openrlhf_ext.tasks.countdown import grade, parse_label


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, float | dict[str, float]]:
    """Grade one rollout; OpenRLHF 0.11 passes them one at a time and needs plain numbers back.

    Raises:
        ValueError: more than one rollout, a malformed label, or a query that does not start with its prompt.
    """
    (query,), (prompt,), (label,) = queries, prompts, labels
    puzzle = parse_label(label)
    result = grade(extract_response(query, prompt), puzzle.numbers, puzzle.target)
    logs = {"accuracy": result.accuracy, "format": result.format}
    return {"rewards": result.accuracy, "scores": result.accuracy, "extra_logs": logs}
