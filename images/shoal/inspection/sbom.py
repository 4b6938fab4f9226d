"""A bill of materials in the form of CycloneDX 1.5. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from shoal.inspection.facts import Contents, Distribution, Package

_NAMESPACE = uuid.UUID("5f2f6a4e-5d1c-4c63-9c0a-3f0d6f0e8f11")


def cyclonedx(contents: Contents) -> dict[str, Any]:
    """Return the document. The same image gives the same: its serial number follows from the image's digest."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(_NAMESPACE, contents.id)}",
        "version": 1,
        "metadata": {
            "timestamp": contents.created,
            "component": {
                "type": "container",
                "bom-ref": contents.tag,
                "name": contents.tag.partition(":")[0],
                "version": contents.tag.partition(":")[2],
                "hashes": [{"alg": "SHA-256", "content": contents.id.removeprefix("sha256:")}],
            },
        },
        "components": list(_components(contents)),
    }


def _components(contents: Contents) -> Iterator[dict[str, Any]]:
    system = contents.system
    yield {
        "type": "operating-system",
        "bom-ref": "os",
        "name": system.get("ID", ""),
        "version": system.get("VERSION_ID", ""),
        "description": system.get("PRETTY_NAME", ""),
    }
    release = f"{system.get('ID', '')}-{system.get('VERSION_ID', '')}"
    for package in contents.packages:
        yield _debian(package, system.get("ID", "debian"), release)
    for distribution in contents.distributions:
        yield _python(distribution)


def _debian(package: Package, vendor: str, release: str) -> dict[str, Any]:
    version = quote(package.version, safe=".+-~")
    purl = f"pkg:deb/{vendor}/{quote(package.name, safe='+')}@{version}?arch={package.architecture}&distro={release}"
    source = [{"name": "debian:source", "value": package.source}]
    return {**_library(package.name, package.version, purl, package.licence), "properties": source}


def _python(distribution: Distribution) -> dict[str, Any]:
    name = canonicalize_name(distribution.name)
    purl = f"pkg:pypi/{name}@{quote(distribution.version, safe='.')}"
    return _library(name, distribution.version, purl, distribution.licence)


def _library(name: str, version: str, purl: str, licence: str) -> dict[str, Any]:
    licences = {"licenses": [{"license": {"name": licence}}]} if licence else {}
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **licences}
