# Compares the Debian packages that apt is about to install with the lock beside this file; its arguments are their names.
#
# A package that the lock does not have is reported, and installed: Debian's mirrors keep only their latest versions. Another
# file of a version that the lock has ends the build: Debian publishes none.
set -eu
lock=${0%/*}/lock.txt
[ -s "$lock" ] || exit 0
# An archive directory of its own, because apt does not list what it has already downloaded.
archives=/var/cache/apt/compared
mkdir -p "$archives/partial"
apt-get install -qq --no-install-recommends --print-uris -o Acquire::ForceHash=SHA256 \
    -o Dir::Cache::archives="$archives" "$@" | awk -v lock="$lock" '
    BEGIN { while ((getline line < lock) > 0) { split(line, words, " "); locked[words[1]] = words[2] } }
    /^\047/ && !($2 in locked) { print "shoal: not locked: " $2 }
    /^\047/ && ($2 in locked) && locked[$2] != $4 {
        print "shoal: " $2 " has " $4 ", but the lock says " locked[$2] ": the mirror has changed a published file."
        print "shoal: Fix: use a mirror that you trust. If Debian changed it: .venv/bin/shoal lock --bases"
        failed = 1
    }
    END { exit failed }'
