"""The recipes with images pass everything that is checked before an engine starts, with a tiny model of their kind."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from images_only import make_processor

from openrlhf_ext.adapters import data
from openrlhf_ext.checks import check_reward_file, read_prompt_files
from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.placement_needs import needed_gpus
from openrlhf_ext.settings import Settings
from openrlhf_ext.tasks import tiny_vision_model
from openrlhf_ext.tasks.jsonl import write_jsonl

pytestmark = pytest.mark.contract
with_processor = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None,
    reason="NOT TESTED, no torchvision, which image processors need",
)

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("geometry3k*.yaml"))


@pytest.fixture
def rehearse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "scripts" / "rehearse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    def settings(recipe: Path, *flags: str) -> Settings:
        rows = []
        for i in range(4):
            tiny_vision_model.draw_picture(tmp_path / f"{i}.png", i)
            rows.append({"id": str(i), "input": "<image>Find x.", "label": "1", "images": f"{i}.png"})
        write_jsonl(tmp_path / "rows.jsonl", rows)
        return checked_settings(
            ["--config", str(recipe), "--actor.model_name_or_path", str(tmp_path / "model")]
            + ["--data.prompt_dataset", str(tmp_path / "rows.jsonl"), "--eval.dataset", str(tmp_path / "rows.jsonl")]
            + ["--ext.run_dir", str(tmp_path / "run"), *flags]
        )

    return settings


def check_prompts(settings: Settings) -> None:
    strategy = SimpleNamespace(args=settings.upstream, is_rank_0=lambda: False, print=lambda *words: None)
    files = data.check_data(strategy, settings.ext.data, read_prompt_files(settings))
    assert [(len(file.rows), len(file.skipped)) for file in files.values()] == [(4, 0), (4, 0)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_passes_every_check_of_its_settings_and_needs_the_gpus_that_it_says(
    recipe: Path, settings_of, tmp_path: Path
) -> None:
    tiny_vision_model.make_model().save_pretrained(tmp_path / "model")
    settings = settings_of(recipe)
    args = settings.upstream
    (stated,) = set(re.findall(r"# .*?GPUs: (\d+)", recipe.read_text()))
    assert needed_gpus(args) == int(stated)
    # Colocated: an engine for each rank, or OpenRLHF refuses when the cluster is up.
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node
    assert args.vllm.num_engines * args.vllm.tensor_parallel_size == ranks
    assert not args.ds.packing_samples
    check_reward_file(settings)


def test_popo_generates_the_rollouts_that_its_paper_counts(settings_of, tmp_path: Path) -> None:
    tiny_vision_model.make_model().save_pretrained(tmp_path / "model")
    settings = settings_of(ROOT / "configs" / "recipes" / "geometry3k_qwen2_5_vl_3b_popo.yaml")
    rollout = settings.upstream.rollout
    assert rollout.batch_size * rollout.n_samples_per_prompt * settings.ext.max_steps == 491_520  # "492k"


def test_its_prompts_pass_with_a_real_processor_and_not_without_room_for_their_images(
    settings_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = make_processor()
    monkeypatch.setattr(data, "get_tokenizer", lambda *args, **kwargs: processor)
    tiny_vision_model.make_model().save_pretrained(tmp_path / "model")
    check_prompts(settings_of(RECIPES[0]))
    # 29 tokens of text, one of them the place of an image of 12 tokens.
    with pytest.raises(ValueError, match=r"rows.jsonl:1: 40 tokens, more than the 20 that --data.max_len 1044"):
        check_prompts(settings_of(RECIPES[0], "--data.max_len", "1044"))
    with pytest.raises(ValueError, match="has 1 images, but --data.max_images_per_prompt is 0; raise it"):
        check_prompts(settings_of(RECIPES[0], "--data.max_images_per_prompt", "0"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_rehearsal_keeps_what_is_no_size_and_no_matter_of_gpus(
    recipe: Path, rehearse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    whole = rehearse.resolve(str(recipe), [], rehearse.build_parser(), rehearse.nest)
    changes = rehearse.overrides(whole, tmp_path / "out")
    assert all(re.match("stand-in|size|GPU only", change.reason) for change in changes)
    small = checked_settings(["--config", str(rehearse.prepare(whole, recipe, tmp_path / "out"))])
    differs = {key for key in whole.flat if whole.flat[key] != small.flat[key]}
    assert differs <= {change.flag for change in changes} | {"ckpt.path", "ckpt.output_dir"}
