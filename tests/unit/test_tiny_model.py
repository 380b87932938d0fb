import json
import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from openrlhf_ext.tasks.countdown import Puzzle
from openrlhf_ext.tasks.countdown_data import EVAL_MIX, draw_puzzle
from openrlhf_ext.tasks.tiny_model import (
    CHARACTERS,
    MAX_RESPONSE_TOKENS,
    SPECIAL_TOKENS,
    WarmStart,
    make_tokenizer,
    sample_accuracy,
    training_batch,
    warm_start,
)

SHORT = WarmStart(seed=0, steps=3, batch_size=16, num_eval=20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out_dir = tmp_path_factory.mktemp("tiny") / "model"
    warm_start(out_dir, SHORT)
    return out_dir


def weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_every_character_is_one_token_and_comes_back_through_autotokenizer(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(CHARACTERS, add_special_tokens=False)["input_ids"]
    assert ids == list(range(len(SPECIAL_TOKENS), len(SPECIAL_TOKENS) + len(CHARACTERS)))
    assert tokenizer.decode(ids, skip_special_tokens=False) == CHARACTERS


def test_a_query_is_decoded_to_prompt_and_response_unchanged(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "3 9 5 32=9*3+5<eos><pad>"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids[-2:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert len(ids) == len("3 9 5 32=9*3+5") + 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_no_tokens_are_added_and_unknown_characters_are_one_unknown_token_each(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("1 2").input_ids == tokenizer("1 2", add_special_tokens=False).input_ids
    assert tokenizer("é<", add_special_tokens=False).input_ids == [tokenizer.unk_token_id] * 2


def test_the_chat_template_leaves_a_prompt_as_it_is(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "3 9 5 32="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == "3 9 5 32="


def test_the_saved_model_is_a_small_bf16_llama(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM) and model.dtype == torch.bfloat16
    # tied embedding 96*96; each of 3 layers: attention 4*96*96, MLP 3*96*256, two norms of 96; a last norm of 96
    assert model.num_parameters() == 96 * 96 + 3 * (4 * 96 * 96 + 3 * 96 * 256 + 2 * 96) + 96 == 341_664
    assert model.config.head_dim == 32
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (1, 0, None)


def test_the_seed_decides_the_weights(folder, tmp_path):
    warm_start(tmp_path / "same", SHORT)
    warm_start(tmp_path / "other", replace(SHORT, seed=1))
    first, same, other = weights(folder), weights(tmp_path / "same"), weights(tmp_path / "other")
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_a_finished_warm_start_is_reused_and_other_settings_replace_it(tmp_path):
    out_dir = tmp_path / "model"
    report, is_new = warm_start(out_dir, SHORT)
    assert is_new and json.loads((out_dir / "warm_start.json").read_text())["settings"]["steps"] == 3
    before = (out_dir / "model.safetensors").stat().st_mtime_ns
    assert warm_start(out_dir, SHORT) == (report, False)
    assert (out_dir / "model.safetensors").stat().st_mtime_ns == before
    replaced, is_new = warm_start(out_dir, replace(SHORT, steps=1))
    assert is_new and replaced.settings["steps"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_is_no_warm_start_is_not_overwritten(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not a warm start and is not overwritten"):
        warm_start(tmp_path, SHORT)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_random_state_and_threads_of_the_caller_stay_as_they_were(tmp_path):
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    warm_start(tmp_path / "model", replace(SHORT, steps=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_only_solution_and_end_token_are_trained_on_and_no_puzzle_is_held_out():
    tokenizer = make_tokenizer()
    input_ids, labels = training_batch(random.Random(0), tokenizer, 64)
    for row, label in zip(input_ids, labels, strict=True):
        prompt, equals, rest = tokenizer.decode(row).partition("=")
        trained = tokenizer.decode(label[label != -100])
        assert rest.replace("<pad>", "") == trained
        assert equals and trained.endswith("<eos>")
        *numbers, target = map(int, prompt.split())
        assert not Puzzle(tuple(numbers), target).is_held_out


def test_every_solution_fits_the_response_length():
    rng = random.Random(0)
    solutions = [draw_puzzle(rng, datasource).solution for datasource in EVAL_MIX for _ in range(300)]
    assert max(map(len, solutions)) + 1 <= MAX_RESPONSE_TOKENS  # + the end token


class ScriptedModel:
    """Answers the samples of all prompts with the given texts, whatever it is asked."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, texts

    def generate(self, input_ids, num_return_sequences, **_):
        answers = self.tokenizer(self.texts, return_tensors="pt", padding=True, padding_side="right")["input_ids"]
        return torch.cat([input_ids.repeat_interleave(num_return_sequences, dim=0), answers], dim=1)


def test_accuracy_is_per_puzzle_and_sample():
    puzzles = [Puzzle((3, 9, 5), 32), Puzzle((2, 3), 5)]
    model = ScriptedModel(make_tokenizer(), ["9*3+5<eos>", "9*3-5<eos>", "2+3<eos>", "3+2<eos>"])
    assert sample_accuracy(model, make_tokenizer(), puzzles, samples=2).tolist() == [[1.0, 0.0], [1.0, 1.0]]
