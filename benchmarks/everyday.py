"""The imports and commands of published training scripts that our images lack: `make bench-everyday`.

data/everyday.json has the counts of import statements and commands in five repositories, and the commits.
data/everyday.yml has the rules: the scripts, and the modules and commands that are specific to another framework. Each
image imports the rest, and looks for the commands. The standard library counts too; `…-packages` is without it, and
without the image's own framework. The everyday packages of the image follow, by uses per MiB.
`--repository NAME=PATH[@COMMIT]` counts again: PATH is a git repository, and COMMIT is HEAD by default.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from everyday_scripts import Needs, measure, read_rules, read_scripts, resolve_commit
from report import Figure, finish, make_parser, print_machine

from shoal import docker_client
from shoal.image import facts
from shoal.matrix import project
from shoal.matrix.spec import BuildSpec, ImageSpec, load
from shoal.sources import lock

DATA = Path(__file__).with_name("data") / "everyday.json"
_PROBE = Path(__file__).with_name("everyday_probe.py")
IMAGES = ("pytorch-*-2.0.1-*-cu117-debian12", "pytorch-*-2.13.0-*-debian12", "tensorflow-*-debian12")
GOAL, MOST_MIB = 5.0, 250.0
MIB = 1024**2
_SHOWN = 12


@dataclass(frozen=True)
class Coverage:
    """The names that scripts of its framework use and an image lacks, each with its number of uses."""

    uses: int
    lacking: Mapping[str, int]
    packages: int
    """Uses of packages: without commands, the standard library, and the framework itself."""
    everyday: Mapping[str, tuple[float, int]]
    """The image's everyday packages: the MiB of each, and how many statements import it."""

    def lacking_share(self) -> float:
        return 100 * sum(self.lacking.values()) / self.uses

    def lacking_packages_share(self, needs: Needs) -> float:
        lacking = sum(count for name, count in self.lacking.items() if name in needs.imports)
        return 100 * lacking / self.packages


def read_counts() -> tuple[list[dict[str, Any]], dict[str, Needs]]:
    """Return the committed counts: the sources, and the needs of their scripts by framework."""
    document = json.loads(DATA.read_text())
    needs = {
        name: Needs(entry["scripts"], Counter(entry["imports"]), Counter(entry["commands"]))
        for name, entry in document["frameworks"].items()
    }
    return document["sources"], needs


def count_again(repositories: Sequence[str], rules: Mapping[str, Any]) -> None:
    """Count the scripts of repositories, given as NAME=PATH[@COMMIT], and write data/everyday.json."""
    sources, total = [], {name: Needs() for name in rules["frameworks"]}
    for word in repositories:
        name, _, place = word.partition("=")
        path, _, commit = place.partition("@")
        commit = resolve_commit(Path(path), commit or "HEAD")
        found = measure(read_scripts(Path(path), commit, rules["sources"][name]), rules)
        sources.append({"repository": name, "commit": commit, "scripts": sum(need.scripts for need in found.values())})
        for framework, need in found.items():
            total[framework].add(need)
    document = {
        "sources": sources,
        "frameworks": {
            name: {
                "scripts": need.scripts,
                "imports": dict(sorted(need.imports.items())),
                "commands": dict(sorted(need.commands.items())),
            }
            for name, need in total.items()
        },
    }
    DATA.write_text(json.dumps(document, indent=1) + "\n")


def list_specific(rules: Mapping[str, Any], framework: str) -> dict[str, str]:
    """Return the names that images of a framework need not have, each with the reason."""
    entries = [entry for entry in rules["specific"] if entry.get("framework") != framework]
    return {name: entry["reason"] for entry in entries for name in entry["names"]}


def find_reason(name: str, specific: Mapping[str, str]) -> str | None:
    """Return why an image need not have a module or command; None if it must."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((specific[prefix] for prefix in prefixes if prefix in specific), None)


def keep_general(needs: Needs, specific: Mapping[str, str]) -> Needs:
    """Return the needs without what is specific to another framework."""
    imports, commands = (
        Counter({name: count for name, count in counts.items() if find_reason(name, specific) is None})
        for counts in (needs.imports, needs.commands)
    )
    return Needs(needs.scripts, imports, commands)


def ask_image(image: ImageSpec, needs: Needs, everyday: Sequence[str]) -> Coverage:
    """Import the modules in a container of the image, and look for the commands. everyday: its everyday packages."""
    call = f"main({[*needs.imports]!r}, {[*needs.commands]!r}, {[*everyday]!r})"
    with NamedTemporaryFile("w", suffix=".py") as file:
        file.write(f"{_PROBE.read_text()}\n{call}\n")
        file.flush()
        found = facts.run_probe(docker_client.connect(), image.tag, Path(file.name))
    lacking = Counter({name: needs.imports[name] for name in found["modules"]})
    lacking.update({name: needs.commands[name] for name in found["commands"]})
    own = {*sys.stdlib_module_names, {"pytorch": "torch"}.get(image.framework, image.framework)}
    tops = Counter[str]()
    for name, count in needs.imports.items():
        tops[name.partition(".")[0]] += count
    packages = sum(count for top, count in tops.items() if top not in own)
    sizes = {
        name: (about["bytes"] / MIB, sum(tops[module] for module in about["modules"]))
        for name, about in found["distributions"].items()
    }
    return Coverage(needs.imports.total() + needs.commands.total(), lacking, packages, sizes)


def describe_scripts(
    sources: Sequence[Mapping[str, Any]], needs: Mapping[str, Needs], rules: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the table of the counts."""
    for source in sources:
        yield f"{source['repository']:32} {source['commit'][:12]} {source['scripts']:4} scripts"
    for framework, need in needs.items():
        specific = list_specific(rules, framework)
        yield (
            f"{framework}: {need.scripts} scripts, {need.imports.total()} import statements,"
            f" {need.commands.total()} commands"
        )
        left_out: Counter[str] = Counter()
        for name, count in (need.imports + need.commands).items():
            if reason := find_reason(name, specific):
                left_out[reason] += count
        for reason, count in left_out.most_common():
            yield f"{count:6}  left out: {reason}"
        tops: Counter[str] = Counter()
        for name, count in keep_general(need, specific).imports.items():
            if (top := name.partition(".")[0]) not in sys.stdlib_module_names:
                tops[top] += count
        yield "        packages: " + ", ".join(f"{name} {count}" for name, count in tops.most_common(3 * _SHOWN))


def measure_image(
    here: project.Project, matrix: BuildSpec, image: ImageSpec, needs: Mapping[str, Needs], rules: Mapping[str, Any]
) -> Iterator[Figure]:
    """Print what an image lacks and its everyday packages, and yield its figures."""
    general = keep_general(needs[image.framework], list_specific(rules, image.framework))
    everyday = [pin.name for pin in lock.read_image_pins(here, matrix, image)["everyday"]]
    found = ask_image(image, general, everyday)
    print(f"{image.tag}: lacks {sum(found.lacking.values())} of {found.uses} uses")
    rows = Counter(found.lacking).most_common(_SHOWN)
    print(
        "        "
        + ", ".join(f"{name} {count}" for name, count in rows)
        + (", …" if len(found.lacking) > _SHOWN else "")
    )
    for name, (size, uses) in sorted(found.everyday.items(), key=lambda item: -item[1][1] / item[1][0]):
        print(f"{size:8.1f} MiB {uses:4} uses  {name}")
    total = sum(size for size, _ in found.everyday.values())
    yield Figure(f"everyday-size-{image.directory}", total, "MiB", goal=MOST_MIB)
    yield Figure(f"everyday-lacking-{image.directory}", found.lacking_share(), "%", goal=GOAL)
    yield Figure(f"everyday-lacking-{image.directory}-packages", found.lacking_packages_share(general), "%")


def main(arguments: Sequence[str]) -> int:
    """Print the counts, ask the images, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--repository", action="append", default=[], metavar="NAME=PATH[@COMMIT]", help="count again")
    parser.add_argument("--image", action="append", metavar="TAG", help="ask these images (default: the default ones)")
    options = parser.parse_args(arguments)
    rules = read_rules()
    if options.repository:
        count_again(options.repository, rules)
    sources, needs = read_counts()
    print("\n".join(describe_scripts(sources, needs, rules)))
    print_machine()
    here = project.find(Path.cwd())
    matrix = load(here.buildspec)
    images = matrix.choose(options.image or IMAGES)
    return finish([figure for image in images for figure in measure_image(here, matrix, image, needs, rules)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
