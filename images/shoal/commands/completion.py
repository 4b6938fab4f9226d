"""Shell completion of image names: the frameworks and tags of buildspec.yml."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping
from pathlib import Path

from shoal.errors import ShoalError
from shoal.matrix import project, spec

_HEAD = "_SHOAL_COMPLETE_HEAD"
_SPLIT = "\x1f"


def join_words(environment: MutableMapping[str, str]) -> None:
    """Joins the words that bash splits at colons, so that a tag is one argument again. Changes `environment`.

    Does nothing unless bash asks for completion. The last word keeps only the part that bash will replace. The part
    before it is stored for `complete_images`.
    """
    if environment.get("_SHOAL_COMPLETE") != "complete_bash":
        return
    words = environment["COMP_WORDS"].split("\n")[: int(environment["COMP_CWORD"]) + 1]
    # An empty word after a colon was begun by a space.
    joined = re.sub(r"\n:(\n(?=.)|\Z)", f":{_SPLIT}", "\n".join(words))
    *before, last = joined.split("\n")
    head, _, part = last.rpartition(_SPLIT)
    words = [*(word.replace(_SPLIT, "") for word in before), part]
    environment.update({"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(before)), _HEAD: head})


def complete_images(incomplete: str) -> list[str]:
    """Returns the frameworks and tags that begin with `incomplete`; for bash, only the part after the last colon.

    Returns none if there are no image definitions, or if buildspec.yml is wrong.
    """
    try:
        matrix = spec.load(project.find(Path.cwd()).buildspec)
    except (ShoalError, OSError):
        return []
    head = os.environ.get(_HEAD, "")
    names = (*matrix.defaults, *(image.tag for image in matrix.images))
    return [name.removeprefix(head) for name in names if name.startswith(head + incomplete)]


def complete_jobs(incomplete: str) -> list[str]:
    """Returns the names of this user's jobs on this machine that begin with `incomplete`, running ones first."""
    from shoal.jobs.store import list_jobs  # takes longer than commands on images that repeat

    try:
        names = (each.name for each in list_jobs() if each.name.startswith(incomplete))
        return list(dict.fromkeys(filter(str.isprintable, names)))
    except OSError:
        return []


def complete_jobs_and_images(incomplete: str) -> list[str]:
    """Returns the names of jobs, and then of images, that begin with `incomplete`."""
    return [*complete_jobs(incomplete), *complete_images(incomplete)]
