"""What stands in front of the command of each rank, in the place of a second Python: a small shell script.

It names the rank in torch's terms, tells `train` that the rank starts (and later with which exit code it ended), gives
it its own stdout and stderr, and enters its own host's code directory (mpirun knows that of the first host).

A rank of smdistributed.dataparallel has SMDATAPARALLEL_LOCAL_RANK too, which scripts and transformers read. A rank of
smdistributed.modelparallel under mpirun has no LOCAL_RANK: AWS's toolkit sets none, and published scripts add it to
their seed, so that the stages of one model would be initialised from different seeds. There, smp.local_rank() tells it.

The shell outlives the script: it traps the signals that stop a job, which the script gets all the same, as both are in
one process group. So it can say how the script ended, and when the job is being stopped it waits: a rank that leaves
at once would otherwise make mpirun or torchrun kill those that still save a checkpoint. `train` then ends all of it.

What the shell itself would say of a command that a signal ends ("Terminated") is not the script's, and is dropped. For
a simple command dash redirects its own stderr, and would say it there: a subshell redirects and becomes the script.

`-p`: an unforeseen local rank writes through the launcher instead. `1<>`: opening a FIFO for both never blocks, so that
no shell hangs where `train` itself was killed.
"""

from __future__ import annotations

from collections.abc import Sequence

EVENTS = "events"
STARTED, ENDED = "start", "end"  # the first word of a line on EVENTS
STOPPING = "stopping"  # exists once the job is being stopped, and holds the pid of `train`

TORCH: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
DATA_PARALLEL: tuple[str, ...] = (*TORCH, "SMDATAPARALLEL_LOCAL_RANK")
MODEL_PARALLEL = tuple(name for name in TORCH if name != "LOCAL_RANK")

# A shell exports what it was given exported: a LOCAL_RANK of the container's goes first.
_OPEN_MPI = (
    "unset LOCAL_RANK\n"
    "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE "
    "LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE "
    "SMDATAPARALLEL_LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK\n"
    "export "
)
_TORCHRUN = "SMDATAPARALLEL_LOCAL_RANK=$LOCAL_RANK; export SMDATAPARALLEL_LOCAL_RANK\n"
_RUN = (
    "trap : TERM INT HUP\n"
    'run="$SHOAL_RUN_DIR" code="$SHOAL_CODE_DIR"; unset SHOAL_RUN_DIR SHOAL_CODE_DIR\n'
    f'echo "{STARTED} $RANK $LOCAL_RANK $$" 1<>"$run/{EVENTS}"\n'
    'if [ -p "$run/out.$LOCAL_RANK" ]; then exec >"$run/out.$LOCAL_RANK" 2>"$run/err.$LOCAL_RANK"; fi\n'
    'cd "$code" || exit\n'
    "exec 3>&2 2>/dev/null\n"
    '(exec "$@" 2>&3 3>&-)\n'
    "code=$?\n"
    f'echo "{ENDED} $RANK $code" 1<>"$run/{EVENTS}"\n'
    f'if [ -e "$run/{STOPPING}" ] && read -r train <"$run/{STOPPING}"; then\n'
    'while kill -0 "$train" 2>/dev/null; do sleep 0.2; done; fi\n'
    'exit "$code"'
)


def under_mpirun(script: Sequence[str], names: Sequence[str] = TORCH) -> list[str]:
    """Return the command of each rank that mpirun starts. `names`: the variables that it finds, of those above."""
    return ["/bin/sh", "-c", f"{_OPEN_MPI}{' '.join(names)}\n{_RUN}", "shoal-rank", *script]


def under_torchrun(script: Sequence[str]) -> list[str]:
    """Return the command of each rank that torchrun starts: it has named the rank already, in torch's terms.

    torchrun takes its arguments for templates, in which `$$` stands for a dollar: they arrive as they were given.
    """
    return [word.replace("$", "$$") for word in ("/bin/sh", "-c", _TORCHRUN + _RUN, "shoal-rank", *script)]
