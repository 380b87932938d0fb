"""Stock OpenRLHF, observed: every response is counted, rows that its fit leaves out too, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import openrlhf.trainer.ppo_utils.samples_generator as upstream_generator
import pytest
import torch
from fake_engines import Ref, SeededRay
from fakes import FakeEngine, Remote, policy_actor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from recorded import MAX_LENGTH, copies, response, rows_for, upstream_args

from openrlhf_ext.adapters.stock_trainer import CountingGenerator, StockActor, _refuse_extensions
from openrlhf_ext.config import DapoConfig, ExtConfig, GroupsConfig, ReplayConfig
from openrlhf_ext.ledger import RolloutLedger

pytestmark = pytest.mark.contract

BATCH = "--rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --rollout.micro_batch_size 1 --train.batch_size 8"
FILTER = ("--algo.dynamic_filtering_enable",)
MIXED, WRONG, RIGHT = (0.0, 1.0), (0.0, 0.0), (1.0, 1.0)


class CompletionOrder(SeededRay):
    """``ray`` as upstream's generator calls it."""

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        return super().wait(refs, timeout)


@pytest.fixture(autouse=True)
def completion_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_generator, "ray", CompletionOrder(seed=3))


def generator_of(
    rewards: Sequence[Sequence[float | None]],
    ledger: RolloutLedger,
    *flags: str,
    before_batch: Callable = lambda: None,
) -> CountingGenerator:
    """A generator over prompts "0", "1", ..., the responses to which get these rewards and have three tokens each."""
    engine = SimpleNamespace(
        get_num_unfinished_requests=Remote(lambda: Ref(0)),
        generate_responses=Remote(
            lambda *, prompt, **call: Ref([response(reward=reward) for reward in rewards[int(prompt)]])
        ),
    )
    loader = [("default", [str(i)], [""], [None]) for i in range(len(rewards))]
    strategy = SimpleNamespace(args=upstream_args("group_norm", *BATCH.split(), *flags))
    return CountingGenerator(strategy, loader, None, [engine], ledger=ledger, before_batch=before_batch)


def counts(ledger: RolloutLedger) -> tuple[int, int, int]:
    """Rollouts generated and filtered, tokens generated."""
    found = ledger.as_dict()
    return found["generated"], found["fates"]["filtered_zero_variance"], found["tokens"]


def pairs(samples: list) -> list[tuple[float, ...]]:
    values = [sample.rewards.item() for sample in samples]
    return sorted(zip(values[::2], values[1::2], strict=True))


def test_filtered_groups_are_replaced_one_by_one_and_counted() -> None:
    ledger = RolloutLedger()
    # Of the first four prompts two are filtered, of their two replacements one; the seventh fills the batch.
    rewards = [MIXED, WRONG, RIGHT, MIXED, MIXED, WRONG, MIXED, MIXED, WRONG]
    generator = generator_of(rewards, ledger, *FILTER)
    kept, _, num_prompts, exhausted = generator.generate_samples(max_len=MAX_LENGTH)
    assert (pairs(kept), num_prompts, exhausted) == ([MIXED] * 4, 7, False)
    assert counts(ledger) == (14, 6, 14 * 3)
    assert pairs(generator.take_generated()) == sorted(rewards[:7])
    # The pass ends with a batch of a single group.
    kept, _, num_prompts, exhausted = generator.generate_samples(max_len=MAX_LENGTH)
    assert (pairs(kept), num_prompts, exhausted) == ([MIXED], 2, True)
    assert counts(ledger) == (18, 8, 18 * 3)
    assert pairs(generator.take_generated()) == sorted(rewards[7:]) and generator.take_generated() == []


def test_what_was_generated_for_a_batch_that_is_filtered_as_a_whole_is_counted() -> None:
    ledger = RolloutLedger()
    kept, _, _, exhausted = generator_of([WRONG, RIGHT, WRONG], ledger, *FILTER).generate_samples(max_len=MAX_LENGTH)
    assert (kept, exhausted, counts(ledger)) == ([], True, (6, 6, 18))
    ledger.check()


def test_without_filtering_every_group_is_kept() -> None:
    ledger = RolloutLedger()
    kept = generator_of([MIXED, WRONG, RIGHT, MIXED, MIXED], ledger).generate_samples(max_len=MAX_LENGTH)[0]
    assert pairs(kept) == [WRONG, MIXED, MIXED, RIGHT] and counts(ledger) == (8, 0, 24)


def test_a_finished_run_generates_nothing_more() -> None:
    def finished() -> None:
        raise KeyError("finished")

    ledger = RolloutLedger()
    with pytest.raises(KeyError):
        generator_of([MIXED] * 4, ledger, before_batch=finished).generate_samples(max_len=MAX_LENGTH)
    assert counts(ledger) == (0, 0, 0)


def test_a_missing_reward_stops_the_run_and_names_the_prompt() -> None:
    with pytest.raises(RuntimeError, match="no reward for the prompt '2 3 = 5'"):
        generator_of([(1.0, None)], RolloutLedger()).generate_samples(max_len=MAX_LENGTH)


# -- what fit trains --


def fitted(actor: StockActor, num_rows: int, args) -> tuple[int, int, int]:
    actor.trainer.replay_buffer.items.extend(copies(rows_for(args)[:num_rows]))
    actor.fit(0.01)
    return actor.fit_counts()


@pytest.fixture
def stock_actor(monkeypatch: pytest.MonkeyPatch, local_ray: None) -> Callable[..., StockActor]:
    """Upstream's actor around the fake engine: micro-batches of 8, 16 of them in an optimizer step."""
    monkeypatch.setattr(FakeEngine, "global_steps", property(lambda self: len(self.gradients)), raising=False)

    def create(args) -> StockActor:
        actor = object.__new__(StockActor)
        vars(actor).update(vars(policy_actor(args)))
        return actor

    return create


def test_rows_trained_rows_left_out_and_optimizer_steps_of_a_fit(stock_actor: Callable) -> None:
    args = upstream_args()
    actor = stock_actor(args)
    assert fitted(actor, 128, args) == (128, 0, 1)
    assert fitted(actor, 7, args) == (0, 7, 0)
    assert fitted(actor, 60, args) == (56, 4, 0)
    # 7 micro-batches wait in the gradient; 9 more make an optimizer step.
    assert fitted(actor, 72, args) == (72, 0, 1)


def test_batching_by_tokens_leaves_out_what_does_not_fill_the_optimizers_batch(stock_actor: Callable) -> None:
    args = upstream_args(
        "group_norm", "--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "48", "--train.batch_size", "32"
    )
    actor = stock_actor(args)
    assert fitted(actor, 128, args) == (128, 0, 4)
    assert fitted(actor, 40, args) == (32, 8, 1)
    assert fitted(actor, 31, args) == (0, 31, 0)


# -- prompts, settings --


def test_the_order_of_prompts_follows_torchs_seed_when_the_loader_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # as in the controller

    def two_passes(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        loader = DeepspeedStrategy.setup_dataloader(object(), list(range(20)), 1, False, True, lambda items: items[0])
        return [list(loader) for _ in range(2)]

    first = two_passes(1)
    assert first == two_passes(1) != two_passes(2)
    assert sorted(first[0]) == sorted(first[1]) == list(range(20)) and first[0] != first[1]


def settings_of(save_steps: int = -1, **parts: object) -> SimpleNamespace:
    ckpt = SimpleNamespace(load_enable=False, save_steps=save_steps)
    return SimpleNamespace(ext=ExtConfig(run_dir="run", **parts), upstream=SimpleNamespace(ckpt=ckpt))


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("--ext.dapo", settings_of(dapo=DapoConfig())),
        ("--ext.replay", settings_of(replay=ReplayConfig())),
        ("--ext.groups.ineffective drop", settings_of(groups=GroupsConfig(ineffective="drop"))),
        ("--ckpt.save_steps 5", settings_of(save_steps=5)),
    ],
)
def test_settings_that_upstream_has_nothing_for_are_refused(flag: str, settings: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=f"^{flag} does not go with stock OpenRLHF"):
        _refuse_extensions(settings)
    _refuse_extensions(settings_of(groups=GroupsConfig()))
