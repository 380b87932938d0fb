"""Mathematics reward: 1 for an answer that equals the reference answer, else 0; whether there is one is logged beside.

An OpenRLHF reward file: `--reward.remote_url openrlhf_ext/rewards/math.py`. Needs the package:
`pip install math-verify`. Answers that make it hang are why the pool that runs it kills late calls.
"""

import logging
import threading

from openrlhf_ext.rewards.response import extract_response
from openrlhf_ext.tasks.math_answers import grade

# It warns of every timeout.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# The first answer takes 0.2 s of CPU, for tables that are built then: no call's deadline shall pay for them. The
# engine loads this file too, in a thread, where math-verify refuses to work, and never calls it there.
if threading.current_thread() is threading.main_thread():
    grade(r"\boxed{\left(1, \frac{\pi}{2}\right)}", r"(1, \sqrt{2})")


def reward_func(queries: list[str], prompts: list[str], labels: list[object]) -> dict[str, float | dict[str, float]]:
    """Grade one rollout; OpenRLHF 0.11 passes them one at a time.

    Raises:
        ValueError: more than one rollout, a label without an answer, or a query that does not start with its prompt.
    """
    (query,), (prompt,), (label,) = queries, prompts, labels
    result = grade(extract_response(query, prompt), label)
    logs = {"accuracy": result.accuracy, "format": result.format}
    return {"rewards": result.accuracy, "scores": result.accuracy, "extra_logs": logs}
