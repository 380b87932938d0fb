"""Defaults < config files < command line, with a small parser in OpenRLHF's place."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_ext.config import DapoConfig
from openrlhf_ext.settings import Settings, dump_settings, help_text, resolve


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("actor", "critic", "reward"):
        parser.add_argument(f"--{name}.model_name_or_path", type=str, default=None)
    for name in ("reward.remote_url", "train.agent_func_path", "data.prompt_dataset", "eval.dataset"):
        parser.add_argument(f"--{name}", type=str, default=None)
    parser.add_argument("--ckpt.path", type=str, default="./ckpt/checkpoints")
    parser.add_argument("--ckpt.output_dir", type=str, default="./ckpt")
    parser.add_argument("--logger.tensorboard_dir", type=str, default=None)
    parser.add_argument("--logger.wandb.key", type=str, default=None)
    parser.add_argument("--train.batch_size", type=int, default=128)
    parser.add_argument("--actor.adam.lr", type=float, default=1e-6)
    parser.add_argument("--actor.adam.betas", type=float, nargs=2, default=(0.9, 0.95))
    parser.add_argument("--algo.threshold", type=float, nargs="+", default=[0.5, 5.0])
    parser.add_argument("--algo.level", type=str, default="off", choices=["off", "token"])
    parser.add_argument("--ckpt.save_hf", action="store_true", default=False)
    parser.add_argument("--muon.nesterov", action="store_true", default=True)
    parser.add_argument("--muon.no_nesterov", dest="muon.nesterov", action="store_false")
    return parser


def run(*argv: str, yaml: str = "") -> Settings:
    """Settings from a command line and the text of a config file in the current folder."""
    Path("a.yaml").write_text(yaml, encoding="utf-8")
    return resolve("a.yaml", ["--ext.run_dir", "r", *argv], make_parser(), lambda flat: SimpleNamespace(**flat))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(*argv: str, yaml: str = "") -> str:
    with pytest.raises(ValueError) as caught:
        run(*argv, yaml=yaml)
    return str(caught.value)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults() -> None:
    yaml = "train.batch_size: 64\nactor.adam.lr: 1e-3\next: {dapo: {max_rounds: 2, metric: reward}}\n"
    settings = run("--train.batch_size", "32", "--ext.dapo.max_rounds", "3", yaml=yaml)
    assert (settings.flat["train.batch_size"], settings.flat["actor.adam.lr"]) == (32, 0.001)
    assert settings.flat["algo.level"] == "off"
    assert settings.ext.dapo == DapoConfig(max_rounds=3, metric="reward")


def test_a_flag_of_a_part_switches_it_on_and_null_switches_it_off() -> None:
    assert run("--ext.dapo.max_rounds", "5").ext.dapo == DapoConfig(max_rounds=5)
    assert run("--ext.dapo", "null", yaml="ext: {dapo: {}}").ext.dapo is None


def test_ext_flags_take_lists_and_equals_signs_and_the_last_of_two_counts() -> None:
    flags = ["--ext.eval.pass_at", "1", "16", "--ext.eval.at_start=false", "--ext.max_steps=1", "--ext.max_steps=2"]
    settings = run(*flags)
    assert (settings.ext.eval.pass_at, settings.ext.eval.at_start, settings.ext.max_steps) == ((1, 16), False, 2)


def test_flags_of_openrlhf_may_stand_between_ours() -> None:
    settings = run("--algo.threshold", "1", "2", "--ext.max_steps", "4", "--ckpt.save_hf", "--actor.adam.lr", "-1")
    assert (settings.flat["algo.threshold"], settings.ext.max_steps) == ([1.0, 2.0], 4)
    assert (settings.flat["ckpt.save_hf"], settings.flat["actor.adam.lr"]) == (True, -1.0)


def test_file_values_become_what_the_flag_would_give() -> None:
    yaml = """
    actor.adam.betas: [0, 1]
    algo.threshold: 2
    algo.level: off
    ckpt.save_hf: true
    muon.no_nesterov: true
    reward.remote_url: null
    """
    flat = run(yaml=yaml).flat
    assert (flat["actor.adam.betas"], flat["algo.threshold"], flat["algo.level"]) == ([0.0, 1.0], [2.0], "off")
    assert (flat["ckpt.save_hf"], flat["muon.nesterov"], flat["reward.remote_url"]) == (True, False, None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train.batch_size: 1.5", "a.yaml:1: --train.batch_size must be an integer, got 1.5"),
        ("train.batch_size: '5'", "a.yaml:1: --train.batch_size must be an integer, got '5'"),
        ("train.batch_size: true", "a.yaml:1: --train.batch_size must be an integer, got True"),
        ("train.batch_size: null", "a.yaml:1: --train.batch_size must be an integer, got None"),
        ("actor.adam.lr: x", "a.yaml:1: --actor.adam.lr must be a number, got 'x'"),
        ("actor.adam.betas: [1]", "a.yaml:1: --actor.adam.betas must be a list of 2 values, got [1]"),
        ("algo.threshold: []", "a.yaml:1: --algo.threshold must be a list of at least one value, got []"),
        ("algo.level: on", "a.yaml:1: --algo.level must be one of off, token, got 'on'"),
        ("ckpt.save_hf: 1", "a.yaml:1: --ckpt.save_hf must be true or false, got 1"),
        ("reward.remote_url: 7", "a.yaml:1: --reward.remote_url must be a string (in quotes), got 7"),
        ("train.batchsize: 1", "a.yaml:1: unknown key train.batchsize (did you mean --train.batch_size?); see --help"),
        ("train: {}", "a.yaml:1: unknown key train"),
        ("ext.dapo.max_rounds: 0", "a.yaml:1: --ext.dapo.max_rounds must be at least 1, got 0; "),
        ("ext.dapo.max_round: 1", "a.yaml:1: --ext.dapo.max_round does not exist (did you mean --ext.dapo.max_rounds"),
        ("ext: {dap: {}}", "a.yaml:1: --ext.dap does not exist (did you mean --ext.dapo?)"),
    ],
)
def test_a_bad_line_of_the_file_is_refused_with_its_number(line: str, message: str) -> None:
    assert refusal(yaml=line).startswith(message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.batchsize", "1"], "unknown flag --train.batchsize (did you mean --train.batch_size?); see --help"),
        (["--train.batch", "1"], "unknown flag --train.batch (did you mean --train.batch_size?)"),
        (["--zzz"], "unknown flag --zzz; see --help and --help-upstream"),
        (["--ckpt.save_hf", "true"], "unexpected word 'true' on the command line"),
        (["--train.batch_size", "x"], "argument --train.batch_size: invalid int value: 'x'"),
        (["--algo.level", "on"], "argument --algo.level: invalid choice: 'on'"),
        (["--ext.dapo.max_rounds", "ten"], "--ext.dapo.max_rounds must be an integer, got 'ten'"),
        (["--ext.dapo.max_round", "1"], "--ext.dapo.max_round does not exist (did you mean --ext.dapo.max_rounds?)"),
    ],
)
def test_a_bad_flag_is_refused(argv: list[str], message: str) -> None:
    assert refusal(*argv).startswith(message)


def test_a_flag_that_overrides_a_line_is_not_blamed_on_the_file() -> None:
    message = refusal("--ext.dapo.max_rounds", "0", yaml="ext.dapo.max_rounds: 5")
    assert message.startswith("--ext.dapo.max_rounds must be at least 1, got 0")


def test_a_run_needs_a_directory() -> None:
    with pytest.raises(ValueError, match="--ext.run_dir is required"):
        resolve(None, [], make_parser(), lambda flat: SimpleNamespace(**flat))


def test_paths_become_absolute_and_names_of_a_hub_stay(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    flat = run(
        *("--actor.model_name_or_path", "model", "--critic.model_name_or_path", "organization/model"),
        *("--reward.remote_url", "reward.py,http://host/reward.py"),
        *("--data.prompt_dataset", "a.jsonl, organization/data", "--ckpt.path", "there"),
    ).flat
    assert flat["actor.model_name_or_path"] == str(tmp_path / "model")
    assert flat["critic.model_name_or_path"] == "organization/model"
    assert flat["reward.remote_url"] == f"{tmp_path}/reward.py,http://host/reward.py"
    assert flat["data.prompt_dataset"] == f"{tmp_path}/a.jsonl,organization/data"
    assert flat["ckpt.path"] == str(tmp_path / "there")


def test_checkpoints_and_the_model_go_under_the_run_directory_by_default(tmp_path: Path) -> None:
    settings = run()
    assert settings.ext.run_dir == str(tmp_path / "r")
    assert settings.flat["ckpt.path"] == str(tmp_path / "r" / "checkpoints")
    assert settings.flat["ckpt.output_dir"] == str(tmp_path / "r" / "model")


def test_printed_settings_load_as_the_same_settings_without_the_secret() -> None:
    yaml = "actor.adam.betas: [0.5, 0.9]\nmuon.no_nesterov: true\nlogger.wandb.key: s3cret\next: {dapo: {}}\n"
    settings = run("--data.prompt_dataset", "a.jsonl", "--ext.max_steps", "3", yaml=yaml)
    printed = dump_settings(settings)
    assert "s3cret" not in printed and "# logger.wandb.key: set, not shown" in printed
    Path("printed.yaml").write_text(printed)
    again = resolve("printed.yaml", [], make_parser(), lambda flat: SimpleNamespace(**flat))
    assert again.ext == settings.ext
    assert again.flat == {**settings.flat, "logger.wandb.key": None}


def test_printed_settings_with_another_run_directory_leave_that_of_the_first_alone(tmp_path: Path) -> None:
    Path("printed.yaml").write_text(dump_settings(run("--ckpt.output_dir", "elsewhere")))
    again = resolve("printed.yaml", ["--ext.run_dir", "b"], make_parser(), lambda flat: SimpleNamespace(**flat))
    assert again.flat["ckpt.path"] == str(tmp_path / "b" / "checkpoints")
    assert again.flat["ckpt.output_dir"] == str(tmp_path / "elsewhere")


def test_openrlhf_may_change_its_arguments_without_changing_ours() -> None:
    settings = run()
    settings.upstream.__dict__["algo.threshold"].insert(0, 0.0)
    assert settings.flat["algo.threshold"] == [0.5, 5.0]


def test_help_lists_every_flag_with_its_default_and_unit() -> None:
    text = help_text()
    assert "--ext.run_dir  a string\n" in text
    assert "--ext.dapo.max_rounds  an integer [rounds]\n" in text
    assert "(default 10; verl's DAPO recipe)" in text
    assert "(default 1 2 4 8)" in text and "(default true)" in text and "(default null; verl's DAPO recipe)" in text
