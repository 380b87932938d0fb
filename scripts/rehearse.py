"""Rehearse a recipe on the CPU: its flags on the real Ray, vLLM and DeepSpeed, with a tiny random model of its kind.

    python scripts/rehearse.py configs/recipes/countdown_qwen2_5_3b_popo.yaml

Makes the model (two layers of the same architecture), a handful of prompts like the recipe's, and a configuration that
is the recipe but for sizes and for what only a GPU can do, and trains three steps. Every flag that differs is printed
with its reason. `--list` prints them and stops.

A random model is never right. So the recipe's reward file is called, as a test of itself, and then half of the prompts
count as hopeless, and the answers to the others as right or wrong by a checksum: each method has groups of both kinds.
"""

import argparse
import json
import os
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # transformers imports DeepSpeed, which else warns that it finds no GPU

import torch  # noqa: E402
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.models.qwen2 import Qwen2Config  # noqa: E402
from transformers.models.qwen3 import Qwen3Config  # noqa: E402
from transformers.utils.logging import disable_progress_bar  # noqa: E402

from openrlhf_ext.adapters.upstream_cli import build_parser, nest  # noqa: E402
from openrlhf_ext.cli import train_ppo_ray  # noqa: E402
from openrlhf_ext.config_file import dump_yaml  # noqa: E402
from openrlhf_ext.eval_sets import MATH_TEMPLATE, PLACEHOLDER  # noqa: E402
from openrlhf_ext.run_dir import read_metrics  # noqa: E402
from openrlhf_ext.settings import Settings, resolve  # noqa: E402
from openrlhf_ext.tasks.countdown import Puzzle  # noqa: E402
from openrlhf_ext.tasks.countdown_words import prompt_of  # noqa: E402
from openrlhf_ext.tasks.jsonl import write_jsonl  # noqa: E402

# Model of a recipe -> architecture, whether its embeddings are shared with the output layer, and its positions, as
# published. Those of Pilot-Commit's own copy could not be seen; it was trained with 10,240.
MODELS = {
    "Qwen/Qwen2.5-3B": (Qwen2Config, True, 32_768),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": (Qwen2Config, False, 131_072),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (Qwen2Config, False, 131_072),
    "friendshipkim/Qwen2.5-Math-1.5B": (Qwen2Config, True, 10_240),
    "Qwen/Qwen3-0.6B-Base": (Qwen3Config, True, 32_768),
    "Qwen/Qwen3-1.7B-Base": (Qwen3Config, True, 32_768),
    "Qwen/Qwen3-4B-Base": (Qwen3Config, True, 32_768),
}

VISION_MODEL = "Qwen/Qwen2.5-VL-3B-Instruct"
"""Made by `tasks/tiny_vision_model.py`, with pictures; needs torchvision."""

STEPS = 3
_CONFIG = "rehearsal.yaml"
_HOPELESS = "(hopeless)"
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen2's own, which transformers gives every tokenizer of that model type.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_REWARD = """
import runpy
import zlib

recipe = runpy.run_path({path!r})["reward_func"]


def reward_func(queries, prompts, labels):
    graded = recipe(queries, prompts, labels)
    response = queries[0][len(prompts[0]) :]
    right = float({hopeless!r} not in prompts[0] and zlib.crc32(response.encode()) % 2)
    return {{"rewards": right, "scores": right, "extra_logs": graded["extra_logs"]}}
"""


@dataclass(frozen=True, slots=True)
class Override:
    flag: str
    value: object
    reason: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, help="folder, made anew (default runs/rehearsal/RECIPE)")
    parser.add_argument("--list", action="store_true", help="only print the flags that differ from the recipe's")
    args = parser.parse_args(argv)
    out = (args.out or Path("runs/rehearsal") / args.recipe.stem).absolute()
    try:
        recipe = resolve(str(args.recipe), [], build_parser(), nest)
        changes = overrides(recipe, out)
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"error: {error}\n")
    for change in changes:
        print(f"{change.flag}: {change.value}  # {change.reason}")
    if args.list:
        return 0
    if out.exists() and not (out / _CONFIG).is_file():
        parser.exit(2, f"error: --out {out} is there, and not from a rehearsal; it is not overwritten, name another\n")
    shutil.rmtree(out, ignore_errors=True)
    config = prepare(recipe, args.recipe, out)
    code = train_ppo_ray.main(["--config", str(config)])
    if code == 0:
        rows = read_metrics(out / "run", "train")
        replayed = [row["step/num_replayed"] for row in rows]
        print(f"{args.recipe.stem}: {len(rows)} steps, {sum(map(int, replayed))} rows replayed")
        return 0 if len(rows) == STEPS else 1
    return code


def overrides(recipe: Settings, out: Path) -> list[Override]:
    """What a rehearsal of `recipe` in folder `out` changes, by flag.

    Raises:
        ValueError: the recipe's model is none of `MODELS`.
    """
    flat, ext = recipe.flat, recipe.ext
    if flat["actor.model_name_or_path"] not in {*MODELS, VISION_MODEL}:
        raise ValueError(
            f"--actor.model_name_or_path {flat['actor.model_name_or_path']} is not known here; add its architecture "
            "to MODELS in scripts/rehearse.py"
        )
    chooses = ext.dapo or ext.pilot
    batch, size = (4, 16) if ext.pilot else (4, 8) if ext.dapo else (8, 8)
    steps = (
        int(flat["rollout.batch_size"]) * int(flat["rollout.n_samples_per_prompt"]) // int(flat["train.batch_size"])
    )
    standing_in, smaller = "stand-in", "size"
    one_rank = "size: one rank and one engine on the CPU"
    found = [
        Override(
            "actor.model_name_or_path", str(out / "model"), f"{standing_in}: random, two layers, same architecture"
        ),
        Override("data.prompt_dataset", str(out / "train.jsonl"), standing_in),
        Override("eval.dataset", str(out / "eval.jsonl"), standing_in),
        Override("reward.remote_url", str(out / "reward.py"), f"{standing_in}: calls the recipe's, see above"),
        Override("ext.run_dir", str(out / "run"), standing_in),
        Override("rollout.batch_size", batch, smaller),
        Override("rollout.n_samples_per_prompt", size, smaller),
        Override("rollout.micro_batch_size", 16, smaller),
        Override("rollout.max_new_tokens", 16, smaller),
        Override("train.batch_size", batch * size // steps, f"{smaller}: {steps} optimizer steps, as in the recipe"),
        Override("train.micro_batch_size", 8, smaller),
        Override("data.max_len", 512, smaller),
        Override("eval.n_samples_per_prompt", 1, smaller),
        Override("ext.eval.pass_at", [1], smaller),
        Override("ext.max_steps", STEPS, smaller),
        Override("actor.num_nodes", 1, one_rank),
        Override("actor.num_gpus_per_node", 1, one_rank),
        Override("vllm.num_engines", 1, one_rank),
        Override("ds.attn_implementation", "sdpa", "GPU only: flash attention"),
        Override("ds.packing_samples", False, "GPU only: needs flash attention"),
        Override("train.dynamic_batch_enable", False, "GPU only: OpenRLHF packs samples with it"),
        Override("ds.enable_sleep", False, "GPU only: moves optimizer states between GPU and host"),
        Override("vllm.sync_backend", "gloo", "GPU only: NCCL"),
        Override("vllm.enforce_eager", True, "GPU only: CUDA graphs"),
    ]
    if chooses and chooses.prompts_per_round:
        ratio = chooses.prompts_per_round // int(flat["rollout.batch_size"])
        part = "dapo" if ext.dapo else "pilot"
        found.append(Override(f"ext.{part}.prompts_per_round", ratio * batch, f"{smaller}: {ratio} x the batch"))
    if ext.pilot and ext.pilot.n_pilot:
        share = int(flat["rollout.n_samples_per_prompt"]) // ext.pilot.n_pilot
        found.append(Override("ext.pilot.n_pilot", size // share, f"{smaller}: a group / {share}, as in the recipe"))
    if flat["algo.kl.init_coef"]:
        found += [Override("ref.num_nodes", 1, one_rank), Override("ref.num_gpus_per_node", 1, one_rank)]
    if ext.replay:
        found.append(Override("ext.replay.warmup_steps", 1, smaller))
    if flat["reward.overlong_buffer_len"] is not None:
        found.append(Override("reward.overlong_buffer_len", 8.0, f"{smaller}: of the response, as in the recipe"))
    return found


def prepare(recipe: Settings, path: Path, out: Path) -> Path:
    """Make the model, the prompts, the reward file and the configuration; returns the configuration."""
    is_countdown = str(recipe.flat["reward.remote_url"]).endswith("countdown_words.py")
    count = 16 if recipe.ext.dapo or recipe.ext.pilot else 8
    rows = make_rows(count, is_countdown)
    out.mkdir(parents=True)
    # First of all: by this file the folder is known for what it is.
    config = out / _CONFIG
    changed = {change.flag: change.value for change in overrides(recipe, out)}
    config.write_text(dump_yaml({"base": str(path.absolute()), **changed}), encoding="utf-8")
    if recipe.flat["actor.model_name_or_path"] == VISION_MODEL:
        from openrlhf_ext.tasks import tiny_vision_model

        for index, row in enumerate(rows):
            tiny_vision_model.draw_picture(out / "images" / f"{index}.png", index)
            row |= {"input": f"<image>{row['input']}", "images": f"images/{index}.png"}
        tiny_vision_model.save(out / "model")
    else:
        make_model(str(recipe.flat["actor.model_name_or_path"]), [row["input"] for row in rows], out / "model")
    write_jsonl(out / "train.jsonl", rows)
    write_jsonl(out / "eval.jsonl", rows[:4])
    reward = _REWARD.format(path=recipe.flat["reward.remote_url"], hopeless=_HOPELESS)
    (out / "reward.py").write_text(reward, encoding="utf-8")
    return config


def make_model(name: str, texts: Sequence[str], out: Path) -> None:
    """A random model of the architecture of `name`, and a byte-level tokenizer with its chat template.

    Raises:
        RuntimeError: AutoTokenizer does not give the texts back (transformers replaces tokenizers by model type).
    """
    architecture, ties, positions = MODELS[name]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[2], pad_token=special[0])
    tokenizer.chat_template = _CHATML
    # Heads of 32 suit vLLM's CPU attention.
    config = architecture(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=ties,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    disable_progress_bar()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    file = out / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tokenizer_class": "Qwen2Tokenizer"}))
    loaded = AutoTokenizer.from_pretrained(out)
    if any(loaded.decode(loaded(text, add_special_tokens=False)["input_ids"]) != text for text in texts):
        raise RuntimeError(f"{type(loaded).__name__} does not give a text back unchanged")


def make_rows(count: int, is_countdown: bool) -> list[dict[str, str]]:
    """Prompts like those of a recipe's data; every second one is hopeless."""
    rows = []
    for index in range(count):
        numbers = tuple(random.Random(index).choices(range(1, 100), k=3))
        puzzle = Puzzle(numbers, sum(numbers))
        problem = MATH_TEMPLATE.replace(PLACEHOLDER, f"What is {' + '.join(map(str, numbers))}?")
        text, label = (prompt_of(puzzle), puzzle.label) if is_countdown else (problem, str(puzzle.target))
        rows.append(
            {"id": f"rehearsal-{index}", "input": f"{text} {_HOPELESS}" if index % 2 else text, "label": label}
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
