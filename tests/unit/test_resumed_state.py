"""A buffer that was saved and restored goes on exactly like one that was never stopped, whenever that was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scored_groups import scored
from stored_groups import NUM_BYTES, stored_group

from openrlhf_ext.checkpoint import sidecar
from openrlhf_ext.checkpoint.group_codec import groups_from_state, groups_to_state
from openrlhf_ext.config import MoppsConfig, PoolConfig, ReplayConfig, SuccessReplayConfig, ThrottleConfig
from openrlhf_ext.evictions import EvictionCounter
from openrlhf_ext.group_buffer import GroupBuffer, StoredGroup
from openrlhf_ext.ledger import FATES, RolloutLedger
from openrlhf_ext.prompt_pool import STATES, Evidence, PromptPool
from openrlhf_ext.replay import RolloutReplay
from openrlhf_ext.rollout_buffer import EVICTIONS, RolloutBuffer
from openrlhf_ext.rollout_segment import ScoredGroup
from openrlhf_ext.selection import Mopps
from openrlhf_ext.stored_row import StoredRow
from openrlhf_ext.success_replay import SuccessReplay
from openrlhf_ext.survivors import Survivor, SurvivorBuffer
from openrlhf_ext.throttle import ReplayThrottle
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup

NUM_STEPS = 12


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# -- inputs of a step, the same for every run --


def rng(step: int) -> np.random.Generator:
    return np.random.default_rng([7, step])


def row(source: np.random.Generator, *, gap: bool, images: dict | None) -> StoredRow:
    length = int(source.integers(3, 9))
    mask = source.random(length - 1) < 0.6
    mask[-1] = True
    log_probs = -source.random(length - 1, dtype=np.float32)
    return StoredRow.copy_of(
        torch.from_numpy(source.integers(32_000, size=length)),
        torch.from_numpy(mask),
        torch.from_numpy(log_probs),
        engine_log_probs=torch.from_numpy(log_probs - np.float32(0.01)) if gap else None,
        truncated=bool(source.random() < 0.3),
        info={name: source.normal() for name in ("reward", "length") if source.random() < 0.7},
        multimodal=images if source.random() < 0.8 else None,
    )


def group(source: np.random.Generator, prompt_id: str, version: int, *, gap: bool = False) -> StoredGroup:
    pixels = {"pixels": torch.from_numpy(source.normal(size=(2, 3))).bfloat16(), "grid": torch.tensor([[1, 2]])}
    images = pixels if source.random() < 0.5 else None
    rollouts = tuple(
        Rollout(source.normal(), float(source.integers(2)), 3 + i, row(source, gap=gap, images=images))
        for i in range(int(source.integers(2, 5)))
    )
    prompt = Prompt(prompt_id, f"Q {prompt_id} \U0001f600", {"answer": ["$", 2.5]}, "math", ["a.png", None])
    return RolloutGroup(f"{version}-{prompt_id}", prompt, rollouts, version)


def groups(step: int, *, count: int = 4) -> list[StoredGroup]:
    source = rng(step)
    gap = bool(source.random() < 0.5)
    return [group(source, f"p{source.integers(6)}", step, gap=gap) for _ in range(int(source.integers(count + 1)))]


def scored_groups(step: int) -> list[ScoredGroup[StoredRow]]:
    source = rng(step + 1000)
    return [ScoredGroup.of(one, source.normal(size=len(one.rollouts)).tolist()) for one in groups(step)]


# -- what a step of each does, and all that can be seen of it --


def step_group_buffer(buffer: GroupBuffer, step: int) -> object:
    metrics = buffer.metrics(step)
    buffer.evict_stale(step)
    used = [buffer.use(one) for one in buffer.groups if rng(step).random() < 0.5]
    buffer.push(groups(step))
    return metrics, used, buffer.groups


def step_rollout_buffer(buffer: RolloutBuffer, step: int) -> object:
    # First, and in every third step only: so there are counts since the last ones in most checkpoints.
    metrics = buffer.metrics(step) if step % 3 == 0 else None
    buffer.evict_stale(step)
    drawn = buffer.draw(3, rng(step), exclude=[f"{step - 1}-p0"])
    buffer.push(scored_groups(step))
    return metrics, drawn, len(buffer), buffer.num_bytes, buffer.bookkeeping_bytes


def step_replay(replay: RolloutReplay, step: int) -> object:
    fresh = scored_groups(step)
    composed = replay.compose(fresh, step)
    replay.store(fresh)
    return composed, replay.num_steps, replay.buffer.metrics(step + 1)


def step_success_replay(replay: SuccessReplay, step: int) -> object:
    failed = [
        RolloutGroup(f"f{i}", Prompt(f"p{i}", "", ""), (Rollout(0.0, 0.0, 1, "new"),) * 2, step) for i in range(6)
    ]
    mixed = replay.mix(failed)
    replay.store(groups(step))
    return mixed.groups, mixed.births, replay.metrics()


def step_throttle(throttle: ReplayThrottle, step: int) -> object:
    row_frac, sample_frac, kl = rng(step).random(3).tolist()
    before = throttle.metrics()
    throttle.observe(row_frac=row_frac, effective_sample_frac=sample_frac, behavior_kl=kl / 5)
    return before, throttle.metrics()


class Counted:
    """An eviction counter with as many things stored as it balances with."""

    def __init__(self) -> None:
        self.counter, self.stored = EvictionCounter("test"), 0

    def step(self, step: int) -> object:
        pushed, evicted = rng(step).integers(4, size=2).tolist()
        self.counter.pushed(pushed)
        evicted = min(evicted, self.stored + pushed)
        self.counter.evicted("ab"[step % 2], evicted)
        self.stored += pushed - evicted
        return self.stored, dict(self.counter.take(self.stored)) if step % 3 == 0 else None

    def state_dict(self) -> dict:
        return {"counter": self.counter.state_dict(), "stored": self.stored}

    def load_state_dict(self, state: dict) -> None:
        self.counter.load_state_dict(state["counter"])
        self.stored = state["stored"]


class Pilots:
    """A survivor buffer whose pilots are stored groups of two rollouts."""

    def __init__(self, order: str) -> None:
        self.buffer: SurvivorBuffer[StoredRow] = SurvivorBuffer(order, seed=5)

    def step(self, step: int) -> object:
        source = rng(step)
        stale = self.buffer.drop_older_than(step - 3)
        drawn = self.buffer.draw(2)
        for i in range(3):
            pilot = group(source, f"p{i}", step)
            pilot = RolloutGroup(pilot.group_id, pilot.prompt, pilot.rollouts[:2], step)
            self.buffer.waiting.append(Survivor(10 * step + i, pilot, int(source.integers(5)), 4))
        return stale, drawn, self.buffer.drop_beyond(6), self.buffer.waiting, self.buffer.num_rollouts

    def state_dict(self) -> dict:
        return self.buffer.state_dict(groups_to_state)

    def load_state_dict(self, state: dict) -> None:
        self.buffer.load_state_dict(state, groups_from_state, pilots_per_group=2)


def step_ledger(ledger: RolloutLedger, step: int) -> object:
    source = rng(step)
    ended = source.integers(4, size=len(FATES)).tolist()
    waited, waits = ledger.as_dict()["waiting"], int(source.integers(9))
    ledger.generated(sum(ended) - waited + waits, tokens=int(source.integers(99)))
    for fate, count in zip(FATES, ended, strict=True):
        ledger.assign(fate, count)
    if step > 1:
        ledger.replayed(3, born=1, step=step)
    ledger.set_waiting(waits)
    return ledger.close_step(), ledger.as_dict()


def step_pool(pool: PromptPool, step: int) -> object:
    source = rng(step)
    taken = pool.take(5, pass_over=source.integers(12, size=2).tolist())
    granted = [
        pool.report(index, STATES[source.integers(len(STATES))], Evidence(step, int(source.integers(9)), 8))
        for index in taken[1:]
    ]
    pool.put_off(taken[:1])
    return taken, granted, pool.epoch, pool.metrics(), [pool.status(index) for index in range(12)]


def step_mopps(mopps: Mopps, step: int) -> object:
    chosen = mopps.choose(rng(step).permutation(20)[:9].tolist(), 4)
    for index in chosen:
        mopps.observe(index, index % 5, 4)
    return chosen


def replay_config(**options: object) -> ReplayConfig:
    return ReplayConfig(**{"warmup_steps": 2, "max_age": 4, **options})


def rollout_replay() -> RolloutReplay:
    throttle = ReplayThrottle(ThrottleConfig())
    return RolloutReplay(replay_config(max_uses=2), np.random.default_rng(1), throttle=throttle, correct_at=1.0)


def success_replay(**options: object) -> SuccessReplay:
    def restore(prompt: Prompt, rollout: Rollout) -> Rollout:
        return rollout

    return SuccessReplay(SuccessReplayConfig(**{"capacity": 3, **options}), restore, np.random.default_rng(2))


Case = tuple[Callable[[], object], Callable[[object, int], object]]

CASES: dict[str, Case] = {
    "group buffer": (
        partial(GroupBuffer, capacity=7, max_bytes=2000, max_age=5, max_uses=2),
        step_group_buffer,
    ),
    "success replay": (partial(success_replay, max_gib=1500 / 2**30), step_success_replay),
    "rollout replay": (rollout_replay, step_replay),
    "throttle": (partial(ReplayThrottle, ThrottleConfig(recover=0.07, min_share=0.05)), step_throttle),
    "counter": (Counted, Counted.step),
    "pilots, random": (partial(Pilots, "random"), Pilots.step),
    "pilots, max_variance": (partial(Pilots, "max_variance"), Pilots.step),
    "ledger": (RolloutLedger, step_ledger),
    "prompt pool": (
        partial(PromptPool, 12, 3, PoolConfig(exclude_min_rollouts=8, exclude_min_visits=1, exclude_epochs=2)),
        step_pool,
    ),
    "mopps": (partial(Mopps, 20, 3, MoppsConfig()), step_mopps),
    **{
        f"rollout buffer, {name}": (partial(RolloutBuffer, replay_config(**options)), step_rollout_buffer)
        for name, options in {
            "age": {},
            "groups": {"granularity": "group", "beta": 0.5},
            "rare": {"rare_max_age": 8, "rare_accuracy": 0.4},
            "uses": {"max_uses": 2, "priority": "sigma"},
            "capacity": {"eviction": "capacity", "capacity": 13},
            "bytes": {"eviction": "none", "max_gib": 2500 / 2**30},
        }.items()
    },
}


def plain(value: object) -> object:
    """Everything in a value, in a form that compares bit for bit."""
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), value.tolist()
    if isinstance(value, float):
        return value.hex()
    if is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, dict):
        return [(key, plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def run(case: Case, root: Path, stops: set[int]) -> Iterator[object]:
    """What every step shows, when the state goes to disk and into a new object before each step in ``stops``."""
    make, advance = case
    one = make()
    for step in range(NUM_STEPS):
        if step in stops:
            sidecar.write(root, f"step_{step}", one.state_dict())
            one = make()
            one.load_state_dict(sidecar.read(root, f"step_{step}"))
        yield plain(advance(one, step))


@pytest.mark.parametrize("name", CASES)
def test_saved_restored_and_continued_is_never_stopped(tmp_path: Path, name: str) -> None:
    never = list(run(CASES[name], tmp_path, set()))
    assert len({str(one) for one in never}) > NUM_STEPS / 2  # the schedule does something
    for step in range(NUM_STEPS):
        assert list(run(CASES[name], tmp_path, {step})) == never, f"stopped before step {step}"
    assert list(run(CASES[name], tmp_path, set(range(NUM_STEPS)))) == never, "stopped before every step"


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("rollout buffer")])
def test_the_schedules_evict_for_the_reason_they_are_named_after(name: str) -> None:
    make, advance = CASES[name]
    buffer = make()
    evicted = dict.fromkeys(EVICTIONS, 0.0)
    for step in range(NUM_STEPS):
        advance(buffer, step)
        metrics = buffer.metrics(step)
        evicted = {reason: evicted[reason] + metrics[f"rollout_buffer/num_evicted_{reason}"] for reason in EVICTIONS}
    reason = name.removeprefix("rollout buffer, ")
    assert evicted[reason if reason in EVICTIONS else "age"] > 0


def test_a_saved_state_does_not_change_when_the_buffer_goes_on(tmp_path: Path) -> None:
    one = RolloutBuffer(replay_config())
    one.push([scored("a"), scored("b")])
    state = one.state_dict()
    before = plain(state)
    one.draw(3, rng(0))
    one.evict_stale(9)
    assert plain(state) == before and len(one) == 0


def test_an_unchanged_segment_is_not_written_again_and_a_new_one_once(tmp_path: Path) -> None:
    one = RolloutBuffer(replay_config())
    one.push([scored("a"), scored("b")])
    sidecar.write(tmp_path, "1", one.state_dict())
    (first,) = (tmp_path / "segments").iterdir()
    written_at = first.stat().st_mtime_ns
    again = RolloutBuffer(replay_config())
    again.load_state_dict(sidecar.read(tmp_path, "1"))
    again.draw(2, rng(0))
    again.push([scored("c", 1)])
    sidecar.write(tmp_path, "2", again.state_dict())
    assert len(list((tmp_path / "segments").iterdir())) == 2 and first.stat().st_mtime_ns == written_at
    again.evict_stale(5)  # a and b
    sidecar.write(tmp_path, "3", again.state_dict())
    sidecar.remove(tmp_path, "2")
    sidecar.collect_garbage(tmp_path)
    assert first.exists()  # step 1 still refers to it
    sidecar.remove(tmp_path, "1")
    sidecar.collect_garbage(tmp_path)
    assert not first.exists() and len(list((tmp_path / "segments").iterdir())) == 1


def test_groups_come_back_equal_and_rows_share_their_images_again() -> None:
    image = {"pixels": torch.ones(2)}
    source = rng(0)
    pictured = [row(source, gap=gap, images=None) for gap in (True, False)]
    rows = [StoredRow(*(getattr(one, f.name) for f in fields(one)[:-1]), image) for one in pictured]
    one = RolloutGroup("g", Prompt("p", "t", None), tuple(Rollout(0.1, 1.0, 2, r) for r in rows), 3)
    empty = RolloutGroup("empty", Prompt("q", "t", 0), (), 4)
    back = groups_from_state(groups_to_state([one, empty]))
    assert plain(back) == plain([one, empty])
    images = [rollout.payload.multimodal for rollout in back[0].rollouts]
    assert images[0] is images[1]
    # A row that leaves a buffer frees its memory.
    assert all(rollout.payload.tokens.base is None for rollout in back[0].rollouts)
    assert groups_from_state(groups_to_state([])) == []


def test_a_restored_replay_still_refuses_to_compose_a_step_twice() -> None:
    one, again = rollout_replay(), rollout_replay()
    one.compose([], 4)
    again.load_state_dict(one.state_dict())
    with pytest.raises(RuntimeError, match="version 4 is composed after version 4"):
        again.compose([], 4)


# -- other settings --


def test_a_smaller_group_buffer_evicts_the_oldest_and_counts_them() -> None:
    one = GroupBuffer(capacity=5, max_bytes=10**6)
    one.push([stored_group(p, version) for version, p in enumerate("abcde")])
    for options, reason, left in (
        ({"capacity": 2, "max_bytes": 10**6}, "capacity", 2),
        ({"capacity": 5, "max_bytes": 3 * NUM_BYTES}, "bytes", 3),
    ):
        smaller = GroupBuffer(**options)
        smaller.load_state_dict(one.state_dict())
        assert [group.prompt.prompt_id for group in smaller.groups] == list("abcde")[-left:]
        metrics = smaller.metrics(5)
        assert metrics[f"group_buffer/num_evicted_{reason}"] == 5 - left
        assert metrics["group_buffer/num_bytes"] == left * NUM_BYTES


def test_a_smaller_rollout_buffer_evicts_the_oldest_and_counts_them() -> None:
    one = RolloutBuffer(replay_config())
    for version in range(3):
        one.push([scored(str(version), version)])
    for options, reason, left in (
        ({"capacity": 3}, "capacity", 3),
        ({"max_gib": 2 * (one.num_bytes / 3) / 2**30}, "bytes", 4),
    ):
        smaller = RolloutBuffer(replay_config(**options))
        smaller.load_state_dict(one.state_dict())
        assert len(smaller) == left and smaller.metrics(3)[f"rollout_buffer/num_evicted_{reason}"] == 6 - left


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("granularity", "group"), ("priority", "sigma"), ("alpha", 1.0), ("eps", 0.5), ("eviction", "none")),
        *(("max_age", 5), ("rare_max_age", 9)),
    ],
)
def test_rollouts_of_other_weights_or_age_limits_are_refused_by_the_flag(name: str, value: object) -> None:
    one, other = RolloutBuffer(replay_config()), RolloutBuffer(replay_config(**{name: value}))
    with pytest.raises(ValueError, match=rf"--ext\.replay\.{name} .*this run has {value}; resume with the same"):
        other.load_state_dict(one.state_dict())


def test_fewer_successes_of_a_prompt_are_kept_and_the_oldest_go() -> None:
    one, smaller = success_replay(), success_replay(capacity=1)
    one.store([stored_group("a", version, (0, 1)) for version in range(3)])
    smaller.load_state_dict(one.state_dict())
    failed = RolloutGroup("g", Prompt("a", "", ""), (Rollout(0.0, 0.0, 1, None),), 5)
    assert len(smaller) == 1 and smaller.mix([failed]).births == {"g": 2}


def test_waiting_prompts_with_another_number_of_pilots_are_refused_by_the_flag() -> None:
    one = Pilots("oldest")
    one.step(0)
    with pytest.raises(ValueError, match=r"prompt p0 waits with 2 pilots to train, this run trains 4; .*--ext\.pilot"):
        one.buffer.load_state_dict(one.state_dict(), groups_from_state, pilots_per_group=4)


def test_a_share_below_the_smallest_is_raised_and_a_new_limit_is_not_exceeded() -> None:
    one = ReplayThrottle(ThrottleConfig(max_behavior_kl=None, min_share=0.1, shrink=0.5))
    for _ in range(3):
        one.observe(row_frac=0.9)
    other = ReplayThrottle(ThrottleConfig(min_share=0.3))
    other.load_state_dict(one.state_dict())
    assert (one.share, other.share) == (0.125, 0.3)
    assert other.metrics()["throttle/exceeded_row_frac"] == 1 and other.metrics()["throttle/exceeded_behavior_kl"] == 0
