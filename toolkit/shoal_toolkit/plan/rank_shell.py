"""Builds the small shell script that starts each rank under mpirun or torchrun. A second Python would start slower.

The shell sets the rank's variables, and gives it stdout and stderr of its own. It enters the code directory of its
host: mpirun only knows the directory of the first host. It reports the start of the rank to `train`, and later its exit
code.

A rank of smdistributed.dataparallel also has SMDATAPARALLEL_LOCAL_RANK, which scripts and transformers read. A rank of
smdistributed.modelparallel under mpirun has no LOCAL_RANK, as with AWS's toolkit. Published scripts add that to their
seed, and the stages of one model would be initialised from different seeds. Such scripts call smp.local_rank().

The shell outlives the script: it traps the signals that stop a job. The script gets them too, because both are in one
process group. So the shell can report how the script ended. While the job is being stopped, it waits: if a rank ended
at once, mpirun or torchrun would kill ranks that still save a checkpoint. `train` then ends all shells.

The shell drops a signal that comes before the script runs. Therefore the subshell does not start the script if STOPPING
exists, which `train` makes before it sends the signal.

The message of a shell about a command that a signal ended ("Terminated") is dropped. For a simple command, dash would
write it to the redirected stderr; therefore a subshell redirects, and execs the script.

`-p`: if there is no FIFO for a local rank, its output goes through the launcher. `1<>`: opening a FIFO for both reading
and writing never blocks, so that no shell hangs after `train` was killed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

EVENTS = "events"  # a FIFO in the run directory
STARTED, FORKED, ENDED = "start", "forked", "end"  # the first word of a line on EVENTS
SOCKET, HAND_OVER = "standby", "hand_over.py"  # links in the run directory: to the standby's socket, and a program
STOPPING = "stopping"  # a file that exists while the job is being stopped; has the pid of `train`, and the signal

MEMORY = "memory"  # a private directory in /dev/shm, or a link to it: names of Open MPI's files there can be guessed

TORCH: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DATA_PARALLEL: tuple[str, ...] = (*TORCH, "SMDATAPARALLEL_LOCAL_RANK")
MODEL_PARALLEL = tuple(name for name in TORCH if name != "LOCAL_RANK")

RANKS = "SHOAL_RANKS"  # JSON: the variables of each rank of this host, for the process that forks them
SHELL_VARIABLES = ("SHOAL_RUN_DIR", "SHOAL_CODE_DIR", RANKS)  # for the shells and the process that forks only

# For mpirun and its daemons. The UCX in Open MPI's wheel hooks memory functions, which takes 40 ms of processor time.
# Only ranks need that. Processes of MPI_Comm_spawn keep the value. UCX ignores case. Only `train`
# spells the value like this, so that a user's value stays.
NO_HOOKS = ("UCX_MEM_MMAP_HOOK_MODE", "nOnE")

# A shell exports variables that it got exported. Therefore a LOCAL_RANK of the container is unset first.
_OPEN_MPI = (
    "unset LOCAL_RANK\n"
    f'[ "${{{NO_HOOKS[0]}-}}" != {NO_HOOKS[1]} ] || unset {NO_HOOKS[0]}\n'
    "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
    "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE "
    "SMDATAPARALLEL_LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK\n"
    f': "${{OMPI_MCA_btl_vader_backing_directory:=$SHOAL_RUN_DIR/{MEMORY}}}"\n'  # of Open MPI 4.1
    f': "${{OMPI_MCA_btl_sm_backing_directory:=$SHOAL_RUN_DIR/{MEMORY}}}"\n'  # of Open MPI 5.0
    "export OMPI_MCA_btl_vader_backing_directory OMPI_MCA_btl_sm_backing_directory "
)
_ALONE = "RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1; export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE\n"
_TORCHRUN = "SMDATAPARALLEL_LOCAL_RANK=$LOCAL_RANK; export SMDATAPARALLEL_LOCAL_RANK\n"
_RUN = (
    "trap : TERM INT HUP\n"
    'run="$SHOAL_RUN_DIR" code="$SHOAL_CODE_DIR"; unset SHOAL_RUN_DIR SHOAL_CODE_DIR\n'
    f'echo "{STARTED} $RANK $LOCAL_RANK $$" 1<>"$run/{EVENTS}"\n'
    'if [ -p "$run/out.$LOCAL_RANK" ]; then exec >"$run/out.$LOCAL_RANK" 2>"$run/err.$LOCAL_RANK"; fi\n'
    'cd "$code" || exit\n'
    f'if [ -e "$run/{SOCKET}" ]; then set -- "$1" -SE "$run/{HAND_OVER}" "$run/{SOCKET}" "$run" "$@"; fi\n'
    "exec 3>&2 2>/dev/null\n"
    f'(if read -r _ signal <"$run/{STOPPING}"; then exit "$((128 + signal))"; fi; exec "$@" 2>&3 3>&-)\n'
    "code=$?\n"
    f'echo "{ENDED} $RANK $code" 1<>"$run/{EVENTS}"\n'
    f'if [ -e "$run/{STOPPING}" ] && read -r train _ <"$run/{STOPPING}"; then\n'
    'while kill -0 "$train" 2>/dev/null; do sleep 0.2; done; fi\n'
    'exit "$code"'
)


def wrap_for_mpirun(
    script: Sequence[str], names: Sequence[str] = TORCH, described: Mapping[str, str] = {}
) -> list[str]:
    """Returns the command that mpirun starts for each rank.

    Args:
        names: The variables that it gets: TORCH, DATA_PARALLEL or MODEL_PARALLEL.
        described: Variables of other launchers, each with the variable of TORCH that has its value.
    """
    program = f"{_OPEN_MPI}{' '.join(names)}\n{_describe(described)}{_RUN}"
    return ["/bin/sh", "-c", program, "shoal-rank", *script]


def wrap_for_torchrun(script: Sequence[str], described: Mapping[str, str] = {}) -> list[str]:
    """Returns the command that torchrun starts for each rank. torchrun itself sets the rank's variables.

    torchrun treats its arguments as templates, in which `$$` is a dollar sign.

    Args:
        script: The command of the script.
        described: As for mpirun.
    """
    program = f"{_TORCHRUN}{_describe(described)}{_RUN}"
    return [word.replace("$", "$$") for word in ("/bin/sh", "-c", program, "shoal-rank", *script)]


def wrap_for_one_rank(script: Sequence[str], described: Mapping[str, str] = {}) -> list[str]:
    """Returns the command of a job's only rank, for a launcher that sets no variables then."""
    program = f"{_ALONE}{_TORCHRUN}{_describe(described)}{_RUN}"
    return ["/bin/sh", "-c", program, "shoal-rank", *script]


def _describe(described: Mapping[str, str]) -> str:
    return f"export {' '.join(f'{name}=${ours}' for name, ours in described.items())}\n" if described else ""
