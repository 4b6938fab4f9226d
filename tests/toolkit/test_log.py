"""The log lines of `train`: no name or failure of another host controls a terminal or looks like another line."""

from __future__ import annotations

import json

import pytest

from shoal_toolkit import log


@pytest.mark.parametrize("as_json", [False, True])
def test_messages_control_no_terminal(monkeypatch: pytest.MonkeyPatch, as_json: bool) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(log, "_as_json", as_json)
    monkeypatch.setattr(log, "_writer", written.append)
    log.write_log("host \x1b]52;c;eA==\x07a\x9b2J\u202eb\rtrain: the job succeeded\nc\td\u200b\udcff")
    lines = b"".join(written).decode().splitlines()
    texts = [json.loads(line)["message"] for line in lines] if as_json else lines
    assert [each[:7] for each in texts] == ["train: "] * 3
    assert texts[0] == "train: host \ufffd]52;c;eA==\ufffda\ufffd2J\ufffdb"
    assert texts[2].startswith("train: c d\ufffd")
    assert all(char.isprintable() for line in lines for char in line)
