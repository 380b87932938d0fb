"""Images on the real stack: engine, actor and reference see the same picture, of a fresh row as of a replayed one."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from command import ENVIRONMENT, Command

from openrlhf_ext.run_dir import read_metrics

# Where install_cpu.sh puts torchvision: beside the environment, since all that imports transformers would import it.
TORCHVISION = Path(sys.prefix) / "vision"
pytestmark = pytest.mark.skipif(
    not TORCHVISION.is_dir() and importlib.util.find_spec("torchvision") is None,
    reason=f"NOT TESTED, no torchvision, which image processors need, in {TORCHVISION}",
)

PROMPTS, GROUP = 4, 4
REWARD = """
def reward_func(queries, prompts, labels):
    assert queries[0].startswith(prompts[0])
    return {"rewards": 0.5, "scores": 0.5}
"""


def test_replayed_rows_have_the_log_probabilities_of_their_birth_as_long_as_the_policy_stays(tmp_path: Path) -> None:
    # One reward for all: no group is informative, all are stored, those of the first step fill the second, and nothing
    # is learned from any. So a replayed row has another log-probability than at its birth only if it sees another
    # picture.
    # Here, not above: the model needs torch and transformers.
    from openrlhf_ext.tasks import tiny_vision_model

    tiny_vision_model.save(tmp_path / "model")
    rows = []
    for i in range(PROMPTS):  # each step has all of them: pictures come again after new weights
        tiny_vision_model.draw_picture(tmp_path / "images" / f"{i}.png", i)
        rows.append({"id": str(i), "input": "<image>Find x.", "label": str(i), "images": f"images/{i}.png"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    command = Command(
        "popo",
        tmp_path / "run",
        *("--actor.model_name_or_path", str(tmp_path / "model"), "--reward.remote_url", str(tmp_path / "reward.py")),
        *("--data.prompt_dataset", str(tmp_path / "train.jsonl"), "--data.max_images_per_prompt", "1"),
        *("--data.apply_chat_template", "--data.max_len", "96", "--eval.dataset", "", "--eval.steps", "-1"),
        *("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(GROUP)),
        *("--rollout.micro_batch_size", "3", "--train.batch_size", "16", "--train.micro_batch_size", "4"),
        *("--ext.fill.store", "all", "--ext.max_steps", "2"),
        environment={**ENVIRONMENT, "PYTHONPATH": str(TORCHVISION)},
    )
    assert command.wait(250) == 0, command.output[-4000:]
    first, second = read_metrics(command.run_dir, "train")
    assert (first["replay/num_groups"], second["replay/num_groups"]) == (0, PROMPTS)
    assert second["train/num_rows"] == PROMPTS * GROUP
    # Another picture changes a log-probability by 0.1 on average; another place in a batch, by a rounding of bfloat16.
    assert second["replay/behavior_kl"] < 1e-3
    assert first["rollout/engine_log_prob_abs_diff_mean"] < 0.05
    # Each group's picture is stored once: 6 to 12 tokens of 4 patches of 1176 values of 2 bytes.
    assert PROMPTS * 6 * 9408 < first["group_buffer/num_bytes"] < PROMPTS * (12 * 9408 + GROUP * 9 * 96 + 24)
    # What was trained can be loaded, with its processor.
    saved = {path.name for path in (command.run_dir / "model").iterdir()}
    assert {"model.safetensors", "processor_config.json", "tokenizer.json"} <= saved
