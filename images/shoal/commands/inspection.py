"""What is inside an image, and whose its bytes are."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import docker
import typer
from rich.console import Console

from shoal import docker_client
from shoal.commands import completion, output
from shoal.commands.common import AsJson, app, console, matrix_here, reports, say, screen, tag_of, tell_written
from shoal.docker_client import images
from shoal.docker_client.containers import strip_controls
from shoal.errors import ImageError, VulnerabilityError
from shoal.inspection import advisories, differences, facts, manifest, sbom
from shoal.report import output_files, size

_SIZE_HELP = "A tag, a framework of buildspec.yml, any image of the engine, or a .tar that docker save wrote."
Foreign = Annotated[
    str,
    typer.Argument(metavar="IMAGE", help="A framework of buildspec.yml, or any tag.", autocompletion=completion.images),
]
ToFile = Annotated[Path | None, typer.Option("-o", "--output", help="Into this file, not to standard output.")]


@app.command("sbom")
def bill_of_materials(image: Foreign, file: ToFile = None) -> None:
    """Write what is inside an image as a CycloneDX bill of materials: Debian's packages, Python's, their licences."""
    tag = tag_of(image)
    _check(file)
    _give(output.text(sbom.cyclonedx(facts.read(_engine_with(tag), tag))), file, console)


@app.command("manifest")
def show_manifest(image: Foreign, file: ToFile = None, as_json: AsJson = False) -> None:
    """Write what is inside an image as a page of Markdown, and whether its tag tells the truth."""
    tag = tag_of(image)
    _check(file)
    matrix = matrix_here()
    known = next((one for one in (matrix.images if matrix else ()) if one.tag == tag), None)
    found = manifest.of(facts.read(_engine_with(tag), tag), known)
    _give(output.text(found) if as_json else manifest.markdown(found), file, screen(as_json))


@app.command("audit")
def audit_image(
    image: Foreign,
    known: Annotated[Path, typer.Option("--advisories", help="A file of `pip-audit --format json`.")],
    allow: Annotated[Path | None, typer.Option(help="YAML: accepted: [{id, reason, expires}].")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which Python packages in an image have known vulnerabilities; nothing is asked over a network."""
    tag = tag_of(image)
    accepted = advisories.read_accepted(allow)
    told = advisories.read(known)
    inside = facts.read(_engine_with(tag), tag)
    found = advisories.findings(inside, told, accepted)
    unused, unaudited = advisories.unused(found, accepted), advisories.unaudited(inside, told)
    today = datetime.date.today()
    if as_json:
        findings = [{**vars(finding), "counts": finding.counts(today)} for finding in found]
        output.write({"tag": tag, "findings": findings, "unused": unused, "unaudited": unaudited})
    progress = screen(as_json)
    for finding in found:
        say(strip_controls(f"{'✗' if finding.counts(today) else '-'} {finding}"), progress)
    for entry in unused:
        say(f"! {allow}: {entry.id} accepts nothing that is in {tag}", progress)
    if unaudited:
        say(strip_controls(f"! {known} says nothing of {len(unaudited)} packages: {' '.join(unaudited)}"), progress)
    if count := sum(finding.counts(today) for finding in found):
        raise VulnerabilityError(
            f"{tag}: {count} known vulnerabilities. What to do: take a release without them (dockerfiles/versions.yml,"
            " shoal lock), or accept them in a file (--allow) with a reason and a day on which that ends"
        )
    say(f"✓ {tag}: nothing known of it that is not accepted", progress)


def _engine_with(*tags: str) -> docker.DockerClient:
    """Return a client of the engine. Raises ImageError, with what to do, for an image that it does not have."""
    client = docker_client.connect()
    for tag in tags:
        if images.find_image(client, tag) is None:
            raise ImageError(images.describe_missing(client, tag, matrix_here()))
    return client


def _check(file: Path | None) -> None:
    """Raise UsageError for a file that cannot be written, before the long reading."""
    if file is not None:
        output_files.targets(file, as_json=False, read=())


def _give(text: str, file: Path | None, progress: Console) -> None:
    if file is None:
        print(text)
    else:
        output_files.write(file, {file: text + "\n"})
        tell_written([file], progress)


@reports.command("size")
def report_size(
    image: Annotated[str, typer.Argument(help=_SIZE_HELP)],
    other: Annotated[str | None, typer.Argument(help="Another, to be compared with the first.")] = None,
    page: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("size.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Also write the inventories, beside the page.")] = False,
) -> None:
    """Show whose the bytes of an image are, by layer and by package, and how two images differ.

    Sizes are those of the layers' tars; compressed is what gzip makes of them, as a registry ships it.
    """
    words = [image, other] if other else [image]
    inventories, written = size.report(words, matrix_here(), page, as_json, console)
    size.show(console, inventories)
    tell_written(written)


@reports.command("differences")
def report_differences(
    image: Foreign,
    other: Annotated[str, typer.Argument(help="Another, such as the same tag from another machine.")],
    check: Annotated[
        bool, typer.Option("--check", help="Fail where they differ in what two builds of one commit do not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say in which files two images differ, and whether two builds of one commit may.

    What a container of each sees is compared: contents, owners, modes, extended attributes and times. For an image of
    another machine: docker save there, docker load and docker tag here.
    """
    tags = tag_of(image), tag_of(other)
    client = _engine_with(*tags)
    with screen(as_json).status(f"reading {' and '.join(tags)}"):
        found = differences.compare(*tags, *(differences.read(client, tag) for tag in tags))
    if as_json:
        output.write({**vars(found), "unexpected": found.unexpected, "unexplained": found.unexplained})
    else:
        say(strip_controls("\n".join(differences.told(found))))
    if check:
        found.check()
