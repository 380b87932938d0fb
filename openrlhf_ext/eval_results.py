"""What an evaluation found: grading, metrics of each set, the file they are kept in, and the table.

The file is JSON: ``settings``, then ``sets`` by name, each with its metrics and the accuracy of each row by its line,
then the metrics' ``mean`` over sets, each set counting the same. It is written anew after every set.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from openrlhf_ext.eval_sets import EvalSet
from openrlhf_ext.evaluation import accuracy_by_prompt, aes, evaluate_groups
from openrlhf_ext.rewards.pool import RewardPool
from openrlhf_ext.rewards.result import RewardFailure, RewardValues, check_reward
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

Results = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Response:
    """One sampled response."""

    text: str
    """Special tokens included, as a reward file gets it in training."""
    num_tokens: int
    is_truncated: bool
    """Ended by the limit of tokens, not by the model."""


@dataclass(frozen=True, slots=True)
class Graded:
    """The graded responses of a set, a group for each row, and how many calls of the reward file failed, by kind."""

    groups: Sequence[RolloutGroup[Response]]
    failures: Mapping[str, int]
    first_failure: RewardFailure | None


def grade(
    pool: RewardPool, eval_set: EvalSet, prompts: Sequence[str], responses: Sequence[Sequence[Response]], workers: int
) -> Graded:
    """Grade all responses, ``workers`` at a time. A call of the reward file that fails counts as a wrong answer.

    Args:
        prompts: the text of each row as the model got it.
        responses: (rows, n).
    """
    jobs = [
        (prompt, row.label, response)
        for row, prompt, group in zip(eval_set.rows, prompts, responses, strict=True)
        for response in group
    ]

    def call(job: tuple[str, object, Response]) -> RewardValues | RewardFailure:
        prompt, label, response = job
        return check_reward(pool([prompt + response.text], [prompt], [label]), pool.path)

    with ThreadPoolExecutor(workers) as threads:
        graded = list(tqdm(threads.map(call, jobs), total=len(jobs), desc=f"{eval_set.name}: grade", leave=False))
    failures = [values for values in graded if isinstance(values, RewardFailure)]
    found = iter(graded)
    groups = [
        RolloutGroup(
            str(row.line),
            Prompt(str(row.line), prompt, row.label),
            tuple(_rollout(next(found), response) for response in group),
            policy_version=0,
        )
        for row, prompt, group in zip(eval_set.rows, prompts, responses, strict=True)
    ]
    return Graded(groups, Counter(failure.kind for failure in failures), failures[0] if failures else None)


def _rollout(values: RewardValues | RewardFailure, response: Response) -> Rollout[Response]:
    if isinstance(values, RewardFailure):
        return Rollout(0.0, 0.0, response.num_tokens, response)
    return Rollout(values.reward, values.score, response.num_tokens, response)


def set_result(eval_set: EvalSet, graded: Graded, pass_at: Sequence[int]) -> Results:
    """The entry of one set in the results."""
    metrics = evaluate_groups(graded.groups, pass_at=pass_at, correct_at=1.0)
    responses = [rollout.payload for group in graded.groups for rollout in group.rollouts]
    return {
        "file": str(eval_set.path),
        "sha256": eval_set.sha256,
        "input_key": eval_set.input_key,
        "label_key": eval_set.label_key,
        "metrics": {
            **{name.removeprefix("eval/"): value for name, value in metrics.items()},
            "truncated_frac": sum(response.is_truncated for response in responses) / len(responses),
        },
        "reward_failures": dict(graded.failures),
        "accuracy_by_line": accuracy_by_prompt(graded.groups, correct_at=1.0),
    }


def sample_rows(graded: Graded) -> list[dict[str, object]]:
    """Every response as a row of a samples file."""
    return [
        {
            "line": int(group.prompt.prompt_id),
            "prompt": group.prompt.text,
            "response": rollout.payload.text,
            "accuracy": rollout.accuracy,
            "num_tokens": rollout.num_tokens,
            "is_truncated": rollout.payload.is_truncated,
        }
        for group in graded.groups
        for rollout in group.rollouts
    ]


def read_results(path: Path) -> Results:
    """Raises ValueError where ``path`` holds no results."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the results {path} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a file that evaluate wrote with --out") from None
    if not isinstance(results, dict) or not {"settings", "sets"} <= results.keys():
        raise ValueError(f"{path} holds no results of evaluate; give a file that it wrote with --out")
    return results


def resume(path: Path, settings: Mapping[str, object], sets: Sequence[EvalSet]) -> Results:
    """The results so far in ``path``, empty where there is no such file.

    Raises:
        ValueError: it holds results of other settings, or of another file under the name of one of ``sets``.
    """
    if not path.exists():
        return {"settings": dict(settings), "sets": {}}
    results = read_results(path)
    for name, value in settings.items():
        if results["settings"].get(name) != value:
            raise ValueError(
                f"{path} holds results with {name} {results['settings'].get(name)!r}, not {value!r}; "
                "give another --out or remove it"
            )
    check_same_data(results, path, [eval_set for eval_set in sets if eval_set.name in results["sets"]])
    return results


def check_same_data(results: Results, path: Path, sets: Sequence[EvalSet]) -> None:
    """Raises ValueError unless ``results``, read from ``path``, has all of ``sets`` with the same rows."""
    for eval_set in sets:
        known = results["sets"].get(eval_set.name)
        if known is None:
            raise ValueError(f"{path} has no set {eval_set.name}; it has {', '.join(results['sets']) or 'none'}")
        if known["sha256"] != eval_set.sha256 or len(known["accuracy_by_line"]) != len(eval_set.rows):
            raise ValueError(
                f"{path} holds results of another {eval_set.name} ({known['file']}, {len(known['accuracy_by_line'])} "
                f"rows) than {eval_set.path} ({len(eval_set.rows)} rows); give the same file and --limit, or another "
                "results file"
            )


def complete(results: Results, base: Results | None, *, alpha: float, beta: float, gamma: float) -> None:
    """Add to ``results`` the mean over sets and, with ``base``, the AES of each set and of the mean.

    Means are over the metrics that all sets have. AES is None where the base has no right answer; that of the mean is
    over the sets that both have.
    """
    results["mean"] = _mean(results, results["sets"])
    if base is None:
        return
    constants = {"alpha": alpha, "beta": beta, "gamma": gamma}
    common = [name for name in results["sets"] if name in base["sets"]]
    results["aes"] = {
        "constants": constants,
        "base_model": base["settings"].get("model"),
        "sets": {name: _aes(_mean(results, [name]), _mean(base, [name]), constants) for name in common},
        "mean": _aes(_mean(results, common), _mean(base, common), constants),
    }


def _mean(results: Results, names: Sequence[str] | Mapping[str, object]) -> dict[str, float]:
    rows = [results["sets"][name]["metrics"] for name in names]
    # Counts have no use for a mean, and the standard error of a mean is not the mean of standard errors.
    kept = [key for key in rows[0] if not (key.startswith("num_") or key.endswith("_se"))]
    shared = [key for key in kept if all(key in row for row in rows)]
    return {key: sum(row[key] for row in rows) / len(rows) for key in shared}


def _aes(metrics: Mapping[str, float], base: Mapping[str, float], constants: Mapping[str, float]) -> float | None:
    if base["accuracy"] == 0:
        return None
    figures = (metrics["accuracy"], metrics["response_length_mean"], base["accuracy"], base["response_length_mean"])
    return aes(*figures, **constants)


def write_results(path: Path, results: Results) -> None:
    """Replace ``path`` as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def render(results: Results) -> str:
    """A line for each set and, with several, for their mean; a dash where a figure does not exist."""
    ks = [name for name in next(iter(results["sets"].values()))["metrics"] if name.startswith("pass@")]
    lengths = ("response_length_mean", "response_length_correct_mean", "response_length_wrong_mean")
    columns = ["num_prompts", "accuracy", "accuracy_se", *ks, *lengths, "truncated_frac"]
    heads = ["prompts", "accuracy", "+-", *ks, "tokens", "correct", "wrong", "truncated"]
    scores = results.get("aes")
    table = [["set", *heads, *(["AES"] if scores else [])]]
    rows = {name: entry["metrics"] for name, entry in results["sets"].items()}
    if len(rows) > 1:
        rows["mean"] = results["mean"]
    for index, (name, metrics) in enumerate(rows.items()):
        is_mean = index == len(results["sets"])
        cells = [name, *(_cell(column, metrics.get(column)) for column in columns)]
        if scores:
            cells.append(_cell("aes", scores["mean"] if is_mean else scores["sets"].get(name)))
        table.append(cells)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in table
    )


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column == "num_prompts":
        return f"{value:.0f}"
    if column == "aes":
        return f"{value:+.3f}"
    return f"{value:.1f}" if column.startswith("response_length") else f"{value:.3f}"
