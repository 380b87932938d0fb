"""The controller's benchmark runs and its figures are consistent; how large they are is not tested."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOY = ["--prompts", "4", "--rollouts", "2", "--tokens", "64", "--steps", "1"]


@pytest.fixture(scope="module")
def figures() -> dict:
    command = [sys.executable, str(ROOT / "scripts" / "bench_controller.py"), "filling", *TOY, "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("bench_controller")


def test_half_of_the_slots_are_filled_from_a_full_buffer(figures: dict) -> None:
    largest = figures["by_batch"][-1]
    assert (largest["replayed_groups"], largest["stored_groups"]) == (2, 4)


def test_a_stored_token_takes_its_share_of_tokens_masks_and_log_probs(figures: dict) -> None:
    # 64 tokens of 4 bytes, 63 mask entries of 1 byte and 64 - 64/8 = 56 log-probabilities of 4 bytes: 543 bytes.
    largest = figures["by_batch"][-1]
    assert largest["bytes_per_stored_token"] == 543 / 64
    assert largest["buffer_bytes"] == 4 * 2 * 543


def test_every_size_is_reported_once_with_its_own_peak(figures: dict) -> None:
    assert [case["prompts"] for case in figures["by_batch"]] == [1, 2, 4]
    assert [case["tokens"] for case in figures["by_length"]] == [16, 32, 64]
    assert all(case["peak_rss_bytes"] > case["batch_bytes"] > 0 for case in figures["by_batch"])


def test_share_is_of_the_published_step(figures: dict) -> None:
    # 4 x 2 x 56 response tokens against 256 x 8 x 1024; 3.2 h are 11,520 s, a hundredth of that is 115.2 s.
    share = figures["share"]
    assert share["published_step_s"] == pytest.approx(115.2)
    assert share["response_tokens_by_published"] == 448 / 2_097_152
    total = figures["by_batch"][-1]["seconds"]["total"]["median"]
    assert share["of_published_step"] == pytest.approx(total / 115.2)


def test_table_names_every_phase_and_claims_no_bound_for_a_smaller_step(figures: dict, script: ModuleType) -> None:
    table = script.filling_report(figures)
    for name in ("fill", "restore", "store", "weigh", "push", "total", "bytes of a stored token", "peak resident"):
        assert f"\n{name}" in table
    assert "lower bound" not in table
    larger = {**figures, "share": {**figures["share"], "response_tokens_by_published": 14.0}}
    assert "14 times those tokens, so that is a lower bound" in script.filling_report(larger)


def test_size_that_cannot_be_quartered_is_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["filling", "--prompts", "3"])
    assert "--prompts >= 4" in capsys.readouterr().err


def test_a_full_rollout_buffer_is_measured_within_its_bytes(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    size = ["--stored", "512", "--draw", "16", "--insert", "64", "--tokens", "16", "--steps", "2"]
    assert script.main(["replay", *size, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["ours"]["stored"] == 512
    # 16 tokens of 4 bytes, 15 mask entries of 1 byte, 14 log-probabilities of 4 bytes: 135 bytes.
    bytes_beside = figures["ours"]["bytes_per_rollout"] - 135
    assert bytes_beside == pytest.approx(figures["ours"]["bookkeeping_bytes_per_rollout"]) and bytes_beside <= 64
    table = script.replay_report(figures)
    for phase in ("insert", "evict", "draw", "metrics"):
        assert f"\nours: {phase}" in table
    assert "\ncpprb" in table


def test_a_second_save_writes_one_step_and_the_load_has_every_rollout(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--stored", "512", "1024", "--insert", "64", "--tokens", "64", "--folder", str(tmp_path)]
    assert script.main(["checkpoint", *size, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert [one["stored"] for one in figures["sizes"]] == [512, 1024]
    for one in figures["sizes"]:
        written = one["written_bytes"]
        # 64 tokens of 4 bytes, 63 mask entries of 1 byte, 56 log-probabilities of 4 bytes: 543 bytes a rollout.
        assert written["full save"] > 543 * one["stored"]
        assert 543 * 64 < written["incremental save"] < 543 * 256
    table = script.checkpoint_report(figures)
    assert table.count("full save") == table.count("incremental save") == table.count("load") - 1 == 2
    assert not list(tmp_path.iterdir())
