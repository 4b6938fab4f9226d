"""`shoal size`: sums of small images made by hand in both layouts, differences, tables, what is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import docker.errors
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from shoal import docker_client
from shoal.console import CleanConsole
from shoal.errors import ImageError, UsageError
from shoal.formats import format_byte_change, format_bytes, format_share
from shoal.image import archive as image_archive
from shoal.image import deflate, inventory, size
from shoal.image.inventory import Inventory, Sum, compare_sizes, layer_title
from shoal.image.owners import TAR, DebianPackage, FileOwner, PythonDistribution
from shoal.matrix.spec import BuildSpec

from .command import shoal_command

SITE = "opt/venv/lib/python3.11/site-packages"
RECORD = 10_240  # bytes: tarfile pads its archives to a multiple of it


@dataclass(frozen=True)
class Link:
    """A link to `target`, a symbolic one unless `is_hard`."""

    target: str
    is_hard: bool = False


Content = bytes | Link | None
"""None: a directory."""


def tar(files: Iterable[tuple[str, Content]]) -> bytes:
    """Return an archive of files, links and directories."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, content in files:
            member = tarfile.TarInfo(path)
            if isinstance(content, bytes):
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
                continue
            member.type = tarfile.DIRTYPE
            if content is not None:
                member.type = tarfile.LNKTYPE if content.is_hard else tarfile.SYMTYPE
                member.linkname = content.target
            archive.addfile(member)
    return buffer.getvalue()


def taken(*contents: bytes) -> int:
    """Return the bytes that files take in a tar: a header of 512 bytes each, and whole blocks of 512."""
    return sum(512 + (len(content) + 511) // 512 * 512 for content in contents)


def config(layers: Sequence[bytes], commands: Sequence[str]) -> bytes:
    digests = ["sha256:" + hashlib.sha256(layer).hexdigest() for layer in layers]
    history = [{"created_by": command} for command in commands]
    history.insert(1, {"created_by": "ENV A=1", "empty_layer": True})  # type: ignore[dict-item]
    return json.dumps({"rootfs": {"type": "layers", "diff_ids": digests}, "history": history}).encode()


def legacy(layers: Sequence[bytes], commands: Sequence[str] = ()) -> bytes:
    """Return an image as Docker before version 25 saves it; a repeated layer is a symlink to the first."""
    files: list[tuple[str, Content]] = []
    first: dict[bytes, str] = {}
    for number, layer in enumerate(layers):
        name = f"layer{number}/layer.tar"
        files += [(f"layer{number}", None), (f"layer{number}/VERSION", b"1.0"), (f"layer{number}/json", b"{}")]
        files.append((name, Link(f"../{first[layer]}") if layer in first else layer))
        first.setdefault(layer, name)
    names = [f"layer{number}/layer.tar" for number in range(len(layers))]
    manifest = [{"Config": "abc.json", "RepoTags": ["a:1"], "Layers": names}]
    # The order of the layers' directories is by their names, which are digests: any.
    files = [*reversed(files), ("abc.json", config(layers, commands)), ("manifest.json", json.dumps(manifest).encode())]
    return tar(files)


def oci(layers: Sequence[bytes], commands: Sequence[str] = (), *, compressed: bool = False) -> bytes:
    """Return an image as Docker saves it since version 25."""
    packed = [gzip.compress(layer, 1) if compressed else layer for layer in layers]
    about = config(layers, commands)
    blobs = {f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}": blob for blob in (*packed, about)}
    names = [f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}" for blob in packed]
    manifest = [{"Config": f"blobs/sha256/{hashlib.sha256(about).hexdigest()}", "RepoTags": None, "Layers": names}]
    files: list[tuple[str, Content]] = [("blobs", None), ("blobs/sha256", None), *sorted(blobs.items())]
    files += [("index.json", b"{}"), ("manifest.json", json.dumps(manifest).encode()), ("oci-layout", b"{}")]
    return tar(files)


def chunked(archive: bytes, length: int = 1000) -> Iterator[bytes]:
    return (archive[at : at + length] for at in range(0, len(archive), length))


def read(archive: bytes, name: str = "a:1") -> Inventory:
    return inventory.read_inventory(name, chunked(archive))


LIBRARY, TOOL, SOURCE, NOTES = b"\x7fELF" * 500, b"tool" * 300, b"import os\n" * 90, b"notes\n" * 10
BYTECODE, OLD, NEW = b"\x6f\x0d" * 700, b"old" * 400, b"new" * 500
STATUS = b"""Package: coreutils
Status: install ok installed
Architecture: amd64
Version: 9.1-1
Description: basics
 of: many lines

Package: gone
Status: deinstall ok config-files
Version: 1

Package: libc6
Status: install ok installed
Source: glibc (2.36-9)
Architecture: amd64
Version: 2.36-9+deb12u1
"""
LISTS = {
    "var/lib/dpkg/info/coreutils.list": b"/.\n/bin\n/bin/ls\n/usr/share/doc\n",
    "var/lib/dpkg/info/libc6:amd64.list": b"/lib/x86_64/libc.so.6\n/lib64/ld.so\n",
}
METADATA = b"Metadata-Version: 2.1\nName: Big_Torch\nVersion: 2.0.1+cu117\n\nLong\n"
RECORD_OF_TORCH = f"""big_torch/__init__.py,sha256=abc,900
"big_torch/a,b.txt",sha256=abc,60
../../../bin/torchrun,sha256=abc,1200
big_torch-2.0.1+cu117.dist-info/METADATA,sha256=abc,{len(METADATA)}
big_torch-2.0.1+cu117.dist-info/RECORD,,
big_torch/_vendor/six-1.dist-info/METADATA,,
big_torch/_vendor/six-1.dist-info/RECORD,,
big_torch/_vendor/six.py,,
""".encode()
SIX = b"Name: six\nVersion: 1\n"
VENDORED = b"six.py,,\nsix-1.dist-info/METADATA,,\nsix-1.dist-info/RECORD,,\n"

BASE: list[tuple[str, Content]] = [
    ("./", None),
    ("./bin", Link("usr/bin")),
    ("./lib", Link("/usr/lib")),
    ("./lib64", Link("usr/lib64")),
    ("./usr/", None),
    ("./usr/bin/ls", TOOL),
    ("./usr/bin/dir", Link("usr/bin/ls", is_hard=True)),
    ("./usr/lib/x86_64/libc.so.6", LIBRARY),
    ("./usr/lib64/ld.so", Link("/lib/x86_64/libc.so.6")),
    ("./etc/motd", OLD),
    ("./tmp/rest/a", OLD),
    ("./tmp/rest/deep/b", OLD),
    ("./tmp/kept", NOTES),
    ("./var/lib/dpkg/status", STATUS),
    *((f"./{path}", text) for path, text in LISTS.items()),
]
TORCH: list[tuple[str, Content]] = [
    (f"{SITE}/", None),
    (f"{SITE}/big_torch/__init__.py", SOURCE),
    (f"{SITE}/big_torch/__pycache__/__init__.cpython-311.pyc", BYTECODE),
    (f"{SITE}/big_torch/a,b.txt", NOTES),
    (f"{SITE}/big_torch/_vendor/six.py", SOURCE),
    (f"{SITE}/big_torch/_vendor/six-1.dist-info/METADATA", SIX),
    (f"{SITE}/big_torch/_vendor/six-1.dist-info/RECORD", VENDORED),
    (f"{SITE}/big_torch-2.0.1+cu117.dist-info/METADATA", METADATA),
    (f"{SITE}/big_torch-2.0.1+cu117.dist-info/RECORD", RECORD_OF_TORCH),
    ("opt/venv/bin/torchrun", TOOL),
    ("etc/motd", NEW),
    ("tmp/.wh.rest", b""),
]
COMMANDS = ["/bin/sh -c #(nop) ADD file:1 in / ", "RUN /bin/sh -c pip install \\\n  big-torch # buildkit"]
TORCHS, LIBCS, COREUTILS = (
    FileOwner("python", "big-torch"),
    FileOwner("debian", "libc6"),
    FileOwner("debian", "coreutils"),
)


@pytest.fixture(params=["legacy", "oci", "oci, gzip"])
def layout(request: pytest.FixtureRequest) -> Any:
    if request.param == "legacy":
        return legacy
    return lambda *given: oci(*given, compressed=request.param == "oci, gzip")


def test_the_sums_are_those_of_the_archives(layout: Any) -> None:
    base, torch = tar(BASE), tar(TORCH)
    found = read(layout([base, torch], COMMANDS))
    assert [layer.sum.bytes for layer in found.layers] == [len(base), len(torch)]
    assert found.sum.bytes == len(base) + len(torch)
    assert [layer.digest for layer in found.layers] == [
        f"sha256:{hashlib.sha256(of).hexdigest()}" for of in (base, torch)
    ]
    assert [layer_title(layer) for layer in found.layers] == ["ADD file:1 in /", "RUN pip install big-torch"]
    assert inventory.total(found.owners.values()) == found.sum


def test_every_file_is_its_packages(layout: Any) -> None:
    found = read(layout([tar(BASE), tar(TORCH)]))
    owners = {owner: of.bytes for owner, of in found.owners.items() if owner != TAR}
    carried = (SOURCE, SIX, VENDORED)
    assert owners == {
        TORCHS: taken(SOURCE, BYTECODE, NOTES, METADATA, RECORD_OF_TORCH, TOOL, *carried),
        LIBCS: taken(LIBRARY, b""),  # the library, and the symlink in lib64
        COREUTILS: taken(TOOL, b""),  # the tool, and the link bin, which its list names
        FileOwner("other", "/"): taken(b"", b""),  # the links lib and lib64
        FileOwner("other", "usr/bin"): taken(b""),  # the hard link dir, which no list names
        FileOwner("other", "etc"): taken(OLD, NEW),
        FileOwner("other", "tmp"): taken(NOTES),
        FileOwner("other", "tmp/rest"): taken(OLD),
        FileOwner("other", "tmp/rest/deep"): taken(OLD),
        FileOwner("other", "var/lib/dpkg"): taken(STATUS),
        FileOwner("other", "var/lib/dpkg/info"): taken(*LISTS.values()),
    }
    assert found.owners[TORCHS].files == 9
    assert next(iter(found.owners)) == max(found.owners, key=lambda owner: found.owners[owner].bytes)


def test_what_a_later_layer_deletes_or_overwrites_is_hidden(layout: Any) -> None:
    found = read(layout([tar(BASE), tar(TORCH)]))
    assert [layer.sum.hidden for layer in found.layers] == [taken(OLD, OLD, OLD), 0]
    hidden = {owner.name: of.hidden for owner, of in found.owners.items() if of.hidden}
    assert hidden == {"etc": taken(OLD), "tmp/rest": taken(OLD), "tmp/rest/deep": taken(OLD)}
    assert 0 < found.sum.hidden_compressed < found.sum.compressed


def hidden_of(*layers: list[tuple[str, Content]]) -> list[int]:
    """Return how many files of each layer are hidden; all are empty."""
    return [layer.sum.hidden // 512 for layer in read(legacy([tar(layer) for layer in layers])).layers]


@pytest.mark.parametrize(
    ("lower", "upper", "hidden"),
    [
        ([("a/b", b""), ("ab", b"")], [("a/.wh.b", b"")], 1),
        ([("a/b", b""), ("ab", b"")], [(".wh.a", b"")], 1),
        ([("a/b", b""), ("a/c/d", b""), ("ab", b"")], [("a/.wh..wh..opq", b""), ("a/new", b"")], 2),
        ([("a/b", b""), ("c", b"")], [(".wh..wh..opq", b"")], 2),
        ([("a/b", b""), ("ab", b"")], [("a", b"")], 1),
        ([("a/b", b"")], [("a", Link("/c"))], 1),
        ([("a", Link("b")), ("b/c", b"")], [("a", None)], 1),
        ([("a/b", b"")], [("a", None)], 0),
        ([("a", b""), ("b", Link("a", is_hard=True))], [(".wh.a", b"")], 0),  # the file lives on as b
        ([("a", b""), ("b", Link("a", is_hard=True))], [(".wh.a", b""), (".wh.b", b"")], 2),
        ([("a", b""), ("a", b"")], [], 1),
    ],
)
def test_later_layers_hide_files_of_earlier_ones(
    lower: list[tuple[str, Content]], upper: list[tuple[str, Content]], hidden: int
) -> None:
    assert hidden_of(lower, upper) == [hidden, 0]
    assert hidden_of(lower, [("between", None)], upper) == [hidden, 0, 0]


def test_a_layer_that_is_a_link_to_another_counts_again() -> None:
    """As Docker counts it. The upper layer hides the files of the lower one, which are the same."""
    layer = tar([("a", NOTES)])
    found = read(legacy([layer, layer], ["COPY a a", "COPY a a"]))
    assert [(of.sum.bytes, of.sum.hidden) for of in found.layers] == [(RECORD, taken(NOTES)), (RECORD, 0)]


def test_the_packages_are_listed_with_their_versions(layout: Any) -> None:
    found = read(layout([tar(BASE), tar(TORCH)]))
    assert found.debian == (
        DebianPackage("coreutils", "9.1-1", "amd64", "coreutils"),
        DebianPackage("libc6", "2.36-9+deb12u1", "amd64", "glibc"),
    )
    assert found.python == (PythonDistribution("big-torch", "2.0.1+cu117", f"{SITE}/big_torch-2.0.1+cu117.dist-info"),)
    assert found.versions[TORCHS] == "2.0.1+cu117"
    assert found.versions[LIBCS] == "2.36-9+deb12u1"


def test_packages_that_a_later_layer_removes_are_not_listed_and_their_bytes_are_hidden() -> None:
    removed: list[tuple[str, Content]] = [
        ("opt/.wh.venv", b""),
        ("var/lib/dpkg/status", STATUS.partition(b"\n\n")[0]),
    ]
    found = read(oci([tar(BASE), tar(TORCH), tar(removed)]))
    assert found.python == ()
    assert [package.name for package in found.debian] == ["coreutils"]
    assert found.owners[TORCHS].hidden == found.owners[TORCHS].bytes


def test_distributions_that_debian_has_packaged_are_debians() -> None:
    place = "usr/lib/python3/dist-packages"
    files: list[tuple[str, Content]] = [
        (f"{place}/six.py", SOURCE),
        (f"{place}/six-1.dist-info/METADATA", SIX),
        (f"{place}/six-1.dist-info/RECORD", b"six.py,,\nsix-1.dist-info/METADATA,,\n"),
        (
            "var/lib/dpkg/info/python3-six.list",
            f"/{place}/six.py\n/{place}/six-1.dist-info/METADATA\n/{place}/six-1.dist-info/RECORD\n".encode(),
        ),
    ]
    found = read(oci([tar(files)]))
    assert found.python == ()
    assert found.owners[FileOwner("debian", "python3-six")].files == 3


def test_a_directory_of_a_later_layer_replaces_a_link() -> None:
    lower: list[tuple[str, Content]] = [("bin", Link("usr/bin")), ("usr/bin/ls", TOOL)]
    upper: list[tuple[str, Content]] = [("bin", None), ("bin/ls", LIBRARY), ("var/lib/dpkg/info/a.list", b"/bin/ls\n")]
    assert read(oci([tar(lower), tar(upper)])).owners[FileOwner("debian", "a")].bytes == taken(LIBRARY)


def test_links_that_lead_in_circles_end() -> None:
    files: list[tuple[str, Content]] = [
        ("a", Link("b")),
        ("b", Link("a")),
        ("c", Link("c/d")),
        ("var/lib/dpkg/info/odd.list", b"/a/x\n/c/x\n"),
    ]
    assert read(oci([tar(files)])).sum.files == 4


def test_long_and_odd_names_and_empty_layers_add_up(layout: Any) -> None:
    files: list[tuple[str, Content]] = [("d" * 90 + "/" + "e" * 200, NOTES), ("caf\udce9/x", NOTES), ("ünï/x", NOTES)]
    layers = [tar(files), tar([]), tar([("a", b"x" * 3_000_000)]), tar(files) + bytes(500_000)]
    found = read(layout(layers))
    assert [layer.sum.bytes for layer in found.layers] == [len(layer) for layer in layers]
    assert {owner.name for owner in found.owners} >= {"caf?", "ünï"}
    assert printed(found).encode()


names = st.sampled_from(["a", "b", "a/b", "a/c", "c/d/e/f/g", ".wh.a", "a/.wh.b", "a/.wh..wh..opq", "c/.wh.d"])
contents = st.one_of(st.none(), st.binary(max_size=2000), st.sampled_from([Link("a"), Link("a", is_hard=True)]))
layers_of_files = st.lists(st.lists(st.tuples(names, contents), max_size=8), min_size=1, max_size=4)


@settings(deadline=None)  # on a busy machine
@given(layers_of_files, st.booleans())
def test_the_owners_sums_are_the_layers_sizes(given_layers: list[list[tuple[str, Content]]], compressed: bool) -> None:
    layers = [tar(files) for files in given_layers]
    one, other = read(legacy(layers)), read(oci(layers, compressed=compressed))
    assert one == other
    for layer, archive, files in zip(one.layers, layers, given_layers, strict=True):
        assert layer.sum.bytes == sum(of.bytes for of in layer.owners.values()) == len(archive)
        assert layer.sum.files <= len(files)
        assert 0 <= layer.sum.hidden <= layer.sum.bytes
        assert layer.sum.compressed > 0
        assert all(of.compressed >= 0 and of.hidden_compressed <= of.compressed for of in layer.owners.values())
    assert not one.layers[-1].sum.hidden or len({name for name, _ in given_layers[-1]}) < len(given_layers[-1])


def measured(data: bytes, piece: int = 1_000_003) -> deflate.StreamSizes:
    with deflate.make_pool() as pool:
        meter = deflate.DeflateMeter(pool)
        for part in chunked(data, piece):
            meter.write(part)
        return meter.finish()


@pytest.mark.parametrize("length", [1, 5_000, deflate.BLOCK, deflate.BLOCK + 1, 3 * deflate.BLOCK, 2_500_000])
def test_compressed_bytes_are_those_of_gzip(length: int) -> None:
    data = b"".join(Path(file).read_bytes() for file in (st.__file__, docker.errors.__file__, tarfile.__file__))
    data = (data * (length // len(data) + 1))[:length]
    assert measured(data).compressed == pytest.approx(len(gzip.compress(data, 6)), rel=0.002, abs=8)
    assert measured(data) == measured(data, 777)


def test_compressed_bytes_follow_the_offset() -> None:
    """A block of noise does not compress, one of zeros to nearly nothing."""
    noise = os.urandom(deflate.BLOCK)
    found = measured(noise + bytes(deflate.BLOCK) + noise)
    half, whole, zeros = (found.compressed_before(at) for at in (deflate.BLOCK // 2, deflate.BLOCK, 2 * deflate.BLOCK))
    assert whole == pytest.approx(deflate.BLOCK, rel=0.001)
    assert half == whole // 2
    assert zeros - whole < 300
    assert found.compressed_before(3 * deflate.BLOCK) == found.compressed == pytest.approx(2 * deflate.BLOCK, rel=0.01)
    assert measured(b"").compressed == 0


def test_noise_and_zeros_are_distinguished_in_a_layer() -> None:
    files: list[tuple[str, Content]] = [("noise/a", os.urandom(1_000_000)), ("zeros/b", bytes(1_000_000))]
    owners = read(oci([tar(files)])).owners
    assert owners[FileOwner("other", "noise")].compressed == pytest.approx(1_000_000, rel=0.05)  # a block holds both
    assert owners[FileOwner("other", "zeros")].compressed < 100_000


def two_images() -> tuple[Inventory, Inventory]:
    """Torch grows by a file and has another version, libc6 stays, `old` goes and `new` comes, each with its layer."""
    later = [(path.replace("2.0.1+cu117", "2.1.0"), content) for path, content in TORCH]
    later = [item for item in later if not item[0].endswith(("2.1.0.dist-info/RECORD", "2.1.0.dist-info/METADATA"))]
    record = RECORD_OF_TORCH.replace(b"2.0.1+cu117", b"2.1.0") + b"big_torch/more.so,,\n"
    later += [
        (f"{SITE}/big_torch/more.so", LIBRARY * 20),
        (f"{SITE}/big_torch-2.1.0.dist-info/METADATA", METADATA.replace(b"2.0.1+cu117", b"2.1.0")),
        (f"{SITE}/big_torch-2.1.0.dist-info/RECORD", record),
    ]
    before = [tar(BASE), tar(TORCH), tar([("old/a", OLD)])]
    after = [tar(BASE), tar(later), tar([("new/a", NEW)])]
    return (
        read(legacy(before, [*COMMANDS, "COPY old /"]), "one:1"),
        read(oci(after, [*COMMANDS, "COPY new /"]), "other:2"),
    )


def test_comparison_of_two_images() -> None:
    before, after = two_images()
    comparison = compare_sizes(before, after)
    changes = {change.name: (change.state, change.bytes) for change in comparison.packages if change.kind != "tar"}
    grown = sum(of.bytes for owner, of in after.owners.items() if owner == TORCHS) - before.owners[TORCHS].bytes
    assert grown == taken(LIBRARY * 20)
    assert changes["big-torch"] == ("grown", grown)
    assert changes["old"] == ("gone", -taken(OLD))
    assert changes["new"] == ("new", taken(NEW))
    assert changes["libc6"] == ("same", 0)
    assert sum(change.bytes for change in comparison.packages) == after.sum.bytes - before.sum.bytes
    assert sum(change.bytes for change in comparison.layers) == comparison.total.bytes
    assert sum(change.compressed for change in comparison.packages) == comparison.total.compressed
    layers = [(change.name, change.state) for change in comparison.layers]
    assert layers[0] == ("ADD file:1 in /", "same")
    assert layers[1][0] == "RUN pip install big-torch"
    assert layers[2:] == [("COPY new /", "new"), ("COPY old /", "gone")]
    (torch,) = (change for change in comparison.packages if change.name == "big-torch")
    assert torch.version == "2.0.1+cu117 → 2.1.0"
    back = {change.name: change.state for change in compare_sizes(after, before).packages}
    assert (back["big-torch"], back["old"], back["new"]) == ("shrunk", "new", "gone")


def test_layers_are_the_same_by_content_or_by_command_and_turn() -> None:
    first, second, third = (tar([(name, name.encode() * 10_000)]) for name in ("a", "bb", "ccc"))
    before = read(oci([first, second], ["RUN one", "RUN two"]))
    after = read(oci([first, second, third], ["RUN other", "RUN two", "RUN two"]))
    changes = [(change.name, change.state, change.bytes) for change in compare_sizes(before, after).layers]
    assert changes == [("RUN other", "same", 0), ("RUN two", "same", 0), ("RUN two", "new", len(third))]
    others = compare_sizes(read(oci([first, second], ["RUN x"] * 2)), read(oci([third, third], ["RUN x"] * 2)))
    assert [change.bytes for change in others.layers] == [len(third) - len(first), len(third) - len(second)]
    turns = compare_sizes(read(oci([first, second], ["RUN x"] * 2)), read(oci([second, third], ["RUN x"] * 2)))
    assert [(change.state, change.bytes) for change in turns.layers] == [
        ("same", 0), ("grown", len(third) - len(first))
    ]  # fmt: skip


@pytest.mark.parametrize("compressed", [False, True])
def test_layers_that_images_share_are_read_once(monkeypatch: pytest.MonkeyPatch, compressed: bool) -> None:
    """A layer is known by the digest in its name, which Docker has computed. In a file of others, it may be wrong."""
    shared, own, other = (tar([(name, name.encode() * 1000)]) for name in ("shared", "own", "other"))
    first, second = (oci([shared, layer], compressed=compressed) for layer in (own, other))
    expected = [
        image_archive.read_layers(name, chunked(archive)) for name, archive in (("a:1", first), ("b:1", second))
    ]
    sizes: list[object] = []
    make_layer = image_archive._layer

    def count(*given: Any) -> image_archive.LayerTar:
        sizes.append(given)
        return make_layer(*given)

    monkeypatch.setattr(image_archive, "_layer", count)
    known: image_archive.Blobs = {}
    found = [
        image_archive.read_layers(name, chunked(archive), known) for name, archive in (("a:1", first), ("b:1", second))
    ]
    assert found == expected
    assert len(sizes) == 3
    for archive in (legacy([shared, own]), legacy([shared, other])):
        image_archive.read_layers("c:1", chunked(archive), known)
    assert len(sizes) == 7, "the names of this layout are no digests"
    image_archive.read_layers("d:1", chunked(second))
    assert len(sizes) == 9


def test_an_image_does_not_differ_from_itself() -> None:
    one, _ = two_images()
    comparison = compare_sizes(one, one)
    assert not any(change.is_changed for change in (*comparison.packages, *comparison.layers))
    assert next(size.summarize_comparison(comparison)) == "one:1 and one:1 have the same size."


def printed(*inventories: Inventory) -> str:
    console = CleanConsole(width=200, file=io.StringIO())
    size.print_sizes(console, inventories)
    return cast(io.StringIO, console.file).getvalue()


def test_a_layer_is_named_by_its_largest_packages_and_its_command() -> None:
    text = printed(read(legacy([tar(BASE), tar(TORCH)], COMMANDS)))
    assert re.search(r"^ *big-torch · RUN pip install big-torch +[\d.]+ kB", text, re.MULTILINE)
    assert f"{(len(tar(BASE)) + len(tar(TORCH))) / 1000:.1f} kB in 2 layers" in text
    assert "is wasted" in text


def test_the_tables_of_two_images_show_the_difference() -> None:
    text = printed(*two_images())
    for words in ("other:2 is", "than one:1", "2.0.1+cu117 → 2.1.0", "COPY old /", "gone", "new", "grown"):
        assert words in text
    assert f"+{taken(NEW) / 1000:.2f} kB" in text
    assert f"−{taken(OLD) / 1000:.2f} kB" in text


def test_names_in_brackets_are_no_markup() -> None:
    text = printed(read(oci([tar([("[red]/x", NOTES)])], ["RUN <b>echo</b> '\"' && [bold]"]), "<i>name</i>"))
    assert "[bold]" in text
    assert "[red]" in text


def test_a_long_table_ends_with_the_number_of_further_rows() -> None:
    files: list[tuple[str, Content]] = [(f"dir{number}/x", NOTES) for number in range(60)]
    assert "and 51 smaller, which --json lists" in printed(read(oci([tar(files)])))


def broken_manifest(manifest: object, **files: bytes) -> bytes:
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    return tar([("manifest.json", text), ("abc.json", b"{}"), *files.items()])


@pytest.mark.parametrize(
    ("archive", "words"),
    [
        (b"", "not an image, or cut off"),
        (b"hello, this is a text " * 100, "not an image, or cut off"),
        (legacy([tar(BASE)])[:15_000], "not an image, or cut off"),
        (tar([("a", b"x")]), "no manifest.json in it"),
        (broken_manifest({}), "manifest.json is no list of images"),
        (broken_manifest([]), "manifest.json is no list of images"),
        (broken_manifest(b"{"), "manifest.json is not JSON"),
        (broken_manifest([{"Config": "abc.json"}]), "Layers in manifest.json is not a list of names: None"),
        (broken_manifest([{"Config": "x.json", "Layers": []}]), "no x.json in it"),
        (broken_manifest([{"Config": "abc.json", "Layers": ["l.tar"]}]), "the layer l.tar, which is not in it"),
        (broken_manifest([{"Config": "abc.json", "Layers": ["l"]}], l=b"text"), "the layer l, which is not in it"),
        (broken_manifest([{"Config": "abc.json", "Layers": ["l"]}], l=b"\x28\xb5\x2f\xfd.."), "compressed by zstd"),
        (broken_manifest([{"RepoTags": ["a:1"]}, {"RepoTags": ["b:2"]}]), r"2 images in it \(a:1, b:2\)"),
        (oci([gzip.compress(b"no tar" * 200)]), "not an image, or cut off"),
    ],
)
def test_invalid_archives_are_errors(archive: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=f"^a:1: .*{words}"):
        read(archive)


def test_layer_without_history_has_a_title() -> None:
    found = read(broken_manifest([{"Config": "abc.json", "Layers": ["l"]}], l=tar([("a", b"")])))
    assert (found.layers[0].digest, found.layers[0].command) == ("", "")
    assert layer_title(found.layers[0]) == "unknown command"


def test_memory_does_not_grow_with_the_image(tmp_path: Path) -> None:
    """A layer of 250 MB that is never there as a whole is read within 150 MB, Python and its packages included.

    Not by getrusage: it counts what the process that started it held.
    """
    program = """
import io, re, tarfile
from pathlib import Path
from shoal.image import inventory
size = 250 * 2**20
def archive():
    layer = tarfile.TarInfo("big/file"); layer.size = size
    outer = tarfile.TarInfo("l/layer.tar"); outer.size = 512 + size + 1024
    yield outer.tobuf() + layer.tobuf()
    for _ in range(250): yield bytes(2**20)
    yield bytes(1024)
    for name, text in (("c.json", b"{}"), ("manifest.json", b'[{"Config": "c.json", "Layers": ["l/layer.tar"]}]')):
        member = tarfile.TarInfo(name); member.size = len(text)
        yield member.tobuf() + text.ljust(512, b"\\0")
    yield bytes(1024)
assert inventory.read_inventory("big", archive()).sum.bytes == 512 + size + 1024
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) // 1024)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert int(result.stdout) < 150


def shoal(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*shoal_command(), "size", *arguments]
    env = {**os.environ, "COLUMNS": "120", **environment}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)


def test_the_command_prints_the_tables_or_the_document(tmp_path: Path) -> None:
    layers = [tar(BASE), tar(TORCH)]
    (tmp_path / "one.tar").write_bytes(legacy(layers, COMMANDS))
    result = shoal("one.tar", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    whole = sum(map(len, layers))
    assert f"one.tar: {whole / 1000:.1f} kB in 2 layers" in result.stdout
    torch = taken(SOURCE, BYTECODE, NOTES, METADATA, RECORD_OF_TORCH, TOOL, SOURCE, SIX, VENDORED)
    assert re.search(rf"^ *big-torch +{format_bytes(torch)} ", result.stdout, re.MULTILINE)
    document = json.loads(shoal("one.tar", "--json", cwd=tmp_path).stdout)
    (image,) = document["images"]
    assert document["difference"] is None
    assert image["bytes"] == whole == sum(owner["bytes"] for owner in image["owners"])
    assert image["python_distributions"][0]["version"] == "2.0.1+cu117"
    assert {("python", "big-torch"), ("debian", "libc6")} <= {(of["kind"], of["name"]) for of in image["owners"]}
    assert [path.name for path in tmp_path.iterdir()] == ["one.tar"]


def test_the_command_compares_two(tmp_path: Path) -> None:
    (tmp_path / "one.tar").write_bytes(legacy([tar(BASE)], COMMANDS[:1]))
    (tmp_path / "two.tar").write_bytes(oci([tar(BASE), tar(TORCH)], COMMANDS))
    result = shoal("one.tar", "two.tar", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"two\.tar is [\d.]+ kB \(\d+%\) larger than one\.tar", result.stdout)
    assert re.search(r"big-torch 2\.0\.1\+cu117 +new +\+[\d.]+ kB", result.stdout)
    found = json.loads(shoal("one.tar", "two.tar", "--json", cwd=tmp_path).stdout)["difference"]
    assert found["bytes"] == len(tar(TORCH))
    assert [layer["state"] for layer in found["layers"]] == ["same", "new"]


def test_the_command_fails_with_the_code_of_its_error(tmp_path: Path) -> None:
    (tmp_path / "no.tar").write_text("text")
    result = shoal("no.tar", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (ImageError.exit_code, "")
    assert result.stderr.startswith("reading and compressing no.tar, 4 B\nshoal: no.tar: not an image")
    missing = shoal("missing.tar", cwd=tmp_path)
    assert missing.returncode == UsageError.exit_code
    assert "missing.tar: cannot be read: No such file or directory" in missing.stderr
    assert "docker save -o missing.tar" in missing.stderr


class FakeEngine:
    """Docker with one image: `there`."""

    def __init__(self, there: str, archive: bytes) -> None:
        self.images = self.api = self
        self.there, self.archive = there, archive
        self.id, self.tags, self.attrs = "sha256:1", [there], {"Size": len(archive)}
        self.saved: list[str] = []

    def get(self, name: str) -> FakeEngine:
        if name != self.there:
            raise docker.errors.ImageNotFound(name)
        return self

    def __call__(self) -> list[dict[str, Any]]:
        return [{"RepoTags": self.tags}]

    def get_image(self, name: str, chunk_size: int) -> Iterator[bytes]:
        self.saved.append(name)
        return chunked(self.archive, chunk_size)


def test_image_is_found_by_tag_or_framework(monkeypatch: pytest.MonkeyPatch, matrix: BuildSpec) -> None:
    fake = FakeEngine(matrix.defaults["pytorch"], oci([tar(TORCH)]))
    monkeypatch.setattr(docker_client, "connect", lambda: fake)
    console = Console(file=io.StringIO())
    for word in ("pytorch", matrix.defaults["pytorch"]):
        (found,) = size.read_inventories([word], matrix, console)
        assert found.name == matrix.defaults["pytorch"]
        assert found.sum.bytes == len(tar(TORCH))
    assert fake.saved == ["sha256:1", "sha256:1"]  # by ID: a name may have several images
    with pytest.raises(UsageError, match="not built yet"):
        size.read_inventories(["pytorch", "tensorflow"], matrix, console)
    assert len(fake.saved) == 2  # nothing is read before all are found
    with pytest.raises(UsageError, match=f"not built yet. Fix: shoal build {matrix.defaults['tensorflow']}"):
        size.read_inventories(["tensorflow"], matrix, console)
    with pytest.raises(UsageError, match=r"pytroch: no such image .* Did you mean 'pytorch'"):
        size.read_inventories(["pytroch"], matrix, console)
    with pytest.raises(UsageError, match="debian: no such image"):
        size.read_inventories(["debian"], None, console)


def test_lines_show_the_progress_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size, "_PAUSE", 0)
    monkeypatch.setattr(size, "_CHUNK", 8192)
    monkeypatch.chdir(tmp_path)
    content = legacy([tar(TORCH)])
    Path("one.tar").write_bytes(content)
    screen = io.StringIO()
    size.read_inventories(["one.tar"], None, Console(file=screen, width=20))
    whole = format_bytes(len(content))
    lines = [f"one.tar: {format_bytes(end)} of {whole}" for end in range(8192, len(content), 8192)]
    assert screen.getvalue().splitlines()[: 1 + len(lines)] == [f"reading and compressing one.tar, {whole}", *lines]


def test_sums_add() -> None:
    assert Sum(1, 2, 3, 4, 5) + Sum(10, 20, 30, 40, 50) == Sum(11, 22, 33, 44, 55)
    assert (format_byte_change(1500), format_byte_change(-20), format_byte_change(0)) == ("+1.50 kB", "−20 B", "±0 B")
    assert (format_share(1, 1000), format_share(500, 1000)) == ("less than 1%", "50%")


def test_names_have_no_control_characters() -> None:
    """The image's author chooses them: names of files, and commands of layers."""
    found = read(legacy([tar([("opt/\x1b]0;title\x07/f", OLD)])], ["RUN \x1b[2J"]))
    other = read(legacy([tar([("opt/\x1b]0;other\x07/f", NEW * 9)])], ["RUN \x1b[3J"]), "b:1")
    screen = io.StringIO()
    size.print_sizes(CleanConsole(file=screen, width=200), [found])
    size.print_sizes(CleanConsole(file=screen, width=200), [found, other])
    assert "title" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()
    assert "\x07" not in screen.getvalue()
