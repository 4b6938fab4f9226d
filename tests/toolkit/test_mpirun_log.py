"""What is read of mpirun's own words."""

from __future__ import annotations

import time

import pytest

from shoal_toolkit.output.mpirun_log import MpirunLog, find_failure_reason

OF_4_1 = b"[vm:1] [[8015,0],0] ACTIVATE PROC [[8015,1],%d] STATE %s AT /x/pmix_server_gen.c:198\n"
OF_5_0 = (
    b"[vm:1] [prterun-a-b.c-7@0,0] [17951.26] ACTIVATE PROC [prterun-a-b.c-7@1,%d] STATE %s AT /x/odls_base.c:1931\n"
)
RULE = "-" * 74 + "\n"


def test_a_notice_without_an_end_is_read_at_once() -> None:
    """mpirun can be killed while it writes one. Each further line took ten times as long as the one before."""
    log = MpirunLog()
    log.feed(2, (RULE + "Primary job\n" + "a line\n" * 50).encode())
    began = time.monotonic()
    log.rank_failure_cause()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("line", [OF_4_1, OF_5_0])
@pytest.mark.parametrize("state", [b"CALLED ABORT", b"EXITED WITH NON-ZERO STATUS", b"ABORTED BY SIGNAL"])
def test_the_first_rank_that_failed(state: bytes, line: bytes) -> None:
    log = MpirunLog()
    log_text = line % (0, b"RUNNING") + line % (3, state) + line % (1, state)
    passed = b"".join(log.feed(2, log_text[start : start + 7]) for start in range(0, len(log_text), 7))
    assert (log.failed_rank, passed) == (3, b"")


@pytest.mark.parametrize(
    "line",
    [
        OF_4_1.replace(b"8015,1", b"8015,0") % (1, b"CALLED ABORT"),
        OF_5_0.replace(b"@1", b"@0") % (1, b"CALLED ABORT"),
        OF_5_0.replace(b"@1", b"@12") % (1, b"CALLED ABORT"),
    ],
)
def test_a_daemon_or_a_rank_of_another_job_is_not_meant(line: bytes) -> None:
    log = MpirunLog()
    assert (log.feed(2, line), log.failed_rank) == (b"", None)


@pytest.mark.parametrize(
    "noise",
    [
        b"[vm:2] plm:rsh: Warning: setpgid(5,5) failed in parent with errno=Permission denied(13)\n",
        b"plm:ssh: Warning: setpgid(5,5) failed in parent with errno=Permission denied(13)\n",
        b"[vm:9] [prterun-vm-9@0,0] ACTIVATING JOB prterun-vm-9@1 STATE RUNNING\n",
        b"[vm:9] [prterun-vm-9@0,0] [1795198.26] ACTIVATE JOB NULL STATE DAEMONS TERMINATED AT prted_comm.c:4\n",
    ],
)
def test_noise_stays_out_and_the_rest_passes(noise: bytes) -> None:
    log = MpirunLog()
    assert log.feed(2, noise + b"mpirun: no such option\nhalf") == b"mpirun: no such option\n"
    assert log.feed(1, b"") == b""
    assert log.flush(2) == b"half\n"
    assert log.text() == "mpirun: no such option\nhalf\n"
    assert log.failed_rank is None


@pytest.mark.parametrize(
    ("log_text", "why"),
    [
        (
            "mpirun: Error: unknown option \"--no\"\nType 'mpirun --help' for usage.\n",
            "mpirun: Error: unknown option \"--no\" Type 'mpirun --help' for usage.",
        ),
        (
            f"{RULE}Conflicting directives for mapping policy are causing the policy\nto be redefined:\n\n"
            f"  New policy:   RANK_FILE\n{RULE}",
            "Conflicting directives for mapping policy are causing the policy to be redefined: New policy: RANK_FILE",
        ),
        (
            f'[vm:01181] Warning: could not find "NOSUCH"\n{RULE}There are not enough slots.\n{RULE}',
            "There are not enough slots.",
        ),
        (
            f"{RULE}The following command line options have been\ndeprecated:\n\n    Deprecated:  --bynode\n{RULE}"
            "[vm:1] [[1,0],0] ORTE_ERROR_LOG: Bad parameter in file x.c at line 5\n\nIt looks like orte_init failed.\n",
            "It looks like orte_init failed.",
        ),
        (
            f"{RULE}WARNING: A deprecated command line option was used.\n\n  Deprecated option: rankfile\n\n"
            f"We have updated this for you and will proceed.\n{RULE}\n{RULE}prterun was unable to open the rankfile:\n"
            f"  Filename: /none\n\nusage: prterun\n{RULE}",
            "prterun was unable to open the rankfile: Filename: /none",
        ),
        ("Warning: this\n\nand that\n", "and that"),
        ("Warning: only this\n", "Warning: only this"),
        ("", ""),
    ],
)
def test_why_mpirun_gave_up(log_text: str, why: str) -> None:
    assert find_failure_reason(log_text) == why


INIT = f"""[vm:1] [[6217,0],0] ORTE_ERROR_LOG: Out of resource in file show_help.c at line 507
{RULE}It looks like MPI_INIT failed for some reason; your parallel process is
likely to abort.

  mca_pml_base_open() failed
{RULE}[vm:2] *** An error occurred in MPI_Init_thread
[vm:2] *** on a NULL communicator
"""
NOTICE = """A requested component was not found, or was unable to be opened.

Host:      vm
Framework: pml
Component: nosuch"""
SUMMARY = f"{RULE}Primary job  terminated normally, but 1 process returned\na non-zero exit code.\n{RULE}"
DETECTED = f"{RULE}mpirun detected that one or more processes exited with non-zero status.\n\n  Exit code:    1\n{RULE}"


@pytest.mark.parametrize(
    ("log_text", "cause"),
    [
        (f"{INIT}{RULE}{NOTICE}\n{RULE}{SUMMARY}{DETECTED}", NOTICE),
        (f"{SUMMARY}{RULE}{NOTICE}\n{RULE}{DETECTED}", NOTICE),
        (f"{INIT}{DETECTED}", INIT.split(RULE)[1].strip("\n")),
        (f"{SUMMARY}{DETECTED}", ""),
        ("[vm:1] 1 more process has sent help message\n", ""),
        ("", ""),
    ],
)
def test_causes_that_mpi_prints_for_a_rank(log_text: str, cause: str) -> None:
    log = MpirunLog()
    log.feed(2, log_text.encode())
    assert log.rank_failure_cause() == cause
