"""Words that ranks leave for each other in a store, to be read without waiting for any."""

from __future__ import annotations

import json
from typing import Any, Protocol


class CountingStore(Protocol):
    """What a board needs of a store: `add` returns the sum, `get` waits for the word."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def add(self, key: str, amount: int, /) -> int: ...


class StoreLog:
    """Lists of words, by name. Other groups' have other prefixes. Raises what the store raises."""

    def __init__(self, store: CountingStore, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def append(self, name: str, word: Any) -> int:
        """Put a word at the end of a list; returns its number, from 1."""
        number = self._store.add(f"{self._prefix}/{name}", 1)
        self._store.set(f"{self._prefix}/{name}/{number}", json.dumps(word))
        return number

    def count(self, name: str, amount: int = 0) -> int:
        """Add to a number, which is not a list's, and return the sum."""
        return self._store.add(f"{self._prefix}/{name}", amount)

    def read(self, name: str, after: int = 0) -> list[Any]:
        """Return the words of a list after the first so many: one question to the store where there are none."""
        count = self._store.add(f"{self._prefix}/{name}", 0)
        return [
            json.loads(self._store.get(f"{self._prefix}/{name}/{number}")) for number in range(after + 1, count + 1)
        ]
