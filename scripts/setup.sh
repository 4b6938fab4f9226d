#!/usr/bin/env bash
# Makes .venv with our packages (editable), and with pinned packages for the tests and the local job.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/.shoal-setup
wanted=$(cat requirements/dev.txt images/pyproject.toml toolkit/pyproject.toml library/pyproject.toml rehearsal/pyproject.toml rehearsal/*.pth library/native/*.[chpt]* scripts/setup.sh | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
say() { echo "setup: $*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    if command -v python3.11 >/dev/null; then
        python=python3.11
    else
        say "Shoal needs Python 3.11; $python is $("$python" --version 2>&1 || echo missing). Fix: make setup PYTHON=/path/to/python3.11"
        exit 1
    fi
fi

# As root on Debian and Ubuntu, missing packages are installed. Other users see the command for it.
need() { # problem, package ...
    local problem=$1
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "$problem. Fix: as root, run apt-get install $*"
        exit 1
    fi
    say "installing $* with apt-get"
    apt-get update -qq || true
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then need "$python has no venv module" python3.11-venv; fi
# Setup compiles the library's communication engine.
if ! command -v ${CC:-cc} >/dev/null; then need "there is no C compiler" gcc libc6-dev; fi

say "making .venv with $("$python" --version)"
"$python" -m venv .venv
# PyTorch's own index has torch's CPU wheel. It is used only if pip's own configuration does not find the wheel.
index=$(sed -n 's/^ *cpu-wheels: *//p' buildspec.yml)
# -qq: with several local indexes, pip warns about every package that one of them lacks.
pip=(.venv/bin/pip install -qq --disable-pip-version-check --no-deps)
torch=$(grep '^torch==' requirements/dev.txt)
with_pip() {
    # torch beside the rest, as it is half of the work and pip uses one core. In a process group (set -m), which ends
    # with this script.
    set -m
    { "${pip[@]}" "$torch" 2>/dev/null || "${pip[@]}" --extra-index-url "$index" "$torch"; } &
    set +m
    trap 'kill -- -$! 2>/dev/null || true' EXIT
    "${pip[@]}" -r <(grep -v '^torch==' requirements/dev.txt)
    wait $!
    trap - EXIT
}
# uv takes a fifth of pip's time, and a second environment takes seconds, from its cache. It reads none of pip's
# configuration: `uv_options.py` passes the indexes on. If that is not enough for uv, pip installs.
with_uv() {
    local -a uv
    mapfile -t uv < <(.venv/bin/pip config list | .venv/bin/python scripts/uv_options.py)
    uv=(.venv/bin/uv pip install -q --python .venv --no-deps --native-tls "${uv[@]}")
    uv+=(--index-strategy unsafe-best-match -r requirements/dev.txt) # as pip: the best of all indexes
    "${uv[@]}" 2>/dev/null || "${uv[@]}" --index "$index" 2>/dev/null
}

say "installing requirements/dev.txt"
"${pip[@]}" "$(grep '^uv==' requirements/dev.txt)"
with_uv || with_pip
"${pip[@]}" --no-build-isolation -e images -e toolkit -e library -e rehearsal
echo "$wanted" >"$stamp"
say "done"
