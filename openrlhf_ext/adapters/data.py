"""Prompts for training and evaluation, templated as OpenRLHF does, and whether model and tokenizer can take them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError
from openrlhf.datasets.prompts_dataset import preprocess_data
from openrlhf.datasets.utils import blending_datasets
from openrlhf.utils import get_tokenizer
from transformers import AutoConfig

from openrlhf_ext.adapters import vision
from openrlhf_ext.adapters.upstream import first_line
from openrlhf_ext.config import DataConfig
from openrlhf_ext.prompts import PromptFile, PromptRow, check_prompts, leave_out
from openrlhf_ext.types import Prompt


def check_data(strategy, config: DataConfig, files: Mapping[str, PromptFile]) -> dict[str, PromptFile]:
    """Model, tokenizer and every row of every set of prompts, before an engine starts.

    Args:
        files: the local ``.jsonl`` files that were already read, by flag. Everything else (hub names, folders, several
            data sets with probabilities) is loaded by OpenRLHF.

    Returns:
        Flag -> rows of every set that the settings name, with those left out in `PromptFile.skipped`.

    Raises:
        ValueError: a model or tokenizer that does not load or does not fit, or bad rows.
    """
    args = strategy.args
    name = args.actor.model_name_or_path
    try:
        model = AutoConfig.from_pretrained(name, trust_remote_code=True)
        tokenizer = get_tokenizer(name, None, "left", strategy, use_fast=not args.data.disable_fast_tokenizer)
    except Exception as error:  # transformers raises many kinds, each with a page of advice
        way_out = "give a folder that save_pretrained of model and tokenizer wrote, or the name of a model"
        raise ValueError(
            f"--actor.model_name_or_path {name}: its config.json or tokenizer cannot be loaded "
            f"({type(error).__name__}: {first_line(error)}); "
            f"{'install what is missing' if isinstance(error, ImportError) else way_out}"
        ) from None
    check_model(tokenizer, model, args)
    is_text = not vision.is_processor(tokenizer)  # placeholders of images need not be in the vocabulary
    vocabulary = model.get_text_config().vocab_size if is_text else sys.maxsize
    loaded = _load(strategy, tokenizer, config, files, vocabulary)
    check_mixture(loaded["data.prompt_dataset"][0].rows, args)
    return {flag: file for flag, (file, _) in loaded.items()}


def check_mixture(rows: Sequence[PromptRow], args) -> None:
    """Raises ValueError where ranks with and without images would wait for each other for ever."""
    pictured = sum(row.images is not None for row in rows)
    if pictured in (0, len(rows)):
        return
    ranks = args.actor.num_nodes * args.actor.num_gpus_per_node // args.ds.tensor_parallel_size
    alike = args.actor.freeze_visual_encoder and args.ds.zero_stage < 3
    if ranks > 1 and not alike:
        raise ValueError(
            f"--data.prompt_dataset has {pictured} prompts with images and {len(rows) - pictured} without: of the "
            f"{ranks} ranks one could have none in a batch, and would not take part in what the others do with the "
            "vision encoder; train on one kind, or set --actor.freeze_visual_encoder and --ds.zero_stage 2"
        )


def check_model(tokenizer, model, args) -> None:
    """Raises ValueError for a tokenizer or a model's configuration that engines or actors would fail on later."""
    name = f"--actor.model_name_or_path {args.actor.model_name_or_path}"
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{name}: the tokenizer has no end-of-text token, with which responses end and rows are padded; set "
            "eos_token in tokenizer_config.json"
        )
    text = model.get_text_config()
    for token in ("eos", "pad"):
        number = getattr(tokenizer, f"{token}_token_id")
        if number >= text.vocab_size:
            raise ValueError(
                f"{name}: the tokenizer's {token}_token is {number}, but the model's vocabulary has {text.vocab_size} "
                "tokens (0 to one less); give a tokenizer that belongs to the model, or resize its embeddings"
            )
    if args.data.apply_chat_template and not tokenizer.chat_template:
        raise ValueError(
            f"{name}: the tokenizer has no chat template; remove --data.apply_chat_template (and use "
            "--data.input_template), or take an instruction-tuned model"
        )
    limit = max(getattr(text, "max_position_embeddings", sys.maxsize), getattr(text, "model_max_length", 0))
    rope = getattr(text, "rope_parameters", None) or {}
    # A rotary embedding that is scaled reaches further; how far, vLLM works out.
    if args.data.max_len > limit and rope.get("rope_type", "default") == "default":
        raise ValueError(
            f"--data.max_len {args.data.max_len} is beyond the model's max_position_embeddings; set at most {limit}"
        )


def load_prompts(
    strategy, tokenizer, config: DataConfig, files: Mapping[str, PromptFile]
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts in file order (evaluation: empty without ``--eval.dataset``).

    Args and errors as for `check_data`, whose result may be given as ``files``.
    """
    loaded = _load(strategy, tokenizer, config, files, sys.maxsize)
    prompts = {
        flag: [
            Prompt(row.id, text, row.label, row.datasource, row.images)
            for row, text in zip(file.rows, texts, strict=True)
        ]
        for flag, (file, texts) in loaded.items()
    }
    return prompts["data.prompt_dataset"], prompts.get("eval.dataset", [])


def _load(
    strategy, tokenizer, config: DataConfig, files: Mapping[str, PromptFile], vocabulary: int
) -> dict[str, tuple[PromptFile, list[str]]]:
    """By flag, the rows that fit and their texts."""
    data, loaded = strategy.args.data, {}
    for flag, name in (("data.prompt_dataset", data.prompt_dataset), ("eval.dataset", strategy.args.eval.dataset)):
        if not name:
            continue
        file = files[flag] if flag in files else _read(flag, name, strategy, config)
        file = replace(file, rows=file.rows[: data.max_samples])
        texts, problems = _templated(file.rows, tokenizer, data)
        images = [row.images or [] for row in file.rows]
        for i, problem in enumerate(_misfits(texts, images, tokenizer, strategy.args, vocabulary)):
            problems[i] = problems[i] or problem
        file = leave_out(file, problems, config.on_bad_row)
        loaded[flag] = file, [text for text, problem in zip(texts, problems, strict=True) if problem is None]
    return loaded


def _read(flag: str, name: str, strategy, config: DataConfig) -> PromptFile:
    """A set of prompts by OpenRLHF's own loader."""
    args, is_train = strategy.args, flag == "data.prompt_dataset"
    # Rank 0 would print the data sets.
    silent = SimpleNamespace(args=args, is_rank_0=lambda: False, print=lambda *words: None)
    try:
        rows = blending_datasets(
            name,
            args.data.prompt_probs if is_train else None,
            silent,
            args.train.seed,
            args.data.max_samples,
            dataset_split=args.data.prompt_split if is_train else args.eval.split,
        )
        rows = list(islice(rows, args.data.max_samples))
    except Exception as error:  # datasets raises many kinds, for networks, files and columns
        raise ValueError(
            f"--{flag} {name} cannot be loaded ({type(error).__name__}: {first_line(error)}); check the name and the "
            "split, or give a local .jsonl file"
        ) from None
    return check_prompts(
        name,
        _numbered(rows, keeps_ids="," not in name),
        args.data.input_key,
        args.data.label_key,
        config.on_bad_row,
        image_key=args.data.image_key,
        apply_chat_template=args.data.apply_chat_template,
    )


def _numbered(rows: Sequence[Mapping[str, Any]], *, keeps_ids: bool) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows without the cells that tables fill up with null; ids of several sets together are no ids."""
    for number, row in enumerate(rows, start=1):
        yield number, {key: cell for key, cell in row.items() if cell is not None and (keeps_ids or key != "id")}


def _templated(rows: Sequence[PromptRow], tokenizer, data) -> tuple[list[str], list[str | None]]:
    """The text of every row, and why it has none ("" then)."""
    texts: list[str] = []
    problems: list[str | None] = []
    chat = tokenizer.apply_chat_template if data.apply_chat_template else None
    for row in rows:
        text, problem = "", None
        try:
            text, _ = preprocess_data({data.input_key: row.input}, data.input_template, data.input_key, None, chat)
        except TemplateError as error:
            problem = f"the tokenizer's chat template refuses these messages: {first_line(error)}"
        texts.append(text)
        problems.append(problem)
    return texts, problems


def _misfits(
    texts: Sequence[str], images: Sequence[Sequence[str]], tokenizer, args, vocabulary: int
) -> Iterator[str | None]:
    """Why a prompt leaves no room for a response, where OpenRLHF would cut its beginning, or cannot be embedded."""
    room = args.data.max_len - (args.rollout.max_new_tokens or 1)
    sees = vision.is_processor(tokenizer)
    encode = tokenizer.tokenizer if sees else tokenizer
    rows = encode(list(texts), add_special_tokens=False)["input_ids"] if texts else []
    for text, own, ids in zip(texts, images, rows, strict=True):
        more, problem = 0, None
        if sees:
            more, problem = vision.check_images(text, own, tokenizer, args.data.max_images_per_prompt)
        elif own:
            problem = f"has {len(own)} images, which --actor.model_name_or_path cannot see: it is no vision model"
        if problem is not None:
            yield problem
        elif len(ids) + more > room:
            yield (
                f"{len(ids) + more} tokens, more than the {room} that --data.max_len {args.data.max_len} and "
                f"--rollout.max_new_tokens {args.rollout.max_new_tokens} leave"
            )
        elif not ids:
            yield "the tokenizer makes no token of it"
        elif max(ids) >= vocabulary:
            yield f"has token {max(ids)}, but the model's vocabulary has {vocabulary} (0 to one less)"
        else:
            yield None
