"""The part of Ray's client that slurm/ready.py uses, for the head of ray_cli.py."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace


class GcsClient:
    def __init__(self, address: str) -> None:
        self._host, self._port = address.rsplit(":", 1)

    def get_all_node_info(self, timeout: float) -> dict:
        with socket.create_connection((self._host, int(self._port)), timeout) as connection:
            connection.sendall(json.dumps({"token": os.environ["RAY_AUTH_TOKEN"]}).encode() + b"\n")
            nodes = json.loads(connection.makefile().read())
        return {
            node["name"]: SimpleNamespace(state=0, node_name=node["name"], resources_total={"GPU": node["gpus"]})
            for node in nodes
        }
