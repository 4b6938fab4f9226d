#!/usr/bin/env bash
# Installs Debian's chromium and its driver, which the tests in tests/browser use, if they are missing.
set -euo pipefail

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "browser: the tests of pages need chromium and chromedriver. Fix: as root, run apt-get install chromium chromium-driver" >&2
    exit 1
fi
echo "browser: installing Debian's chromium and chromium-driver with apt-get" >&2
export DEBIAN_FRONTEND=noninteractive
wait=(-o DPkg::Lock::Timeout=300)
apt-get "${wait[@]}" update -qq || echo "browser: apt-get update had errors; continuing with the existing lists" >&2
apt-get "${wait[@]}" install -y -qq --no-install-recommends chromium chromium-driver >/dev/null
