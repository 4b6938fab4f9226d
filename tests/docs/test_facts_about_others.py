"""Sentences about other programs are in their pages, and true of the packages of this environment.

tests/integration/test_facts_about_others.py has the checks in images.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .facts_about_others import FACTS, HERE, Fact, names_at

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.check.__name__}-{Path(fact.page).stem}")
def test_a_fact_is_in_its_page(fact: Fact) -> None:
    page = " ".join((ROOT / fact.page).read_text().split())
    assert page.count(" ".join(fact.sentence.split())) == 1


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    command = [sys.executable, str(Path(__file__).with_name("facts_about_others.py")), HERE]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    found: dict[str, str] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.long
@pytest.mark.xdist_group("facts-here")
@pytest.mark.parametrize("name", names_at(HERE))
def test_a_fact_is_true_here(errors: dict[str, str], name: str) -> None:
    assert not errors[name], errors[name]
