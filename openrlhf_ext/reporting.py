"""What a run shows while it goes on and leaves behind: progress bar, run directory, trackers, summary."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
from tqdm import tqdm

from openrlhf_ext.evaluation import paired_gain
from openrlhf_ext.ledger import RolloutLedger
from openrlhf_ext.run_dir import RunDirectory, read_eval_prompts, read_metrics
from openrlhf_ext.trackers import Tracker


class RunReporter:
    """Writes every figure of a run to all of its places.

    Args:
        run_dir: where the files go.
        max_steps: train steps of the whole run.
        started: when the command started (``time.time()``), so that start-up counts in ``wall_s``.
    """

    def __init__(self, run_dir: RunDirectory, *, max_steps: int, started: float) -> None:
        self.train_seconds = 0.0
        """Seconds in train steps so far; without start-up, evaluation and checkpoints."""
        self.num_skipped_rows = 0
        """Rows of the prompt files that were left out (``--ext.data.on_bad_row skip``)."""
        self._run_dir = run_dir
        self._max_steps = max_steps
        self._started, self._earlier_seconds = started, 0.0
        self._startup_seconds = math.nan
        self._trackers: Sequence[Tracker] = ()
        self._bar: tqdm | None = None
        self._accuracy: float | None = None

    def state_dict(self) -> dict[str, object]:
        """Seconds so far, of all attempts."""
        return {"train_seconds": self.train_seconds, "wall_seconds": self._wall_seconds()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Count on from an earlier attempt; what it did after the checkpoint is lost, its seconds too."""
        self.train_seconds, self._earlier_seconds = state["train_seconds"], state["wall_seconds"]

    def _wall_seconds(self) -> float:
        return self._earlier_seconds + time.time() - self._started

    def open(self, trackers: Sequence[Tracker], *, start: int) -> None:
        """Start reporting, after step ``start`` of an earlier attempt (0: a fresh run)."""
        self._trackers = trackers
        self._startup_seconds = time.time() - self._started
        self._bar = tqdm(total=self._max_steps, initial=start, unit="step", desc="train", dynamic_ncols=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        for tracker in self._trackers:
            tracker.close()

    def generation(self, done: int, total: int) -> None:
        """Show progress inside a step, which may take many minutes."""
        if self._bar is not None:
            self._bar.set_description(f"generate {done}/{total}", refresh=False)
            self._bar.update(0)  # redraws at most ten times a second

    def train_step(self, step: int, metrics: Mapping[str, float], ledger: RolloutLedger) -> None:
        """One finished train step; the ledger must balance."""
        self.train_seconds += metrics["timing/step_total"]
        self._log("train", step, metrics)
        self._run_dir.write_json("ledger.json", ledger.as_dict())
        shown: dict[str, object] = {"rollouts": metrics["budget/rollouts_generated"]}
        if "groups/reward_mean_generated" in metrics:
            shown["reward"] = f"{metrics['groups/reward_mean_generated']:.3f}"
            shown["effective"] = f"{metrics['groups/effective_frac_generated']:.2f}"
        if self._accuracy is not None:
            shown["accuracy"] = f"{self._accuracy:.3f}"
        self._describe()
        self._bar.set_postfix(shown, refresh=False)  # type: ignore[union-attr]
        self._bar.update(1)  # type: ignore[union-attr]

    def evaluation(self, step: int, metrics: Mapping[str, float], by_prompt: Mapping[str, float]) -> None:
        """One evaluation: its metrics, and the accuracy of every prompt for paired comparisons."""
        self._run_dir.log_eval_prompts(step, by_prompt)
        self._accuracy = metrics.get("eval/accuracy")
        self._log("eval", step, metrics)
        self._describe()

    def summary(self, *, method: str, seed: int, ledger: RolloutLedger, steps: int, ended: str | None = None) -> None:
        """Write summary.json: the outcome from the run's own metrics, so that a resumed run sums up all of it.

        Args:
            steps: train steps that were made.
            ended: why those are fewer than planned, if they are.
        """
        budget = ledger.as_dict()
        evaluations = {row["step"]: row for row in read_metrics(self._run_dir.path, "eval")}
        rows = read_metrics(self._run_dir.path, "train")
        phases = sorted({key for row in rows for key in row if key.startswith("timing/")})
        summary: dict[str, object] = {
            "method": method,
            "steps": steps,
            "ended": ended,
            "seed": seed,
            "rollouts_generated": budget["generated"],
            "tokens_generated": budget["tokens"],
            "prompt_rows_skipped": self.num_skipped_rows,
            "startup_s": self._startup_seconds,
            "wall_s": self._wall_seconds(),
            "train_wall_s": self.train_seconds,
            "step_seconds_median": {
                key.removeprefix("timing/"): float(np.median([row[key] for row in rows if key in row]))
                for key in phases
            },
        }
        for when, step in (("before", 0), ("after", steps)):
            metrics = evaluations.get(step, {})
            summary[f"accuracy_{when}"] = metrics.get("eval/accuracy")
            summary[f"accuracy_se_{when}"] = metrics.get("eval/accuracy_se")
            summary["eval_samples"] = metrics.get("eval/num_samples")
        by_prompt = read_eval_prompts(self._run_dir.path)
        gain, gain_se = paired_gain(by_prompt.get(0, {}), by_prompt.get(steps, {}))
        self._run_dir.write_json("summary.json", {**summary, "accuracy_gain": gain, "accuracy_gain_se": gain_se})

    def _describe(self) -> None:
        if self._bar is not None:
            self._bar.set_description("train", refresh=False)

    def _log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        timed = {"wall_s": self._wall_seconds(), "train_wall_s": self.train_seconds, **metrics}
        self._run_dir.log(kind, step, timed)
        for tracker in self._trackers:
            tracker.log(step, {key: value for key, value in timed.items() if value is not None})


class StepClock:
    """Wall-clock seconds of the phases of one step."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """End a phase that began where the last one ended."""
        now = time.perf_counter()
        self._laps[f"timing/{phase}"] = now - self._last
        self._last = now

    def metrics(self) -> dict[str, float]:
        """The phases, the rest, and ``timing/step_total``; evaluation and checkpoints are not in it."""
        total = time.perf_counter() - self._start
        return {**self._laps, "timing/other": total - sum(self._laps.values()), "timing/step_total": total}
