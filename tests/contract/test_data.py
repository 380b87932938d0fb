"""Prompts through OpenRLHF's own template and loader: identity, order, and what does not fit the model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from openrlhf_ext.adapters import cluster, launch
from openrlhf_ext.adapters.data import check_data, check_model, load_prompts
from openrlhf_ext.adapters.session import Session
from openrlhf_ext.cli.train_ppo_ray import checked_settings
from openrlhf_ext.config import DataConfig
from openrlhf_ext.prompts import BadRow, PromptFile, read_prompts
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
        "disable_fast_tokenizer": False,
        "max_samples": 100,
        "max_len": 32,
    } | data
    args = SimpleNamespace(
        actor=SimpleNamespace(model_name_or_path="model"),
        use_ms=False,
        data=SimpleNamespace(**settings),
        eval=SimpleNamespace(dataset=None, split="train"),
        rollout=SimpleNamespace(max_new_tokens=16),
        train=SimpleNamespace(seed=0),
    )
    return SimpleNamespace(args=args, is_rank_0=lambda: False, print=lambda *words: None)


def load(tmp_path, rows, on_bad_row="refuse", tokenizer=None, **data):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    files = {"data.prompt_dataset": read_prompts(file, "input", "label", "refuse")}
    config = DataConfig(on_bad_row=on_bad_row)
    return load_prompts(strategy(**data), tokenizer or make_tokenizer(), config, files)


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
    problem = "17 tokens, more than the 16 that --data.max_len 32 and --rollout.max_new_tokens 16 leave"
    with pytest.raises(ValueError, match=rf"1 of 5 rows of .*\n  {tmp_path}/train.jsonl:4: {problem}$"):
        load(tmp_path, rows)
    prompts, _ = load(tmp_path, rows, on_bad_row="skip")
    assert [p.prompt_id for p in prompts][-1] == "fits" and len(prompts) == 4
    assert problem in caplog.text


def test_a_data_set_that_openrlhf_loads_gets_stable_identities(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"input": row["input"], "label": row["label"]}) + "\n" for row in ROWS))
    loaded = strategy(prompt_dataset=str(file))
    first, _ = load_prompts(loaded, make_tokenizer(), DataConfig(), {})
    again, _ = load_prompts(loaded, make_tokenizer(), DataConfig(), {})
    assert [p.prompt_id for p in first] == [p.prompt_id for p in again]
    assert len({p.prompt_id for p in first}) == 3


def test_a_prompt_without_a_token_is_a_bad_row(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% if messages[0]['content'] != '1+1=' %}x{% endif %}"
    with pytest.raises(ValueError, match="train.jsonl:3: the tokenizer makes no token of it"):
        load(tmp_path, ROWS, tokenizer=tokenizer, apply_chat_template=True)


def test_rows_that_openrlhf_loads_are_checked_like_those_of_a_file(tmp_path):
    file = tmp_path / "train.csv"
    file.write_text('input,label,datasource\n2+2=,4,sum\n2+2=,,sum\n2+2=,4,\n"",4,sum\n2+2=,4,sum\n')
    loaded = strategy(prompt_dataset=str(file))
    with pytest.raises(ValueError, match=r"2 of 5 rows .*\n  .*train.csv:2: 'label' .*\n  .*train.csv:4: 'input' "):
        load_prompts(loaded, make_tokenizer(), DataConfig(), {})
    prompts, _ = load_prompts(loaded, make_tokenizer(), DataConfig(on_bad_row="skip"), {})
    assert [(p.label, p.datasource) for p in prompts] == [(4, "sum"), (4, "default"), (4, "sum")]
    assert len({p.prompt_id for p in prompts}) == 3
    missing = strategy(prompt_dataset=str(file), input_key="prompt")
    with pytest.raises(
        ValueError, match=r"train.csv:1: 'prompt' \(--data.input_key\) is missing; the row has 'input'"
    ):
        load_prompts(missing, make_tokenizer(), DataConfig(), {})


def test_ids_of_several_data_sets_may_repeat(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"id": 1, "input": "1+1=", "label": "2"}\n')
    both = strategy(prompt_dataset=f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    prompts, _ = load_prompts(both, make_tokenizer(), DataConfig(), {})
    assert len({p.prompt_id for p in prompts}) == 2


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_data_set_that_cannot_be_loaded_is_named(tmp_path, split):
    (tmp_path / "train.csv").write_text("" if split == "train" else "input,label\n1+1=,2\n")
    loaded = strategy(prompt_dataset=str(tmp_path / "train.csv"), prompt_split=split)
    with pytest.raises(
        ValueError, match="--data.prompt_dataset .*train.csv cannot be loaded .* check the name and the"
    ):
        load_prompts(loaded, make_tokenizer(), DataConfig(), {})


def test_messages_that_the_chat_template_refuses_are_bad_rows(tmp_path):
    tokenizer = make_tokenizer()
    check = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('no system') }}{% endif %}"
    tokenizer.chat_template = check + "{{ messages[0]['content'] }}"
    file = tmp_path / "train.jsonl"
    rows = [[{"role": role, "content": "1+1="}] for role in ("user", "system")]
    file.write_text("".join(json.dumps({"input": row, "label": "2"}) + "\n" for row in rows))
    files = {"data.prompt_dataset": read_prompts(file, "input", "label", "refuse", apply_chat_template=True)}
    with pytest.raises(ValueError, match="train.jsonl:2: the tokenizer's chat template refuses .*: no system"):
        load_prompts(strategy(apply_chat_template=True), tokenizer, DataConfig(), files)


# -- model and tokenizer --


def model_config(**values) -> LlamaConfig:
    return LlamaConfig(vocab_size=len(make_tokenizer()), max_position_embeddings=64, **values)


def test_a_model_and_a_tokenizer_that_fit_pass():
    check_model(make_tokenizer(), model_config(), strategy(max_len=64, apply_chat_template=True).args)
    stretched = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    check_model(make_tokenizer(), model_config(rope_parameters=stretched), strategy(max_len=256).args)


@pytest.mark.parametrize(
    ("tokenizer", "config", "data", "problem"),
    [
        ({"eos_token": None}, {}, {}, "model: the tokenizer has no end-of-text token, "),
        # "Z" is the last of 82 tokens, number 81; the pad token is 0, the eos token 1.
        ({}, {"vocab_size": 1}, {}, "model: the tokenizer's eos_token is 1, but the model's vocabulary has 1 tokens "),
        (
            {"pad_token": "Z"},
            {"vocab_size": 80},
            {},
            "model: the tokenizer's pad_token is 81, but the model's vocabulary has 80 ",
        ),
        ({"chat_template": None}, {}, {"apply_chat_template": True}, "model: the tokenizer has no chat template; "),
        ({}, {}, {"max_len": 65}, "--data.max_len 65 is beyond the model's max_position_embeddings; set at most 64"),
    ],
)
def test_a_model_and_a_tokenizer_that_do_not_fit_are_refused(tokenizer, config, data, problem):
    changed, model = make_tokenizer(), model_config()
    for key, value in tokenizer.items():
        setattr(changed, key, value)
    for key, value in config.items():
        setattr(model, key, value)
    with pytest.raises(ValueError, match=problem):
        check_model(changed, model, strategy(**data).args)


def saved_model(folder: Path, vocab_size: int | None = None) -> Path:
    config = model_config()
    config.vocab_size = vocab_size or config.vocab_size
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def checked(tmp_path, rows, on_bad_row="refuse", vocab_size=None):
    loaded = strategy()
    loaded.args.actor.model_name_or_path = str(saved_model(tmp_path / "model", vocab_size))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {"data.prompt_dataset": read_prompts(tmp_path / "train.jsonl", "input", "label", on_bad_row)}
    return check_data(loaded, DataConfig(on_bad_row=on_bad_row), files)


def test_checked_data_has_every_row_that_was_left_out(tmp_path):
    rows = [*ROWS, {"input": "x"}, {"input": "1" * 17, "label": "0"}]
    file = checked(tmp_path, rows, "skip")["data.prompt_dataset"]
    assert [row.line for row in file.rows] == [1, 2, 3] and [row.line for row in file.skipped] == [4, 5]


def test_a_prompt_with_a_token_that_the_model_does_not_have_is_a_bad_row(tmp_path):
    rows = [*ROWS, {"input": "Z", "label": "0"}]
    checked(tmp_path, rows, vocab_size=82)
    with pytest.raises(ValueError, match="train.jsonl:4: has token 81, but the model's vocabulary has 81 "):
        checked(tmp_path, rows, vocab_size=81)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    loaded = strategy()
    folder = tmp_path / "model"
    model_config().save_pretrained(folder)
    loaded.args.actor.model_name_or_path = str(folder)
    with pytest.raises(ValueError, match="its config.json or tokenizer cannot be loaded") as caught:
        check_data(loaded, DataConfig(), {})
    assert "\n" not in str(caught.value)


def settings_for(tmp_path: Path, file: Path):
    return checked_settings(
        [
            *("--actor.model_name_or_path", str(saved_model(tmp_path / "model")), "--data.prompt_dataset", str(file)),
            *("--reward.remote_url", "http://localhost:5000", "--vllm.num_engines", "1", "--data.label_key", "label"),
            *("--data.max_len", "32", "--rollout.max_new_tokens", "16", "--rollout.n_samples_per_prompt", "8"),
            *("--rollout.batch_size", "16", "--algo.advantage.estimator", "group_norm", "--train.batch_size", "128"),
            *("--ext.run_dir", str(tmp_path / "run")),
        ]
    )


def test_bad_data_ends_the_run_with_one_message_before_an_engine_starts(tmp_path, monkeypatch, capsys):
    file = tmp_path / "train.jsonl"
    file.write_text(json.dumps({"input": "1" * 17, "label": "0"}) + "\n")
    for name in ("start_ray", "check_placement", "check_folders"):
        monkeypatch.setattr(cluster, name, lambda settings: None)
    files = {"data.prompt_dataset": read_prompts(file, "input", "label", "refuse")}
    assert launch._train_all(iter([launch.Run(settings_for(tmp_path, file), files)]), 0.0) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: 1 of 1 rows of ") and "train.jsonl:1: 17 tokens" in printed
    assert "Traceback" not in printed and "Traceback" in (tmp_path / "run" / "error.log").read_text()


def test_a_run_reports_how_many_rows_of_all_files_were_left_out(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}\n")
    trainer = SimpleNamespace(reporter=SimpleNamespace(), max_steps=1, fit=lambda save_model: None)
    session = object.__new__(Session)
    session._trainer, session._engines, session._used = lambda *parts: trainer, [], False
    session._models = SimpleNamespace(
        actor=None, critic=None, reference=None, load=lambda *parts: None, save=lambda: None
    )
    bad = [BadRow(1, "is empty"), BadRow(7, "is empty")]
    files = {"data.prompt_dataset": PromptFile("a", [], bad, 0), "eval.dataset": PromptFile("b", [], bad[:1], 0)}
    session.train(settings_for(tmp_path, tmp_path / "train.jsonl"), files, 0.0)
    assert trainer.reporter.num_skipped_rows == 3
