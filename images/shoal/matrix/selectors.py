"""Finds the images that the arguments of a command name: tags, frameworks and globs.

A glob matches an image's whole tag, such as `pytorch-training:2.0.1-gpu-py311-cu117-debian12`. It may have `-` in place
of `:`. The name of a framework means its default image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from shoal.errors import UsageError, did_you_mean


def choose_tags(
    tags: Iterable[str],
    defaults: Mapping[str, str],
    wanted: Iterable[str] = (),
    skip: Iterable[str] = (),
    excluded: Sequence[str] = (),
) -> list[str]:
    """Returns the tags that match `wanted` (if empty: all tags) and not `skip`, each once, in the order of `wanted`.

    Words are as in `match_word`. Raises `UsageError` if a word matches no tag, or no tag is left.
    """
    known = list(tags)
    chosen = [tag for word in wanted for tag in match_word(word, known, defaults, excluded)] or known
    left_out = {tag for word in skip for tag in match_word(word, known, defaults)}
    kept = [tag for tag in dict.fromkeys(chosen) if tag not in left_out]
    if not kept:
        raise UsageError("--skip leaves no image. Fix: leave it out, or name fewer images in it")
    return kept


def match_word(word: str, tags: Iterable[str], defaults: Mapping[str, str], excluded: Sequence[str] = ()) -> list[str]:
    """Returns the tags that one word matches: a tag, a glob, or a framework with its tag in `defaults`.

    Raises `UsageError`, with the nearest names and all choices, if there is none. `excluded` has the tags of images
    that buildspec.yml leaves out.
    """
    known = list(tags)
    if found := [tag for tag in known if matches(defaults.get(word, word), tag)]:
        return found
    if out := [tag for tag in excluded if matches(word, tag) or tag.startswith(f"{word}-training:")]:
        raise UsageError(
            f"No image {word!r} in buildspec.yml: its axes or exclude leave out {out[0]}, which versions.yml"
            " defines. Fix: add the values of this tag to the axes, such as its framework"
        )
    choices = [*defaults, *known]
    hint = did_you_mean(word, choices, limit=3, cutoff=0.5)
    own = "For an image of your own: docker build, and docker tag and docker push instead of shoal push."
    raise UsageError("\n  ".join([f"No image {word!r} in buildspec.yml.{hint} {own} Fix: use one of these:", *choices]))


def match_one(word: str, tags: Iterable[str], defaults: Mapping[str, str], excluded: Sequence[str] = ()) -> str:
    """Returns the tag that `word` matches. Raises `UsageError` if it matches none or several."""
    found = match_word(word, tags, defaults, excluded)
    if len(found) > 1:
        raise UsageError("\n  ".join([f"{word!r} matches {len(found)} images. Fix: use one of these tags:", *found]))
    return found[0]


def matches(glob: str, tag: str) -> bool:
    """Returns whether a glob matches a whole tag; `-` and `:` are the same in both."""
    return fnmatchcase(tag.replace(":", "-"), glob.replace(":", "-"))
