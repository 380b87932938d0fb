"""Prompts for training and evaluation, templated by OpenRLHF's own dataset class, with identities."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from types import SimpleNamespace

from openrlhf.datasets import PromptDataset
from openrlhf.datasets.utils import blending_datasets

from openrlhf_ext.config import DataConfig
from openrlhf_ext.prompts import PromptFile
from openrlhf_ext.types import Prompt

logger = logging.getLogger(__name__)


def load_prompts(
    strategy, tokenizer, config: DataConfig, files: Mapping[str, PromptFile]
) -> tuple[list[Prompt], list[Prompt]]:
    """Training and evaluation prompts in file order (evaluation: empty without ``--eval.dataset``).

    ``files`` holds the local ``.jsonl`` files that were already read and checked, by flag; everything else (hub names,
    folders, several data sets with probabilities) is loaded by OpenRLHF. Raises ValueError for prompts that leave no
    room for a response.
    """
    args = strategy.args
    prompts = {}
    for flag, name, probs, split in (
        ("data.prompt_dataset", args.data.prompt_dataset, args.data.prompt_probs, args.data.prompt_split),
        ("eval.dataset", args.eval.dataset, None, args.eval.split),
    ):
        prompts[flag] = []
        if not name:
            continue
        if flag in files:
            rows = _as_rows(files[flag], args)
        else:
            rows = blending_datasets(
                name, probs, strategy, args.train.seed, args.data.max_samples, dataset_split=split
            )
        rows = list(rows)[: args.data.max_samples]
        # Rank 0 would show a progress bar of its own.
        silent = SimpleNamespace(args=args, is_rank_0=lambda: False)
        templated = PromptDataset(rows, tokenizer, silent, input_template=args.data.input_template)
        prompts[flag] = _fitting(
            [
                Prompt(_identity(row, text, label), text, label, datasource, images)
                for row, (datasource, text, label, images) in zip(rows, templated, strict=True)
            ],
            flag,
            tokenizer,
            args,
            config,
        )
    return prompts["data.prompt_dataset"], prompts["eval.dataset"]


def _as_rows(file: PromptFile, args) -> list[dict]:
    keys = args.data
    return [
        {
            keys.input_key: row.input,
            **({keys.label_key: row.label} if keys.label_key else {}),
            keys.image_key: row.images,
            "datasource": row.datasource,
            "id": row.id,
        }
        for row in file.rows
    ]


def _identity(row: Mapping[str, object], text: str, label: object) -> str:
    given = row.get("id")
    return str(given) if given is not None else hashlib.sha1(f"{text}\0{label}".encode()).hexdigest()[:16]


def _fitting(prompts: Iterable[Prompt], flag: str, tokenizer, args, config: DataConfig) -> list[Prompt]:
    """The prompts that leave room for a response in ``--data.max_len``; upstream would cut the others' beginning."""
    room = args.data.max_len - (args.rollout.max_new_tokens or 1)
    prompts = list(prompts)
    encode = getattr(tokenizer, "tokenizer", tokenizer)  # a vision processor wraps its tokenizer
    lengths = [len(ids) for ids in encode([p.text for p in prompts], add_special_tokens=False)["input_ids"]]
    long = [(p.prompt_id, n) for p, n in zip(prompts, lengths, strict=True) if n > room]
    if not long:
        return prompts
    shown = ", ".join(f"{prompt_id} ({n} tokens)" for prompt_id, n in long[:5])
    problem = (
        f"--{flag}: {len(long)} of {len(prompts)} prompts are longer than the {room} tokens that --data.max_len "
        f"{args.data.max_len} and --rollout.max_new_tokens {args.rollout.max_new_tokens} leave: {shown}"
    )
    if config.on_bad_row == "refuse" or len(long) == len(prompts):
        raise ValueError(f"{problem}; raise --data.max_len or leave them out with --ext.data.on_bad_row skip")
    logger.warning("%s; skipped", problem)
    return [p for p, n in zip(prompts, lengths, strict=True) if n <= room]
