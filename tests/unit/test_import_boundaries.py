"""Only adapters/ and cli/ know the stack; everything else can be read, run and tested without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import openrlhf_ext

PACKAGE = Path(openrlhf_ext.__file__).parent
STACK = {"openrlhf", "ray", "vllm", "deepspeed"}
MAY_USE_TRANSFORMERS = {"tasks/smollm2.py", "tasks/tiny_model.py", "tasks/tiny_vision_model.py"}
HEAVY = STACK | {"torch", "transformers", "numpy", "yaml"}
PURE = sorted(
    path.relative_to(PACKAGE).as_posix()
    for path in PACKAGE.rglob("*.py")
    if path.relative_to(PACKAGE).parts[0] not in ("adapters", "cli")
)


def imported(source: str) -> Iterator[str]:
    """Top-level names of everything imported anywhere in `source`, by statement or by a literal module name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(arg.value).partition(".")[0] for arg in node.args if isinstance(arg, ast.Constant))


def own_modules(source: str) -> Iterator[str]:
    """Modules of this package that `source` imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("openrlhf_ext"):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("openrlhf_ext"))


def test_the_scan_sees_every_kind_of_import() -> None:
    source = "import ray.util\nif TYPE_CHECKING:\n    from vllm import LLM\nimport_module('deepspeed.ops')\n"
    assert set(imported(source)) == {"ray", "vllm", "deepspeed"}


@pytest.mark.parametrize("name", PURE)
def test_a_pure_module_names_nothing_of_the_stack(name: str) -> None:
    source = (PACKAGE / name).read_text(encoding="utf-8")
    forbidden = STACK if name in MAY_USE_TRANSFORMERS else STACK | {"transformers"}
    assert not forbidden & set(imported(source))
    assert not [module for module in own_modules(source) if module.startswith("openrlhf_ext.adapters")]
    assert not [module for module in own_modules(source) if module.startswith("openrlhf_ext.cli")]


BLOCKER = """
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {stack!r}:
            raise ImportError(f"{{name}} is imported")

sys.meta_path.insert(0, Blocker())
for module in {modules!r}:
    importlib.import_module(module)
heavy = sorted({heavy!r} & set(sys.modules))
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""


def run_blocked(modules: list[str], heavy: set[str]) -> subprocess.CompletedProcess[str]:
    code = BLOCKER.format(stack=STACK, modules=modules, heavy=heavy)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def module_name(name: str) -> str:
    return ".".join(("openrlhf_ext", *Path(name).with_suffix("").parts)).removesuffix(".__init__")


def test_pure_modules_import_with_the_stack_out_of_reach() -> None:
    # For what uses transformers the scan above is all: transformers itself looks for deepspeed. The reward files of
    # reasoning-gym and math-verify need those optional packages.
    left_out = MAY_USE_TRANSFORMERS | {"rewards/reasoning_gym.py", "rewards/math.py", "tasks/math_answers.py"}
    left_out |= {"rewards/geometry3k.py", "tasks/geometry3k.py"}
    modules = [module_name(name) for name in PURE if name not in left_out]
    done = run_blocked(modules, heavy=STACK | {"transformers"})
    assert done.returncode == 0, done.stderr


def test_the_blocker_stops_an_import_of_the_stack() -> None:
    done = run_blocked(["ray"], heavy=set())
    assert done.returncode != 0 and "ray is imported" in done.stderr


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run_blocked(["openrlhf_ext"], heavy=HEAVY)
    assert done.returncode == 0, done.stderr


def test_settings_and_checks_import_neither_torch_nor_transformers() -> None:
    done = run_blocked(["openrlhf_ext.checks", "openrlhf_ext.prompts"], heavy=STACK | {"torch", "transformers"})
    assert done.returncode == 0, done.stderr
