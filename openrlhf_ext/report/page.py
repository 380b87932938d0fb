"""The page: tables, plots, settings and samples in one HTML file that opens offline."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jinja2 import Environment, PackageLoader
from markdown_it import MarkdownIt
from markupsafe import Markup

from openrlhf_ext.report.curves import Curve, group_runs, mean_accuracies
from openrlhf_ext.report.panels import Plot
from openrlhf_ext.report.runs import Run, config_differences, read_runs, read_samples
from openrlhf_ext.report.sections import HOW_TO_READ, SECTIONS

_DPI = 150
_NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class _Image:
    plot: Plot
    data: str | None


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write ``report.html`` and ``plots/*.png`` for run directories and suite folders.

    Args:
        out: where to; by default ``report`` in the folder, if it is one, else ``runs/report``.

    Returns:
        The path of the page.

    Raises:
        ValueError: a folder is neither a run's nor a suite's, or a file in it cannot be read.
    """
    runs, suites = read_runs(folders)
    out = out or (folders[0] / "report" if len(folders) == 1 else Path("runs/report"))
    (out / "plots").mkdir(parents=True, exist_ok=True)
    curves = group_runs(runs)
    accuracies, grid_end = mean_accuracies(runs)
    base = next((run for run in runs if run.method == "grpo" and run.config), runs[0])
    environment = Environment(
        loader=PackageLoader("openrlhf_ext.report", ""), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["show"] = _show
    html = environment.get_template("page.html.jinja").render(
        suites=[(suite.name, _markdown(suite.results)) for suite in suites],
        columns=["run", "method", "lr", "seed", "status", "steps", "rollouts", "mean accuracy"]
        + ["first accuracy", "last accuracy", "step seconds", "train seconds"],
        table=[_row(run, accuracies.get(run.label)) for run in runs],
        grid_end=grid_end,
        how_to_read=HOW_TO_READ,
        errors=[run for run in runs if run.error],
        sections={
            title: [_save(spec.draw(curves), out / "plots") for spec in specs] for title, specs in SECTIONS.items()
        },
        base=base,
        differences=[(run, config_differences(run, base)) for run in runs if run is not base],
        samples=[(curve, read_samples(_shown_run(curve))) for curve in curves],
        shown_run=_shown_run,
    )
    page = out / "report.html"
    page.write_text(visible(html), encoding="utf-8")
    return page


def visible(text: str) -> str:
    """``text`` with control characters, direction overrides and lone surrogates as escapes, so that UTF-8 can hold it.

    Line feeds and tabs stay.
    """
    return _NOT_TEXT.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _markdown(text: str | None) -> Markup | None:
    """Markdown with tables as HTML; HTML in it is shown as text."""
    return None if text is None else Markup(MarkdownIt("commonmark", {"html": False}).enable("table").render(text))


def _save(plot: Plot, folder: Path) -> _Image:
    """Write the plot's file, or remove the one of an earlier report where there is no plot any more."""
    file = folder / f"{plot.name}.png"
    if plot.figure is None:
        file.unlink(missing_ok=True)
        return _Image(plot, None)
    buffer = io.BytesIO()
    plot.figure.savefig(buffer, dpi=_DPI, metadata={"Software": None})
    file.write_bytes(buffer.getvalue())
    return _Image(plot, base64.b64encode(buffer.getvalue()).decode("ascii"))


def _row(run: Run, mean_accuracy: float | None) -> list[object]:
    """The run's line in the table; None where there is nothing to tell."""
    accuracy = run.series("eval", "step", "eval/accuracy")[1].tolist()
    seconds = run.step_seconds().get("step_total")
    return [
        *(run.label, run.method, run.lr, run.seed, run.status),
        *(max((row["step"] for row in run.train), default=None), run.last("budget/rollouts_generated")),
        *(mean_accuracy, accuracy[0] if accuracy else None, accuracy[-1] if accuracy else None),
        *(float(np.median(seconds)) if seconds else None, run.last("train_wall_s")),
    ]


def _shown_run(curve: Curve) -> Run:
    """The run whose samples stand for its curve."""
    return curve.members[0]


def _show(value: object) -> str:
    """A dash for what is missing; floats with three digits, or as they are written where that would say 0."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:g}" if 0 < abs(value) < 0.01 else f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str(value)
