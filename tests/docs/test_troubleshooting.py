"""docs/troubleshooting.md has a symptom for every known failure of the toolkit, as a log would show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FAILURES: dict[str, Any] = json.loads((ROOT / "toolkit" / "shoal_toolkit" / "data" / "failures.json").read_text())
SYMPTOMS = re.findall(r"^\| (`.+?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
MESSAGES = [message for symptom in SYMPTOMS for message in re.findall(r"`(.+?)`", symptom)]
MESSAGES += [f"{message}\nERROR: Could not install packages" for message in MESSAGES]  # as the end of pip's output


@pytest.mark.parametrize(
    "failure",
    [*FAILURES["advice"], *FAILURES["pip"]],
    ids=lambda failure: failure["advice" if "advice" in failure else "head"][:40],
)
def test_the_page_has_a_symptom_of_the_failure(failure: dict[str, Any]) -> None:
    codes = {f"exit code {code}" for code in failure.get("codes", ())}
    assert not codes or codes & set(MESSAGES)
    words = failure.get("words")
    assert words is None or any(re.search(words, message, re.MULTILINE) for message in MESSAGES), words
