#!/usr/bin/env bash
# Starts Docker if it does not answer. If it is missing, installs the package docker.io first.
#
#   scripts/engine.sh          start it (installs and starts only as root on Debian or Ubuntu)
#   scripts/engine.sh check    exit with 0 if Docker answers, otherwise with 1
#
# A second dockerd in the same network namespace would take away the bridge of the first. So this script starts one only
# if Docker does not answer and no dockerd process is alive.
set -euo pipefail

log=/var/log/shoal-dockerd.log
say() { echo "engine: $*" >&2; }
# A killed process that has not been reaped (state Z) is not alive.
lives() { grep -qs "^[0-9]* ($1) [^ZX]" /proc/[0-9]*/stat; }
answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

refuse() {
    say "no Docker Engine answers${DOCKER_HOST:+ at DOCKER_HOST=$DOCKER_HOST}, and $1"
    say "Fix: start Docker, or set DOCKER_HOST, and run the command again."
    say "     Or run the same job without Docker: make train ENGINE=none"
    exit 1
}

install_engine() {
    say "installing the package docker.io (dockerd, containerd, runc) and iptables with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || say "apt-get update had errors; continuing with the existing lists"
    apt-get install -y -qq --no-install-recommends docker.io iptables >/dev/null
}

# Containers must not send larger packets than the machine's default route allows.
machine_mtu() {
    local interface
    interface=$(awk '$2 == "00000000" { print $1; exit }' /proc/net/route)
    awk '{ print ($1 > 1500) ? 1500 : $1 }' "/sys/class/net/${interface:-lo}/mtu" 2>/dev/null || true
}

# A dockerd that is starting answers soon, and one that is ending disappears soon.
await_dockerd() {
    local tries
    for tries in $(seq 200); do
        if answers; then exit 0; fi
        if ! lives dockerd; then return 0; fi
        sleep 0.1
    done
}

start_engine() {
    local tries mtu
    mtu=$(machine_mtu)
    if [ -d /run/systemd/system ]; then
        say "starting docker.service"
        systemctl start docker
    else
        say "starting dockerd (its log: $log)"
        # After a crash, the process IDs in these files can belong to other or dead processes, and dockerd would wait for them.
        rm -f /var/run/docker.pid
        if ! lives containerd; then rm -f /var/run/docker/containerd/containerd.pid; fi
        setsid dockerd --mtu "${mtu:-1500}" >>"$log" 2>&1 </dev/null &
    fi
    for tries in $(seq 300); do
        if answers; then return 0; fi
        sleep 0.1
    done
    say "dockerd does not answer after 30 s; the end of its log:"
    tail -n 15 "$log" >&2 || true
    exit 1
}

if answers; then exit 0; fi
if [ "${1:-}" = check ]; then exit 1; fi
if [ -n "${DOCKER_HOST:-}" ]; then refuse "this script must not replace the one that DOCKER_HOST names"; fi
socket=/var/run/docker.sock
if [ -S $socket ] && [ ! -w $socket ]; then
    say "$socket: permission denied: Docker is there, and your user $(id -un) may not use it"
    say "Fix: as root: usermod -aG $(stat -c %G $socket) $(id -un), and log in again"
    say "     Or run the same job without Docker: make train ENGINE=none"
    exit 1
fi
if [ "$(id -u)" != 0 ]; then refuse "only root can install or start it"; fi
await_dockerd
if lives dockerd; then refuse "a dockerd process is alive but does not answer (see its log)"; fi
if ! command -v dockerd >/dev/null; then
    if ! command -v apt-get >/dev/null; then refuse "this script installs it only on Debian and Ubuntu"; fi
    install_engine
fi
start_engine
say "Docker Engine $(docker version --format '{{.Server.Version}}') answers"
