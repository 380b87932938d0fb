"""slurm/ready.py, which waits for the whole cluster and says who is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("ready", Path(__file__).parents[2] / "slurm/ready.py")
ready = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ready)

Probe = Callable[..., tuple[int, str]]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Probe:
    """Runs it on clusters as they would be seen one after the other, or raise; the last one stays."""

    def run(*seen: dict[str, float] | Exception, gpus: int) -> tuple[int, str]:
        views = list(seen)

        def look(_client: object) -> dict[str, float]:
            view = views.pop(0) if len(views) > 1 else views[0]
            if isinstance(view, Exception):
                raise view
            return view

        arguments = ["--gpus", str(gpus), "--timeout", "1", "--logs", str(tmp_path), "node1", "node2"]
        monkeypatch.setattr("sys.argv", ["ready.py", *arguments])
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:20001")
        monkeypatch.setattr(ready, "connect", lambda address: address)
        monkeypatch.setattr(ready, "gpus_by_node", look)
        code = ready.main()
        return code, capsys.readouterr().out

    return run


def test_waits_for_all_nodes_and_all_gpus(probe: Probe) -> None:
    late = ({"node1": 4}, OSError("not yet"), {"node1": 4, "node2": 3}, {"node1": 4, "node2": 4})
    code, said = probe(*late, gpus=8)
    assert code == 0
    *before, last = [line.split(" after")[0] for line in said.splitlines()]
    assert before == ["1 of 2 nodes, 4 of 8 GPUs", "2 of 2 nodes, 7 of 8 GPUs", "2 of 2 nodes, 8 of 8 GPUs"]
    assert last == "Ray is complete" and said.endswith("2 of 2 nodes, 8 of 8 GPUs\n")


def test_a_missing_node_is_named_with_the_end_of_its_log(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "ray-node2.log").write_text("".join(f"line {i}\n" for i in range(20)))
    code, said = probe({"node1": 4, "stranger": 4}, gpus=8)
    assert code == 1
    assert "not complete after 1 s: 1 of 2 nodes" in said
    assert "node1 is there with 4 GPUs" in said
    assert f"node2 is missing; the end of {tmp_path}/ray-node2.log:\n  line 5\n" in said and said.endswith("line 19\n")


def test_missing_gpus_are_named(probe: Probe) -> None:
    code, said = probe({"node1": 4, "node2": 0}, gpus=8)
    assert code == 1
    assert "2 of 2 nodes, 4 of 8 GPUs" in said and "node2 is there with 0 GPUs" in said


def test_what_ray_answers_is_told(probe: Probe) -> None:
    code, said = probe(OSError("InvalidAuthToken"), gpus=0)
    assert code == 1
    assert "last error: InvalidAuthToken" in said and "node1 is missing" in said
