"""Archives that are compressed on all cores."""

from __future__ import annotations

import gzip
import io
import random
import subprocess
from pathlib import Path

import pytest

from shoal.jobs.parallel_gzip import ParallelGzip

MIB = 1 << 20


@pytest.mark.parametrize("sizes", [[], [0], [1], [MIB], [MIB - 1, 2], [10, 3 * MIB, 5], [4096] * 1500])
def test_every_program_reads_what_is_written(sizes: list[int], tmp_path: Path) -> None:
    pieces = [random.Random(number).randbytes(size // 2) + bytes(size - size // 2) for number, size in enumerate(sizes)]
    path = tmp_path / "x.gz"
    with path.open("wb") as out, ParallelGzip(out, workers=3) as stream:
        for piece in pieces:
            stream.write(piece)
        assert stream.tell() == sum(sizes)
    assert gzip.decompress(path.read_bytes()) == b"".join(pieces)
    assert subprocess.run(("gzip", "-dc", path), capture_output=True, check=True).stdout == b"".join(pieces)


def test_it_compresses_as_well_as_gzip() -> None:
    text = "".join(f"step {n} loss {1 / (n + 1):.6f}\n" for n in range(200_000)).encode()
    out = io.BytesIO()
    with ParallelGzip(out) as stream:
        stream.write(text)
    assert len(out.getvalue()) < 1.02 * len(gzip.compress(text, 6))


def test_an_error_leaves_no_end_that_a_reader_would_accept() -> None:
    out = io.BytesIO()
    with pytest.raises(OSError, match="gone"), ParallelGzip(out) as stream:
        stream.write(b"half")
        raise OSError("gone")
    with pytest.raises(EOFError):
        gzip.decompress(out.getvalue())
