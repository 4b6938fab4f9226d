#!/usr/bin/env bash
# Unpacks an image of Docker into a directory, in which charliecloud runs it: unpack.sh IMAGE DIRECTORY
# The directory must not exist. Put it on a disk that all nodes share.
set -euo pipefail
image=$1 directory=$2

mkdir "$directory"
container=$(docker create "$image")
trap 'docker rm "$container" >/dev/null' EXIT
docker export "$container" | tar -x -C "$directory"
mkdir "$directory/ch"
docker inspect --format '{{range .Config.Env}}{{println .}}{{end}}' "$image" >"$directory/ch/environment" # for --set-env
