"""`ImageSpec` → Dockerfile text, through the Jinja templates in dockerfiles/. Pure: same input, same text."""

from __future__ import annotations

import jinja2

from shoal.errors import SpecError
from shoal.project import Project
from shoal.spec import ImageSpec

SYSTEM_PACKAGES = ("ca-certificates", "python3", "python3-venv")
"""What every image takes from Debian."""


def render(project: Project, image: ImageSpec, *, buildkit: bool = True) -> str:
    """Return the Dockerfile of `image`; `buildkit=False` gives the variant for the classic builder.

    Raises `SpecError` for a missing template and for a name that no one defined (StrictUndefined).
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(project.templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    name = f"{image.framework}.j2"
    try:
        template = environment.get_template(name)
        text = template.render(image=image, system_packages=SYSTEM_PACKAGES, buildkit=buildkit)
    except jinja2.TemplateNotFound as error:
        known = ", ".join(sorted(path.name for path in project.templates.glob("*.j2")))
        raise SpecError(f"{project.templates}: no template {error.name}; there are: {known}") from error
    except jinja2.TemplateSyntaxError as error:
        raise SpecError(f"{error.filename}:{error.lineno}: {error.message}") from error
    except jinja2.UndefinedError as error:
        raise SpecError(f"{project.templates / name}: {error.message}") from error
    return text.lstrip()


def write(project: Project, image: ImageSpec) -> bool:
    """Write the image's rendered Dockerfile; return whether it changed."""
    path, text = project.rendered(image), render(project, image)
    if path.is_file() and path.read_text() == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return True
