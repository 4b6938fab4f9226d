"""Makes a bill of materials of an image, in the CycloneDX 1.5 format.

It lists the operating system and the Debian and Python packages, but no files.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from shoal.image.facts import Distribution, ImageFacts, Package

_NAMESPACE = uuid.UUID("5f2f6a4e-5d1c-4c63-9c0a-3f0d6f0e8f11")


def make_sbom(facts: ImageFacts) -> dict[str, Any]:
    """Returns the bill of materials as a JSON object.

    It is the same for the same image: its serial number is derived from the image's digest. A package that an image has
    twice is listed once, as CycloneDX asks.
    """
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, facts.id)}",
        "version": 1,
        "metadata": {
            "timestamp": facts.created,
            "component": {
                "type": "container",
                "bom-ref": facts.tag,
                "name": facts.tag.partition(":")[0],
                "version": facts.tag.partition(":")[2],
                "hashes": [{"alg": "SHA-256", "content": facts.id.removeprefix("sha256:")}],
            },
        },
        "components": list({component["bom-ref"]: component for component in _components(facts)}.values()),
    }


def _components(facts: ImageFacts) -> Iterator[dict[str, Any]]:
    system = facts.system
    yield {
        "type": "operating-system",
        "bom-ref": "os",
        "name": system.get("ID", ""),
        "version": system.get("VERSION_ID", ""),
        "description": system.get("PRETTY_NAME", ""),
    }
    release = f"{system.get('ID', '')}-{system.get('VERSION_ID', '')}"
    for package in facts.packages:
        yield _debian_component(package, system.get("ID", "debian"), release)
    for distribution in facts.distributions:
        yield _python_component(distribution)


def _debian_component(package: Package, vendor: str, release: str) -> dict[str, Any]:
    vendor, name, version, architecture, distro = (
        quote(text, safe=".+-~") for text in (vendor, package.name, package.version, package.architecture, release)
    )
    purl = f"pkg:deb/{vendor}/{name}@{version}?arch={architecture}&distro={distro}"
    source = [{"name": "debian:source", "value": package.source}]
    return {**_component(package.name, package.version, purl, package.licence), "properties": source}


def _python_component(distribution: Distribution) -> dict[str, Any]:
    name = canonicalize_name(distribution.name)
    purl = f"pkg:pypi/{name}@{quote(distribution.version, safe='.')}"
    return _component(name, distribution.version, purl, distribution.licence)


def _component(name: str, version: str, purl: str, licence: str) -> dict[str, Any]:
    licences = {"licenses": [{"license": {"name": licence}}]} if licence else {}
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **licences}
