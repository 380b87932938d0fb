"""A recipe for GPUs on the real stack, with a tiny model of its architecture, by the script that users run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from command import ENVIRONMENT, ROOT

from openrlhf_ext.run_dir import read_metrics

# A Qwen2 with untied embeddings under ZeRO-3: of all recipes the one that is least like the other tests' models.
RECIPE = "configs/recipes/deepscaler_r1_distill_qwen_7b_popo.yaml"


def test_a_recipe_trains_its_steps_on_the_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/rehearse.py", RECIPE, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert "ds.attn_implementation: sdpa  # GPU only: flash attention" in done.stdout

    run_dir = tmp_path / "out" / "run"
    rows = read_metrics(run_dir, "train")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["train/num_rows"] for row in rows] == [64, 64, 64]
    assert [row["train/num_optimizer_steps"] for row in rows] == [2, 2, 2]
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    # Half of the prompts are hopeless. Their slots are filled, and those of others by chance, as far as the buffer has
    # groups.
    stored = 0
    for row in rows:
        informative = round(8 * row["groups/effective_frac_generated"])
        assert informative <= 4
        assert row["step/num_replayed"] == 8 * min(8 - informative, stored)
        stored += informative
