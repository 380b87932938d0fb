"""Stands for ``ray start --block``: the head listens on its port and keeps a list of nodes, workers stay connected.

STUB_RAY is a list of words NODE:WHAT for what goes wrong on a node in the first attempt: ``fails``, ``hangs`` (never
joins). SIGHUP makes a node leave the cluster without ending.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def main() -> None:
    flags = dict(word.removeprefix("--").partition("=")[::2] for word in sys.argv[2:])
    node = flags["node-name"]
    folder = Path(flags["temp-dir"])
    (folder / "session_latest" / "logs").mkdir(parents=True)
    (folder / "session_latest" / "logs" / "raylet.out").write_text("the end of the raylet\n")
    print(f"stub on {node}:", *sys.argv[1:], f"hook={os.environ.get('RAY_START_HOOK', '')}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        faults = os.environ.get("STUB_RAY", "").split()
        if f"{node}:fails" in faults:
            sys.exit(f"stub on {node}: told to fail")
        if f"{node}:hangs" in faults:
            time.sleep(3600)
    me = {"name": node, "gpus": float(flags["num-gpus"]), "token": os.environ["RAY_AUTH_TOKEN"]}
    if "head" in flags:
        serve(flags["node-ip-address"], int(flags["port"]), me)
    join(flags["address"], me)


def serve(host: str, port: int, me: dict) -> None:
    nodes = [me]
    listener = socket.create_server((host, port))

    def answer(connection: socket.socket) -> None:
        file = connection.makefile("rw")
        line = file.readline()
        if line and json.loads(line)["token"] == me["token"]:
            if "name" in json.loads(line):
                nodes.append(json.loads(line))
                file.readline()  # until the worker ends
                nodes.pop()
            else:
                file.write(json.dumps(nodes))
                file.flush()
        connection.close()

    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


def join(address: str, me: dict) -> None:
    host, port = address.rsplit(":", 1)
    connection = socket.create_connection((host, int(port)))
    connection.sendall(json.dumps(me).encode() + b"\n")

    def leave(*_: object) -> None:
        connection.shutdown(socket.SHUT_RDWR)
        time.sleep(3600)

    signal.signal(signal.SIGHUP, leave)
    connection.recv(1)
    sys.exit("stub: the head is gone")


main()
