"""Which images the words of a command mean: tags, frameworks and globs.

A glob is matched against an image's whole tag, such as `pytorch-training:2.0.1-gpu-py311-cu117-debian12`; `-` may stand
in the place of its `:`. A framework alone means its default image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from shoal.errors import UsageError, did_you_mean


def choose(
    tags: Iterable[str], defaults: Mapping[str, str], wanted: Iterable[str] = (), skip: Iterable[str] = ()
) -> list[str]:
    """Return the tags that `wanted` means (none: all of them), each once and in its order, less what `skip` means.

    Raises `UsageError` for a word that means no tag, and where nothing is left.
    """
    known = list(tags)
    chosen = [tag for word in wanted for tag in meant(word, known, defaults)] or known
    left_out = {tag for word in skip for tag in meant(word, known, defaults)}
    kept = [tag for tag in dict.fromkeys(chosen) if tag not in left_out]
    if not kept:
        raise UsageError("--skip leaves no image. Leave it out, or name fewer images in it")
    return kept


def meant(word: str, tags: Iterable[str], defaults: Mapping[str, str]) -> list[str]:
    """Return the tags that one word means. Raises `UsageError` with the nearest names when there is none."""
    known = list(tags)
    if found := [tag for tag in known if matches(defaults.get(word, word), tag)]:
        return found
    choices = [*defaults, *known]
    hint = did_you_mean(word, choices, limit=3, cutoff=0.3)
    raise UsageError("\n  ".join([f"no image {word!r} in buildspec.yml.{hint} Choices:", *choices]))


def only(word: str, tags: Iterable[str], defaults: Mapping[str, str]) -> str:
    """Return the one tag that `word` means. Raises `UsageError` when that is none or several."""
    found = meant(word, tags, defaults)
    if len(found) > 1:
        raise UsageError("\n  ".join([f"{word!r} means several images, and one is wanted. Choices:", *found]))
    return found[0]


def matches(glob: str, tag: str) -> bool:
    return fnmatchcase(tag.replace(":", "-"), glob.replace(":", "-"))
