"""With LoRA, whatever leaves the actor is the whole model: to engines, to disk, and where distances are measured."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import openrlhf.trainer.ray.ppo_actor as upstream_actor
import pytest
import torch
from fakes import LocalRay, Remote
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from openrlhf_ext.adapters import cpu_platform, lora
from openrlhf_ext.adapters.actors import PolicyActor, PolicyTrainer
from openrlhf_ext.adapters.lora import check_adapters, save_whole_models, whole_parameters
from openrlhf_ext.adapters.upstream import plain
from openrlhf_ext.tasks.tiny_model import make_model, make_tokenizer

pytestmark = pytest.mark.contract


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapted, self.other = nn.Linear(2, 2), nn.Linear(2, 1)


def model_of_two_layers() -> PeftModel:
    """W = [[1, 2], [3, 4]] and adapters of rank 1, A = [1, 10] and B = [1, 0.5], with scale 2."""
    model = Layers()
    model.adapted.weight.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    adapted = get_peft_model(model, LoraConfig(r=1, lora_alpha=2, target_modules=["adapted"]))
    layer = adapted.get_base_model().adapted
    layer.lora_A["default"].weight.data = torch.tensor([[1.0, 10.0]])
    layer.lora_B["default"].weight.data = torch.tensor([[1.0], [0.5]])
    return adapted


MERGED = [[1.0 + 2.0, 2.0 + 20.0], [3.0 + 1.0, 4.0 + 10.0]]


def language_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return make_model(make_tokenizer()).bfloat16()


def adapted(model: PreTrainedModel) -> PeftModel:
    """As upstream's actor, in training for a while."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    made = get_peft_model(model, config, autocast_adapter_dtype=False)  # DeepSpeed makes them bfloat16, too
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_whole_weight_is_the_frozen_one_plus_the_scaled_product() -> None:
    model = model_of_two_layers()
    before = copies(model)
    whole = {name: parameter.data for name, parameter in whole_parameters(model)}
    assert list(whole) == [name for name, _ in Layers().named_parameters()]
    assert whole["adapted.weight"].tolist() == MERGED
    assert torch.equal(whole["adapted.bias"], before["base_model.model.adapted.base_layer.bias"])
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_a_model_without_adapters_is_left_as_it_is() -> None:
    model = Layers()
    assert [(name, id(p)) for name, p in whole_parameters(model)] == [(n, id(p)) for n, p in model.named_parameters()]


def test_whole_weights_have_names_shapes_and_precision_of_the_model_on_disk() -> None:
    plain = [(name, p.shape, p.dtype) for name, p in language_model().named_parameters()]
    assert [(name, p.shape, p.dtype) for name, p in whole_parameters(adapted(language_model()))] == plain


def test_upstreams_own_sync_sends_whole_weights(one_rank_world: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs: a call to every engine and a broadcast for each parameter."""
    told, sent = [], []
    engine = SimpleNamespace(update_weight=Remote(lambda name, **what: told.append((name, what["shape"]))))
    args = SimpleNamespace(
        vllm=SimpleNamespace(sync_with_ray=False),
        ds=SimpleNamespace(zero_stage=2, tensor_parallel_size=1, lora=SimpleNamespace(rank=1)),
    )
    trainer = object.__new__(PolicyTrainer)
    trainer.strategy, trainer.vllm_engines, trainer.use_cuda_ipc = SimpleNamespace(args=args), [engine], False
    trainer.actor = actor = SimpleNamespace(model=SimpleNamespace(module=model_of_two_layers()), is_vlm=False)
    trainer._model_update_group = SimpleNamespace(broadcast=lambda tensor, src, stream: sent.append(tensor))
    monkeypatch.setattr(cpu_platform, "active", lambda: False)
    monkeypatch.setattr(upstream_actor, "ray", LocalRay)
    trainer.broadcast_to_vllm()
    assert told == [(name, parameter.shape) for name, parameter in Layers().named_parameters()]
    assert sent[0].tolist() == MERGED and trainer.actor is actor


def test_distance_is_that_of_the_whole_model_from_the_start() -> None:
    # Adapters start with B = 0, whatever A is: the model has not moved. Then it moves by [[2, 20], [1, 10]].
    args = SimpleNamespace(ds=SimpleNamespace(zero_stage=2))
    actor = object.__new__(PolicyActor)
    actor.strategy = SimpleNamespace(args=args)
    model = model_of_two_layers()
    weight_b = model.get_base_model().adapted.lora_B["default"].weight
    weight_b.data = torch.zeros(2, 1)
    actor.actor = SimpleNamespace(model=SimpleNamespace(module=model))
    actor._start = actor._weights()
    assert actor.distance_from_start()["policy/distance"] == 0.0
    weight_b.data = torch.tensor([[1.0], [0.5]])
    assert actor.distance_from_start()["policy/distance"] == pytest.approx((4 + 400 + 1 + 100) ** 0.5)


def test_a_step_far_below_the_precision_of_the_weights_counts_in_the_distance() -> None:
    model = adapted(language_model())
    before = {name: p.exact().clone() for name, p in whole_parameters(model) if isinstance(p, lora.WholeWeight)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1 + 2**-7)
    moved = {name: p for name, p in whole_parameters(model) if name in before}
    assert all(not torch.equal(moved[name].exact(), before[name]) for name in before)


def test_a_checkpoint_with_other_adapters_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*what) -> None:
        raise RuntimeError("Error(s) in loading state_dict for Model:\n\tMissing key(s): ...\n\tand a hundred more")

    strategy = SimpleNamespace(
        measures_distance=False,
        load_ckpt=load,
        save_model=None,
        args=SimpleNamespace(ckpt=SimpleNamespace(path="runs/a/checkpoints")),
    )
    upstreams = plain(upstream_actor.PolicyModelActor)
    monkeypatch.setattr(upstreams, "init_model_from_pretrained", lambda self, strategy, *more: strategy.load_ckpt())
    with pytest.raises(ValueError, match=r"^the checkpoint under --ckpt.path runs/a/checkpoints .*--ds.lora.*$"):
        object.__new__(PolicyActor).init_model_from_pretrained(strategy, "model")


def lora_of(folder: Path, targets: object, rank: int = 4) -> SimpleNamespace:
    lora_args = SimpleNamespace(rank=rank, target_modules=targets)
    return SimpleNamespace(ds=SimpleNamespace(lora=lora_args), actor=SimpleNamespace(model_name_or_path=str(folder)))


def test_layers_that_cannot_be_adapted_are_refused_before_anything_starts(tmp_path: Path) -> None:
    language_model().config.save_pretrained(tmp_path)
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        check_adapters(lora_of(tmp_path, targets))
    check_adapters(lora_of(tmp_path / "nowhere", "all-linear", rank=0))
    with pytest.raises(ValueError, match=r"--ds.lora.target_modules query: Target modules .*; name layers of "):
        check_adapters(lora_of(tmp_path, ["query"]))
    for tied in ("lm_head", "embed_tokens"):
        with pytest.raises(ValueError, match=f"--ds.lora.target_modules q_proj {tied} adapts one end of .* share"):
            check_adapters(lora_of(tmp_path, ["q_proj", tied]))


def test_what_is_saved_is_the_model_that_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "torch_dist_barrier_and_cuda_sync", lambda: None)
    language_model().save_pretrained(tmp_path / "start")
    trained = adapted(AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16))
    strategy = SimpleNamespace(save_model=None, _unwrap_model=lambda model: model.module, is_rank_0=lambda: True)
    save_whole_models(strategy)
    strategy.save_model(SimpleNamespace(module=trained), make_tokenizer(), str(tmp_path / "model"))

    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    expected = {name: parameter.data for name, parameter in whole_parameters(trained)}
    found = copies(whole)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    tokens = torch.arange(10, 30)[None]
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16)
    apart = PeftModel.from_pretrained(start, tmp_path / "model" / "adapter", autocast_adapter_dtype=False)
    with torch.no_grad():
        assert torch.equal(apart(tokens).logits, trained.eval()(tokens).logits)


def test_a_model_without_adapters_is_saved_by_upstream() -> None:
    saved = []
    strategy = SimpleNamespace(save_model=lambda *what: saved.append(what), _unwrap_model=lambda model: model)
    save_whole_models(strategy)
    strategy.save_model(model := Layers(), "tokenizer", "folder")
    assert saved == [(model, "tokenizer", "folder")]
