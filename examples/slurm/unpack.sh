#!/usr/bin/env bash
# Unpacks an image of Docker into a directory, in which charliecloud runs it: unpack.sh IMAGE DIRECTORY
# The directory must not exist. Put it on a disk that all nodes share.
set -euo pipefail
if [ $# -ne 2 ] || [[ $1 == -* ]]; then
    echo "usage: unpack.sh IMAGE DIRECTORY (a tag of Docker, and a new directory)" >&2
    [[ ${1:-} == --help || ${1:-} == -h ]] || exit 2
    exit 0
fi
image=$1 directory=$2

mkdir "$directory"
container=$(docker create "$image")
trap 'docker rm "$container" >/dev/null' EXIT
docker export "$container" | tar -x -C "$directory"
mkdir "$directory/ch"
docker inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image" >"$directory/ch/environment" # for --set-env
echo "unpacked $image into $(realpath "$directory")"
