"""The loop around a step: the prefix cache after new weights, and the end of a run without prompts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from openrlhf.trainer.ppo_trainer import BasePPOTrainer

from openrlhf_ext.adapters.trainer import Trainer
from openrlhf_ext.prompt_pool import PoolExhausted

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("caching", [True, False])
def test_the_prefix_cache_is_reset_once_after_every_new_weights(
    monkeypatch: pytest.MonkeyPatch, caching: bool
) -> None:
    events: list[str] = []
    monkeypatch.setattr(BasePPOTrainer, "broadcast_to_vllm", lambda self: events.append("weights"))
    trainer = object.__new__(Trainer)
    trainer.args = SimpleNamespace(vllm=SimpleNamespace(enable_prefix_caching=caching))
    trainer.vllm_engines = ["first", "second"]
    trainer.pool = SimpleNamespace(engines=["first", "second"], leave_out_the_dead=lambda: None, all=events.append)
    for _ in range(2):
        trainer.broadcast_to_vllm()
    assert events == (["weights", "reset_prefix_cache"] if caching else ["weights"]) * 2


@pytest.mark.parametrize(
    ("eval_steps", "finished"), [(math.inf, [(1, False), (2, False), (2, True)]), (2, [(1, False), (2, False)])]
)
def test_a_pool_with_nothing_left_ends_the_run_at_the_last_step_that_was_made(eval_steps, finished) -> None:
    found: list[tuple[int, bool]] = []

    def step(number: int) -> None:
        if number == 3:
            raise PoolExhausted("no prompt is left", {"excluded": 5})

    controller = SimpleNamespace(
        max_steps=9,
        args=SimpleNamespace(eval=SimpleNamespace(steps=eval_steps)),
        _step=step,
        _finish_step=lambda number, last: found.append((number, last)),
    )
    assert Trainer._train_steps(controller, 0) == (2, "no prompt is left ({'excluded': 5})")
    assert found == finished
