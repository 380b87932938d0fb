"""OpenRLHF's parser and checks, cut out of its command line module, are what the settings rely on."""

from __future__ import annotations

import ast
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path

import pytest

if importlib.util.find_spec("openrlhf") is None:
    pytest.skip("OpenRLHF is not installed: its command line is NOT checked", allow_module_level=True)

from openrlhf_ext.adapters import upstream, upstream_cli
from openrlhf_ext.adapters.upstream_cli import build_parser, nest, validate
from openrlhf_ext.cli.train_ppo_ray import main
from openrlhf_ext.config import ExtConfig
from openrlhf_ext.settings import resolve

pytestmark = pytest.mark.contract

CONFIG_FILES = sorted((Path(__file__).parents[2] / "configs").glob("cpu/*.yaml"))
GRPO = [
    *("--actor.model_name_or_path", "organization/model", "--data.prompt_dataset", "organization/data"),
    *("--reward.remote_url", "http://localhost:5000", "--vllm.num_engines", "1"),
    *("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "8"),
    *("--rollout.batch_size", "16", "--train.batch_size", "64"),
]


def upstream_source() -> ast.Module:
    spec = importlib.util.find_spec("openrlhf.cli.train_ppo_ray")
    assert spec is not None and spec.origin is not None
    return ast.parse(Path(spec.origin).read_text(encoding="utf-8"))


def test_the_parser_has_every_flag_that_upstream_adds() -> None:
    # Upstream names flags by literals, and by f"--{prefix}.x" in one loop over ("actor", "critic").
    names: set[str] = set()
    for call in ast.walk(upstream_source()):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "parser.add_argument":
            text = ast.unparse(call.args[0])[1:].strip("'\"")
            names |= {text.removeprefix("'").replace("{prefix}", prefix) for prefix in ("actor", "critic")}
    assert len(names) > 150
    assert names == set(build_parser()._option_string_actions) - {"-h", "--help"}


def test_flags_are_never_abbreviated() -> None:
    _, unknown = build_parser().parse_known_args(["--train.batch_siz", "4"])
    assert unknown == ["--train.batch_siz", "4"]


def test_upstream_checks_complete_the_arguments_in_place() -> None:
    args = nest(vars(build_parser().parse_args(GRPO)))
    validate(args)
    assert args.actor.eps_clip_low_high == (0.2, 0.2)
    assert args.reward.remote_url == ["http://localhost:5000"]
    assert args.critic.model_name_or_path is None
    assert args.rollout.vllm_generate_batch_size == 16


def test_upstream_refusals_become_a_value_error_with_its_message() -> None:
    args = nest(vars(build_parser().parse_args([*GRPO, "--rollout.n_samples_per_prompt", "1"])))
    with pytest.raises(ValueError, match="^OpenRLHF refuses these settings: group_norm requires n_samples_per_prompt"):
        validate(args)


def test_upstream_warnings_go_to_the_logger(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    args = nest(vars(build_parser().parse_args([*GRPO, "--vllm.enable_sleep"])))
    with caplog.at_level(logging.WARNING):
        validate(args)
    assert "OpenRLHF: Set args.vllm.enable_sleep to False" in caplog.text
    assert capsys.readouterr().out == ""


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "version", lambda name: "0.12.0")
    with pytest.raises(RuntimeError, match="openrlhf 0.12.0 is installed"):
        build_parser()


def test_a_command_line_module_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_cli, "_source_folder", lambda: tmp_path)
    with pytest.raises(RuntimeError, match="has no cli/train_ppo_ray.py"):
        build_parser()
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "train_ppo_ray.py").write_text("x = 1\n")
    with pytest.raises(RuntimeError, match="has no main block"):
        build_parser()
    (tmp_path / "cli" / "train_ppo_ray.py").write_text("if __name__ == '__main__':\n    x = 1\n")
    with pytest.raises(RuntimeError, match="has no `args = parser.parse_args"):
        build_parser()


def test_reading_and_checking_the_command_line_imports_nothing_heavy() -> None:
    code = f"""
import sys
from openrlhf_ext.cli.train_ppo_ray import checked_settings as _settings
assert _settings({[*GRPO, "--ext.run_dir", "no-such-run"]!r}) is not None
heavy = {{"ray", "vllm", "deepspeed", "torch", "transformers", "openrlhf.utils"}} & set(sys.modules)
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CONFIG_FILES, ids=lambda path: path.name)
def test_every_config_file_resolves_to_flags_that_exist(path: Path) -> None:
    settings = resolve(str(path), ["--ext.run_dir", "no-such-run"], build_parser(), nest)
    assert isinstance(settings.ext, ExtConfig)


def test_printed_settings_load_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GRPO, "--ext.run_dir", str(tmp_path / "run"), "--ext.dapo.max_rounds", "3"]
    assert main([*argv, "--actor.muon.no_nesterov", "--logger.wandb.key", "s3cret", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "s3cret" not in printed and "actor.muon.nesterov: false" in printed
    (tmp_path / "printed.yaml").write_text(printed)
    assert main(["--config", str(tmp_path / "printed.yaml"), "--print-config"]) == 0
    # The comment that stands for the secret is all that is gone.
    assert capsys.readouterr().out == printed.split("\n", 1)[1]


def test_help_upstream_prints_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-upstream"]) == 0
    assert "--algo.advantage.estimator" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.batchsize", "4"], "error: unknown flag --train.batchsize (did you mean --train.batch_size?)"),
        (["--train.batch_size", "x"], "error: argument --train.batch_size: invalid int value: 'x'"),
        (["--train.batch_size", "48"], "error: --rollout.batch_size 16 x --rollout.n_samples_per_prompt 8 = 128"),
        (["--ext.dapo.max_rounds", "0"], "error: --ext.dapo.max_rounds must be at least 1, got 0"),
        (["--train.partial_rollout_enable"], "error: OpenRLHF refuses these settings: --train.partial_rollout_enable"),
    ],
)
def test_a_bad_setting_is_one_line_and_exit_code_2(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GRPO, "--ext.run_dir", str(tmp_path / "run"), *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(message) and printed.err.count("\n") == 1
