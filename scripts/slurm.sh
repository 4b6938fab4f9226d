#!/usr/bin/env bash
# Installs Debian's Slurm, munge and charliecloud for the tests of tests/cluster, if they are missing. Starts nothing.
set -euo pipefail

packages=(munge slurmctld slurmd slurm-client charliecloud-runtime iproute2)
installed() { command -v munged slurmctld slurmd sbatch ch-run ip | wc -l | grep -qx 6; }
if installed; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "slurm: Slurm is not installed. Fix: as root on Debian or Ubuntu, run apt-get install --no-install-recommends ${packages[*]}" >&2
    exit 1
fi
exec 9>/run/shoal-slurm.lock
flock 9 # another test process may install them now
if installed; then exit 0; fi
echo "slurm: installing ${packages[*]} with apt-get" >&2
# The packages' services stay off: the tests start daemons of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq || echo "slurm: apt-get update had errors; continuing with the existing lists" >&2
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq -o DPkg::Lock::Timeout=300 --no-install-recommends "${packages[@]}" >/dev/null
