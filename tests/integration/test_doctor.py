"""`shoal doctor` on this machine, which the other tests here show to be in order."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import docker

from shoal import doctor
from shoal.matrix.project import Project

from .test_run import job_objects

SHOAL = Path(sys.executable).with_name("shoal")


def test_a_machine_in_order_has_no_failed_check_and_nothing_is_left(
    project: Project, client: docker.DockerClient
) -> None:
    result = subprocess.run([SHOAL, "doctor", "--json"], cwd=project.root, capture_output=True, text=True, check=False)
    findings = {finding["name"]: finding for finding in json.loads(result.stdout)}
    assert result.returncode == 0, result.stdout + result.stderr
    assert list(findings) == list(doctor.CHECKS)
    for name in ("definitions", "docker", "memory", "base image", "networks", "loopback"):
        assert findings[name]["state"] == "ok", findings[name]
    assert not [finding for finding in findings.values() if finding["found"].startswith("not checked: needs")]
    assert job_objects(client, "shoal-doctor") == set()


def test_the_text_has_a_line_for_each_check(project: Project) -> None:
    result = subprocess.run([SHOAL, "doctor"], cwd=project.root, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if not line.startswith("    ")]
    assert [line[2:].split("  ")[0].strip() for line in lines] == list(doctor.CHECKS)
    assert {line[0] for line in lines} <= {"✓", "!"}
