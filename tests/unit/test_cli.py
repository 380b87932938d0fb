"""The command line without OpenRLHF: what it prints and how it refuses. With OpenRLHF: tests/contract."""

from __future__ import annotations

import pytest

from openrlhf_ext.cli.train_ppo_ray import main


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_prints_our_flags_and_succeeds(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([option]) == 0
    assert "--ext.run_dir" in capsys.readouterr().out


def test_a_refusal_is_one_line_on_stderr_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "error: argument --config: expected one argument\n")
