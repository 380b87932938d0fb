"""A Hugging Face model folder as something that answers prompts: its tokenizer, and one vLLM engine in-process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from openrlhf_ext.adapters import cpu_platform
from openrlhf_ext.eval_results import Response
from openrlhf_ext.eval_sets import PLACEHOLDER, EvalSet

_WEIGHTS = ("*.safetensors", "*.bin")


class ModelFolder:
    """What can be known of a model without its engine.

    Raises:
        ValueError: there is no such folder, or it has no model or no tokenizer.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_dir():
            raise ValueError(f"the model {path} is no folder; give the folder of a Hugging Face model")
        for patterns, what in (
            (("config.json",), "model"),
            (_WEIGHTS, "weights"),
            (("tokenizer.json", "tokenizer.model", "vocab.json"), "tokenizer"),
        ):
            if not any(file for pattern in patterns for file in path.glob(pattern)):
                raise ValueError(f"{path} has no {what} ({', '.join(patterns)}); give a complete Hugging Face folder")
        from transformers import AutoConfig, AutoTokenizer

        try:
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"cannot load the configuration and tokenizer in {path}: {error}") from None
        self.context: int = config.get_text_config().max_position_embeddings
        """Tokens of a prompt and its response together."""

    def modified(self) -> float:
        """When the newest file of weights was written, in seconds since the epoch."""
        return max(file.stat().st_mtime for pattern in _WEIGHTS for file in self.path.glob(pattern))

    def prompts(self, eval_set: EvalSet, template: str, *, as_chat: bool) -> list[str]:
        """The text of each row as the model gets it.

        Raises:
            ValueError: one leaves no room for a response in the model's context, with its line.
        """
        texts = [template.replace(PLACEHOLDER, row.input) for row in eval_set.rows]
        if as_chat:
            turns = [[{"role": "user", "content": text}] for text in texts]
            texts = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for row, tokens in zip(eval_set.rows, self.encode(texts), strict=True):
            if len(tokens) >= self.context:
                raise ValueError(
                    f"{eval_set.path}:{row.line}: the prompt has {len(tokens)} tokens, which leaves no room for a "
                    f"response in the model's context of {self.context}; leave the row out"
                )
        return texts

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of each text, without any that the tokenizer would add, as in training."""
        return self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]


class Evaluator:
    """One engine, which stays for all sets.

    Args:
        max_prompt_tokens: of the longest prompt; bounds the memory that the engine plans for.
        max_tokens: limit of a response; less where the model's context ends before.
        seed: of sampling. Each response has its own, so results do not depend on what else is sampled beside it.
    """

    def __init__(
        self,
        model: ModelFolder,
        *,
        n: int,
        temperature: float,
        top_p: float,
        max_tokens: int,
        seed: int,
        max_prompt_tokens: int,
    ) -> None:
        on_cpu = {}
        if cpu_platform.active():
            import torch

            os.environ.update(cpu_platform.process_env())
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch was imported before
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            on_cpu = {"enforce_eager": True, **cpu_platform.ENGINE_SETTINGS}
        from vllm import LLM

        self._model = model
        self._sampling = {"n": n, "temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
        self._seed = seed
        self._llm = LLM(
            str(model.path), max_model_len=min(model.context, max_prompt_tokens + max_tokens), seed=seed, **on_cpu
        )

    def generate(self, prompts: Sequence[str]) -> list[list[Response]]:
        """Responses to each prompt: (prompts, n). Shows progress and the time left."""
        from vllm import SamplingParams

        n = self._sampling["n"]
        outputs = self._llm.generate(
            [{"prompt_token_ids": tokens} for tokens in self._model.encode(prompts)],
            [
                # The engine counts up from here for the further responses to a prompt.
                SamplingParams(**self._sampling, seed=self._seed + i * n, skip_special_tokens=False)
                for i in range(len(prompts))
            ],
            use_tqdm=partial(tqdm, leave=False),
        )
        decode = self._model.tokenizer.decode
        return [
            [Response(decode(o.token_ids), len(o.token_ids), o.finish_reason == "length") for o in output.outputs]
            for output in outputs
        ]
