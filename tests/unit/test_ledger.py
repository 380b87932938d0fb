import pytest

from openrlhf_ext.ledger import FATES, RolloutLedger


def test_every_generated_rollout_has_exactly_one_fate_when_a_step_closes():
    ledger = RolloutLedger()
    ledger.generated(24, tokens=240)
    ledger.assign("trained_fresh", 16)
    ledger.assign("filtered_zero_variance", 8)
    assert ledger.as_dict()["generated"] == sum(ledger.as_dict()["fates"].values()) == 24
    assert ledger.close_step()["step/num_trained_fresh"] == 16


@pytest.mark.parametrize("assigned", [23, 25])
def test_a_missing_or_doubly_counted_rollout_stops_the_step(assigned):
    ledger = RolloutLedger()
    ledger.generated(24, tokens=1)
    ledger.assign("trained_fresh", assigned)
    with pytest.raises(RuntimeError, match=f"24 generated, {assigned} accounted for"):
        ledger.close_step()


def test_waiting_rollouts_need_no_fate_yet_but_are_counted():
    ledger = RolloutLedger()
    ledger.generated(24, tokens=1)
    ledger.assign("pilot_too_hard", 8)
    ledger.set_waiting(16)
    assert ledger.close_step()["budget/rollouts_waiting"] == 16
    # Half of them get their fate, the others are lost.
    ledger.assign("pilot_stale", 8)
    ledger.set_waiting(0)
    with pytest.raises(RuntimeError, match="24 generated, 16 accounted for .* 0 waiting"):
        ledger.close_step()


def test_rollouts_that_wait_in_a_checkpoint_are_given_up_by_name():
    ledger, again = RolloutLedger(), RolloutLedger()
    ledger.generated(8, tokens=1)
    ledger.set_waiting(8)
    again.load_state_dict(ledger.state_dict())
    again.forget_waiting()
    assert again.close_step()["step/num_pilot_not_restored"] == 8
    assert again.as_dict()["waiting"] == 0


def test_step_counts_restart_and_the_budget_accumulates():
    ledger = RolloutLedger()
    for rollouts in (8, 4):
        ledger.generated(rollouts, tokens=10 * rollouts)
        ledger.assign("surplus", rollouts)
        metrics = ledger.close_step()
    assert (metrics["step/rollouts_generated"], metrics["budget/rollouts_generated"]) == (4, 12)
    assert (metrics["step/tokens_generated"], metrics["budget/tokens_generated"]) == (40, 120)


def test_an_unknown_fate_is_refused():
    with pytest.raises(ValueError, match="unknown fate 'lost'"):
        RolloutLedger().assign("lost", 1)


def test_a_restored_ledger_continues_and_an_unbalanced_one_is_refused():
    ledger = RolloutLedger()
    ledger.generated(8, tokens=80)
    ledger.assign("trained_fresh", 8)
    again = RolloutLedger()
    again.load_state_dict(ledger.state_dict())
    again.generated(8, tokens=80)
    again.assign("surplus", 8)
    assert again.close_step()["budget/rollouts_generated"] == 16
    with pytest.raises(RuntimeError, match="does not balance"):
        again.load_state_dict(
            {"generated": 9, "tokens": 0, "replayed": 0, "waiting": 0, "fates": dict.fromkeys(FATES, 1)}
        )


def test_replayed_rollouts_are_counted_beside_the_generated_ones_and_have_no_second_fate():
    ledger = RolloutLedger()
    for step, replayed in ((1, 0), (2, 16)):
        ledger.generated(8, tokens=80)
        ledger.assign("replaced_zero_variance" if replayed else "trained_fresh", 8)
        for _ in range(replayed // 8):
            ledger.replayed(8, born=1, step=step)
        metrics = ledger.close_step()
    assert (metrics["step/num_replayed"], metrics["step/num_replaced_zero_variance"]) == (16, 8)
    assert (metrics["budget/rollouts_generated"], metrics["budget/tokens_generated"]) == (16, 160)
    again = RolloutLedger()
    again.load_state_dict(ledger.state_dict())
    assert again.as_dict()["replayed"] == 16
    assert again.close_step()["step/num_replayed"] == 0


def test_a_fate_changes_within_its_step_and_the_total_stays():
    ledger = RolloutLedger()
    ledger.generated(8, tokens=80)
    ledger.assign("trained_fresh", 8)
    ledger.reassign("trained_fresh", "pool_not_drawn", 3)
    metrics = ledger.close_step()
    assert (metrics["step/num_trained_fresh"], metrics["step/num_pool_not_drawn"]) == (5, 3)


@pytest.mark.parametrize("born", [0, 5, 6])
def test_a_rollout_is_replayed_only_after_the_step_that_generated_it(born):
    with pytest.raises(RuntimeError, match=f"step 5 replays rollouts of step {born}, which does not lie before it"):
        RolloutLedger().replayed(8, born=born, step=5)
