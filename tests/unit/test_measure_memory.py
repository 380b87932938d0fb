"""scripts/measure_memory.py: memory of a process and of what it started."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil

SCRIPT = Path(__file__).parents[2] / "scripts" / "measure_memory.py"
MIB = 2**20

CHILD = f"held = bytearray({100 * MIB}); held[::4096] = b'x' * len(held[::4096]); print('held', flush=True); input()"


def test_what_a_child_holds_counts() -> None:
    spec = importlib.util.spec_from_file_location("measure_memory", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        sizes = script.tree_sizes(psutil.Process())
        child.communicate("\n")
    name = " ".join(command)[:60]
    assert 100 * MIB < sizes[name] < 200 * MIB
    assert len(sizes) >= 2


def test_the_exit_code_is_the_command_s() -> None:
    done = subprocess.run([sys.executable, SCRIPT, sys.executable, "-c", "exit(3)"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("peak of the process tree: ")
