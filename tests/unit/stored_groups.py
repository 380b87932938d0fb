"""Stored groups for tests of the buffer and of filling."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from openrlhf_ext.group_buffer import StoredGroup
from openrlhf_ext.stored_row import Multimodal, StoredRow
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

NUM_BYTES = 2 * (5 * 6 - 1 + 4 * 3)
"""Of `stored_group`: two rows of 6 tokens (int32), 5 mask entries (bool) and 3 log-probabilities (float32)."""


def stored_row(prompt_tokens: int = 3, sampled: int = 3, *, multimodal: Multimodal | None = None) -> StoredRow:
    length = prompt_tokens + sampled
    mask = torch.arange(1, length) >= prompt_tokens
    return StoredRow.copy_of(
        torch.arange(length),
        mask,
        -0.1 * torch.arange(length - 1),
        engine_log_probs=None,
        truncated=False,
        info={},
        multimodal=multimodal,
    )


def stored_group(
    prompt_id: str, version: int = 0, rewards: Sequence[float] = (0, 1), group_id: str = ""
) -> StoredGroup:
    rollouts = tuple(Rollout(float(r), float(r), 3, stored_row()) for r in rewards)
    return RolloutGroup(group_id or f"g-{prompt_id}", Prompt(prompt_id, "text", ""), rollouts, version)


def prompt_ids(groups: Sequence[RolloutGroup]) -> str:
    """The one-letter prompt ids of some groups, in order."""
    return "".join(group.prompt.prompt_id for group in groups)
