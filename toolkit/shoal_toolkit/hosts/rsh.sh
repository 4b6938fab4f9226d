#!/bin/sh
# Replaces ssh for mpirun: asks `train` to run a command on another host, and ends with the exit code that it answers.
# daemons.py is the other side.
# mpirun starts one for each host, all at the same time. A Python for each would take more memory and time.
#
# mpirun runs it with a host and a command. The exit code is 255, like ssh's, if `train` ends without an answer.
host="$1"
shift
case "$host" in */*) exit 255 ;; esac                 # no host name
answer="$SHOAL_RUN_DIR/answers/$host"
[ -p "$answer" ] || exit 255                          # `train` is gone, or this host has a daemon already
exec 3<"$answer"                                      # before the request, so that no answer is lost
printf '%s\n' "$*" >"$SHOAL_RUN_DIR/requests/$host" || exit 255
printf '%s\n' "$host" 1<>"$SHOAL_RUN_DIR/daemons"     # opened for both, so that it does not block without a reader
read -r code <&3
exit "${code:-255}"
