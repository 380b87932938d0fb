"""The processor of the tiny vision model without its part for videos, which alone needs torchvision."""

from __future__ import annotations

from transformers import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from openrlhf_ext.tasks.tiny_vision_model import IMAGE_SIZE, make_tokenizer


class ImagesOnly(Qwen2_5_VLProcessor):
    def check_argument_for_proper_class(self, argument_name, argument):
        return type(argument)


def make_processor() -> ImagesOnly:
    """As OpenRLHF's ``get_tokenizer`` returns one."""
    tokenizer = make_tokenizer()
    image_processor = Qwen2VLImageProcessorPil(size=dict(IMAGE_SIZE))
    processor = ImagesOnly(image_processor, tokenizer, None, chat_template=tokenizer.chat_template)
    for name in ("pad_token", "pad_token_id", "eos_token", "eos_token_id"):
        setattr(processor, name, getattr(tokenizer, name))
    return processor
