import numpy as np
import pytest

from openrlhf_ext.batching import PAD, check_plan, num_windows, plan_batches, split_evenly


def rows_of(plan):
    return [row for rank in plan for window in rank for batch in window for row in batch if row != PAD]


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 9, 40, 128, 129, 130, 255, 256, 257, 513])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("max_tokens", [None, 50])
def test_every_row_is_trained_once_and_ranks_run_in_step(num_rows, num_ranks, max_tokens):
    lengths = np.random.default_rng(num_rows).integers(1, 60, num_rows).tolist()
    plan = plan_batches(
        lengths,
        num_ranks=num_ranks,
        rows_per_window=128,
        micro_batch_size=8,
        max_tokens=max_tokens,
        rng=np.random.default_rng(0),
    )
    check_plan(plan, num_rows)
    assert len(plan[0]) == num_windows(num_rows, 128)
    batches = [batch for rank in plan for window in rank for batch in window]
    assert all(batches)
    assert all(batch == [PAD] for batch in batches if PAD in batch)
    if max_tokens is None:
        assert max(map(len, batches)) <= 8
    else:
        assert all(sum(lengths[r] for r in b) <= 50 for b in batches if len(b) > 1)


def test_c12_five_rows_on_four_ranks_leave_no_rank_empty_and_need_no_padding():
    plan = plan_batches([3] * 5, num_ranks=4, rows_per_window=128, micro_batch_size=8)
    assert [len(rank[0][0]) for rank in plan] == [2, 1, 1, 1]
    assert PAD not in [row for rank in plan for row in rank[0][0]]


def test_fewer_rows_than_ranks_are_padded_with_one_row_each():
    plan = plan_batches([3] * 2, num_ranks=4, rows_per_window=128, micro_batch_size=8)
    assert plan == [[[[0]]], [[[1]]], [[[PAD]]], [[[PAD]]]]


def test_c17_every_window_ends_inside_its_step_for_any_number_of_micro_batches():
    # gas 4, micro-batch 2, one rank: steps of 8, 12 and 8 rows.
    for rows, windows in ((8, [4]), (12, [6]), (16, [4, 4])):
        plan = plan_batches([1] * rows, num_ranks=1, rows_per_window=8, micro_batch_size=2)
        assert [len(window) for window in plan[0]] == windows


def test_a_full_batch_in_order_is_upstreams_layout():
    plan = plan_batches([1] * 8, num_ranks=2, rows_per_window=8, micro_batch_size=2)
    assert plan == [[[[0, 1], [2, 3]]], [[[4, 5], [6, 7]]]]


def test_windows_are_never_smaller_than_configured_once_there_is_one():
    assert [num_windows(n, 128) for n in (1, 127, 128, 255, 256)] == [1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("num_rows", "max_windows", "windows"),
    # 128 rows a window. 300 rows would make 2: a cap of 1 puts all into one; 513 make 4, a cap of 3 shares 171 each.
    [(192, 1, [192]), (300, 1, [300]), (300, 2, [150, 150]), (300, 9, [150, 150]), (513, 3, [171] * 3), (5, 1, [5])],
)
def test_rows_beyond_the_planned_windows_make_them_larger_not_more(num_rows, max_windows, windows):
    plan = plan_batches([1] * num_rows, num_ranks=2, rows_per_window=128, max_windows=max_windows, micro_batch_size=8)
    check_plan(plan, num_rows)
    assert [sum(len(b) for rank in plan for b in rank[w] if b != [PAD]) for w in range(len(plan[0]))] == windows


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    def plan(seed):
        return plan_batches(
            [1] * 64, num_ranks=2, rows_per_window=32, micro_batch_size=4, rng=np.random.default_rng(seed)
        )

    assert plan(1) == plan(1) != plan(2)


def test_split_evenly_sizes_differ_by_at_most_one():
    assert split_evenly([0, 1, 2, 3, 4], 3) == [[0, 1], [2, 3], [4]]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="empty batch"):
        plan_batches([], num_ranks=1, rows_per_window=8, micro_batch_size=1)


@pytest.mark.parametrize("plan", [[[[[0, 0]]]], [[[[0]]]], [[[[0]]], [[[1], [PAD]]]]])
def test_check_plan_catches_lost_and_doubled_rows_and_ranks_out_of_step(plan):
    with pytest.raises(RuntimeError):
        check_plan(plan, 2)
