"""Reward of reasoning-gym tasks, given by the task's own scorer, 0 to 1.

An OpenRLHF reward file for data written by `scripts/prepare_data.py reasoning_gym`, whose labels are the task's
entries (question, answer and metadata) as JSON strings. Needs the package: `pip install reasoning-gym`.
"""

import json
from collections.abc import Callable
from functools import lru_cache

from reasoning_gym import get_score_answer_fn

from openrlhf_ext.rewards.response import extract_response


def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, float]:
    """Score one rollout; OpenRLHF 0.11 passes them one at a time.

    Raises:
        ValueError: more than one rollout, a malformed label, or a query that does not start with its prompt.
    """
    (query,), (prompt,), (label,) = queries, prompts, labels
    try:
        entry = json.loads(label)
        score = _scorer(entry["metadata"]["source_dataset"])
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(
            f"The label {label!r} is not a reasoning-gym entry ({error}). "
            "Point data.label_key at the label column, or rebuild the data with scripts/prepare_data.py reasoning_gym."
        ) from error
    value = float(score(extract_response(query, prompt).strip(), entry))
    return {"rewards": value, "scores": value}


@lru_cache
def _scorer(task: str) -> Callable[[str, dict[str, object]], float]:
    return get_score_answer_fn(task)
