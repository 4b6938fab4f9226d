"""Checks prose against the project's Vale style, in `styles/Shoal`, and prints one line per finding.

It reads Markdown, docstrings, comments, strings that users see, and comments of C, shell, templates and data files.
It runs the style's rules itself: the package `vale` on PyPI downloads its program from GitHub when it first starts,
which fails behind a firewall. The rules keep Vale's format, so that Vale and editors with it can run them too.

Examples:
    scripts/prose.py docs images/shoal   # these paths
    scripts/prose.py                     # the paths in styles/checked.txt, as `make check` does
    scripts/prose.py --count toolkit     # how many findings per rule
"""

from __future__ import annotations

import argparse
import ast
import configparser
import fnmatch
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex
import tomllib
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
STYLE, SETTINGS, CHECKED = ROOT / "styles" / "Shoal", ROOT / ".vale.ini", ROOT / "styles" / "checked.txt"
PROSE_WORDS = 4
"""A string with this many lowercase words is prose, not data."""

_NOISE = regex.compile(r"<!--.*?-->|https?://\S+|\]\([^)\n]*\)", regex.DOTALL)
_CODE = regex.compile(
    r"``.+?``|`[^`]+`"
    r"|(?<![\w-])--?[a-zA-Z][\w-]*(?:[= ]?<[^>]+>|=\S+)?"  # --option=value
    r"|\$?\{[^}\n]*\}|<[^>\n]+>"  # {name}, <name>
    r"|(?<!\w)[\w.~-]*[/\\][\w./*\\-]+"  # a path
    r"|\w+(?:[._:=@-]+\w+)*(?:\.[a-z]\w+|_\w+|::\w+|=\w+|\(\))[\w.]*(?:\([^)\n]*\))?"  # a.b, a_b, a=b, a()
    r"|%[a-z]\b|\\n",
    regex.DOTALL,
)
_WORD = regex.compile(r"(?<![\w-])[a-z]{2,}(?![\w-])")
_SENTENCE_END = regex.compile(r"[.!?…](?=[\"'”)*_]*\s+[\"'“(*_\[]*[\p{Lu}\dX])|[.!?…](?=[\"'”)*_]*\s*$)")
_ABBREVIATION = regex.compile(r"(?:e\.g|i\.e|etc|vs|cf|approx|No|St|Dr)\.$")
_BLOCK = regex.compile(
    r"\n\s*\n"  # a blank line
    r"|\n(?=\s*(?:[-*+•] |\d+\. |#+ |>|[^\n]*\|[^\n]*\|))"  # a list item, heading or table row
    r"|\n(?=\s*\*{0,2}\w[\w.*, ]*(?:\([^)\n]*\))?: )"  # `name: text` of a docstring's section
    r"|(?<=:)\n(?=\s)|(?<=^\s*(?:Args|Returns|Raises|Yields|Example|Examples|Note):)\n"
    r"|(?<=[-*+] |\|)\n|(?<!\\)\|"  # cells of a table
)
_FENCE = regex.compile(r"^([ \t]*)(```+|~~~+).*?^\1\2[ \t]*$", regex.DOTALL | regex.MULTILINE)
_CODE_STRING = regex.compile(
    r"(?m)^\s*(?:import |from \w+ import |#!|def |set -e)|=> |\$[\w({]|\bself\.|\(\?[:P<!=]|\[\^|\\[bdsw]"
)


@dataclass(frozen=True)
class Text:
    """A piece of prose in a file."""

    path: Path
    line: int
    """The line of its first character, from 1."""
    content: str
    exact: bool = True
    """Whether the content has the line breaks of the file."""


@dataclass(frozen=True)
class Rule:
    """One rule of the style: its name, scope and pattern."""

    name: str
    scope: str
    pattern: regex.Pattern[str]
    message: Callable[[str], str]
    limit: int | None = None
    """How often the pattern may occur in one sentence; None: never."""


def read_rules(style: Path = STYLE) -> list[Rule]:
    """Reads the rules in the style's directory.

    Args:
        style: A directory with one YAML file per rule.

    Returns:
        The rules. Each pair of a substitution is a rule.

    Raises:
        SystemExit: If a rule has a type other than existence, substitution and occurrence.
    """
    rules: list[Rule] = []
    for path in sorted(style.glob("*.yml")):
        rule = YAML(typ="safe").load(path)
        flags = regex.IGNORECASE if rule.get("ignorecase") else 0
        name = f"{style.name}.{path.stem}"
        if rule["extends"] == "occurrence":
            limit = int(rule["max"])
            rules.append(Rule(name, rule["scope"], regex.compile(rule["token"], flags), _say(rule["message"]), limit))
        elif rule["extends"] == "existence":
            pattern = _join(rule["tokens"], bool(rule.get("nonword")))
            rules.append(
                Rule(name, rule["scope"], regex.compile(pattern, flags | regex.MULTILINE), _say(rule["message"]))
            )
        elif rule["extends"] == "substitution":
            for wrong, right in rule["swap"].items():
                message = _say(rule["message"], str(right))
                rules.append(Rule(name, rule["scope"], regex.compile(_join([wrong], False), flags), message))
        else:
            raise SystemExit(f"{path}: unsupported rule type {rule['extends']!r}: existence, substitution, occurrence")
    return rules


def _join(tokens: Iterable[str], nonword: bool) -> str:
    if nonword:
        return "|".join(tokens)
    return "|".join(rf"(?:\b|(?<!\w)(?=\W)){f'(?:{each})'}(?:\b|(?<=\W))" for each in tokens)


def _say(message: str, *replacement: str) -> Callable[[str], str]:
    def text(found: str) -> str:
        result = message
        for value in (*replacement, found):
            result = result.replace("%s", value, 1)
        return result

    return text


def disabled_rules(path: Path, settings: Path = SETTINGS) -> set[str]:
    """Returns the rules that a section of `.vale.ini` switches off for a path."""
    parser = configparser.ConfigParser(strict=True)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string("[top]\n" + settings.read_text())
    return {
        rule
        for section in parser.sections()
        if fnmatch.fnmatch(path.as_posix(), section)
        for rule, value in parser[section].items()
        if value == "NO"
    }


# Extraction: the prose of each kind of file.


def extract(path: Path) -> Iterator[Text]:
    """Yields the prose of a file: all of Markdown; elsewhere comments, docstrings and strings that are prose."""
    content = path.read_text(errors="replace")
    kind = path.suffix or path.name
    if kind == ".md":
        yield Text(path, 1, content)
    elif kind == ".py":
        yield from _of_python(path, content)
    elif kind in (".c", ".h"):
        yield from _of_c(path, content)
    elif kind == ".json":
        yield from (Text(path, _line_of(content, each), each, False) for each in _strings(json.loads(content)))
    elif kind == ".toml":
        yield from _of_comments(path, content)
        yield from (Text(path, _line_of(content, each), each, False) for each in _strings(tomllib.loads(content)))
    elif kind == ".j2":
        yield from _of_comments(path, content)
        for found in regex.finditer(r"\{#-?(.*?)-?#\}", content, regex.DOTALL):
            yield Text(path, content.count("\n", 0, found.start()) + 1, found[1])
    else:
        yield from _of_comments(path, content)


def _of_python(path: Path, content: str) -> Iterator[Text]:
    nodes = list(ast.walk(ast.parse(content)))
    docstrings = {id(node.value): node.value for node in nodes if isinstance(node, ast.Expr) and _is_string(node.value)}
    yield from (Text(path, each.lineno, _without_examples(_flat(each))) for each in docstrings.values())
    formatted = [node for node in nodes if isinstance(node, ast.JoinedStr)]
    patterns = [node for node in nodes if isinstance(node, ast.Call) and _is_pattern(node)]
    known = {id(part) for node in (*formatted, *patterns) for part in ast.walk(node)} | docstrings.keys()
    strings = [node for node in nodes if isinstance(node, ast.expr) and _is_string(node) and id(node) not in known]
    for node in (*formatted, *strings):
        if _is_prose(text := _flat(node)):
            yield Text(path, node.lineno, text, False)
    yield from _of_python_comments(path, content)


def _without_examples(docstring: str) -> str:
    """The docstring with blanks in place of paragraphs that are indented as code. Line breaks stay."""
    lines = docstring.split("\n")
    base = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    paragraphs = regex.split(r"(\n[ \t]*(?=\n))", docstring)
    code = [bool(regex.match(rf"\n {{{base + 4},}}\S", each)) for each in paragraphs]
    return "".join(regex.sub(r"[^\n]", " ", each) if skip else each for each, skip in zip(paragraphs, code))


def _is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_pattern(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Attribute) and node.func.attr in ("compile", "getLogger", "run_path")


def _flat(node: ast.expr) -> str:
    """The text of a string, with a word in place of each value of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(each.value) if isinstance(each, ast.Constant) else "`x`" for each in node.values)
    assert isinstance(node, ast.Constant)
    return str(node.value)


def _is_prose(text: str) -> bool:
    if _CODE_STRING.search(text):
        return False
    masked = _mask(text)
    words = _WORD.findall(masked)
    return len(words) >= PROSE_WORDS and sum(map(len, words)) >= 0.5 * len("".join(masked.split()))


def _of_python_comments(path: Path, content: str) -> Iterator[Text]:
    comments = [
        (token.start[0], token.start[1], token.string)
        for token in tokenize.generate_tokens(io.StringIO(content).readline)
        if token.type == tokenize.COMMENT
    ]
    yield from _joined(path, comments)


def _of_comments(path: Path, content: str) -> Iterator[Text]:
    """Comments that begin with `#`, after white space or at a line's start."""
    comments = []
    for number, line in enumerate(content.splitlines(), 1):
        found = regex.search(r"(?:^|\s)(#+[ \t].*)$", line)
        if found and not regex.match(r"\s*#!", line) and line.count('"', 0, found.start(1)) % 2 == 0:
            comments.append((number, found.start(1), found[1]))
    yield from _joined(path, comments)


def _joined(path: Path, comments: list[tuple[int, int, str]]) -> Iterator[Text]:
    """Comments of the same column in lines that follow each other are one text."""
    start, last, column, lines = 0, -1, -1, list[str]()
    for number, place, comment in [*comments, (-9, -9, "")]:
        text = regex.sub(r"^#+:? ?|\s*(?:#\s*)?(?:noqa|type: ignore|pragma|ruff:|mypy:).*$", "", comment)
        if number == last + 1 and place == column:
            lines.append(text)
        else:
            if lines:
                yield Text(path, start, "\n".join(lines))
            start, column, lines = number, place, [text]
        last = number


def _of_c(path: Path, content: str) -> Iterator[Text]:
    for found in regex.finditer(r'/\*(.*?)\*/|//([^\n]*)|"((?:[^"\\\n]|\\.)*)"', content, regex.DOTALL):
        line = content.count("\n", 0, found.start()) + 1
        if found[3] is not None:
            if _is_prose(found[3]):
                yield Text(path, line, found[3], False)
        else:
            yield Text(path, line, regex.sub(r"(?m)^\s*\*+ ?", " ", found[1] or found[2]))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if _is_prose(value):
            yield value
    elif isinstance(value, dict):
        for key, each in value.items():
            if key not in ("pattern", "patterns", "regex"):
                yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _line_of(content: str, text: str) -> int:
    for start in (text[:40], text.splitlines()[0][:20], text.split()[0]):
        if (at := content.find(start)) >= 0:
            return content.count("\n", 0, at) + 1
    return 1


def _blank(found: regex.Match[str]) -> str:
    return str(regex.sub(r"[^\n]", " ", found[0]))


def _mask(text: str) -> str:
    """The text with a made-up word of the same length for each piece of code, and blanks for code blocks and URLs."""
    text = _NOISE.sub(_blank, _FENCE.sub(_blank, text))
    return str(_CODE.sub(lambda found: regex.sub(r"\S", "X", found[0].replace(" ", "X").replace("\n", " ")), text))


# Checking.


@dataclass(frozen=True)
class Finding:
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def check(texts: Iterable[Text], rules: list[Rule]) -> Iterator[Finding]:
    """Yields the findings in texts of one file."""
    for text in texts:
        masked = _mask(text.content)
        disabled = disabled_rules(text.path) if text.path.suffix == ".md" else set()
        for rule in rules:
            if rule.name in disabled:
                continue
            for at, found in _matches(rule, text, masked):
                line = text.line + (text.content.count("\n", 0, at) if text.exact else 0)
                message = rule.message(" ".join(found.split()))
                yield Finding(text.path, line, rule.name, message if rule.limit is None else f"{message} ({found}…)")


def _matches(rule: Rule, text: Text, masked: str) -> Iterator[tuple[int, str]]:
    if rule.scope == "raw":
        yield from ((each.start(), each[0]) for each in rule.pattern.finditer(text.content))
        return
    for start, block in _blocks(masked):
        if rule.limit is None:
            yield from ((start + each.start(), each[0]) for each in rule.pattern.finditer(block))
            continue
        for at, sentence in _sentences(block):
            if len(rule.pattern.findall(sentence)) > rule.limit:
                first = start + at + len(sentence) - len(sentence.lstrip())
                yield first, " ".join(text.content[first : first + 60].split())


def _blocks(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items, headings and cells, with line breaks as blanks."""
    last = 0
    for found in [*_BLOCK.finditer(text), None]:
        end = found.start() if found else len(text)
        yield last, text[last:end].replace("\n", " ")
        last = found.end() if found else end


def _sentences(block: str) -> Iterator[tuple[int, str]]:
    last = 0
    for found in _SENTENCE_END.finditer(block):
        if not _ABBREVIATION.search(block[max(0, found.end() - 8) : found.end()]):
            yield last, block[last : found.end()]
            last = found.end()
    yield last, block[last:]


def files_under(paths: Iterable[str]) -> list[Path]:
    """Returns the files of the given paths that git tracks or would add, without generated and binary ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "--", *paths],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    return sorted(Path(name) for name in set(listed) if _has_prose(Path(name)))


def _has_prose(path: Path) -> bool:
    suffixes = {".md", ".py", ".c", ".h", ".sh", ".j2", ".yml", ".yaml", ".toml", ".ini", ".cfg"}
    data = path.suffix == ".json" and "data" in path.parts
    named = path.name in ("Makefile", "Dockerfile", "shoal", "run")
    excluded = {"rendered", "schema", "requirements", "styles"} & {*path.parts[:-1]}
    return path.is_file() and not excluded and (path.suffix in suffixes or data or named)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", help="files or directories; default: those in styles/checked.txt")
    parser.add_argument("--count", action="store_true", help="print the number of findings per rule and per file")
    options = parser.parse_args()
    paths = options.paths or [
        line for line in CHECKED.read_text().splitlines() if line.strip() and not line.startswith("#")
    ]
    rules, files = read_rules(), files_under(paths)
    if not files:
        sys.exit(f"prose: no files with prose under {' '.join(paths)}. Fix: name files that git knows.")
    findings = sorted(
        {*check((text for path in files for text in extract(path)), rules)},
        key=lambda each: (each.path, each.line, each.rule, each.message),
    )
    if options.count:
        for of in (Counter(each.rule for each in findings), Counter(str(each.path) for each in findings)):
            print(*(f"{count:6} {name}" for name, count in of.most_common()), sep="\n")
    else:
        print(*findings, sep="\n")
    print(f"prose: {len(findings)} findings in {len(files)} files", file=sys.stderr)
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
