"""Kinds of plots. Every method keeps one color and dash pattern in all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from openrlhf_ext.report.curves import MAX_POINTS, Curve, seed_band, thin
from openrlhf_ext.report.runs import Run

TRAIN_POINTS = 60
"""Most points of a line of train steps, which are noisy; each is a mean over neighboring steps."""

# Okabe and Ito's palette without yellow, too light for lines on white, and three darker colors.
_PALETTE = (
    *("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    *("#882255", "#777711", "#8C8C8C"),
)
_KNOWN_METHODS = (
    *("grpo", "dapo", "popo", "pilot_commit", "aper", "combined", "mopps", "arpo", "grpo_filter"),
    *("naive_replay", "naive_replay_pool"),
)
_DASHES = ("-", "--", "-.", ":")

_WIDTH = 11.2  # inches, 1,120 pixels on the page
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot and what stands around it. ``figure`` is None where no run has the metrics, which ``notes`` name."""

    name: str
    title: str
    caption: str
    figure: Figure | None
    notes: list[str]


@dataclass(frozen=True, slots=True)
class Lines:
    """Metrics against ``x``: a row of panels for each metric, a column for each learning rate.

    ``metrics`` gives the label of the y axis for each metric of the lines of kind ``kind`` (``train``, ``eval``).
    ``error`` names the metric that is the band of a single run.
    """

    name: str
    title: str
    caption: str
    metrics: Mapping[str, str]
    kind: str = "train"
    x: str = "step"
    x_label: str = "train steps"
    error: str | None = None

    def draw(self, curves: Sequence[Curve]) -> Plot:
        styles = method_styles(curve.method for curve in curves)
        drawn = [key for key in self.metrics if any(self._has(run, key) for run in _runs(curves))]
        notes = [
            note for key in self.metrics for note in _notes(curves, key, lambda run, key=key: self._has(run, key))
        ]
        rates = sorted({curve.lr for curve in curves}, key=lambda lr: (lr is None, lr))
        figure = None
        if drawn:
            with rc_context(_STYLE):
                figure = Figure(figsize=(_WIDTH, 1.0 + (2.6 if len(drawn) > 1 else 3.6) * len(drawn)))
                panels = figure.subplots(len(drawn), len(rates), squeeze=False, sharex=True, sharey="row")
                for row, key in zip(panels, drawn, strict=True):
                    row[0].set_ylabel(self.metrics[key])
                    for axes, lr in zip(row, rates, strict=True):
                        for curve in curves:
                            if curve.lr == lr:
                                self._draw_curve(axes, curve, key, styles[curve.method])
                for axes, lr in zip(panels[0], rates, strict=True):
                    axes.set_title("learning rate not recorded" if lr is None else f"learning rate {lr:g}")
                for axes in panels[-1]:
                    axes.set_xlabel(self.x_label)
                _legend(figure, panels.flat)
        return Plot(self.name, self.title, self.caption, figure, notes)

    def _has(self, run: Run, key: str) -> bool:
        return run.series(self.kind, self.x, key).shape[1] > 0

    def _draw_curve(self, axes: Axes, curve: Curve, key: str, style: dict[str, str]) -> None:
        max_points = TRAIN_POINTS if self.kind == "train" else MAX_POINTS
        members = [run for run in curve.members if self._has(run, key)]
        band = seed_band([run.series(self.kind, self.x, key) for run in members], max_points)
        if band is not None:
            low, high = band.low, band.high
            if len(members) == 1 and self.error is not None:
                error = members[0].series(self.kind, self.x, self.error)[1]
                if len(error) == len(band.x):  # every point has one, and none were put together
                    low, high = band.mean - error, band.mean + error
            marker = "o" if self.kind == "eval" and len(band.x) <= 40 else ""
            axes.plot(band.x, band.mean, label=curve.method, lw=1.8, marker=marker, ms=3.5, **style)
            axes.fill_between(band.x, low, high, color=style["color"], alpha=0.15, lw=0)
        for run in curve.others:
            series = thin(run.series(self.kind, self.x, key), max_points)
            axes.plot(*series, color=style["color"], lw=1, ls=":", marker="o" if series.shape[1] == 1 else "", ms=3)


@dataclass(frozen=True, slots=True)
class Stack:
    """Metrics that add up, stacked over train steps: a panel for each method, the mean over its runs.

    ``metrics`` gives the name in the legend for each metric; one that a line does not have counts as 0. ``family``
    stands for all of them in notes.
    """

    name: str
    title: str
    caption: str
    y_label: str
    family: str
    metrics: Mapping[str, str]
    colors: Sequence[str]

    def draw(self, curves: Sequence[Curve]) -> Plot:
        notes = _notes(curves, self.family, self._has)
        by_method = _by_method(curves, self._has)
        figure = None
        if by_method:
            with rc_context(_STYLE):
                figure, panels = _grid(len(by_method))
                for axes, (method, runs) in zip(panels, by_method.items(), strict=False):
                    self._draw_method(axes, method, runs)
                _legend(figure, panels)
        return Plot(self.name, self.title, self.caption, figure, notes)

    def _has(self, run: Run) -> bool:
        return any(key in row for row in run.train for key in self.metrics)

    def _draw_method(self, axes: Axes, method: str, runs: Sequence[Run]) -> None:
        heights = {}
        for key in self.metrics:
            band = seed_band(
                [np.array([[row["step"], row.get(key) or 0.0] for row in run.train]).T for run in runs], TRAIN_POINTS
            )
            if band is not None and band.mean.any():
                heights[key] = band
        if heights:
            colors = dict(zip(self.metrics, self.colors, strict=False))
            axes.stackplot(
                next(iter(heights.values())).x,
                [band.mean for band in heights.values()],
                labels=[self.metrics[key] for key in heights],
                colors=[colors[key] for key in heights],
            )
        axes.set(title=method, xlabel="train steps", ylabel=self.y_label)
        axes.margins(x=0)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Median seconds of every phase of a step, stacked: a bar for each method."""

    name: str
    title: str
    caption: str
    colors: Sequence[str]

    def draw(self, curves: Sequence[Curve]) -> Plot:
        notes = _notes(curves, "timing/<phase>", lambda run: bool(run.step_seconds()))
        by_method = _by_method(curves, lambda run: bool(run.step_seconds()))
        figure = None
        if by_method:
            with rc_context(_STYLE):
                figure = Figure(figsize=(_WIDTH, 1.2 + 0.4 * len(by_method)))
                axes = figure.subplots()
                self._draw_bars(axes, by_method)
                _legend(figure, [axes])
        return Plot(self.name, self.title, self.caption, figure, notes)

    def _draw_bars(self, axes: Axes, by_method: Mapping[str, Sequence[Run]]) -> None:
        medians = [_median_seconds(runs) for runs in by_method.values()]
        phases = list(dict.fromkeys(phase for one in medians for phase in one if phase != "step_total"))
        left = np.zeros(len(medians))
        for i, phase in enumerate(phases):
            widths = np.array([one.get(phase, 0.0) for one in medians])
            axes.barh(list(by_method), widths, left=left, label=phase, color=self.colors[i % len(self.colors)])
            left += widths
        totals = [one.get("step_total", np.nan) for one in medians]
        axes.plot(totals, list(by_method), "k|", ms=16, mew=1.5, label="whole step")
        axes.invert_yaxis()
        axes.set_xlabel("seconds a step (median)")


def method_styles(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    """Color and dash pattern by method: those of known methods are the same on every page, others follow by name."""
    order = [*_KNOWN_METHODS, *sorted(set(methods) - set(_KNOWN_METHODS))]
    size = len(_PALETTE)
    return {
        method: {"color": _PALETTE[i % size], "ls": _DASHES[i // size % len(_DASHES)]}
        for i, method in enumerate(order)
    }


def _median_seconds(runs: Sequence[Run]) -> dict[str, float]:
    pooled: dict[str, list[float]] = {}
    for run in runs:
        for phase, seconds in run.step_seconds().items():
            pooled.setdefault(phase, []).extend(seconds)
    return {phase: float(np.median(seconds)) for phase, seconds in pooled.items()}


def _runs(curves: Sequence[Curve]) -> list[Run]:
    """All runs that have written anything: one that has not begun lacks no metric."""
    return [run for curve in curves for run in (*curve.members, *curve.others) if run.train or run.evals]


def _by_method(curves: Sequence[Curve], has: Callable[[Run], bool]) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {}
    for curve in curves:
        for run in filter(has, curve.members):
            runs.setdefault(run.method, []).append(run)
    return runs


def _notes(curves: Sequence[Curve], metric: str, has: Callable[[Run], bool]) -> list[str]:
    """A sentence on who lacks a metric, if anyone does: methods, and single runs of methods that have it."""
    having = {run.method for run in _runs(curves) if has(run)}
    if not having:
        return [f"Not plotted: no run here records {metric}."]
    lacking = [run.label if run.method in having else run.method for run in _runs(curves) if not has(run)]
    return [f"{metric} is not recorded by {', '.join(dict.fromkeys(lacking))}."] if lacking else []


def _grid(num_panels: int) -> tuple[Figure, list[Axes]]:
    columns = min(3, num_panels)
    rows = -(-num_panels // columns)
    figure = Figure(figsize=(_WIDTH, 0.8 + 2.7 * rows))
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[num_panels:]:
        axes.remove()
    return figure, panels[:num_panels]


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """One legend below all panels, each name once."""
    handles = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    rows = -(-len(handles) // 7)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=max(1, -(-len(handles) // max(1, rows)))
    )
