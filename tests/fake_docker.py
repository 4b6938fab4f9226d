"""Fakes of Docker that refuse the arguments that its SDK refuses, and remember how containers are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from docker import APIClient
from docker.models.containers import ContainerCollection, _create_container_args  # type: ignore[attr-defined]

METHODS: dict[str, tuple[Callable[..., Any], int]] = {
    "containers.create": (ContainerCollection.create, 1),
    "containers.list": (ContainerCollection.list, 1),
    "container.start": (APIClient.start, 2),
    "container.wait": (APIClient.wait, 2),
    "container.logs": (APIClient.logs, 2),
    "container.remove": (APIClient.remove_container, 2),
    "container.export": (APIClient.export, 2),
    "networks.create": (APIClient.create_network, 1),
    "networks.list": (APIClient.networks, 1),
}
"""The SDK's methods with the names of all arguments; the number of those that the objects before the dot stand for."""


def checked(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the fake of a method. A call of it fails if the SDK's method would not accept its arguments."""
    method, own = METHODS[name]
    signature = inspect.signature(method)

    def call(*arguments: Any, **keywords: Any) -> Any:
        bound = signature.bind(*[None] * own, *arguments, **keywords)
        if name == "containers.create":  # it takes any keyword, and a private function looks at them
            _create_container_args({**bound.arguments.get("kwargs", {}), "version": "1.47"})
        return fake(*arguments, **keywords)

    return call


class FakeDocker:
    """Docker without networks. Its containers end as soon as they start.

    Args:
        image: The image that it has.
        further: Methods of its containers, in place of a start, an exit code of 0 and an empty log.
    """

    def __init__(self, image: SimpleNamespace | None = None, **further: Any) -> None:
        self.made: list[SimpleNamespace] = []
        self.images = SimpleNamespace(get=lambda tag: image or SimpleNamespace(attrs={"Config": {}}))
        lists = {name: checked(f"{name}.list", lambda **_: []) for name in ("containers", "networks")}
        self.containers = SimpleNamespace(create=checked("containers.create", self._create), list=lists["containers"])
        self.networks = SimpleNamespace(list=lists["networks"])
        self._further = further

    def _create(self, image: str, command: list[str], **settings: Any) -> SimpleNamespace:
        self.made.append(SimpleNamespace(image=image, command=command, settings=settings))
        methods = {"start": lambda: None, "wait": lambda: {"StatusCode": 0}, "logs": lambda: b"", **self._further}
        return SimpleNamespace(**{name: checked(f"container.{name}", fake) for name, fake in methods.items()})
