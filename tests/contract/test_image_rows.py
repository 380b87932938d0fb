"""Images on their way from a prompt to the actor's forward pass, and what cannot go that way."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openrlhf.utils.vlm_utils as vlm_utils
import pytest
import torch
from fakes import ModelHandle, TinyPolicy, actor_group
from images_only import make_processor
from openrlhf.models import Actor
from openrlhf.utils.agent import SingleTurnAgentExecutor
from PIL import Image
from recorded import maker, mixed_rewards, recorded_samples, upstream_args
from replayed import group_of
from vllm import SamplingParams

from openrlhf_ext.adapters import vision
from openrlhf_ext.adapters.batch_composer import BatchComposer
from openrlhf_ext.adapters.data import _misfits, check_mixture
from openrlhf_ext.adapters.engine import EngineActor
from openrlhf_ext.adapters.experience_maker import plan_training, rank_windows
from openrlhf_ext.adapters.replayed_rows import store_group
from openrlhf_ext.prompts import PromptRow
from openrlhf_ext.tasks.tiny_vision_model import make_model, make_tokenizer

pytestmark = pytest.mark.contract

PAD = "<|image_pad|>"


# -- rows keep their images --


class SightedModel(ModelHandle):
    """A policy for which every token of a row has the log-probability that its picture, of one patch, shows."""

    def forward(self, sequences, action_mask, attention_mask, mm_train_inputs_list):
        shown = vlm_utils.merge_mm_train_inputs(mm_train_inputs_list, "cpu")["pixel_values"][:, 0]
        return shown[:, None] * action_mask


def sighted_maker(args, num_ranks: int):
    made = maker(args, ours=True, num_ranks=num_ranks)
    made.actor_model_group = actor_group(TinyPolicy(), num_ranks)
    made.actor_model_group._actor_handlers = [SightedModel(TinyPolicy()) for _ in range(num_ranks)]
    return made


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 5), (2, 3), (3, 8)])
def test_every_row_is_trained_with_its_own_picture_fresh_or_replayed(
    local_ray: None, num_ranks: int, micro: int
) -> None:
    args = upstream_args("group_norm", "--algo.kl.init_coef", "0")
    args.rollout.batch_size, args.train.batch_size = 4, 32
    args.rollout.micro_batch_size = args.train.micro_batch_size = micro
    samples = recorded_samples(mixed_rewards(4))
    shown = [-0.25 * (1 + i // 8) for i in range(32)]
    for sample, value in zip(samples, shown, strict=True):
        sample.mm_train_inputs = [{"pixel_values": torch.tensor([[value, 0.0]])}]
    groups = [group_of(samples[i : i + 8], str(i // 8)) for i in range(0, 32, 8)]
    made = sighted_maker(args, num_ranks)
    composer = SimpleNamespace(_maker=made, _log_probs=True)
    born = BatchComposer._make_rows(composer, groups, [])
    stored = [store_group(group, born[8 * i : 8 * i + 8], engine_gap=False) for i, group in enumerate(groups)]

    rows = BatchComposer._make_rows(composer, groups[2:], [stored[1], stored[0]])
    expected = shown[16:] + shown[8:16] + shown[:8]
    for row, value in zip(rows, expected, strict=True):
        assert torch.equal(row.action_log_probs, value * row.action_mask)
    plan = plan_training(rows, args, num_ranks=num_ranks, rng=np.random.default_rng(0))
    batches = [batch for rank in range(num_ranks) for window in rank_windows(plan, rank, rows) for batch in window]
    for batch in batches:
        pictures = vlm_utils.merge_mm_train_inputs(batch.mm_train_inputs, "cpu")["pixel_values"][:, 0]
        # By the log-probability that the row was given before it was shuffled into this batch.
        assert pictures.tolist() == batch.action_log_probs.amin(dim=1).tolist()
    assert sum(len(batch.sequences) for batch in batches if batch.action_mask.any()) == 32


def pictured(pixels: Sequence[torch.Tensor], dtype: torch.dtype, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """A padded batch of rows, each of a picture of 6 image tokens and a text, as the actor takes it."""
    tokenizer = make_tokenizer()
    rows = [f"<|vision_start|>{PAD * 6}<|vision_end|>{text}" for text in texts]
    batch = tokenizer(rows, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    mask = batch["attention_mask"]
    return {
        "sequences": batch["input_ids"],
        "action_mask": mask[:, 1:],
        "attention_mask": mask,
        "pixel_values": torch.cat(list(pixels)).to(dtype),
        "image_grid_thw": torch.tensor([[1, 4, 6]] * len(rows)),
    }


def test_pixels_in_the_models_precision_change_nothing_and_those_of_another_picture_do(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    actor = Actor(str(tmp_path), attn_implementation="sdpa", param_dtype="bf16").eval()
    assert actor.is_vlm
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(24, 1176, generator=generator) for _ in range(2))
    texts = ["a short one", "one that is much longer than the other"]
    with torch.no_grad():
        float32, bfloat16, swapped = (
            actor(**pictured(pixels, dtype, texts))
            for pixels, dtype in (
                ((first, second), torch.float32),
                ((first, second), torch.bfloat16),
                ((second, first), torch.float32),
            )
        )
    assert torch.equal(float32, bfloat16)
    assert ((float32 - swapped).abs().mean(dim=1) > 0.02).all()


# -- engines --


@pytest.fixture
def processed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What images were processed, by a processor of no work."""
    calls: list[object] = []

    def process(processor, prompt, images):
        calls.append(images)
        inputs = {"pixel_values": torch.ones(4, 1176), "image_grid_thw": torch.tensor([[1, 2, 2]])}
        return [1, 2, 3], inputs, ["picture"]

    monkeypatch.setattr(vision, "_process", process)
    monkeypatch.setattr(vlm_utils, "process_prompt_with_images", vlm_utils.process_prompt_with_images)
    vision.process_once(torch.bfloat16)
    return calls


class Engine:
    """Gives every prompt the response 7 8."""

    async def generate(self, prompt_token_ids, sampling_params, multi_modal_data=None):
        output = SimpleNamespace(token_ids=[7, 8], finish_reason="stop", logprobs=None)
        return SimpleNamespace(outputs=[output])


class Processor:
    image_processor = None


PROCESSOR = Processor()


def respond(images: object, prompt: str = "a") -> dict:
    executor, params = SingleTurnAgentExecutor(), SamplingParams(max_tokens=4)
    return asyncio.run(executor.execute(prompt, "1", params, 64, PROCESSOR, Engine(), images=images))


def test_the_rollouts_of_a_group_share_their_image_tensors_in_the_models_precision(processed: list[object]) -> None:
    group = [respond(["a.png"]) for _ in range(8)]
    assert processed == [["a.png"]]
    inputs = group[0]["mm_train_inputs"]
    assert all(one["mm_train_inputs"] is inputs for one in group)
    assert inputs["pixel_values"].dtype == torch.bfloat16 and inputs["image_grid_thw"].dtype == torch.int64
    # Ray's messages are pickled: 4 patches of 1176 values of 2 bytes, once.
    assert len(pickle.dumps(group)) < 2 * 4 * 1176 * 2
    assert [one["observation_tokens"] for one in group] == [[1, 2, 3, 7, 8]] * 8


def test_another_prompt_or_image_is_processed_and_a_picture_that_was_drawn_always_is(processed: list[object]) -> None:
    drawn = Image.new("RGB", (8, 8))
    for images, prompt in ((["a.png"], "a"), (["b.png"], "a"), (["a.png"], "b"), ([drawn], "a"), ([drawn], "a")):
        respond(images, prompt)
    assert processed == [["a.png"], ["b.png"], ["a.png"], [drawn], [drawn]]


def test_a_query_begins_with_the_text_of_its_prompt_however_large_the_image() -> None:
    processor = make_processor()
    prompt = f"<|vision_start|>{PAD}<|vision_end|>Find x."
    expanded = processor.tokenizer(prompt.replace(PAD, PAD * 6) + " 12")["input_ids"]
    vision.decode_as_written(processor)
    assert processor.decode(expanded, skip_special_tokens=False) == prompt + " 12"


def test_no_response_holds_a_placeholder_of_an_image() -> None:
    assert vision.forbidden_tokens(make_tokenizer()) is None
    processor, asked = make_processor(), []

    async def generate(prompt, params, request_id):
        asked.append(params.logit_bias)
        yield "output"

    engine = object.__new__(EngineActor)
    engine._mm_pad_token_ids, engine.llm = set(), SimpleNamespace(generate=generate)
    for bias, own in ((None, None), (vision.forbidden_tokens(processor), None), ({9: -100.0}, {5: 1.0})):
        engine._logit_bias = bias
        assert asyncio.run(engine.generate([1], SamplingParams(logit_bias=own))) == "output"
    assert asked == [
        None, {processor.image_token_id: -100.0, processor.video_token_id: -100.0}, {5: 1.0, 9: -100.0}
    ]  # fmt: skip


def test_new_weights_forget_what_the_old_ones_saw() -> None:
    done: list[str] = []

    async def reset_prefix_cache() -> None:
        done.append("prefix")

    async def reset_encoder_cache() -> None:
        done.append("encoder")

    engine = object.__new__(EngineActor)
    engine.llm = SimpleNamespace(reset_prefix_cache=reset_prefix_cache, reset_encoder_cache=reset_encoder_cache)
    asyncio.run(engine.reset_prefix_cache())
    assert done == ["prefix", "encoder"]


# -- before engines start --


def misfit(text: str, images: Sequence[str], *, max_images: int = 1, max_len: int = 40, tokenizer=None) -> str | None:
    args = SimpleNamespace(
        data=SimpleNamespace(max_len=max_len, max_images_per_prompt=max_images),
        rollout=SimpleNamespace(max_new_tokens=16),
    )
    (problem,) = _misfits([text], [images], tokenizer or make_processor(), args, 300)
    return problem


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.new("RGB", (84, 56)).save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def test_a_prompt_is_as_long_as_its_text_and_its_image_tokens(picture: str) -> None:
    # One token for the image, which becomes 6, and one for each letter: 40 - 16 = 24 are left for both.
    assert misfit(PAD + "x" * 18, [picture]) is None
    assert misfit(PAD + "x" * 19, [picture]).startswith("25 tokens, more than the 24 that --data.max_len 40")
    assert misfit(PAD * 2 + "x" * 12, [picture] * 2, max_images=2) is None
    assert misfit(PAD + "x" * 18, ["http://host/a.png"]) is None


def test_images_that_the_model_would_not_get_are_named(picture: str, tmp_path: Path) -> None:
    assert misfit("x", [picture]) == (
        f"has 1 images, but its text has a place for 0: <image> with --data.apply_chat_template, {PAD} without"
    )
    assert misfit(PAD, []).startswith("has 0 images, but its text has a place for 1")
    assert misfit(PAD, [picture], max_images=0) == ("has 1 images, but --data.max_images_per_prompt is 0; raise it")
    (tmp_path / "b.png").write_bytes(b"no picture")
    assert misfit(PAD, [str(tmp_path / "b.png")]) == f"its image {tmp_path / 'b.png'} cannot be read as one"
    assert misfit("x", [picture], tokenizer=make_tokenizer()) == (
        "has 1 images, which --actor.model_name_or_path cannot see: it is no vision model"
    )


@pytest.mark.parametrize(
    ("ranks", "frozen", "stage", "is_refused"),
    [(1, False, 2, False), (2, False, 2, True), (2, True, 2, False), (2, True, 3, True)],
)
def test_ranks_with_and_without_images_are_refused_where_they_would_wait_for_each_other(
    ranks: int, frozen: bool, stage: int, is_refused: bool
) -> None:
    args = SimpleNamespace(
        actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=ranks, freeze_visual_encoder=frozen),
        ds=SimpleNamespace(zero_stage=stage, tensor_parallel_size=1),
    )
    rows = [PromptRow(str(i), i, "x", "1", "d", images) for i, images in enumerate((["a.png"], None, None))]
    check_mixture(rows[:1], args)
    check_mixture(rows[1:], args)
    if not is_refused:
        return check_mixture(rows, args)
    with pytest.raises(ValueError, match="1 prompts with images and 2 without: of the 2 ranks"):
        check_mixture(rows, args)
