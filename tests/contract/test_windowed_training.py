"""The learning rate follows planned train steps; metrics are means over all ranks, padding apart."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from fakes import policy_actor
from recorded import rows_for, token_mean_gradient, upstream_args
from replayed import SMALL, mixed_rows, rows_of_three_origins

from openrlhf_ext.adapters.actors import TrainStepSchedule, _add_metrics, _reduce
from openrlhf_ext.adapters.replayed_rows import ORIGINS

pytestmark = pytest.mark.contract

PEAK, LOWEST = 1.0, 0.1


# -- the schedule --


def cosine(num_steps: int, warmup: int = 0):
    """Upstream's default schedule over ``num_steps`` optimizer steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = transformers.get_scheduler(
        "cosine_with_min_lr", optimizer, warmup, num_steps, scheduler_specific_kwargs={"min_lr": LOWEST}
    )
    optimizer.step()  # torch warns when the schedule moves first
    return scheduler


def rates(scheduler, num_steps: int) -> list[float]:
    """The learning rate after 0, 1, ... ``num_steps`` steps of ``scheduler``."""
    found = scheduler.get_last_lr()
    for _ in range(num_steps):
        scheduler.step()
        found += scheduler.get_last_lr()
    return found


def train_step(schedule: TrainStepSchedule, optimizer_steps: int) -> list[float]:
    """The learning rate after every optimizer step of one train step, and after its end."""
    seen = rates(schedule, optimizer_steps)
    schedule.finish_train_step()
    return seen[1:] + schedule.get_last_lr()


@pytest.mark.parametrize("steps", [[2] * 5, [0, 1, 2, 5, 1], [0] * 5, [7] * 5], ids=str)
def test_after_train_step_t_the_learning_rate_is_at_position_t_times_the_plan(steps: list[int]) -> None:
    plan = rates(cosine(10, warmup=3), 10)
    schedule = TrainStepSchedule(cosine(10, warmup=3), 2)
    for t, optimizer_steps in enumerate(steps):
        seen = train_step(schedule, optimizer_steps)
        # Within the step it moves once for each optimizer step, to the planned end and no further.
        assert seen == [plan[min(2 * t + i, 2 * t + 2)] for i in range(1, optimizer_steps + 1)] + [plan[2 * t + 2]]


@pytest.mark.parametrize("optimizer_steps", [1, 2, 4, 8])
def test_the_learning_rate_never_rises_and_ends_at_its_minimum(optimizer_steps: int) -> None:
    # Open case C58: 50 train steps planned with two optimizer steps each; filtering halves them, replay multiplies.
    schedule = TrainStepSchedule(cosine(100), 2)
    seen = [lr for _ in range(50) for lr in train_step(schedule, optimizer_steps)]
    assert all(after <= before for before, after in zip(seen, seen[1:], strict=False))
    assert seen[-1] == pytest.approx(LOWEST)


def test_the_bare_schedule_climbs_back_to_its_peak() -> None:
    # The control of the test above: 200 optimizer steps on a plan of 100.
    assert rates(cosine(100), 200)[-1] == pytest.approx(PEAK)


def test_a_restored_schedule_continues_where_the_saved_one_was() -> None:
    saved = TrainStepSchedule(cosine(10), 2)
    for optimizer_steps in (1, 3, 2):
        train_step(saved, optimizer_steps)
    restored = TrainStepSchedule(cosine(10), 2)
    restored.load_state_dict(saved.state_dict())
    assert restored.get_last_lr() == saved.get_last_lr()
    assert [train_step(restored, n) for n in (0, 5)] == [train_step(saved, n) for n in (0, 5)]


# -- metrics --


def status(tokens: int, samples: int, loss: float, rewards: list[float], lr: float) -> dict:
    """What a training step returns: a loss weighted by tokens, a reward weighted by samples, a rate as it is."""
    return {
        "metrics": {"policy_loss": torch.tensor(loss), "reward": torch.tensor(rewards), "actor_lr": lr},
        "weights": {"policy_loss": "token", "reward": "sample", "actor_lr": None},
        "num_samples": float(samples),
        "num_action_tokens": float(tokens),
    }


PADDING = status(0, 1, math.nan, [9.0], 0.3)


def test_metrics_are_weighted_by_tokens_or_samples_and_padding_counts_for_nothing(one_rank_world: None) -> None:
    totals: dict[str, float] = {}
    last: dict[str, float] = {}
    for one in (status(4, 2, 0.5, [1.0, 0.0], 0.1), status(1, 1, 2.0, [1.0], 0.2), PADDING):
        _add_metrics(totals, last, one)
    # (4 * 0.5 + 1 * 2.0) / 5 tokens; (2 * 0.5 + 1 * 1.0) / 3 samples
    assert _reduce(totals) == {"policy_loss": pytest.approx(0.8), "reward": pytest.approx(2 / 3)}
    assert last == {"actor_lr": 0.3}


def test_a_train_step_of_padding_alone_reports_zero_not_nan(one_rank_world: None) -> None:
    totals: dict[str, float] = {}
    _add_metrics(totals, {}, PADDING)
    assert _reduce(totals) == {"policy_loss": 0.0, "reward": 0.0}


# -- two ranks --


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What both processes of ``two_ranks.py`` found; it runs once for all tests."""
    folder = tmp_path_factory.mktemp("two_ranks")
    script = Path(__file__).with_name("two_ranks.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_both_ranks_report_the_same_means_of_different_values(two_ranks: list[dict]) -> None:
    # Rank 0: 4 tokens of loss 0.5, 2 samples with rewards 1, 0. Rank 1: 1 token of loss 2, 1 sample with reward 1,
    # and its keys in the other order.
    expected = {"policy_loss": pytest.approx(0.8), "reward": pytest.approx(2 / 3)}
    assert [found["means"] for found in two_ranks] == [expected, expected]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_on_two_ranks_a_batch_that_fits_trains_as_upstreams(two_ranks: list[dict], mode: str) -> None:
    for found in two_ranks:
        ours, theirs = found[f"ours/{mode}"], found[f"upstream/{mode}"]
        assert len(ours["gradients"]) == 2
        torch.testing.assert_close(ours["gradients"], theirs["gradients"], atol=1e-6, rtol=0)
        assert ours["status"] == pytest.approx(theirs["status"], rel=1e-5, abs=1e-6)
        assert ours["status"] == two_ranks[0][f"ours/{mode}"]["status"]


@pytest.mark.parametrize("num_rows", [40, 7, 1])
def test_on_two_ranks_any_number_of_rows_trains_as_one_mean_over_all(
    two_ranks: list[dict], num_rows: int, local_ray: None
) -> None:
    # With a learning rate of 0 the gradients of both train steps are taken at the same weights. Of one row, the second
    # rank trains padding only.
    args = upstream_args()
    expected = token_mean_gradient(policy_actor(args), rows_for(args)[:num_rows], args)
    for found in two_ranks:
        torch.testing.assert_close(found[num_rows]["gradients"], [expected] * 2, atol=1e-6, rtol=0)
        assert found[num_rows]["status"] == two_ranks[0][num_rows]["status"]


def test_a_metric_that_only_some_rollouts_have_is_a_mean_over_all_rows(two_ranks: list[dict]) -> None:
    # Open case C18: rows 0, 3, 6 of 7 say "format"; ranks train rows 0 to 3 and 4 to 6. (1 + 1 + 1) / 7.
    assert [found["mixed_info"]["format"] for found in two_ranks] == [pytest.approx(3 / 7)] * 2


def test_on_two_ranks_fresh_and_replayed_rows_train_as_one_mean_over_all(
    two_ranks: list[dict], local_ray: None
) -> None:
    # 7 fresh and 8 replayed rows: the first rank trains fresh and one replayed, the second replayed ones only.
    args = upstream_args()
    rows = mixed_rows(args)
    expected = token_mean_gradient(policy_actor(args), rows, args)
    tokens = [int(row.action_mask.sum()) for row in rows]
    for found in two_ranks:
        torch.testing.assert_close(found["replay"]["gradients"], [expected] * 2, atol=1e-6, rtol=0)
        assert found["replay"]["status"] == two_ranks[0]["replay"]["status"]
        assert found["replay"]["status"]["replay_token_frac"] == pytest.approx(sum(tokens[7:]) / sum(tokens))


def test_on_two_ranks_rows_of_three_origins_train_as_one_mean_over_all_with_the_same_metrics(
    two_ranks: list[dict], local_ray: None, tmp_path: Path
) -> None:
    # 8 fresh, 8 filled in, 4 drawn: the first rank trains 10 of the first two kinds, the second of the last two.
    args = upstream_args("group_norm", *SMALL)
    rows = rows_of_three_origins(args, tmp_path)
    expected = token_mean_gradient(policy_actor(args), rows, args)
    tokens = [sum(int(row.action_mask.sum()) for row in part) for part in (rows[:8], rows[8:16], rows[16:])]
    assert len(rows) == 20 and expected.abs().max() > 1e-3
    for found in two_ranks:
        status = found["three_origins"]["status"]
        torch.testing.assert_close(found["three_origins"]["gradients"], [expected] * 2, atol=1e-6, rtol=0)
        assert list(status) == list(two_ranks[0]["three_origins"]["status"])
        assert status == two_ranks[0]["three_origins"]["status"]
        shares = [status[f"{origin}_token_frac"] for origin in ORIGINS]
        assert shares == pytest.approx([count / sum(tokens) for count in tokens])
        assert (
            status["format"] == pytest.approx(sum(float(row.info["format"]) for row in rows) / 20) and status["format"]
        )
