"""What the shell offers for an IMAGE: the frameworks and tags of buildspec.yml, and nothing where there is none."""

from __future__ import annotations

import os
from pathlib import Path

from shoal import project, spec
from shoal.errors import ShoalError


def images(incomplete: str) -> list[str]:
    """Return the frameworks and tags that begin with the word under the cursor.

    bash ends a word at a colon, so it gets tags with `-` in its place, which every command takes for the same.
    """
    try:
        matrix = spec.load(project.find(Path.cwd()).buildspec)
    except (ShoalError, OSError):
        return []
    in_bash = os.environ.get("_SHOAL_COMPLETE") == "complete_bash"
    tags = [image.directory if in_bash else image.tag for image in matrix.images]
    return [name for name in (*matrix.defaults, *tags) if name.startswith(incomplete)]
