#!/usr/bin/env bash
# Makes .venv with our packages (editable), and with pinned packages for the tests and the local job.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
stamp=.venv/.shoal-setup
wanted=$(cat requirements/dev.txt images/pyproject.toml toolkit/pyproject.toml library/pyproject.toml rehearsal/pyproject.toml rehearsal/*.pth library/native/*.[chpt]* scripts/setup.sh scripts/install.sh | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
say() { echo "setup: $*" >&2; }

if ! "$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    if command -v python3.11 >/dev/null; then
        python=python3.11
    elif command -v uv >/dev/null && uv python install 3.11 && found=$(uv python find --system --no-project 3.11); then
        python=$found
    else
        say "Shoal needs Python 3.11; $python is $("$python" --version 2>&1 || echo missing). Fix: make setup PYTHON=/path/to/python3.11, or put uv on PATH, which downloads it (https://docs.astral.sh/uv)"
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
say "installing requirements/dev.txt"
scripts/install.sh .venv requirements/dev.txt
.venv/bin/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e images -e toolkit -e library -e rehearsal
echo "$wanted" >"$stamp"
say "done"
