"""Geometry3k reward: 1 for the right answer, 0.1 for a wrong one in the form that was asked for, else 0.

An OpenRLHF reward file: `--reward.remote_url openrlhf_ext/rewards/geometry3k.py`. These are the rewards of the code of
POPO's authors (MoPPS and DPS). The answer is graded as in `math.py`, which needs `pip install math-verify`.
"""

import re

from openrlhf_ext.rewards import math
from openrlhf_ext.rewards.response import extract_response

_FORMAT_REWARD = 0.1
_FORM = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
"""As verl's reward for this data set has it."""


def reward_func(queries: list[str], prompts: list[str], labels: list[object]) -> dict[str, float | dict[str, float]]:
    """Grade one rollout; OpenRLHF 0.11 passes them one at a time.

    Raises:
        ValueError: more than one rollout, a label without an answer, or a query that does not start with its prompt.
    """
    accuracy = math.reward_func(queries, prompts, labels)["scores"]
    has_form = float(_FORM.fullmatch(extract_response(queries[0], prompts[0])) is not None)
    logs = {"accuracy": accuracy, "format": has_form}
    return {"rewards": accuracy or _FORMAT_REWARD * has_form, "scores": accuracy, "extra_logs": logs}
