"""Chat templates, agents of several turns and LoRA on the real stack, under the methods, and resumed.

All runs of a stack have the agent of ``retry_agent.py``, whose rewards do not depend on what the model says.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import train_on_one_stack
from laws import check_births, check_filling, check_rollout_replay, lines
from test_resume import check_metrics, without_advantage

from openrlhf_ext.run_dir import read_metrics

TURN_TOKENS, FEEDBACK = 6, "\nagain:"
"""Of ``retry_agent.py``, which takes the stack to import."""
GROUPS, SIZE, STEPS, KILLED_AFTER = 6, 8, 4, 2
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
LORA = ("--ds.lora.rank", "8", "--actor.adam.lr", "1e-2")  # high, so that weights which did not arrive would show


@pytest.fixture(scope="module")
def task(countdown: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with prompts as chat messages, and a model with a chat template that shows."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("chat")
    shutil.copytree(countdown / "model", folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    rows = [
        {"id": str(i), "input": [{"role": "u", "content": f"{i} 2 3 = ?"}], "label": str(i)} for i in range(4 * GROUPS)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def flags(task: Path, config: str, *more: str) -> list[str]:
    return [
        f"configs/cpu/{config}.yaml",
        *("--actor.model_name_or_path", str(task / "model"), "--data.prompt_dataset", str(task / "train.jsonl")),
        *("--eval.dataset", str(task / "train.jsonl"), "--data.apply_chat_template"),
        *("--train.agent_func_path", "tests/e2e/retry_agent.py"),
        *("--rollout.batch_size", str(GROUPS), "--rollout.n_samples_per_prompt", str(SIZE)),
        *("--train.batch_size", str(GROUPS * SIZE), "--train.micro_batch_size", "16"),
        *("--rollout.micro_batch_size", "16", "--eval.n_samples_per_prompt", "2", "--ext.eval.pass_at", "1"),
        *("--ext.eval.at_start", "false", "--ext.max_steps", str(STEPS), "--ext.log.samples_per_step", "1000"),
        *("--ext.rollout.seed_requests", "true", "--ext.log.distance", "true", *more),
    ]


def combined(task: Path) -> list[str]:
    saved = ("--ckpt.save_steps", "1", "--ckpt.max_num", "9", "--ext.resume", "auto")
    return flags(task, "combined", *LORA, *saved, "--ext.replay.warmup_steps", "1")


@pytest.fixture(scope="module")
def trained(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = {"grpo": flags(task, "grpo", *LORA), "popo": flags(task, "popo"), "combined": combined(task)}
    return train_on_one_stack(tmp_path_factory.mktemp("language"), runs)


@pytest.mark.parametrize("name", ["grpo", "popo", "combined"])
def test_every_rollout_has_two_turns_and_the_agents_reward(trained: Path, name: str) -> None:
    groups: dict[str, list[dict]] = {}
    for line in lines(trained / name / "samples.jsonl"):
        first, between, second = line["response"].partition(FEEDBACK)
        assert between and FEEDBACK not in second and max(len(first), len(second)) <= TURN_TOKENS
        assert line["prompt"] == f"u: {line['prompt_id']} 2 3 = ?\na: "
        groups.setdefault(line["group_id"], []).append(line)
    assert groups
    for group in groups.values():
        is_easy = int(group[0]["prompt_id"]) % 3 == 0
        assert [line["reward"] for line in group] == ([1.0] * SIZE if is_easy else [1.0, 0.0] * (SIZE // 2))
    for row in read_metrics(trained / name, "train"):
        assert row.get("train/turns", 2.0) == 2.0
        assert row.get("rollout/response_length_mean", 0.0) <= 2 * TURN_TOKENS
    assert read_metrics(trained / name, "eval")[0]["eval/accuracy"] == pytest.approx((8 + 16 / 2) / 24)


@pytest.mark.parametrize("name", ["grpo", "popo"])
def test_engine_and_trainer_agree_on_every_sampled_token(trained: Path, name: str) -> None:
    # Off by a token, or with the weights from before an update of LoRA, they would differ by about one.
    rows = read_metrics(trained / name, "train")
    assert len(rows) == STEPS and all(row["rollout/engine_log_prob_abs_diff_mean"] < 0.05 for row in rows)
    moved = read_metrics(trained / name, "eval")[0]["policy/distance_relative"]
    assert moved > (0.01 if name == "grpo" else 0.0)


def test_filling_and_replay_do_with_rollouts_of_several_turns_what_they_do_with_others(trained: Path) -> None:
    rows = check_filling(trained / "popo", GROUPS, SIZE)
    for before, row in zip(rows, rows[1:], strict=False):
        uninformative = round((1 - row["groups/effective_frac_generated"]) * GROUPS)
        assert row["replay/num_groups"] == min(uninformative, before["group_buffer/num_groups"])
    check_rollout_replay(trained / "combined", max_age=10)
    assert sum(check_births(trained / "combined").values()) > 0


def test_the_trained_model_loads_by_itself_and_is_the_first_one_with_the_adapter(trained: Path, task: Path) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained / "grpo" / "model"
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE
    start = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    tokens = torch.arange(10, 40)[None]
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        untrained = start(tokens).logits
        adapted = PeftModel.from_pretrained(start, folder / "adapter")(tokens).logits
    assert (whole - adapted).abs().mean() < 0.05 * (untrained - adapted).abs().mean()


def test_a_run_with_all_of_it_goes_on_after_a_kill_as_if_nothing_had_happened(trained: Path, task: Path) -> None:
    # What a kill after step 2 leaves is its checkpoint, and lines of steps that are done again.
    unbroken, folder = trained / "combined", trained / "resumed"
    killed = folder / "combined"
    shutil.copytree(unbroken, killed, symlinks=True)
    for tag in (killed / "checkpoints").glob("*/global_step*"):
        if int(tag.name.removeprefix("global_step")) > KILLED_AFTER:
            shutil.rmtree(tag)
    train_on_one_stack(folder, {"combined": combined(task)})
    assert f"going on after step {KILLED_AFTER}" in (folder / "output.txt").read_text(errors="replace")
    found, expected = (read_metrics(run) for run in (killed, unbroken))
    assert [row["step"] for row in found] == [row["step"] for row in expected] == [1, 2, 3, 4, 4]
    for one, other in zip(found, expected, strict=True):
        check_metrics(one, other)
    for name in ("samples.jsonl", "replay.jsonl"):
        one, other = ([without_advantage(line) for line in lines(run / name)] for run in (killed, unbroken))
        assert one == other
    assert any(row.get("budget/rollouts_waiting") for row in found)
