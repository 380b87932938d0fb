"""float32 (``ext.fp32``), which OpenRLHF's command line does not offer, as a value of ``--ds.param_dtype``.

In bfloat16 two implementations of a model disagree, trainer and engine among them: each activation is rounded to 8
bits, in other places in each. DeepSpeed trains in float32 where neither bf16 nor fp16 is switched on.
"""

from __future__ import annotations

import openrlhf.utils.utils as upstream
import torch

FP32 = "fp32"

_by_name = upstream.convert_to_torch_dtype


def to_torch_dtype(param_dtype: str) -> torch.dtype:
    """OpenRLHF's ``convert_to_torch_dtype``, for `FP32`, too."""
    return torch.float32 if param_dtype == FP32 else _by_name(param_dtype)


# Models look it up there when they are made.
upstream.convert_to_torch_dtype = to_torch_dtype
