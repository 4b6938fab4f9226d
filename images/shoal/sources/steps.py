"""The steps of an image as data: a template declares them, and the Dockerfile is written from them."""

from __future__ import annotations

import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from shoal.errors import SpecError

_MOUNTED = re.compile(r"\btype=bind,source=(\w+)")
_COPY = re.compile(r"^(?:ADD|COPY)((?:\s+--\S+)*)\s+(.+)$", re.MULTILINE)
_WORD = re.compile(r'[^\s",\[\]]+')
_COPIED = re.compile(r"(\w+)(?:/|$)")
_STAGE = re.compile(r"\bfrom=(\w+)")
_DEBIAN = re.compile(r"[a-z0-9][a-z0-9.+-]+")
_INSTALL = re.compile(r"\bapt-get install\b")
_FREE_FOLDERS = frozenset({"machine"})
"""The network settings of this machine, which do not change the image."""
FILES = "dockerfiles/files"
"""The directory with the folders of a project's own files."""


@dataclass(frozen=True)
class BuildStep:
    """One step of a Dockerfile: its instructions and all that goes into them."""

    name: str
    text: str
    """The instructions, without comments."""
    note: str = ""
    """A comment for the Dockerfile, after the name."""
    begins: str | None = None
    """The build stage that begins with this step; empty for the last stage, which becomes the image."""
    folders: tuple[str, ...] = ()
    """Folders of the build context that the instructions read. `machine` is left out: it does not change the image."""
    stages: tuple[str, ...] = ()
    """Build stages that the instructions copy from."""
    packages: tuple[tuple[str, ...], ...] = ()
    """Debian packages that the instructions install, one entry for each apt-get."""


class StepCollector:
    """Collects the steps that a template declares with `step`, and the inputs of each.

    The other functions note an input and return the text for the instruction. A step with an input that was not noted
    is an error, because a change of that input would leave the image up to date.
    """

    def __init__(self) -> None:
        self.steps: list[BuildStep] = []
        self._begins: str | None = None
        self._noted: defaultdict[str, list[str]] = defaultdict(list)
        self._packages: list[tuple[str, ...]] = []

    def functions(self) -> dict[str, Callable[..., str]]:
        """Returns the functions by the names that templates call them."""
        return {
            "step": self._step,
            "begin_stage": self._begin_stage,
            "folder": self._folder,
            "stage": self._stage,
            "debian": self._debian,
        }

    def _step(self, name: str, note: str = "", *, caller: Callable[[], str]) -> str:
        """Collects a step with its noted inputs. Jinja passes `caller` for a call block. Returns no text."""
        self._begins, self._noted, self._packages = None, defaultdict(list), []
        text = caller().strip()
        folders, stages = tuple(self._noted["folder"]), tuple(self._noted["stage"])
        used = {*_MOUNTED.findall(text), *_find_copied(name, text)} - _FREE_FOLDERS
        _check_inputs(name, "folder", used, folders)
        _check_inputs(name, "stage", {*_STAGE.findall(text)}, stages)
        if len(_INSTALL.findall(text)) != len(self._packages):
            raise SpecError(f"Step {name!r}: apt-get install without a list. Fix: name the packages with debian([...])")
        self.steps.append(BuildStep(name, text, note, self._begins, folders, stages, tuple(self._packages)))
        return ""

    def _begin_stage(self, name: str = "") -> str:
        """Notes that the step begins a build stage, and returns its FROM instruction."""
        self._begins = name
        return f"FROM ${{BASE}} AS {name}" if name else "FROM ${BASE}"

    def _folder(self, name: str) -> str:
        """Notes a folder of the build context that the step reads, and returns its name."""
        self._noted["folder"].append(name)
        return name

    def _stage(self, name: str) -> str:
        """Notes a build stage that the step copies from, and returns its name."""
        self._noted["stage"].append(name)
        return name

    def _debian(self, names: Iterable[str]) -> str:
        """Notes Debian packages, and returns their names. Raises `SpecError` for another text."""
        self._packages.append(tuple(names))
        if strange := [name for name in self._packages[-1] if not _DEBIAN.fullmatch(name)]:  # a shell gets them
            raise SpecError(f"debian({strange[0]!r}): not the name of a Debian package. Fix: correct it")
        return " ".join(self._packages[-1])


def _find_copied(step: str, text: str) -> Iterator[str]:
    """Yields the folders that COPY and ADD read. Addresses, and text in the Dockerfile, are left out."""
    for flags, words in _COPY.findall(text.replace("\\\n", " ")):
        for source in () if "--from=" in flags else _WORD.findall(words)[:-1]:
            if "://" in source or source.startswith("<<"):
                continue
            if not (match := _COPIED.match(source)):
                raise SpecError(
                    f"Step {step!r}: {source} is in no folder of the build context. Fix: put it into a directory of"
                    f" {FILES}, such as {FILES}/own, and copy {{{{ folder('own') }}}}/{source.rpartition('/')[2]}"
                )
            yield match[1]


def _check_inputs(step: str, function: str, used: set[str], noted: Iterable[str]) -> None:
    """Raises `SpecError` if instructions of a step use other inputs than it has noted with the function."""
    for name in sorted(used.symmetric_difference(noted)):
        problem = "is used but not noted" if name in used else "is noted but not used"
        fix = f"Fix: write {{{{ {function}({name!r}) }}}} in its place"
        raise SpecError(f"Step {step!r}: {function} {name!r} {problem}. {fix}")


def write_dockerfile(steps: Iterable[BuildStep], template: str, base: str) -> str:
    """Returns the Dockerfile of the steps.

    Args:
        template: The file that declares them, for people.
        base: The image that `${BASE}` stands for if a build does not name one.
    """
    head = f"# Written by `shoal render` from {template}. Do not edit.\nARG BASE={base}"
    return "\n\n".join([head, *(f"{_heading(step)}{step.text}" for step in steps)]) + "\n"


def _heading(step: BuildStep) -> str:
    title = f"{step.name}: {step.note}" if step.note else step.name
    return "".join(f"# {line}\n" for line in textwrap.wrap(title, 118, break_on_hyphens=False))


def one_line(command: str, width: int = 120) -> str:
    """Returns a Dockerfile instruction as one line of at most `width` characters, mounts left out."""
    words = [word for word in command.replace("\\\n", " ").split() if not word.startswith("--mount=")]
    text = " ".join(words)
    return text if len(text) <= width else text[: width - 1] + "…"
