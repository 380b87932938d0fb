"""The loop around a step: the prefix cache after new weights, and the end of a run without prompts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.prompt_pool import PoolExhausted

pytestmark = pytest.mark.contract


@pytest.mark.parametrize(
    ("caching", "images", "is_reset"), [(True, 0, True), (False, 0, False), (False, 1, True), (True, 1, True)]
)
def test_caches_are_reset_once_after_every_new_weights(
    monkeypatch: pytest.MonkeyPatch, caching: bool, images: int, is_reset: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(BasePPOTrainer, "broadcast_to_vllm", lambda self: events.append("weights"))
    trainer = object.__new__(Trainer)
    trainer.args = SimpleNamespace(
        vllm=SimpleNamespace(enable_prefix_caching=caching), data=SimpleNamespace(max_images_per_prompt=images)
    )
    trainer.vllm_engines = ["first", "second"]
    trainer.pool = SimpleNamespace(engines=["first", "second"], leave_out_the_dead=lambda: None, all=events.append)
    for _ in range(2):
        trainer.broadcast_to_vllm()
    assert events == (["weights", "reset_prefix_cache"] if is_reset else ["weights"]) * 2


@pytest.mark.parametrize(
    ("eval_steps", "finished"),
    [
        (math.inf, [(1, False, False), (2, False, False), (2, True, True)]),
        (2, [(1, False, False), (2, True, False)]),
    ],
)
def test_a_pool_with_nothing_left_ends_the_run_at_the_last_step_that_was_made(eval_steps, finished) -> None:
    found: list[tuple[int, bool, bool]] = []

    def step(number: int) -> None:
        if number == 3:
            raise PoolExhausted("no prompt is left", {"excluded": 5})

    def finish_step(number: int, *, evaluate: bool, last: bool) -> None:
        found.append((number, evaluate, last))
        controller._evaluated = number if evaluate else controller._evaluated

    controller = SimpleNamespace(
        max_steps=9,
        args=SimpleNamespace(eval=SimpleNamespace(steps=eval_steps)),
        ext=SimpleNamespace(max_rollouts=None, eval=SimpleNamespace(every_rollouts=None)),
        ledger=SimpleNamespace(num_generated=0),
        _step=step,
        _finish_step=finish_step,
        _evaluated=0,
        _saves=False,
    )
    for name in ("_is_done", "_is_evaluated"):
        setattr(controller, name, getattr(Trainer, name).__get__(controller))
    assert Trainer._train_steps(controller, 0) == (2, "no prompt is left ({'excluded': 5})")
    assert found == finished


@pytest.mark.parametrize("max_steps", [None, 4])
def test_a_budget_of_rollouts_ends_the_run_and_sets_the_points_of_evaluation(max_steps: int | None) -> None:
    ledger, found = SimpleNamespace(num_generated=0), []

    def step(number: int) -> None:
        ledger.num_generated += {1: 30, 2: 80, 3: 20, 4: 70, 5: 30, 6: 30}[number]

    controller = SimpleNamespace(
        max_steps=max_steps or 2,  # without one, only the plan of the learning rate
        args=SimpleNamespace(eval=SimpleNamespace(steps=1)),
        ext=SimpleNamespace(max_steps=max_steps, max_rollouts=230, eval=SimpleNamespace(every_rollouts=50)),
        ledger=ledger,
        _step=step,
        _finish_step=lambda number, evaluate, last: found.append((number, evaluate, last)),
    )
    for name in ("_is_done", "_is_evaluated"):
        setattr(controller, name, getattr(Trainer, name).__get__(controller))
    steps, ended = Trainer._train_steps(controller, 0)
    assert ended is None
    # Rollouts after each step: 30, 110, 130, 200, 230.
    expected = [(1, False, False), (2, True, False), (3, False, False), (4, True, max_steps == 4), (5, True, True)]
    assert found == expected[: max_steps or 5]
    assert steps == len(found)
