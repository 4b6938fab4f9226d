#!/usr/bin/env bash
# Installs pinned requirements into a virtual environment, without their dependencies.
#
#   scripts/install.sh VENV REQUIREMENTS
#
# uv is much faster than pip, and makes a second environment from its cache in seconds. It reads none of pip's
# configuration: shoal_toolkit/sidecars/uv.py passes the indexes on. If that is not enough for uv, pip installs. The few packages of
# `shoal` come with pip: uv alone takes 38 MB.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 requirements=$2
# PyTorch's own index has torch's CPU wheel. It is used only if pip's own configuration does not find the wheel.
index=$(sed -n 's/^ *cpu-wheels: *//p' buildspec.yml)
# -qq: with several local indexes, pip warns about every package that one of them lacks.
pip=("$venv/bin/pip" install -qq --disable-pip-version-check --no-deps)

with_uv() (
    "${pip[@]}" "$(grep '^uv==' requirements/dev.txt)" || return
    while IFS= read -r setting; do export "$setting"; done \
        < <("$venv/bin/pip" config list | PYTHONPATH=toolkit "$venv/bin/python" -m shoal_toolkit.sidecars.uv)
    # As pip: the best of all indexes.
    uv=("$venv/bin/uv" pip install -q --python "$venv" --no-deps --native-tls --index-strategy unsafe-best-match)
    "${uv[@]}" -r "$requirements" 2>/dev/null || UV_INDEX="${UV_INDEX:-} $index" "${uv[@]}" -r "$requirements" 2>/dev/null
)

with_pip() {
    local torch
    torch=$(grep '^torch==' "$requirements" || true)
    if [ -n "$torch" ]; then
        # Beside the rest, as it is half of the work and pip uses one core. In a process group (set -m), which ends with
        # this script.
        set -m
        { "${pip[@]}" "$torch" 2>/dev/null || "${pip[@]}" --extra-index-url "$index" "$torch"; } &
        set +m
        trap 'kill -- -$! 2>/dev/null || true' EXIT
    fi
    "${pip[@]}" -r <(grep -v '^torch==' "$requirements")
    if [ -n "$torch" ]; then wait $!; fi
    trap - EXIT
}

{ [ "$requirements" != requirements/shoal.txt ] && with_uv; } || with_pip
