"""Keeps secrets out of what `train` itself prints and writes.

A secret is the value of a variable, hyperparameter or option whose name says so, wherever that value turns up again,
and whatever has the form of a well-known kind of token. The script's own output passes as it is: masking would change
its bytes, hold lines back, and never be complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache

from shoal_toolkit.light_typing import Any

MASK = "******"
# Plain words, as an expression would cost every start its compilation. What is harmless is taken out first.
_SECRET = (
    *("secret", "token", "passw", "passphrase", "credential", "private", "auth"),
    *("apikey", "api_key", "api-key", "accesskey", "access_key", "access-key"),
)
_HARMLESS = ("tokeni", "tokens", "author")
_SECRET_ENDS = ("_pwd", "-pwd", "_pass", "-pass")
_PERHAPS = ("_key", "-key", ".key")  # such as label_key: hidden by name, and seldom a secret
# "name": "value" of JSON and Python, however often quoted; 'name=several words'; name=value; --name value. All of it
# is bounded, and tried only where a word begins: a long value must not cost its square.
_PAIR = (
    r"""(?P<open>\\{0,9}["'])(?P<key>[\w.-]{1,256})(?P=open)\s?:\s?(?P<quote>\\{0,9}["'])(?P<text>.{0,9999}?)(?P=quote)"""
    r"""|(?P<around>\\{0,9}["'])(?P<quoted>[\w.-]{1,256})=(?P<words>.{0,9999}?)(?P=around)"""
    r"""|(?<![\w.-])(?P<name>[\w.-]+)=(?P<value>"[^"]*"|'[^']*'|[^\s"',;&]+)"""
    r"""|(?<!\S)--(?P<option>[\w-]+) (?P<word>[^\s-]\S*)"""
)
_VALUES = ("text", "words", "value", "word")
# How a text that may hold a token is known, and the forms of tokens. The hints spare most texts the long expression.
_HINTS = ("AKIA", "ASIA", "_pat_", "gh", "glpat-", "hf_", "sk-", "xox", "pypi-", "npm_", "AIza", "eyJ", "-----", "@")
_FORMS = (
    r"\bA[KS]IA[0-9A-Z]{16}\b",  # AWS
    r"\bgh[pousr]_\w{30,}",  # GitHub
    r"\bgithub_pat_\w{20,}",
    r"\bglpat-[\w-]{20,}",  # GitLab
    r"\bhf_[A-Za-z0-9]{30,}",  # Hugging Face
    r"\bsk-[\w-]{20,}",  # OpenAI and others
    r"\bxox[a-z]-[\w-]{10,}",  # Slack
    r"\bpypi-[\w-]{40,}",
    r"\bnpm_\w{36}",
    r"\bAIza[\w-]{35}",  # Google
    r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*",  # JSON Web Token
    r"(?<=://)[^\s/@]+(?=@)",  # user and password in an address
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:.|\n)*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
)
_SHORTEST = 5  # a shorter value may be anything, and is hidden by its name alone
_NO_SECRETS = ("false", "null", "none", "undefined")

_known: list[str] = []  # the values of this job's secrets, the longest first


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name is likely to hold a secret."""
    return _is_strictly(name) or _is_perhaps(name)


def learn(variables: Mapping[str, str]) -> None:
    """Take note of the secrets among variables, and among those that they hold in turn."""
    found = set(_known)
    for name, value in variables.items():
        if _is_strictly(name) or (_is_perhaps(name) and _looks_random(value)):
            found.add(value)
        elif _mentions(value):
            found.update(pair[_group(pair)] for pair in _pairs().finditer(value) if _is_strictly(_name(pair)))
    written = {json.dumps(value)[1:-1] for value in found}
    distinct = (value for value in found | written if len(value) >= _SHORTEST and value.lower() not in _NO_SECRETS)
    _known[:] = sorted(distinct, key=len, reverse=True)


def text(said: str) -> str:
    """Return a text without secrets: known ones, those that it names itself, and tokens of a known form."""
    for secret in _known:
        said = said.replace(secret, MASK)
    if _mentions(said):
        said = _pairs().sub(_masked_pair, said)
    if any(hint in said for hint in _HINTS):
        said = _forms().sub(MASK, said)
    return said


def arguments(argv: Iterable[str]) -> list[str]:
    """Return argv with the values of options and variables named like secrets masked."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hide_next:
            shown.append(MASK)
        elif equals and is_secret(name):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(text(word))
        hide_next = not hide_next and word.startswith("-") and not equals and is_secret(word)
    return shown


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the values of those named like secrets masked, wherever they are repeated."""
    learn(variables)
    return {name: value and (MASK if is_secret(name) else _inside(value)) for name, value in variables.items()}


def anything(value: Any) -> Any:
    """Return what JSON can hold with the secrets in it masked."""
    if isinstance(value, dict):
        return {key: MASK if is_secret(key) and item else anything(item) for key, item in value.items()}
    if isinstance(value, list):
        return arguments(value) if all(isinstance(item, str) for item in value) else [anything(item) for item in value]
    return _inside(value) if isinstance(value, str) else value


def _inside(value: str) -> str:
    """Mask the secrets in a variable's value, which may be JSON."""
    try:
        decoded = json.loads(value) if value[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        decoded = None
    if decoded is None:
        return text(value)
    shown = anything(decoded)
    return value if shown == decoded else json.dumps(shown, separators=(",", ":"))


def _masked_pair(pair: re.Match[str]) -> str:
    if not _is_strictly(_name(pair)):
        return pair[0].replace(pair["words"], text(pair["words"])) if pair["words"] else pair[0]
    start, end = (place - pair.start() for place in pair.span(_group(pair)))
    return pair[0][:start] + MASK + pair[0][end:]


def _name(pair: re.Match[str]) -> str:
    return pair["key"] or pair["quoted"] or pair["name"] or pair["option"]


def _group(pair: re.Match[str]) -> str:
    return next(group for group in _VALUES if pair[group] is not None)


def _is_strictly(name: str) -> bool:
    return _mentions(name) or name.lower().endswith(_SECRET_ENDS)


def _is_perhaps(name: str) -> bool:
    return name.lower().lstrip("-") == "key" or name.lower().endswith(_PERHAPS)


def _mentions(said: str) -> bool:
    lowered = said.lower()
    for harmless in _HARMLESS:
        lowered = lowered.replace(harmless, "")
    return any(word in lowered for word in _SECRET)


def _looks_random(value: str) -> bool:
    return any(character.isdigit() for character in value) and any(character.isalpha() for character in value)


@cache
def _pairs() -> re.Pattern[str]:
    return re.compile(_PAIR)


@cache
def _forms() -> re.Pattern[str]:
    return re.compile("|".join(_FORMS))
