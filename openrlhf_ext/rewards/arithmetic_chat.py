"""Reward of the arithmetic chats: 1 for a right expression or number, else 0; whether it is well-formed is logged.

An OpenRLHF reward file for data written by `scripts/prepare_data.py arithmetic_chat`.
"""

from openrlhf_ext.rewards.response import extract_response
from openrlhf_ext.tasks.arithmetic_chat import grade_response


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, float | dict[str, float]]:
    """Grade one rollout; OpenRLHF 0.11 passes them one at a time.

    Raises:
        ValueError: more than one rollout, a malformed label, or a query that does not start with its prompt.
    """
    (query,), (prompt,), (label,) = queries, prompts, labels
    result = grade_response(extract_response(query, prompt), label)
    logs = {"accuracy": result.accuracy, "format": result.format}
    return {"rewards": result.accuracy, "scores": result.accuracy, "extra_logs": logs}
