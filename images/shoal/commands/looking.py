"""What is inside an image, and whose its bytes are."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from shoal import completion, engine
from shoal.commands.common import app, console, matrix_here, reports, say, tag_of, tell_written
from shoal.errors import VulnerableError
from shoal.inside import advisories, contents, manifest, sbom
from shoal.report import size

_SIZE_HELP = "A tag, a framework of buildspec.yml, any image of the engine, or a .tar that docker save wrote."
Foreign = Annotated[
    str,
    typer.Argument(metavar="IMAGE", help="A framework of buildspec.yml, or any tag.", autocompletion=completion.images),
]


@app.command("sbom")
def bill_of_materials(image: Foreign, output: Annotated[Path | None, typer.Option("-o", "--output")] = None) -> None:
    """Write what is inside an image as a CycloneDX bill of materials: Debian's packages, Python's, their licences."""
    tag = tag_of(image)
    document = sbom.cyclonedx(contents.read(engine.connect(), tag))
    _give(json.dumps(document, indent=2), output)


@app.command("manifest")
def show_manifest(image: Foreign, output: Annotated[Path | None, typer.Option("-o", "--output")] = None) -> None:
    """Write what is inside an image as a page of Markdown, and whether its tag tells the truth."""
    tag = tag_of(image)
    matrix = matrix_here()
    known = next((one for one in (matrix.images if matrix else ()) if one.tag == tag), None)
    _give(manifest.markdown(contents.read(engine.connect(), tag), known), output)


@app.command("audit")
def audit_image(
    image: Foreign,
    known: Annotated[Path, typer.Option("--advisories", help="A file of `pip-audit --format json`.")],
    allow: Annotated[Path | None, typer.Option(help="YAML: accepted: [{id, reason, expires}].")] = None,
) -> None:
    """Say which Python packages in an image have known vulnerabilities; nothing is asked over a network."""
    tag = tag_of(image)
    accepted = advisories.read_accepted(allow)
    found = advisories.findings(contents.read(engine.connect(), tag), advisories.read(known), accepted)
    today = datetime.date.today()
    for finding in found:
        say(f"{'✗' if finding.counts(today) else '-'} {finding}")
    for entry in advisories.unused(found, accepted):
        say(f"! {allow}: {entry.id} accepts nothing that is in {tag}")
    if count := sum(finding.counts(today) for finding in found):
        raise VulnerableError(
            f"{tag}: {count} known vulnerabilities. What to do: take a release without them (dockerfiles/versions.yml,"
            " shoal lock), or accept them in a file (--allow) with a reason and a day on which that ends"
        )
    say(f"✓ {tag}: nothing known of it that is not accepted")


def _give(text: str, output: Path | None) -> None:
    if output is None:
        print(text)
    else:
        output.write_text(text + "\n")
        tell_written([output])


@reports.command("size")
def report_size(
    image: Annotated[str, typer.Argument(help=_SIZE_HELP)],
    other: Annotated[str | None, typer.Argument(help="Another, to be compared with the first.")] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("size.html"),
    as_json: Annotated[bool, typer.Option("--json", help="Also write the inventories, beside the page.")] = False,
) -> None:
    """Show whose the bytes of an image are, by layer and by package, and how two images differ.

    Sizes are those of the layers' tars; compressed is what gzip makes of them, as a registry ships it.
    """
    words = [image, other] if other else [image]
    inventories, written = size.report(words, matrix_here(), output, as_json, console)
    size.show(console, inventories)
    tell_written(written)
