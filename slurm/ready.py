"""Waits until every node of the job and all its GPUs are in the Ray cluster at RAY_ADDRESS (ray.sbatch runs it).

Exit code 0 when they are; 1 when they are not in time, after saying what is missing and how its log ends.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

TAIL = 15
"""Lines of a missing node's log."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", nargs="+", help="names, as given to ray start --node-name")
    parser.add_argument("--gpus", type=int, required=True, help="of all nodes together")
    parser.add_argument("--timeout", type=float, required=True, help="seconds")
    parser.add_argument("--logs", type=Path, required=True, help="folder of ray-NODE.log")
    args = parser.parse_args()

    start = time.monotonic()
    found: Mapping[str, float] = {}
    client, said, problem = None, "", ""
    while time.monotonic() - start < args.timeout:
        try:
            client = client or connect(os.environ["RAY_ADDRESS"])
            found = gpus_by_node(client)
            problem = ""
        except Exception as error:  # Ray's client has many, and all of them may pass
            problem = f"; last error: {error}"
        seconds = time.monotonic() - start
        count = len(found.keys() & set(args.nodes))
        status = f"{count} of {len(args.nodes)} nodes, {sum(found.values()):g} of {args.gpus} GPUs"
        if status != said:
            print(f"{status} after {seconds:.1f} s", flush=True)
            said = status
        if count == len(args.nodes) and sum(found.values()) >= args.gpus:
            print(f"Ray is complete after {seconds:.1f} s: {status}")
            return 0
        time.sleep(0.2)

    print(f"Ray is not complete after {args.timeout:g} s: {said}{problem}")
    for node in args.nodes:
        if node in found:
            print(f"{node} is there with {found[node]:g} GPUs")
        else:
            print(f"{node} is missing; the end of {args.logs}/ray-{node}.log:\n{tail(args.logs / f'ray-{node}.log')}")
    return 1


def connect(address: str):
    """A client of Ray's GCS, once its port is open: before, the client itself would block for half a minute."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host, int(port)), timeout=2).close()
    # Not ray.init: this is no driver, and must not wait for a node on this machine.
    from ray._raylet import GcsClient

    return GcsClient(address=address)


def gpus_by_node(client) -> dict[str, float]:
    """GPUs of every node that is alive, by its name."""
    from ray.core.generated.gcs_pb2 import GcsNodeInfo

    nodes = client.get_all_node_info(timeout=5).values()
    return {n.node_name: n.resources_total.get("GPU", 0) for n in nodes if n.state == GcsNodeInfo.GcsNodeState.ALIVE}


def tail(file: Path) -> str:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"  ({error})"
    return "\n".join(f"  {line}" for line in lines[-TAIL:]) or "  (empty)"


if __name__ == "__main__":
    raise SystemExit(main())
