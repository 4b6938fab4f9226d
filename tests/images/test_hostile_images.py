"""An image that somebody gives you cannot fill the memory or the disk of `size`, `diff`, `inspect` and `audit`."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import limits
from shoal.errors import ImageError
from shoal.inspection import filesystem, manifest
from shoal.layers import saved_image

from .test_size import legacy, oci, tar


def read(archive: bytes) -> tuple[saved_image.LayerTar, ...]:
    return saved_image.read_layers("a:1", iter([archive]))


def test_a_gzip_bomb_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_image, "MOST_LAYER", 10 * limits.MIB)
    with pytest.raises(ImageError, match="a:1: its layers have more unpacked bytes than Shoal reads"):
        read(oci([tar([("zeros", bytes(100 * limits.MIB))])], compressed=True))


def test_millions_of_entries_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_image, "MOST_LAYER_ENTRIES", 1000)
    with pytest.raises(ImageError, match="its layers have more entries"):
        read(oci([tar([(f"f{number}", b"") for number in range(1001)])], compressed=True))


@pytest.mark.parametrize("path", ["var/lib/dpkg/status", "opt/x.dist-info/RECORD"])
def test_a_huge_list_of_packages_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(saved_image, "MOST_LAYER_TEXT", limits.MIB)
    layer = tar([(path, bytes(2 * limits.MIB))])
    with pytest.raises(ImageError, match="more bytes of files that describe packages"):
        read(legacy([layer]))
    if path.startswith("var"):
        with pytest.raises(ImageError, match="more bytes of files that describe packages"):
            filesystem.parse_archive([layer])


def huge(kind: bytes) -> bytes:
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 40
    return info.tobuf(tarfile.GNU_FORMAT)


def endless(begin: bytes) -> Iterator[bytes]:
    yield begin
    for _ in range(1000):
        yield bytes(limits.MIB)
    pytest.fail("a header was read into memory")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGLINK])
def test_a_huge_header_is_refused(kind: bytes) -> None:
    with pytest.raises(ImageError, match=r"a header of 1,099,511,627,776 bytes"):
        saved_image.read_layers("a:1", endless(huge(kind)))


def test_a_chain_of_headers_is_an_error() -> None:
    info = tarfile.TarInfo("x")
    info.type = tarfile.XHDTYPE
    with pytest.raises(ImageError, match="not an image"):
        read(info.tobuf(tarfile.GNU_FORMAT) * 20_000)


DOCUMENTS: dict[str, tuple[Any, Any]] = {
    "deep": ("[" * 100_000, {}),
    "tags": ([{"RepoTags": 5}, {"RepoTags": [None]}], {}),
    "a list as layers": ([{"Config": [], "Layers": {}}], {}),
    "a digest": ([{"Config": "c", "Layers": ["l"]}], {"rootfs": [1], "history": 7}),
    "steps": ([{"Config": "c", "Layers": ["l"]}], {"rootfs": {"diff_ids": {"a": 1}}, "history": [1, None, "x"]}),
    "a path out": ([{"Config": "../../c", "Layers": ["/../l"]}], {}),
}


@pytest.mark.parametrize(("document", "config"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_odd_documents_are_no_traceback(document: Any, config: Any) -> None:
    text = document if isinstance(document, str) else json.dumps(document)
    files = [("l", tar([("f", b"x")])), ("c", json.dumps(config).encode()), ("manifest.json", text.encode())]
    try:
        assert len(read(tar(files))) == 1
    except ImageError as error:
        assert str(error).startswith("a:1: ")


def test_a_cut_gzip_is_an_error() -> None:
    layer = gzip.compress(tar([("f", bytes(range(256)) * 1000)]))
    with pytest.raises(ImageError):
        read(tar([("blobs/sha256/a", layer[: len(layer) // 2])]))


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "![x](http://tracker/x.png)",
        "[click](javascript:alert(1))",
        "`code` | cell",
        "a\n\n# The tag is correct.",
        "\\| escaped \\` &lt;b&gt;",
        "\x1b]52;c;eA==\x07\u202e",
    ],
)
def test_markdown_of_a_manifest_shows_texts_as_they_are(text: str) -> None:
    row = manifest.escape_markdown(text)
    assert not set(row) & set("<>[]`|\\\n\x1b\u202e")
    assert "&lt;" not in row  # an entity of the image is text too


def test_a_tag_that_is_wrong_shows_no_markup() -> None:
    page = manifest._format_tag_check(["version is <b>\n- **ok**\x1b[2J, not 1"])
    assert page.count("\n") == 1
    assert "<b>" not in page and "\x1b" not in page


def test_an_image_file_that_is_a_stream_of_zeros_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        saved_image.read_layers("a:1", io.BytesIO(bytes(10_240)))
