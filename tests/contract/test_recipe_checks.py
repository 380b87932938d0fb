"""Recipes for GPUs pass all that is checked before an engine starts, with a tiny model of the same architecture."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from openrlhf_ext.adapters.data import check_data
from openrlhf_ext.checks import check_reward_file, read_prompt_files
from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.config_file import load_config
from openrlhf_ext.placement_needs import needed_gpus
from openrlhf_ext.settings import Settings
from openrlhf_ext.tasks.jsonl import write_jsonl

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]
# Geometry3k's vision model has tests of its own.
RECIPES = sorted(path for path in (ROOT / "configs/recipes").glob("*.yaml") if not path.stem.startswith("geometry3k"))


@pytest.fixture(scope="module")
def rehearse() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rehearse", ROOT / "scripts" / "rehearse.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def stand_ins(rehearse: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folder of a tiny model for each published name, made when it is asked for."""

    class Models(dict):
        def __missing__(self, name: str) -> Path:
            self[name] = tmp_path_factory.mktemp("model") / "model"
            rehearse.make_model(name, [row["input"] for row in rehearse.make_rows(4, True)], self[name])
            return self[name]

    return Models()


@pytest.fixture
def settings_of(rehearse, stand_ins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)

    def settings(recipe: Path, model: str | None = None) -> Settings:
        upstream = load_config(recipe).upstream
        rows = rehearse.make_rows(4, str(upstream["reward.remote_url"]).endswith("countdown_words.py"))
        data = tmp_path / "train.jsonl"
        write_jsonl(data, rows)
        model = model or str(stand_ins[upstream["actor.model_name_or_path"]])
        flags = ["--actor.model_name_or_path", model, "--data.prompt_dataset", str(data), "--eval.dataset", str(data)]
        return checked_settings(["--config", str(recipe), *flags, "--ext.run_dir", str(tmp_path / "run")])

    return settings


def check_prompts(settings: Settings) -> None:
    strategy = SimpleNamespace(args=settings.upstream, is_rank_0=lambda: False, print=lambda *words: None)
    files = check_data(strategy, settings.ext.data, read_prompt_files(settings))
    assert [(len(file.rows), len(file.skipped)) for file in files.values()] == [(4, 0), (4, 0)]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_it_passes_every_check_and_needs_the_gpus_that_it_says(recipe: Path, settings_of) -> None:
    settings = settings_of(recipe)
    check_prompts(settings)
    args = settings.upstream
    (stated,) = set(re.findall(r"# .*?GPUs: (\d+)", recipe.read_text()))
    assert needed_gpus(args) == int(stated)
    # Colocated: an engine for each rank, or OpenRLHF refuses when the cluster is up.
    assert (
        args.vllm.num_engines * args.vllm.tensor_parallel_size == args.actor.num_nodes * args.actor.num_gpus_per_node
    )
    # A row of full length fits a micro-batch.
    assert args.train.max_tokens_per_gpu >= args.data.max_len or "countdown" not in recipe.stem
    assert args.rollout.max_new_tokens < args.data.max_len <= args.rollout.max_tokens_per_gpu


@pytest.mark.parametrize("url", sorted({str(load_config(path).upstream["reward.remote_url"]) for path in RECIPES}))
def test_its_reward_file_loads(url: str, settings_of) -> None:
    recipe = next(path for path in RECIPES if load_config(path).upstream["reward.remote_url"] == url)
    check_reward_file(settings_of(recipe))


def test_qwen2_5_math_as_published_has_too_few_positions(
    rehearse, tmp_path: Path, settings_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, ties, _ = rehearse.MODELS["friendshipkim/Qwen2.5-Math-1.5B"]
    monkeypatch.setitem(rehearse.MODELS, "Qwen/Qwen2.5-Math-1.5B", (architecture, ties, 4096))
    rehearse.make_model("Qwen/Qwen2.5-Math-1.5B", ["What is 1 + 2?"], tmp_path / "model")
    recipe = ROOT / "configs/recipes/deepmath_qwen2_5_math_1_5b_grpo.yaml"
    with pytest.raises(
        ValueError, match="--data.max_len 10240 is beyond the model's max_position_embeddings; set at most 4096"
    ):
        check_prompts(settings_of(recipe, str(tmp_path / "model")))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_rehearsal_keeps_what_is_no_size_and_no_matter_of_gpus(
    recipe: Path, rehearse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    whole = rehearse.resolve(str(recipe), [], rehearse.build_parser(), rehearse.nest)
    changes = rehearse.overrides(whole, tmp_path / "out")
    assert all(re.match("stand-in|size|GPU only", change.reason) for change in changes)
    config = rehearse.prepare(whole, recipe, tmp_path / "out")
    small = checked_settings(["--config", str(config)])
    flags = {change.flag for change in changes}
    differs = {key for key in whole.flat if whole.flat[key] != small.flat[key]}
    assert differs <= flags | {"ckpt.path", "ckpt.output_dir"}  # which follow ext.run_dir
    # As many optimizer steps in a train step.
    steps = [
        s.flat["rollout.batch_size"] * s.flat["rollout.n_samples_per_prompt"] // s.flat["train.batch_size"]
        for s in (whole, small)
    ]
    assert steps[0] == steps[1]
    if whole.ext.pilot is not None:
        sizes = [s.flat["rollout.n_samples_per_prompt"] / s.ext.pilot.n_pilot for s in (whole, small)]
        assert sizes[0] == sizes[1] == 4


def test_a_rehearsal_overwrites_nothing_but_a_rehearsal(
    rehearse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "mine.txt").write_text("kept")
    with pytest.raises(SystemExit) as stop:
        rehearse.main([str(RECIPES[0]), "--out", str(tmp_path)])
    assert stop.value.code == 2 and "not from a rehearsal" in capsys.readouterr().err
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_model_whose_architecture_is_not_known_is_named(
    rehearse: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(f"base: {RECIPES[0]}\nactor.model_name_or_path: some/model\n")
    with pytest.raises(SystemExit) as stop:
        rehearse.main([str(tmp_path / "mine.yaml"), "--list"])
    assert stop.value.code == 2 and "some/model is not known here; add its architecture" in capsys.readouterr().err


def test_half_of_the_prompts_of_a_rehearsal_are_hopeless_and_the_others_by_checksum(
    rehearse: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    recipe = ROOT / "configs/recipes/countdown_qwen2_5_3b_grpo.yaml"
    rehearse.prepare(
        rehearse.resolve(str(recipe), [], rehearse.build_parser(), rehearse.nest), recipe, tmp_path / "out"
    )
    spec = importlib.util.spec_from_file_location("reward", tmp_path / "out" / "reward.py")
    reward = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reward)
    hopeful, hopeless = rehearse.make_rows(2, True)
    # crc32 of "a" is 0xe8b7be43, of "b" 0x71beeff9, of "d" 0x98dd4acc.
    for row, scores in ((hopeful, [1.0, 1.0, 0.0]), (hopeless, [0.0, 0.0, 0.0])):
        text = row["input"]
        graded = [reward.reward_func([text + answer], [text], [row["label"]]) for answer in "abd"]
        assert [one["scores"] for one in graded] == [one["rewards"] for one in graded] == scores
        assert graded[0]["extra_logs"] == {"accuracy": 0.0, "format": 0.0}  # the recipe's own grade
