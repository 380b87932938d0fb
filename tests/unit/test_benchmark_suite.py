"""Suite files: what is run, in which order, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrlhf_ext.benchmark.suite import load_suite

MINIMAL = """\
rollouts: 100
evaluate_every: 10
learning_rates: [1e-4, 3e-5]
seeds: [2, 1]
flags: {eval.temperature: 0.5, ext: {log: {samples_per_step: 0}}}
methods:
  grpo: {config: grpo.yaml}
  arpo: {config: arpo.yaml, learning_rates: [1e-4], seeds: [1], flags: {ext.max_steps: 7}}
baselines: [grpo]
"""


def suite_of(folder: Path, text: str = MINIMAL):
    file = folder / "mine.yaml"
    file.write_text(text)
    return load_suite(file)


def test_a_suite_is_every_method_at_each_of_its_rates_and_seeds_seed_by_seed(tmp_path: Path) -> None:
    suite = suite_of(tmp_path)
    assert suite.name == "mine"
    assert [(run.method, run.lr, run.seed) for run in suite.runs()] == [
        ("grpo", 3e-5, 1),
        ("grpo", 1e-4, 1),
        ("arpo", 1e-4, 1),
        ("grpo", 3e-5, 2),
        ("grpo", 1e-4, 2),
    ]
    assert len({run.folder for run in suite.runs()}) == 5


def test_every_run_has_the_budget_and_the_flags_of_its_method_win(tmp_path: Path) -> None:
    runs = {run.method: run for run in suite_of(tmp_path).runs()}
    grpo, arpo = runs["grpo"].argv, runs["arpo"].argv
    assert grpo[:2] == ("--config", "grpo.yaml")
    for flag, value in (
        ("--ext.max_rollouts", "100"),
        ("--ext.max_steps", "null"),
        ("--ext.eval.every_rollouts", "10"),
        ("--eval.temperature", "0.5"),
        ("--ext.log.samples_per_step", "0"),
    ):
        assert _value(grpo, flag) == value
    assert _value(arpo, "--ext.max_steps") == "7"
    assert (_value(arpo, "--actor.adam.lr"), _value(arpo, "--train.seed")) == ("0.0001", "1")


def _value(argv: tuple[str, ...], flag: str) -> str | None:
    return argv[argv.index(flag) + 1] if flag in argv else None


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("seeds: [2, 1]", "seed: [2, 1]", 4, r"seed does not exist \(did you mean --seeds\?\)"),
        ("seeds: [2, 1]", "seeds: [2, 2]", 4, "seeds has a number twice"),
        ("seeds: [2, 1]", "seeds: 2", 4, "must be a list of whole numbers"),
        ("[1e-4, 3e-5]", "[fast]", 3, "must be a list of numbers"),
        ("rollouts: 100", "rollouts: 0", 1, "must be a whole number of at least 1, got 0"),
        ("baselines: [grpo]", "baselines: [dapo]", 9, r"dapo is not among the methods \(grpo, arpo\)"),
        ("{config: grpo.yaml}", "{}", 7, "grpo needs a config file"),
        ("seeds: [1], flags", "sedes: [1], flags", 8, "methods.arpo.sedes does not exist"),
        ("eval.temperature: 0.5", "vllm.enforce_eager: false", None, "can only switch on"),
    ],
)
def test_what_is_wrong_in_a_suite_file_is_named_with_its_line(tmp_path: Path, old, new, line, message) -> None:
    where = rf"mine.yaml:{line}: .*" if line else ""
    with pytest.raises(ValueError, match=where + message):
        suite_of(tmp_path, MINIMAL.replace(old, new)).runs()


def test_a_suite_without_methods_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="methods is missing"):
        suite_of(tmp_path, MINIMAL.split("methods")[0])
