"""Reads the output of `pip config list` on stdin, and prints the same indexes as variables of uv: NAME=VALUE.

Variables, because an index may hold a password, and every user of a machine can read the arguments of commands.
"""

from __future__ import annotations

import ast
import sys

PLACES = ("global", "install", ":env:")  # a later one wins
INDEXES = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "trusted-host": "UV_INSECURE_HOST"}


def variables_of(lines: list[str]) -> dict[str, str]:
    """Return uv's variables for the lines `place.name='values'`."""
    found: dict[tuple[str, str], str] = {}
    for line in lines:
        key, _, value = line.partition("=")
        place, _, name = key.rpartition(".")
        found[place, name] = " ".join(str(ast.literal_eval(value)).split())
    values = {name: text for at in PLACES for (place, name), text in found.items() if place == at and text}
    variables = {INDEXES[name]: text for name, text in values.items() if name in INDEXES}
    if "find-links" in values:
        variables["UV_FIND_LINKS"] = values["find-links"].replace(" ", ",")
    if values.get("no-index", "0").lower() in ("1", "yes", "true", "on"):
        variables["UV_NO_INDEX"] = "1"
    if "cert" in values:
        variables["SSL_CERT_FILE"] = values["cert"]
    if "proxy" in values:
        variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), values["proxy"])
    return variables


if __name__ == "__main__":
    for name, value in variables_of(sys.stdin.read().splitlines()).items():
        print(f"{name}={value}")
