"""LoRA (``--ds.lora.rank``) beside engines and readers that know whole weights only.

OpenRLHF trains the adapters and sends the engines all parameters by their PEFT names, which no engine knows. Here
whatever leaves the actor is whole: an adapted layer's weight is its frozen one plus the adapter's product, added when
it is asked for and rounded once. The actor's own weights are never touched, so nothing drifts by merging them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from openrlhf.utils.utils import is_vlm_model
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from openrlhf_ext.adapters.upstream import first_line

_ADAPTER = "default"


def check_adapters(args) -> None:
    """Raises ValueError where upstream's actor could not adapt the layers that ``--ds.lora.target_modules`` names.

    Or where the engines would not have them: a weight that two layers share is adapted in one of them only.
    """
    if args.ds.lora.rank == 0:
        return
    name, targets = args.actor.model_name_or_path, args.ds.lora.target_modules
    flag = "--ds.lora.target_modules " + (targets if isinstance(targets, str) else " ".join(targets))
    kind = AutoModelForImageTextToText if is_vlm_model(name) else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(name, trust_remote_code=True)
    with torch.device("meta"):
        model = kind.from_config(config, trust_remote_code=True)
        try:
            get_peft_model(model, LoraConfig(r=1, target_modules=targets))
        except ValueError as error:
            raise ValueError(
                f"{flag}: {first_line(error)}; name layers of {name}, such as q_proj v_proj, or leave the flag out "
                "for all linear ones"
            ) from None
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if config.get_text_config().tie_word_embeddings and any(isinstance(end, LoraLayer) for end in ends):
        raise ValueError(
            f"{flag} adapts one end of {name} alone, whose embedding and output layer share their weights; leave both "
            "out of the flag"
        )


@dataclass(frozen=True, slots=True)
class WholeWeight:
    """The weight of an adapted layer, with what upstream's weight sync reads of a parameter."""

    layer: LoraLayer
    requires_grad: bool = True

    @property
    def shape(self) -> torch.Size:
        return self.layer.base_layer.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.layer.base_layer.weight.dtype

    @property
    def data(self) -> torch.Tensor:
        """A new tensor, in the precision of the frozen weight."""
        return self.exact().to(self.dtype)

    def exact(self) -> torch.Tensor:
        """The same in float32, where steps far below the precision of the weights show."""
        return self.layer.base_layer.weight.data.float() + self.layer.get_delta_weight(_ADAPTER).detach().float()


def whole_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter | WholeWeight]]:
    """``named_parameters`` of the model without adapters, the weights of adapted layers in place of their parts."""
    if not isinstance(model, PeftModel):
        yield from model.named_parameters()
        return
    model = model.get_base_model()
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, parameter in model.named_parameters():
        owner, is_base, leaf = name.rpartition(".base_layer.")
        if is_base:
            yield f"{owner}.{leaf}", WholeWeight(adapted[owner]) if leaf == "weight" else parameter
        elif not any(part.startswith("lora_") for part in name.split(".")):
            yield name, parameter


class WholeModel:
    """A model as upstream's weight sync reads it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter | WholeWeight]]:
        return whole_parameters(self._model)


def save_whole_models(strategy) -> None:
    """Make this process' ``strategy.save_model`` write models that load without PEFT and without the first one.

    The adapter alone, which is all that upstream writes, goes into the folder ``adapter`` beside.
    """
    save = strategy.save_model

    def save_model(model: nn.Module, tokenizer, output_dir: str, **kwargs) -> None:
        adapted = strategy._unwrap_model(model)
        if not isinstance(adapted, PeftModel):
            save(model, tokenizer, output_dir, **kwargs)
            return
        if strategy.is_rank_0():
            whole = {name: parameter.data for name, parameter in whole_parameters(adapted)}
            adapted.get_base_model().save_pretrained(output_dir, state_dict=whole, **kwargs)
            adapted.save_pretrained(Path(output_dir) / "adapter", save_embedding_layers=False, **kwargs)
            tokenizer.save_pretrained(output_dir)
        torch_dist_barrier_and_cuda_sync()

    strategy.save_model = save_model
