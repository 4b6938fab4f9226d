"""Reads the steps of images from the Jinja templates in dockerfiles/, and generates the committed files.

These are Dockerfiles and JSON schemas. The same templates, tables and image give the same text.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jinja2
import jinja2.exceptions
import jinja2.meta
import jinja2.sandbox

from shoal.errors import SpecError
from shoal.limits import MOST_LOCK, read_file, read_project_file
from shoal.matrix import yaml_file
from shoal.matrix.project import CHILD_LAYERS, LAYERS, Project
from shoal.matrix.spec import BuildFile, DroppedFile, ImageSpec, NcclPlugin, VersionsFile
from shoal.matrix.yaml_file import StrictModel
from shoal.sources import packages
from shoal.sources.steps import FILES, BuildStep, StepCollector, write_dockerfile

SYSTEM_PACKAGES = ("ca-certificates", "python3", "python3-venv")
"""The Debian packages of every image."""
_DROPPED = "dropped.yml"
_PLUGIN = "plugin"
"""The folder of the build context with NCCL's plugin."""


def read_steps(project: Project, image: ImageSpec, *, bytecode: bool = False) -> tuple[BuildStep, ...]:
    """Returns the steps of `image`, as its template declares them.

    Args:
        bytecode: Whether the context has the bytecode of our packages, so that no step compiles them.

    Raises:
        SpecError: If a template is missing, is wrong, or uses a name that is not defined (StrictUndefined). Also if
            text is outside of a step, or a step uses an input that it does not note, or a folder without files.
    """
    name = f"{image.recipe}.j2"
    collector = StepCollector()
    variables = {
        "image": _describe(image),
        "system_packages": SYSTEM_PACKAGES,
        "site_packages": f"/{packages.site_packages(image.python_version)}",
        "compiled": packages.COMPILED["library"],
        "dropped": [glob for entry in read_dropped(project).dropped for glob in entry.files],
        "bytecode": bytecode,
    }
    try:
        rest = _environment(project).get_template(name).render(variables | collector.functions())
    except jinja2.TemplateNotFound as error:
        known = ", ".join(sorted(path.name for path in project.templates.glob("*.j2")))
        raise SpecError(
            f"{project.templates}: no template {error.name}. Allowed: {known}. Fix: correct the name"
        ) from error
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"{error.filename}:{error.lineno}: {error.message}. Fix: correct this line") from error
    except SpecError:
        raise
    except jinja2.exceptions.SecurityError as error:
        fix = "use only the image's values and the functions of macros.j2"
        raise SpecError(f"{project.templates / name}: not allowed in a template: {error}. Fix: {fix}") from error
    except Exception as error:  # a template can raise any: it divides by zero, or calls itself without an end
        raise SpecError(
            f"{project.templates / name}: {error or type(error).__name__}. Fix: correct the template"
        ) from error
    read_own_files(project, image, collector.steps)
    if rest.strip():
        where = f"{project.templates / name}: {rest.strip()[:60]!r}"
        raise SpecError(where + " is outside of a step. Fix: put it between {% call step('NAME') %} and {% endcall %}")
    return tuple(collector.steps)


def _known_folders(image: ImageSpec) -> set[str]:
    """Returns the folders of an image's build context that are not in dockerfiles/files/."""
    return {"debian", "engine", *(CHILD_LAYERS if image.extends else {*LAYERS, *packages.PACKAGES})}


def read_own_files(project: Project, image: ImageSpec, steps: Iterable[BuildStep]) -> dict[str, dict[str, bytes]]:
    """Returns the project's own files that the steps of an image read, by folder and by path in it.

    Raises `SpecError` if a folder has none, or something else than files and directories.
    """
    found = {}
    for step in steps:
        for folder in {*step.folders} - _known_folders(image):
            if folder == _PLUGIN and image.plugin:
                found[folder] = _read_plugin(project, image.plugin)
                continue
            found[folder] = _read_files(project.templates / "files" / folder)
            if not found[folder]:
                problem = f"Step {step.name!r}: the folder {folder} has no files"
                raise SpecError(f"{problem}. Fix: put them into the directory {FILES}/{folder}")
    return found


def _read_plugin(project: Project, plugin: NcclPlugin) -> dict[str, bytes]:
    """Returns NCCL's plugin by the name that steps use. Raises `SpecError` if it is missing, too large, or another."""
    path = project.root / plugin.file
    fix = f"Fix: name its path and the output of sha256sum under nccl_plugin in {project.buildspec.name}"
    try:
        content = read_file(path, MOST_LOCK, follow=True)
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: NCCL's plugin cannot be read: {error}. {fix}") from error
    if (found := hashlib.sha256(content).hexdigest()) != plugin.sha256:
        raise SpecError(f"{path}: its SHA-256 is {found}, and nccl_plugin says {plugin.sha256}. {fix}")
    return {"libnccl-net.so" if plugin.file.endswith(".so") else "archive": content}


def _read_files(root: Path) -> dict[str, bytes]:
    """Returns the files in a directory by path; none if it does not exist."""
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink() or not path.is_dir():
            try:
                found[path.relative_to(root).as_posix()] = read_file(path, MOST_LOCK)
            except ValueError as error:
                raise SpecError(f"{path}: {error}. Fix: put a smaller file, and no link, in its place") from error
    return found


def render_dockerfile(project: Project, image: ImageSpec, steps: Iterable[BuildStep] | None = None) -> str:
    """Returns the Dockerfile of `image`, made of `steps` or else of its template's steps.

    Raises `SpecError` if the template is missing or wrong.
    """
    base = image.extends or image.system.upstream
    steps = read_steps(project, image) if steps is None else steps
    return write_dockerfile(steps, f"dockerfiles/{image.recipe}.j2", base)


def read_dropped(project: Project) -> DroppedFile:
    """Returns the files of wheels that images leave out; none without dropped.yml.

    Raises `SpecError` with file, line and key.
    """
    path = project.templates / _DROPPED
    return yaml_file.read_yaml(path, DroppedFile)[0] if path.exists() else DroppedFile(dropped=())


def read_templates(project: Project, image: ImageSpec) -> dict[str, bytes]:
    """Returns the template of `image`, those that it extends, includes or imports, and dropped.yml, by name.

    Files that do not exist are left out.
    """
    wanted = [_DROPPED, f"{image.recipe}.j2"]
    found: dict[str, bytes] = {}
    while wanted:
        name = wanted.pop()
        if name not in found and (source := _load_template(project, name)) is not None:
            found[name] = source.encode()
            wanted += _referenced(project, source) if name != _DROPPED else []
    return found


@functools.cache
def _referenced(project: Project, source: str) -> list[str]:
    """Returns the templates that a template's source extends, includes or imports."""
    return [name for name in jinja2.meta.find_referenced_templates(_environment(project).parse(source)) if name]


@functools.cache
def _environment(project: Project) -> jinja2.Environment:
    """Templates of others must not run code, so they get no attribute that leads to Python's insides."""
    return jinja2.sandbox.ImmutableSandboxedEnvironment(
        loader=jinja2.FunctionLoader(functools.partial(_load_source, project)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def _describe(image: ImageSpec) -> dict[str, Any]:
    """Returns the values of an image for templates: its methods, such as pydantic's, can read files and run code."""
    properties = [name for name, value in vars(ImageSpec).items() if isinstance(value, property)]
    return image.model_dump() | {name: getattr(image, name) for name in properties}


def _load_source(project: Project, name: str) -> tuple[str, str, None] | None:
    """Returns the source and the path of a template, as Jinja's loaders do; None if there is none."""
    source = _load_template(project, name)
    return None if source is None else (source, str(project.templates / name), None)


def _load_template(project: Project, name: str) -> str | None:
    """Returns the text of a file in dockerfiles/; None without it. Raises `SpecError` if it leaves the directory."""
    path = project.templates / name
    if not path.resolve().is_relative_to(project.templates.resolve()):
        raise SpecError(f"{path}: leaves {project.templates}. Fix: copy the file into that directory")
    return read_project_file(path) if path.exists() else None


def render_all(project: Project, images: Iterable[ImageSpec]) -> dict[Path, str]:
    """Returns the text of all generated files by path: the images' Dockerfiles, and the schemas for editors.

    Raises `SpecError` if a template is missing or wrong.
    """
    schemas: dict[str, type[StrictModel]] = {"buildspec": BuildFile, "versions": VersionsFile, "dropped": DroppedFile}
    return {project.rendered(image): render_dockerfile(project, image) for image in images} | {
        project.schema(name): json.dumps(model.model_json_schema(), indent=2) + "\n" for name, model in schemas.items()
    }


@dataclass(frozen=True)
class GeneratedFile:
    """A generated file: the `same` as before, `written`, or `stale` and not written."""

    path: Path
    state: Literal["same", "written", "stale"]

    def __str__(self) -> str:
        return f"{self.state:<7} {self.path}"


def _is_fresh(path: Path, text: str) -> bool:
    """Returns whether a file has this text. Raises `SpecError` if something else than a text file is there."""
    return path.exists() and read_project_file(path) == text


def check_files(outputs: Mapping[Path, str]) -> list[GeneratedFile]:
    """Returns the state of each generated file, given the texts by path; writes nothing."""
    return [GeneratedFile(path, "same" if _is_fresh(path, text) else "stale") for path, text in outputs.items()]


def write_files(outputs: Mapping[Path, str]) -> list[GeneratedFile]:
    """Writes the generated files that are stale, given the texts by path, and returns the state of each file."""
    results = []
    for path, text in outputs.items():
        fresh = _is_fresh(path, text)
        if not fresh:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        results.append(GeneratedFile(path, "same" if fresh else "written"))
    return results
