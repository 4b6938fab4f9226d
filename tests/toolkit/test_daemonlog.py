"""What is read of mpirun's own words."""

from __future__ import annotations

import pytest

from shoal_toolkit.daemonlog import DaemonLog

STATE = b"[vm:1] [[8015,0],0] ACTIVATE PROC [[8015,1],%d] STATE %s AT /x/pmix_server_gen.c:198\n"


@pytest.mark.parametrize("state", [b"CALLED ABORT", b"EXITED WITH NON-ZERO STATUS", b"ABORTED BY SIGNAL"])
def test_the_first_rank_that_failed(state: bytes) -> None:
    log = DaemonLog()
    said = STATE % (0, b"RUNNING") + STATE % (3, state) + STATE % (1, state)
    passed = b"".join(log.feed(2, said[start : start + 7]) for start in range(0, len(said), 7))
    assert (log.failed_rank, passed) == (3, b"")


def test_noise_stays_out_and_the_rest_passes() -> None:
    log = DaemonLog()
    noise = b"[vm:2] plm:rsh: Warning: setpgid(5,5) failed in parent with errno=Permission denied(13)\n"
    assert log.feed(2, noise + b"mpirun: no such option\nhalf") == b"mpirun: no such option\n"
    assert log.feed(1, b"") == b""
    assert log.flush(2) == b"half\n"
    assert log.text() == "mpirun: no such option\nhalf\n"
    assert log.failed_rank is None
