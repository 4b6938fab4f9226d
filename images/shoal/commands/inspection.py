"""Commands that inspect images: sbom, inspect, audit, size and diff."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import docker
import typer
from rich.console import Console
from rich.markup import escape

from shoal import docker_client
from shoal.clean_text import print_document
from shoal.commands import common
from shoal.commands.common import (
    INSPECT,
    AsJson,
    app,
    format_json,
    load_matrix,
    print_json,
    print_written,
    progress_console,
    resolve_tag,
)
from shoal.console import console, print_line, print_lines
from shoal.docker_client import images
from shoal.errors import CoverageError, ImageError, VulnerabilityError
from shoal.image import advisories, differences, facts, manifest, sbom, size, size_document
from shoal.report import output_files

_SIZE_HELP = "Framework from buildspec.yml, any tag that Docker has, or a .tar file written by docker save."
_ALLOW_EXAMPLE = "accepted: [{id: CVE-2026-12345, reason: not reached, expires: 2026-12-31}]"
AnyImage = Annotated[
    str,
    typer.Argument(
        metavar="IMAGE",
        help="Framework from buildspec.yml, or any tag. NAME is NAME:latest.",
        autocompletion=common.complete_images,
    ),
]
OutputFile = Annotated[Path | None, typer.Option("-o", "--output", help="Output file. Default: standard output.")]


@app.command("sbom", rich_help_panel=INSPECT, epilog="More: docs/security.md")
def write_sbom(image: AnyImage, file: OutputFile = None) -> None:
    """Write a CycloneDX bill of materials: Debian packages, Python packages and their licences.

    Example: shoal sbom pytorch -o sbom.json
    """
    tag = resolve_tag(image)
    _check_output(file)
    document = sbom.make_sbom(facts.read_facts(_connect_with_images(tag), tag))
    _write_output(format_json(document), file, console)


@app.command("inspect", rich_help_panel=INSPECT, epilog="More: docs/build.md")
def write_manifest(image: AnyImage, file: OutputFile = None, as_json: AsJson = False) -> None:
    """List the contents of an image as Markdown, and check that its tag is correct.

    Example: shoal inspect pytorch
    """
    tag = resolve_tag(image)
    _check_output(file)
    matrix = load_matrix()
    known = next((one for one in (matrix.images if matrix else ()) if one.tag == tag), None)
    found = manifest.make_manifest(facts.read_facts(_connect_with_images(tag), tag), known)
    text = format_json(found) if as_json else manifest.format_markdown(found)
    _write_output(text, file, progress_console(as_json))


@app.command("audit", rich_help_panel=INSPECT, epilog="More: docs/security.md")
def audit_image(
    image: AnyImage,
    known: Annotated[Path, typer.Option("--advisories", help="Report written by `pip-audit --format json`.")],
    allow: Annotated[
        Path | None, typer.Option(help=f"YAML file of accepted findings. Example: {_ALLOW_EXAMPLE}")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check the Python packages of an image against a pip-audit report. Needs no network.

    Debian's packages, and packages that the report lacks, are not checked: without --allow, the exit code is then 16.

    List the packages: docker run --rm TAG pip list --format freeze > packages.txt

    Find their vulnerabilities, with a network: pip-audit --disable-pip --no-deps -r packages.txt -f json -o audit.json

    Example: shoal audit pytorch --advisories audit.json --allow allow.yml
    """
    tag = resolve_tag(image)
    accepted = advisories.read_allow_list(allow)
    report = advisories.read_report(known)
    inside = facts.read_facts(_connect_with_images(tag), tag)
    found = advisories.audit(inside, report, accepted, datetime.date.today())
    if as_json:
        print_json(found)
    progress = progress_console(as_json)
    print_lines((f"{'✗' if finding.counts else '-'} {finding}" for finding in found.findings), progress)
    print_lines((f"! {allow}: {entry.id} is not in {tag}" for entry in found.unused), progress)
    if names := found.unaudited:
        print_line(f"! {known} does not cover {len(names)} packages: {' '.join(names)}", progress)
    if found.debian:
        print_line(f"! Debian's packages: not checked ({found.debian})", progress)
    if count := sum(finding.counts for finding in found.findings):
        raise VulnerabilityError(
            f"{tag}: {count} known vulnerabilities. Fix: use releases without them (dockerfiles/versions.yml, shoal"
            " lock), or accept them with a reason and an expiry date in a file for --allow"
        )
    checked = len(inside.distributions) - len(found.unaudited)
    if found.gaps:
        raise CoverageError(
            f"{tag}: no unaccepted vulnerabilities in {checked} Python packages, but not checked:"
            f" {' '.join(found.gaps)}. Fix: make a report about all packages that pip lists in the image, and"
            " accept the others by name in a file for --allow"
        )
    print_line(f"✓ {tag}: no unaccepted vulnerabilities in {checked} Python packages", progress)


def _connect_with_images(*tags: str) -> docker.DockerClient:
    client = docker_client.connect()
    for tag in tags:
        if images.find_image(client, tag) is None:
            raise ImageError(images.describe_missing(client, tag, load_matrix()))
    return client


def _check_output(file: Path | None) -> None:
    """Raises `UsageError` if the output file cannot be written, before the image is read. Writes nothing."""
    if file is not None:
        output_files.choose_files(file, as_json=False, read=())


def _write_output(text: str, file: Path | None, progress: Console) -> None:
    if file is None:
        print_document(text)
    else:
        output_files.write_files(file, {file: text + "\n"})
        print_written([file], progress)


@app.command("size", rich_help_panel=INSPECT, epilog="More: docs/size.md")
def report_size(
    image: Annotated[str, typer.Argument(help=_SIZE_HELP)],
    other: Annotated[str | None, typer.Argument(help="A later image: the changes from the first to it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers and packages use the space in an image, or how two images differ.

    Sizes count the layers' tar archives. Compressed sizes are after gzip, as in a registry.

    Example: shoal size pytorch
    """
    names = [image, other] if other else [image]
    inventories = size.read_inventories(names, load_matrix(), progress_console(as_json=True))
    if as_json:
        print_json(size_document.make_document(inventories))
    else:
        size.print_sizes(console, inventories)


@app.command("diff", rich_help_panel=INSPECT, epilog="More: docs/size.md")
def report_differences(
    image: AnyImage,
    other: Annotated[str, typer.Argument(help="Another image, such as the same tag built on another machine.")],
    check: Annotated[
        bool, typer.Option("--check", help="Fail if they differ in ways that two builds of one commit do not.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the files in which two images differ, and check whether both can be builds of one commit.

    Compares contents, owners, modes, extended attributes and times. To compare with an image of another machine, run
    docker save there, then docker load and docker tag here.

    Example: shoal diff pytorch other-machine:1 --check
    """
    tags = resolve_tag(image), resolve_tag(other)
    client = _connect_with_images(*tags)
    with progress_console(as_json).status(escape(f"reading {' and '.join(tags)}")):
        found = differences.compare_images(*tags, *(differences.read_image(client, tag) for tag in tags))
    if as_json:
        print_json({**vars(found), "unexpected": found.unexpected, "unexplained": found.unexplained})
    else:
        print_lines(differences.format_differences(found))
    if check:
        found.check()
