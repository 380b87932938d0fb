"""Prompts through OpenRLHF's own dataset class: identity, order, templates, and what does not fit."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from openrlhf_ext.adapters.data import load_prompts
from openrlhf_ext.config import DataConfig
from openrlhf_ext.prompts import read_prompts
from openrlhf_ext.tasks.tiny_model import make_tokenizer

ROWS = [
    {"id": "first", "input": "2+2=", "label": "4", "datasource": "sum"},
    {"input": "2+2=", "label": "5"},
    {"input": "1+1=", "label": "2"},
]


def strategy(**data):
    settings = {
        "prompt_dataset": "train.jsonl",
        "prompt_probs": None,
        "prompt_split": "train",
        "input_key": "input",
        "label_key": "label",
        "image_key": "images",
        "input_template": None,
        "apply_chat_template": False,
        "max_samples": 100,
        "max_len": 32,
    } | data
    args = SimpleNamespace(
        data=SimpleNamespace(**settings),
        eval=SimpleNamespace(dataset=None, split="train"),
        rollout=SimpleNamespace(max_new_tokens=16),
        train=SimpleNamespace(seed=0),
    )
    return SimpleNamespace(args=args, is_rank_0=lambda: False, print=lambda *words: None)


def load(tmp_path, rows, on_bad_row="refuse", **data):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {"data.prompt_dataset": read_prompts(file, "input", "label", "refuse")}
    config = DataConfig(on_bad_row=on_bad_row)
    return load_prompts(strategy(**data), make_tokenizer(), config, files)


def test_rows_keep_their_order_labels_and_sources_and_equal_texts_stay_apart(tmp_path):
    prompts, evaluation = load(tmp_path, ROWS)
    assert [(p.text, p.label, p.datasource) for p in prompts] == [
        ("2+2=", "4", "sum"), ("2+2=", "5", "default"), ("1+1=", "2", "default")
    ]  # fmt: skip
    assert prompts[0].prompt_id == "first"
    assert len({p.prompt_id for p in prompts}) == 3
    assert evaluation == []
    assert [p.prompt_id for p in load(tmp_path, ROWS)[0]] == [p.prompt_id for p in prompts]


def test_the_template_and_max_samples_are_upstreams(tmp_path):
    prompts, _ = load(tmp_path, ROWS, input_template="Q: {}", max_samples=2)
    assert [p.text for p in prompts] == ["Q: 2+2=", "Q: 2+2="]


def test_prompts_without_room_for_a_response_are_refused_or_skipped(tmp_path, caplog):
    # One token a character: 32 - 16 = 16 tokens are left for the prompt.
    rows = [*ROWS, {"id": "long", "input": "1" * 17, "label": "0"}, {"id": "fits", "input": "1" * 16, "label": "0"}]
    with pytest.raises(ValueError, match=r"--data.prompt_dataset: 1 of 5 prompts .* 16 tokens .*: long \(17 tokens\)"):
        load(tmp_path, rows)
    prompts, _ = load(tmp_path, rows, on_bad_row="skip")
    assert [p.prompt_id for p in prompts][-1] == "fits" and len(prompts) == 4
    assert "long (17 tokens)" in caplog.text


def test_a_data_set_that_openrlhf_loads_gets_stable_identities(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"input": row["input"], "label": row["label"]}) + "\n" for row in ROWS))
    loaded = strategy(prompt_dataset=str(file))
    first, _ = load_prompts(loaded, make_tokenizer(), DataConfig(), {})
    again, _ = load_prompts(loaded, make_tokenizer(), DataConfig(), {})
    assert [p.prompt_id for p in first] == [p.prompt_id for p in again]
    assert len({p.prompt_id for p in first}) == 3
