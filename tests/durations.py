"""The end of each run: the minutes of each group of tests, and the slowest tests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import pytest

SLOWEST = 20


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    if blocks := count_blocks(report for report in reports if isinstance(report, pytest.TestReport)):
        terminalreporter.section("blocks of code in pages")
        terminalreporter.write_line(", ".join(f"{count} {level}" for level, count in sorted(blocks.items())))
    terminalreporter.section("where the time went")
    for line in profile(report for report in reports if isinstance(report, pytest.TestReport)):
        terminalreporter.write_line(line)


def count_blocks(reports: Iterable[pytest.TestReport]) -> Counter[str]:
    """Returns how many commands and Python blocks of pages were executed at each level (tests/docs/test_blocks.py)."""
    counts: Counter[str] = Counter()
    for report in reports:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "blocks" and isinstance(value, dict):
                counts.update(value)
    return counts


def profile(reports: Iterable[pytest.TestReport]) -> Iterator[str]:
    """Yield a line for each group, and for each of the slowest tests; set-up and tear-down count."""
    tests: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        tests[report.nodeid.partition("@")[0]] += report.duration  # behind the @: pytest-xdist's group
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for test, seconds in tests.items():
        groups["/".join(test.partition("::")[0].split("/")[:2])].append(seconds)
    for group, each in sorted(groups.items(), key=lambda row: -sum(row[1])):
        yield f"{sum(each) / 60:6.1f} min  {group}: {len(each):,} tests, summed over the workers"
    for test, seconds in sorted(tests.items(), key=lambda row: -row[1])[:SLOWEST]:
        yield f"{seconds:6.1f} s    {test}"
