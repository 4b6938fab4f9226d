"""Keeps secrets out of what `train` itself prints and writes, and leaves everything else readable.

The rule, which docs/toolkit.md tells users:

- A name says whether its value is a secret (`DB_PASSWORD`, `HF_TOKEN`, `--api-key`). Its last word counts: `AUTH_MODE`,
  `TOKEN_LIMIT` and `SECRET_NAME` tell of a secret, and hold none. A token that is counted (`MAX_TOKEN`) or that a
  tokenizer knows (`PAD_TOKEN`) is none. Where a name can be either (`TOKEN_PROD`, `ssh_key`), a value is a secret if it
  looks random: letters and digits, six characters or more, and no path of a file.
- Where the name of a secret stands, its value is hidden, unless it is true, false, none or the like, or credentials are
  the path of a file.
- Elsewhere the value is hidden if it cannot stand there by chance: it has five characters or more, and is neither a
  number of less than twelve digits nor a word that logs are made of. A value of letters is hidden as a whole word.
- A token of a well-known form (`ghp_...`) and the password in an address are hidden wherever they stand.

The script's own output passes as it is: masking would change its bytes, hold lines back, and never be complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cache

from shoal_toolkit.light_typing import Any

MASK = "******"
# Plain words, as an expression would cost every start its compilation: a name without any of them is looked at no more.
_SECRET = (
    *("secret", "token", "passw", "passphrase", "credential", "private", "auth"),
    *("apikey", "api_key", "api-key", "accesskey", "access_key", "access-key"),
)
_HARMLESS = ("tokeni", "tokens", "author")
_SECRET_ENDS = ("_pwd", "-pwd", "_pass", "-pass")
_KEY_ENDS = ("_key", "-key", ".key")
# Whatever comes with them; a name of other words with a token or auth in it holds a secret if its value looks random.
_CERTAIN = ("secret", "passw", "passphrase", "credential", "authorization")
_CERTAIN_KEYS = ("api_key", "apikey", "access_key", "accesskey", "private_key", "privatekey")
_NO_SECRETS = ("", "true", "false", "yes", "no", "on", "off", "null", "none", "undefined")
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
_SHORTEST = 5
_SHORTEST_RANDOM = 6
_LONGEST_CHANCE = 11  # a number of so many digits may be a step, a size, a date

_known: list[str] = []  # the values of this job's secrets that are hidden everywhere, the longest first


def is_secret(name: str, value: str) -> bool:
    """Whether the value of a variable or option is hidden where its name stands."""
    if not (_mentions(name) or name.lower().endswith(_SECRET_ENDS) or _names_key(name)):
        return False
    if value.strip().lower() in _NO_SECRETS or ("credential" in name.lower() and _is_file(value)):
        return False
    certain = _is_certain(name)
    return _looks_random(value) and not _is_file(value) if certain is None else certain


def learn(variables: Mapping[str, str]) -> None:
    """Take note of the secrets among variables, and among those that they hold in turn."""
    found = set(_known)
    for name, value in variables.items():
        if is_secret(name, value):
            found.add(value)
        elif _mentions(value):
            pairs = ((_name(pair), pair[_group(pair)]) for pair in _pairs().finditer(value))
            found.update(word for name, word in pairs if is_secret(name, word))
    written = {json.dumps(value)[1:-1] for value in found}
    _known[:] = sorted(filter(_is_telling, found | written), key=len, reverse=True)


def text(said: str) -> str:
    """Return a text without secrets: known ones, those that it names itself, and tokens of a known form."""
    for secret in _known:
        if secret not in said:
            continue
        # A word of letters may be a part of others.
        said = re.sub(rf"(?<!\w){secret}(?!\w)", MASK, said) if secret.isalpha() else said.replace(secret, MASK)
    if _mentions(said):
        said = _pairs().sub(_masked_pair, said)
    if any(hint in said for hint in _HINTS):
        said = _forms().sub(MASK, said)
    return said


def arguments(argv: Iterable[str]) -> list[str]:
    """Return argv with the values of options and variables named like secrets masked."""
    shown: list[str] = []
    option = ""  # the word before, where it is one
    for word in argv:
        name, equals, value = word.partition("=")
        if option and is_secret(option, word):
            shown.append(MASK)
        elif equals and is_secret(name, value):
            shown.append(f"{name}={MASK}")
        else:
            shown.append(text(word))
        option = "" if option or equals or not word.startswith("-") else word
    return shown


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the values of those named like secrets masked, wherever they are repeated."""
    learn(variables)
    return {name: MASK if is_secret(name, value) else _inside(value) for name, value in variables.items()}


def anything(value: Any) -> Any:
    """Return what JSON can hold with the secrets in it masked."""
    if isinstance(value, dict):
        return {key: MASK if _is_secret_item(key, item) else anything(item) for key, item in value.items()}
    if isinstance(value, list):
        return arguments(value) if all(isinstance(item, str) for item in value) else [anything(item) for item in value]
    return _inside(value) if isinstance(value, str) else value


def _is_secret_item(key: str, item: Any) -> bool:
    """Whether an item of a JSON object is hidden: a number too, where the name is that of a secret."""
    return is_secret(key, item if isinstance(item, str) else json.dumps(item) if item else "")


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
    group = _group(pair)
    if not is_secret(_name(pair), pair[group]):
        return pair[0].replace(pair["words"], text(pair["words"])) if pair["words"] else pair[0]
    start, end = (place - pair.start() for place in pair.span(group))
    return pair[0][:start] + MASK + pair[0][end:]


def _name(pair: re.Match[str]) -> str:
    return pair["key"] or pair["quoted"] or pair["name"] or pair["option"]


def _group(pair: re.Match[str]) -> str:
    return next(group for group in _VALUES if pair[group] is not None)


def _is_certain(name: str) -> bool | None:
    """Whether the value of this name is a secret; None if the value decides."""
    words = _words(name)
    last, before = ["", "", *words][-1], ["", *words][-2]
    if last in _table()["tells_of"]:
        return False
    if last.endswith("token"):
        return None if before in _table()["counted"] else True
    if last == "key" and before in _table()["key_of"]:
        return False
    joined = "_".join(words)
    if last in ("pwd", "pass") or last.endswith("auth") or any(word in joined for word in (*_CERTAIN, *_CERTAIN_KEYS)):
        return True
    return None


def _words(name: str) -> list[str]:
    """Return the words of a name: MAX_TOKEN, max-token and maxToken have two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word for word in parted.lower().replace("-", "_").replace(".", "_").split("_") if word]


def _names_key(name: str) -> bool:
    return name.lower().lstrip("-") == "key" or name.lower().endswith(_KEY_ENDS)


def _mentions(said: str) -> bool:
    lowered = said.lower()
    if "authorization" in lowered:
        return True
    for harmless in _HARMLESS:
        lowered = lowered.replace(harmless, "")
    return any(word in lowered for word in _SECRET)


def _looks_random(value: str) -> bool:
    """Whether a value has letters and digits, and is long enough: nobody has chosen it for its meaning."""
    kinds = any(character.isdigit() for character in value), any(character.isalpha() for character in value)
    return all(kinds) and len(value) >= _SHORTEST_RANDOM and not any(character.isspace() for character in value)


def _is_file(value: str) -> bool:
    """Whether a value is the path of a file with an ending."""
    directory, slash, name = value.rpartition("/")
    return bool(slash) and directory[:1] in ("", "/", "~", ".") and "." in name


def _is_telling(value: str) -> bool:
    """Whether a secret's value is hidden everywhere: it stands nowhere by chance."""
    plain = value.strip().lower()
    if len(plain) < _SHORTEST or plain in _table()["common"]:
        return False
    digits = plain.replace(".", "", 1).lstrip("+-")
    return not digits.isdecimal() or len(digits) > _LONGEST_CHANCE


@cache
def _table() -> dict[str, list[str]]:
    """The table of what only looks like a secret; most jobs do without it."""
    from shoal_toolkit.tables import read_table

    return read_table("redaction")


@cache
def _pairs() -> re.Pattern[str]:
    return re.compile(_PAIR)


@cache
def _forms() -> re.Pattern[str]:
    return re.compile("|".join(_FORMS))
