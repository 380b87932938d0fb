"""The config dataclasses, their strict loading, and YAML files with inheritance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from openrlhf_ext.config import ConfigError, DapoConfig, EvalConfig, ExtConfig, GroupsConfig, LogConfig, RewardConfig
from openrlhf_ext.config_file import RawConfig, assign, dump_yaml, load_config
from openrlhf_ext.config_loading import CommandLineValue, flags, from_dict, to_dict


def load(**parts: object) -> ExtConfig:
    return from_dict(ExtConfig, {"run_dir": "runs/x", **parts})


def word(*words: str) -> CommandLineValue:
    return CommandLineValue(words)


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_optional_parts_are_off_and_the_others_have_their_defaults() -> None:
    config = load()
    assert (config.groups, config.dapo, config.max_steps) == (None, None, None)
    assert config.reward == RewardConfig()
    assert config.eval.pass_at == (1, 2, 4, 8)


def test_an_empty_part_is_on_with_defaults_and_null_is_off() -> None:
    assert load(dapo={}).dapo == DapoConfig()
    assert load(dapo=None).dapo is None


def test_loading_what_to_dict_gives_is_the_identity() -> None:
    config = load(dapo={"max_rounds": 3}, groups={"ineffective": "drop"}, eval={"pass_at": [1, 16]}, max_steps=7)
    assert from_dict(ExtConfig, to_dict(config)) == config


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"dapo": {"max_rounds": "ten"}}, "--ext.dapo.max_rounds must be an integer, got 'ten'"),
        ({"dapo": {"max_rounds": "5"}}, "--ext.dapo.max_rounds must be an integer, got '5'"),
        ({"dapo": {"max_rounds": True}}, "--ext.dapo.max_rounds must be an integer, got True"),
        ({"dapo": {"max_rounds": 2.0}}, "--ext.dapo.max_rounds must be an integer, got 2.0"),
        ({"dapo": {"max_rounds": None}}, "--ext.dapo.max_rounds must be an integer, got None"),
        ({"dapo": True}, "--ext.dapo must be a mapping or null, got True"),
        ({"eval": None}, "--ext.eval must be a mapping, got None"),
        ({"eval": {"at_start": 1}}, "--ext.eval.at_start must be true or false, got 1"),
        ({"eval": {"pass_at": 4}}, "--ext.eval.pass_at must be a list of integers, got 4"),
        ({"eval": {"pass_at": [1, "2"]}}, "--ext.eval.pass_at must be a list of integers, got [1, '2']"),
        ({"log": {"wandb": "on"}}, "--ext.log.wandb must be one of off, offline, online, got 'on'"),
        ({"run_dir": 5}, "--ext.run_dir must be a string, got 5"),
        ({"max_steps": "all"}, "--ext.max_steps must be an integer or null, got 'all'"),
    ],
)
def test_a_value_of_another_type_is_refused_by_full_name(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**parts)
    assert str(caught.value) == message


def test_an_integer_is_a_number_where_a_float_is_wanted() -> None:
    assert load(reward={"deadline_s": 3}).reward.deadline_s == 3.0


def test_an_unknown_key_names_its_place_and_the_nearest_key() -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(ExtConfig, {"run_dir": "x", "dapo": {"max_round": 1}}, origins={"ext.dapo.max_round": "a.yaml:3"})
    message = str(caught.value)
    assert message.startswith("a.yaml:3: --ext.dapo.max_round does not exist (did you mean --ext.dapo.max_rounds?)")


def test_a_missing_required_field_is_named() -> None:
    with pytest.raises(ConfigError, match="--ext.run_dir is required"):
        from_dict(ExtConfig, {})


@pytest.mark.parametrize(
    ("part", "values", "key"),
    [
        (DapoConfig, {"max_rounds": 0}, "ext.dapo.max_rounds"),
        (DapoConfig, {"prompts_per_round": 0}, "ext.dapo.prompts_per_round"),
        (GroupsConfig, {"tolerance": -1e-9}, "ext.groups.tolerance"),
        (GroupsConfig, {"tolerance": math.nan}, "ext.groups.tolerance"),
        (RewardConfig, {"deadline_s": math.inf}, "ext.reward.deadline_s"),
        (RewardConfig, {"workers": 0}, "ext.reward.workers"),
        (EvalConfig, {"pass_at": ()}, "ext.eval.pass_at"),
        (EvalConfig, {"pass_at": (2, 1)}, "ext.eval.pass_at"),
        (EvalConfig, {"pass_at": (0, 1)}, "ext.eval.pass_at"),
        (LogConfig, {"samples_per_step": -1}, "ext.log.samples_per_step"),
    ],
)
def test_a_value_outside_its_range_is_refused_by_flag(part: type, values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        part(**values)
    assert caught.value.key == key
    assert str(caught.value).startswith(f"--{key} must be ")


def test_a_value_outside_its_range_names_the_line_it_was_set_in() -> None:
    with pytest.raises(ConfigError, match=r"^a.yaml:9: --ext.dapo.max_rounds must be at least 1, got 0; "):
        from_dict(ExtConfig, {"run_dir": "x", "dapo": {"max_rounds": 0}}, origins={"ext.dapo.max_rounds": "a.yaml:9"})


def test_words_of_the_command_line_are_read_by_the_type_of_the_field() -> None:
    config = load(
        run_dir=word("7"),
        max_steps=word("null"),
        dapo={"max_rounds": word("5"), "tolerance": word("1e-3")},
        eval={"pass_at": word("1", "4"), "at_start": word("false")},
        log={"wandb": word("off")},
    )
    assert (config.run_dir, config.max_steps) == ("7", None)
    assert config.dapo == DapoConfig(max_rounds=5, tolerance=0.001)
    assert config.eval == EvalConfig(pass_at=(1, 4), at_start=False)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"dapo": {"max_rounds": word("ten")}}, "--ext.dapo.max_rounds must be an integer, got 'ten'"),
        ({"dapo": {"max_rounds": word()}}, "--ext.dapo.max_rounds must be an integer, got ''"),
        ({"dapo": {"max_rounds": word("1", "2")}}, "--ext.dapo.max_rounds must be an integer, got '1 2'"),
        ({"eval": {"at_start": word("yes")}}, "--ext.eval.at_start must be true or false, got 'yes'"),
        ({"dapo": word("on")}, "--ext.dapo must be a mapping or null, got 'on'"),
    ],
)
def test_words_that_do_not_fit_the_field_are_refused(parts: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**parts)
    assert str(caught.value) == message


def test_every_flag_says_what_it_means() -> None:
    listed = flags(ExtConfig)
    assert {"ext.run_dir", "ext.dapo.max_rounds", "ext.log.wandb"} <= {flag.key for flag in listed}
    assert all(flag.metadata["help"] for flag in listed)


def test_a_config_file_takes_dotted_and_nested_keys_alike(tmp_path: Path) -> None:
    text = "rollout.batch_size: 16\nalgo: {kl: {init_coef: 0.0}}\next.dapo.max_rounds: 5\next:\n  groups: {}\n"
    path = write(tmp_path, "a.yaml", text)
    assert load_config(path) == RawConfig(
        upstream={"rollout.batch_size": 16, "algo.kl.init_coef": 0.0},
        ext={"dapo": {"max_rounds": 5}, "groups": {}},
        origins={
            "rollout.batch_size": f"{path}:1",
            "algo": f"{path}:2",
            "algo.kl": f"{path}:2",
            "algo.kl.init_coef": f"{path}:2",
            "ext.dapo.max_rounds": f"{path}:3",
            "ext": f"{path}:4",
            "ext.groups": f"{path}:5",
        },
    )


def test_a_file_wins_over_its_base_key_by_key(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    write(tmp_path, "root.yaml", "train.seed: 1\nrollout: {batch_size: 8, top_p: 0.5}\next: {dapo: {max_rounds: 2}}\n")
    write(tmp_path, "middle.yaml", "base: root.yaml\ntrain.seed: 2\next: {dapo: {metric: reward}, groups: {}}\n")
    leaf = write(tmp_path / "sub", "leaf.yaml", "base: ../middle.yaml\nrollout.batch_size: 9\next: {groups: null}\n")
    config = load_config(leaf)
    assert config.upstream == {"train.seed": 2, "rollout.batch_size": 9, "rollout.top_p": 0.5}
    assert config.ext == {"dapo": {"max_rounds": 2, "metric": "reward"}, "groups": None}
    assert config.origins["train.seed"].endswith("middle.yaml:2")


def test_null_switches_a_part_of_the_base_off_and_a_later_flag_on_again(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "ext: {dapo: {max_rounds: 2}}\n")
    config = load_config(write(tmp_path, "a.yaml", "base: base.yaml\next: {dapo: null}\n"))
    assert config.ext == {"dapo": None}
    assign(config.ext, "dapo.metric", "reward")
    assert config.ext == {"dapo": {"metric": "reward"}}


def test_an_empty_part_keeps_what_the_base_sets_in_it(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "ext: {dapo: {max_rounds: 2}}\n")
    assert load_config(write(tmp_path, "a.yaml", "base: base.yaml\next: {dapo: {}}\n")).ext == {
        "dapo": {"max_rounds": 2}
    }


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        (".5", 0.5),
        ("-2", -2),
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("~", None),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("'5'", "5"),
        ("[1, 2e-1]", [1, 0.2]),
    ],
)
def test_plain_scalars_follow_yaml_1_2(tmp_path: Path, scalar: str, value: object) -> None:
    read = load_config(write(tmp_path, "a.yaml", f"key: {scalar}\n")).upstream["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "a.yaml:3: a was already set in line 1; keep one of the two"),
        ("a.b: 1\na:\n  b: 2\n", "a.yaml:3: a.b was already set in line 1; keep one of the two"),
        ("ext:\n  dapo: {}\n  dapo: null\n", "a.yaml:3: ext.dapo was already set in line 2; keep one of the two"),
        ("- 1\n", "a.yaml:1: a config file is a mapping of `flag: value` lines"),
        ("1: x\n", "a.yaml:1: a key must be a name, got 1; write the flag without dashes"),
        ("a: [1\n", "a.yaml:2: not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("a: !!python/name:os.system\n", "a.yaml:1: not valid YAML: could not determine a constructor"),
        ("ext: 5\n", "a.yaml:1: ext must be a mapping of parts, got 5"),
        ("base: [b.yaml]\n", "a.yaml:1: base must be one path, relative to this file, got ['b.yaml']"),
        ("base: none.yaml\n", "a.yaml:1: base: cannot read none.yaml (No such file or directory)"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.yaml", text)
    with pytest.raises(ValueError) as caught:
        load_config("a.yaml")
    assert str(caught.value).startswith(message)


def test_a_circle_of_bases_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "b.yaml", "base: a.yaml\n")
    with pytest.raises(ValueError, match=r"b.yaml:1: base: .*a circle: a.yaml -> b.yaml -> a.yaml"):
        load_config(write(tmp_path, "a.yaml", "base: b.yaml\n"))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "a.yaml", "# nothing\n")) == RawConfig({}, {}, {})


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(ValueError, match="is not UTF-8 at byte 3"):
        load_config(tmp_path / "a.yaml")


def test_dumped_values_are_read_back_as_they_were(tmp_path: Path) -> None:
    values = {"a": "off", "b": "1e3", "c": "010", "d": 1e-6, "e": [0.5, 5.0], "f": None, "g": "x\ny", "h": math.inf}
    assert load_config(write(tmp_path, "a.yaml", dump_yaml(values))).upstream == values


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"capacity": 0}, "--ext.fill.capacity must be at least 1, got 0; --ext.fill null is off"),
        ({"max_gib": 0}, "--ext.fill.max_gib must be a positive number of GiB, got 0"),
        ({"max_gib": math.inf}, "--ext.fill.max_gib must be a positive number of GiB, got inf"),
        ({"min_age": 0}, "--ext.fill.min_age must be at least 1, got 0; a group can be used from the next step on"),
        ({"min_age": 3, "max_age": 2}, "--ext.fill.max_age must be at least 3, got 2; it cannot be below"),
        ({"max_uses": 0}, "--ext.fill.max_uses must be at least 1, got 0; null means no limit"),
        ({"max_frac": 0}, "--ext.fill.max_frac must be above 0 and at most 1, got 0; 1 is no cap"),
        ({"max_frac": math.nan}, "--ext.fill.max_frac must be above 0 and at most 1, got nan"),
        ({"weight_cap": 0.5}, "--ext.fill.weight_cap must be at least 1, got 0.5; below 1 even an unchanged policy"),
        ({"weight_cap": math.nan}, "--ext.fill.weight_cap must be at least 1, got nan"),
        ({"objective": "is"}, "--ext.fill.objective must be one of decoupled, on_policy, behavior_clip, got 'is'"),
    ],
)
def test_a_filling_that_makes_no_sense_is_refused(fill: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(fill=fill)
    assert str(caught.value).startswith(message)


def test_filling_is_off_unless_asked_for_and_an_age_limit_may_be_the_youngest_age() -> None:
    assert load().fill is None
    assert load(fill={"min_age": 3, "max_age": 3}).fill.max_age == 3
