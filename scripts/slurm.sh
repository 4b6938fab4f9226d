#!/usr/bin/env bash
# Installs Debian's Slurm, munge and charliecloud for the tests of tests/cluster, if they are missing. Starts nothing.
set -euo pipefail

packages=(munge slurmctld slurmd slurm-client charliecloud-runtime iproute2)
for command in munged slurmctld slurmd sbatch ch-run ip; do
    if ! command -v "$command" >/dev/null; then missing=1; fi
done
if [ -z "${missing:-}" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: Slurm is not installed. Fix: as root on Debian or Ubuntu, run apt-get install ${packages[*]}" >&2
    exit 1
fi
echo "slurm: installing ${packages[*]} with apt-get" >&2
# The packages' services stay off: the tests start daemons of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq || echo "slurm: apt-get update had errors; continuing with the existing lists" >&2
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
