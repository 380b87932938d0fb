"""Recipes for GPUs: every value says where it is from, and what the comments say of them is so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from openrlhf_ext.config import ExtConfig
from openrlhf_ext.config_file import load_config
from openrlhf_ext.config_loading import from_dict

FOLDER = Path(__file__).parents[2] / "configs" / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))
FILES = sorted(FOLDER.rglob("*.yaml"))
METHODS = {
    "countdown_qwen2_5_3b": "popo",
    "deepscaler_r1_distill_qwen_1_5b": "popo",
    "deepscaler_r1_distill_qwen_7b": "popo",
    "geometry3k_qwen2_5_vl_3b": "popo",
    "math_qwen3_0_6b_base": "aper",
    "math_qwen3_1_7b_base": "aper",
    "math_qwen3_4b_base": "aper",
    "deepmath_qwen2_5_math_1_5b": "pilot_commit",
    "polaris_qwen3_4b_base": "pilot_commit",
}
TAGS = re.findall(r"^\| ([\w ]+) \|", (FOLDER / "README.md").read_text().split("## Sources")[1], re.MULTILINE)[1:]


def value_lines(node: yaml.Node) -> Iterator[int]:
    """Lines (from 0) on which a value is set; a mapping in braces counts as one value."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style:
        for key, value in node.value:
            if key.value != "base":
                yield from value_lines(value)
    else:
        yield node.start_mark.line


def ext_of(path: Path) -> ExtConfig:
    raw = load_config(path)
    return from_dict(ExtConfig, raw.ext, origins=raw.origins)


def ids(path: Path) -> str:
    return path.stem


def test_each_setting_has_grpo_dapo_and_the_method_of_its_paper() -> None:
    written = {f"{setting}_{method}" for setting, own in METHODS.items() for method in ("grpo", "dapo", own)}
    assert {path.stem for path in RECIPES} == written


def test_the_legend_is_read() -> None:
    assert {"POPO", "PC code", "our choice"} <= set(TAGS)


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_every_value_says_where_it_is_from(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    bare = [
        f"{path.name}:{number + 1}: {lines[number]}"
        for number in sorted(set(value_lines(yaml.compose(path.read_text(encoding="utf-8")))))
        if not re.search(rf"# ({'|'.join(TAGS)})\b", lines[number])
    ]
    assert bare == []


def test_a_value_without_a_source_would_be_seen() -> None:
    text = "a: 1  # POPO\nb:\n  c: 2\next: {d: 3, e: 4}\nbase: other.yaml\n"
    assert list(value_lines(yaml.compose(text))) == [0, 2, 3]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_our_choices_give_their_reason_or_have_none_to_give(path: Path) -> None:
    """Where runs go and how often they are looked at needs none."""
    plain = ("run_dir:", "steps:", "save_steps:", "pass_at:", "num_nodes:", "num_gpus_per_node:")
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.partition("#")[2].strip() == "our choice":
            assert any(key in line for key in plain), line


@pytest.mark.parametrize("path", RECIPES, ids=ids)
def test_its_parts_are_those_of_its_method(path: Path) -> None:
    ext = ext_of(path)
    method = next(name for name in ("grpo", "dapo", "popo", "aper", "pilot_commit") if path.stem.endswith(name))
    on = {"dapo": ext.dapo, "popo": ext.fill, "aper": ext.replay, "pilot_commit": ext.pilot}
    assert {name for name, part in on.items() if part is not None} == {method} - {"grpo"}
    assert ext.groups is not None and ext.groups.ineffective == ("drop" if method == "aper" else "keep")
    assert ext.run_dir == f"runs/{path.stem}"
    assert ext.success_replay is ext.mopps is ext.throttle is None


@pytest.mark.parametrize("setting", METHODS)
def test_methods_of_a_setting_differ_in_ext_only(setting: str) -> None:
    """The comparison is of methods: nothing of OpenRLHF's may differ, and no reward, length or learning rate."""
    method = METHODS[setting]
    grpo, *others = (load_config(FOLDER / f"{setting}_{name}.yaml") for name in ("grpo", "dapo", method))
    for other in others:
        assert other.upstream == grpo.upstream
        own = {key for key in other.ext if other.ext[key] != grpo.ext.get(key)}
        assert own <= {"run_dir", "dapo", "fill", "replay", "pilot", "pool", "groups"}


def test_popo_generates_the_rollouts_that_its_paper_counts() -> None:
    raw, ext = (
        load_config(FOLDER / "countdown_qwen2_5_3b_popo.yaml"),
        ext_of(FOLDER / "countdown_qwen2_5_3b_popo.yaml"),
    )
    per_step = raw.upstream["rollout.batch_size"] * raw.upstream["rollout.n_samples_per_prompt"]
    assert per_step * ext.max_steps == 204_800  # "205k"


@pytest.mark.parametrize(
    ("setting", "pilots", "commits"), [("deepmath_qwen2_5_math_1_5b", 32, 96), ("polaris_qwen3_4b_base", 16, 48)]
)
def test_pilot_commit_splits_a_group_as_its_code_does(setting: str, pilots: int, commits: int) -> None:
    raw = load_config(FOLDER / f"{setting}_pilot_commit.yaml")
    size = raw.upstream["rollout.n_samples_per_prompt"]
    assert ext_of(FOLDER / f"{setting}_pilot_commit.yaml").pilot.pilots_per_prompt(size) == pilots == size - commits
