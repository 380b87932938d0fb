"""A suite folder as one comparison, in JSON and as tables."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from suite_folders import eval_line, run_folder, write_lines, write_run, write_suite

from openrlhf_ext.benchmark.comparison import Cell, Comparison, compare_suite
from openrlhf_ext.benchmark.statistics import Spread
from openrlhf_ext.benchmark.tables import write_results

Key = tuple[str, float, int]

# Evaluated after 0, 100, 200 (300) rollouts.
RUNS: dict[Key, list[float]] = {
    ("grpo", 1e-4, 1): [0.20, 0.20, 0.30, 0.30],
    ("grpo", 1e-4, 2): [0.20, 0.30, 0.40, 0.40],
    ("grpo", 1e-4, 3): [0.20, 0.40, 0.60, 0.60],
    ("grpo", 3e-4, 1): [0.20, 0.10, 0.00, 0.00],
    ("popo", 1e-4, 1): [0.20, 0.40, 0.40],
    ("popo", 1e-4, 2): [0.20, 0.50, 0.50],
    ("popo", 1e-4, 3): [0.20, 0.60, 0.50],
    ("popo", 3e-4, 1): [0.20, 0.20, 0.50],
    ("popo", 3e-4, 2): [0.20, 0.20, 0.50],
}


def make_suite(folder: Path, runs: Mapping[Key, Sequence[float]] = RUNS, **more: object) -> Path:
    write_suite(folder, list(runs), **more)
    for key, accuracies in runs.items():
        write_run(folder / run_folder(*key), accuracies)
    return folder


def cell_of(cells: Sequence[Cell], method: str, lr: float = 1e-4) -> Cell:
    return next(cell for cell in cells if (cell.method, cell.lr) == (method, lr))


def compare(folder: Path, runs: Mapping[Key, Sequence[float]] = RUNS, **more: object) -> Comparison:
    return compare_suite(make_suite(folder, runs, **more), window=1)


def test_the_common_grid_ends_with_the_shortest_run(tmp_path: Path) -> None:
    found = compare(tmp_path)
    assert (found.grid_end, found.grid_points, found.shortest) == (200, 4, "popo, lr 0.0001, seed 1")
    assert (found.resolution, found.equal_seconds) == (100.0, 4.0)
    grpo = cell_of(found.grid, "grpo")
    assert grpo.figures["accuracy_final"] == Spread(0.4, 0.3, pytest.approx(0.6), 3)
    assert grpo.figures["accuracy_equal_time"] == grpo.figures["accuracy_final"]  # after 4 s as well
    # At 0, 66.7, 133.3 and 200 rollouts: (0.2 + 0.2667 + 0.3333 + 0.4) / 4, and 0.1 less and 0.2 more at the end.
    assert grpo.figures["accuracy_mean"] == Spread(
        pytest.approx(1.2 / 4), pytest.approx(2.8 / 3 / 4), pytest.approx(1.6 / 4), 3
    )


def test_differences_are_paired_by_lr_and_seed(tmp_path: Path) -> None:
    found = compare(tmp_path)
    popo = cell_of(found.grid, "popo").differences["grpo"]
    # Seed by seed, means of popo over the four points are 1/3, 0.4 and 1.3/3, of grpo 0.7/3, 0.3 and 0.4.
    assert popo.estimate == pytest.approx((0.1 + 0.1 + 0.1 / 3) / 3)
    assert (popo.used, popo.pairs) == (3, 3)
    # Of 27 equally likely resamples one, more than a fortieth, has the smallest difference three times.
    assert popo.low == pytest.approx(0.1 / 3) and popo.high == pytest.approx(0.1)
    high_lr = cell_of(found.grid, "popo", 3e-4).differences["grpo"]
    assert (high_lr.used, high_lr.low) == (1, None)
    assert cell_of(found.grid, "popo").differences["dapo"].pairs == 0  # not in the suite
    assert "grpo" not in cell_of(found.grid, "grpo").differences


def test_best_is_each_method_at_its_own_best_lr(tmp_path: Path) -> None:
    runs = {("grpo", lr, seed): [0.2, accuracy] for lr, accuracy in ((1e-4, 0.3), (3e-4, 0.5)) for seed in (1, 2, 3)}
    runs |= {("popo", lr, seed): [0.2, 0.4] for lr in (1e-4, 3e-4) for seed in (1, 2, 3)}
    found = compare(tmp_path, runs)
    assert [(cell.method, cell.lr) for cell in found.best] == [("grpo", 3e-4), ("popo", 1e-4)]
    # 0.3 against grpo's 0.35 at its best lr; at the same lr, 0.3 against 0.25.
    assert cell_of(found.best, "popo").differences["grpo"].estimate == pytest.approx(-0.05)
    assert cell_of(found.grid, "popo").differences["grpo"].estimate == pytest.approx(0.05)


def test_costs_to_a_target_and_their_ratios(tmp_path: Path) -> None:
    found = compare(tmp_path, targets=[0.4, 0.5])
    assert (found.targets, found.targets_from) == ((0.4, 0.5), "named in suite.json")
    low, high = cell_of(found.grid, "popo").targets
    assert (low.target, low.reached) == (0.4, 3)
    assert low.costs["rollouts"] == Spread(100.0, 100, 100, 3)
    assert low.costs["train_wall_s"].median == 2.0 and low.costs["wall_s"].median == 15.0
    # grpo: never, 200 and 100 rollouts; so the ratios are 1/2 and 1, of which the geometric mean is taken.
    assert low.ratios["grpo"]["rollouts"].estimate == pytest.approx(0.5**0.5)
    assert (low.ratios["grpo"]["rollouts"].used, low.ratios["grpo"]["rollouts"].pairs) == (2, 3)
    grpo = cell_of(found.grid, "grpo").targets[0]
    assert (grpo.reached, grpo.costs["rollouts"]) == (2, Spread(200.0, 100, None, 3))
    assert high.costs["rollouts"].high is None
    assert high.reached == 2


def test_without_named_targets_they_are_shares_of_what_the_first_baseline_gains(tmp_path: Path) -> None:
    found = compare(tmp_path)
    # From 0.2 to 0.4, where the median seed of grpo ends at its better lr.
    assert found.targets == (0.3, 0.38)
    assert "0.2000" in found.targets_from and "best lr 0.0001 0.4000 (median of 3 seeds)" in found.targets_from
    smooth = compare_suite(tmp_path)
    assert smooth.targets == (0.3, 0.38)  # the last two evaluations are equal
    assert smooth.grid[0].targets[0].costs["rollouts"].median == 100  # (0.2 + 0.3 + 0.4) / 3


def test_a_baseline_without_gain_gives_no_targets(tmp_path: Path) -> None:
    found = compare(tmp_path / "a", {("grpo", 1e-4, 1): [0.2, 0.1]})
    assert found.targets == () and found.targets_from.endswith("no gain")
    assert compare(tmp_path / "b", {("popo", 1e-4, 1): [0.2, 0.3]}).targets_from.startswith("none")
    assert compare(tmp_path / "c", {("popo", 1e-4, 1): [0.2, 0.3]}, baselines=[]).targets == ()


def test_aes_is_against_the_baseline_of_the_same_lr_and_seed(tmp_path: Path) -> None:
    write_suite(tmp_path, [("grpo", 1e-4, 1), ("popo", 1e-4, 1), ("popo", 1e-4, 2)])
    for method, seed, accuracy, length in (("grpo", 1, 0.5, 1000.0), ("popo", 1, 0.45, 800.0), ("popo", 2, 0.9, 1.0)):
        folder = tmp_path / run_folder(method, 1e-4, seed)
        write_run(folder, [0.2, accuracy], **{"eval/response_length_mean": length})
    found = compare_suite(tmp_path)
    popo = cell_of(found.grid, "popo")
    assert popo.figures["aes_grpo"] == Spread(pytest.approx(-0.3), pytest.approx(-0.3), pytest.approx(-0.3), 1)
    assert "aes_grpo" not in cell_of(found.grid, "grpo").figures


def test_runs_that_failed_or_go_on_are_left_out_and_named(tmp_path: Path) -> None:
    make_suite(tmp_path, {**RUNS, ("aper", 1e-4, 1): [0.2, 0.9], ("aper", 1e-4, 2): [0.2, 0.9]})
    write_suite(tmp_path, [*RUNS, ("aper", 1e-4, 1), ("aper", 1e-4, 2), ("aper", 1e-4, 3), ("mopps", 1e-4, 1)])
    failed, going_on, broken = (tmp_path / run_folder("aper", 1e-4, seed) for seed in (1, 2, 3))
    (failed / "summary.json").unlink()
    (failed / "failed.json").write_text(json.dumps({"error": "out of memory\nTraceback"}))
    (going_on / "summary.json").unlink()
    write_run(broken, [0.2, 0.9])
    write_lines(broken, [eval_line(1, 0.9)])
    found = write_results(tmp_path)
    reasons = [(run.method, run.seed, run.reason.partition(";")[0]) for run in found.left_out]
    assert reasons == [
        ("aper", 1, "failed: out of memory"),
        ("aper", 2, "unfinished"),
        ("aper", 3, "unusable: aper-lr0.0001-seed3/metrics.jsonl: no evaluation before the first rollout"),
        ("mopps", 1, "unfinished"),
    ]
    assert (len(found.runs), found.num_planned) == (9, 13)
    assert not [cell for cell in found.grid if cell.method == "aper"]
    page = (tmp_path / "results.md").read_text()
    assert "9 of 13 runs are compared" in page
    assert "- Left out: aper, lr 0.0001, seed 1: failed: out of memory\n" in page


def test_the_order_of_runs_changes_no_byte(tmp_path: Path) -> None:
    make_suite(tmp_path)
    write_results(tmp_path)
    before = [(tmp_path / name).read_bytes() for name in ("results.json", "results.md")]
    write_suite(tmp_path, list(reversed(RUNS)))
    write_results(tmp_path)
    assert before == [(tmp_path / name).read_bytes() for name in ("results.json", "results.md")]


def test_json_has_five_digits_and_curves_by_field(tmp_path: Path) -> None:
    make_suite(tmp_path, {("grpo", 1e-4, 1): [1 / 3, 2 / 3], ("grpo", 1e-4, 2): [1 / 3, 1 / 3]})
    write_results(tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    first = content["runs"][0]
    assert first["curve"]["accuracy"] == [0.33333, 0.66667]
    assert first["curve"]["rollouts"] == [0, 100]
    assert content["grid"][0]["figures"]["accuracy_mean"] == {
        "median": 0.41667, "low": 0.33333, "high": 0.5, "count": 2
    }  # fmt: skip
    assert first["lr"] == 1e-4


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the first table below a line that contains ``heading``."""
    lines = page[page.index(heading) :].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    table = [line for line in lines[start : start + 20] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_tables_by_hand(tmp_path: Path) -> None:
    write_results(make_suite(tmp_path, targets=[0.5]), window=1)
    page = (tmp_path / "results.md").read_text()
    headline = rows(page, "## Accuracy at equal rollouts")
    assert headline[0] == ["method", "lr", "seeds", "mean accuracy", "final accuracy", "minus grpo", "minus dapo"]
    assert headline[2] == ["grpo", "0.0001", "3/3", "0.300 [0.233, 0.400]", "0.400 [0.300, 0.600]", "-", "-"]
    assert headline[4][5] == "+0.078 [+0.033, +0.100] (3/3)"
    assert headline[5][5] == "+0.200 [-] (1/1)"
    target = rows(page, "Accuracy 0.5000:")
    assert target[2][2:5] == ["1/3", "- [200, -]", "-"]
    assert target[3][2:5] == ["0/1", "-", "-"]
    assert target[4][2:5] == ["2/3", "100 [100, -]", "0.50 [-] (1/3)"]
    assert target[5][2:5] == ["2/2", "200 [200, 200]", "- (0/1)"]


def test_a_run_that_measured_only_accuracy_has_dashes(tmp_path: Path) -> None:
    write_suite(tmp_path, [("trl_grpo", 1e-4, 1)])
    folder = tmp_path / run_folder("trl_grpo", 1e-4, 1)
    write_lines(
        folder,
        [{"kind": "eval", "step": s, "eval/accuracy": 0.2, "budget/rollouts_generated": 8 * s} for s in (0, 1)],
    )
    (folder / "summary.json").write_text("{}")
    write_results(tmp_path)
    page = (tmp_path / "results.md").read_text()
    assert rows(page, "## Wall-clock time")[2] == ["trl_grpo", "0.0001", *"------"]
    assert rows(page, "## Diagnostics")[2] == ["trl_grpo", "0.0001", *"-----"]
    assert rows(page, "## pass@k")[2] == ["trl_grpo", "0.0001", *"------"]


def test_every_table_has_nine_columns_at_most_and_no_ragged_row(tmp_path: Path) -> None:
    write_results(make_suite(tmp_path))
    blocks = (tmp_path / "results.md").read_text().split("\n\n")
    tables = [block.splitlines() for block in blocks if block.startswith("|")]
    assert len(tables) == 14  # two of accuracy; for each target one of rollouts, best and time; and six of figures
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
        assert table[0].count("|") <= 10 and set(table[1]) == {"|", "-"}
        assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "suite.json is missing"),
        ("{", "suite.json:1: not JSON"),
        ('{"name": "toy"}', "runs missing or empty"),
    ],
)
def test_a_folder_that_is_no_suite_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "suite.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        compare_suite(tmp_path)


def test_two_runs_of_one_seed_are_refused(tmp_path: Path) -> None:
    write_suite(tmp_path, [("grpo", 1e-4, 1), ("grpo", 1e-4, 1)])
    with pytest.raises(ValueError, match="two runs of method grpo, lr 0.0001, seed 1"):
        compare_suite(tmp_path)


def test_a_suite_without_a_finished_run_says_what_became_of_the_first(tmp_path: Path) -> None:
    write_suite(tmp_path, [("grpo", 1e-4, 1), ("grpo", 1e-4, 2)])
    with pytest.raises(ValueError, match="none of the 2 runs can be compared; the first: unfinished"):
        compare_suite(tmp_path)
