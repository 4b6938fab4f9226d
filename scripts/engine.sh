#!/usr/bin/env bash
# Makes a Docker Engine answer: uses the one that is there, else installs Debian's docker.io and starts dockerd.
#
#   scripts/engine.sh          make one answer (installs and starts only as root on Debian or Ubuntu)
#   scripts/engine.sh check    only tell whether one answers (exit 0 or 1)
#
# A second dockerd in the same network namespace would take the bridge of the first away, so one is started only
# when no engine answers and no dockerd process lives.
set -euo pipefail

log=/var/log/shoal-dockerd.log
say() { echo "engine: $*" >&2; }
# A process that was killed and that nobody has reaped (state Z) is not a living one.
lives() { grep -qs "^[0-9]* ($1) [^ZX]" /proc/[0-9]*/stat; }
answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

refuse() {
    say "no Docker Engine answers${DOCKER_HOST:+ at DOCKER_HOST=$DOCKER_HOST}, and $1"
    say "what to do: start one (or point DOCKER_HOST at one) and run the command again,"
    say "            or run the same job without Docker: make train ENGINE=none"
    exit 1
}

install_engine() {
    say "installing Debian's docker.io (dockerd, containerd, runc) and iptables with apt-get"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || say "apt-get update had errors; trying with the lists at hand"
    apt-get install -y -qq --no-install-recommends docker.io iptables >/dev/null
}

# Containers must not send larger packets than the machine's own way out takes.
machine_mtu() {
    local interface
    interface=$(awk '$2 == "00000000" { print $1; exit }' /proc/net/route)
    awk '{ print ($1 > 1500) ? 1500 : $1 }' "/sys/class/net/${interface:-lo}/mtu" 2>/dev/null || true
}

# One that is just starting will answer; one that is just ending will be gone.
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
        # After a crash their process IDs may be somebody else's, or a dead process's; dockerd would wait for that one.
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
if [ -n "${DOCKER_HOST:-}" ]; then refuse "DOCKER_HOST names one that this script must not replace"; fi
if [ "$(id -u)" != 0 ]; then refuse "this user is not root, so none can be installed or started"; fi
await_dockerd
if lives dockerd; then refuse "a dockerd process lives but does not answer (see its log)"; fi
if ! command -v dockerd >/dev/null; then
    if ! command -v apt-get >/dev/null; then refuse "this is neither Debian nor Ubuntu, so none is installed here"; fi
    install_engine
fi
start_engine
say "Docker Engine $(docker version --format '{{.Server.Version}}') answers"
