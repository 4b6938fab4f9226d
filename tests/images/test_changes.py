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

from shoal import engine
from shoal.build import builder
from shoal.matrix.project import Project
from shoal.matrix.spec import BuildSpec
from shoal.sources import changes, context
from shoal.sources.changes import Plan
from shoal.sources.context import Sources
from shoal.sources.pins import Pin
from shoal.sources.steps import Record

BASE = "debian:bookworm-slim@" + "1" * 64


@pytest.fixture(scope="module")
def own(project: Project) -> dict[str, bytes]:
    return context.own_packages(project, "3.11")


@pytest.fixture(scope="module")
def sources(project: Project, matrix: BuildSpec, own: Mapping[str, bytes]) -> Sources:
    return context.gather(project, matrix, matrix.select("pytorch"), own)


def planned(sources: Sources, changed: Sources, base: str = BASE) -> Plan:
    return changes.plan("x", sources.record(BASE).labels(), changed.record(base))


def with_module(layer: bytes, name: str) -> bytes:
    """Return the layer of a package that has one more."""
    out = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(layer)) as before, tarfile.open(fileobj=out, mode="w") as after:
        for entry in before:
            file = before.extractfile(entry)
            assert file
            content = file.read()
            if entry.name.endswith("/RECORD"):
                content += f"{name},sha256={'0' * 43},0\n".encode()
                entry.size = len(content)
            after.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def test_nothing_changed_is_up_to_date(sources: Sources) -> None:
    assert planned(sources, sources) == Plan("x", "up to date", len(sources.record(BASE).steps))


def test_steps_are_named_by_their_headings(sources: Sources) -> None:
    names = [step.name for step in sources.record(BASE).steps]
    wanted = ["engine", "FROM", "system", "CUDA cu117", "framework", "Open MPI + mpi4py", "boto3"]
    wanted += ["rehearsal", "library", "toolkit"]
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


def test_the_engine_rebuilds_its_stage_and_what_takes_from_it(sources: Sources) -> None:
    plan = planned(sources, replace(sources, engine={**sources.engine, "engine.c": b"other"}))
    assert plan.rebuilt[:3] == ("engine", "library", "toolkit")
    assert plan.reasons == ("engine/engine.c changed",)


def test_another_base_rebuilds_all(sources: Sources) -> None:
    plan = planned(sources, sources, "debian:bookworm-slim@" + "2" * 64)
    assert {"engine", "system", "toolkit"} <= set(plan.rebuilt)
    assert plan.reasons == ("base changed",)
    assert planned(sources, sources, "shoal-base:x@1").reasons == ("base debian:bookworm-slim → shoal-base:x",)


def test_other_instructions_are_told_with_their_template(sources: Sources) -> None:
    text = sources.dockerfile.replace(b"PYTHONUNBUFFERED=1", b"PYTHONUNBUFFERED=0")
    entry = planned(sources, replace(sources, dockerfile=text))
    assert entry.rebuilt == ("ENV",)
    assert entry.reasons == (
        "ENV: other instructions (by versions.yml, buildspec.yml, another Python here, or shoal itself)",
    )
    template = planned(sources, replace(sources, dockerfile=text, templates={**sources.templates, "base.j2": b""}))
    assert template.reasons == ("ENV: other instructions (base.j2)",)


def test_blanks_in_an_instruction_count(sources: Sources) -> None:
    """They may stand between quotes."""
    text = sources.dockerfile.replace(b"python3 -m venv /opt", b"python3  -m venv /opt")
    assert planned(sources, replace(sources, dockerfile=text)).rebuilt[0] == "system"


def test_a_step_that_comes_or_goes_is_told(sources: Sources) -> None:
    more = replace(sources, dockerfile=sources.dockerfile.replace(b"# toolkit", b"# extra\nRUN true\n\n# toolkit"))
    assert planned(sources, more).reasons[0].startswith("extra: a new step")
    assert planned(sources, more).rebuilt[:2] == ("extra", "toolkit")
    assert planned(more, sources).reasons[0].startswith("extra: no longer a step")


def test_comments_and_other_templates_change_nothing(sources: Sources) -> None:
    text = sources.dockerfile.replace(b"# toolkit", b"# toolkit: ours")
    other = replace(sources, dockerfile=text, templates={**sources.templates, "base.j2": b""})
    assert planned(sources, other).state == "up to date"


def test_an_image_without_a_record_is_all_new(sources: Sources) -> None:
    wanted = sources.record(BASE)
    assert changes.plan("x", None, wanted).state == "new"
    for labels in ({}, {"shoal.steps": "{}"}, {"shoal.steps": "no JSON"}):
        plan = changes.plan("x", labels, wanted)
        assert plan.rebuilt == tuple(step.name for step in wanted.steps)
        assert plan.reasons == ("the image on the engine has no record of its steps",)


def test_a_plan_says_from_where_on_and_why(sources: Sources) -> None:
    plan = planned(sources, sources, "shoal-base:x@1")
    assert str(plan).startswith("x: rebuilt from 'engine' on, ")
    assert str(plan).endswith("\n    base debian:bookworm-slim → shoal-base:x")
    assert str(planned(sources, sources)) == "x: up to date"


def test_the_engine_is_asked_and_left_alone(
    project: Project, matrix: BuildSpec, own: Mapping[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = matrix.choose(["pytorch*"], ["*cu130*", "*-devel"])
    identity = "debian:bookworm-slim@" + "1" * 64
    made = context.gather(project, matrix, chosen[0], own).record(identity)
    monkeypatch.setattr(engine, "connect", lambda: fake_engine({chosen[0].tag: made}))
    plans = list(builder.plan(project, matrix, chosen))
    assert [plan.state for plan in plans] == ["up to date", "new"]
    assert json.loads(made.labels()["shoal.steps"])["templates"].keys() == {
        "pytorch.j2",
        "base.j2",
        "macros.j2",
        "dropped.yml",
    }


def fake_engine(made: Mapping[str, Record]) -> SimpleNamespace:
    """An engine with Debian's image and these; it can be asked only."""

    def get(tag: str) -> SimpleNamespace:
        if tag == "debian:bookworm-slim":
            return SimpleNamespace(id="sha256:" + "1" * 64, attrs={}, labels={})
        if tag not in made:
            raise docker.errors.ImageNotFound(tag)
        return SimpleNamespace(id="sha256:2", labels=made[tag].labels())

    version = {"Components": [{"Name": "Engine"}], "ApiVersion": "1.41"}
    return SimpleNamespace(version=lambda: version, images=SimpleNamespace(get=get))
