"""A checkout of the project: how it is found, the paths in it, and the names of the pip layers that have locks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError
from shoal.matrix.spec import ImageSpec

LAYERS = ("cuda", "framework", "mpi", "aws")
"""The pip layers of an image, the one that changes least first. Each has a lock file."""
CHILD_LAYERS = ("framework",)
"""The pip layers of an image that extends another: it installs only what the other does not have."""


@dataclass(frozen=True)
class Project:
    """A checkout, by its root directory."""

    root: Path

    @property
    def buildspec(self) -> Path:
        return self.root / "buildspec.yml"

    @property
    def templates(self) -> Path:
        """The directory of the templates, and of the locks, schemas and rendered Dockerfiles."""
        return self.root / "dockerfiles"

    @property
    def cache(self) -> Path:
        return self.root / ".cache" / "shoal"

    def schema(self, name: str) -> Path:
        return self.templates / "schema" / f"{name}.json"

    def lock_directory(self, spec: ImageSpec) -> Path:
        """Return the directory of an image's locks. Its variants share them."""
        return self.templates / "requirements" / f"{spec.repository}-{spec.runtime_version_tag}"

    def rendered(self, spec: ImageSpec) -> Path:
        """Return the path of an image's generated Dockerfile."""
        return self.templates / "rendered" / spec.repository / spec.version_tag / "Dockerfile"


def find(start: Path) -> Project:
    """Return the project that contains `start`. Raises `UsageError` if no parent directory has a buildspec.yml."""
    for directory in (start, *start.parents):
        if (directory / "buildspec.yml").is_file():
            return Project(directory)
    raise UsageError(f"no buildspec.yml in {start} or above it. Run from a checkout of the project.")
