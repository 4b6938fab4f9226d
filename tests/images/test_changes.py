"""What a build would do, and why: from the record that an image carries against its sources."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

import docker.errors
import pytest

from shoal import docker_client
from shoal.builds.plan import Sources, gather_sources, install_own_packages, plan_builds
from shoal.docker_client import archive
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import packages
from shoal.sources.lock import Pin
from shoal.sources.record import Decision, Record, decide
from shoal.sources.steps import BuildStep

from ..tested_images import PYTORCH_CPU, PYTORCH_CU117

BASE = "debian:bookworm-slim@" + "1" * 64


@pytest.fixture(scope="module")
def own(project: Project) -> dict[str, bytes]:
    return install_own_packages(project, "3.11")


@pytest.fixture(scope="module")
def sources(project: Project, matrix: BuildSpec, own: Mapping[str, bytes]) -> Sources:
    return gather_sources(project, matrix, matrix.select("pytorch"), own)


def planned(sources: Sources, changed: Sources, base: str = BASE) -> Decision:
    return decide("x", sources.make_record(BASE).labels(), changed.make_record(base))


def edited(sources: Sources, name: str, old: str, new: str) -> Sources:
    """Return the sources with another text in one step."""
    steps = [replace(step, text=step.text.replace(old, new)) if step.name == name else step for step in sources.steps]
    assert tuple(steps) != sources.steps
    return replace(sources, steps=tuple(steps))


def with_module(layer: bytes, name: str) -> bytes:
    """Return the layer of a package that has one more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(layer)) as before, tarfile.open(fileobj=out, mode="w") as after:
        for entry in before:
            file = before.extractfile(entry)
            assert file
            after.addfile(entry, file)
        archive.add_file(after, f"{packages.site_packages('3.11')}/{name}", io.BytesIO(b""))
    return out.getvalue()


def test_nothing_changed_is_up_to_date(sources: Sources) -> None:
    assert planned(sources, sources) == Decision("x", "up to date", len(sources.make_record(BASE).steps))


def test_steps_are_named_by_their_headings(sources: Sources) -> None:
    names = [step.name for step in sources.make_record(BASE).steps]
    wanted = [
        "engine",
        "base image",
        "system",
        "CUDA cu117",
        "framework",
        "Open MPI + mpi4py",
        "boto3",
        "rehearsal",
        "checkpoint",
        "library",
        "toolkit",
    ]
    assert [name for name in names if name in wanted] == wanted
    assert len(set(names)) == len(names)


def test_a_file_of_the_toolkit_rebuilds_from_there_on(sources: Sources) -> None:
    toolkit = with_module(sources.own["toolkit"], "shoal_toolkit/new.py")
    plan = planned(sources, replace(sources, own={**sources.own, "toolkit": toolkit}))
    assert plan.state == "rebuilt"
    assert plan.rebuilt[0] == "toolkit"
    assert plan.reasons == ("toolkit/shoal_toolkit/new.py added",)


def test_a_lock_rebuilds_its_layer_and_those_above(sources: Sources) -> None:
    pins = tuple(Pin(pin.name, "9.9", "0" * 64) if pin.name == "torch" else pin for pin in sources.locks["framework"])
    plan = planned(sources, replace(sources, locks={**sources.locks, "framework": pins}))
    assert plan.rebuilt[:3] == ("framework", "Open MPI + mpi4py", "boto3")
    assert plan.reasons == ("framework/torch 2.0.1 → 9.9",)


def test_docker_rebuilds_its_stage_and_those_that_copy_from_it(sources: Sources) -> None:
    plan = planned(sources, replace(sources, engine={**sources.engine, "engine.c": b"other"}))
    assert plan.rebuilt[:3] == ("engine", "library", "toolkit")
    assert plan.reasons == ("engine/engine.c changed",)


def test_another_base_rebuilds_all(sources: Sources) -> None:
    plan = planned(sources, sources, "debian:bookworm-slim@" + "2" * 64)
    assert {"engine", "system", "toolkit"} <= set(plan.rebuilt)
    assert plan.reasons == ("base changed",)
    assert planned(sources, sources, "shoal-base:x@1").reasons == ("base debian:bookworm-slim → shoal-base:x",)


def test_other_instructions_are_reported_with_their_template(sources: Sources) -> None:
    changed = edited(sources, "settings", "PYTHONUNBUFFERED=1", "PYTHONUNBUFFERED=0")
    entry = planned(sources, changed)
    assert entry.rebuilt == ("settings",)
    assert entry.reasons == (
        "settings: other instructions (by versions.yml, buildspec.yml, another Python here, or shoal itself)",
    )
    template = planned(sources, replace(changed, templates={**sources.templates, "base.j2": b""}))
    assert template.reasons == ("settings: other instructions (base.j2)",)


def test_blanks_in_an_instruction_count(sources: Sources) -> None:
    """They may stand between quotes."""
    changed = edited(sources, "system", "python3 -m venv /opt", "python3  -m venv /opt")
    assert planned(sources, changed).rebuilt[0] == "system"


def test_a_step_that_comes_or_goes_is_reported(sources: Sources) -> None:
    place = [step.name for step in sources.steps].index("toolkit")
    more = replace(sources, steps=(*sources.steps[:place], BuildStep("extra", "RUN true"), *sources.steps[place:]))
    assert planned(sources, more).reasons[0].startswith("extra: a new step")
    assert planned(sources, more).rebuilt[:2] == ("extra", "toolkit")
    assert planned(more, sources).reasons[0].startswith("extra: no longer a step")


def test_comments_and_other_templates_change_nothing(sources: Sources) -> None:
    noted = tuple(replace(step, note="ours") for step in sources.steps)
    other = replace(sources, steps=noted, templates={**sources.templates, "base.j2": b""})
    assert planned(sources, other).state == "up to date"


def test_an_image_without_a_record_is_all_new(sources: Sources) -> None:
    wanted = sources.make_record(BASE)
    assert decide("x", None, wanted).state == "new"
    for labels in ({}, {"shoal.steps": "{}"}, {"shoal.steps": "no JSON"}):
        plan = decide("x", labels, wanted)
        assert plan.rebuilt == tuple(step.name for step in wanted.steps)
        assert plan.reasons == ("the image has no record of its steps",)


def test_a_plan_says_from_where_on_and_why(sources: Sources) -> None:
    plan = planned(sources, sources, "shoal-base:x@1")
    assert str(plan).startswith("x: rebuilt from 'engine' on, ")
    assert str(plan).endswith("\n    base debian:bookworm-slim → shoal-base:x")
    assert str(planned(sources, sources)) == "x: up to date"


def test_a_plan_only_reads_the_labels_of_images(
    project: Project, matrix: BuildSpec, own: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [matrix.select(tag) for tag in (PYTORCH_CU117, PYTORCH_CPU)]
    identity = "debian:bookworm-slim@" + "1" * 64
    made = gather_sources(project, matrix, chosen[0], own).make_record(identity)
    asked: list[str] = []
    monkeypatch.setattr(docker_client, "connect", lambda: docker_with({chosen[0].tag: made}, asked))
    plans = plan_builds(project, matrix, chosen)
    assert [plan.decision.state for plan in plans] == ["up to date", "new"]
    assert {"debian:bookworm-slim", PYTORCH_CU117, PYTORCH_CPU} <= {*asked}
    assert json.loads(made.labels()["shoal.steps"])["templates"].keys() == {
        "pytorch.j2",
        "base.j2",
        "macros.j2",
        "dropped.yml",
    }


def docker_with(made: Mapping[str, Record], asked: list[str]) -> SimpleNamespace:
    """Docker with Debian's image and these. It notes whose labels are read, and has no method that changes anything."""

    def get(tag: str) -> SimpleNamespace:
        asked.append(tag)
        if tag == "debian:bookworm-slim":
            return SimpleNamespace(id="sha256:" + "1" * 64, attrs={}, labels={})
        if tag not in made:
            raise docker.errors.ImageNotFound(tag)
        return SimpleNamespace(id="sha256:2", labels=made[tag].labels())

    version = {"Components": [{"Name": "Engine"}], "ApiVersion": "1.41"}
    return SimpleNamespace(version=lambda: version, images=SimpleNamespace(get=get))
