"""Recipes for GPUs on the real stack, with tiny models of their architectures, by the script that users run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command import ENVIRONMENT, ROOT

from openrlhf_ext.run_dir import read_metrics

# A Qwen2 and a Qwen3, untied and tied embeddings, ZeRO-3 and ZeRO-2.
RECIPES = ("deepscaler_r1_distill_qwen_7b_popo", "polaris_qwen3_4b_base_pilot_commit")
STEPS, ROWS, OPTIMIZER_STEPS = 3, 64, {RECIPES[0]: 2, RECIPES[1]: 4}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains_its_steps_on_the_cpu(recipe: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "scripts/rehearse.py", f"configs/recipes/{recipe}.yaml", "--out", str(tmp_path / "out")],
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
    assert [row["train/num_rows"] for row in rows] == [ROWS] * STEPS
    assert [row["train/num_optimizer_steps"] for row in rows] == [OPTIMIZER_STEPS[recipe]] * STEPS
    ledger = json.loads((run_dir / "ledger.json").read_text())
    assert ledger["generated"] == sum(ledger["fates"].values()) + ledger["waiting"]
    if recipe.endswith("popo"):
        # Half of the prompts are hopeless. Their slots are filled, and those of others by chance, as far as the buffer
        # has groups.
        stored = 0
        for row in rows:
            informative = round(8 * row["groups/effective_frac_generated"])
            assert informative <= 4
            assert row["step/num_replayed"] == 8 * min(8 - informative, stored)
            stored += informative
    else:
        # Groups of pilots that differ differ.
        assert all(row["groups/effective_frac_trained"] == 1.0 for row in rows)
