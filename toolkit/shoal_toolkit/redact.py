"""Masks secrets in everything that `train` itself prints and writes.

The rules, which docs/toolkit.md explains to users:

- A name says whether its value is a secret (`DB_PASSWORD`, `HF_TOKEN`, `--api-key`). Its last word counts: the values
  of `AUTH_MODE`, `TOKEN_LIMIT` and `SECRET_NAME` are not secrets. Neither is a token that is counted (`MAX_TOKEN`) or
  that a tokenizer defines (`PAD_TOKEN`). If the name is ambiguous (`TOKEN_PROD`, `ssh_key`), a value is a secret if it
  looks random: letters and digits, at least six characters, not the path of a file.
- Next to the name of a secret its value is masked. Exceptions are true, false, none and similar words, and the path of
  a credentials file.
- Elsewhere the value is masked if it can't appear by chance. It has at least five characters, is not a common word in
  logs, and is not a number of fewer than twelve digits. A value of letters is masked only as a whole word.
- Tokens of a known form (`ghp_...`) and passwords in addresses are masked everywhere.

The script's output is not masked: that would change its bytes, delay lines, and never be complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache

from shoal_toolkit.fast_typing import Any

MASK = "******"
# Plain words: compiling a regular expression would slow down every start. A name without any of them is not a secret's.
_SECRET = (
    *("secret", "token", "passw", "passphrase", "credential", "private", "auth"),
    *("apikey", "api_key", "api-key", "accesskey", "access_key", "access-key"),
)
_HARMLESS = ("tokeni", "tokens", "author")
_SECRET_ENDS = ("_pwd", "-pwd", "_pass", "-pass")
_KEY_ENDS = ("_key", "-key", ".key")
# A name with one of these holds a secret. One with "token" or "auth" does if the value looks random.
_CERTAIN = ("secret", "passw", "passphrase", "credential", "authorization")
_CERTAIN_KEYS = ("api_key", "apikey", "access_key", "accesskey", "private_key", "privatekey")
_NO_SECRETS = ("", "true", "false", "yes", "no", "on", "off", "null", "none", "undefined")
# "name": "value" of JSON and Python, also quoted repeatedly, 'name=several words', name=value, --name value. Lengths
# are bounded and matches start at words, so that a long value doesn't take quadratic time.
_PAIR = (
    r"""(?P<open>\\{0,9}["'])(?P<key>[\w.-]{1,256})(?P=open)\s?:\s?(?P<quote>\\{0,9}["'])(?P<text>.{0,9999}?)(?P=quote)"""
    r"""|(?P<around>\\{0,9}["'])(?P<quoted>[\w.-]{1,256})=(?P<words>.{0,9999}?)(?P=around)"""
    r"""|(?<![\w.-])(?P<name>[\w.-]+)=(?P<value>"[^"]*"|'[^']*'|[^\s"',;&]+)"""
    r"""|(?<!\S)--(?P<option>[\w-]+) (?P<word>[^\s-]\S*)"""
)
_VALUES = ("text", "words", "value", "word")
# Hints that a text may contain a token, and the forms of tokens. Most texts have no hint and skip the long expression.
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
_MIN_LENGTH = 5
_MIN_RANDOM_LENGTH = 6
_MAX_CHANCE_DIGITS = 11  # a number of at most this many digits may be a step, a size or a date

_known: list[str] = []  # this job's secrets that are masked everywhere, the longest first


def is_secret(name: str, value: str) -> bool:
    """Whether the value of a variable or option is masked next to its name.

    Empty values, words such as true and none, and the path of a credentials file never are.

    Args:
        name: Its name, in any spelling: DB_PASSWORD, --api-key, authToken.
        value: Its value, which decides if the name is ambiguous.
    """
    if not (_may_name_secret(name) or name.lower().endswith(_SECRET_ENDS) or _names_key(name)):
        return False
    if value.strip().lower() in _NO_SECRETS or ("credential" in name.lower() and _is_file(value)):
        return False
    certain = _name_decides(name)
    return _looks_random(value) and not _is_file(value) if certain is None else certain


def learn_secrets(variables: Mapping[str, str]) -> None:
    """Remembers the secrets in variables and their JSON, so that `mask_text` masks distinctive ones everywhere."""
    found: set[str] = set()
    for name, value in variables.items():
        if is_secret(name, value):
            found.add(value)
        elif _may_name_secret(value):
            pairs = ((_pair_name(pair), pair[_value_group(pair)]) for pair in _pairs().finditer(value))
            found.update(value for name, value in pairs if is_secret(name, value))
    learn_values(found)


def learn_values(values: Iterable[str]) -> None:
    """Remembers secrets of any name, so that `mask_text` masks distinctive ones everywhere."""
    found = {*_known, *values}
    written = {json.dumps(value)[1:-1] for value in found}
    _known[:] = sorted(filter(_is_distinctive, found | written), key=len, reverse=True)


def mask_text(text: str) -> str:
    """Returns a text with masked secrets: learnt ones, those next to their name, and tokens of a known form."""
    for secret in _known:
        if secret not in text:
            continue
        # A word of letters may be part of another word.
        text = re.sub(rf"(?<!\w){secret}(?!\w)", MASK, text) if secret.isalpha() else text.replace(secret, MASK)
    if _may_name_secret(text):
        text = _pairs().sub(_mask_pair, text)
    if any(hint in text for hint in _HINTS):
        text = _forms().sub(MASK, text)
    return text


def mask_arguments(argv: Iterable[str]) -> list[str]:
    """Returns argv with masked secrets: `--token X`, `TOKEN=X`, and all that `mask_text` masks."""
    shown: list[str] = []
    option = ""  # the preceding word if it is an option
    for word in argv:
        name, equals, value = word.partition("=")
        if option and is_secret(option, word):
            shown.append(MASK)
        elif equals and is_secret(name, value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(mask_text(word))
        option = "" if option or equals or not word.startswith("-") else word
    return shown


def mask_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with masked secrets, also if one repeats another. Learns the secrets."""
    learn_secrets(variables)
    return {name: MASK if is_secret(name, value) else _mask_value(value) for name, value in variables.items()}


def mask_json(value: Any) -> Any:
    """Returns a decoded JSON value with masked secrets. A list of texts only is masked as arguments are."""
    if isinstance(value, dict):
        return {key: MASK if _is_secret_item(key, item) else mask_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return (
            mask_arguments(value)
            if all(isinstance(item, str) for item in value)
            else [mask_json(item) for item in value]
        )
    return _mask_value(value) if isinstance(value, str) else value


def _is_secret_item(key: str, item: Any) -> bool:
    """Whether an item of a JSON object is masked: next to the name of a secret, also a number."""
    return is_secret(key, item if isinstance(item, str) else json.dumps(item) if item else "")


def _mask_value(value: str) -> str:
    """Returns the value of a variable with masked secrets. JSON that has one is returned in compact form."""
    try:
        decoded = json.loads(value) if value[:1] in ("{", "[") else None
    except (ValueError, RecursionError):
        decoded = None
    if decoded is None:
        return mask_text(value)
    shown = mask_json(decoded)
    return value if shown == decoded else json.dumps(shown, separators=(",", ":"))


def _mask_pair(pair: re.Match[str]) -> str:
    """Returns a pair of name and value, with a mask if the value is a secret. Several words are masked as a text."""
    group = _value_group(pair)
    if not is_secret(_pair_name(pair), pair[group]):
        return pair[0].replace(pair["words"], mask_text(pair["words"])) if pair["words"] else pair[0]
    start, end = (place - pair.start() for place in pair.span(group))
    return pair[0][:start] + MASK + pair[0][end:]


def _pair_name(pair: re.Match[str]) -> str:
    return pair["key"] or pair["quoted"] or pair["name"] or pair["option"]


def _value_group(pair: re.Match[str]) -> str:
    return next(group for group in _VALUES if pair[group] is not None)


def _name_decides(name: str) -> bool | None:
    """Whether the value of this name is a secret; None if that depends on the value."""
    words = _split_name(name)
    last, before = ["", "", *words][-1], ["", *words][-2]
    if last in _table()["not_secret"]:
        return False
    if last.endswith("token"):
        return None if before in _table()["counted"] else True
    if last == "key" and before in _table()["key_of"]:
        return False
    joined = "_".join(words)
    if last in ("pwd", "pass") or last.endswith("auth") or any(word in joined for word in (*_CERTAIN, *_CERTAIN_KEYS)):
        return True
    return None


def _split_name(name: str) -> list[str]:
    """Splits a name into lower-case words: MAX_TOKEN, max-token and maxToken have two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in parted.lower().replace("-", "_").replace(".", "_").split("_") if word]


def _names_key(name: str) -> bool:
    return name.lower().lstrip("-") == "key" or name.lower().endswith(_KEY_ENDS)


def _may_name_secret(text: str) -> bool:
    """Whether a text contains a word such as `secret` or `token`; `tokenizer` and `author` don't count."""
    lowered = text.lower()
    if "authorization" in lowered:
        return True
    for harmless in _HARMLESS:
        lowered = lowered.replace(harmless, "")
    return any(word in lowered for word in _SECRET)


def _looks_random(value: str) -> bool:
    kinds = any(character.isdigit() for character in value), any(character.isalpha() for character in value)
    return all(kinds) and len(value) >= _MIN_RANDOM_LENGTH and not any(character.isspace() for character in value)


def _is_file(value: str) -> bool:
    """Whether a value looks like the path of a file with a suffix. The disk is not read."""
    directory, slash, name = value.rpartition("/")
    return bool(slash) and directory[:1] in ("", "/", "~", ".") and "." in name


def _is_distinctive(value: str) -> bool:
    """Whether a secret is masked everywhere, because it can't appear in a text by chance."""
    plain = value.strip().lower()
    if len(plain) < _MIN_LENGTH or plain in _table()["common"]:
        return False
    digits = plain.replace(".", "", 1).lstrip("+-")
    return not digits.isdecimal() or len(digits) > _MAX_CHANCE_DIGITS


@cache
def _table() -> dict[str, list[str]]:
    """The names and values that only look like secrets; read on first use, because most jobs don't need them."""
    from shoal_toolkit.files import read_table

    return read_table("redaction")


@cache
def _pairs() -> re.Pattern[str]:
    return re.compile(_PAIR)


@cache
def _forms() -> re.Pattern[str]:
    return re.compile("|".join(_FORMS))
