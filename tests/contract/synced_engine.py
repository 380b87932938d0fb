"""A vLLM engine that starts with one model and receives the weights of another, as in training on CPU.

``python synced_engine.py START FINAL``: the last line of the output is the JSON list of mean absolute differences,
over the tokens that the engine sampled, between its log-probabilities and those of transformers: with START before the
sync, with FINAL after the first and the second sync, with FINAL and LoRA adapters after the third, and once more
without the adapters, which the engine has: how much they matter.
"""

import json
import os
import sys
import threading

from openrlhf_ext.adapters import cpu_platform

os.environ.update({**cpu_platform.process_env(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

cpu_platform.install()

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM, PreTrainedModel  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from openrlhf_ext.adapters.lora import whole_parameters  # noqa: E402

PROMPTS = [f"{a} {b} {a + b}=" for a in range(2, 10) for b in range(2, 6)]


def load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def with_adapters(model: PreTrainedModel) -> torch.nn.Module:
    torch.manual_seed(2)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:  # which starts at zero
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def mean_gap(llm: LLM, model: torch.nn.Module) -> float:
    params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=1, seed=0, ignore_eos=True)
    gaps = []
    for result in llm.generate(PROMPTS, params, use_tqdm=False):
        (output,) = result.outputs
        response = torch.tensor(output.token_ids)
        tokens = torch.cat([torch.tensor(result.prompt_token_ids), response])
        with torch.inference_mode():
            logits = model(input_ids=tokens[None]).logits[0, -len(response) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]
        theirs = torch.tensor(
            [step[token].logprob for step, token in zip(output.logprobs, output.token_ids, strict=True)]
        )
        gaps += (ours - theirs).abs().tolist()
    return sum(gaps) / len(gaps)


def main(start: str, final: str) -> list[float]:
    llm = LLM(
        model=start,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        enable_prefix_caching=False,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=cpu_platform.WORKER_EXTENSION,
    )
    gaps = [mean_gap(llm, load(start))]
    adapted = with_adapters(load(final))
    group = cpu_platform.WeightGroup("127.0.0.1", 0, rank=0, world_size=2)
    connecting = threading.Thread(target=group.connect)
    connecting.start()
    llm.collective_rpc("init_process_group", args=("127.0.0.1", group.port, 1, 2, "openrlhf_ext"))
    connecting.join()
    for model in (load(final), load(final), adapted):
        named = [(name, parameter.data.bfloat16()) for name, parameter in whole_parameters(model)]
        flat = torch.cat([tensor.flatten() for _, tensor in named])
        sending = threading.Thread(target=group.broadcast, args=(flat,))
        sending.start()
        shapes = [tuple(tensor.shape) for _, tensor in named]
        llm.collective_rpc("receive_weights", args=([name for name, _ in named], shapes, flat.dtype))
        sending.join()
        gaps.append(mean_gap(llm, model))
    return [*gaps, mean_gap(llm, load(final))]


if __name__ == "__main__":
    figures = main(*sys.argv[1:])
    print(json.dumps(figures), flush=True)
    os._exit(0)  # without the engine's goodbye
