"""`shoal push`: what is tried again, and what is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import docker.errors
import pytest
import requests
import urllib3.exceptions
from rich.console import Console

from shoal import docker_client
from shoal.builds import push
from shoal.clean_text import print_error
from shoal.commands import images
from shoal.errors import PushError
from shoal.limits import MIB
from shoal.matrix.project import Project

DONE = {"aux": {"Digest": "sha256:1"}}


class Engine:
    """What an engine says to one try after the other, of an image that it has."""

    def __init__(self, *errors: str) -> None:
        self.images = self.api = self
        self.tags = ["a:1"]
        self._answers = [[{"error": error}] for error in errors] + [[DONE]]

    def get(self, _: str) -> Engine:
        return self

    def tag(self, name: str) -> None:
        self.tags = list({*self.tags, name.removeprefix("docker.io/")})

    def remove(self, name: str) -> None:
        self.tags.remove(name.removeprefix("docker.io/"))

    def push(self, _: str, *, stream: Literal[True], decode: Literal[True]) -> Iterator[dict[str, Any]]:
        return iter(self._answers.pop(0))


def pushed(engine: Engine) -> tuple[push.Pushed, list[float]]:
    waited: list[float] = []
    found = push.push_image(engine, "a:1", "host/a:1", Console(quiet=True), waited.append)  # type: ignore[arg-type]
    return found, waited


@pytest.mark.parametrize(
    "error",
    [
        "received unexpected HTTP status: 503 Service Unavailable",
        "Get https://host/v2/: net/http: TLS handshake timeout",
        "dial tcp 10.0.0.1:443: connect: connection refused",
        "unexpected EOF",
        "toomanyrequests: You have reached your rate limit",
        "read: connection reset by peer",
        'Get "http://127.0.0.1:5000/v2/": http: server closed idle connection',
    ],
)
def test_what_may_be_better_a_moment_later_is_tried_again(error: str) -> None:
    engine = Engine(error, error, error)
    found, waited = pushed(engine)
    assert (found.tries, found.digest, waited) == (4, "sha256:1", [1, 2, 4])
    assert engine.tags == ["a:1"]


@pytest.mark.parametrize(
    "error",
    [
        "unauthorized: authentication required",
        "denied: requested access to the resource is denied",
        "no basic auth credentials",
        "name unknown: The repository does not exist",
        "manifest invalid: manifest invalid",
        "dial tcp: lookup registry.invalid: no such host",
    ],
)
def test_an_error_that_a_retry_does_not_change_is_reported_at_once(error: str) -> None:
    engine = Engine(error)
    with pytest.raises(PushError, match="host/a:1: "):
        pushed(engine)
    assert engine.tags == ["a:1"]


def test_control_characters_of_a_registry_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PushError) as raised:
        pushed(Engine("denied: \x1b]0;owned\x07\x1b[2J\n✓ pushed\n" + "y" * 10 * MIB))
    print_error(str(raised.value))
    printed = capsys.readouterr().err
    assert not set("\x1b\x07") & set(printed)
    assert "\n✓" not in printed
    assert len(printed) < MIB


def test_a_tag_for_docker_hub_that_was_there_before_stays() -> None:
    engine = Engine()
    engine.tags = ["team/a:1"]
    push.push_image(engine, "a:1", "docker.io/team/a:1", Console(quiet=True))  # type: ignore[arg-type]
    assert engine.tags == ["team/a:1"]


@pytest.mark.parametrize("prefix", ["https://host", "Host/Team", "host/", "", "host:port", "host/team:tag"])
def test_a_prefix_that_cannot_be_one_is_refused(prefix: str) -> None:
    with pytest.raises(PushError, match="expected a registry's host"):
        push.make_reference("a:1", prefix)


def test_a_prefix_stands_before_the_name() -> None:
    assert push.make_reference("a:1", "localhost:5000") == "localhost:5000/a:1"
    assert push.make_reference("a:1", "registry.example.org/team/x-y") == "registry.example.org/team/x-y/a:1"


@pytest.mark.parametrize("as_json", [False, True])
def test_after_a_failure_the_others_are_pushed_and_all_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    answers = Engine("denied: the first", "denied: the second")
    monkeypatch.setattr(docker_client, "connect", lambda: answers)
    monkeypatch.chdir(project.root)
    with pytest.raises(PushError, match="denied: the first"):
        images.push_images("localhost:5000", ["pytorch", "tensorflow", "huggingface"], as_json=as_json)
    printed = capsys.readouterr()
    tags = ["pytorch-training:2.0.1-gpu-py311-cu117-debian12", "tensorflow-training:2.14.1-gpu-py311-cu118-debian12"]
    assert f"shoal: localhost:5000/{tags[1]}: denied: the second" in printed.err
    done = "✓ localhost:5000/huggingface-training"
    assert (done in printed.out, done in printed.err) == (not as_json, as_json)
    if as_json:
        first, second, third = json.loads(printed.out)
        assert [first["tag"], second["tag"]] == tags
        assert [first["state"], second["state"], third["state"]] == ["failed", "failed", "pushed"]
        assert first["error"].startswith(f"localhost:5000/{tags[0]}: denied: the first. Fix: docker login")
        assert (third["digest"], third["tries"], third["error"]) == ("sha256:1", 1, None)


class Leaving(Engine):
    """An engine that goes away during the first push, as the SDK tells it; `back`: it is there for the next."""

    def __init__(self, error: Exception, *, back: bool) -> None:
        super().__init__()
        self._error: Exception | None = error
        self._gone, self._back = False, back

    def _ask(self) -> None:
        if self._gone:
            self._gone = not self._back
            raise requests.ConnectionError("connection refused")

    def get(self, name: str) -> Engine:
        self._ask()
        return super().get(name)

    def remove(self, name: str) -> None:
        self._ask()
        super().remove(name)

    def push(self, _: str, *, stream: Literal[True], decode: Literal[True]) -> Iterator[dict[str, Any]]:
        if self._error:
            error, self._error, self._gone = self._error, None, True
            yield {"id": "1", "progressDetail": {"current": 1, "total": 2}}
            raise error
        yield from super().push(_, stream=stream, decode=decode)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        urllib3.exceptions.ProtocolError("Connection broken: IncompleteRead"),
        requests.ConnectionError("reset"),
        docker.errors.StreamParseError("half a line"),
    ],
)
def test_a_lost_docker_is_reported_for_each_image(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, back: bool
) -> None:
    answers = Leaving(error, back=back)
    monkeypatch.setattr(docker_client, "connect", lambda: answers)
    monkeypatch.chdir(project.root)
    with pytest.raises(PushError, match=r"pytorch.*Docker went away during the push: .* Fix: see that it"):
        images.push_images("localhost:5000", ["pytorch", "tensorflow"], as_json=True)
    first, second = json.loads(capsys.readouterr().out)
    assert (first["state"], second["state"]) == ("failed", "pushed" if back else "failed")
    assert back or "Docker went away" in second["error"]
