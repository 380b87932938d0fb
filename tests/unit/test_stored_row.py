"""A stored row is a small copy that nothing outside can change, and what cannot be replayed is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stored_groups import stored_row

from openrlhf_ext.stored_row import StoredRow, copy_multimodal, num_bytes


def copy_of(tokens, mask, log_probs, engine=None, **changes) -> StoredRow:
    fields = {"engine_log_probs": engine, "truncated": False, "info": {"reward": 1.0}, "multimodal": None}
    return StoredRow.copy_of(tokens, mask, log_probs, **{**fields, **changes})


@pytest.mark.parametrize("token_type", [torch.int64, torch.int32])
@pytest.mark.parametrize("mask_type", [torch.int64, torch.bool])
def test_later_changes_of_the_source_tensors_do_not_reach_a_stored_row(token_type, mask_type) -> None:
    tokens = torch.tensor([5, 6, 7, 8], dtype=token_type)
    mask = torch.tensor([0, 1, 1], dtype=mask_type)
    log_probs, engine, info = torch.tensor([9.0, -1.0, -2.0]), torch.tensor([9.0, -1.5, -2.0]), {"reward": 1.0}
    row = copy_of(tokens, mask, log_probs, engine, info=info)
    arrays = (row.tokens, row.action_mask, row.behavior_log_probs, row.engine_gap)
    for array in arrays:
        assert not any(np.shares_memory(array, source.numpy()) for source in (tokens, mask, log_probs, engine))
        assert array.base is None and array.flags.owndata  # a view would keep its source's memory alive
    for source in (tokens, mask, log_probs, engine):
        source.fill_(0)
    info["reward"] = -1.0
    # The gap: -1 - (-1.5) = 0.5 and -2 - (-2) = 0.
    assert [array.tolist() for array in arrays] == [[5, 6, 7, 8], [False, True, True], [-1.0, -2.0], [0.5, 0.0]]
    assert row.info == {"reward": 1.0}


def test_a_stored_row_is_no_window_into_a_larger_tensor() -> None:
    # Upstream's rows are slices of padded batches: copying the window must not keep the batch.
    batch = torch.zeros(8, 1000, dtype=torch.int64)
    row = copy_of(batch[0, :4], torch.ones(8, 999).bool()[0, :3], torch.zeros(8, 999)[0, :3])
    assert num_bytes([row]) == 4 * 4 + 3 + 4 * 3


@pytest.mark.parametrize(("prompt_tokens", "sampled"), [(1, 1), (1, 4096), (2048, 1), (100, 100)])
@pytest.mark.parametrize("with_gap", [False, True])
def test_a_row_takes_at_most_twelve_bytes_a_token(prompt_tokens: int, sampled: int, with_gap: bool) -> None:
    length = prompt_tokens + sampled
    log_probs = torch.zeros(length - 1)
    mask = torch.arange(1, length) >= prompt_tokens
    row = copy_of(torch.zeros(length).long(), mask, log_probs, log_probs if with_gap else None)
    # int32 and bool for each token (one fewer), float32 for each sampled one, float16 more with the gap.
    expected = 4 * length + (length - 1) + 4 * sampled + (2 * sampled if with_gap else 0)
    assert num_bytes([row]) == expected <= 12 * length


def test_log_probabilities_keep_all_of_float32() -> None:
    exact = torch.tensor([-1.2345678, -20.000002])
    row = copy_of(torch.arange(3), torch.ones(2), exact)
    assert row.behavior_log_probs.dtype == np.float32 and torch.equal(row.on_actions(row.behavior_log_probs), exact)


def test_values_of_sampled_tokens_go_back_to_their_places_even_with_a_gap_between_turns() -> None:
    row = copy_of(torch.arange(6), torch.tensor([0, 1, 0, 0, 1]), torch.tensor([9.0, -1.0, 9.0, 9.0, -2.0]))
    assert row.on_actions(row.behavior_log_probs).tolist() == [0.0, -1.0, 0.0, 0.0, -2.0]


@pytest.mark.parametrize(
    ("mask", "log_probs", "message"),
    [
        ([1, 1], None, "a row of 3 tokens, 2 of them sampled, has log-probabilities of shape None; a replay buffer"),
        ([1, 1], [-1.0], r"has log-probabilities of shape \(1,\); a replay buffer needs one for each sampled token"),
        ([0, 0], [-1.0, -1.0], "a row of 3 tokens, 0 of them sampled"),
        ([1, 1], [-1.0, float("nan")], "a log-probability is not finite; such a row cannot be replayed"),
        ([1, 1], [-float("inf"), -1.0], "a log-probability is not finite"),
    ],
)
def test_a_row_that_no_weight_can_be_computed_for_is_refused(mask, log_probs, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_of(torch.arange(3), torch.tensor(mask), None if log_probs is None else torch.tensor(log_probs))


def test_what_stands_at_prompt_tokens_does_not_matter() -> None:
    row = copy_of(torch.arange(3), torch.tensor([0, 1]), torch.tensor([float("nan"), -1.0]))
    assert row.behavior_log_probs.tolist() == [-1.0]


# -- images --


def image(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    """As a vision processor gives it: 16 patches of 1176 values, and the grid of patches."""
    pixels = torch.randn(16, 1176, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_are_copied_unharmed_once_for_a_group_and_counted_once(dtype: torch.dtype) -> None:
    sources = [image(dtype), image(dtype), image(dtype, seed=1), None]
    copies = copy_multimodal(sources)
    for source in sources[:3]:
        for tensor in source.values():
            tensor.zero_()
    assert copies[0] is copies[1] and copies[2] is not copies[0] and copies[3] is None
    for copy, seed in ((copies[0], 0), (copies[2], 1)):
        for key, tensor in image(dtype, seed).items():
            assert copy[key].dtype == tensor.dtype and torch.equal(copy[key], tensor)
    rows = [stored_row(multimodal=copy) for copy in copies]
    # Two different images of 16 x 1176 values and 3 int64 each.
    pixels = 16 * 1176 * (4 if dtype == torch.float32 else 2) + 3 * 8
    assert num_bytes(rows) == 4 * num_bytes([stored_row()]) + 2 * pixels


@pytest.mark.parametrize(
    "other",
    [
        image(torch.bfloat16),
        {"pixel_values": image(torch.float32)["pixel_values"][:8], "image_grid_thw": torch.tensor([[1, 4, 4]])},
        {**image(torch.float32), "image_grid_thw": torch.tensor([[1, 2, 8]])},
        {"pixel_values": image(torch.float32)["pixel_values"]},
    ],
    ids=["type", "shape", "grid", "keys"],
)
def test_images_that_differ_in_anything_are_kept_apart(other: dict[str, torch.Tensor]) -> None:
    first, second = copy_multimodal([image(torch.float32), other])
    assert first is not second
    assert second.keys() == other.keys() and all(torch.equal(second[key], other[key]) for key in other)
