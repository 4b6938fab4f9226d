"""Reads the output of `pip config list` on stdin, and prints uv's options for the same indexes, one word a line."""

from __future__ import annotations

import ast
import sys

OPTIONS = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}


def options_of(lines: list[str]) -> list[str]:
    """Return uv's words for the lines `place.name='values'`; pip puts later places above earlier ones."""
    values: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition("=")
        values[name.rpartition(".")[2]] = ast.literal_eval(value)
    found = [(option, value) for name, option in OPTIONS.items() for value in values.get(name, "").split()]
    found += [("--allow-insecure-host", host) for host in values.get("trusted-host", "").split()]
    return [word for pair in found for word in pair]


if __name__ == "__main__":
    print(*options_of(sys.stdin.read().splitlines()), sep="\n")
