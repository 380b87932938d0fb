"""A random model of the Qwen2.5-VL architecture with 0.3 million parameters, and pictures for it.

For tests and rehearsals: vLLM, DeepSpeed, `AutoProcessor` and `AutoModelForImageTextToText` load it like a published
one. To load its processor takes torchvision, as for every Qwen2.5-VL.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from tokenizers.pre_tokenizers import ByteLevel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SPECIAL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
IMAGE_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 64}
"""Bounds of the processor, in pixels: 4 to 64 image tokens."""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token for each byte, and the special tokens that images need."""
    names = [*sorted(ByteLevel.alphabet()), *SPECIAL_TOKENS]
    tokenizer = Qwen2Tokenizer(
        vocab={name: i for i, name in enumerate(names)}, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.add_tokens(list(SPECIAL_TOKENS), special_tokens=True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def make_model() -> Qwen2_5_VLForConditionalGeneration:
    """A new model in bf16, the same each time. Its weights are so large that responses depend on the picture."""
    tokens = {name: len(ByteLevel.alphabet()) + i for i, name in enumerate(SPECIAL_TOKENS)}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 272,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # of 32, which suits vLLM's attention on CPU
            "num_key_value_heads": 1,
            "max_position_embeddings": 128_000,  # as published
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": tokens["<|im_end|>"],
            "pad_token_id": tokens["<|endoftext|>"],
        },
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
            "initializer_range": 0.1,
        },
        image_token_id=tokens["<|image_pad|>"],
        video_token_id=tokens["<|video_pad|>"],
        vision_start_token_id=tokens["<|vision_start|>"],
        vision_end_token_id=tokens["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(config).to(torch.bfloat16)


def save(out_dir: Path) -> None:
    """Model and processor as a Hugging Face folder."""
    make_model().save_pretrained(out_dir)
    make_tokenizer().save_pretrained(out_dir)
    # Written by hand: making a processor needs torchvision, which only those who load it shall need.
    parts = {
        f"{kind}_processor": {f"{kind}_processor_type": f"Qwen2VL{kind.title()}Processor", "size": IMAGE_SIZE}
        for kind in ("image", "video")
    }
    (out_dir / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2_5_VLProcessor", **parts}))


def draw_picture(path: Path, seed: int) -> None:
    """A triangle in one of four sizes, of 6 to 12 image tokens."""
    rng = random.Random(seed)
    width, height = rng.choice([(90, 60), (60, 100), (84, 84), (112, 84)])
    picture = Image.new("RGB", (width, height), "white")
    corners = [(rng.randrange(width), rng.randrange(height)) for _ in range(3)]
    ImageDraw.Draw(picture).polygon(corners, fill=(rng.randrange(256), rng.randrange(256), 0))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path)
