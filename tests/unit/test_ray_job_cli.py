"""Options of ray_job, what it uploads, and which exit code it gives: without Ray. With Ray: tests/contract and e2e."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from openrlhf_ext.adapters.ray_job import Job, exit_code, run_here
from openrlhf_ext.cli.ray_job import LARGEST_FILE, NEVER_UPLOADED, excluded_paths, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("status", "of_the_command", "expected"),
    [
        ("SUCCEEDED", 0, 0),
        ("FAILED", 2, 2),
        ("FAILED", 85, 85),
        ("FAILED", 143, 143),
        ("FAILED", -9, 137),  # the command itself was killed: a shell would say 128 + 9
        ("FAILED", None, 1),  # it never ran
        ("STOPPED", None, 130),
    ],
)
def test_the_exit_code_is_that_of_the_command(status: str, of_the_command: int | None, expected: int) -> None:
    assert exit_code(status, of_the_command, stopped=130) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "auto"], "--address auto is not the address of a Ray dashboard"),
        (["--address", "ray://host:10001"], "--address ray://host:10001 is not the address of a Ray dashboard"),
        (["--address", "host:8265"], "--address host:8265 is not the address of a Ray dashboard"),
        (["--address", "http://me:pass@host:8265"], "--address holds a password"),
        (["--no-wait"], "--no-wait needs --address"),
        (["--entrypoint-num-gpus", "1"], "--entrypoint-num-gpus needs --address"),
        (["--entrypoint-resources", '{"big": 1}'], "--entrypoint-resources needs --address"),
        (["--entrypoint-resources", "big"], "argument --entrypoint-resources: expected JSON such as"),
        (["--entrypoint-num-cpus", "-1"], "--entrypoint-num-cpus must be above 0, got -1"),
        (["--start-timeout", "nan"], "--start-timeout must be above 0, got nan"),
        (["--working-dir", "no/such"], "--working-dir: there is no folder no/such"),
    ],
)
def test_an_option_that_cannot_work_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: {message}")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="NOT TESTED, no ray: install_cpu.sh")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("env_vars: {HF_TOKEN: hf_abc}", "env_vars: HF_TOKEN would be shown to everybody"),
        ("env_vars: {A: 1}", "env_vars: A must be a string (in quotes), got 1"),
        ("env_vars: [A]", "env_vars must be a mapping"),
        ("excludes: x", "excludes must be a list"),
        ("working_dir: .", "working_dir is given as --working-dir"),
        ("- a", "expected a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_a_runtime_environment_is_refused_with_its_file(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "env.yaml"
    file.write_text(text)
    assert main(["--runtime-env", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --runtime-env {file}: {message}")


def test_a_variable_that_only_sounds_like_a_secret_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "env.yaml"
    file.write_text('env_vars: {TOKENIZERS_PARALLELISM: "false"}')
    assert main(["--runtime-env", str(file), "--no-such-flag"]) == 2
    assert "env_vars" not in capsys.readouterr().err


def test_a_folder_whose_path_is_too_long_for_rays_sockets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/" + 40 * "x")
    assert run_here(Job("train", {}, {}, 40, 60.0, tmp_path / "run"), needed_gpus=2) == 2
    assert capsys.readouterr().err.startswith("error: RAY_TMPDIR=/tmp/xxx")


def test_runs_links_and_large_files_are_left_out_by_their_own_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    for folder in ("code", "out [1]", "old/run 1", ".venv/lib", "mine"):
        (project / folder).mkdir(parents=True)
    elsewhere.mkdir()
    (project / "linked").symlink_to(elsewhere)
    (project / "old/run 1/metrics.jsonl").touch()
    (project / ".venv/lib/metrics.jsonl").touch()
    (project / "code/reward.py").touch()
    (project / "broken").symlink_to("nowhere")
    for name, size in (("limit.bin", LARGEST_FILE), ("over.bin", LARGEST_FILE + 1)):
        with open(project / "code" / name, "wb") as file:
            file.truncate(size)

    found = excluded_paths(project, [project / "out [1]", tmp_path / "other"])

    assert found[: len(NEVER_UPLOADED)] == list(NEVER_UPLOADED)
    own = [r"/out\ \[1\]", r"/old/run\ 1", "/linked", "/code/over.bin"]
    assert sorted(found[len(NEVER_UPLOADED) :]) == sorted(own)
    assert capsys.readouterr().err == "ray_job: over 10 MiB, not uploaded: code/over.bin\n"


def test_a_working_directory_inside_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--working-dir .* which the run writes"):
        excluded_paths(tmp_path / "run/code", [tmp_path / "run"])


def test_the_script_says_what_is_missing_without_a_python(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "ray_job.sh").write_text((ROOT / "scripts/ray_job.sh").read_text())
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "dirname").symlink_to(str(shutil.which("dirname")))
    done = subprocess.run(
        ["/bin/bash", str(scripts / "ray_job.sh")],
        env={**os.environ, "PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no python on PATH and no .venv")
