"""What the actors and a step say of themselves for the diagnostics: distance moved, entropy, rows by origin, ports."""

from __future__ import annotations

import math
import socket
import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from fakes import policy_actor
from openrlhf.trainer.ppo_utils.experience import Experience
from recorded import upstream_args

from openrlhf_ext.adapters import actors
from openrlhf_ext.adapters.actors import CriticActor, PolicyActor, ReferenceActor, SafePort
from openrlhf_ext.adapters.batch_composer import Batch
from openrlhf_ext.adapters.step_report import row_metrics
from openrlhf_ext.types import Prompt, Rollout, RolloutGroup


def test_the_distance_is_the_norm_of_the_difference_to_the_start(one_rank_world: None) -> None:
    args = upstream_args()
    actor = policy_actor(args)
    weights = actor._engine.module.logits.data
    weights.zero_()
    weights[0, 0] = 2.0
    actor._start = actor._weights()
    assert actor.distance_from_start() == {"policy/distance": 0.0, "policy/distance_relative": 0.0}
    weights[0, 0], weights[1, 1] = -1.0, 4.0
    assert actor.distance_from_start() == {"policy/distance": 5.0, "policy/distance_relative": 2.5}


def test_the_model_of_an_earlier_run_is_freed_though_a_hook_of_its_own_holds_it(one_rank_world: None) -> None:
    actor = policy_actor(upstream_args())
    engine, destroyed = actor._engine, []
    weights = weakref.ref(engine.module.logits)
    # As DeepSpeed: a hook that reaches the optimizer, which has the weights.
    hook = engine.module.logits.register_hook(lambda gradient, optimizer=engine.optimizer: gradient)
    engine.destroy = lambda hook=hook: destroyed.append(hook.remove())
    del engine, hook
    actor._forget_model()
    assert len(destroyed) == 1 and weights() is None
    actor._forget_model()  # there is none
    assert len(destroyed) == 1


def test_the_entropy_is_the_mean_surprise_of_sampled_tokens() -> None:
    def row(log_probs: list[float], mask: list[int]) -> Experience:
        return Experience(
            action_log_probs=torch.tensor([log_probs]), action_mask=torch.tensor([mask]), truncated=torch.tensor([0.0])
        )

    rows = [row([math.log(0.5), math.log(0.25)], [1, 1]), row([math.log(0.125), -99.0], [1, 0])]
    assert row_metrics(rows)["rollout/entropy_mean"] == pytest.approx((1 + 2 + 3) * math.log(2) / 3)


def test_the_engine_s_gap_is_a_mean_over_tokens_and_its_kl_the_k3_estimate() -> None:
    def row(trainer: list[float], engine: list[float], mask: list[int]) -> Experience:
        return Experience(
            action_log_probs=torch.tensor([trainer]),
            rollout_log_probs=torch.tensor([engine]),
            action_mask=torch.tensor([mask]),
            truncated=torch.tensor([0.0]),
        )

    rows = [
        row([math.log(0.5), math.log(0.2)], [math.log(0.25), math.log(0.4)], [1, 1]),
        row([0.0, 1], [0.0, 0], [1, 0]),
    ]
    metrics = row_metrics(rows)
    assert metrics["rollout/engine_log_prob_abs_diff_mean"] == pytest.approx(2 * math.log(2) / 3)
    # Ratios 2, 1/2 and 1: r - 1 - log r.
    assert metrics["rollout/engine_kl_mean"] == pytest.approx(((1 - math.log(2)) + (-0.5 + math.log(2)) + 0) / 3)


def test_shares_of_rows_by_origin_sum_to_one() -> None:
    rollouts = tuple(Rollout(0.0, 0.0, 1, None) for _ in range(4))
    filled = RolloutGroup("g", Prompt("p", "text", ""), rollouts, 0)
    batch = Batch(fresh=[None] * 10, replayed=[None] * 6, replayed_groups=[filled])
    assert batch.shares() == {"rows/share_fresh": 10 / 16, "rows/share_filled": 4 / 16, "rows/share_replayed": 2 / 16}


@pytest.mark.parametrize("actor", [PolicyActor, CriticActor, ReferenceActor])
def test_rendezvous_ports_are_below_those_that_the_system_gives_to_others(actor) -> None:
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first_of_system = int(file.read().split()[0])
    ports = {actor._get_free_port() for _ in range(20)}
    assert max(ports) < first_of_system
    assert len(ports) > 10, "two runs that start together should not pick the same"


def test_a_port_in_use_is_not_taken(monkeypatch) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("", 0))
        free.bind(("", 0))
        port = free.getsockname()[1]
        free.close()
        monkeypatch.setattr(actors, "_OWN_PORTS", [taken.getsockname()[1], port])
        assert {SafePort._get_free_port() for _ in range(8)} == {port}
        monkeypatch.setattr(actors, "_OWN_PORTS", range(taken.getsockname()[1], taken.getsockname()[1] + 1))
        with pytest.raises(RuntimeError, match="no free port from"):
            SafePort._get_free_port()


def test_every_weight_that_zero_3_gathers_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # The real method of DeepSpeed, on two weights of one module and a gathering that is late.
    waited: list[int] = []
    started: list[torch.Tensor] = []

    def all_gather(output: torch.Tensor, _input: torch.Tensor, group: object, async_op: bool) -> SimpleNamespace:
        started.append(output)
        return SimpleNamespace(wait=partial(waited.append, len(started)))

    monkeypatch.setattr(partition_parameters.dist, "all_gather_into_tensor", all_gather)
    context = SimpleNamespace(
        _partition_world_size=lambda param: 2,
        get_partition_dp_group=lambda param: None,
        local_device=torch.device("cpu"),
        use_all_gather_into_tensor=True,
    )
    weights = []
    for shape in ((3, 2), (3,)):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.ds_tensor = torch.zeros(math.ceil(weight.numel() / 2))
        weight.ds_tensor.ds_numel, weight.ds_numel, weight.ds_shape = weight.ds_tensor.numel(), weight.numel(), shape
        weights.append(weight)
    partition_parameters.Init._allgather_params_coalesced(context, weights)
    assert sorted(waited) == [1, 2] and len(started) == 2
