"""How any number of rows becomes optimizer steps, ranks and micro-batches.

OpenRLHF drops a rank's last partial micro-batch, lets a partial accumulation window leak its gradient into the next
train step, and with dynamic batching ignores surplus rows. Here the controller plans the whole step: every row is
trained exactly once per epoch, every rank runs the same number of micro-batches in every window, and a window (the
micro-batches of one optimizer step) always ends inside the step. Micro-batches may be uneven: the loss is normalized
by the window's token count over all ranks, so their sizes do not change the gradient. Padding rows (``PAD``) appear
only where a rank has fewer rows than it must run micro-batches; they carry a zero mask.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

PAD = -1

# plan[rank][window][micro_batch] = row indices
Plan = list[list[list[list[int]]]]


def num_windows(num_rows: int, rows_per_window: int) -> int:
    """Optimizer steps for a batch: one for each full ``rows_per_window``, at least one.

    Rounding down keeps every optimizer step at least as large as configured.
    """
    return max(1, num_rows // rows_per_window)


def split_evenly(items: Sequence[int], parts: int) -> list[list[int]]:
    """Contiguous parts whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(len(items), parts)
    bounds = [i * size + min(i, extra) for i in range(parts + 1)]
    return [list(items[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]


def plan_batches(
    lengths: Sequence[int],
    *,
    num_ranks: int,
    rows_per_window: int,
    micro_batch_size: int,
    max_windows: int | None = None,
    max_tokens: int | None = None,
    rng: np.random.Generator | None = None,
) -> Plan:
    """Assign every row to one micro-batch.

    Args:
        lengths: tokens (prompt + response) of each row.
        num_ranks: data-parallel ranks.
        rows_per_window: rows of one optimizer step over all ranks (``train.batch_size``).
        max_windows: most optimizer steps; the rows of more share them.
        micro_batch_size: most rows in one micro-batch (ignored with ``max_tokens``).
        max_tokens: dynamic batching; rows are packed into micro-batches of at most this many tokens (a single longer
            row gets its own).
        rng: shuffles the rows first; None keeps their order.

    Returns:
        ``plan[rank][window][micro_batch]``, lists of row indices; equal numbers of windows and micro-batches on
        every rank. Raises ValueError on an empty batch.
    """
    if not lengths:
        raise ValueError("cannot plan an empty batch; the caller must skip the train step and count it")
    rows = list(range(len(lengths)))
    if rng is not None:
        rows = [int(i) for i in rng.permutation(len(rows))]
    plan: Plan = [[] for _ in range(num_ranks)]
    count = num_windows(len(rows), rows_per_window)
    for window in split_evenly(rows, count if max_windows is None else min(count, max_windows)):
        shares = split_evenly(window, num_ranks)
        if max_tokens is None:
            count = max(1, math.ceil(len(shares[0]) / micro_batch_size))
            micro = [split_evenly(share, count) for share in shares]
        else:
            packed = [_pack_by_tokens(share, lengths, max_tokens) for share in shares]
            count = max(1, max(len(batches) for batches in packed))
            micro = [_split_to_count(batches, count) for batches in packed]
        for rank, batches in enumerate(micro):
            plan[rank].append([batch if batch else [PAD] for batch in batches])
    return plan


def _pack_by_tokens(rows: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """First-fit decreasing: few micro-batches, none above ``max_tokens`` unless a single row is."""
    batches: list[list[int]] = []
    loads: list[int] = []
    for row in sorted(rows, key=lambda r: -lengths[r]):
        for i, load in enumerate(loads):
            if load + lengths[row] <= max_tokens:
                batches[i].append(row)
                loads[i] += lengths[row]
                break
        else:
            batches.append([row])
            loads.append(lengths[row])
    return batches


def _split_to_count(batches: list[list[int]], count: int) -> list[list[int]]:
    """Reach ``count`` micro-batches by halving the largest; empty ones (later padded) only when rows run out."""
    batches = [list(batch) for batch in batches]
    while len(batches) < count:
        largest = max(batches, key=len, default=[])
        if len(largest) < 2:
            batches.append([])
            continue
        batches.append([largest.pop() for _ in range(len(largest) // 2)])
    return batches


def check_plan(plan: Plan, num_rows: int) -> None:
    """Raise RuntimeError unless every row is trained exactly once and all ranks run in step."""
    trained = sorted(row for rank in plan for window in rank for batch in window for row in batch if row != PAD)
    if trained != list(range(num_rows)):
        raise RuntimeError(f"batch plan trains {len(trained)} rows of {num_rows} composed")
    shapes = {tuple(len(window) for window in rank) for rank in plan}
    if len(shapes) != 1:
        raise RuntimeError(f"ranks would run different numbers of micro-batches: {sorted(shapes)}")
