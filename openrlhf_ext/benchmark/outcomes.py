"""One run directory as an outcome: its evaluation curve, and one number for everything else that is compared.

==================================  ================================================================================
accuracy_gain, accuracy_gain_se     last evaluation minus first, prompt by prompt
pass@k                              of the last evaluation, for every k it has
length, length_correct, _wrong      mean tokens per response of the last evaluation; of correct, of wrong ones
aes_base                            AES of the last evaluation against the first
effective_generated, _trained       share of groups with a spread of rewards; mean over steps
reward_variance_trained             population variance within a group; mean over trained groups, then over steps
gradient_rollouts                   trained rows with an advantage other than 0, for each generated rollout; replayed
                                    rows count each time, so that it can exceed the share of fresh ones, and 1
steps, rollouts, tokens             made in the whole run
step_s                              median seconds of a train step
startup_s, eval_s, wall_s           seconds of start-up, of all evaluations, of the whole run
distance, distance_relative         how far the parameters are from the start (L2); divided by their norm there
grad_norm                           mean over steps
entropy                             nats a token; mean over the last tenth of the steps
share_fresh, _filled, _replayed     of trained rows; mean over the steps that train
prompts_left                        in the pool and not excluded, after the last step
phase/<name>                        share of the time in train steps
fate/<name>                         share of the generated rollouts
==================================  ================================================================================

What a run did not measure is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from openrlhf_ext.evaluation import aes, paired_gain
from openrlhf_ext.prompt_pool import STATES
from openrlhf_ext.run_dir import read_eval_prompts, read_metrics


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One point of a run's curve: what had been spent, and the accuracy then. None: not measured.

    ``train_wall_s`` are seconds in train steps; ``wall_s`` are all since the command began.
    """

    step: int
    rollouts: int
    tokens: int | None
    train_wall_s: float | None
    wall_s: float | None
    accuracy: float
    accuracy_se: float | None


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The evaluations of a run in order, the first before any training, and its figures by name (see above)."""

    curve: tuple[Evaluation, ...]
    figures: Mapping[str, float]


def read_outcome(run_dir: Path) -> RunOutcome:
    """The outcome of a run so far.

    Raises:
        ValueError: no evaluation before the first rollout or none after it, one that does not say after how many
            rollouts, or two lines of a kind for one step.
    """
    train, evals = (_rows(run_dir, kind) for kind in ("train", "eval"))
    evals = [row for row in evals if row.get("eval/accuracy") is not None]
    curve = _curve(run_dir, evals)
    first, last = evals[0], evals[-1]
    by_prompt = read_eval_prompts(run_dir)
    gain, gain_se = paired_gain(by_prompt.get(first["step"], {}), by_prompt.get(last["step"], {}))
    summary, ledger = _json(run_dir / "summary.json"), _json(run_dir / "ledger.json")
    figures = {
        "accuracy_gain": gain,
        "accuracy_gain_se": gain_se,
        "startup_s": summary.get("startup_s"),
        "wall_s": summary.get("wall_s"),
        **_last_evaluation(first, last),
        **_training(train),
        "eval_s": _total(evals, "timing/eval"),
        **_fates(ledger),
    }
    return RunOutcome(curve, {name: x for name, x in figures.items() if x is not None and math.isfinite(x)})


def smoothed(accuracies: Sequence[float], window: int = 3) -> list[float]:
    """Centered running mean over ``window`` (odd) values; at both ends the mean of those that exist. 1: unchanged."""
    half = window // 2
    return [float(np.mean(accuracies[max(0, i - half) : i + half + 1])) for i in range(len(accuracies))]


def first_at(curve: Sequence[Evaluation], target: float, window: int = 3) -> Evaluation | None:
    """The first evaluation whose smoothed accuracy is at least ``target``; None when none is.

    Nothing is interpolated or extrapolated, so what a target costs is known to one distance between evaluations.
    Smoothing takes the evaluation after into account, too, and at the last one the one before alone. The first,
    before any training, counts by its own accuracy: what was learned later is not free.
    """
    accuracies = [curve[0].accuracy, *smoothed([point.accuracy for point in curve], window)[1:]]
    return next((point for point, accuracy in zip(curve, accuracies, strict=True) if accuracy >= target), None)


def accuracy_at_seconds(curve: Sequence[Evaluation], seconds: float) -> float | None:
    """Accuracy after ``seconds`` in train steps, linear between evaluations; None beyond the last or unmeasured."""
    times = [point.train_wall_s for point in curve]
    if None in times or seconds > times[-1]:
        return None
    return float(np.interp(seconds, times, [point.accuracy for point in curve]))


def _rows(run_dir: Path, kind: str) -> list[dict]:
    """The lines of one kind in order of steps."""
    rows = sorted(read_metrics(run_dir, kind), key=lambda row: row["step"])
    for row, following in zip(rows, rows[1:], strict=False):
        if row["step"] == following["step"]:
            raise ValueError(
                f"{run_dir.name}/metrics.jsonl: two {kind} lines for step {row['step']}; "
                "two runs wrote to one folder: make the run again"
            )
    return rows


def _curve(run_dir: Path, rows: Sequence[dict]) -> tuple[Evaluation, ...]:
    where = f"{run_dir.name}/metrics.jsonl"
    for row in rows:
        if row.get("budget/rollouts_generated") is None:
            raise ValueError(f"{where}: the evaluation at step {row['step']} has no budget/rollouts_generated")
    if not rows or rows[0]["budget/rollouts_generated"] > 0:
        raise ValueError(f"{where}: no evaluation before the first rollout; run with --ext.eval.at_start")
    if rows[-1]["budget/rollouts_generated"] == 0:
        raise ValueError(f"{where}: no evaluation after the first rollout; set --eval.steps or train longer")
    return tuple(
        Evaluation(
            step=row["step"],
            rollouts=row["budget/rollouts_generated"],
            tokens=row.get("budget/tokens_generated"),
            train_wall_s=row.get("train_wall_s"),
            wall_s=row.get("wall_s"),
            accuracy=row["eval/accuracy"],
            accuracy_se=row.get("eval/accuracy_se"),
        )
        for row in rows
    )


def _last_evaluation(first: dict, last: dict) -> dict[str, float | None]:
    length = "eval/response_length_mean"
    base = (first["eval/accuracy"], first.get(length))
    return {
        **{key.removeprefix("eval/"): x for key, x in last.items() if key.startswith("eval/pass@")},
        "length": last.get(length),
        "length_correct": last.get("eval/response_length_correct_mean"),
        "length_wrong": last.get("eval/response_length_wrong_mean"),
        "aes_base": aes(last["eval/accuracy"], last[length], *base) if all(base) and last.get(length) else None,
        "distance": last.get("policy/distance"),
        "distance_relative": last.get("policy/distance_relative"),
    }


_PROMPTS_LEFT = {f"pool/num_{state}" for state in STATES if state != "excluded"}


def _training(rows: Sequence[dict]) -> dict[str, float | None]:
    if not rows:
        return {}
    seconds = _values(rows, "timing/step_total")
    shares = [row for row in rows if any(key.startswith("rows/share_") for key in row)]
    rollouts, gradient = rows[-1].get("budget/rollouts_generated"), _total(rows, "step/num_gradient_rollouts")
    entropies = _values(rows, "rollout/entropy_mean")
    left = [count for key, count in rows[-1].items() if key in _PROMPTS_LEFT]
    phases = sorted({key for row in rows for key in row if key.startswith("timing/")} - {"timing/step_total"})
    return {
        "effective_generated": _mean(_values(rows, "groups/effective_frac_generated")),
        "effective_trained": _mean(_values(rows, "groups/effective_frac_trained")),
        "reward_variance_trained": _mean(_values(rows, "groups/reward_variance_mean_trained")),
        "gradient_rollouts": gradient / rollouts if gradient is not None and rollouts else None,
        "steps": rows[-1]["step"],
        "rollouts": rollouts,
        "tokens": rows[-1].get("budget/tokens_generated"),
        "step_s": float(np.median(seconds)) if seconds else None,
        "grad_norm": _mean(_values(rows, "train/actor_grad_norm")),
        "entropy": _mean(entropies[-math.ceil(len(entropies) / 10) :]),
        **{
            f"share_{origin}": _mean([row.get(f"rows/share_{origin}", 0.0) for row in shares])
            for origin in ("fresh", "filled", "replayed")
        },
        "prompts_left": sum(left) if left else None,
        **{
            f"phase/{key.removeprefix('timing/')}": sum(_values(rows, key)) / sum(seconds) for key in phases if seconds
        },
    }


def _fates(ledger: dict) -> dict[str, float]:
    generated = ledger.get("generated")
    places = {**ledger.get("fates", {}), "waiting": ledger.get("waiting", 0)}
    return {f"fate/{name}": count / generated for name, count in places.items() if count} if generated else {}


def _values(rows: Sequence[dict], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _total(rows: Sequence[dict], key: str) -> float | None:
    values = _values(rows, key)
    return sum(values) if values else None


def _json(path: Path) -> dict:
    return json.loads(path.read_text("utf-8")) if path.exists() else {}
