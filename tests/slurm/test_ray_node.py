"""slurm/ray_node.sh by itself: addresses, and what Ray is told about a node. No Slurm is needed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "slurm/ray_node.sh"
MACHINE_KIB = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])


def run(tmp_path: Path, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """With the programs in ``tmp_path/bin`` first on PATH."""
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "SETUP": "", "BIN_DIR": "", **environment}
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=60)


def program(tmp_path: Path, name: str, body: str) -> None:
    file = tmp_path / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!/bin/bash\n{body}\n")
    file.chmod(0o755)


def node(tmp_path: Path) -> dict[str, str]:
    """Variables of ray.sbatch and Slurm for a cluster of one node with 16 CPUs."""
    return {
        **{"ROOT": str(ROOT), "RAY_TMP": f"{tmp_path}/r", "RAY_LOGS": str(tmp_path), "RAY_HEAD": "node1"},
        **{"RAY_NIC": "lo", "RAY_ADDRESS": "127.0.0.1:20001"},
        **{"SLURM_NODEID": "0", "SLURMD_NODENAME": "node1", "SLURM_CPUS_ON_NODE": "16"},
    }


@pytest.mark.parametrize(
    ("found", "address", "message"),
    [
        ("10.1.2.3 STREAM node7\n10.1.2.3 DGRAM\n10.9.9.9 STREAM", "10.1.2.3\n", ""),
        ("", "", "the name node7 has no IPv4 address"),
        ("127.0.1.1 STREAM node7", "", "the name node7 has the address 127.0.1.1, where no other node can reach it"),
    ],
)
def test_the_address_of_a_name(tmp_path: Path, found: str, address: str, message: str) -> None:
    program(tmp_path, "getent", f'[[ "$*" == "ahostsv4 node7" ]] && echo "{found}"')
    done = run(tmp_path, "bash", "-c", f"source {SCRIPT}; address_of node7", RAY_NIC="")
    assert done.stdout == address and done.returncode == (0 if address else 1)
    assert message in done.stderr


def test_the_address_of_an_interface(tmp_path: Path) -> None:
    program(tmp_path, "ip", '[[ "$*" == "-4 -o address show dev ib0" ]] && echo "3: ib0    inet 10.7.7.7/16 brd x"')
    done = run(tmp_path, "bash", "-c", f"source {SCRIPT}; address_of node7", RAY_NIC="ib0")
    assert done.stdout == "10.7.7.7\n"
    done = run(tmp_path, "bash", "-c", f"source {SCRIPT}; address_of node7", RAY_NIC="ib1")
    assert done.returncode == 1 and "RAY_NIC: no interface 'ib1' with an IPv4 address on node7" in done.stderr


@pytest.mark.parametrize(
    ("slurm", "memory_kib", "cpus", "gpus"),
    [
        ({"SLURM_MEM_PER_NODE": "1000"}, 1000 * 1024, 16, 0),
        ({"SLURM_MEM_PER_CPU": "50", "SLURM_CPUS_PER_TASK": "8"}, 16 * 50 * 1024, 8, 0),
        ({"SLURM_MEM_PER_GPU": "700", "SLURM_GPUS_ON_NODE": "2"}, 1400 * 1024, 16, 2),
        # The whole node: nothing is said, zero is said, or more than there is.
        ({"SLURM_GPUS_ON_NODE": "8", "RAY_GPUS_PER_NODE": "3"}, MACHINE_KIB, 16, 3),
        ({"SLURM_MEM_PER_NODE": "0"}, MACHINE_KIB, 16, 0),
        ({"SLURM_MEM_PER_NODE": "999999999"}, MACHINE_KIB, 16, 0),
    ],
)
def test_what_ray_is_told(tmp_path: Path, slurm: dict[str, str], memory_kib: int, cpus: int, gpus: int) -> None:
    says = "ray $*; monitor ${RAY_memory_monitor_refresh_ms:-on}; $TMPDIR"
    program(tmp_path, "ray", f'echo "{says}"; touch "$TMPDIR/left"')
    program(tmp_path, "df", "echo Avail; echo 999999999999")
    done = run(tmp_path, "bash", SCRIPT, "run", **node(tmp_path), **slurm)
    # Nobody told Ray to end, so that it did is a failure.
    assert done.returncode == 1 and "ray start ended with 0" in done.stdout
    assert f"--num-cpus={cpus} --num-gpus={gpus} " in done.stdout
    store = memory_kib * 3 // 10
    assert f"--memory={(memory_kib - store) * 1024} --object-store-memory={store * 1024} " in done.stdout
    # Ray's own watch over memory sees the whole machine, so it is for jobs that have the whole machine.
    assert f"monitor {'on' if memory_kib == MACHINE_KIB else '0'}; {tmp_path}/r.0/tmp\n" in done.stdout
    assert not (tmp_path / "r.0").exists()


def test_the_object_store_fits_into_shared_memory(tmp_path: Path) -> None:
    program(tmp_path, "ray", 'echo "ray $*"')
    program(tmp_path, "df", "echo Avail; echo 100000")
    done = run(tmp_path, "bash", SCRIPT, "run", **node(tmp_path), SLURM_MEM_PER_NODE="1000")
    assert f"--object-store-memory={90000 * 1024} " in done.stdout
