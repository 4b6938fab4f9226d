"""The labels of the Open Containers Initiative that a Dockerfile cannot know. Pure; docs/decisions/labels.md.

The others (title, version) stand in the templates.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.builds.base import BaseImage
from shoal.sources.provenance import Provenance

_OCI = "org.opencontainers.image"


def oci(beneath: BaseImage, inherited: Mapping[str, str], provenance: Provenance) -> dict[str, str]:
    """Return the labels of an image on `beneath`, whose own labels it inherits.

    What is not known is left out, or emptied where the image below has it: it is said of that one.
    """
    said = {
        f"{_OCI}.base.name": beneath.name,
        f"{_OCI}.base.digest": beneath.digest,
        f"{_OCI}.revision": provenance.revision,
        f"{_OCI}.source": provenance.source,
    }
    return {name: value for name, value in said.items() if value or inherited.get(name)}
