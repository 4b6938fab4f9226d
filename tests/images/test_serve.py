"""examples/serve: a server that others can trust to say no, as a real process on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..launching import find_port

SERVE = Path(__file__).parents[2] / "examples" / "serve" / "serve.py"
SUM = "def model_fn(where):\n    return 1\ndef predict_fn(data, model):\n    return data.sum(1) + model\n"
SLOW = (
    "import pathlib, time\n"
    "def model_fn(where):\n    return pathlib.Path(where)\n"
    "def predict_fn(data, model):\n"
    "    (model / 'begun').touch()\n"
    "    while not (model / 'go').exists():\n        time.sleep(0.01)\n"
    "    return data\n"
)


def launch(model: Path, script: str, port: int, **variables: str) -> subprocess.Popen[str]:
    (model / "code").mkdir()
    (model / "code" / "inference.py").write_text(script)
    env = {**os.environ, "SM_MODEL_DIR": str(model), "SAGEMAKER_BIND_TO_PORT": str(port), **variables}
    return subprocess.Popen([sys.executable, SERVE], env=env, stderr=subprocess.PIPE, text=True)


def ask(port: int, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    names = {"Content-Type": "application/json"}
    names |= {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, names)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            content = answer.read()
            return answer.status, json.loads(content) if content else None
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@contextmanager
def served(model: Path, script: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server that answers /ping."""
    port = find_port()
    with launch(model, script, port, **variables) as process:
        try:
            for _ in range(600):
                try:
                    assert ask(port, "/ping") == (200, None)
                    break
                except urllib.error.URLError:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    time.sleep(0.05)
            yield process, port
        finally:
            process.kill()


def test_answers_and_refusals(tmp_path: Path) -> None:
    rows = b"[[1, 2], [3, 4]]"
    with served(tmp_path, SUM, SERVE_BODY_BYTES="100") as (_, port):
        assert ask(port, "/invocations", rows) == (200, [4, 8])
        for body, headers, status, said in (
            (b"[[1, 2], [3]]", {}, 400, "is no application/json"),
            (b"{", {}, 400, "is no application/json"),
            (b'{"a": 1}', {}, 400, "not an array of numbers"),
            (b"\x80\x04", {"Content_Type": "application/x-npy"}, 400, "is no application/x-npy"),
            (b"1,2", {"Content_Type": "text/csv"}, 415, "'text/csv' is not supported"),
            (rows, {"Accept": "image/png"}, 406, "'image/png' is not supported"),
            (b"[1, 2]", {}, 500, "The model failed: AxisError"),
            (rows * 20, {}, 413, "more than 100 bytes"),
        ):
            found, answer = ask(port, "/invocations", body, **headers)
            assert (found, said in answer["error"]) == (status, True), (body, found, answer)
        assert ask(port, "/invocations", rows) == (200, [4, 8])


def test_too_many_requests_are_refused_and_sigterm_answers_the_others(tmp_path: Path) -> None:
    answers: list[tuple[int, Any]] = []
    with served(tmp_path, SLOW, SERVE_WAITING="1") as (process, port):
        first = threading.Thread(target=lambda: answers.append(ask(port, "/invocations", b"[7]")))
        first.start()
        while not (tmp_path / "begun").exists():
            assert process.poll() is None and first.is_alive(), answers
            time.sleep(0.01)
        assert ask(port, "/invocations", b"[8]") == (429, {"error": "1 requests wait already."})
        assert ask(port, "/ping") == (200, None), "a busy model does not make the server look ill"
        process.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        first.join()
        process.wait(30)
    assert answers == [(200, [7])]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            "def model_fn(where):\n    raise OSError('model.pt is cut')\ndef predict_fn(data, model): ...\n",
            "model.pt is cut",
        ),
        ("def model_fn(where): ...\n", "lacks predict_fn. Fix: define it"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path, script: str, said: str) -> None:
    with launch(tmp_path, script, find_port()) as process:
        assert process.wait(60) == 1
        assert process.stderr
        assert said in process.stderr.read()
