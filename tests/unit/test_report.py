"""The report: what it reads, what it averages, and a page that holds everything it shows."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from openrlhf_ext.cli.report import main
from openrlhf_ext.report import runs as runs_module
from openrlhf_ext.report.curves import group_runs, mean_accuracies, seed_band, thin
from openrlhf_ext.report.page import visible, write_report
from openrlhf_ext.report.panels import Lines, Stack, method_styles
from openrlhf_ext.report.runs import Run, config_differences, read_runs, read_samples
from openrlhf_ext.report.sections import SECTIONS


def evaluation(step: int, accuracy: float, **metrics: object) -> dict:
    return {
        "kind": "eval",
        "step": step,
        "train_wall_s": step / 2,
        "budget/rollouts_generated": 100 * step,
        "eval/accuracy": accuracy,
        "eval/accuracy_se": 0.01,
        **metrics,
    }


def train_step(step: int, **metrics: object) -> dict:
    return {
        "kind": "train",
        "step": step,
        "train_wall_s": step / 2,
        "budget/rollouts_generated": 100 * step,
        "timing/step_total": 0.5,
        "timing/generation": 0.3,
        "step/num_trained_fresh": 60,
        "step/num_surplus": 40,
        **metrics,
    }


def make_run(
    folder: Path,
    rows: list[dict] | None = None,
    *,
    summary: dict | None = None,
    config: str | None = None,
    samples: list[dict] | None = None,
    cut: str = "",
) -> Path:
    """A run folder with the given lines, or with two steps and two evaluations."""
    folder.mkdir(parents=True)
    rows = [evaluation(0, 0.2), train_step(1), train_step(2), evaluation(2, 0.4)] if rows is None else rows
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    if config is not None:
        (folder / "config.yaml").write_text(config)
    if samples is not None:
        (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return folder


def sample(step: int, **fields: object) -> dict:
    return {
        "step": step,
        "prompt_id": "p1",
        "prompt": "say",
        "response": "yes",
        "reward": 1.0,
        "accuracy": 1.0,
    } | fields


def page_of(folders: list[Path], out: Path) -> str:
    return write_report(folders, out).read_text("utf-8")


class Table(HTMLParser):
    """Cells of the table of runs, and everything that an element would load."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.loaded: list[str] = []
        self._inside = self._cell = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"src", "srcset", "poster", "data", "action", "background"} | ({"href"} if tag == "link" else set())
        self.loaded += [value or "" for name, value in attrs if name in names]
        self._inside |= dict(attrs).get("id") == "run-table"
        self._cell = self._inside and tag == "td"
        if self._inside and tag == "tr":
            self.rows.append([])

    def handle_endtag(self, tag: str) -> None:
        self._inside &= tag != "table"
        self._cell = False

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.rows[-1].append(data)

    @property
    def runs(self) -> list[list[str]]:
        return self.rows[1:]


def find(name: str) -> Lines | Stack:
    return next(spec for specs in SECTIONS.values() for spec in specs if spec.name == name)


# -- averages --


def test_a_long_line_is_thinned_to_means_of_neighbors_and_a_short_one_is_kept() -> None:
    series = np.array([[1.0, 2, 3, 4, 5], [10, 20, 30, 40, 60]])
    assert thin(series, 3).tolist() == [[1.5, 3.5, 5], [15, 35, 60]]
    assert thin(series, 5).tolist() == series.tolist()
    assert thin(np.zeros((2, 1000))).shape[1] <= 400


def test_seeds_are_averaged_where_all_of_them_were_measured() -> None:
    # The second seed has nothing beyond 20 and is 0.3 at 10, halfway between its points.
    band = seed_band([np.array([[0.0, 10, 20, 30], [0.1, 0.2, 0.4, 0.9]]), np.array([[0.0, 20], [0.2, 0.4]])])
    assert band.x.tolist() == [0, 10, 20]
    assert band.mean == pytest.approx([0.15, 0.25, 0.4])
    assert band.low == pytest.approx([0.1, 0.2, 0.4])
    assert band.high == pytest.approx([0.2, 0.3, 0.4])


def test_seeds_without_a_common_range_make_no_line() -> None:
    assert seed_band([np.array([[0.0, 1], [0, 0]]), np.array([[2.0, 3], [0, 0]])]) is None
    assert seed_band([np.zeros((2, 0))]) is None


def test_a_run_that_has_just_begun_does_not_cut_the_line_of_finished_seeds(tmp_path: Path) -> None:
    for name, last, finished in (("seed1", 0.4, True), ("seed2", 0.6, True), ("seed3", 0.9, False)):
        rows = [evaluation(0, 0.2)] if not finished else [evaluation(0, 0.2), evaluation(2, last)]
        make_run(tmp_path / name, rows, summary={"method": "grpo"} if finished else None)
    runs = [run_as(tmp_path / name, "grpo") for name in ("seed1", "seed2", "seed3")]
    (axes,) = find("accuracy_rollouts").draw(group_runs(runs)).figure.axes
    mean, begun = axes.lines
    assert mean.get_xydata().tolist() == [[0, 0.2], [200, pytest.approx(0.5)]]
    assert begun.get_xydata().tolist() == [[0, 0.2]]
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].min() == pytest.approx(0.2) and band[:, 1].max() == pytest.approx(0.6)


def test_the_band_of_a_single_run_is_one_standard_error(tmp_path: Path) -> None:
    (run,), _ = read_runs([make_run(tmp_path / "grpo")])
    (axes,) = find("accuracy_steps").draw(group_runs([run])).figure.axes
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(0.19) and heights.max() == pytest.approx(0.41)


def test_mean_accuracy_ends_where_the_shortest_finished_run_does(tmp_path: Path) -> None:
    make_run(tmp_path / "short", [evaluation(0, 0.2), evaluation(2, 0.4)], summary={"method": "short"})
    make_run(tmp_path / "long", [evaluation(0, 0.2), evaluation(4, 0.6)], summary={"method": "long"})
    make_run(tmp_path / "begun", [evaluation(0, 0.2), evaluation(1, 0.9)])
    runs, _ = read_runs([tmp_path / name for name in ("short", "long", "begun")])
    # Both rise by 0.1 in 100 rollouts; the mean of 0.2 to 0.4 is 0.3.
    accuracies, end = mean_accuracies(runs)
    assert accuracies == {"short": pytest.approx(0.3), "long": pytest.approx(0.3)}
    assert end == 200


def test_step_times_leave_out_the_first_steps(tmp_path: Path) -> None:
    rows = [train_step(i + 1, **{"timing/generation": 9.0 if i < 2 else 1.0}) for i in range(40)]
    (run,), _ = read_runs([make_run(tmp_path / "grpo", rows)])
    assert run.step_seconds()["generation"] == [1.0] * 38  # 5 % of 40 are 2


def test_rollouts_are_stacked_by_fate(tmp_path: Path) -> None:
    (run,), _ = read_runs([make_run(tmp_path / "grpo")])
    (axes,) = find("fates").draw(group_runs([run])).figure.axes
    tops = {area.get_label(): area.get_paths()[0].vertices[:, 1].max() for area in axes.collections}
    assert tops == {"trained_fresh": 60, "surplus": 100}


# -- runs --


def run_as(folder: Path, method: str) -> Run:
    (run,), _ = read_runs([folder])
    return replace(run, method=method)


def test_a_run_in_progress_is_reported_up_to_its_last_whole_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "popo-seed1", [train_step(1), train_step(2)], cut='{"kind": "train", "st')
    table = Table(page_of([run], tmp_path / "out"))
    assert table.runs == [["popo-seed1", "popo", "-", "-", "running", "2", "200", "-", "-", "-", "0.500", "1.000"]]


def test_a_run_without_any_line_gives_a_page_without_plots(tmp_path: Path) -> None:
    run = make_run(tmp_path / "grpo", [])
    table = Table(page_of([run], tmp_path / "out"))
    assert table.runs[0][4] == "not started"
    assert not list((tmp_path / "out" / "plots").iterdir())


def test_numbers_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "grpo",
        [train_step(1, loss=None), train_step(2, loss=1.5)],
        cut='{"kind": "train", "step": 3, "loss": NaN}\n',
    )
    (found,), _ = read_runs([run])
    assert found.series("train", "step", "loss").tolist() == [[2], [1.5]]


def test_a_suite_names_methods_and_shows_failed_runs_and_runs_to_come(tmp_path: Path) -> None:
    make_run(tmp_path / "a", summary={"method": "grpo", "seed": 7})
    make_run(tmp_path / "b")
    (tmp_path / "b" / "failed.json").write_text(json.dumps({"error": "engine died"}))
    names = [{"method": "popo_k4", "lr": 1e-4, "seed": seed, "dir": name} for seed, name in enumerate("abc", 1)]
    (tmp_path / "suite.json").write_text(json.dumps({"name": "small", "runs": names}))
    (tmp_path / "results.md").write_text("# Tables\n\n| method | <b>x |\n|---|---|\n| popo | 0.5 |\n")
    html = page_of([tmp_path, tmp_path / "a"], tmp_path / "out")
    table = Table(html)
    assert [row[:5] for row in table.runs] == [
        ["a", "popo_k4", "0.0001", "1", "finished"],
        ["b", "popo_k4", "0.0001", "2", "failed"],
        ["c", "popo_k4", "0.0001", "3", "not started"],
    ]
    assert "b failed: engine died" in html
    assert "<td>popo</td>" in html and "&lt;b&gt;x" in html


def test_one_folder_holds_its_report_and_several_share_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two")
    assert write_report([one]) == one / "report" / "report.html"
    assert write_report([one, two]) == Path("runs/report/report.html")


def test_seeds_share_a_line_and_variants_of_a_method_do_not(tmp_path: Path) -> None:
    for name, seed, slots in (("popo-seed1", 1, 8), ("popo-seed2", 2, 8), ("popo_k4-seed1", 1, 4)):
        config = f"train.seed: {seed}\next: {{run_dir: runs/{name}, fill: {{capacity: {slots}}}}}\n"
        make_run(tmp_path / name, summary={"method": "popo", "seed": seed}, config=config)
    seeds, _ = read_runs([tmp_path / "popo-seed1", tmp_path / "popo-seed2"])
    assert [(curve.method, len(curve.members)) for curve in group_runs(seeds)] == [("popo", 2)]
    variants, _ = read_runs([tmp_path / name for name in ("popo-seed1", "popo-seed2", "popo_k4-seed1")])
    assert [(curve.method, len(curve.members)) for curve in group_runs(variants)] == [("popo", 2), ("popo_k4", 1)]


def test_only_settings_that_differ_are_told(tmp_path: Path) -> None:
    make_run(tmp_path / "a", config="actor.adam.lr: 1e-4\nckpt.path: /x/a/model\next: {run_dir: /x/a, fill: null}\n")
    make_run(
        tmp_path / "b", config="actor.adam.lr: 1e-5\nckpt.path: /x/b/model\next: {run_dir: /x/b, fill: {cap: 2}}\n"
    )
    (a, b), _ = read_runs([tmp_path / "a", tmp_path / "b"])
    assert config_differences(b, a) == [("actor.adam.lr", 1e-4, 1e-5), ("ext.fill.cap", None, 2)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such folder"),
        ({}, "neither metrics.jsonl nor suite.json"),
        ({"suite.json": "{"}, "suite.json:1: not JSON"),
        ({"suite.json": "[]"}, "found list"),
        ({"suite.json": '{"name": "x"}'}, "no 'runs'"),
        ({"suite.json": '{"runs": []}'}, "names no run"),
        ({"metrics.jsonl": "", "config.yaml": "a: ["}, "not valid YAML"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: dict[str, str] | None, message: str
) -> None:
    folder = tmp_path / "x"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1


def test_no_argument_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# -- samples --


def test_samples_are_of_the_first_the_middle_and_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [sample(step, prompt_id=f"p{i}", prompt="x" * 50) for step in range(1, 102) for i in range(4)]
    (run,), _ = read_runs([make_run(tmp_path / "grpo", samples=lines)])
    expected = [(step, f"p{i}") for step in (1, 51, 101) for i in range(3)]
    assert [(row["step"], row["prompt_id"]) for row in read_samples(run)] == expected
    # The same of a file that is too long to be read: parts of 30 steps at both ends and in the middle.
    size = (run.path / "samples.jsonl").stat().st_size
    monkeypatch.setattr(runs_module, "_MAX_SAMPLES_BYTES", size - 1)
    monkeypatch.setattr(runs_module, "_SAMPLES_WINDOW", 30 * size // 101)
    steps = [row["step"] for row in read_samples(run)]
    assert steps[:3] == [1, 1, 1] and steps[-3:] == [101, 101, 101] and steps[3:-3] == pytest.approx([51] * 3, abs=2)


def test_every_text_of_a_sample_is_escaped(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script>"
    fields = {name: attack for name in ("prompt_id", "prompt", "response", "reward", "advantage")}
    html = page_of([make_run(tmp_path / "grpo", samples=[sample(1, **fields)])], tmp_path / "out")
    assert html.count("&lt;script&gt;alert(1)") == len(fields)
    assert "<script>alert" not in html


def test_lone_surrogates_and_control_characters_are_shown_as_escapes(tmp_path: Path) -> None:
    assert visible("a\ud83d\x00\u202eb\tc\nd\U0001f600é") == "a\\ud83d\\u0000\\u202eb\tc\nd\U0001f600é"
    run = make_run(tmp_path / "grpo", samples=[sample(1, response="\ud83d<\x1b")])
    assert "\\ud83d&lt;\\u001b" in page_of([run], tmp_path / "out")


# -- plots and page --


def test_a_metric_that_no_run_has_leaves_its_plot_out_and_is_named(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "plots").mkdir(parents=True)
    (out / "plots" / "entropy.png").write_bytes(b"of an earlier report")
    html = page_of([make_run(tmp_path / "grpo")], out)
    assert "Not plotted: no run here records rollout/entropy_mean." in html
    assert not (out / "plots" / "entropy.png").exists()
    assert 'id="entropy"' not in html and 'id="fates"' in html


def test_runs_without_a_metric_that_others_have_are_named(tmp_path: Path) -> None:
    entropy = [train_step(1, **{"rollout/entropy_mean": 0.5}), train_step(2, **{"rollout/entropy_mean": 0.4})]
    folders = [
        make_run(tmp_path / "popo-seed1", entropy, summary={"method": "popo"}),
        make_run(tmp_path / "popo-seed2", [train_step(1)], summary={"method": "popo"}),
        make_run(tmp_path / "trl", [train_step(1)]),
    ]
    plot = find("entropy").draw(group_runs(read_runs(folders)[0]))
    assert plot.notes == ["rollout/entropy_mean is not recorded by popo-seed2, trl."]


def test_a_panel_for_each_learning_rate(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"grpo-lr{lr}", summary={"method": "grpo"}, config=f"actor.adam.lr: {lr}\n")
        for lr in ("1e-4", "1e-5")
    ]
    figure = find("accuracy_rollouts").draw(group_runs(read_runs(folders)[0])).figure
    assert [axes.get_title() for axes in figure.axes] == ["learning rate 1e-05", "learning rate 0.0001"]


def test_a_method_has_one_color_in_all_plots_and_on_all_pages(tmp_path: Path) -> None:
    names = ("grpo", "popo", "mine")
    folders = [make_run(tmp_path / name, summary={"method": name}) for name in names]
    curves = group_runs(read_runs(folders)[0])
    styles = method_styles(names)
    for name in ("accuracy_rollouts", "accuracy_wall_clock", "accuracy_steps"):
        (axes,) = find(name).draw(curves).figure.axes
        assert {line.get_label(): line.get_color() for line in axes.lines} == {n: styles[n]["color"] for n in names}
    assert method_styles(["popo"])["popo"] == styles["popo"]
    many = method_styles([f"m{i}" for i in range(20)])
    assert len({tuple(style.values()) for style in many.values()}) == len(many)


def test_the_page_loads_nothing_and_holds_every_plot(tmp_path: Path) -> None:
    out = tmp_path / "out"
    html = page_of([make_run(tmp_path / "grpo", samples=[sample(1)])], out)
    loaded = Table(html).loaded
    plots = list((out / "plots").glob("*.png"))
    assert len(plots) == 5  # three of accuracy, fates, step time
    assert len(loaded) == len(plots) + 1  # the empty icon
    assert all(value.startswith("data:") for value in loaded)
    assert not re.findall(r"https?:|@import|url\(|\bfetch\(", re.sub(r"base64,[^\"]*", "", html))
