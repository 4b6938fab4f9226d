"""scripts/setup.sh: uv gets the indexes that pip is configured with."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "scripts/uv_options.py"


def test_uv_gets_pips_indexes_and_the_last_place_wins() -> None:
    said = [
        "global.index-url='https://old.example/simple'",
        "user.index-url='https://new.example/simple'",
        "global.extra-index-url='file:///one file:///two'",
        "global.timeout='60'",
        ":env:.find-links='/wheels'",
        "global.trusted-host='new.example'",
    ]
    assert runpy.run_path(str(SCRIPT))["options_of"](said) == [
        *("--default-index", "https://new.example/simple"),
        *("--index", "file:///one", "--index", "file:///two"),
        *("--find-links", "/wheels"),
        *("--allow-insecure-host", "new.example"),
    ]
