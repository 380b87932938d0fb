"""A Llama of 0.3 million parameters that reads characters, warm-started on Countdown.

Small enough that generation, training and evaluation of a whole comparison fit one CPU core, and real enough that vLLM,
DeepSpeed and `AutoModelForCausalLM` load it like any other checkpoint. Llama rather than Qwen2, whose model type makes
`AutoTokenizer` replace the tokenizer with a byte-pair one. Heads of 32 suit vLLM's CPU attention kernel.
"""

import json
import logging
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from openrlhf_ext.tasks.countdown import EVAL_MIX, Puzzle, draw_puzzle, generate_puzzles, grade

logger = logging.getLogger(__name__)

MAX_RESPONSE_TOKENS = 16
"""Enough for any expression over four one-digit numbers, with some parentheses."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/()= \n.,:;?!'\"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""No `<` and no `>`: a special token's text can only come from the special token."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_REPORT = "warm_start.json"


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start; the same settings on the same machine give the same weights.

    The defaults stop early on purpose: at 10 to 25 % accuracy most groups of 8 carry no signal (all wrong, or all right on
    the easy puzzles), the situation the methods are compared in.
    """

    seed: int = 0
    steps: int = 220
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 50


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """Accuracies are means over evaluation puzzles and samples at temperature 1; seconds are wall time of the training."""

    settings: dict[str, float]
    parameters: int
    accuracy: float
    accuracy_by_datasource: dict[str, float]
    seconds: float


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, no BOS: OpenRLHF tokenizes prompts with `add_special_tokens=False`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new model in fp32, initialized from torch's global random state."""
    config = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def warm_start(out_dir: Path, settings: WarmStart = WarmStart(), num_eval: int = 200) -> tuple[WarmStartReport, bool]:
    """Train a model on drawn puzzles and their generating expressions, and save it with its tokenizer in bf16.

    Returns the report, also saved as `warm_start.json`, and whether anything was done: a folder made with the same
    settings is left alone. Held-out puzzles are never trained on. The folder appears whole or not at all.

    Raises:
        ValueError: `out_dir` holds something else than an earlier warm start.
    """
    existing = _read_report(out_dir)
    if existing is not None and existing.settings == asdict(settings):
        return existing, False
    with torch.random.fork_rng(devices=[]), _one_thread():
        torch.manual_seed(settings.seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        started = time.perf_counter()
        _train(model, tokenizer, settings)
        seconds = time.perf_counter() - started
        model.to(torch.bfloat16)
        puzzles = generate_puzzles(num_eval, settings.seed, EVAL_MIX, held_out=True)
        accuracies = sample_accuracy(model.float(), tokenizer, puzzles, samples=8)
    report = _report(settings, model, puzzles, accuracies, seconds)
    _save(out_dir, model.to(torch.bfloat16), tokenizer, report)
    return report, True
