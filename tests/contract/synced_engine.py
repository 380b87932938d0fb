"""A vLLM engine that starts with one model and receives the weights of another, as in training on CPU.

``python synced_engine.py START FINAL``: the last line of the output is the JSON list of mean absolute differences,
over the tokens that the engine sampled, between its log-probabilities and those of transformers: with START before the
sync, then with FINAL after the first and the second sync.
"""

import json
import os
import sys
import threading

from openrlhf_ext.adapters import cpu_platform

os.environ.update({**cpu_platform.process_env(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

PROMPTS = [f"{a} {b} {a + b}=" for a in range(2, 10) for b in range(2, 6)]


def mean_gap(llm: LLM, folder: str) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    gaps = [mean_gap(llm, start)]
    named = list(AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16).named_parameters())
    flat = torch.cat([parameter.data.flatten() for _, parameter in named])
    group = cpu_platform.WeightGroup("127.0.0.1", 0, rank=0, world_size=2)
    connecting = threading.Thread(target=group.connect)
    connecting.start()
    llm.collective_rpc("init_process_group", args=("127.0.0.1", group.port, 1, 2, "openrlhf_ext"))
    connecting.join()
    for _ in range(2):
        sending = threading.Thread(target=group.broadcast, args=(flat,))
        sending.start()
        shapes = [tuple(parameter.shape) for _, parameter in named]
        llm.collective_rpc("receive_weights", args=([name for name, _ in named], shapes, flat.dtype))
        sending.join()
        gaps.append(mean_gap(llm, final))
    return gaps


if __name__ == "__main__":
    figures = main(*sys.argv[1:])
    print(json.dumps(figures), flush=True)
    os._exit(0)  # without the engine's goodbye
