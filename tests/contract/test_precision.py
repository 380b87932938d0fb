"""float32 in OpenRLHF's models, in DeepSpeed and in the engine, none of which its command line offers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from openrlhf.models import Actor
from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config
from transformers import LlamaConfig, LlamaForCausalLM

from openrlhf_ext.adapters.engine import EngineActor, Float32EngineActor
from openrlhf_ext.adapters.precision import FP32, to_torch_dtype


def test_fp32_is_one_more_name_of_a_type() -> None:
    assert to_torch_dtype(FP32) is torch.float32
    assert to_torch_dtype("bf16") is torch.bfloat16
    assert to_torch_dtype("fp16") is torch.float16
    with pytest.raises(ValueError, match="fp64"):
        to_torch_dtype("fp64")


def test_openrlhf_s_actor_computes_in_the_type_it_is_given(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    for name, dtype in ((FP32, torch.float32), ("bf16", torch.bfloat16)):
        actor = Actor(str(tmp_path), attn_implementation="sdpa", param_dtype=name)
        assert {parameter.dtype for parameter in actor.parameters()} == {dtype}


def test_deepspeed_is_then_asked_for_neither_bf16_nor_fp16() -> None:
    config = get_train_ds_config(offload=False, param_dtype=FP32)
    assert not config["bf16"]["enabled"] and not config["fp16"]["enabled"]


def test_the_engine_takes_its_type_from_the_class() -> None:
    assert (EngineActor.DTYPE, Float32EngineActor.DTYPE) == (None, "float32")
