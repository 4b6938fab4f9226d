#!/usr/bin/env bash
# Makes .venv with pinned packages, and with ours (editable).
#
#   scripts/setup.sh        `shoal`: all that images and jobs in containers need
#   scripts/setup.sh all    also torch, the toolkit, the library and the tests: for jobs without Docker, and developers
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
say() { echo "setup: $*" >&2; }
digest() { cat "$@" scripts/setup.sh scripts/install.sh | sha256sum; }
is_made() { [ "$(cat ".venv/.shoal-$1" 2>/dev/null)" = "$2" ]; }

part=${1:-shoal} packages=(images) requirements=requirements/shoal.txt
wanted=$(digest "$requirements" images/pyproject.toml)
if [ "$part" = all ]; then
    packages=(images toolkit checkpoint library rehearsal) requirements=requirements/dev.txt
    wanted=$(digest requirements/*.txt ./*/pyproject.toml rehearsal/*.pth library/native/*.[chpt]*)
fi
if is_made "$part" "$wanted"; then exit 0; fi

# Debian has these Pythons since 12, and Ubuntu since 24.04. The pinned packages have wheels for them.
fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }
if ! fits "$python"; then
    if command -v python3.11 >/dev/null; then
        python=python3.11
    elif command -v uv >/dev/null && uv python install 3.11 && found=$(uv python find --system --no-project 3.11); then
        python=$found
    else
        say "Shoal needs Python 3.11 to 3.14; $python is $("$python" --version 2>&1 || echo missing). Fix: make setup PYTHON=/path/to/python3, or put uv on PATH, which downloads it (https://docs.astral.sh/uv)"
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
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then need "$python has no venv module" "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"; fi
# The library's communication engine is compiled.
if [ "$part" = all ] && ! command -v ${CC:-cc} >/dev/null; then need "there is no C compiler" gcc libc6-dev; fi

if [ ! -x .venv/bin/pip ] || ! fits .venv/bin/python; then
    say "making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
say "installing $requirements"
scripts/install.sh .venv "$requirements"
.venv/bin/pip install -qq --disable-pip-version-check --no-deps --no-build-isolation "${packages[@]/#/-e./}"
echo "$wanted" >".venv/.shoal-$part"
say "done"
