"""A Llama of 0.3 million parameters that reads characters, warm-started on Countdown.

Small enough that generation, training and evaluation of a whole comparison fit one CPU core, and real enough that
vLLM, DeepSpeed and `AutoModelForCausalLM` load it like any other checkpoint. Llama rather than Qwen2, whose model type
makes `AutoTokenizer` replace the tokenizer with a byte-pair one. Heads of 32 suit vLLM's CPU attention kernel.
"""

import json
import os
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from openrlhf_ext.tasks.countdown import Puzzle, grade
from openrlhf_ext.tasks.countdown_data import EVAL_MIX, draw_puzzle, generate_puzzles

MAX_RESPONSE_TOKENS = 16
"""Enough for any expression over four one-digit numbers, with some parentheses."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+-*/()= \n.,:;?!'\"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""No `<` and no `>`: a special token's text can only come from the special token."""

_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_MIX = {"countdown-2": 0.65, "countdown-3": 0.25, "countdown-4": 0.1}
"""Shares of the warm start: mostly the easy puzzles, so that some become certain and most others stay out of reach."""
_REPORT = "warm_start.json"
_Report = TypeVar("_Report")
IGNORED = -100
"""Label of prompt and padding tokens, which carry no loss (transformers' convention)."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start. On one machine the same settings give the same weights.

    The defaults stop early on purpose, at 10 to 25 % accuracy: more than half of all groups of 8 are then all wrong or
    all right, which is where the methods differ.
    """

    seed: int = 0
    steps: int = 180
    batch_size: int = 128
    learning_rate: float = 4e-3
    """Peak; reached after `warmup_steps`, held, and lowered linearly to 0 over the second half of the steps."""
    warmup_steps: int = 50
    num_eval: int = 200
    """Held-out puzzles that the accuracy is measured on: the evaluation file of the same seed and size."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What `warm_start.json` holds. Accuracies are means over 8 samples a puzzle at temperature 1."""

    settings: dict[str, float]
    parameters: int
    accuracy: float
    accuracy_by_datasource: dict[str, float]
    seconds: float
    """Wall time of the training, on one thread."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character and no BOS, since OpenRLHF tokenizes prompts with `add_special_tokens=False`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A new fp32 model, initialized from torch's global random state."""
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


def warm_start(out_dir: Path, settings: WarmStart) -> tuple[WarmStartReport, bool]:
    """Train a new model on drawn puzzles and save it, in bf16, with its tokenizer.

    Held-out puzzles are never trained on. The folder appears whole or not at all.

    Returns:
        The report, and False when the folder was already there with the same settings and was left alone.

    Raises:
        ValueError: `out_dir` holds something other than an earlier warm start.
    """
    existing = read_report(out_dir, WarmStartReport)
    if existing is not None and existing.settings == asdict(settings):
        return existing, False
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(settings.seed)
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        started = time.perf_counter()
        _train(model, tokenizer, settings)
        seconds = time.perf_counter() - started
        model.to(torch.bfloat16)  # the precision it is saved in is the one that is measured
        puzzles = generate_puzzles(settings.num_eval, settings.seed, EVAL_MIX, held_out=True)
        accuracy = sample_accuracy(model, tokenizer, puzzles, samples=8).mean(dim=1)
    report = WarmStartReport(
        settings=asdict(settings),
        parameters=model.num_parameters(),
        accuracy=round(accuracy.mean().item(), 4),
        accuracy_by_datasource=_mean_by_datasource(puzzles, accuracy),
        seconds=round(seconds, 1),
    )
    # Not the tokenizer in use, which would save its padding of the last batch, too.
    save_model(out_dir, model, make_tokenizer(), report)
    return report, True


def sample_accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzles: Sequence[Puzzle], samples: int
) -> torch.Tensor:
    """Accuracy of each sampled response at temperature 1: (puzzles, samples), 0.0 or 1.0."""
    prompts = [puzzle.prompt for puzzle in puzzles]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        sequences = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_RESPONSE_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
        )
    prompt_length = inputs["input_ids"].shape[1]
    responses = tokenizer.batch_decode(sequences[:, prompt_length:], skip_special_tokens=True)
    asked = [puzzle for puzzle in puzzles for _ in range(samples)]
    accuracies = [grade(text, p.numbers, p.target).accuracy for text, p in zip(responses, asked, strict=True)]
    return torch.tensor(accuracies).view(len(puzzles), samples)


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / settings.warmup_steps, 2 * (settings.steps - step) / settings.steps),
    )
    model.train()
    for _ in range(settings.steps):
        input_ids, labels = training_batch(rng, tokenizer, settings.batch_size)
        attention_mask = (input_ids != tokenizer.pad_token_id).long()
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()


def training_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both (size, longest), padded on the right; only solution and EOS have labels."""
    examples = [_training_puzzle(rng) for _ in range(size)]
    texts = [puzzle.prompt + puzzle.solution + tokenizer.eos_token for puzzle in examples]
    padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    input_ids = padded["input_ids"]
    labels = input_ids.masked_fill(padded["attention_mask"] == 0, IGNORED)
    for row, puzzle in zip(labels, examples, strict=True):
        row[: len(puzzle.prompt)] = IGNORED
    return input_ids, labels


def _training_puzzle(rng: random.Random) -> Puzzle:
    while True:
        puzzle = draw_puzzle(rng, rng.choices(list(_MIX), list(_MIX.values()))[0])
        if not puzzle.is_held_out:
            return puzzle


def _mean_by_datasource(puzzles: Sequence[Puzzle], accuracy: torch.Tensor) -> dict[str, float]:
    means = {}
    for datasource in EVAL_MIX:
        chosen = torch.tensor([puzzle.datasource == datasource for puzzle in puzzles])
        means[datasource] = round(accuracy[chosen].mean().item(), 4)
    return means


def read_report(out_dir: Path, kind: type[_Report]) -> _Report | None:
    """The report of an earlier warm start in `out_dir`; None where there is nothing yet."""
    if not out_dir.exists():
        return None
    try:
        return kind(**json.loads((out_dir / _REPORT).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{out_dir} exists without a readable {_REPORT}, so it is not a warm start and is not overwritten "
            f"({error}). Choose another --out, or remove it."
        ) from error


def save_model(out_dir: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, report: object) -> None:
    """Save all of it in place of an earlier warm start; the folder appears whole or not at all."""
    disable_progress_bar()
    partial = out_dir.with_name(f".{out_dir.name}.{os.getpid()}")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / _REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n")
    if out_dir.exists():  # an earlier warm start with other settings
        shutil.rmtree(out_dir)
    partial.rename(out_dir)


@contextmanager
def one_thread() -> Iterator[None]:
    """With several threads the order of floating-point sums, and so the weights, would depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
