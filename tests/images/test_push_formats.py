"""What `shoal push --compression` and `--lazy` send: layers that clients unpack, and an index that they can read."""

from __future__ import annotations

import hashlib
import http.server
import io
import json
import random
import tarfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flatbuffers.number_types as kinds
import flatbuffers.table
import pytest
from backports import zstd
from rich.console import Console

from shoal.builds import layers, push, registry, soci
from shoal.commands import images
from shoal.errors import DiskError, ImageError, PushError, UsageError
from shoal.limits import MIB

LARGE = random.Random(1).randbytes(11 * MIB)  # does not become smaller
FILES = {"opt/large": LARGE, "opt/text": b"words " * 1000, f"opt/{'long' * 40}": b"x"}


def make_tar(files: dict[str, bytes]) -> bytes:
    """Return a layer, with a directory, a link and attributes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        directory = tarfile.TarInfo("opt")
        directory.type, directory.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(directory)
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.uid, entry.mode = len(content), 1_600_000_000.25, 7, 0o640
            entry.pax_headers = {"SCHILY.xattr.user.of": "test"} if name == "opt/text" else {}
            archive.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("opt/link")
        link.type, link.linkname = tarfile.SYMTYPE, "text"
        archive.addfile(link)
    return buffer.getvalue()


def save(*tars: bytes) -> bytes:
    """Return an image as `docker save` writes it."""
    diff_ids = [f"sha256:{hashlib.sha256(content).hexdigest()}" for content in tars]
    config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    names = [f"{number}/layer.tar" for number in range(len(tars))]
    manifest = [{"Config": "config.json", "Layers": names, "RepoTags": None}]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        members = [*zip(names, tars), ("config.json", json.dumps(config).encode())]
        for name, content in [*members, ("manifest.json", json.dumps(manifest).encode())]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def pack(directory: Path, compression: layers.Compression, *tars: bytes) -> layers.Packed:
    return layers.pack_image("a:1", [save(*tars)], directory, compression, with_entries=compression == "gzip")


def read(blob: layers.Blob) -> bytes:
    content = blob.content.read_bytes() if isinstance(blob.content, Path) else blob.content
    assert blob.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert blob.size == len(content)
    return content


def test_zstd_layers_have_the_content_of_the_image(tmp_path: Path) -> None:
    small, large = make_tar({"opt/text": b"words"}), make_tar(FILES)
    packed = pack(tmp_path, "zstd", large, small)
    assert [zstd.decompress(read(layer.blob)) for layer in packed.layers] == [large, small]
    assert packed.layers[0].blob.media_type == "application/vnd.oci.image.layer.v1.tar+zstd"
    published = soci.publish_plain(packed)
    assert json.loads(read(published.tagged))["config"]["digest"] == packed.config.digest


def test_an_image_can_have_a_layer_twice(tmp_path: Path) -> None:
    tars = [make_tar({"opt/text": content}) for content in (b"first", b"first", b"second")]
    packed = pack(tmp_path, "zstd", *tars)
    assert [zstd.decompress(read(layer.blob)) for layer in packed.layers] == tars
    assert len(list(tmp_path.iterdir())) == 2


def test_a_gzip_layer_is_one_stream_that_can_be_entered_at_each_span(tmp_path: Path) -> None:
    tar = make_tar(FILES)
    (layer,) = pack(tmp_path, "gzip", tar).layers
    content = read(layer.blob)
    assert zlib.decompress(content, zlib.MAX_WBITS | 16) == tar
    assert len(layer.spans) == len(tar) // layers.SPAN + 1 > 2
    ends = [*(span.compressed for span in layer.spans[1:]), len(content)]
    for span, end in zip(layer.spans, ends):
        part = content[span.compressed : end]
        assert span.digest == f"sha256:{hashlib.sha256(part).hexdigest()}"
        found = zlib.decompressobj(-zlib.MAX_WBITS).decompress(part)
        assert found == tar[span.uncompressed : span.uncompressed + layers.SPAN]


class Table:
    """A table of a FlatBuffer, whose fields are read by their number."""

    def __init__(self, content: bytes, position: int | None = None) -> None:
        start = int.from_bytes(content[:4], "little") if position is None else position
        self._content, self._table = content, flatbuffers.table.Table(bytearray(content), start)

    def number(self, field: int, flags: Any = kinds.Int64Flags) -> int:
        offset = self._table.Offset(4 + 2 * field)
        return int(self._table.Get(flags, self._table.Pos + offset)) if offset else 0

    def text(self, field: int) -> str:
        return bytes(self._table.String(self._table.Pos + self._table.Offset(4 + 2 * field))).decode()

    def table(self, field: int) -> Table:
        return Table(self._content, self._table.Indirect(self._table.Pos + self._table.Offset(4 + 2 * field)))

    def tables(self, field: int) -> list[Table]:
        offset = self._table.Offset(4 + 2 * field)
        begin, count = self._table.Vector(offset), self._table.VectorLen(offset)
        return [Table(self._content, self._table.Indirect(begin + 4 * number)) for number in range(count)]

    def data(self, field: int) -> bytes:
        offset = self._table.Offset(4 + 2 * field)
        begin = self._table.Vector(offset)
        return self._content[begin : begin + self._table.VectorLen(offset)]


def test_the_table_of_contents_leads_to_each_file(tmp_path: Path) -> None:
    tar = make_tar(FILES)
    (layer,) = pack(tmp_path, "gzip", tar).layers
    ztoc = Table(soci.write_ztoc(layer))
    assert (ztoc.text(0), ztoc.number(2), ztoc.number(3)) == ("0.9", layer.blob.size, len(tar))
    entries = {entry.text(0): entry for entry in ztoc.table(4).tables(0)}
    found = {name: tar[entry.number(2) :][: entry.number(3)] for name, entry in entries.items()}
    assert found == {"opt/": b"", **FILES, "opt/link": b""}
    types = {name: entry.text(1) for name, entry in entries.items()}
    assert types == {"opt/": "dir", **dict.fromkeys(FILES, "reg"), "opt/link": "symlink"}
    text = entries["opt/text"]
    assert (text.number(5), text.number(6, kinds.Uint32Flags)) == (0o640, 7)
    assert text.text(10) == "2020-09-13T12:26:40.25Z"
    assert ("SCHILY.xattr.user.of", "test") in [(pair.text(0), pair.text(1)) for pair in text.tables(13)]
    assert entries["opt/link"].text(4) == "text"
    checkpoints = ztoc.table(5).data(3)
    count, size = int.from_bytes(checkpoints[:4], "little"), 17 + 32 * 1024
    assert (count, len(checkpoints)) == (len(layer.spans), 12 + count * size)
    assert ztoc.table(5).number(1, kinds.Int32Flags) == count - 1
    places = [checkpoints[12 + number * size :][:16] for number in range(count)]
    assert [(int.from_bytes(place[:8], "little"), int.from_bytes(place[8:], "little")) for place in places] == [
        (span.compressed, span.uncompressed) for span in layer.spans
    ]


def test_the_image_comes_first_in_the_index_and_names_its_soci_index(tmp_path: Path) -> None:
    packed = pack(tmp_path, "gzip", make_tar(FILES), make_tar({"opt/text": b"words"}))
    published = soci.publish_lazy(packed)
    manifests = {blob.digest: json.loads(read(blob)) for blob in published.manifests}
    image, index = json.loads(read(published.tagged))["manifests"]
    assert image["platform"] == index["platform"] == {"architecture": "amd64", "os": "linux"}
    assert index["artifactType"] == "application/vnd.amazon.soci.index.v2+json"
    assert manifests[image["digest"]]["annotations"] == {"com.amazon.soci.index-digest": index["digest"]}
    assert index["annotations"] == {"com.amazon.soci.image-manifest-digest": image["digest"]}
    sent = {blob.digest for blob in published.blobs}
    for manifest in manifests.values():
        assert {manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])} <= sent
    (table,) = manifests[index["digest"]]["layers"]  # the second layer is too small
    assert table["annotations"]["com.amazon.soci.image-layer-digest"] == packed.layers[0].blob.digest
    assert "com.amazon.soci.disable-xattrs" not in table["annotations"]


def test_an_image_without_a_large_layer_is_pushed_without_an_index(tmp_path: Path) -> None:
    published = soci.publish_lazy(pack(tmp_path, "gzip", make_tar({"opt/text": b"words"})))
    assert (published.manifests, published.tagged.media_type) == ((), soci.MANIFEST)


@pytest.mark.parametrize("content", [b"", save(make_tar(FILES))[:4096], save(b"no tar")])
def test_other_archives_are_errors_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ImageError, match="a:1: Docker's archive of it cannot be read"):
        layers.pack_image("a:1", [content], tmp_path, "zstd", with_entries=False)


class Answers(http.server.BaseHTTPRequestHandler):
    """A registry that needs a token, and keeps all blobs."""

    blobs: dict[str, bytes]
    refuses = False

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path, _, query = self.path.partition("?")
        if path == "/token":
            assert self.headers["Authorization"] == "Basic YTpi"
            assert "scope=repository%3Ateam%2Fone%3Apull%2Cpush" in query
            self._answer(200, b'{"token": "secret"}')
        elif self.headers.get("Authorization") != "Bearer secret":
            here = f"http://{self.headers['Host']}/token"
            self._answer(401, WWW_Authenticate=f'Bearer realm="{here}",service="test"')
        elif self.refuses:
            self._answer(403, b'{"errors": [{"code": "DENIED", "message": "quota is used up"}]}')
        elif self.command == "POST":
            self._answer(202, Location="/upload?state=1")
        elif self.command == "PUT":
            self.blobs[query.partition("digest=")[2] or path] = body
            self._answer(201)
        else:
            self._answer(200 if path.rpartition("/")[2] in self.blobs else 404)

    do_HEAD = do_GET = do_PUT = do_POST = _handle  # noqa: N815  # the names are http.server's

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Answers]]:
    """The registry's class; the credentials for it are stored."""

    class Own(Answers):
        blobs: dict[str, bytes] = {}  # noqa: RUF012  # of this test only
        address = ""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Own.address = f"127.0.0.1:{server.server_address[1]}"
        (tmp_path / "config.json").write_text(json.dumps({"auths": {Own.address: {"auth": "YTpi"}}}))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        yield Own
        server.shutdown()


def test_what_a_registry_has_is_not_sent_again(tmp_path: Path, asked: Any) -> None:
    place = registry.Registry(f"{asked.address}/team/one:1")
    (tmp_path / "layer").write_bytes(LARGE)
    digest = f"sha256:{hashlib.sha256(LARGE).hexdigest()}"
    blob = layers.Blob(digest, len(LARGE), "application/octet-stream", tmp_path / "layer")
    counts: list[int] = []
    assert place.send_blob(blob, counts.append)
    assert sum(counts) == len(LARGE)
    assert asked.blobs[digest] == LARGE
    assert not place.send_blob(blob, counts.append)
    place.send_manifest(layers.make_blob(b"{}", soci.MANIFEST), by_tag=True)
    assert asked.blobs["/v2/team/one/manifests/1"] == b"{}"


def test_the_words_of_a_registry_are_reported(asked: Any) -> None:
    asked.refuses = True
    place = registry.Registry(f"{asked.address}/team/one:1")
    with pytest.raises(PushError, match="403 quota is used up"):
        place.send_blob(layers.make_blob(b"x", "text/plain"), lambda _: None)


class Engine:
    """A Docker with one image, which counts how often it is saved."""

    def __init__(self, size: int) -> None:
        self.images, self.attrs, self.saves = self, {"Size": size}, 0

    def get(self, _: str) -> Engine:
        return self

    def save(self, chunk_size: int) -> Iterator[bytes]:
        self.saves += 1
        return iter([save(make_tar({"opt/text": b"words"}))])


def push_to(engine: Engine) -> push.Pushed:
    stored = push.Format("zstd")
    return push.push_image(engine, "a:1", "host/a:1", Console(quiet=True), lambda _: None, stored)  # type: ignore[arg-type]


def test_an_image_is_compressed_once_for_all_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[soci.Publication] = []

    def send(publication: soci.Publication, target: str, console: Console) -> str:
        sent.append(publication)
        if len(sent) < 3:
            raise PushError("('Connection aborted.', RemoteDisconnected())")
        return "sha256:1"

    monkeypatch.setattr(push, "_send", send)
    engine = Engine(size=10_000)
    pushed = push_to(engine)
    assert (pushed.digest, pushed.tries, engine.saves) == ("sha256:1", 3, 1)
    assert len(sent[0].blobs) == 2  # a layer and the configuration


def test_a_disk_without_room_for_the_layers_is_reported_first() -> None:
    engine = Engine(size=1 << 60)
    with pytest.raises(DiskError, match="set TMPDIR"):
        push_to(engine)
    assert not engine.saves


def test_a_lazy_image_with_zstd_is_refused() -> None:
    with pytest.raises(UsageError, match="clients of SOCI read gzip only"):
        images.push_images("localhost:1", ["pytorch"], compression="zstd", lazy=True)
