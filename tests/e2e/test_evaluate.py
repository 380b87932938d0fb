"""The evaluation command on the real engine: the tiny model, two sets, the Countdown reward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from command import ROOT

from openrlhf_ext.tasks.countdown import grade, parse_label


def test_two_sets_are_evaluated_on_one_engine_and_graded_as_the_task_grades(countdown: Path, tmp_path: Path) -> None:
    rows = (countdown / "eval.jsonl").read_text().splitlines()
    sets = {"first": rows[:8], "second": rows[8:]}
    for name, lines in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    out, samples = tmp_path / "results.json", tmp_path / "samples"
    command = [sys.executable, "-m", "openrlhf_ext.cli.evaluate", str(countdown / "model")]
    command += [str(tmp_path / f"{name}.jsonl") for name in sets]
    command += ["--reward", "openrlhf_ext/rewards/countdown.py", "--n", "8", "--max-tokens", "16", "--workers", "1"]
    command += ["--out", str(out), "--samples", str(samples)]
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(out.read_text())
    num_right = 0
    for name, lines in sets.items():
        responses = [json.loads(line) for line in (samples / f"{name}.jsonl").read_text().splitlines()]
        assert [response["line"] for response in responses] == [n for n in range(1, 9) for _ in range(8)]
        for response in responses:
            row = json.loads(lines[response["line"] - 1])
            puzzle = parse_label(row["label"])
            text, end, rest = response["response"].partition("<eos>")
            assert (response["prompt"], rest) == (row["input"], "")
            assert response["is_truncated"] == (not end)
            # The model has ids beyond its vocabulary, which have no text; every other token is a character.
            assert len(text) + bool(end) <= response["num_tokens"] <= 16
            assert response["accuracy"] == grade(text, puzzle.numbers, puzzle.target).accuracy
        accuracies = [response["accuracy"] for response in responses]
        metrics = results["sets"][name]["metrics"]
        assert metrics["accuracy"] == sum(accuracies) / 64
        assert metrics["response_length_mean"] == sum(response["num_tokens"] for response in responses) / 64
        assert len({response["response"] for response in responses}) > 8, "samples of a prompt differ"
        num_right += sum(accuracies)
    assert 0 < num_right < 128
    means = [results["sets"][name]["metrics"]["accuracy"] for name in sets]
    assert results["mean"]["accuracy"] == sum(means) / 2
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["set", "first", "second", "mean"]
