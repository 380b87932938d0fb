"""Prompts with images: what OpenRLHF's processing of them leaves open, in the engines and before they start.

OpenRLHF 0.11.2 carries images from ``--data.image_key`` to vLLM, and what the model's processor makes of them
(``Experience.mm_train_inputs``) to actor and reference model. Everything here is for processors (``AutoProcessor``),
which ``get_tokenizer`` returns in place of a tokenizer for a model with a ``vision_config``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import openrlhf.utils.vlm_utils as vlm_utils
import torch

_NUM_PROCESSED = 64
"""Prompts whose tensors are kept: those whose rollouts have started and not all been tokenized."""

_FORBIDDEN = -100.0
"""vLLM's lowest bias of a logit."""

_process = vlm_utils.process_prompt_with_images


def is_processor(tokenizer) -> bool:
    return hasattr(tokenizer, "image_processor")


def placeholders(processor) -> set[int]:
    """Tokens that stand for parts of an image or a video."""
    ids = (getattr(processor, name, None) for name in ("image_token_id", "video_token_id"))
    return {token for token in ids if token is not None}


def forbidden_tokens(tokenizer) -> dict[int, float] | None:
    """``logit_bias`` against placeholders in a response, for which the trainer's model would find no image."""
    return dict.fromkeys(placeholders(tokenizer), _FORBIDDEN) if is_processor(tokenizer) else None


def decode_as_written(processor) -> None:
    """Decode an image to the one placeholder that the prompt's text has, not to one for each of its parts.

    Reward files find a response behind the prompt's text.
    """
    decode, pads = processor.decode, placeholders(processor)
    processor.decode = lambda tokens, **kwargs: decode(vlm_utils.dedup_media_tokens(list(tokens), pads), **kwargs)


def process_once(dtype: torch.dtype) -> None:
    """Process a prompt's images once for all rollouts of its group; they share tensors, in the models' precision.

    Upstream processes them anew for each rollout. Shared tensors are sent and kept once for a group, and every
    vision model casts its pixel values to ``dtype``, the type of its weights, before it does anything with them.
    """

    def compact(processor, prompt, images):
        tokens, inputs, pictures = _process(processor, prompt, images)
        if inputs and "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
        return tokens, inputs, pictures

    kept = lru_cache(_NUM_PROCESSED)(lambda processor, prompt, names: compact(processor, prompt, list(names)))

    def process_prompt_with_images(processor, prompt, images):
        if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
            return compact(processor, prompt, images)  # pictures that an agent's environment drew
        tokens, inputs, pictures = kept(processor, prompt, tuple(images))
        return list(tokens), inputs, pictures

    vlm_utils.process_prompt_with_images = process_prompt_with_images


def check_images(text: str, images: Sequence[str], processor, max_images: int) -> tuple[int, str | None]:
    """How many tokens a prompt's images add to its text, and why they cannot be used (None where they can).

    Args:
        text: as the engines get it, after templates.
        images: paths, data URIs or URLs; the last are not looked at, and count as adding nothing.
    """
    places = text.count(processor.image_token)
    if places != len(images):
        return 0, (
            f"has {len(images)} images, but its text has a place for {places}: <image> with "
            f"--data.apply_chat_template, {processor.image_token} without"
        )
    if len(images) > max_images:
        return 0, f"has {len(images)} images, but --data.max_images_per_prompt is {max_images}; raise it"
    sizes = []
    for image in images:
        if image.startswith(("http://", "https://")):
            continue
        pictures = vlm_utils.load_images(image)  # of the file's header; pixels are read when they are needed
        if not pictures:
            return 0, f"its image {image[:200]} cannot be read as one"
        width, height = pictures[0].size
        sizes.append((height, width))
    try:
        counts = processor._get_num_multimodal_tokens(image_sizes=sizes).num_image_tokens if sizes else []
    except ValueError as error:  # too flat a picture
        return 0, f"its image cannot be used: {error}"
    return sum(counts) - len(sizes), None
