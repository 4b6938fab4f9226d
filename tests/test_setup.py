"""scripts/setup.sh: uv gets the indexes that pip is configured with."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts/uv_settings.py"))


def test_uv_gets_pips_settings_and_the_environment_wins() -> None:
    said = [
        ":env:.index-url='https://me:secret@new.example/simple'",
        "download.index-url='https://download.example/simple'",
        "global.index-url='https://old.example/simple'",
        "global.extra-index-url='\\nfile:///one\\nfile:///two'",
        "global.timeout='60'",
        "global.find-links='/wheels /more'",
        "install.no-index='true'",
    ]
    assert SCRIPT["variables_of"](said) == {
        "UV_DEFAULT_INDEX": "https://me:secret@new.example/simple",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_NO_INDEX": "1",
    }
    assert SCRIPT["variables_of"]([]) == {}
