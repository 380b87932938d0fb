"""On CPU the engine computes with every weight that it was sent: an output layer tied to the embedding, LoRA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from openrlhf_ext.tasks.tiny_model import make_model, make_tokenizer

# bf16 against fp32 log-probabilities of these models; a weight that did not arrive makes it some hundred times larger.
TOLERANCE = 0.03


def save_model(folder: Path, seed: int) -> None:
    """A model whose next token is far from uniform: new weights are small, these are three times as large."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_after_a_sync_the_engine_agrees_with_the_sent_weights(tmp_path: Path) -> None:
    for seed, name in enumerate(("start", "final")):
        save_model(tmp_path / name, seed)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("synced_engine.py"), tmp_path / "start", tmp_path / "final"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *gaps, without_adapters = json.loads(done.stdout.strip().splitlines()[-1])
    assert max(gaps) < TOLERANCE, gaps
    assert without_adapters > 10 * TOLERANCE
